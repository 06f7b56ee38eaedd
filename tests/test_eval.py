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
