"""judge.py: the offline coach blames the agent that caused the fault; grading is by value and never lenient."""
import pytest

import judge
from agents import ARITHMETIC, MATHCHAT, Problem

SOLVER, CODER, VERIFIER = ARITHMETIC.agents
PROBLEM = Problem("1", "Tom has 12 eggs and buys 7 more.", "19", "12+7")


def verdict(agent, reply, handed=None, observation=None, status="", truth="19"):
    correct = judge.grade_math(reply, truth) if agent.coach_sees_truth else None
    [v] = judge.rules([judge.Case(PROBLEM, agent, handed or {}, reply, observation, status, correct)])
    return v


@pytest.mark.parametrize(
    "agent, reply, handed, observation, status, score",
    [
        (SOLVER, "12+7", {}, None, "", 10),
        (SOLVER, "7+12", {}, None, "", 10),
        (SOLVER, "12-7", {}, None, "", 4),
        (SOLVER, "12+8", {}, None, "", 2),
        (SOLVER, "19", {}, None, "", 2),  # right, but no plan
        (SOLVER, "12+", {}, None, "", 0),
        (CODER, "```python\nprint(12+7)\n```", {"Solver": "12+7"}, "19", "ok", 10),
        (CODER, "```python\nprint(12-7)\n```", {"Solver": "12-7"}, "5", "ok", 10),  # a wrong plan, rightly translated
        (CODER, "```python\nprint(12+7)\n```", {"Solver": "12-7"}, "19", "ok", 3),  # a wrong plan, secretly mended
        (CODER, "```python\nprint(12+7)\n```", {"Solver": "eggs"}, "19", "ok", 10),  # no plan: the problem counts
        (CODER, "```python\nprint(12+7\n```", {"Solver": "12+7"}, "error", "error", 1),
        (CODER, "```python\nx=12+7\n```", {"Solver": "12+7"}, "nothing", "ok", 2),
        (CODER, "print(12+7)", {"Solver": "12+7"}, None, "", 0),
        (VERIFIER, "\\boxed{19}", {"Coder_output": "19"}, None, "", 10),
        (VERIFIER, "\\boxed{5}", {"Coder_output": "5"}, None, "", 6),  # faithful to a wrong output
        (VERIFIER, "\\boxed{error}", {"Coder_output": "error"}, None, "", 6),
        (VERIFIER, "\\boxed{18}", {"Coder_output": "19"}, None, "", 1),  # garbles a right one
        (VERIFIER, "\\boxed{6}", {"Coder_output": "5"}, None, "", 1),
        (VERIFIER, "19", {"Coder_output": "19"}, None, "", 0),
    ],
)
def test_each_agent_is_judged_for_its_own_job(agent, reply, handed, observation, status, score):
    v = verdict(agent, reply, handed, observation, status)
    assert v.score == score and v.reason and "\n" not in v.reason


def test_garbling_is_worse_than_passing_on():
    """Credit assignment: the same wrong final answer costs the Verifier little if its input was wrong already."""
    passed_on = verdict(VERIFIER, "\\boxed{5}", {"Coder_output": "5"})
    garbled = verdict(VERIFIER, "\\boxed{5}", {"Coder_output": "19"})
    assert passed_on.score > garbled.score
    assert passed_on.correct is garbled.correct is False


def test_the_rules_coach_does_not_guess_about_other_pipelines():
    case = judge.Case(Problem("1", "q", "1"), MATHCHAT.agents[0], {}, "text", None, "", None)
    with pytest.raises(ValueError, match="arithmetic pipeline only"):
        judge.rules([case])


@pytest.mark.parametrize(
    "reply, truth, right",
    [
        (r"\boxed{42}", "42", True),
        (r"\boxed{042}", "42", True),  # AIME answers have leading zeros
        (r"\boxed{42.0}", 42, True),
        (r"\boxed{42}", 42.0, True),
        (r"first \boxed{41}, no: \boxed{42}", "42", True),
        (r"first \boxed{42}, no: \boxed{41}", "42", False),
        (r"<think>\boxed{42}</think> It is \boxed{41}", "42", False),
        (r"<think>so \boxed{42}", "42", False),  # never came to an answer
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{\dfrac{-3}{6}}", r"-\frac12", True),
        (r"\boxed{2\frac{1}{2}}", "21/2", False),  # a mixed number is no number here, least of all this one
        (r"\boxed{1 2}", "12", False),
        (r"\boxed{(1)(2)}", "12", False),
        (r"\boxed{1,024}", "1024", True),
        (r"\boxed{1,02}", "102", False),
        (r"\boxed{x = 7}", "7", True),
        (r"\boxed{12\text{ cm}}", "12", True),
        (r"\boxed{$5$}", "5", True),
        (r"\boxed{0.3333}", "1/3", False),
        (r"\boxed{-5}", "5", False),
        (r"\boxed{5}", "55", False),
        (r"\boxed{}", "", False),
        (r"\boxed{42", "42", False),
        (r"\boxed{(1, 2)}", "(1,2)", True),
        (r"The answer is 42.", "42", False),
        (r"\boxed{1e2}", "100", False),
        (r"\boxed{nan}", "nan", True),  # text, compared as text
    ],
)
def test_grading_by_value(reply, truth, right):
    assert judge.grade_math(reply, truth) is right


def test_hostile_numbers_are_cheap():
    """An agent may write anything into the box: no eval, no division by zero, no giant integers."""
    for text in ("9" * 10**6, "1/0", "9**9**9", "__import__('os')", "{" * 10**5, "1/" * 10**5):
        assert judge.number(text) is None
        judge.grade_math("\\boxed{" + text + "}", "1")
