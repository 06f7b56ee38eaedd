r"""judge.py: the coach, which scores every action from 0 to 10, and the grading against the true answer.

Part of the paper: per-action process rewards. A coach is a function `judge(cases) -> verdicts`: it looks at an agent's
role, at what it was handed, what it wrote and what its program answered, and gives each case a Verdict or a Failure.
It never guesses: an action whose verdict failed is left out of the update and counted (the paper's code gives it a 5).
What the coach says about correctness never enters a reward or the accuracy: those come from `grade_math` alone.
What we leave out: the language-model coach for the full-size pipelines; `rules` is the offline coach of the miniature.
Try the grading:  python judge.py "so it is \boxed{\frac{1}{2}}" 0.5"""
import re, sys
from dataclasses import dataclass
from fractions import Fraction

from agents import Agent, Problem, after_thinking, extract_program, value

# ---- What goes in and what comes out ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """One action, as the coach is shown it."""
    problem: Problem
    agent: Agent
    handed: dict  # what the agent's prompt was filled with: name -> text
    reply: str
    observation: str | None  # what its program answered; None if it ran none
    status: str  # how the program ended: ok, error, timeout, ...; "" if it ran none
    correct: bool | None  # is the reply's answer right? None for agents whose coach is not shown the truth

@dataclass(frozen=True)
class Verdict:
    score: float  # 0 to 10
    reason: str
    correct: bool | None = None  # the coach's opinion, logged beside the truth

@dataclass(frozen=True)
class Failure:
    kind: str
    detail: str

# ---- Grading against the truth ---------------------------------------------------------------------------------------
def boxed(text):
    r"""The content of the last complete \boxed{...} behind the thinking part, or None.
    >>> boxed(r"first \boxed{1}, then \boxed{\frac{1}{2}}"), boxed(r"<think>\boxed{7}"), boxed(r"\boxed{3")
    ('\\frac{1}{2}', None, None)"""
    text = after_thinking(text)
    for start in reversed([m.end() for m in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0: return text[start:i]
    return None

def number(text):
    r"""The exact value of a written number, or None: integers, decimals, fractions, with LaTeX and units around them.
    >>> number("1,024"), number(r"x = \frac{3}{-4}"), number(r"50\%"), number(r"12\text{ cm}"), number(r"2\frac12")
    (Fraction(1024, 1), Fraction(-3, 4), Fraction(50, 1), Fraction(12, 1), None)"""
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf)\s*\{([^{}]*)\}", r" \1", text)
    text = re.sub(r"\\left|\\right|\\[,;:! ()]|[$%]|\\%", "", text).strip()
    text = re.sub(r"(?<!\d)(?<!\d )\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|(\d)\s*(\d))", r"\1\3/\2\4", text)
    text = re.sub(r"^[a-zA-Z]\w*\s*=\s*", "", text)  # x = 5
    text = re.sub(r"(?<=\d)\s+[a-zA-Z][a-zA-Z ]*\.?$", "", text)  # 12 cm
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).removesuffix(".")  # 1,024
    match = re.fullmatch(r"([-+]?(?:\d{1,50}(?:\.\d{1,50})?|\.\d{1,50}))(?:\s*/\s*([-+]?\d{1,50}))?", text)
    if not match or (match[2] and int(match[2]) == 0): return None
    return Fraction(match[1]) / Fraction(match[2] or 1)

def normalised(answer):
    r"""A form in which equal answers are equal strings: the exact value of a number, else the text, tidied.
    >>> normalised("0.50"), normalised(r"\frac12"), normalised("( a, b )"), normalised("1 2")
    ('1/2', '1/2', '(a,b)', '1 2')"""
    exact = number(answer)
    if exact is not None: return str(exact)
    text = re.sub(r"\\left|\\right|\\[,;:! ]|\$|\s", " ", answer)
    return re.sub(r" *([^\w ]) *", r"\1", re.sub(" +", " ", text)).strip()

def final_answer(reply):
    """The normalised answer of a reply, or None if it boxes none. Majority votes count these."""
    answer = boxed(reply)
    return normalised(answer) if answer and answer.strip() else None

def grade_math(reply, truth):
    r"""Is the reply's last boxed answer equal in value to the truth? Exact: 0.333 is not 1/3.
    >>> grade_math(r"It is \boxed{042}.", "42"), grade_math(r"\boxed{0.333}", "1/3"), grade_math("It is 42.", "42")
    (True, False, False)"""
    return final_answer(reply) == normalised(str(truth))

# ---- The offline coach of the arithmetic pipeline --------------------------------------------------------------------
def score_solver(case):
    """The plan against a right one: value and numbers, whatever their order."""
    plan, right = case.reply, case.problem.expression
    used, given = (sorted(re.findall(r"\d+", text)) for text in (plan, right))
    if value(plan) is None: return Verdict(0, "this is not an expression")
    if used != given: return Verdict(2, "the plan uses other numbers than the story")
    if value(plan) != value(right): return Verdict(4, "the numbers are right, an operator is wrong")
    return Verdict(10, "the plan is right")

def score_coder(case):
    """The program against the plan that it was handed, right or wrong; without a plan, against the problem itself."""
    plan = case.handed["Solver"]
    target = value(plan) if value(plan) is not None else value(case.problem.expression)
    if extract_program(case.reply) is None: return Verdict(0, "there is no code block")
    if case.status != "ok": return Verdict(1, "the program fails")
    if case.observation == "nothing": return Verdict(2, "the program prints nothing")
    if normalised(case.observation) != str(target):
        return Verdict(3, f"the program does not compute the plan that it was handed, which gives {target}")
    return Verdict(10, "the program computes what it was handed")

def score_verifier(case):
    """The answer against the output that it was handed: reporting a wrong output faithfully is not its fault."""
    answer, output = final_answer(case.reply), normalised(case.handed["Coder_output"])
    if answer is None: return Verdict(0, "there is no boxed answer", False)
    if case.correct: return Verdict(10, "the answer is right", True)
    if answer == output: return Verdict(6, "a wrong output, faithfully reported", False)
    return Verdict(1, f"the answer {answer} is not the output {output} that it was handed", False)

def rules(cases):
    """Score arithmetic cases by rules: each agent for its own job, given what it saw. Deterministic, offline.
    Raises ValueError for an agent that it has no rules for."""
    scorers = {"Solver": score_solver, "Coder": score_coder, "Verifier": score_verifier}
    unknown = [case.agent.name for case in cases if case.agent.name not in scorers or not case.problem.expression]
    if unknown: raise ValueError(f"the rules coach knows the arithmetic pipeline only, not this {unknown[0]}")
    return [scorers[case.agent.name](case) for case in cases]

if __name__ == "__main__":
    if len(sys.argv) != 3: sys.exit(r'usage: python judge.py "a reply with \boxed{...}" TRUTH')
    print("correct" if grade_math(sys.argv[1], sys.argv[2]) else "wrong", "- the answer is", final_answer(sys.argv[1]))
