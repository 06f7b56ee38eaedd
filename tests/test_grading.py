"""Submissions of data tasks: figures equal to scikit-learn's, and whatever an agent writes is a grade, never a crash."""
import numpy as np
import pytest

import judge
import train
from agents import InputError, Problem, Table
from rollout import Action, Episode

IDS = [str(i) for i in range(100, 112)]


def csv_of(header, rows):
    return "\n".join([header, *(",".join(map(str, row)) for row in rows)]).encode() + b"\n"


def table(kind, values, targets=("y",)):
    values = [v if isinstance(v, tuple) else (v,) for v in values]
    ids = range(100, 100 + len(values))
    answers = csv_of(",".join(["id", *targets]), [(i, *v) for i, v in zip(ids, values)])
    return Table(kind, "id", targets, b"", b"", answers)


def submit(values, ids=IDS):
    return csv_of("id,y", zip(ids, values))


NUMBERS = table("regression", [float(i) for i in range(12)])
BINARY = table("classification", [0, 1] * 6)
LABELS = table("classification", ["low", "mid", "high"] * 4)


def test_a_right_submission_in_any_order_of_rows_and_columns():
    """The official code scores by row position and cuts to the shorter. Here rows are joined on the id."""
    shuffled = csv_of("y,id", [(i, 100 + i) for i in reversed(range(12))])
    assert judge.grade_submission(shuffled, NUMBERS) == judge.Grade("", dict(rmse=0.0, mae=0.0, rmse_range=0.0))
    by_position = submit(range(12), reversed(IDS))
    assert judge.grade_submission(by_position, NUMBERS).metrics["rmse"] > 5


def test_the_figures_of_a_submission_by_hand():
    """Every prediction 3 too high, on a range of 11; and 9 of 12 labels right."""
    grade = judge.grade_submission(submit([i + 3 for i in range(12)]), NUMBERS)
    assert grade.metrics == pytest.approx(dict(rmse=3, mae=3, rmse_range=300 / 11)) and not grade.reason
    assert grade.quality == pytest.approx(1 - 6 / 11)
    grade = judge.grade_submission(submit(["low", "mid", "low"] + ["low", "mid", "high"] * 3), LABELS)
    assert grade.metrics["accuracy"] == pytest.approx(11 / 12) == grade.quality


@pytest.mark.parametrize(
    "data, why",
    [
        (submit(range(11), IDS[:11]), "1 ids are missing, such as '111'"),
        (submit(range(12), [*IDS[:11], "100"]), "the id '100' stands there twice"),
        (submit(range(12), [*IDS[:11], "999"]), "1 ids are missing"),
        (submit(range(13), [*IDS, "999"]), "more than 12 rows"),
        (csv_of("id,z", zip(IDS, range(12))), "its columns are id, z, they should be id, y"),
        (csv_of("id,y,z", zip(IDS, range(12), range(12))), "its columns are"),
        (csv_of("id,y", [(i,) for i in IDS]), "line 2 has 1 values, not 2"),
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
        (b"id,y\n" + b"100,2\n" * 3_000_000, "stands there twice"),
    ],
)  # fmt: skip
def test_invalid_submissions_say_why(data, why):
    """An agent writes whatever it likes: each is an invalid submission with its reason, and worth nothing."""
    grade = judge.grade_submission(data, NUMBERS)
    assert why in grade.reason and not grade.metrics and grade.quality == 0 and judge.ceiling(grade) == 2


def test_what_pandas_and_spreadsheets_write_is_accepted():
    """A byte-order mark, CRLF, ids as 100.0 (pandas, where one was missing), spaces in the header, blank lines."""
    text = "\ufeffid , y\r\n" + "".join(f"{i}.0, {k}\r\n" for k, i in enumerate(IDS)) + "\r\n"
    assert judge.grade_submission(text.encode(), NUMBERS).metrics["rmse"] == 0


def test_labels_and_probabilities_of_two_classes():
    """Tasks that ask for ROC-AUC get probabilities: accuracy and F1 count what lies above the middle."""
    sure = judge.grade_submission(submit([0.2, 0.7] * 6), BINARY)
    assert sure.metrics == dict(accuracy=1.0, f1=1.0, roc_auc=1.0)
    assert judge.grade_submission(submit([0.5] * 12), BINARY).metrics == dict(accuracy=0.5, f1=0.0, roc_auc=0.5)
    boolean = table("classification", ["False", "True"] * 6)
    assert judge.grade_submission(submit(["False", "True"] * 6), boolean).metrics["accuracy"] == 1
    assert judge.grade_submission(submit([0.1, 0.9] * 6), boolean).metrics["roc_auc"] == 1
    words = judge.grade_submission(submit(["no", "yes"] * 6), table("classification", ["no", "yes"] * 6))
    assert words.metrics == dict(accuracy=1.0, f1=1.0, roc_auc=1.0)
    assert "not a finite number" in judge.grade_submission(submit(["no", "yes"] * 6), BINARY).reason


def test_answers_that_are_wrong_are_our_fault_not_the_agents():
    """A true value that is missing would make every submission invalid in silence."""
    with pytest.raises(InputError, match="is not a finite number"):
        judge.grade_submission(submit(range(12)), table("regression", [1.0, ""] * 6))


def test_grading_agrees_with_scikit_learn():
    """200 random submissions, of all kinds of task, to 1e-12. The formulas are ours so that figures are the same
    wherever scikit-learn is missing."""
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    for seed in range(200):
        rng = np.random.RandomState(seed)
        n, kind = rng.randint(5, 60), seed % 5
        ids = [str(100 + i) for i in rng.permutation(n)]
        order = [int(i) - 100 for i in ids]
        if kind == 0:
            truth, said = rng.randn(n, 2) * 50, rng.randn(n, 2) * 50
            task = table("regression", [tuple(map(repr, map(float, row))) for row in truth], ("y", "z"))
            data = csv_of("id,y,z", [(i, *map(repr, map(float, said[k]))) for i, k in zip(ids, order)])
            rmse = [metrics.mean_squared_error(truth[:, k], said[:, k]) ** 0.5 for k in (0, 1)]
            expected = dict(rmse=np.mean(rmse), mae=metrics.mean_absolute_error(truth, said),
                            rmse_range=np.mean([100 * rmse[k] / np.ptp(truth[:, k]) for k in (0, 1)]))  # fmt: skip
        elif kind == 1:
            truth, said = rng.permutation([0, 1, *rng.randint(0, 2, n - 2)]), np.round(rng.rand(n), 1)
            task = table("classification", list(truth))
            data = csv_of("id,y", [(i, said[k]) for i, k in zip(ids, order)])
            expected = dict(accuracy=metrics.accuracy_score(truth, said > 0.5), f1=metrics.f1_score(truth, said > 0.5),
                            roc_auc=metrics.roc_auc_score(truth, said))  # fmt: skip
        else:
            labels = {2: ["a", "b", "c"], 3: [1, 2, 3, 7], 4: ["no", "yes"]}[kind]
            truth = rng.permutation([*labels, *rng.choice(labels, n - len(labels))])
            said = rng.choice([*labels, *([9] if kind == 3 else [])], n)
            task = table("classification", list(truth))
            data = csv_of("id,y", [(i, said[k]) for i, k in zip(ids, order)])
            how = dict(average="binary", pos_label="yes") if kind == 4 else dict(average="macro")
            expected = dict(accuracy=metrics.accuracy_score(truth, said), f1=metrics.f1_score(truth, said, **how))
            if kind == 4:
                expected["roc_auc"] = metrics.roc_auc_score(truth == "yes", said == "yes")
        grade = judge.grade_submission(data, task)
        assert not grade.reason and set(grade.metrics) == set(expected)
        for name, value in expected.items():
            assert grade.metrics[name] == pytest.approx(value, abs=1e-12, rel=1e-12), (seed, name)


def test_outcome_rewards_are_the_quality_of_the_submission():
    """The control experiment pays every agent for the end result: how good a submission is, and nothing for none."""
    problem = Problem("p", "?", table=BINARY)
    for grade, outcome, valid in (
        (judge.Grade("", {"accuracy": 0.8}), 0.8, True), (judge.Grade("", {"rmse_range": 10.0}), 0.8, True),
        (judge.Grade("", {"rmse_range": 400.0}), 0.0, True), (judge.Grade("empty"), 0.0, False), (None, 0.0, False),
    ):  # fmt: skip
        action = Action("Engineer", 0, [1], [2], [-1.0], False, "", verdict=judge.Verdict(4, ""))
        episode = Episode(0, problem, 0, [action], grade=grade)
        assert episode.outcome == pytest.approx(outcome) and episode.correct is valid
        rewards = {"outcome": outcome, "process": 0.4, "mixed": (outcome + 0.4) / 2}
        for kind, reward in rewards.items():
            [sample] = train.make_samples([episode], train.Config(reward=kind))
            assert sample.reward == pytest.approx(reward)
