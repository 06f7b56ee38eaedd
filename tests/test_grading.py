"""Submissions of data tasks get figures equal to scikit-learn's; whatever an agent writes is a grade, never a crash."""

import tracemalloc

import numpy as np
import pytest

import train
from agents import AnswerKey, InputError, Problem
from judge import CEILINGS, Grade, Verdict, ceiling_of, grade_submission, grade_workspace, quality_of
from rollout import Action, Episode

ROW_IDS = [str(i) for i in range(100, 112)]


def csv_of(header, rows):
    """A CSV file as bytes."""
    lines = [header, *(",".join(str(cell) for cell in row) for row in rows)]
    return "\n".join(lines).encode() + b"\n"


def task(kind, truth, targets=("y",)):
    """A data task whose rows have the ids 100, 101, ...; truth: one value a row, or a tuple of one a target."""
    rows = []
    for row_id, values in enumerate(truth, 100):
        rows.append((row_id, *values) if isinstance(values, tuple) else (row_id, values))
    answers = csv_of(",".join(["id", *targets]), rows)
    return Problem("p", "?", kind=kind, answer_key=AnswerKey("id", targets, answers))


def submit(values, ids=ROW_IDS):
    """A submission of these predictions."""
    return csv_of("id,y", zip(ids, values, strict=True))


NUMBERS = task("regression", [float(i) for i in range(12)])
BINARY = task("classification", [0, 1] * 6)
LABELS = task("classification", ["low", "mid", "high"] * 4)


# ---- Valid submissions -----------------------------------------------------------------------------------------------


def test_a_right_submission_in_any_order_of_rows_and_columns():
    """Rows are joined on the id; the official code scores by row position and cuts to the shorter file."""
    shuffled = csv_of("y,id", [(i, 100 + i) for i in reversed(range(12))])
    metrics = dict(rmse=0.0, mae=0.0, rmse_range=0.0)
    assert grade_submission(shuffled, NUMBERS) == Grade(True, 1.0, "", metrics, answer=None, ceiling=10)
    by_position = submit(range(12), ROW_IDS[::-1])
    assert grade_submission(by_position, NUMBERS).metrics["rmse"] > 5


def test_the_figures_of_a_submission_by_hand():
    """Every prediction is 3 too high, on a range of 11; and 11 of 12 labels are right."""
    grade = grade_submission(submit([i + 3 for i in range(12)]), NUMBERS)
    assert grade.metrics == pytest.approx(dict(rmse=3, mae=3, rmse_range=300 / 11))
    assert grade.correct
    assert grade.reason == ""
    assert grade.quality == pytest.approx(1 - 6 / 11)
    assert grade.ceiling == 4
    grade = grade_submission(submit(["low", "mid", "low"] + ["low", "mid", "high"] * 3), LABELS)
    assert grade.metrics["accuracy"] == pytest.approx(11 / 12)
    assert grade.quality == grade.metrics["accuracy"]
    assert grade.ceiling == 10


def test_the_quality_and_the_ceiling_of_a_submission_by_hand():
    """A quality lies in [0, 1], and the bounds of the ceilings belong to the lower one."""
    assert quality_of({"accuracy": 0.8, "f1": 0.1}) == 0.8
    assert quality_of({"rmse": 1e9, "rmse_range": 10.0}) == pytest.approx(0.8)
    assert quality_of({"rmse_range": 0.0}) == 1
    assert quality_of({"rmse_range": 50.0}) == quality_of({"rmse_range": 1e50}) == 0
    assert [ceiling_of(bound) for bound in CEILINGS] == [2, 3, 4, 6, 8, 10]
    assert [ceiling_of(quality) for quality in (0, 1e-9, 0.41, 0.51, 0.61, 0.71)] == [2, 3, 4, 6, 8, 10]


def test_what_pandas_and_spreadsheets_write_is_accepted():
    """A byte-order mark, CRLF, ids as 100.0 (pandas, where one was missing), spaces and blank lines do no harm."""
    rows = [f"{row_id}.0, {i}\r\n" for i, row_id in enumerate(ROW_IDS)]
    text = "\ufeffid , y\r\n" + "".join(rows) + "\r\n"
    assert grade_submission(text.encode(), NUMBERS).metrics["rmse"] == 0


def test_labels_and_probabilities_of_two_classes():
    """Tasks that ask for ROC-AUC get probabilities: accuracy and F1 count what lies above the middle."""
    sure = grade_submission(submit([0.2, 0.7] * 6), BINARY)
    assert sure.metrics == dict(accuracy=1.0, f1=1.0, roc_auc=1.0)
    assert grade_submission(submit([0.5] * 12), BINARY).metrics == dict(accuracy=0.5, f1=0.0, roc_auc=0.5)
    boolean = task("classification", ["False", "True"] * 6)
    assert grade_submission(submit(["False", "True"] * 6), boolean).metrics["accuracy"] == 1
    assert grade_submission(submit([0.1, 0.9] * 6), boolean).metrics["roc_auc"] == 1
    words = grade_submission(submit(["no", "yes"] * 6), task("classification", ["no", "yes"] * 6))
    assert words.metrics == dict(accuracy=1.0, f1=1.0, roc_auc=1.0)
    assert "not a finite number" in grade_submission(submit(["no", "yes"] * 6), BINARY).reason


def test_targets_are_averaged_over_what_all_of_them_have():
    """ROC-AUC needs two classes: with a target of three beside it there is none, and the rest are means."""
    truth = [("a", "x"), ("b", "y"), ("a", "z"), ("b", "x")]
    both = task("classification", truth, ("y", "z"))
    said = [("a", "x"), ("b", "y"), ("b", "z"), ("b", "x")]
    data = csv_of("z,id,y", [(z, row_id, y) for row_id, (y, z) in enumerate(said, 100)])
    grade = grade_submission(data, both)
    assert grade.metrics == pytest.approx(dict(accuracy=(3 / 4 + 1) / 2, f1=(4 / 5 + 1) / 2))


IDS = [  # true ids, submitted ids, are they the same?
    (["0001", "0002"], ["1", "2"], True),
    (["1", "2"], ["0001", "0002"], True),
    (["0.50", "0.75"], ["0.5", "0.750"], True),
    (["7", "-8"], ["7.0", "-8.00"], True),
    (["12345678901234567890", "12345678901234567891"], ["12345678901234567890", "12345678901234567891"], True),
    (["12345678901234567890", "12345678901234567891"], ["12345678901234567890", "12345678901234567892"], False),
    (["1", "01"], ["1", "01"], True),  # different texts of one number: here texts count
    (["1", "01"], ["01", "001"], False),
    (["a1", "2"], ["a1", "02"], False),  # not all true ids are numbers
    (["1", "2"], ["1", "1.0"], False),  # twice the same
]


@pytest.mark.parametrize("true_ids, said, same", IDS)
def test_ids_are_compared_as_numbers_where_both_are(true_ids, said, same):
    """Symptom: pandas reads 0001 as 1: a right submission is invalid. Guard: ids are numbers if all true ones are."""
    answers = csv_of("id,y", zip(true_ids, (3.0, 4.0), strict=True))
    problem = Problem("p", "?", kind="regression", answer_key=AnswerKey("id", ("y",), answers))
    grade = grade_submission(submit([3, 4], said), problem)
    assert grade.correct is same
    assert not same or grade.metrics["rmse"] == 0


@pytest.mark.parametrize("values", [[0.1, 0.9] * 6, [0, 1] * 6, ["No", "Yes"] * 6, ["n", "y"] * 6])
def test_labels_that_are_words_are_not_matched_by_anything_else(values):
    """Symptom: probabilities for yes and no are valid, with an accuracy of 0. Guard: the reason names a label."""
    grade = grade_submission(submit(values), task("classification", ["no", "yes"] * 6))
    assert not grade.correct
    assert "no prediction is a label, such as 'no'" in grade.reason


def test_targets_of_which_one_is_never_true():
    """One-hot targets: a class without an example is all 0, and sure, right probabilities are right in it as well."""
    truth = [(1, 0, 0), (0, 1, 0)] * 6
    problem = task("classification", truth, ("a", "b", "c"))
    sure = [(row_id, *[0.9 if cell else 0.02 for cell in row]) for row_id, row in enumerate(truth, 100)]
    grade = grade_submission(csv_of("id,a,b,c", sure), problem)
    assert grade.metrics == dict(accuracy=1.0, f1=1.0)  # no ROC-AUC: c has one class
    unsure = [(row_id, 1 - a, 1 - b, 0.7) for row_id, a, b, _ in sure]
    assert grade_submission(csv_of("id,a,b,c", unsure), problem).metrics["accuracy"] == 0
    constant = task("classification", [0] * 12)
    assert grade_submission(submit([0.1, 0.4] * 6), constant).metrics == dict(accuracy=1.0, f1=1.0)


def test_a_constant_target_is_no_gift():
    """Symptom: RMSE 95, quality 1. Cause: nothing is divided by a range of 0. Guard: the size of the value is."""
    constant = task("regression", [5.0] * 12)
    far = grade_submission(submit([100.0] * 12), constant)
    assert far.metrics == pytest.approx(dict(rmse=95.0, mae=95.0, rmse_range=1900.0)) and far.quality == 0
    near = grade_submission(submit([5.5] * 12), constant)
    assert near.metrics["rmse_range"] == pytest.approx(10.0) and near.quality == pytest.approx(0.8)
    assert grade_submission(submit([5.0] * 12), constant).quality == 1
    assert grade_submission(submit([3.0] * 12), task("regression", [0.0] * 12)).quality == 0


# ---- Invalid ones ----------------------------------------------------------------------------------------------------

INVALID = [
    (submit(range(11), ROW_IDS[:11]), "1 ids are missing, such as '111'"),
    (submit(range(12), [*ROW_IDS[:11], "100"]), "the id '100' is used twice"),
    (submit(range(12), [*ROW_IDS[:11], "999"]), "1 ids are missing"),
    (submit(range(13), [*ROW_IDS, "999"]), "more than 12 rows"),
    (csv_of("id,z", zip(ROW_IDS, range(12), strict=True)), "its columns are id, z, they should be id, y"),
    (csv_of("id,y,z", zip(ROW_IDS, range(12), range(12), strict=True)), "its columns are"),
    (csv_of("id,y", [(row_id,) for row_id in ROW_IDS]), "line 2 has 1 values, not 2"),
    (submit(["nan", *range(11)]), "'nan' is not a finite number"),
    (submit([*range(11), "-Infinity"]), "'-Infinity' is not a finite number"),
    (submit([*range(11), "1e300"]), "'1e300' is not a finite number"),
    (submit([*range(11), "1_000"]), "'1_000' is not a finite number"),
    (submit([*range(11), "high"]), "'high' is not a finite number"),
    (submit([*range(11), ""]), "a prediction is empty"),
    (b"", "its columns are missing"),
    (b"id,y\n", "12 ids are missing"),
    (b"id,y\n1,\x002\n", "ids are missing"),
    (submit(range(12)).decode().encode("utf-16"), "codec can't decode"),
    (b'id,y\n100,"2\n3\n', "unexpected end of data"),
    (b"id,y\n100," + b"9" * 1_000_000 + b"\n", "field larger than field limit"),
    (b"id,y\n" + b"100,2\n" * 3_000_000, "is used twice"),
]


@pytest.mark.parametrize("data, why", INVALID, ids=[why for _, why in INVALID])
def test_invalid_submissions_say_why(data, why):
    """An agent writes whatever it likes: each is an invalid submission with its reason, and worth nothing."""
    grade = grade_submission(data, NUMBERS)
    assert why in grade.reason
    assert len(grade.reason) <= 300
    assert grade == Grade(False, 0.0, grade.reason, {}, answer=None, ceiling=2)


@pytest.mark.parametrize("what", ["one long label", "all labels differ"])
def test_hostile_labels_cost_the_host_little(what):
    """One label of 131,000 characters made numpy pad all others to it, gigabytes; labels that all differ cost N^2.

    Guard: labels are compared as numbers of their own, and F1 is counted for all of them at once.
    """
    rows = 20_000
    truth = ["low", "mid", "high", "top"] * (rows // 4)
    different = ["low", *(f"label {i}" for i in range(1, rows))]
    said = {"one long label": [*truth[:-1], "x" * 131_000], "all labels differ": different}
    data = submit(said[what], [str(100 + i) for i in range(rows)])
    tracemalloc.start()
    grade = grade_submission(data, task("classification", truth))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6
    assert grade.metrics["accuracy"] == pytest.approx(1 - 1 / rows if what == "one long label" else 1 / rows)


def test_a_workspace_without_a_readable_submission_says_why():
    """No file, or one that the sandbox does not hand out, is an invalid submission like any other."""

    def read_missing(name):
        raise FileNotFoundError(name)

    def read_link(name):
        raise OSError(f"{name!r} is not a plain file")

    def read_good(name):
        return {"submission.csv": submit(range(12))}[name]

    missing = grade_workspace(NUMBERS, "All done.", read_missing)
    assert missing == Grade(False, 0.0, "there is no submission.csv", ceiling=2)
    link = grade_workspace(NUMBERS, "All done.", read_link)
    assert link == Grade(False, 0.0, "submission.csv is not a plain file of at most 64 MiB", ceiling=2)
    assert grade_workspace(NUMBERS, "", read_good) == grade_submission(submit(range(12)), NUMBERS)


@pytest.mark.parametrize(
    "answers, why",
    [
        (csv_of("id,y", [(1, 1.0), (2, "")]), "a true value is missing"),
        (csv_of("id,y", [(1, 1.0), (2, "low")]), "'low' is not a finite number"),
        (csv_of("id,y", [(1, 1.0), (2, 2.0, 3.0)]), "line 3 has 3 values, not 2"),
        (csv_of("id,y", []), "there are no rows"),
        (csv_of("id,z", [(1, 1.0), (2, 2.0)]), "its columns are id, z, they should be id, y"),
        (csv_of("id,y", [(1, 1.0), (1, 2.0)]), "the id '1' is used twice"),
    ],
)
def test_answers_that_are_wrong_are_our_fault_not_the_agents(answers, why):
    """A true value that is missing stops the run: it would make every submission invalid in silence."""
    problem = Problem("p", "?", kind="regression", answer_key=AnswerKey("id", ("y",), answers))
    with pytest.raises(InputError, match=why):
        grade_submission(submit(range(12)), problem)


# ---- Compared with scikit-learn --------------------------------------------------------------------------------------


def regression_of_two_targets(rng, metrics, order):
    """A random (task, submission, its figures by scikit-learn); order: which row of the task each line is about."""
    truth, said = rng.randn(len(order), 2) * 50, rng.randn(len(order), 2) * 50
    problem = task("regression", [(repr(float(y)), repr(float(z))) for y, z in truth], ("y", "z"))
    data = csv_of("id,y,z", [(100 + row, repr(float(said[row, 0])), repr(float(said[row, 1]))) for row in order])
    rmse = [metrics.mean_squared_error(truth[:, k], said[:, k]) ** 0.5 for k in (0, 1)]
    expected = dict(
        rmse=np.mean(rmse),
        mae=metrics.mean_absolute_error(truth, said),
        rmse_range=np.mean([100 * rmse[k] / np.ptp(truth[:, k]) for k in (0, 1)]),
    )
    return problem, data, expected


def probabilities_of_two_classes(rng, metrics, order):
    """As above, with probabilities, many of which are equal."""
    truth = rng.permutation([0, 1, *rng.randint(0, 2, len(order) - 2)])
    said = np.round(rng.rand(len(order)), 1)
    expected = dict(
        accuracy=metrics.accuracy_score(truth, said > 0.5),
        f1=metrics.f1_score(truth, said > 0.5),
        roc_auc=metrics.roc_auc_score(truth, said),
    )
    return task("classification", list(truth)), csv_of("id,y", [(100 + row, said[row]) for row in order]), expected


def random_labels(rng, order, labels, strangers=()):
    """Random truth, in which every label occurs, and random predictions, among which strangers may be."""
    truth = rng.permutation([*labels, *rng.choice(labels, len(order) - len(labels))])
    said = rng.choice([*labels, *strangers], len(order))
    return truth, said, csv_of("id,y", [(100 + row, said[row]) for row in order])


def three_words(rng, metrics, order):
    truth, said, data = random_labels(rng, order, ["a", "b", "c"])
    f1 = metrics.f1_score(truth, said, average="macro")
    return task("classification", list(truth)), data, dict(accuracy=metrics.accuracy_score(truth, said), f1=f1)


def four_numbers(rng, metrics, order):
    """Labels that are numbers; now and then one is predicted that does not exist."""
    truth, said, data = random_labels(rng, order, [1, 2, 3, 7], strangers=[9])
    f1 = metrics.f1_score(truth, said, average="macro")
    return task("classification", list(truth)), data, dict(accuracy=metrics.accuracy_score(truth, said), f1=f1)


def two_words(rng, metrics, order):
    truth, said, data = random_labels(rng, order, ["no", "yes"])
    expected = dict(
        accuracy=metrics.accuracy_score(truth, said),
        f1=metrics.f1_score(truth, said, pos_label="yes"),
        roc_auc=metrics.roc_auc_score(truth == "yes", said == "yes"),
    )
    return task("classification", list(truth)), data, expected


TASKS = [regression_of_two_targets, probabilities_of_two_classes, three_words, four_numbers, two_words]


@pytest.mark.parametrize("random_task", TASKS)
def test_grading_agrees_with_scikit_learn(random_task):
    """40 random submissions to each kind of task have scikit-learn's figures, to 1e-12.

    The formulas are ours so that figures are the same wherever scikit-learn is missing.
    """
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    for seed in range(40):
        rng = np.random.RandomState(seed)
        order = rng.permutation(rng.randint(5, 60))
        problem, data, expected = random_task(rng, metrics, order)
        grade = grade_submission(data, problem)
        assert grade.reason == ""
        assert set(grade.metrics) == set(expected)
        for name, figure in expected.items():
            assert grade.metrics[name] == pytest.approx(figure, abs=1e-12, rel=1e-12), (seed, name)


# ---- Rewards ---------------------------------------------------------------------------------------------------------

OUTCOMES = [
    (Grade(True, quality_of({"accuracy": 0.8}), metrics={"accuracy": 0.8}), 0.8, True),
    (Grade(True, quality_of({"rmse_range": 10.0}), metrics={"rmse_range": 10.0}), 0.8, True),
    (Grade(True, quality_of({"rmse_range": 400.0}), metrics={"rmse_range": 400.0}), 0.0, True),
    (Grade(False, 0.0, "empty"), 0.0, False),
    (None, 0.0, False),
]


@pytest.mark.parametrize("grade, outcome, valid", OUTCOMES)
def test_outcome_rewards_are_the_quality_of_the_submission(grade, outcome, valid):
    """The control experiment pays every agent for the end result: how good a submission is, and nothing for none."""
    action = Action("Engineer", 0, [1], [2], [-1.0], False, "", verdict=Verdict(4, ""))
    episode = Episode(0, BINARY, 0, [action], last_grade=grade)
    assert episode.grade.correct is valid
    assert episode.grade.quality == pytest.approx(outcome)
    assert (episode.grade.reason == "") == valid
    rewards = {"outcome": outcome, "process": 0.4, "mixed": (outcome + 0.4) / 2}
    for kind, reward in rewards.items():
        [scored] = train.trained_actions([episode], train.Config(reward=kind))
        assert scored.reward == pytest.approx(reward)
        assert scored.weight == 1
