"""eval.py: statistics against numbers that are worked by hand."""

from itertools import combinations

import numpy as np
import pytest

import eval
from eval import CoachBias
from judge import METRICS


def episode(problem, correct, answer="1", score=5.0, agent="A"):
    """A record of one action. score: the coach's, None where its verdict failed."""
    action = dict(
        agent=agent,
        turn=0,
        text="",
        tokens=4,
        truncated=False,
        observation=None,
        status="",
        score=score,
        reason="",
        failure="timeout: late" if score is None else None,
        opinion=None,
    )
    return dict(
        index=0,
        problem=problem,
        sample=0,
        kind="",
        answer=answer,
        correct=correct,
        quality=float(correct),
        reason="" if correct else "the answer is wrong",
        metrics={},
        error="",
        actions=[action],
    )


def data_episode(kind, metrics, score, quality):
    """A record of a data task. metrics: of its submission; empty if that is invalid."""
    record = episode("p" + str(score), bool(metrics), None, score, agent="Analyst")
    measures = list(metrics) or list(METRICS[kind])
    reason = "" if metrics else "it is empty"
    return record | dict(kind=kind, metrics=metrics, measures=measures, quality=quality, reason=reason)


# ---- Mathematics ---------------------------------------------------------------------------------


def test_pass_at_k_is_unbiased():
    """Symptom: "pass@k" of the first k samples, or "at least k are right", as in the official code.

    Guard: it equals the average over all choices of k of the n samples.
    """
    for n in range(1, 7):
        for right in range(n + 1):
            results = [True] * right + [False] * (n - right)
            for k in range(1, n + 1):
                exact = np.mean([any(choice) for choice in combinations(results, k)])
                assert eval.pass_at_k(n, right, k) == pytest.approx(exact)


def test_votes_are_over_answers():
    """Symptom: "majority" that only asks whether most samples are right.

    Guard: three wrong answers that differ do not outvote two right ones that agree.
    """
    assert eval.majority(["1", "2", "3", "42", "42"], {"42"}) == 1.0
    assert eval.majority(["7", "7", "42"], {"42"}) == 0.0
    assert eval.majority([None, None, None, "42"], {"42"}) == 1.0  # no answer is no vote


def test_the_majority_of_a_system_is_a_mean_over_problems():
    """Problem a votes for the right answer, b for a wrong one, c has a tie, d no answer: (1 + 0 + 1/2 + 0) / 4."""
    records = [episode("a", True, "1"), episode("a", True, "1"), episode("a", False, "2")]
    records += [episode("b", True, "1"), episode("b", False, "2"), episode("b", False, "2")]
    records += [episode("c", True, "1"), episode("c", False, "2"), episode("c", False, None)]
    records += [episode("d", False, None), episode("d", False, None), episode("d", False, None)]
    assert eval.summarise(records, ["A"])["majority"] == pytest.approx(3 / 8)


def test_results_belong_to_problems_not_to_places():
    """Symptom in the official code: results are given to problems in the order of completion.

    Guard: any order gives the same figures.
    """
    records = [episode("a", True), episode("a", False, "2"), episode("b", True), episode("b", True)]
    figures = eval.summarise(records, ["A"])
    assert figures == eval.summarise([records[i] for i in (2, 1, 3, 0)], ["A"])
    assert figures["accuracy"] == 0.75 and figures["pass_at"] == {"1": 0.75, "2": 1.0}
    assert figures["kinds"] == {} and figures["unfinished"] == 0


def test_intervals_resample_problems():
    """Ten problems, all samples of each alike: a hundred samples are no more evidence than ten."""
    few = [episode(str(i), i < 5) for i in range(10)]
    assert eval.summarise(few, ["A"])["interval"] == eval.summarise(few * 10, ["A"])["interval"]
    low, high = eval.interval([0.0, 1.0] * 200)
    assert low == pytest.approx(0.5 - 1.96 * 0.5 / 20, abs=0.005)
    assert high == pytest.approx(1 - low, abs=0.01)


def test_differences_are_paired():
    """Both systems fail on the same hard problems: their difference is certain, although no accuracy is."""
    base = [episode(str(i), i % 2 == 0) for i in range(40)]
    better = [episode(str(i), i % 2 == 0 or i == 1) for i in range(40)]
    difference = eval.compare(base, better)
    assert difference["accuracy"] == pytest.approx(1 / 40)
    assert difference["interval"][0] >= 0
    assert eval.compare(base, base[::-1]) == {"accuracy": 0.0, "interval": [0.0, 0.0]}


def test_failed_verdicts_are_counted_and_not_averaged():
    """Symptom elsewhere: a coach that fails pulls the mean score. Guard: a failure is counted, and is no score."""
    figures = eval.summarise_agent([episode("a", True, score=None), episode("b", True, score=8.0)], "A")
    assert figures["score"] == 8.0 and figures["failures"] == 1
    assert eval.summarise_agent([episode("a", True, score=None)], "A")["score"] is None


# ---- Data tasks ----------------------------------------------------------------------------------


def test_fair_figures_count_failed_episodes(capsys):
    """A system that hands in only what is easy must not look better than one that always hands in something.

    The paper's "fair" figures count a failed episode as 50% RMSE, an accuracy of 0.5, and an F1 of 0. Where nothing
    was handed in, the plain figures say nothing, and print as "none". Submissions are no answers: there is no vote.
    """
    records = [
        data_episode("regression", dict(rmse=2.0, mae=1.0, rmse_range=10.0), score=8.0, quality=0.8),
        data_episode("regression", {}, score=2.0, quality=0.0),
        data_episode("classification", dict(accuracy=0.9, f1=0.8, roc_auc=0.7), score=9.0, quality=0.9),
        data_episode("classification", dict(accuracy=0.7, f1=0.6), score=7.0, quality=0.7),  # three classes: no roc_auc
        data_episode("classification", {}, score=1.0, quality=0.0),
    ]
    figures = eval.summarise(records, ["Analyst"])
    assert figures["accuracy"] == pytest.approx(3 / 5) and figures["majority"] is None
    assert list(figures["kinds"]) == ["classification", "regression"]
    assert figures["kinds"]["regression"] == dict(
        episodes=2, success=0.5, rmse=2.0, mae=1.0, rmse_range=10.0, fair_rmse_range=30.0
    )
    assert figures["kinds"]["classification"] == pytest.approx(
        dict(
            episodes=3,
            success=2 / 3,
            accuracy=0.8,
            fair_accuracy=(0.9 + 0.7 + 0.5) / 3,
            f1=0.7,
            fair_f1=1.4 / 3,
            roc_auc=0.7,
            fair_roc_auc=(0.7 + 0.5) / 2,
        )
    )
    nothing = eval.kind_figures(records[1:2])["regression"]
    assert nothing["rmse_range"] is None and nothing["fair_rmse_range"] == 50.0

    eval.print_summary("base", figures | {"kinds": {"regression": nothing}}, "success")
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("base: success 60.0% [") and "majority" not in first
    assert second.startswith("    regression: episodes 1, success 0.000, rmse none")
    assert third.split()[:3] == ["Analyst", "score", "5.40"]


def test_the_coach_is_held_against_the_truth():
    """Symptom in the paper: the coach scores regression higher than classification, whatever comes out.

    Guard: a table of agent and kind of task, against the true outcomes.
    """
    records = [
        data_episode("regression", dict(rmse_range=10.0), score=9.0, quality=0.8),
        data_episode("regression", {}, score=3.0, quality=0.0),
        data_episode("classification", dict(accuracy=0.9), score=4.0, quality=0.9),
        data_episode("classification", {}, score=4.0, quality=0.0),
        data_episode("classification", dict(accuracy=0.5), score=None, quality=0.5),
    ]
    assert eval.coach_against_truth(records, ["Analyst", "Modeler"]) == [
        CoachBias("Analyst", "classification", 2, 4.0, 4.0, None),  # no spread: nothing can be said
        CoachBias("Analyst", "regression", 2, 9.0, 3.0, pytest.approx(1.0)),
        CoachBias("Modeler", "classification", 0, None, None, None),
        CoachBias("Modeler", "regression", 0, None, None, None),
    ]
    assert eval.coach_against_truth([episode("a", True)], ["A"]) == [CoachBias("A", "", 1, 5.0, None, None)]


def test_the_correlation_is_with_the_quality():
    """Scores 2, 4, 9 against qualities 0.2, 0.4, 0.9 correlate fully, although all three submissions are valid."""
    records = [data_episode("regression", dict(rmse_range=1.0), score=10 * q, quality=q) for q in (0.2, 0.4, 0.9)]
    [bias] = eval.coach_against_truth(records, ["Analyst"])
    assert bias.correlation == pytest.approx(1.0) and bias.if_correct == pytest.approx(5.0) and bias.if_wrong is None
