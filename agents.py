"""agents.py: who works on a problem, in which order, what each agent sees, and what it may do.

Before this: nothing. After it: model.py.
Part of the paper: its two multi-agent workflows, MathChat (Problem Solver -> Code Executor ->
Verifier) and DSBench (Data Engineer -> Modeler -> Analyst, with files that pass through a
workspace), and a miniature twin of each for the embedded model: arithmetic and tables. An agent's
prompt is rendered to token ids once, by the tokenizer's chat template. A further turn extends those
ids and is never rendered again from text.

Part one: problems, agents and pipelines; prompts as token ids; the four pipelines; problem files.
Part two: the one tool that agents have, a Python sandbox; on a first reading skip it and go on with
model.py. It is why this file imports the standard library only at its top: started as a script,
this file is the sandbox's small server process.

Words, here and in the other files:
    episode      one run of all agents on one problem; --samples of them for each problem
    action       one whole generation of one agent, and what its program answered (its observation)
    turn         an action's number among those of the same agent in an episode, from 0
    grade, outcome   how an episode ended, by the truth: a right answer, or a valid submission and how good it is
    workspace    an episode's folder, in which programs run and files stay
    context      the token ids that an action was sampled under; completion: the ids that were sampled
    coach        who scores actions; to judge is what it does (hence judge.py and the options --judge...)
    verdict      what the coach says of an action: a score and a reason
    step         one rollout and its updates, counted from 1
    update       one optimizer step; a step has (--problems x --samples) / --train-batch of them for each policy
    micro-batch  the actions that go through the model at once, in an update
    policy       one set of weights and the agents that use it; reference: the weights that all agents started from
    rank, world  number of this process; how many there are

What we leave out: agents that talk in free order, and tools other than Python.
See the prompts:  python -c "import agents; agents.show_prompts('arithmetic')"   (or mathchat, dsbench, tables)
"""

import atexit
import csv
import ctypes
import datetime
import fcntl
import gc
import glob
import hashlib
import importlib.util
import io
import itertools
import json
import linecache
import math
import os
import queue
import random
import re
import resource
import select
import signal
import socket
import stat
import string
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from pathlib import Path


class InputError(Exception):
    """Bad input from the user. The message is one sentence: what, where, what to do. Commands print it and exit 2."""


def require(condition, sentence):
    """Raise InputError with this sentence unless the condition holds."""
    if not condition:
        raise InputError(sentence)


def digest(*parts):
    """A number in [0, 2^64) that depends on the parts alone. (Python's hash() of strings is salted in each process.)"""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def write_atomically(path, text):
    """Replace a file's content so that a reader, or a crash, sees the old one or the new one and nothing between."""
    beside = f"{path}.{os.getpid()}.{threading.get_ident()}.partial"
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


# ==================================================================================================
# Part one: problems, agents, pipelines
# ==================================================================================================


@dataclass(frozen=True)
class AnswerKey:
    """What a submission.csv is graded by."""

    id_column: str
    targets: tuple  # names of the columns to predict
    csv: bytes | Path  # ids and true values; only the grader reads it, it is never in a workspace


@dataclass(frozen=True)
class Problem:
    """A question, the truth about it, and the files that it comes with."""

    id: str  # unique within a file or a generator; part of the seed of every action
    question: str
    answer: str = ""  # the true answer, if it is a text; never in a prompt, never in a workspace
    kind: str = ""  # classification or regression; empty where all problems are of one kind
    files: dict = field(default_factory=dict, hash=False)  # name -> bytes or Path: what its workspaces start with
    answer_key: AnswerKey | None = None  # the truth, if the result is a submission
    solution: object = None  # miniatures only, for the offline coach: a right expression, or the Schema of a table


@dataclass(frozen=True)
class Agent:
    name: str
    prompt: str  # template of the user message, filled with handed_values(): {problem}, {files}, {NAME}, {NAME_output}
    role: str = ""  # template of the system message; {max_new_tokens} and {program_seconds} go in as well
    max_actions: int = 1
    uses_tools: bool = False  # the code blocks of its reply run as one program
    coach_sees_truth: bool = False  # only then is the coach shown the true answer, or how good the submission is
    must_write: tuple = ()  # files that it must leave in the workspace; while one is missing it may act again


@dataclass(frozen=True)
class Pipeline:
    name: str
    agents: tuple  # of Agent, in the order in which they act; the last one's work is graded
    graded_by: str  # what the result is: "answer" (a box in the last reply) or "submission"; a key of judge.GRADERS
    show_result: Callable  # Result of a program -> the observation that agents and coach read
    show_files: Callable | None = None  # FileEntries of a workspace -> text; None: prompts do not speak of files
    pass_thinking: bool = True  # False: other agents and the coach get replies without their thinking part
    success_name: str = "accuracy"  # what the share of correct episodes is called in print
    problems: Callable | None = None  # "train" or "held-out" -> list of Problem; None: problems come from files
    preload: tuple = ()  # modules that its programs find imported already, where they are installed
    pieces: tuple = ()  # vocabulary of the embedded model; none: the pipeline needs a model of the user's
    demonstration: Callable | None = None  # random.Random -> Demonstration, for the embedded model's warm start


@dataclass(frozen=True)
class EarlierAction:
    """What the agent of a demonstration did before, in the same episode."""

    reply: str
    observation: str


@dataclass(frozen=True)
class Demonstration:
    agent: Agent
    values: dict  # fills the agent's prompt
    reply: str  # what to learn
    earlier: tuple = ()  # EarlierActions of the same agent


# ---- What agents get to see ----------------------------------------------------------------------


def after_thinking(text):
    """The part of a reply after its thinking part; nothing if the thinking never ended.

    >>> after_thinking("<think>12 or 13?</think>It is 12."), after_thinking("<think>12 or"), after_thinking("12")
    ('It is 12.', '', '12')
    """
    _, closed, rest = text.rpartition("</think>")
    if "<think>" in text and not closed:
        return ""
    return rest


def extract_program(text):
    r"""The Python blocks of a reply's part after thinking, joined in order to one program; None if there are none.

    Blocks in another language are passed over, and so is one that the output limit cut off.

    >>> extract_program("First\n```python\nx = 2\n```\nthen\n```\nprint(x)\n```\nand\n```json\n{}\n```")
    'x = 2\n\nprint(x)\n'
    >>> extract_program("```python\nprint(1)")
    """
    programs = []
    block = None  # the lines of the block that is open, or None
    for line in after_thinking(text).split("\n"):
        marks = line.strip(" \t\r")
        info = marks.lstrip("`").strip()
        if block is None:
            if marks.startswith("```") and "`" not in info:  # ```x``` on one line opens nothing
                fence, block = marks[: len(marks) - len(marks.lstrip("`"))], []
                indent = len(line) - len(line.lstrip(" "))
                language = re.match(r"\W*(\w*)", info)[1].lower()
        elif marks.startswith(fence):
            if language in ("", "python", "python3", "py"):
                programs.append("".join(block))
            block = None
        else:
            # what is indented like its fence, in a list for instance, is not indented as a program
            block.append(line.removeprefix(" " * indent) + "\n")
    return "\n".join(programs) if programs else None


def boxed(text):
    r"""The content of the last \boxed{...} behind the thinking part; None if there is none, or if it never ends.

    >>> boxed(r"first \boxed{1}, then \boxed{\frac{1}{2}}"), boxed(r"\boxed{3}, \boxed{4"), boxed(r"<think>\boxed{7}")
    ('\\frac{1}{2}', None, None)
    """
    text = after_thinking(text)
    starts = [match.end() for match in re.finditer(r"\\boxed\s*\{", text)]
    if not starts:
        return None
    depth = 1
    for brace in re.compile(r"\\?[{}]").finditer(text, starts[-1]):  # an escaped brace is none
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[starts[-1] : brace.start()]
    return None


def handed_values(pipeline, problem, actions, files=()):
    """What prompts may show of an episode so far: name -> text, from each agent's last action and the files now."""
    values = {"problem": problem.question}
    if pipeline.show_files:
        values["files"] = pipeline.show_files(files)
    for action in actions:
        values[action.agent] = visible_reply(pipeline, action.text)
        values[action.agent + "_output"] = shown_observation(action.observation)
    return values


def visible_reply(pipeline, reply):
    """What other agents and the coach get to see of a reply."""
    return reply if pipeline.pass_thinking else after_thinking(reply)


def shown_observation(observation):
    """What a program answered, for a prompt; an answer of nothing is not the same as no program."""
    return "no program was run" if observation is None else observation


def missing_files(names, files):
    """The names that are not among these FileEntries."""
    present = {entry.name for entry in files}
    return [name for name in names if name not in present]


def head_and_tail(text, most):
    """The text, cut in the middle to about `most` characters: what a program was about, and the traceback at its end.

    >>> head_and_tail("abcdefghij", 4)
    'ab\\n... 6 characters cut ...\\nij'
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters cut ...\n{text[-half:]}"


def show_output(result):
    """A program's Result as agents and coach of the full-size pipelines read it."""
    output = head_and_tail(result.output, 4000) or "(none)"
    return f"The program ended with status {result.status}. Its output:\n{output}"


def show_file_list(files):
    """FileEntries as agents and coach of DSBench read them: lines like "test.csv: 1,234 bytes, 40 x 2"."""
    lines = [f"{e.name}: {e.size:,} bytes" + (f", {e.shape}" if e.shape else "") for e in files[:50]]
    if len(files) > 50:
        lines.append(f"and {len(files) - 50} more")
    return "\n".join(lines) or "(none)"


# ---- From text to token ids ----------------------------------------------------------------------


def defuse(text, tokenizer):
    """Put a space into every special token that a text spells out, so that an agent cannot end another one's message.

    NOTE: all added tokens, also those that a tokenizer does not call special: R1-Distill's role
    marks are such. (Some tokenizers add runs of white space, or single characters: these are plain
    text, and cannot be broken up.)
    """
    for token in sorted({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}):
        if len(token.strip()) > 1:
            text = text.replace(token, token[:1] + " " + token[1:])
    return text


def chat_text(tokenizer, messages, date="", **switches):
    """A conversation in the model's chat template, up to where the next reply starts.

    date: see dated(); switches: options of the template, such as enable_thinking=False for Qwen3,
    which other templates ignore. Raises InputError where the template refuses the conversation.
    """
    if messages[0]["role"] == "system" and not takes_system(tokenizer):
        system, user, *rest = messages
        messages = [user | {"content": f"{system['content']}\n\n{user['content']}"}, *rest]
    if date:
        switches["chat_template"] = dated(tokenizer.get_chat_template(), date)
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **switches)
    except Exception as error:  # a template is a program: mostly a TemplateError, but it may raise anything
        roles = ", ".join(message["role"] for message in messages)
        raise InputError(f"the model's chat template refuses a conversation of {roles}: {error}") from None


def dated(template, date):
    """A chat template that writes this date (such as 2026-01-31) where it would write today's, as Llama 3's does.

    Without it a run that goes on tomorrow has other prompts.
    """
    day = datetime.date.fromisoformat(date)
    calls = r"""strftime_now\(\s*(?:format\s*=\s*)?(['"])(.*?)\1\s*\)"""
    return re.sub(calls, lambda call: repr(day.strftime(call[2])), template)


def takes_system(tokenizer):
    """Does the chat template show a system message? Some refuse it, and some leave it out without a word."""
    messages = [{"role": "system", "content": "of the system"}, {"role": "user", "content": "of the user"}]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception:  # as in chat_text()
        return False
    return "of the system" in text


def turn_end(tokenizer):
    """The id that the chat template writes after a reply; None if that is no token of its own."""
    own = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    start = ids_after_reply(tokenizer, "?")[:2]  # some put a space or a line end before it
    return next((i for i in start if i in own), None)


def ids_after_reply(tokenizer, message, **switches):
    """What the chat template puts after a reply if this message of the user follows, up to the next reply."""
    question, mark = "<question>", "<reply>"
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": mark},
        {"role": "user", "content": message},
    ]
    text = chat_text(tokenizer, messages, **switches)
    require(question in text and mark in text, "the model's chat template leaves messages out")
    return tokenizer(text.partition(mark)[2], add_special_tokens=False)["input_ids"]


def render(tokenizer, agent, values, **switches):
    """The token ids of an agent's first context: system and user message in the model's chat template.

    values: what fills the agent's prompt, see handed_values(); switches: see chat_text().
    """
    values = {name: defuse(text, tokenizer) for name, text in values.items()}
    messages = []
    if agent.role:
        messages.append({"role": "system", "content": agent.role.format(**values)})
    # str.format looks at the template alone: braces in the values stay what they are
    messages.append({"role": "user", "content": agent.prompt.format(**values)})
    ids = tokenizer(chat_text(tokenizer, messages, **switches), add_special_tokens=False)["input_ids"]
    # NOTE: templates write the BOS themselves; tokenizing their text afterwards would put a second
    # one in front. (Later ones are in order: SmolLM2's is <|im_start|>, which opens every message.)
    two_bos = tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2
    require(not two_bos, "the chat template starts a prompt with two BOS tokens")
    return ids


def extend(tokenizer, context_ids, ids, observation, **switches):
    """The context of an agent's next turn: all ids of the last one, then the observation as a user message.

    NOTE: rendering the whole conversation again would not do. Decoding and encoding do not cancel
    out, and some templates rewrite history (Qwen3 drops earlier thinking), so the agent would be
    trained on what it never saw.
    """
    rest = ids_after_reply(tokenizer, defuse(observation, tokenizer), **switches)
    # the template ends the reply with its terminator: leave that out where the action ended with it
    # (and not with the limit, or with another stop id)
    if ids[-1] in rest[:2]:
        rest = rest[rest.index(ids[-1]) + 1 :]
    return context_ids + ids + rest


# ---- MathChat: competition mathematics with a real model -----------------------------------------

MATH_TEAM = """\
You are one of three agents who solve a competition problem together, one after another: the Problem Solver works \
out the mathematics, the Code Executor checks it with a Python program, and the Verifier states the final answer. \
The team succeeds only if the Verifier's final answer is right. Whatever you write, thinking included, is cut off \
after {max_new_tokens} tokens.

"""
MATH_SOLVER = """\
You are the Problem Solver. Derive the solution step by step, name the facts that you use, and end with the result \
that you reached. You cannot run programs."""
MATH_CODER = """\
You are the Code Executor. Write one Python program, in a ```python block, that computes or checks the answer \
independently of the Problem Solver's reasoning, and print what matters. It runs for at most {program_seconds} \
seconds, without network, sockets and pools of processes (threads work). If it fails, you see the error and may write \
it once more."""
MATH_VERIFIER = """\
You are the Verifier. Compare what the Code Executor wrote with what its program printed, decide what the answer is, \
and put it alone into \\boxed{{}} at the end of your reply."""
SOLVED = "Problem:\n{problem}\n\nThe Problem Solver's work:\n{Solver}"
EXECUTED = "Problem:\n{problem}\n\nThe Code Executor's work:\n{Coder}\n\n{Coder_output}"

MATHCHAT = Pipeline(
    name="mathchat",
    agents=(
        Agent("Solver", "{problem}", MATH_TEAM + MATH_SOLVER),
        Agent("Coder", SOLVED, MATH_TEAM + MATH_CODER, max_actions=2, uses_tools=True),
        Agent("Verifier", EXECUTED, MATH_TEAM + MATH_VERIFIER, coach_sees_truth=True),
    ),
    graded_by="answer",
    show_result=show_output,
)

# ---- DSBench: data analysis with tools. Files pass through the workspace, and blame follows them ----

DATA_LIBRARIES = ("numpy", "pandas", "sklearn", "lightgbm", "xgboost")
LIBRARIES = ", ".join(name for name in DATA_LIBRARIES if importlib.util.find_spec(name)) or "none"  # installed here
SKLEARN = ("ensemble", "linear_model", "preprocessing", "model_selection", "pipeline", "compose", "impute", "metrics")

DATA_TEAM = f"""\
You are one of three agents who solve a data-analysis task in one folder, one after another: the Engineer turns \
train.csv and test.csv into features, the Modeler fits a model to them, and the Analyst uses both to write \
submission.csv. The team succeeds only if that is valid: one row for each row of test.csv, with the columns that the \
task names; and the closer its predictions are to the hidden truth, the better. Files stay in the folder; apart from \
them only an agent's last message, without its thinking, reaches the next one.
To act, write one Python program in a ```python block. It runs in the folder for at most {{program_seconds}} \
seconds, without network, sockets and pools of processes (threads and n_jobs work). You then see what it printed and \
which files are there, and may act again, four times in all, until your program succeeds and the files asked of you \
are there. \
Whatever you write, thinking included, is cut off after {{max_new_tokens}} tokens. Libraries: {LIBRARIES}.

"""
ENGINEER = """\
You are the Engineer. Fit every transformation to the training rows alone (missing values, categories, scales), \
apply it to both files, leave out columns that carry no information, such as ids, and pickle the results: \
X_train.pkl, y_train.pkl and X_test.pkl, with rows in the order of the CSV files, and every fitted transformer that \
is needed to undo a change of the target."""
MODELER = """\
You are the Modeler. Load X_train.pkl and y_train.pkl, compare models that suit the task by cross-validation, fit \
the best to all rows, and pickle it as model.pkl. Its predict must work on X_test.pkl as it is."""
ANALYST = """\
You are the Analyst. Load model.pkl and X_test.pkl, predict (probabilities where the task's measure asks for them), \
take the ids from test.csv, write submission.csv, and check that it has the right rows, columns and no missing \
values."""
TASK = """\
The task:
{problem}

The files in the folder (rows x columns of CSV files, header not counted):
{files}"""


def data_agent(name, role, before, must_write, coach_sees_truth=False):
    """An agent of DSBench. It sees the task, the files, and what the agent `before` it said last, if there is one."""
    last = f"\n\nThe {before}'s last message:\n{{{before}}}\n\nWhat its program answered:\n{{{before}_output}}"
    prompt = TASK + last if before else TASK
    rights = dict(max_actions=4, uses_tools=True, coach_sees_truth=coach_sees_truth, must_write=must_write)
    return Agent(name, prompt, DATA_TEAM + role, **rights)


DSBENCH = Pipeline(
    name="dsbench",
    agents=(
        data_agent("Engineer", ENGINEER, None, ("X_train.pkl", "y_train.pkl", "X_test.pkl")),
        data_agent("Modeler", MODELER, "Engineer", ("model.pkl",)),
        data_agent("Analyst", ANALYST, "Modeler", ("submission.csv",), coach_sees_truth=True),
    ),
    graded_by="submission",
    success_name="success",
    show_result=show_output,
    show_files=show_file_list,
    pass_thinking=False,
    preload=("numpy", "pandas", *(f"sklearn.{name}" for name in SKLEARN)),
)

# ---- Arithmetic: the miniature twin of MathChat. Each agent sees only what the one before it hands on ----

NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Lea", "Sam", "Mia")
THINGS = ("apples", "books", "coins", "cards", "pens", "eggs", "keys", "shells")
STORIES = {  # story -> right expression
    "{name} has {a} {thing} and buys {b} more.": "{a}+{b}",
    "{name} has {a} {thing} and loses {b}.": "{a}-{b}",
    "{name} has {a} boxes of {b} {thing}.": "{a}*{b}",
    "{name} has {a} {thing}, buys {b} more and loses {c}.": "{a}+{b}-{c}",
    "{name} has {a} {thing}, loses {b} and buys {c} more.": "{a}-{b}+{c}",
    "{name} has {a} boxes of {b} {thing} and buys {c} more.": "{a}*{b}+{c}",
    "{name} has {a} boxes of {b} {thing} and loses {c}.": "{a}*{b}-{c}",
}
ARITHMETIC_PIECES = (
    *"0123456789+-*,.) ",
    *NAMES,
    *(" " + thing for thing in THINGS),
    *(" has", " and", " buys", " more", " loses", " boxes", " of", "Solver: ", "Coder: ", "Verifier: "),
    *("\n", "```python\n", "print(", "\n```", "\\boxed{", "}", "error", "nothing"),
)


def value_of(expression):
    """The value of sums and differences of products of whole numbers, else None. No eval: a model wrote the text.

    >>> value_of("2+3*4-1"), value_of("2+"), value_of("2**9"), value_of("__import__('os')")
    (13, None, None, None)
    """
    if not re.fullmatch(r"\d{1,9}([-+*]\d{1,9}){0,9}", expression):
        return None
    total = 0
    for sign, product in re.findall(r"([-+]?)([\d*]+)", expression):
        term = math.prod(int(factor) for factor in product.split("*"))
        total += -term if sign == "-" else term
    return total


def is_held_out(text):
    """True for one text in five, chosen by its digest, so that problems to train on and held-out ones never overlap."""
    return digest("split", text) % 5 == 0


def arithmetic_problem(rng, split):
    """(question, expression) of a random story with numbers of 1 to 3 digits and a result that is not negative."""
    while True:
        story, plan = rng.choice(list(STORIES.items()))
        numbers = {letter: rng.randrange(1, 10 ** rng.randint(1, 3)) for letter in "abc"}
        expression = plan.format(**numbers)
        if value_of(expression) >= 0 and is_held_out(expression) == (split == "held-out"):
            question = story.format(name=rng.choice(NAMES), thing=rng.choice(THINGS), **numbers)
            return question, expression


def arithmetic_problems(split):
    """4,096 problems for "train", 1,000 for "held-out"; the same in every run."""
    problems = []
    for i in range(4096 if split == "train" else 1000):
        question, expression = arithmetic_problem(random.Random(digest("arithmetic", split, i)), split)
        problems.append(Problem(f"{split}-{i}", question, str(value_of(expression)), solution=expression))
    return problems


def spoil(text, rng):
    """A typical mistake in an expression or a number: another operator, or another digit."""
    operators = [i for i, character in enumerate(text) if character in "+-*"]
    if operators and rng.random() >= 0.3:
        place, characters = rng.choice(operators), "+-*"
    else:
        digits = [i for i, character in enumerate(text) if character.isdigit()]
        place, characters = rng.choice(digits), "123456789"  # no 0: Python refuses numbers that start with one
    others = [character for character in characters if character != text[place]]
    return text[:place] + rng.choice(others) + text[place + 1 :]


def printing(expression):
    """The Coder's program for an expression."""
    return f"```python\nprint({expression})\n```"


def arithmetic_demonstration(rng):
    """One demonstration for a random agent.

    Half of the replies are wrong, and so is half of what agents are handed: a right Coder
    translates the plan that it was handed, a right Verifier reports the output, even where it is
    wrong.
    """
    question, expression = arithmetic_problem(rng, "train")
    plan = expression if rng.random() < 0.5 else spoil(expression, rng)
    code = plan if rng.random() < 0.5 else spoil(plan, rng)
    agent = rng.choice(ARITHMETIC.agents)
    if agent.name == "Solver":
        return Demonstration(agent, {"problem": question}, plan)
    if agent.name == "Coder":
        return coder_demonstration(agent, plan, code, rng)
    output = "error" if rng.random() < 0.1 else str(value_of(code))
    answer = output
    if rng.random() >= 0.5 and output != "error":
        answer = spoil(output.lstrip("-"), rng)
    return Demonstration(agent, {"Coder_output": output}, f"\\boxed{{{answer}}}")


def coder_demonstration(agent, plan, code, rng):
    """The Coder's program for `code`; one in five is its second try. Some wrong ones do not even parse."""
    unclosed = printing(plan).replace(")", "")
    if rng.random() < 0.2:
        return Demonstration(agent, {"Solver": plan}, printing(code), (EarlierAction(unclosed, "error"),))
    if code != plan and rng.random() < 0.3:
        return Demonstration(agent, {"Solver": plan}, unclosed)
    return Demonstration(agent, {"Solver": plan}, printing(code))


def show_word(result):
    """What a program printed, as a short word or number: the miniature has no vocabulary for tracebacks."""
    if result.status != "ok":
        return "error"
    return result.output.strip()[:12] or "nothing"


ARITHMETIC = Pipeline(
    name="arithmetic",
    graded_by="answer",
    show_result=show_word,
    problems=arithmetic_problems,
    pieces=ARITHMETIC_PIECES,
    demonstration=arithmetic_demonstration,
    agents=(
        Agent("Solver", "Solver: {problem}"),
        Agent("Coder", "Coder: {Solver}", max_actions=2, uses_tools=True),
        Agent("Verifier", "Verifier: {Coder_output}", coach_sees_truth=True),
    ),
)

# ---- Tables: the miniature twin of DSBench. Agents choose the steps of their programs, and the words in them ----


@dataclass(frozen=True)
class Schema:
    """What a table task is about. Its fields fill the programs below."""

    kind: str  # classification or regression
    target: str  # the column to predict
    key: str  # the column of ids
    numbers: tuple  # names of the number columns
    word: str  # the column of words


@dataclass(frozen=True)
class Mistake:
    """A step of a right program, wrong texts for it (perhaps none), and the score of a program that lacks it."""

    old: str  # the step, or enough of it to know it by
    new: tuple  # wrong texts in its place, "" for none; empty: demonstrations always have the step
    score: int  # of a program that lacks `old`
    why: str
    weight: int = 1  # how often each of `new` is drawn, compared with other mistakes


NUMBERS = ("age", "size", "dose", "load", "speed")
WORDS = ("color", "shape", "zone")
TARGETS = ("price", "risk", "yield", "rank")
KEYS = ("key", "row", "case", "number")
RIGHT_MODEL = {  # how each kind of task turns the target into the matrix that is fitted
    "regression": "Y = y.astype(float)[:, None]",
    "classification": "Y = (y[:, None] == classes) * 1.0",
}
RIGHT_PREDICTION = {  # and scores into predictions
    "regression": "p = scores[:, 0]",
    "classification": "p = model['classes'][scores.argmax(1)]",
}
RIGHT_FIT = "W = np.linalg.solve(X.T @ X + 0.1 * np.eye(X.shape[1]), X.T @ Y)"
WRONG_FIT = "W = np.zeros((X.shape[1], Y.shape[1]))\nW[-1] = Y.mean(0)"
PROGRAMS = {  # agent -> its right program. Blank lines separate steps, and are not written; $names are filled in
    "Engineer": """\
import csv, numpy as np
train, test = [list(csv.DictReader(open(f))) for f in ('train.csv', 'test.csv')]

y = [r['$target'] for r in train]

numbers = '$numbers'.split()

words = '$word'.split()

fill = {c: np.mean([float(r[c]) for r in train if r[c]]) for c in numbers}

values = {c: sorted({r[c] for r in train}) for c in words}
X, T = [np.array([[float(r[c] or fill[c]) for c in numbers] + [float(r[c] == v) for c in words for v in values[c]]
                  for r in rows]) for rows in (train, test)]

T, X = [(rows - X.mean(0)) / (X.std(0) + 1e-9) for rows in (T, X)]

np.save('X_train', X)

np.save('y_train', y)

np.save('X_test', T)""",
    "Modeler": """\
import numpy as np
X, y = np.load('X_train.npy'), np.load('y_train.npy')
X, classes = np.c_[X, np.ones(len(X))], np.unique(y)

$right_model

"""
    + RIGHT_FIT
    + """

np.savez('model', W=W, classes=classes)""",
    "Analyst": """\
import csv, numpy as np
model, T = np.load('model.npz'), np.load('X_test.npy')
scores = np.c_[T, np.ones(len(T))] @ model['W']

$right_prediction

out, rows = csv.writer(open('submission.csv', 'w')), csv.DictReader(open('test.csv'))

out.writerow('$key $target'.split())

out.writerows((r['$key'], v) for r, v in zip(rows, p))""",
}
MISTAKES = {  # agent -> in the order of its steps, which is also the order in which the coach looks for them
    "Engineer": (
        Mistake("train, test = ", (), 3, "no data are read"),
        Mistake("y = [r['$target']", ("y = [r['$key']",), 2, "y_train is not the target"),
        Mistake(
            "numbers = '$numbers'",
            (
                "numbers = '$key $numbers'",
                "numbers = '$some'",
                "numbers = '$some $other'",
                "numbers = '$numbers $word'",
            ),
            4,
            "not the number columns, all of them and no id",
        ),
        Mistake("words = '$word'.split()", (), 4, "not the column of words"),
        Mistake(
            "fill = {c: np.mean([float(r[c]) for r in train if r[c]]) for c in numbers}",
            ("fill = dict.fromkeys(numbers, 0)",),
            6,
            "gaps are filled with zeros, far from all other values",
        ),
        Mistake("X, T = [np.array(", (), 3, "there is no matrix"),
        Mistake(
            "T, X = [(rows - X.mean(0)) / (X.std(0) + 1e-9) for rows in (T, X)]",
            ("",),
            7,
            "the features are not scaled",
        ),
        Mistake("np.save('X_train', X)", ("",), 2, "X_train.npy is not saved"),
        Mistake("np.save('y_train', y)", ("",), 2, "y_train.npy is not saved"),
        Mistake("np.save('X_test', T)", ("",), 2, "X_test.npy is not saved", weight=3),
    ),
    "Modeler": (
        Mistake("X, y = np.load(", (), 3, "the features are not read"),
        Mistake("$right_model", ("$wrong_model",), 3, "a model for the other kind of task"),
        Mistake(RIGHT_FIT, (RIGHT_FIT.replace("0.1", "100"), WRONG_FIT), 5, "it hardly fits"),
        Mistake("np.savez('model', W=W, classes=classes)", ("",), 2, "model.npz is not saved", weight=3),
    ),
    "Analyst": (
        Mistake("scores = np.c_[", (), 3, "the model is not used"),
        Mistake("$right_prediction", ("$wrong_prediction",), 3, "predictions for the other kind of task"),
        Mistake("out, rows = ", (), 3, "no file"),
        Mistake(
            "out.writerow('$key $target'.split())",
            ("out.writerow('$target $key'.split())", "", "out.writerow('$key $other'.split())"),
            2,
            "not the columns that were asked for",
        ),
        Mistake("out.writerows((r['$key']", ("out.writerows((r['$some']",), 2, "not the ids of the test rows"),
    ),
}
ENGINEER_FILES = ("X_train.npy", "y_train.npy", "X_test.npy")
TABLE_FILES = ("train.csv", "test.csv", *ENGINEER_FILES, "model.npz", "submission.csv")


def fill_program(text, schema):
    """A program, or a part of one, with its $names filled in for a task.

    >>> fill_program("out.writerow('$key $target'.split())", Schema("regression", "price", "key", ("age",), "zone"))
    "out.writerow('key price'.split())"
    """
    other_kind = "classification" if schema.kind == "regression" else "regression"
    unused = [name for name in NUMBERS if name not in schema.numbers]
    names = dict(target=schema.target, key=schema.key, word=schema.word, other=unused[0])
    names |= dict(numbers=" ".join(schema.numbers), some=" ".join(schema.numbers[1:]))
    names |= dict(right_model=RIGHT_MODEL[schema.kind], wrong_model=RIGHT_MODEL[other_kind])
    names |= dict(right_prediction=RIGHT_PREDICTION[schema.kind], wrong_prediction=RIGHT_PREDICTION[other_kind])
    return string.Template(text).substitute(names)


def table_program(agent, schema, rng=None):
    """The right program of an agent (its name) for a task; with a rng, one with a typical mistake.

    >>> print(table_program("Modeler", Schema("regression", "price", "key", ("age", "size"), "zone")))
    ```python
    import numpy as np
    X, y = np.load('X_train.npy'), np.load('y_train.npy')
    X, classes = np.c_[X, np.ones(len(X))], np.unique(y)
    Y = y.astype(float)[:, None]
    W = np.linalg.solve(X.T @ X + 0.1 * np.eye(X.shape[1]), X.T @ Y)
    np.savez('model', W=W, classes=classes)
    ```
    """
    program = PROGRAMS[agent]
    if rng is not None:
        mistakes = [(m.old, new) for m in MISTAKES[agent] for new in m.new for _ in range(m.weight)]
        old, new = rng.choice(mistakes)
        program = program.replace(old, new)
    steps = [step for step in program.split("\n\n") if step]
    return "```python\n" + fill_program("\n".join(steps), schema) + "\n```"


def table_pieces():
    """The vocabulary of the embedded model: the words of the tasks, and what stands between them in programs."""
    pieces = [*NUMBERS, *WORDS, *TARGETS, *KEYS, *RIGHT_MODEL, *RIGHT_MODEL.values(), *RIGHT_PREDICTION.values()]
    pieces += [*TABLE_FILES, *PROGRAMS]
    for agent, program in PROGRAMS.items():
        for step in program.split("\n\n"):
            wrong = [step.replace(m.old, new) for m in MISTAKES[agent] if m.old in step for new in m.new]
            for text in (step, *wrong):
                pieces += [piece for piece in re.split(r"\$\w+", text) if piece]
    pieces += [", id ", ", numbers ", ", words ", ": ", "; ", " ", "\n", "```python\n", "\n```", "ok", "error"]
    return tuple(dict.fromkeys(pieces))  # each once, in order


def table_schema(rng, split):
    """(Schema, question) of a random task. Held-out ones are not among those to train on."""
    while True:
        numbers = rng.sample(NUMBERS, rng.randint(2, 3))
        kind = rng.choice(["classification", "regression"])
        schema = Schema(kind, rng.choice(TARGETS), rng.choice(KEYS), tuple(numbers), rng.choice(WORDS))
        question = f"{kind} {schema.target}, id {schema.key}, numbers {' '.join(numbers)}, words {schema.word}"
        if is_held_out(question) == (split == "held-out"):
            return schema, question


def table_problem(name, schema, question, rng):
    """A task with new data, 60 rows to train on and 40 to predict.

    The truth is linear, plus noise. Number columns have very different scales, lie far from zero,
    and one has gaps. Ids say nothing, and those of test.csv lie elsewhere, so that using them as a
    feature does harm.
    """
    scales = {column: 10 ** rng.uniform(-2, 2) for column in schema.numbers}
    weights = {column: rng.choice((-1, 1)) * rng.uniform(0.7, 1.5) for column in schema.numbers}
    effects = {word: rng.uniform(-1.5, 1.5) for word in "abc"}
    features = [schema.key, *schema.numbers, schema.word]
    train, test, answers = [[*features, schema.target]], [features], [[schema.key, schema.target]]
    for i, row_id in enumerate([*range(60), *rng.sample(range(1000, 9999), 40)]):
        z = {column: rng.gauss(0, 1) for column in schema.numbers}
        word = rng.choice("abc")
        signal = sum(weights[column] * z[column] for column in schema.numbers) + effects[word] + rng.gauss(0, 0.3)
        target = "yes" if signal > 0 else "no"
        if schema.kind == "regression":
            target = f"{50 + 10 * signal:.2f}"
        cells = [row_id, *[f"{scales[column] * (5 + z[column]):.4g}" for column in schema.numbers], word]
        if rng.random() < 0.2:
            cells[1] = ""  # a gap in the first number column
        if i < 60:
            train.append([*cells, target])
        else:
            test.append(cells)
            answers.append([row_id, target])
    files = {"train.csv": csv_bytes(train), "test.csv": csv_bytes(test)}
    answer_key = AnswerKey(schema.key, (schema.target,), csv_bytes(answers))
    return Problem(name, question, kind=schema.kind, files=files, answer_key=answer_key, solution=schema)


def csv_bytes(rows):
    """Rows of plain cells as the bytes of a CSV file."""
    return "".join(",".join(str(cell) for cell in row) + "\n" for row in rows).encode()


def table_problems(split):
    """1,024 tasks for "train", 200 for "held-out"; the same in every run."""
    problems = []
    for i in range(1024 if split == "train" else 200):
        rng = random.Random(digest("tables", split, i))
        schema, question = table_schema(rng, split)
        problems.append(table_problem(f"{split}-{i}", schema, question, rng))
    return problems


def table_demonstration(rng):
    """One demonstration for a random agent: half of them with a mistake. Some follow a first try with one."""
    schema, question = table_schema(rng, "train")
    agent = rng.choice(TABLES.agents)
    # the files that earlier agents left, now and then without one of them
    done = {"Engineer": (), "Modeler": ENGINEER_FILES, "Analyst": (*ENGINEER_FILES, "model.npz")}[agent.name]
    present = [name for name in done if rng.random() < 0.9]
    files = " ".join(sorted(["train.csv", "test.csv", *present]))
    earlier = ()
    if rng.random() < 0.2:
        first_try = table_program(agent.name, schema, rng)
        earlier = (EarlierAction(first_try, rng.choice(("ok", "error")) + "\n" + files),)
    reply = table_program(agent.name, schema, rng if rng.random() < 0.5 else None)
    return Demonstration(agent, {"problem": question, "files": files}, reply, earlier)


def show_ending(result):
    """How a program ended, as one word."""
    return "ok" if result.status == "ok" else "error"


def show_file_names(files):
    """FileEntries as a line of names."""
    return " ".join(entry.name for entry in files)


def table_agent(name, must_write, coach_sees_truth=False):
    """An agent of the tables pipeline: it sees the task and the names of the files that are there."""
    rights = dict(max_actions=2, uses_tools=True, coach_sees_truth=coach_sees_truth, must_write=must_write)
    return Agent(name, name + ": {problem}; {files}", **rights)


TABLES = Pipeline(
    name="tables",
    graded_by="submission",
    success_name="success",
    show_result=show_ending,
    show_files=show_file_names,
    preload=("csv", "numpy"),
    problems=table_problems,
    pieces=table_pieces(),
    demonstration=table_demonstration,
    agents=(
        table_agent("Engineer", must_write=ENGINEER_FILES),
        table_agent("Modeler", must_write=("model.npz",)),
        table_agent("Analyst", must_write=("submission.csv",), coach_sees_truth=True),
    ),
)

PIPELINES = {pipeline.name: pipeline for pipeline in (ARITHMETIC, MATHCHAT, TABLES, DSBENCH)}


def show_prompts(name):
    """Print the agents of a pipeline with their prompts."""
    for agent in PIPELINES[name].agents:
        print(f"--- {agent.name}, up to {agent.max_actions} actions\n{agent.role}\n{agent.prompt}")


# ---- Problem files -------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataOptions:
    """Where the data of DSBench's tasks are; see the options of the same names in train.Config."""

    data_root: str = ""  # folder that the paths in a problem file start from
    task_texts: str = ""  # JSON file of cleaned task texts and column names
    allow_missing: bool = False  # leave out tasks whose data are absent


class AbsentData(Exception):
    """A file of a data task is not there. The message names both."""


def read_json(folder, name, default=None, what="model folder"):
    """The content of a JSON file of a folder; `default`, if there is one, where the file is absent."""
    path = os.path.join(folder, name)
    if default is not None and not os.path.exists(path):
        return default
    try:
        with open(path, encoding="utf-8-sig") as file:
            return json.load(file)
    except FileNotFoundError:
        raise InputError(f"{folder} is not a {what}: it has no {name}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def read_entries(path):
    """The values of a JSON list, or of JSON lines. Raises InputError, which names the file and the line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors put a byte-order mark in front
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if text.lstrip().startswith("["):
        return parse_json(path, 1, text)
    # NOTE: not splitlines(), which also cuts at characters that a JSON text may hold, such as U+2028
    lines = enumerate(text.split("\n"), 1)
    return [parse_json(path, number, line) for number, line in lines if line.strip()]


def parse_json(path, first_line, text):
    """The value of a JSON text that starts on this line of the file."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of 5,000 digits, and lists in lists in lists
        line = first_line + getattr(error, "lineno", 1) - 1
        raise InputError(f"{path}, line {line}: this is not JSON ({error})") from None


def load_problems(path, data_options=None):
    """The Problems of a problem file: a JSON list, or JSON lines, of objects.

    Each has a prompt (or problem, or question) and an answer (text or number, see final_truth()), and
    perhaps an id; or it is one of DSBench's tasks, see load_task(). Ids get the file's name in
    front. Raises InputError, which names the file, the entry, and what is wrong with it.
    """
    options = data_options or DataOptions()
    texts = read_task_texts(options.task_texts)
    problems, absent = [], []
    for number, entry in enumerate(read_entries(path), 1):
        try:
            problems.append(load_problem(path, number, entry, options.data_root, texts))
        except AbsentData as error:
            absent.append(str(error))

    # tasks without data: all of them are named, and left out only if that is allowed
    missing = f"{path}: the data of {len(absent)} tasks are absent: {'; '.join(absent)}"
    require(not absent or options.allow_missing, f"{missing} (--allow-missing leaves them out)")
    if absent:
        print(missing, file=sys.stderr)
    require(problems, f"{path} holds no problems" + (" whose data are there" if absent else ""))
    ids = [problem.id for problem in problems]
    require(len(set(ids)) == len(ids), f"{path}: the id {max(ids, key=ids.count)} is used more than once")
    return problems


def load_problem(path, number, entry, data_root, texts):
    """One entry of a problem file as a Problem."""
    where, stem = f"{path}, entry {number}", Path(path).stem
    entry = entry if isinstance(entry, dict) else {}
    question = entry.get("prompt") or entry.get("problem") or entry.get("question")
    answer, metadata = entry.get("answer"), entry.get("metadata")
    if isinstance(question, str) and isinstance(metadata, dict) and "train_file" in metadata:
        return load_task(where, stem, question, metadata, data_root, texts)
    asked = isinstance(question, str) and question.strip() != ""
    # type(), not isinstance: true is an int in Python, and no answer
    is_number = type(answer) is int or (type(answer) is float and math.isfinite(answer))
    answered = is_number or (isinstance(answer, str) and answer.strip() != "")
    require(asked and answered, f"{where}: a prompt and an answer are needed, as text or number")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if isinstance(answer, float):
        answer = f"{Decimal(str(answer)):f}"  # 0.00001, which Python writes as 1e-05
    truth = final_truth(str(answer))
    text = question + truth
    require(text == text.encode(errors="replace").decode(), f"{where}: half of a character, perhaps of a cut emoji")
    lost = LOST_BACKSLASH.search(str(answer))
    require(
        not lost, f"{where}: the answer {str(answer)[:60]!r} holds a control character: is its backslash not doubled?"
    )
    matched = truth != "" and boxed(f"\\boxed{{{truth}}}") == truth and len(truth) <= LONGEST_TRUTH
    require(matched, f"{where}: no reply can box the answer {str(answer)[:60]!r}: give the final answer alone")
    return Problem(f"{stem}/{entry.get('id', number)}", question, truth)


# a LaTeX command such as \frac, written in JSON with one backslash: another character is made of it

# \\frac, \\text, \\right, \\neq and the like, written in JSON with one backslash, which makes another character of it
LOST_BACKSLASH = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]|\t(?=ext|frac|imes|heta|an)|\r(?=ight|m)|\n(?=eq|u\b)")
LONGEST_TRUTH = 300  # characters; what is longer explains an answer


def final_truth(answer):
    r"""The final answer in an answer as data sets write it: behind ####, in a box, or in bold.

    >>> final_truth("3 + 4 = 7 eggs.\n#### 7"), final_truth(r"So it is \boxed{7}."), final_truth("**7**")
    ('7', '7', '7')
    """
    answer = answer.rpartition("####")[2].strip().strip("`*").strip()
    answer = re.sub(r"(?i)^(the )?(final )?answer( is)?:?\**\s+(?=\S)", "", answer)
    if "\\boxed" in answer:
        answer = boxed(answer) or ""
    return answer.strip()


def fingerprint(problems):
    """A digest of problems in their order: of all that they hold, but of files on the disk the name and size only."""
    hashed = hashlib.sha256()
    for problem in problems:
        key = problem.answer_key
        truth = (key.id_column, key.targets, file_digest(key.csv)) if key else problem.answer
        files = sorted((name, file_digest(data)) for name, data in problem.files.items())
        hashed.update(repr((problem.id, problem.question, truth, problem.kind, files)).encode())
    return hashed.hexdigest()


def file_digest(data):
    """A number for the content of a file that is at hand; its size if it is a Path, for it may be large."""
    return digest(data) if isinstance(data, bytes) else file_size(data)


def file_size(data):
    """Bytes of a file that a Problem gives as its content or as its Path."""
    return len(data) if isinstance(data, bytes) else data.stat().st_size


def load_files(paths, pipeline, data_options=None):
    """The Problems of several files: file name without its ending -> list. The name leads their ids."""
    stems = [Path(path).stem for path in paths]
    for stem in stems:
        require(stems.count(stem) == 1, f"two problem files are named {stem}: rename one")
    files = {stem: load_problems(path, data_options) for stem, path in zip(stems, paths, strict=True)}
    submitted = pipeline.graded_by == "submission"
    odd = [p.id for problems in files.values() for p in problems if (p.answer_key is not None) != submitted]
    example = odd[0] if odd else ""
    require(not odd, f"{len(odd)} problems, such as {example}, are not of the {pipeline.name} pipeline's kind")
    return files


# ---- CSV files of data tasks: true answers, and what agents submit -------------------------------


@dataclass(frozen=True)
class Answers:
    """The truth of a data task."""

    ids: list  # of the test rows, see row_key()
    columns: list  # for each target the true values: float where all of them are numbers, else text
    numeric_ids: bool  # ids are compared as numbers


def read_rows(data, columns, exact_columns=False, numeric_ids=False, most_rows=math.inf):
    """id -> the texts of the other columns, of a CSV's bytes. Raises ValueError, or csv.Error, with what is wrong.

    columns: names, the id's first; exact_columns: there are no others.
    """
    reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
    header = [name.strip() for name in next(reader, [])]
    fits = sorted(header) == sorted(columns) if exact_columns else set(columns) <= set(header)
    if not fits:
        shown = ", ".join(header)[:200] or "missing"
        raise ValueError(f"its columns are {shown}, they should be {', '.join(columns)}")
    places = [header.index(name) for name in columns]
    rows = {}
    for row in reader:
        if not row:
            continue
        if len(row) != len(header):
            raise ValueError(f"line {reader.line_num} has {len(row)} values, not {len(header)}")
        row_id, *values = [row[place].strip() for place in places]
        key = row_key(row_id, numeric_ids)
        if key in rows:
            raise ValueError(f"the id {row_id[:50]!r} is used twice")
        rows[key] = values
        if len(rows) > most_rows:
            raise ValueError(f"there are more than {most_rows} rows")
    return rows


def row_key(row_id, numeric_ids):
    """An id as it is compared: as a number where all true ids are different numbers (0001, 1 and 1.0 are one), or text.

    >>> row_key("0001", True) == row_key("1.0", True), row_key("0001", False) == row_key("1", False)
    (True, False)
    """
    if numeric_ids and len(row_id) <= 50 and re.fullmatch(r"[-+]?\d+(\.\d+)?(e[-+]?\d{1,2})?", row_id):
        return Fraction(row_id)
    return row_id


def finite_number(text):
    """The text as a number, true and false as 1 and 0. Raises ValueError where it is no finite number."""
    words = {"true": 1.0, "false": 0.0}
    try:
        value = words[text.lower()] if text.isalpha() else float(text)
    except (ValueError, KeyError):
        value = math.nan
    if not abs(value) < 1e100 or "_" in text:  # Python reads 1_000 as a number, other programs do not
        raise ValueError(f"{text[:50]!r} is not a finite number")
    return value


@lru_cache(128)
def read_answers(answer_key, kind):
    """The Answers behind an AnswerKey. Raises InputError: what is wrong with them is no agent's fault."""
    where = f"answers {str(answer_key.csv)[:99]}"
    names = [answer_key.id_column, *answer_key.targets]
    try:
        data = answer_key.csv if isinstance(answer_key.csv, bytes) else answer_key.csv.read_bytes()
        rows = read_rows(data, names)
        keys = [row_key(row_id, numeric_ids=True) for row_id in rows]
        numeric_ids = all(isinstance(key, Fraction) for key in keys) and len(set(keys)) == len(keys)
        columns = [true_values(texts, kind) for texts in zip(*rows.values(), strict=True)]
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{where}: {error}") from None
    require(rows, f"{where}: there are no rows")
    return Answers(keys if numeric_ids else list(rows), columns, numeric_ids)


def true_values(texts, kind):
    """A column of true values: numbers if all of them are, which those of a regression must be; else texts."""
    if "" in texts:
        raise ValueError("a true value is missing")
    try:
        return [finite_number(text) for text in texts]
    except ValueError:
        if kind == "regression":
            raise
        return list(texts)


def read_submission(data, answer_key, answers):
    """id -> predictions, as texts, of a submission's bytes. Raises ValueError, or csv.Error, with what is wrong."""
    names = [answer_key.id_column, *answer_key.targets]
    numeric_ids, most_rows = answers.numeric_ids, len(answers.ids)
    return read_rows(data, names, exact_columns=True, numeric_ids=numeric_ids, most_rows=most_rows)


# ---- DSBench's task files: questions whose data lie beside them ----------------------------------


def read_task_texts(path):
    """task id -> {cleaned_prompt, task_type, id_column, target_column}, of a JSON file; nothing without a path."""
    if not path:
        return {}
    texts = read_json(Path(path).parent, Path(path).name, what="folder of task texts")
    objects = isinstance(texts, dict) and all(isinstance(text, dict) for text in texts.values())
    require(objects, f"{path} must hold one object a task")
    return texts


def load_task(where, stem, prompt, metadata, data_root, texts):
    """One of DSBench's modeling tasks as a Problem. Raises AbsentData where its files are not there."""
    names = ("task_id", "train_file", "test_file", "answer_dir")
    require(all(isinstance(metadata.get(name), str) for name in names), f"{where}: its metadata lack paths")
    task_id, text = metadata["task_id"], texts.get(metadata["task_id"], {})

    # find its files
    train, test = Path(data_root, metadata["train_file"]), Path(data_root, metadata["test_file"])
    folder = Path(data_root, metadata["answer_dir"])
    answers = folder / "test_answer.csv"
    others = sorted(folder.glob("*.csv"))
    if not answers.is_file() and others:
        answers = others[0]
    for file in (train, test, answers):
        if not file.is_file():
            raise AbsentData(f"{task_id} (no {file})")

    claimed_kind = text.get("task_type") or metadata.get("data_type")
    kind, key = repair_metadata(where, train, answers, claimed_kind, text)
    columns = ", ".join([key.id_column, *key.targets])
    question = f"{text.get('cleaned_prompt') or prompt}\n\nsubmission.csv must have exactly these columns: {columns}."
    files = {"train.csv": train, "test.csv": test}
    read_answers(key, kind)  # what is wrong with them must show now, not when the first episode is graded
    return Problem(f"{stem}/{task_id}", question, kind=kind, files=files, answer_key=key)


def repair_metadata(where, train, answers, claimed_kind, text):
    """(kind, AnswerKey) of a task, from its published metadata where the data bear them out.

    NOTE: some of what is published is wrong. Id or target columns that the answers do not have:
    then the first column of the answers is the id, and the targets are the columns that train.csv
    shares with them. Tasks called "regression" whose targets are words: they are classifications.
    """
    names, first_row = csv_head(answers)
    columns = [name for name in names if name]  # pandas writes an index under an empty name
    id_column, targets = text.get("id_column"), text.get("target_column", [])
    if id_column not in columns:
        id_column = columns[0] if columns else ""
    if isinstance(targets, str):
        targets = [targets]
    if not targets or not isinstance(targets, list) or not all(name in columns for name in targets):
        train_names, _ = csv_head(train)
        targets = [name for name in train_names if name in columns]
    targets = tuple(name for name in targets if name != id_column)
    whole = len(first_row) == len(names)
    require(targets and whole, f"{where}: {answers} has no column to predict, or no row of all its columns")
    try:
        numeric = bool([finite_number(first_row[names.index(name)]) for name in targets])
    except ValueError:
        numeric = False
    kind = "regression" if str(claimed_kind).lower() == "regression" and numeric else "classification"
    return kind, AnswerKey(id_column, targets, answers)


def csv_head(path):
    """(names of the columns, first row) of a CSV file; empty lists where it has none."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            names = [name.strip() for name in next(reader, [])]
            return names, [cell.strip() for cell in next(reader, [])]
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


# ---- Which problems to train and to evaluate on --------------------------------------------------


def question_key(problem):
    """What two problems share if they ask the same, case and spacing aside."""
    return " ".join(problem.question.lower().split())


def repeated(problems):
    """The problems whose question has come before in the list."""
    seen, found = set(), []
    for problem in problems:
        if question_key(problem) in seen:
            found.append(problem)
        seen.add(question_key(problem))
    return found


def check_problems(train, evaluation):
    """A sentence for each way in which problems repeat: within train, within evaluation, or across the two."""
    trained = {question_key(problem) for problem in train}
    found = {
        "problems to train on repeat an earlier one": repeated(train),
        "problems to evaluate on repeat an earlier one": repeated(evaluation),
        "problems to evaluate on are also trained on": [p for p in evaluation if question_key(p) in trained],
    }
    return [f"{len(some)} {what}, such as {some[0].id}" for what, some in found.items() if some]


def subset(problems, count, seed):
    """`count` of the problems, in order, drawn as the paper draws its 512 of 933 (numpy's legacy generator)."""
    import numpy as np

    require(0 < count <= len(problems), f"a subset must have 1 to {len(problems)} problems, not {count}")
    drawn = np.random.RandomState(seed).choice(len(problems), count, replace=False)
    return [problems[i] for i in sorted(drawn)]


# ==================================================================================================
# Part two: the sandbox
# ==================================================================================================
#
# The sandbox runs programs that a language model wrote, and believes nothing that they leave
# behind. Four kinds of processes take part, and each trusts only those that come before it:
#
#   host        The trainer. It never forks itself, and it never unpickles a file of a program.
#   zygote      This file, started as a script in an empty environment. It imports once what programs
#               need, and forks for every run. Keep its imports light: no torch in this file.
#   supervisor  One for each run. It watches time, memory, output, processes and disk, and in the end
#               it kills every process below it.
#   program     It first gives up every file but its workspace (and, to read, Python and the system's
#               libraries), root, all capabilities, sockets, and every way into other processes.
#               Then it executes the model's code.
#
# The sandbox does NOT protect against the following:
#
#   - Faults of the kernel, and side channels such as timing, load and caches. Against these, put a
#     virtual machine around the trainer.
#   - stat() on any path. A program can learn whether a file outside exists, its size and its times,
#     but neither the file's contents nor the list of a folder.
#   - Changed times (utime) of files of the same user. And on kernels before 6.2, files of Python that
#     belong to the same user can be emptied.
#   - Memory, processes, disk or output that is taken between two looks of the supervisor, 0.2 seconds
#     apart. (When memory runs out, the kernel kills sandboxed programs first.)
#   - Reading below sys.prefix, /usr, /lib or /bin. Keep no answers and no keys there.
#   - Lies. What a program prints is its word, not evidence.
#   - Anything but accidents at the level "limits". There a program can read, change and kill all that
#     its user can.

LINUX = sys.platform == "linux"
LOOK_EVERY = 0.2  # seconds between two looks of the supervisor at processes, memory and disk
GRACE = 60.0  # seconds after its time limit at which a run without a report counts as our failure


@dataclass
class Limits:
    """The limits of one run."""

    timeout: float = 30.0  # seconds by the clock, from the moment it has a core
    memory: int = 4 << 30  # bytes, of each process (address space) and of all together (resident)
    disk: int = 512 << 20  # bytes in the workspace; four times as many may be written over and over
    files: int = 2000  # files and folders in the workspace
    processes: int = 64  # at once
    output: int = 32_000  # bytes of output that are kept, half from its start and half from its end
    flood: int = 4 << 20  # bytes of output that end the run


@dataclass
class Result:
    """An account of one run."""

    status: str  # ok | error | killed | timeout | memory | disk | processes | flood; between our processes also
    # sandbox (we failed) and stopped (the host is gone)
    output: str  # what the program printed, standard output and standard error in order
    code: int | None  # exit code, or minus the signal that killed it; None if we ended it
    seconds: float  # by the clock


@dataclass(frozen=True)
class FileEntry:
    """A file that lies in a workspace."""

    name: str  # printable, at most 100 characters
    size: int  # bytes
    shape: str  # "rows x columns" of a CSV file, else ""


class SandboxError(RuntimeError):
    """We failed, not the program: nothing may be concluded about it, least of all a reward."""


class Sandbox:
    """Runs programs, from many threads at once, each on a core of its own.

    A run that finds no free core waits, and its clock starts only when it has one. The level
    "landlock" is described above. The level "limits" (for macOS and kernels before 5.13) bounds
    time, output and disk, and protects nothing. `preload` names modules that the zygote imports
    once for all: a fork with pandas takes 25 ms, importing it 300. `cores` are the processors to
    use, by default all that this process may use. The other arguments are the fields of Limits.
    Raises InputError where the level is unknown or cannot be had.
    """

    def __init__(self, level="landlock", preload=(), cores=None, **limits):
        if level not in ("landlock", "limits"):
            raise InputError(f"there is no sandbox level {level!r}; known are landlock and limits")
        self.level = level
        self.preload = preload
        self.limits = Limits(**limits)
        self.user = self._choose_user()  # the user id that programs get, or None: they keep the trainer's
        self.workspaces = set()  # the paths of the workspaces that exist
        self.lock = threading.Lock()  # guards the next three
        self.closed = False
        # The zygote and the socket to it: the first run starts it, and a later one does so again if
        # it was killed.
        self.process = self.line = None
        self.cores = queue.SimpleQueue()  # who holds a core has the right to run a program
        allowed = sorted(os.sched_getaffinity(0)) if LINUX else range(os.cpu_count())
        for core in cores or allowed:
            self.cores.put(core)
        atexit.register(self.close)
        self._probe()

    def run(self, code, workspace, **limits):
        """Execute code in a folder of make_workspace, one run at a time in each folder, and return its Result.

        Files stay in the folder; processes do not: none of the program's is alive afterwards.
        `limits` are fields of Limits, for this run only. Raises SandboxError if we failed twice.
        """
        limits = asdict(replace(self.limits, **limits))
        core = self.cores.get()
        try:
            job = dict(code=code, workspace=workspace, level=self.level, user=self.user, limits=limits, core=core)
            try:
                return self._attempt(job)
            except (SandboxError, OSError):  # our failure says nothing about the program: run it again
                time.sleep(1)  # a zygote that was killed needs a moment to end: only then is another one started
                return self._attempt(job)
        except OSError as error:
            raise SandboxError(f"the line to the sandbox broke: {error}") from error
        finally:
            self.cores.put(core)  # also after Ctrl-C: a core that is not given back is lost for the whole training

    def make_workspace(self, files=None):
        """Make a new private folder with copies of these files (name -> bytes, or a Path), and return its path.

        Raises SandboxError if that fails, for instance because the disk is full.
        """
        try:
            workspace = os.path.realpath(tempfile.mkdtemp(prefix="workspace-"))
            self.workspaces.add(workspace)
            for name, data in (files or {}).items():
                # A copy, not a link: the program may write into the file.
                Path(workspace, name).write_bytes(data.read_bytes() if isinstance(data, Path) else data)
        except OSError as error:
            raise SandboxError(f"no room for a workspace in {tempfile.gettempdir()}: {error}") from error
        if self.user is not None:
            for path in (workspace, *Path(workspace).iterdir()):
                os.chown(path, self.user, self.user)
        return workspace

    def list_files(self, workspace):
        """Return a tuple of a FileEntry for each plain file in the folder, sorted by name.

        The list goes into prompts: it holds only names that can be printed, cut to 100 characters.
        Only the first 50 entries can have a shape, and only while no more than 32 MB have been read
        for shapes.
        """
        found = []
        budget = 32 << 20  # bytes: an action may leave 50 files of 64 MB that take no room on the disk
        with suppress(OSError):  # a program may have locked or removed the folder
            for entry in sorted(os.scandir(workspace), key=lambda entry: entry.name):
                if entry.is_file(follow_symlinks=False) and entry.name.isprintable():
                    size = entry.stat(follow_symlinks=False).st_size
                    shape = ""
                    if entry.name.endswith(".csv") and len(found) < 50 and size <= budget:
                        shape = self._csv_shape(workspace, entry.name)
                        budget -= size
                    found.append(FileEntry(entry.name[:100], size, shape))
        return tuple(found)

    @staticmethod
    def read(workspace, name, most=64 << 20):
        """Return the bytes of a file that a program left. Never unpickle them.

        This is the only way in which the host takes such a file. Raises OSError unless it is a
        plain file with a single name and at most `most` bytes: a link may lead to the answers, a
        pipe hangs the host, and a sparse file fills its memory.
        """
        if "/" in name or not name.isprintable():
            raise OSError(f"{name[:100]!r} is not the name of a file")
        # NOTE: an opener, not a descriptor: open() leaves a given descriptor open if it is a
        # folder's.
        with open(os.path.join(workspace, name), "rb", opener=open_without_following) as file:
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_size <= most:
                return file.read(most)
        raise OSError(f"{name!r} is not a plain file of at most {most} bytes")

    def remove_workspace(self, workspace):
        """Remove a workspace, whatever a program made of it.

        Mostly it holds nothing but files. Folders may be locked, or nested a thousand times, which is too
        deep for shutil.rmtree: then two processes do it, which takes 4 ms and not 0.1.
        """
        try:
            with suppress(OSError):
                for entry in os.scandir(workspace):
                    os.unlink(entry.path)  # a link is removed, never followed; a folder is an OSError
                os.rmdir(workspace)
            if os.path.lexists(workspace):
                subprocess.run(["chmod", "-R", "u+rwx", "--", workspace], stderr=subprocess.DEVNULL)
                subprocess.run(["rm", "-rf", "--", workspace], stderr=subprocess.DEVNULL)
        finally:
            if not os.path.lexists(workspace):  # else close() tries again
                self.workspaces.discard(workspace)

    def close(self):
        """End every program and the zygote, and remove the workspaces that are left. May be called twice."""
        with self.lock:
            self.closed = True
            if self.process is not None:
                with suppress(OSError, subprocess.TimeoutExpired), self.line:
                    self.line.shutdown(socket.SHUT_RDWR)  # closing is not enough: a fork of the trainer may hold it too
                    self.process.wait(10)
                self.process.kill()
                self.process.wait()
        for workspace in list(self.workspaces):
            self.remove_workspace(workspace)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _choose_user(self):
        """Return the id of the user nobody if the trainer is root and nobody can reach Python and /tmp, else None."""
        if self.level == "limits" or os.geteuid() != 0:
            return None
        # Where Python lies below a closed home, imports would fail in the middle of programs that
        # are nobody. There programs stay root, but without root's powers.
        places = [Path(path).resolve() for path in (sys.prefix, sys.base_prefix, tempfile.gettempdir())]
        folders = [folder for place in places for folder in (place, *place.parents)]
        return 65534 if all(folder.stat().st_mode & stat.S_IXOTH for folder in folders) else None

    def _probe(self):
        """Find out, once and for all, whether the level holds here: a program tries what it must not do."""
        try:
            probed = self.run(PROBE if self.level != "limits" else "pass", self.make_workspace())
            if probed.status != "ok":
                raise SandboxError(f"{probed.status}: {probed.output.strip()[-300:]}")
        except SandboxError as error:
            self.close()
            raise InputError(
                f"no isolation here ({error}); --sandbox limits works without it, but not as root"
            ) from None
        if self.level == "limits":
            print("WARNING: programs run WITHOUT isolation, can do what you can", file=sys.stderr)

    def _attempt(self, job):
        """Try once to run a job. Every failure that is not the program's is a SandboxError or an OSError."""
        control, theirs = socket.socketpair()
        with control:
            with theirs, self.lock:
                if self.closed:
                    raise SandboxError("the sandbox is closed")
                if self.process is None or self.process.poll() is not None:
                    self._start_zygote()
                socket.send_fds(self.line, [b"."], [theirs.fileno()])  # the zygote gives this end to a new supervisor
            control.settimeout(job["limits"]["timeout"] + GRACE)
            try:
                control.sendall(json.dumps(job).encode() + b"\n")
                line = control.makefile("rb").readline()
            finally:
                # However it ended for us (Ctrl-C too), wait until the run's processes are gone.
                # This needs a new reader: after a timeout the first one refuses to read.
                with suppress(OSError):
                    control.shutdown(socket.SHUT_WR)
                    control.makefile("rb").read()

        try:
            result = Result(**json.loads(line))
        except (ValueError, TypeError) as error:  # the line is empty or broken off
            raise SandboxError("the supervisor of a run was killed") from error
        if result.status == "sandbox":
            raise SandboxError(result.output)
        return result

    def _start_zygote(self):
        """Start this file as a script, away from the trainer's environment, terminal and process group."""
        self.line, end = socket.socketpair()
        command = [sys.executable, "-I", "-B", "-X", "utf8", __file__, str(end.fileno()), *self.preload]
        away = dict(env=ENVIRONMENT, cwd="/", stdin=subprocess.DEVNULL, start_new_session=True)
        with end:
            self.process = subprocess.Popen(command, pass_fds=[end.fileno()], **away)

    def _csv_shape(self, workspace, name):
        """Return "rows x columns" of a CSV file, its header not counted, or "" if that cannot be told.

        Rows are line ends, and columns are those in the first 100,000 bytes of the first line: the
        rest is never parsed.
        """
        with suppress(OSError, csv.Error):
            data = self.read(workspace, name)
            line_end = b"\n" if b"\n" in data else b"\r"  # a lone carriage return: a file of an old Mac
            header = data[:100_000].split(line_end, 1)[0].decode("utf-8", "replace")
            columns = len(next(csv.reader([header]), []))
            rows = data.rstrip().count(line_end)
            return f"{rows} x {columns}" if data else ""
        return ""


def open_without_following(path, flags):
    """Open a path for open(), but follow no link and do not wait for the other end of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


# ---- The zygote ----------------------------------------------------------------------------------


def zygote(requests, preload):
    """Fork a supervisor for each request (one byte, one descriptor) until the host closes the line or is dead."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the supervisors: no zombies
    if LINUX:
        kernel("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a killed supervisor leaves becomes a child of ours
    for name in preload:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # else a garbage collection in a fork would copy every page of memory
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, 1, 1)
        if not message:
            break
        control = descriptors[0]
        with suppress(OSError):  # no room for another process: the host then sees a closed line
            if os.fork() == 0:
                requests.close()
                supervise(control)
        os.close(control)
    end_all_below()


# ---- The supervisor ------------------------------------------------------------------------------


def supervise(control):
    """In a fork of the zygote: do the job that the host sends, and send back a Result. Never returns."""
    try:
        # Take the job.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with open(control, "rb", closefd=False) as line:
            job = json.loads(line.readline())
        limits = Limits(**job["limits"])
        if LINUX:
            os.sched_setaffinity(0, [job["core"]])
            kernel("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # daemons become children of this process
            Path("/proc/self/oom_score_adj").write_text("1000")  # when memory runs out, the kernel spares the trainer

        # Start the program, watch it, and end all that is left of it. NOTE: output goes into a
        # file. With a pipe, any process that inherited an end could put off its closing for ever.
        started = time.monotonic()
        with tempfile.TemporaryFile() as file:
            log = file.fileno()
            program = os.fork()
            if program == 0:
                run_program(job, limits, log)
            status, code = watch(program, started, job["workspace"], limits, log, control)
            seconds = time.monotonic() - started
            end_all_below(-program)  # from here on the workspace is at rest
            fcntl.fcntl(log, fcntl.F_SETFL, 0)  # its flags are the program's too: with O_DIRECT no read would succeed
            output = kept_output(log, limits.output)
        status = excess(job["workspace"], limits) or status  # what was taken since the last look counts too
        report = Result(status, output, code, seconds)
    except BaseException as error:
        # Also in the process of a program that could not shut all doors: it comes here too, before
        # us.
        end_all_below()
        report = Result("sandbox", f"{type(error).__name__}: {error}", None, 0.0)
    with suppress(OSError):
        os.write(control, json.dumps(asdict(report)).encode() + b"\n")
    os._exit(1)


def watch(program, started, workspace, limits, log, control):
    """Wait until the program ends or is over a limit. Returns the status and, if it ended, its exit code."""
    next_look = started + LOOK_EVERY
    pause = 0.001
    while True:  # NOTE: no alarm signal: its handler could raise an exception in the middle of the report
        now = time.monotonic()
        code = bury_children(program)
        if os.fstat(log).st_size > limits.flood:
            return "flood", None
        if code == 0:
            return "ok", code
        if code is not None:
            return "error" if code > 0 else "killed", code
        if now >= started + limits.timeout:
            return "timeout", None
        if now >= next_look:
            over = excess(workspace, limits)
            if over is not None:
                return over, None
            next_look = time.monotonic() + LOOK_EVERY
        elif select.select([control], [], [], pause)[0]:
            return "stopped", None  # by the host, or the host is dead
        pause = min(1.2 * pause, 0.02)


def bury_children(program):
    """Collect the children that ended, and return the program's exit code, or None if it is not among them.

    The orphans of the program are children of the supervisor. Zombies would count as processes of
    the program.
    """
    while True:
        pid, wait_status = os.waitpid(-1, os.WNOHANG)
        if pid == program:
            return os.waitstatus_to_exitcode(wait_status)
        if pid == 0:
            return None


def kept_output(log, most):
    """Return the first and the last half of `most` bytes of the output, as text. The middle is only counted."""
    size = os.fstat(log).st_size
    half = most // 2
    middle = f"\n... {size - 2 * half} bytes cut ...\n".encode() if size > 2 * half else b""
    kept = os.pread(log, half, 0) + middle + os.pread(log, half, max(half, size - half))
    return kept.decode("utf-8", "replace")


def excess(workspace, limits):
    """Return the name of a limit that the run as a whole is over (processes, memory or disk), or None."""
    # The memory that its processes hold, and what they have written since they started, in bytes.
    below = descendants(os.getpid())
    memory = written = 0
    for pid in below:
        with suppress(OSError):  # it has ended meanwhile
            memory += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
            counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
            # wchar misses what is written through mmap; write_bytes misses what is written to a
            # tmpfs.
            written += max(int(counts["wchar"]), int(counts["write_bytes"]))

    # What was written is counted too, for open files without a name are seen nowhere else.
    over = dict(processes=len(below) > limits.processes, memory=memory > limits.memory)
    over["disk"] = written > 4 * limits.disk or is_full(workspace, limits)
    return next((name for name in over if over[name]), None)


def is_full(workspace, limits):
    """Is a workspace over its limits of bytes or files? One that cannot be searched may hide files: it is full too."""
    with suppress(OSError):  # a path that is too long to follow, a folder that may not be listed
        sizes = [found.st_blocks * 512 for found in itertools.islice(stats_below(workspace), limits.files + 1)]
        return len(sizes) > limits.files or sum(sizes) > limits.disk
    return True


def stats_below(folder):
    """Yield the os.stat_result of every file and folder below this one, while programs may add and remove some."""
    folders = [folder]
    while folders:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # removed meanwhile; the others still count
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(found.st_mode):
                        folders.append(entry.path)
                    yield found


def end_all_below(*groups):
    """Kill by descent until nothing is left: a process can leave its group and its session, not its ancestors.

    `groups` are process groups to kill as well, as negative numbers: where there is no /proc, that
    is all that can be done.
    """
    with suppress(ChildProcessError):  # raised by waitpid when there is no child any more
        while True:
            for pid in (*groups, *descendants(os.getpid())):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
            time.sleep(0.001)


def descendants(pid):
    """Return the ids of all processes below this one (on Linux; elsewhere none are seen)."""
    found = [pid]
    for parent in found:  # the list grows meanwhile. No recursion: a chain of a thousand processes is an attack
        for path in glob.glob(f"/proc/{parent}/task/*/children"):
            with suppress(OSError):
                found += [int(child) for child in Path(path).read_text().split()]
    return found[1:]


# ---- The program ---------------------------------------------------------------------------------


def run_program(job, limits, log):
    """In the program's process: shut every door, then execute the code as the interpreter would. Never returns."""
    workspace = job["workspace"]
    os.setsid()
    os.nice(10)  # the supervisor is not: on the core that they share it comes before a fork bomb
    os.chdir(workspace)

    # Standard input is empty; standard output and standard error go into the log.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)

    # Set the kernel's limits of a single process. (Not of NPROC: it counts all threads of the user,
    # the trainer's too.)
    most = dict(CPU=int(limits.timeout) + 5, AS=limits.memory, FSIZE=limits.disk, NOFILE=256, CORE=0)
    for kind, value in most.items():
        with suppress(ValueError, OSError):  # a lower one may hold already, and macOS does not take that of memory
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (value, value))

    # Shut the doors. A door that does not shut is an exception, which supervise() reports to the
    # host.
    if job["level"] != "limits":
        lock_down(workspace, job["user"])
    elif os.geteuid() == 0:
        raise PermissionError("root runs no program without isolation")
    os.closerange(3, 65536)  # also the line to the host: nothing that is said from here on is believed

    # Execute.
    renew_interpreter(workspace)
    main, out = sys.modules["__main__"], sys.stdout  # the program may put others in their places
    exit_code = execute(job["code"], main.__dict__, sys.stderr)

    # Do what the interpreter does at its end, for os._exit does none of it.
    with suppress(BaseException):
        threading._shutdown()  # waits for threads
        atexit._run_exitfuncs()
        main.__dict__.clear()  # files that are still open get closed: else what was written last is lost
        gc.collect()
        out.flush()
    os._exit(exit_code & 255)


def renew_interpreter(workspace):
    """Make the streams and modules look as in a new interpreter."""
    # Written line by line, so that what was printed before a kill is kept. Characters that UTF-8
    # cannot hold are replaced.
    how = dict(mode="w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = sys.__stdout__ = open(1, **how)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, **how)  # noqa: SIM115
    sys.argv = [""]
    sys.path.append(workspace)  # last: a pandas.py in the workspace shadows nothing
    sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = workspace
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else every fork draws the same numbers


def execute(code, namespace, errors):
    """Execute the code, print what it raises as the interpreter would, and return its exit code."""
    # Tracebacks show the program's lines: an entry holds size, time (None: never check it), lines
    # and name.
    linecache.cache["<action>"] = (0, None, code.splitlines(True), "<action>")
    try:
        exec(compile(code, "<action>", "exec", dont_inherit=True), namespace)
        return 0
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=errors)
    except BaseException as error:
        traceback.print_exception(type(error), error, error.__traceback__.tb_next, file=errors)  # without our frame
    return 1


# ---- How a program gives up what it does not need ------------------------------------------------


def lock_down(workspace, user):
    """Become this user (None: stay the present one), and give up for good what a program does not need.

    Any failure is an exception: then the program must not run.
    """
    column = MACHINES.index(f"{sys.platform} {os.uname().machine}")  # an error elsewhere: no step is skipped in silence
    kernel("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # neither setuid files nor exec give any rights back
    version = kernel("syscall", LANDLOCK_CREATE, None, 0, 1)  # 1: asks for the version of Landlock
    give_up_files(workspace, version)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    # All three sets of capabilities are empty, in the layout of version 3.
    kernel("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    kernel("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # changing the user took /proc/self away
    # Die with the supervisor. Only now, for changing the user clears this.
    kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    give_up_calls(column, version)


def give_up_files(workspace, version):
    """With Landlock: leave the workspace, some places to read, some devices, and no way to processes outside."""
    # What the rules are about. A kernel refuses features that its version of Landlock does not
    # know.
    every = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1  # the rights on files that a version knows
    network = 3 if version >= 4 else 0  # TCP: bind and connect
    scopes = 3 if version >= 6 else 0  # abstract sockets, and signals, of processes outside
    features = struct.pack("3Q", every, network, scopes)
    rules = kernel("syscall", LANDLOCK_CREATE, features, len(features), 0)

    # Exceptions to "nothing".
    places = dict.fromkeys([*READABLE, sys.prefix, sys.base_prefix], EXECUTE | READ_FILE | READ_DIR)
    places |= dict.fromkeys(DEVICES, READ_FILE | WRITE_FILE) | {workspace: every}
    for path, rights in places.items():
        if not os.path.isdir(path):
            rights &= EXECUTE | READ_FILE | WRITE_FILE  # on a file all other rights are errors
        with suppress(FileNotFoundError):  # no system has all of these places
            rule = struct.pack("=Qi", rights, os.open(path, os.O_PATH))
            kernel("syscall", LANDLOCK_ADD_RULE, rules, 1, rule, 0)  # 1: for a path and all that is below it
    kernel("syscall", LANDLOCK_RESTRICT, rules, 0)


def give_up_calls(column, version):
    """With seccomp: a filter that sees the machine, a system call's number, and its first argument."""
    # Calls in another machine's way have other numbers. On x86, the numbers from 2^30 on are all
    # calls once more.
    steps = [instruction(LOAD, MACHINE), instruction(IF_EQUAL, AUDIT[column], skip_if=1), instruction(RETURN, KILL)]
    steps += [
        instruction(LOAD, CALL_NUMBER),
        instruction(IF_NOT_LESS, 1 << 30, skip_else=1),
        instruction(RETURN, PERMISSION),
    ]

    # Calls with a response of their own, whatever their arguments.
    refused = REFUSED | (SIGNALS if version < 6 else {}) | (TRUNCATE if version < 3 else {})
    for calls, response in ((refused, PERMISSION), (PRETENDED, PRETEND), (UNKNOWN, NO_SUCH_CALL)):
        for numbers in calls.values():
            steps += if_call(numbers[column], response)

    # Calls that are refused because of their first argument.
    for numbers, test, value in REFUSED_IF.values():
        steps += if_first_argument(numbers[column], test, value, PERMISSION)

    steps += [instruction(RETURN, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(steps))
    # 2: a filter, which is given by its length and its address.
    kernel("prctl", PR_SET_SECCOMP, 2, struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)), 0, 0)


def instruction(code, value, skip_if=0, skip_else=0):
    """One step of a filter. A test says how many steps to skip if it holds, and how many if it does not."""
    return struct.pack("HBBI", code, skip_if, skip_else, value)


def if_call(number, response):
    """Steps that say: if this is the number of the call, the response is this."""
    return [instruction(IF_EQUAL, number, skip_else=1), instruction(RETURN, response)]


def if_first_argument(number, test, value, response):
    """Steps that say: if this is the call's number and its first argument passes the test, the response is this.

    If it does not pass, the call is allowed at once: the argument was loaded over the call's
    number.
    """
    found = [
        instruction(IF_EQUAL, number, skip_else=4),
        instruction(LOAD, FIRST_ARGUMENT),
        instruction(test, value, skip_else=1),
    ]
    return [*found, instruction(RETURN, response), instruction(RETURN, ALLOW)]


def kernel(name, *args):
    """Call a function of libc. A negative result is raised as an OSError."""
    as_long = [ctypes.c_long(value) if isinstance(value, int) else value for value in args]
    result = getattr(LIBC, name)(*as_long)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name} {args[0]}: {os.strerror(ctypes.get_errno())}")
    return result


# ---- Numbers of the kernel -----------------------------------------------------------------------

LIBC = ctypes.CDLL(None, use_errno=True)

# Options of prctl.
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38

# Landlock: system calls (with the same numbers on every machine), and the first of its rights.
LANDLOCK_CREATE, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8

# Steps of a seccomp filter, and what LOAD can load: places in the kernel's description of a call.
# The first argument is its lower 32 bits.
LOAD, IF_EQUAL, IF_NOT_LESS, IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
CALL_NUMBER, MACHINE, FIRST_ARGUMENT = 0, 4, 16

# Responses of a seccomp filter. FAIL + number: the call is not done, and the program sees that error
# number (1 is EPERM, 38 ENOSYS; 0 is no error, so that the call looks done).
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
PERMISSION, NO_SUCH_CALL, PRETEND = FAIL + 1, FAIL + 38, FAIL + 0

# The machines, as sys.platform and os.uname().machine. Each pair of numbers in the tables below is
# for these two, in this order.
MACHINES = ["linux x86_64", "linux aarch64"]
AUDIT = (0xC000003E, 0xC00000B7)  # by this number a filter knows the machine

# Refused to every program: name of the call, its numbers on the two machines.
REFUSED = {
    # the network; io_uring makes calls that no filter sees
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    # ways into the memory and the open files of other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    # watching files, which tells the names of those of others
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    # priorities, also of other processes, and leaving the core
    "setpriority": (141, 140),
    "sched_setattr": (314, 274),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    # other namespaces: in a new one of users a program has all capabilities again
    "setns": (308, 268),
    "unshare": (272, 97),
    # large parts of the kernel that programs do not need and in which many faults were found
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # memory that no limit counts
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}

# Refused before version 6 of Landlock, which confines signals. Until then a program can send none,
# even to itself.
SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}

# Refused before version 3 of Landlock, which confines it.
TRUNCATE = {"truncate": (76, 45)}

# Refused if their first argument passes a test: (numbers, test, value).
REFUSED_IF = {
    "clone": ((56, 220), IF_ANY_BIT, 0x10000000),  # CLONE_NEWUSER, a new namespace of users: see unshare
    "prlimit64": ((302, 261), IF_ANY_BIT, 0xFFFFFFFF),  # limits of a process other than itself (0)
    "prctl": ((157, 167), IF_EQUAL, PR_SET_DUMPABLE),  # would hide what it writes from the supervisor
}

# "Done", but not: shutil.copy must work, and the modes of files outside must stay as they are.
PRETENDED = {"chmod": (90, 53), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452)}

# "No such call": a filter cannot see the flags of clone3. Without it libc takes clone, whose flags
# it can see.
UNKNOWN = {"clone3": (435, 435)}

# What a program may read: Python, the system's libraries, and what these libraries ask for (joblib,
# for cgroups).
READABLE = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd"]
READABLE += ["/proc/self", "/proc/meminfo", "/proc/cpuinfo", "/sys/devices/system/cpu", "/sys/fs/cgroup"]
DEVICES = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]

# All that a program sees of the environment: the trainer's holds keys. (Joblib's semaphores would
# need /dev/shm.)
ENVIRONMENT = dict(PATH="/usr/bin:/bin", LANG="C.UTF-8", USER="agent", CUDA_VISIBLE_DEVICES="")
ENVIRONMENT |= dict(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1", JOBLIB_MULTIPROCESSING="0")

# A program that tries what it must not do, and says so if it can.
PROBE = """
import contextlib, os, socket

os.listdir(os.path.dirname(os.__file__))  # a Python that cannot be read would fail later, in a program
with contextlib.suppress(PermissionError):
    raise SystemExit(f"a program reads {open('/proc/version')}")
with contextlib.suppress(PermissionError):
    raise SystemExit(f"a program has {socket.socket()}")
"""

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("agents.py is read, or imported; as a script it is the sandbox's server. Start with: python train.py")
    zygote(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
