r"""Reading answers: equal in value, or not at all. The tables hold what graders of other projects get wrong.

A right answer that is missed costs a reward; a wrong one that is let through teaches. So every notation of a value must
be equal to every other one, and to no notation of another value.

math-verify is the yardstick where it is installed (`pip install math-verify`; it is no dependency). It accepts more,
which we leave out with intent: 50\% as 0.5 (a percentage is asked for as a number here), sets and lists in another
order, what must be computed first (2^{10}; x+1 against 1+x), 4210_5 as 4210, y = 2x+1 as 2x+1, and 7 million or 7
squared as 7. What we accept and it does not are equal values that it cannot read, see UNREAD.
"""

import itertools
import random
import time

import pytest

import judge
from judge import grade_math, normalised, parse_verdict

# kind -> values -> the notations of each. Whatever stands in one row is equal, whatever stands in two is not.
VALUES = {
    "integers": [
        ["42", "042", "42.0", "42.", "+42", "{42}", r"\mathbf{42}", r"\boldsymbol{42}", r"\textit{42}", r"\text{42}"],
        ["4.2", "4.20", r"\mathrm{4.2}", r"\displaystyle 4.2", "$4.2$", r"\(4.2\)", "x=4.2", "x = 4.2", "x_1 = 4.2"],
        ["-42", "−42", "–42", "-42.0", r"{-42}", r"\theta = -42"],
        ["420"], ["4"], ["2"], ["42!"], ["4_2"], ["0x42"],
    ],
    "thousands": [
        ["1234567", "1,234,567", r"1{,}234{,}567", r"1,\!234,\!567", r"1\,234\,567", "1 234 567", r"1\ 234\ 567"],
        ["1234.5", "1,234.5", r"1{,}234.5", r"1~234.5", "1\u202f234.5", "1'234.5"],
        ["0,123"], ["123"], ["1,2345"], ["12,345,67"], ["1.5,000"], ["1.5"], ["1500"], ["1{,}5"], ["15"],
        ["3{,}14"], ["314"], ["3.14"], [r"1\;2", "1{2}", "1 2", r"1\!2"], ["12"], [r"2\ 3"], ["23"], ["1,2,345"],
        ["12345"], ["1,23,456"], ["123456"], ["(1,234)", "(1, 234)"], ["1234"], ["1;234"],
        [r"1,234\;567"], ["f(1,234)"], ["f(1234)"],
    ],
    "fractions": [
        ["1/2", "0.5", ".5", r"\frac12", r"\frac{1}{2}", r"\dfrac{1}{2}", r"\tfrac12", r"\frac1{2}", r"\frac{1}2"],
        ["-1/2", r"-\frac12", r"\frac{-1}{2}", r"\frac{1}{-2}", "1/-2", r"−\frac{1}{2}", "-.5"],
        ["3/4", r"\frac{6}{8}", r"\frac 34", "0.75", r"\displaystyle \frac{3}{4}", r"\frac{-3}{-4}", r"\frac{1.5}{2}"],
        ["2", r"\frac{2}{1}", "4/2"], ["1/3", r"\frac13"], ["0.333"], ["21"], ["1/0", r"\frac{1}{0}"], ["34"],
        [r"\frac{1}{3}4"], [r"\frac{4}{2}\frac13"], ["7/3"],
    ],
    "mixed numbers": [
        ["9/5", "1.8", r"1\frac45", r"1\frac{4}{5}", r"1 \frac{4}{5}", r"1\dfrac{4}{5}", r"\frac95"],
        ["-9/5", r"-1\frac45", "-1.8"], ["4/5", r"\frac45"], ["14/5", r"\frac{14}{5}"], [r"1\frac{9}{5}"],
        ["275/2", "137.5", r"137 \frac{1}{2}"], [r"x\frac12"], ["1 4/5"],
    ],
    "powers of ten": [
        [r"6.72 \times 10^{-5}", r"6.72\cdot 10^{-5}", "0.0000672", r"6.72×10^{-5}", r"67.2 \times 10^{-6}"],
        ["1500", r"1.5 \cdot 10^{3}", r"1.5\times10^3", "1,500"], ["1000", r"10^{3}", r"10^3"], ["103"], ["30"],
        ["-1500", r"-1.5\times 10^{3}"], [r"10^{-3}", "0.001"], ["10^{1000}"], ["10^15"], ["1.5 10^3"], ["1.5^3"],
        [r"4/2\times 10^2"], ["1/50"],
    ],
    "money": [
        ["9500", r"\$9{,}500", r"\$9,500", r"\$9500", r"9500\text{ dollars}", "9500 dollars", r"\$9500.00", "€9500"],
        ["18.9", r"\$18.90", "18.90"], ["-5", r"-\$5"], ["9.5"], ["5"], [r"5\$6"],
    ],
    "degrees and percent": [
        ["90", r"90^\circ", r"90^{\circ}", "90°", r"90\text{ degrees}", "90 degrees", r"90\degree", "90%", r"90\%"],
        ["9"], ["900"], [r"90^0", "90^{0}"], [r"\frac{\pi}{2}"], [r"90\pi"], ["0.9"],
    ],
    "roots and constants": [
        [r"\sqrt2", r"\sqrt{2}", r"\sqrt 2", r"{\sqrt{2}}", r"x=\sqrt{2}"], ["2"], [r"\sqrt{2}2"], [r"\sqrt{32}"],
        [r"11\sqrt2", r"11\sqrt{2}", r"11 \sqrt{2}"], [r"\sqrt{22}"], [r"\sqrt[3]{2}", r"\sqrt[3]2"], [r"\sqrt[3]{2x}"],
        [r"\frac{\sqrt{3}}{2}", r"\dfrac{\sqrt{3}}{2}", r"\frac{\sqrt3}2", r"\sqrt{3}/2", r"\sqrt3/2"],
        [r"\sqrt{3/2}", r"\sqrt{\frac32}"], [r"\frac{\pi}{4}", r"\tfrac{\pi}{4}", r"\pi/4"], [r"\frac{4}{\pi}"],
        [r"\frac{3\pi}{4}", r"3\pi/4", r"\dfrac{3\pi}4"], [r"-\frac{\pi}{4}", r"-\pi/4"], [r"\pi", "π"], ["3.14"],
    ],
    "terms": [
        [r"\frac{1\pm\sqrt5}{2}", r"(1\pm\sqrt5)/2"], [r"1\pm\sqrt5/2", r"1\pm\frac{\sqrt5}{2}"],
        [r"\pm 1/2", r"\pm\frac12"],
        [r"3/2+\sqrt2", r"\frac32+\sqrt2", r"1.5+\sqrt2"], ["x/2+3", r"\frac{x}{2}+3"], [r"\frac{x+3}{2}", "(x+3)/2"],
        ["x+3/2", r"x+\frac32"], ["2/x^2", r"\frac{2}{x^2}", "2/x²"], ["x^-1", "x^{-1}"], ["1:2"],
        ["1:3/4", r"1:\frac34"],
        [r"3\cdot\sqrt2", r"3\sqrt2", r"3*\sqrt2"], ["2*x+1", "2x+1"], [r"2\cdot3"], ["23"], ["a/bc"],
        [r"\frac{a}{bc}"],
        ["1/2x"], [r"\frac{1}{2x}"], [r"2^{3/4}", r"2^{\frac34}"], ["2^3/4", r"\frac{2^3}{4}"],
        [r"x\leq 1/2", r"x\le\frac12"],
        [r"25\pi\text{ cm}^2", r"25\pi", r"25\pi\text{ square units}"], ["(x,y)=(2,3)", "(2,3)"], ["m+n=113", "113"],
    ],
    "repeating decimals": [
        [r"0.\overline{03}"], [r"0.\overline{3}"], ["0.(03)"], ["0.(3)"], ["0.30..."], ["0.3..."], ["0.3"],
        [r"0.3\dot6"],
        [r"\overline{012}"], [r"\overline{12}"], ["12"],
    ],
    "letters that are no units": [
        ["3"], [r"3\mathrm{i}", "3i"], [r"3\mathbf{j}"], [r"2\mathrm{e}", "2e"], ["2"], ["3 xy", "3xy"],
        [r"12\,ab", "12ab"], ["12"],
        [r"7\text{ twelfths}"], ["7"], [r"\$150\text{K}"], ["150"], ["5 am"], ["5 pm"], ["5"], [r"20^\circ C"],
        [r"20^\circ F"],
        ["20"], [r"50\text{ cents}"], [r"\$50"], [r"\langle 1,234\rangle"], [r"\langle1234\rangle"], [r"\not= 3"],
    ],
    "intervals": [
        [r"\left(-\infty,-\frac 12\right)", r"(-\infty,-\frac{1}{2})", r"(-\infty, -0.5)", "(-∞,-1/2)"],
        [r"(-\infty,-\frac{1}{2}]", r"\left(-\infty,-\frac12\right]"], [r"(-\infty,\frac{1}{2})"],
        [r"[-2,7]", r"x \in [-2,7]", r"x\in[-2, 7]", r"\left[-2,7\right]", r"[-2.0,7]"], ["[-2,7)"], ["(-2,7)"],
        [r"[-2,1]\cup[3,7]", r"[-2,1] \cup [3,7]", r"x \in [-2,1] \cup [3,7]"], ["[2,7]"],
    ],
    "tuples": [
        ["(1,2)", "( 1, 2 )", r"\left(1,2\right)", "(1.0,2)", r"(1,\,2)"], ["(2,1)"], ["12", "(12)", "(12.0)"],
        ["[1,2]"], ["(1,2,3)"],
        ["(1,23)"], ["(12,3)"], ["1,2", "1, 2", "x = 1, 2"], ["x=1,y=2"], ["y=1,x=2"], [r"\{1,2\}"],
        [r"(\frac12,3)", "(0.5,3)", "(1/2, 3)"], ["((1,2),3)"], ["(1,2,3"],
    ],
    "units": [
        ["12", r"12\text{ m}", r"12~\text{cm}", r"12\mbox{ cm}^2", r"12 \mbox{ inches}^2", r"12\text{ m/s}", "12 cm"],
        ["1.2", r"1.2\,\mathrm{cm}", r"1.2\text{ square units}", "1.2 apples", "1.2 miles per hour", "1.2 km/h"],
        ["12m"], ["12x", "12 x"], ["12 squared"], ["12 million", r"12\text{ million}"], ["12 or 13"], ["12 pi"],
        [r"12\text{ cm}^4"], ["12^2", "12^{2}"], ["12 dozen", r"12\text{ dozen}"], ["12 half"], ["12cm"], ["12:30"],
    ],
    "bases": [["4210_5", "4210_{5}", r"4210_{\text{5}}"], ["4210"], ["42105"], ["4210^5", "4210^{5}"]],
    "algebra": [
        ["x+1", "x + 1", "{x+1}", "(x+1)"], ["(x+1)(x+1)"], ["1+x"], ["2x+1", "2x + 1"], ["y=2x+1", "y = 2x+1"],
        ["x = y"], ["y"], ["7 = x"], ["7"],
        [r"\frac{x}{2}", "x/2", r"\frac x2"], ["2/x", r"\frac2x", r"\frac{2}{x}"], ["x/y+1"], [r"\frac{x}{y+1}"],
        ["x^2", r"x^{2}"], ["x^{12}"], ["x^12"], ["x2"], ["2x"], ["-x"], ["x_1", "x_{1}"], ["x_{12}"], ["x-5"], ["5x"],
        ["3x/2", r"\frac{3x}{2}"], ["x=-x"], ["x<2"], [r"x\leq 2", r"x \le 2", "x ≤ 2"], [r"x\geq 2", r"x\ge2"],
        ["3+4"], ["3^2"], ["9"], [r"\overline{AB}C"], [r"\overline{ABC}"], [r"\binom{5}{2}"], [r"\binom{52}{}"],
        [r"\overline{12}3"], [r"\overline{1}23"], [r"\widehat{AB}C"], [r"\widehat{ABC}"],
    ],
    "words": [
        ["Tuesday", r"\text{Tuesday}", r"\text{ Tuesday }", r"\mathrm{Tuesday}"], ["Thursday"],
        ["C", r"\text{C}", r"\textbf{C}", r"\text{(C)}", "(C)", r"\textbf{(C)}"], ["c"], ["B"], ["AB"], ["ab"],
        ["Yes", "yes"], ["no"],
        [r"\text{no solution}", "no solution", "No solution"], ["nan"], ["inf"],
        [r"\infty", r"+\infty", "∞"], [r"-\infty"],
    ],
}  # fmt: skip

# math-verify cannot read these, and calls them unequal to other notations of their values
UNREAD = (
    "boldsymbol",
    "–",
    "∞",
    r"\ 234",
    r"\,234",
    "~234",
    "1 234",
    "mathbf",
    "text",
    "mathrm",
    "sqrt[3]",
    "€",
    "1/-2",
    "\u202f",
    r"\!2",
    r"\pm",
    "²",
    "x^-1",
    "'234",
)


def pairs_of(rows):
    """(notation, notation, are they equal?) of all pairs."""
    notations = [(number, notation) for number, row in enumerate(rows) for notation in row]
    for (i, a), (j, b) in itertools.product(notations, notations):
        yield a, b, i == j


@pytest.mark.parametrize("kind", VALUES)
def test_notations_are_equal_exactly_if_their_values_are(kind):
    """Symptom: 1{,}5 is 15 and \\$36 is not 36. Cause: a chain of substitutions, each of which sees what others left.

    Guard: one reader, and all pairs of each kind.
    """
    wrong = []
    for answer, truth, equal in pairs_of(VALUES[kind]):
        if grade_math(f"So it is \\boxed{{{answer}}}.", truth) is not equal:
            wrong.append((answer, normalised(answer), truth, normalised(truth)))
    assert wrong == []


def test_the_tables_hold_enough():
    assert sum(len(list(pairs_of(rows))) for rows in VALUES.values()) > 5000


@pytest.mark.parametrize("kind", VALUES)
def test_never_more_lenient_than_math_verify(kind):
    """Whatever we accept, it accepts too, but for equal values in notations that it cannot read."""
    math_verify = pytest.importorskip("math_verify")
    notations = {notation for row in VALUES[kind] for notation in row}
    read = {
        n: [math_verify.parse(f"${n}$"), math_verify.parse(n), math_verify.parse(f"\\boxed{{{n}}}")] for n in notations
    }
    lenient = []
    for a, b, _ in pairs_of(VALUES[kind]):
        ours = normalised(a) == normalised(b)
        unread = any(mark in notation for mark in UNREAD for notation in (a, b))
        if a == b or not ours or unread:
            continue
        if not any(math_verify.verify(truth, answer) for truth in read[b] for answer in read[a]):
            lenient.append((a, b))
    assert lenient == []


BOXES = [  # a reply, and its answer
    (r"first \boxed{41}, no: \boxed{42}", "42"),
    (r"\boxed{\boxed{42}}", "42"),
    (r"\boxed {42}", "42"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{\left\{ x \right.}", r"\{x"),  # escaped braces need not be balanced
    (r"<think>\boxed{41}</think> It is \boxed{42}", "42"),
    # a last box that is empty, or that never ends, is no answer: an earlier one was given up
    (r"First I thought \boxed{7}. But no, it is \boxed{12 + \frac{1", None),
    (r"\boxed{7}, or rather \boxed{}", None),
    (r"\boxed{7}, or rather \boxed{ }", None),
    (r"\boxed{7}, or rather \boxed{", None),
    (r"<think>so \boxed{42}", None),
    ("It is 42.", None),
    (r"\boxed 42", None),
]


@pytest.mark.parametrize("reply, answer", BOXES)
def test_the_last_box_is_the_answer(reply, answer):
    assert judge.final_answer(reply) == answer


def test_hostile_answers_are_cheap():
    """An agent may write anything into the box: no eval, no division by zero, no giant integers, no deep recursion."""
    texts = [
        "9" * 10**6,
        "1/0",
        "9**9**9",
        "__import__('os')",
        "{" * 10**5,
        "1/" * 10**5,
        "10^{999999999}",
        "((((" * 99,
    ]
    texts += [
        "\\frac" * 99,
        "\\frac{" * 60 + "}{1}" * 60,
        "^" * 400,
        "\\text{" * 80,
        "[" * 250 + ")" * 249,
        "1\\frac" * 60,
    ]
    for text in texts:
        assert grade_math("\\boxed{" + text + "}", "1") is False


MARKS = [
    *(
        "\\boxed{",
        "}",
        "{",
        "\\frac{1}{",
        "\\text{",
        "1",
        "2,345 ",
        "(",
        "[",
        ")",
        "]",
        "^",
        "_",
        "\\sqrt",
        "/",
        "-",
        " ",
    ),
    *("x", " cm", "\\left", "\\{", "=", ",", ".", "%", "\\$", "<think>", "```\n", "```python\n", "\n", "SCORE: ", "*"),
]


def hostile_replies(count):
    """Replies of 4,096 marks: random ones, loops of one or two, and loops in a box."""
    rng = random.Random(0)
    for i in range(count):
        if i % 3 == 0:
            yield "".join(rng.choice(MARKS) for _ in range(4096))
        elif i % 3 == 1:
            yield (rng.choice(MARKS) + rng.choice(MARKS)) * 2048
        else:
            yield "\\boxed{" + (rng.choice(MARKS) + rng.choice(MARKS)) * rng.randint(20, 2048) + "}"


def seconds_for(function, replies):
    """(all, longest) processor seconds that a function takes for these replies."""
    each = []
    for reply in replies:
        started = time.process_time()
        function(reply)
        each.append(time.process_time() - started)
    return sum(each), max(each)


def test_replies_that_loop_are_read_quickly():
    """Symptom: an agent that repeats itself to its limit costs 1 to 7 seconds a grade.

    Cause: patterns that turn back, or follow each mark to the end of the text. Guard: 1,000 replies of 4,096 marks take
    less than a second (some 0.3 s on a quiet core), and none of them long.
    """
    replies = list(hostile_replies(1000))
    readers = (lambda reply: grade_math(reply, "7"), judge.extract_program, lambda reply: parse_verdict(reply, True))
    for function in readers:
        total, longest = seconds_for(function, replies)
        assert total < 3.0
        assert longest < 0.2
