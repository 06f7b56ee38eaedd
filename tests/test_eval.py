"""eval.py: statistics against numbers worked by hand. FAULT 31: first-k, at-least-k, votes over correctness."""
from itertools import combinations

import numpy as np
import pytest

import eval


def test_pass_at_k_is_unbiased():
    """FAULT 31. Official: "at least k correct". Guard: equal to the average over all choices of k of the n samples."""
    for n in range(1, 7):
        for right in range(n + 1):
            results = [True] * right + [False] * (n - right)
            for k in range(1, n + 1):
                exact = np.mean([any(choice) for choice in combinations(results, k)])
                assert eval.pass_at_k(n, right, k) == pytest.approx(exact)


def test_votes_are_over_answers():
    """FAULT 31. Three wrong answers that differ do not outvote two right ones that agree."""
    assert eval.majority(["1", "2", "3", "42", "42"], {"42"}) == 1.0
    assert eval.majority(["7", "7", "42"], {"42"}) == 0.0
    assert eval.majority([None, None, None, "42"], {"42"}) == 1.0  # no answer is no vote


def episode(problem, correct, answer="1", index=0, score=5.0):
    action = dict(agent="A", turn=0, text="", tokens=4, truncated=False, observation=None, status="", score=score,
                  reason="", failure=None if score is not None else "timeout: late", opinion=None)  # fmt: skip
    return dict(index=index, problem=problem, sample=0, answer=answer, correct=correct, error="", actions=[action])


def test_results_belong_to_problems_not_to_places():
    """Official code maps results to prompts in order of completion. Guard: any order gives the same figures."""
    records = [episode("a", True), episode("a", False, "2"), episode("b", True), episode("b", True)]
    figures = eval.summarise(records, ["A"])
    assert figures == eval.summarise([records[i] for i in (2, 1, 3, 0)], ["A"])
    assert figures["accuracy"] == 0.75 and figures["pass_at"] == {"1": 0.75, "2": 1.0}


def test_intervals_resample_problems():
    """Ten problems, all samples of each alike: a hundred samples are no more evidence than ten."""
    few = [episode(str(i), i < 5) for i in range(10)]
    assert eval.summarise(few, ["A"])["interval"] == eval.summarise(few * 10, ["A"])["interval"]
    low, high = eval.interval([0.0, 1.0] * 200)
    assert low == pytest.approx(0.5 - 1.96 * 0.5 / 20, abs=0.005) and high == pytest.approx(1 - low, abs=0.01)


def test_differences_are_paired():
    """Both systems fail on the same hard problems: the difference is certain although both accuracies are not."""
    base = [episode(str(i), i % 2 == 0) for i in range(40)]
    better = [episode(str(i), i % 2 == 0 or i == 1) for i in range(40)]
    difference = eval.compare(base, better)
    assert difference["accuracy"] == pytest.approx(1 / 40)
    assert difference["interval"][0] >= 0
    assert eval.compare(base, base[::-1]) == {"accuracy": 0.0, "interval": [0.0, 0.0]}


def test_failed_verdicts_are_counted_and_not_averaged():
    """FAULT 32: a failure is not a score."""
    figures = eval.summarise_agent([episode("a", True, score=None), episode("b", True, score=8.0)], "A")
    assert figures["score"] == 8.0 and figures["failures"] == 1
    assert eval.summarise_agent([episode("a", True, score=None)], "A")["score"] is None


def data_episode(kind, metrics, score, name="Analyst"):
    record = episode("p" + str(score), bool(metrics), score=score)
    record["actions"][0]["agent"] = name
    quality = metrics.get("accuracy", 1 - metrics.get("rmse_range", 50.0) / 50)
    return record | dict(kind=kind, metrics=metrics, outcome=quality, invalid="" if metrics else "none")


def test_fair_figures_count_failed_episodes():
    """The paper's "fair" figures: a failed episode is 50% RMSE, 0.5 accuracy, 0 F1. Without them a system that hands in
    only what is easy looks better than one that always hands in something."""
    records = [
        data_episode("regression", dict(rmse=2.0, mae=1.0, rmse_range=10.0), 8.0),
        data_episode("regression", {}, 2.0),
        data_episode("classification", dict(accuracy=0.9, f1=0.8, roc_auc=0.7), 9.0),
        data_episode("classification", dict(accuracy=0.7, f1=0.6), 7.0),  # three classes: no roc_auc
        data_episode("classification", {}, 1.0),
    ]
    figures = eval.summarise(records, ["Analyst"])
    assert figures["accuracy"] == pytest.approx(3 / 5) and eval.measure(figures) == "success"
    regression, classification = figures["data"]["regression"], figures["data"]["classification"]
    assert regression == dict(episodes=2, success=0.5, rmse=2.0, mae=1.0, rmse_range=10.0, fair_rmse_range=30.0)
    assert classification["success"] == pytest.approx(2 / 3) and classification["accuracy"] == pytest.approx(0.8)
    assert classification["fair_accuracy"] == pytest.approx((0.9 + 0.7 + 0.5) / 3)
    assert classification["fair_f1"] == pytest.approx(1.4 / 3) and classification["roc_auc"] == pytest.approx(0.7)
    nothing = eval.data_figures(records[1:2])["regression"]
    assert nothing["rmse_range"] is None and nothing["fair_rmse_range"] == 50.0


def test_the_coach_is_held_against_the_truth():
    """The paper's coach scores regression higher than classification whatever comes out. Guard: a table of agent and
    kind of task, from the true outcomes."""
    records = [
        data_episode("regression", dict(rmse_range=10.0), 9.0), data_episode("regression", {}, 3.0),
        data_episode("classification", dict(accuracy=0.9), 4.0), data_episode("classification", {}, 4.0),
        data_episode("classification", dict(accuracy=0.5), None),
    ]  # fmt: skip
    rows = eval.coach_against_truth(records, ["Analyst", "Modeler"])
    assert rows[0] == ("Analyst", "classification", 2, 4.0, 4.0, None)  # no spread: nothing can be said
    assert rows[1] == ("Analyst", "regression", 2, 9.0, 3.0, pytest.approx(1.0))
    assert rows[2:] == [("Modeler", kind, 0, None, None, None) for kind in ("classification", "regression")]
    assert eval.coach_against_truth([episode("a", True) | dict(outcome=1.0)], ["A"]) == [("A", "", 1, 5.0, None, None)]
