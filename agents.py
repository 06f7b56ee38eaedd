"""agents.py: who works on a problem, in which order, what each agent sees, and what it may do.

Part of the paper: its two multi-agent workflows, MathChat (Problem Solver -> Code Executor -> Verifier) and DSBench
(Data Engineer -> Modeler -> Analyst, with files that pass through a workspace), and a miniature twin of each for the
embedded model: arithmetic and tables. An agent's prompt is rendered to token ids once, by the tokenizer's chat
template; a further turn extends those ids and is never rendered again from text.
Also here: the one tool that agents have, a Python sandbox (second half of the file). That is why this file imports the
standard library only: started as a script, it is the sandbox's small server process.
What we leave out: agents that talk in free order, and tools other than Python.
See prompts:  python -c "import agents; agents.show_prompts('arithmetic')"  (or those of mathchat, dsbench, tables)"""
import atexit, csv, ctypes, errno, gc, glob, hashlib, importlib.util, itertools, json, linecache, math, os
import platform, queue, random, re, resource, select, shutil, signal, socket, stat, struct, subprocess, sys, tempfile
import threading, time, traceback, types
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

class InputError(Exception):
    """Bad input from the user. The message is one sentence: what, where, what to do. Commands print it and exit 2."""

def require(condition, sentence):
    """Raise InputError with this sentence unless the condition holds."""
    if not condition: raise InputError(sentence)

def digest(*parts):
    """A number in [0, 2^64) that depends on the parts alone. (Python's hash() of strings is salted in each process.)"""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")

# ---- Problems, agents, pipelines -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Table:
    """The files of a data-analysis task, each as its bytes or as the Path where it lies."""
    kind: str  # classification or regression
    id_column: str
    targets: tuple  # the names of the columns to predict
    train: bytes | Path  # train.csv of every workspace
    test: bytes | Path  # test.csv of every workspace
    answers: bytes | Path  # ids and true targets: read when a submission is graded, never in a workspace
    schema: tuple = ()  # tables only: kind, target, id column, number columns, word column, for the offline coach

@dataclass(frozen=True)
class Problem:
    id: str  # unique within a file or a generator; part of the seed of every action
    question: str
    answer: str = ""  # the truth: never in a prompt, never in a workspace
    expression: str = ""  # arithmetic only: a right plan, for the offline coach
    table: Table | None = None  # data analysis only

@dataclass(frozen=True)
class Agent:
    name: str
    prompt: str  # template of the user message; {problem}, {files}, and earlier agents' {NAME}, {NAME_output} go in
    role: str = ""  # template of the system message
    max_actions: int = 1
    uses_tools: bool = False  # the code blocks of its reply run as one program
    coach_sees_truth: bool = False  # only then is the coach shown the true answer, or how good the submission is
    must_write: tuple = ()  # files that it must leave in the workspace; while one is missing it may act again

@dataclass(frozen=True)
class Pipeline:
    name: str
    agents: tuple  # of Agent, in order; the last one's reply holds the system's answer
    show: Callable  # Result of a program -> the observation text that agents and coach see
    pass_thinking: bool = True  # False: what other agents and the coach get lacks the thinking part
    problems: Callable | None = None  # split -> list of Problem; None: they come from files
    show_files: Callable | None = None  # what Sandbox.list_files found -> text
    preload: tuple = ()  # modules that its programs find imported already, where they are installed
    pieces: tuple = ()  # vocabulary of the embedded model
    demonstration: Callable | None = None  # random.Random -> Demonstration for the embedded model's warm start

@dataclass(frozen=True)
class Demonstration:
    agent: Agent
    values: dict  # fills the agent's prompt
    turns: tuple  # earlier (reply, observation) pairs of the same agent
    reply: str  # what to learn

def after_thinking(text):
    """The part of a reply behind its thinking part; nothing if the thinking never ended.
    >>> after_thinking("<think>12 or 13?</think>It is 12."), after_thinking("<think>12 or"), after_thinking("12")
    ('It is 12.', '', '12')"""
    _, closed, rest = text.rpartition("</think>")
    return rest if closed or "<think>" not in text else ""

def extract_program(text):
    r"""The Python blocks of a reply's part after thinking, joined in order to one program; None if there are none.
    Blocks in another language are passed over, and so is one that the output limit cut off.
    >>> extract_program("First\n```python\nx = 2\n```\nthen\n```\nprint(x)\n```\nand\n```json\n{}\n```")
    'x = 2\n\nprint(x)\n'
    >>> extract_program("```python\nprint(1)")"""
    blocks = re.findall(r"^[ \t]*```(\w*)[ \t]*\n(.*?)^[ \t]*```", after_thinking(text), re.MULTILINE | re.DOTALL)
    programs = [code for language, code in blocks if language.lower() in ("", "python", "python3", "py")]
    return "\n".join(programs) if programs else None

def handed_on(pipeline, problem, actions, files=()):
    """What prompts may show of an episode so far: name -> text, from each agent's last action, and the files there."""
    values = {"problem": problem.question} | ({"files": pipeline.show_files(files)} if pipeline.show_files else {})
    for action in actions:
        values[action.agent] = action.text if pipeline.pass_thinking else after_thinking(action.text)
        values[action.agent + "_output"] = action.observation or "no program was run"
    return values

# ---- Problem files ---------------------------------------------------------------------------------------------------
def read_json(folder, name, default=None, what="model folder"):
    """The content of a JSON file of a folder; `default`, if there is one, where the file is absent."""
    path = os.path.join(folder, name)
    if default is not None and not os.path.exists(path): return default
    try:
        with open(path, encoding="utf-8") as f: return json.load(f)
    except FileNotFoundError: raise InputError(f"{folder} is not a {what}: it has no {name}") from None
    except (OSError, ValueError) as error: raise InputError(f"{path} cannot be read: {error}") from None

def read_entries(path):
    """The objects of a JSON list, or of JSON lines. Raises InputError, which names the file and the line."""
    try:
        with open(path, encoding="utf-8") as f: text = f.read()
    except (OSError, UnicodeDecodeError) as error: raise InputError(f"{path} cannot be read: {error}") from None
    whole, entries = text.lstrip().startswith("["), []
    for number, part in enumerate([text] if whole else text.splitlines(), 1):
        try: entries += json.loads(part) if whole else [json.loads(part)] if part.strip() else []
        except ValueError as error:
            line = getattr(error, "lineno", 1) if whole else number
            raise InputError(f"{path}, line {line}: this is not JSON ({error})") from None
    return [entry if isinstance(entry, dict) else {} for entry in entries]

def load_problems(path, root="", texts="", allow_missing=False):
    """The Problems of a JSON list, or of JSON lines: objects with a prompt (or problem, or question), an answer (text
    or number), and perhaps an id; or DSBench's, see load_task(). Ids get the file's name in front. Raises InputError,
    which names the file, the entry, and what is wrong with it. root, texts, allow_missing: see train.Config."""
    stem, problems, absent = Path(path).stem, [], []
    texts = read_json(Path(texts).parent, Path(texts).name, what="folder of task texts") if texts else {}
    require(isinstance(texts, dict) and all(isinstance(t, dict) for t in texts.values()), "task texts must be objects")
    for number, entry in enumerate(read_entries(path), 1):
        question, answer = entry.get("prompt") or entry.get("problem") or entry.get("question"), entry.get("answer")
        meta = entry.get("metadata")
        if isinstance(question, str) and isinstance(meta, dict) and "train_file" in meta:
            task = load_task(f"{path}, entry {number}", stem, question, meta, root, texts.get(meta.get("task_id"), {}))
            (problems if isinstance(task, Problem) else absent).append(task)
            continue
        readable = isinstance(question, str) and type(answer) in (str, int, float) and str(answer).strip()
        require(readable, f"{path}, entry {number}: a prompt and an answer are needed, as text or number")
        answer = int(answer) if isinstance(answer, float) and answer.is_integer() else answer
        problems.append(Problem(f"{stem}/{entry.get('id', number)}", question, str(answer)))
    missing = f"{path}: the data of {len(absent)} tasks are absent: {'; '.join(absent)}"
    require(not absent or allow_missing, f"{missing} (--allow-missing leaves them out)")
    if absent: print(missing, file=sys.stderr)
    ids = [problem.id for problem in problems]
    require(problems, f"{path} holds no problems" + (" whose data are there" if absent else ""))
    require(len(set(ids)) == len(ids), f"{path}: the id {max(ids, key=ids.count)} stands there more than once")
    return problems

def load_files(paths, pipeline, **how):
    """file name without its ending -> its Problems, of several files. The name leads their ids: no two may share it."""
    stems = [Path(path).stem for path in paths]
    for stem in stems: require(stems.count(stem) == 1, f"two problem files are named {stem}: rename one")
    files = {stem: load_problems(path, **how) for stem, path in zip(stems, paths)}
    odd = [p.id for part in files.values() for p in part if (p.table is None) != (pipeline.show_files is None)]
    require(not odd, f"{len(odd)} problems, such as {''.join(odd[:1])}, are not of the {pipeline.name} pipeline's kind")
    return files

def csv_head(path):
    """The names of the columns of a CSV file, and its first row."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as f: rows = [*itertools.islice(csv.reader(f), 2)]
    except (OSError, ValueError, csv.Error) as error: raise InputError(f"{path} cannot be read: {error}") from None
    return (rows + [[], []])[:2]

def load_task(where, stem, prompt, meta, root, text):
    """One of DSBench's modeling tasks as a Problem, or what is absent of its data, in words. NOTE: some published types
    and columns are wrong: columns must stand in the answers, and those of a regression must be numbers."""
    require({"task_id", "train_file", "test_file", "answer_dir"} <= set(meta), f"{where}: its metadata lack paths")
    train, test, folder = (Path(root, meta[name]) for name in ("train_file", "test_file", "answer_dir"))
    answers = next(iter([*folder.glob("test_answer.csv"), *sorted(folder.glob("*.csv"))]), folder / "test_answer.csv")
    lacking = [str(file) for file in (train, test, answers) if not file.is_file()]
    if lacking: return f"{meta['task_id']} (no {lacking[0]})"
    names, first = csv_head(answers)
    id_column = text.get("id_column") if text.get("id_column") in names else (names or [""])[0]
    targets = text.get("target_column", [])
    targets = [targets] if isinstance(targets, str) else targets
    if not targets or not set(targets) <= set(names): targets = [n for n in csv_head(train)[0] if n in names]
    targets = tuple(name for name in targets if name != id_column)
    require(targets and first, f"{where}: {answers} has no column to predict")
    numeric = all(re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", first[names.index(name)]) for name in targets)
    claimed = (text.get("task_type") or meta.get("data_type")) == "regression"
    kind = "regression" if claimed and numeric else "classification"
    columns = ", ".join([id_column, *targets])
    question = f"{text.get('cleaned_prompt') or prompt}\n\nsubmission.csv must have exactly these columns: {columns}."
    return Problem(f"{stem}/{meta['task_id']}", question, table=Table(kind, id_column, targets, train, test, answers))

def repeated(problems, others=None):
    """The problems whose question, case and spacing aside, stands before them in the list; or in `others`, if given."""
    key, found = lambda problem: " ".join(problem.question.lower().split()), []
    seen = {key(p) for p in others or ()}
    for p in problems:
        if key(p) in seen: found.append(p)
        if others is None: seen.add(key(p))
    return found

def check_problems(train, evaluation):
    """A sentence for each way in which problems repeat: within train, within evaluation, or from one to the other."""
    checks = (("twice to train on", repeated(train)), ("twice to evaluate on", repeated(evaluation)),
              ("to evaluate on that are also trained on", repeated(evaluation, train)))
    return [f"{len(found)} problems stand there {how}, such as {found[0].id}" for how, found in checks if found]

def subset(problems, count, seed):
    """`count` of the problems, in order, drawn as the paper draws its 512 of 933 (numpy's legacy generator)."""
    import numpy as np
    require(0 < count <= len(problems), f"a subset of {count} problems needs as many, there are {len(problems)}")
    return [problems[i] for i in sorted(np.random.RandomState(seed).choice(len(problems), count, replace=False))]

# ---- From text to token ids ------------------------------------------------------------------------------------------
def defuse(text, tokenizer):
    """Break up what would become a special token, so that an agent cannot end another one's prompt by writing one."""
    for token in tokenizer.all_special_tokens: text = text.replace(token, token[:1] + " " + token[1:])
    return text

def render(tokenizer, agent, values, **template):
    """The ids of an agent's first context: system and user message in the model's chat template, ready to answer.
    template: switches that the template has, such as enable_thinking=False for Qwen3; others ignore them."""
    values = {name: defuse(text, tokenizer) for name, text in values.items()}
    # str.format looks at the template alone: braces in the values stay what they are
    messages = [{"role": "user", "content": agent.prompt.format(**values)}]
    if agent.role: messages.insert(0, {"role": "system", "content": agent.role.format(**values)})
    options = dict(add_generation_prompt=True, tokenize=True, return_dict=False) | template
    ids = tokenizer.apply_chat_template(messages, **options)
    # NOTE: templates write the BOS themselves; tokenizing their text afterwards would put a second one in front. (Later
    # ones are in order: SmolLM2's is <|im_start|>, which opens every message.)
    assert tokenizer.bos_token_id is None or ids[:2].count(tokenizer.bos_token_id) <= 1, "a prompt starts with two BOS"
    return ids

def extend(tokenizer, context_ids, ids, observation, **template):
    """The context of an agent's next turn: all ids of the last one, then the observation as a user message.
    NOTE: rendering the whole conversation again would not do. Decoding and encoding do not cancel out, and some
    templates rewrite history (Qwen3 drops earlier thinking), so the agent would be trained on what it never saw."""
    mark = "<reply>"
    conversation = [("user", "?"), ("assistant", mark), ("user", defuse(observation, tokenizer))]
    messages = [{"role": role, "content": content} for role, content in conversation]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **template)
    rest = tokenizer(text.split(mark, 1)[1], add_special_tokens=False)["input_ids"]
    # the template ends the reply with a terminator, which the action has already, unless it was truncated
    return context_ids + ids + (rest[1:] if rest[0] == ids[-1] else rest)

# ---- MathChat: competition mathematics with a real model -------------------------------------------------------------
MATH_TEAM = ("You are one of three agents who solve a competition problem together, one after another: the Problem "
    "Solver works out the mathematics, the Code Executor checks it with a Python program, and the Verifier states the "
    "final answer. The team succeeds only if the Verifier's final answer is right. Whatever you write, thinking "
    "included, is cut off after {max_new_tokens} tokens.\n\n")

def head_and_tail(text, most):
    """The text, cut in the middle to about `most` characters: what a program was about, and the traceback at its end.
    >>> head_and_tail("abcdefghij", 4)
    'ab\\n... 6 characters cut ...\\nij'"""
    half = most // 2
    cut = f"\n... {len(text) - 2 * half} characters cut ...\n"
    return text if len(text) <= most else text[:half] + cut + text[-half:]

def show_math(result):
    """Tool output as the agents and the coach read it."""
    output = head_and_tail(result.output, 4000) or "(none)"
    return f"The program ended with status {result.status}. Its output:\n{output}"

MATHCHAT = Pipeline("mathchat", show=show_math, agents=(
    Agent("Solver", "{problem}", MATH_TEAM + "You are the Problem Solver. Derive the solution step by step, name the "
          "facts that you use, and end with the result that you reached. You cannot run programs."),
    Agent("Coder", "Problem:\n{problem}\n\nThe Problem Solver's work:\n{Solver}", MATH_TEAM + "You are the Code "
          "Executor. Write one Python program, in a ```python block, that computes or checks the answer independently "
          "of the Problem Solver's reasoning, and print what matters. It runs for at most 30 seconds, without a "
          "network. If it fails, you see the error and may write it once more.", max_actions=2, uses_tools=True),
    Agent("Verifier", "Problem:\n{problem}\n\nThe Code Executor's work:\n{Coder}\n\n{Coder_output}", MATH_TEAM +
          "You are the Verifier. Compare what the Code Executor wrote with what its program printed, decide what the "
          "answer is, and put it alone into \\boxed{{}} at the end of your reply.", coach_sees_truth=True)))

# ---- DSBench: data analysis with tools. Files pass through the workspace, and blame follows them ---------------------
LIBRARIES = ", ".join(name for name in ("numpy", "pandas", "sklearn", "lightgbm", "xgboost")
                      if importlib.util.find_spec(name)) or "none"  # those for data analysis that this Python has

def show_files(files):
    """What Sandbox.list_files found, as agents and coach read it: lines like "test.csv: 1,234 bytes, 40 x 2"."""
    lines = [f"{name}: {size:,} bytes{', ' * bool(shape) + shape}" for name, size, shape in files[:50]]
    return "\n".join(lines + [f"and {len(files) - 50} more"] * (len(files) > 50)) or "(none)"

def absent(names, files):
    """Those of the names that Sandbox.list_files did not find."""
    return [name for name in names if name not in {found for found, *_ in files}]

DATA_TEAM = ("You are one of three agents who solve a data-analysis task in one folder, one after another: the "
    "Engineer turns train.csv and test.csv into features, the Modeler fits a model to them, and the Analyst uses both "
    "to write submission.csv. The team succeeds only if that is valid: one row for each row of test.csv, with the "
    "columns that the task names; and the closer its predictions are to the hidden truth, the better. Files stay in "
    "the folder; apart from them only an agent's last message, without its thinking, reaches the next one.\nTo act, "
    "write one Python program in a ```python block. It runs in the folder for at most 60 seconds, without a network. "
    "You then see what it printed and which files are there, and may act again, four times in all, until your program "
    "succeeds and the files asked of you are there. Whatever you write, thinking included, is cut off after "
    "{max_new_tokens} tokens. Libraries: " + LIBRARIES + ".\n\n")
TASK = "The task:\n{problem}\n\nThe files in the folder (rows x columns of CSV files, header not counted):\n{files}"
LAST = "\n\nThe {0}'s last message:\n{{{0}}}\n\nWhat its program answered:\n{{{0}_output}}"

DSBENCH = Pipeline("dsbench", show=show_math, show_files=show_files, pass_thinking=False, preload=(
    "numpy", "pandas", "sklearn.ensemble", "sklearn.linear_model", "sklearn.preprocessing", "sklearn.model_selection",
    "sklearn.pipeline", "sklearn.compose", "sklearn.impute", "sklearn.metrics"), agents=(
    Agent("Engineer", TASK, DATA_TEAM + "You are the Engineer. Fit every transformation to the training rows alone "
          "(missing values, categories, scales), apply it to both files, leave out columns that carry no information, "
          "such as ids, and pickle the results: X_train.pkl, y_train.pkl and X_test.pkl, with rows in the order of the "
          "CSV files, and every fitted transformer that is needed to undo a change of the target.", max_actions=4,
          uses_tools=True, must_write=("X_train.pkl", "y_train.pkl", "X_test.pkl")),
    Agent("Modeler", TASK + LAST.format("Engineer"), DATA_TEAM + "You are the Modeler. Load X_train.pkl and "
          "y_train.pkl, compare models that suit the task by cross-validation, fit the best to all rows, and pickle it "
          "as model.pkl. Its predict must work on X_test.pkl as it is.", max_actions=4, uses_tools=True,
          must_write=("model.pkl",)),
    Agent("Analyst", TASK + LAST.format("Modeler"), DATA_TEAM + "You are the Analyst. Load model.pkl and X_test.pkl, "
          "predict (probabilities where the task's measure asks for them), take the ids from test.csv, write "
          "submission.csv, and check that it has the right rows, columns and no missing values.", max_actions=4,
          uses_tools=True, must_write=("submission.csv",), coach_sees_truth=True)))

# ---- Arithmetic: the miniature twin. Each agent sees what the one before it hands on, so that a fault has one cause --
NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Lea", "Sam", "Mia")
THINGS = ("apples", "books", "coins", "cards", "pens", "eggs", "keys", "shells")
STORIES = (  # story, right expression
    ("{name} has {a} {thing} and buys {b} more.", "{a}+{b}"),
    ("{name} has {a} {thing} and loses {b}.", "{a}-{b}"),
    ("{name} has {a} boxes of {b} {thing}.", "{a}*{b}"),
    ("{name} has {a} {thing}, buys {b} more and loses {c}.", "{a}+{b}-{c}"),
    ("{name} has {a} {thing}, loses {b} and buys {c} more.", "{a}-{b}+{c}"),
    ("{name} has {a} boxes of {b} {thing} and buys {c} more.", "{a}*{b}+{c}"),
    ("{name} has {a} boxes of {b} {thing} and loses {c}.", "{a}*{b}-{c}"))
PIECES = (
    *"0123456789+-*,.) ", *NAMES, *(" " + thing for thing in THINGS), " has", " and", " buys", " more", " loses",
    " boxes", " of", "Solver: ", "Coder: ", "Verifier: ", "\n", "```python\n", "print(", "\n```", "\\boxed{", "}",
    "error", "nothing")

def value(expression):
    """The value of sums and differences of products of whole numbers, else None. No eval: a model wrote the text.
    >>> value("2+3*4-1"), value("2+"), value("2**9"), value("__import__('os')")
    (13, None, None, None)"""
    if not re.fullmatch(r"\d{1,9}([-+*]\d{1,9}){0,9}", expression): return None
    terms = re.findall(r"([-+]?)([\d*]+)", expression)
    return sum((-1 if sign == "-" else 1) * math.prod(map(int, term.split("*"))) for sign, term in terms)

def held_out(expression):
    """Every fifth expression, by its digest: train and held-out problems are disjoint by construction."""
    return digest("split", expression) % 5 == 0

def arithmetic_problem(rng, split):
    """(question, expression) of a random story with numbers of 1 to 3 digits and a result that is not negative."""
    while True:
        story, plan = rng.choice(STORIES)
        numbers = {k: rng.randrange(1, 10 ** rng.randint(1, 3)) for k in "abc"}
        expression = plan.format(**numbers)
        if value(expression) >= 0 and held_out(expression) == (split == "held-out"):
            return story.format(name=rng.choice(NAMES), thing=rng.choice(THINGS), **numbers), expression

def arithmetic_problems(split):
    """4,096 problems for "train", 1,000 for "held-out"; the same in every run."""
    rngs = [random.Random(digest("arithmetic", split, i)) for i in range(4096 if split == "train" else 1000)]
    stories = [arithmetic_problem(rng, split) for rng in rngs]
    return [Problem(f"{split}-{i}", question, str(value(plan)), plan) for i, (question, plan) in enumerate(stories)]

def spoil(text, rng):
    """A typical mistake in an expression or a number: another operator, or another digit."""
    choices, places = "+-*", [i for i, c in enumerate(text) if c in "+-*"]
    if not places or rng.random() < 0.3:  # no 0: Python refuses numbers that start with one
        choices, places = "123456789", [i for i, c in enumerate(text) if c.isdigit()]
    i = rng.choice(places)
    return text[:i] + rng.choice([c for c in choices if c != text[i]]) + text[i + 1 :]

def arithmetic_demonstration(rng):
    """One demonstration for a random agent. Half of the replies are wrong, and so is half of what agents are handed: a
    right Coder translates the plan that it was handed, a right Verifier reports the output, even where it is wrong."""
    question, expression = arithmetic_problem(rng, "train")
    plan = expression if rng.random() < 0.5 else spoil(expression, rng)
    code = plan if rng.random() < 0.5 else spoil(plan, rng)
    block = "```python\nprint({})\n```".format
    broken = block(plan).replace(")", "")  # a syntax error
    solver, coder, verifier = ARITHMETIC.agents
    agent = rng.choice(ARITHMETIC.agents)
    if agent is solver: return Demonstration(solver, {"problem": question}, (), plan)
    if agent is coder:
        if rng.random() < 0.2: return Demonstration(coder, {"Solver": plan}, ((broken, "error"),), block(code))
        reply = broken if code != plan and rng.random() < 0.3 else block(code)
        return Demonstration(coder, {"Solver": plan}, (), reply)
    output = "error" if rng.random() < 0.1 else str(value(code))
    answer = output if rng.random() < 0.5 or output == "error" else spoil(output.lstrip("-"), rng)
    return Demonstration(verifier, {"Coder_output": output}, (), f"\\boxed{{{answer}}}")

ARITHMETIC = Pipeline("arithmetic", agents=(  # shows a short word or number: there is no vocabulary for tracebacks
    Agent("Solver", "Solver: {problem}"), Agent("Coder", "Coder: {Solver}", max_actions=2, uses_tools=True),
    Agent("Verifier", "Verifier: {Coder_output}", coach_sees_truth=True)), problems=arithmetic_problems, pieces=PIECES,
    show=lambda result: (result.output.strip()[:12] or "nothing") if result.status == "ok" else "error",
    demonstration=arithmetic_demonstration)

# ---- Tables: the miniature twin of DSBench. Agents choose the lines of their programs, and the words in them --------
NUMBERS, WORDS = ("age", "size", "dose", "load", "speed"), ("color", "shape", "zone")  # columns of the tables
TARGETS, IDS = ("price", "risk", "yield", "rank"), ("key", "row", "case", "number")
MODEL_OF = {"regression": "Y = y.astype(float)[:, None]", "classification": "Y = (y[:, None] == classes) * 1.0"}
PREDICT = {"regression": "p = scores[:, 0]", "classification": "p = model['classes'][scores.argmax(1)]"}
FIT = "W = np.linalg.solve(X.T @ X + %g * np.eye(X.shape[1]), X.T @ Y)"
TABLE_LINES = {  # agent -> the lines of its right program: (line, mistakes in its place, what they score, why)
    "Engineer": (
        ("import csv, numpy as np\n"
         "train, test = [list(csv.DictReader(open(f))) for f in ('train.csv', 'test.csv')]", (), 3, "no data are read"),
        ("y = [r['TARGET'] for r in train]", ("y = [r['KEY'] for r in train]",), 2, "y_train is not the target"),
        ("numbers = 'NUMBERS'.split()", ("numbers = 'KEY NUMBERS'.split()", "numbers = 'SOME'.split()",
                                         "numbers = 'SOME OTHER'.split()", "numbers = 'NUMBERS WORD'.split()"), 4,
         "not the number columns, all of them and no id"),
        ("words = 'WORD'.split()", (), 4, "not the column of words"),
        ("fill = {c: np.mean([float(r[c]) for r in train if r[c]]) for c in numbers}",
         ("fill = dict.fromkeys(numbers, 0)",), 6, "gaps are filled with zeros, far from all other values"),
        ("values = {c: sorted({r[c] for r in train}) for c in words}\n"
         "X, T = [np.array([[float(r[c] or fill[c]) for c in numbers] + [float(r[c] == v) for c in words for v in "
         "values[c]]\n                  for r in rows]) for rows in (train, test)]", (), 3, "there is no matrix"),
        ("T, X = [(rows - X.mean(0)) / (X.std(0) + 1e-9) for rows in (T, X)]", ("",), 7, "the features are not scaled"),
        *((f"np.save('{name}', {x})", ("",) * (3 if x == "T" else 1), 2, f"{name}.npy is not saved")
          for name, x in (("X_train", "X"), ("y_train", "y"), ("X_test", "T")))),
    "Modeler": (
        ("import numpy as np\nX, y = np.load('X_train.npy'), np.load('y_train.npy')\n"
         "X, classes = np.c_[X, np.ones(len(X))], np.unique(y)", (), 3, "the features are not read"),
        ("RIGHT_MODEL", ("WRONG_MODEL",), 3, "a model for the other kind of task"),
        (FIT % 0.1, (FIT % 100, "W = np.zeros((X.shape[1], Y.shape[1]))\nW[-1] = Y.mean(0)"), 5, "it hardly fits"),
        ("np.savez('model', W=W, classes=classes)", ("",) * 3, 2, "model.npz is not saved")),
    "Analyst": (
        ("import csv, numpy as np\nmodel, T = np.load('model.npz'), np.load('X_test.npy')\n"
         "scores = np.c_[T, np.ones(len(T))] @ model['W']", (), 3, "the model is not used"),
        ("RIGHT_PREDICTION", ("WRONG_PREDICTION",), 3, "predictions for the other kind of task"),
        ("out, rows = csv.writer(open('submission.csv', 'w')), csv.DictReader(open('test.csv'))", (), 3, "no file"),
        ("out.writerow('KEY TARGET'.split())", ("out.writerow('TARGET KEY'.split())", "", "out.writerow('KEY OTHER'"
                                                ".split())"), 2, "not the columns that were asked for"),
        ("out.writerows((r['KEY'], v) for r, v in zip(rows, p))",
         ("out.writerows((r['SOME'], v) for r, v in zip(rows, p))",), 2, "not the ids of the test rows"))}
MARKERS = "RIGHT_MODEL|WRONG_MODEL|RIGHT_PREDICTION|WRONG_PREDICTION|NUMBERS|SOME|OTHER|TARGET|KEY|WORD"
TABLE_FILES = ("train.csv", "test.csv", "X_train.npy", "y_train.npy", "X_test.npy", "model.npz", "submission.csv")
TABLE_PIECES = tuple(dict.fromkeys((
    *NUMBERS, *WORDS, *TARGETS, *IDS, *MODEL_OF, *MODEL_OF.values(), *PREDICT.values(), *TABLE_FILES, *TABLE_LINES,
    *(piece for lines in TABLE_LINES.values() for right, mistakes, *_ in lines for line in (right, *mistakes)
      for piece in re.split(MARKERS, line) if piece),
    ", id ", ", numbers ", ", words ", ": ", "; ", " ", "\n", "```python\n", "\n```", "ok", "error")))

def table_schema(rng, split):
    """Table.schema of a random task, and its question. Held-out ones are not among those to train on."""
    while True:
        numbers = rng.sample(NUMBERS, rng.randint(2, 3))
        schema = rng.choice(sorted(MODEL_OF)), rng.choice(TARGETS), rng.choice(IDS), tuple(numbers), rng.choice(WORDS)
        question = "{} {}, id {}, numbers {}, words {}".format(*schema[:3], " ".join(numbers), schema[4])
        if held_out(question) == (split == "held-out"): return schema, question

def fill_line(line, schema):
    """A line of a program with its markers replaced for a task.
    >>> fill_line("out.writerow('KEY TARGET'.split())", ("regression", "price", "key", ("age", "size"), "zone"))
    "out.writerow('key price'.split())\""""
    kind, target, key, numbers, word = schema
    other, unused = next(k for k in MODEL_OF if k != kind), next(c for c in NUMBERS if c not in numbers)
    texts = dict(RIGHT_MODEL=MODEL_OF[kind], WRONG_MODEL=MODEL_OF[other], RIGHT_PREDICTION=PREDICT[kind],
                 WRONG_PREDICTION=PREDICT[other], TARGET=target, KEY=key, WORD=word, NUMBERS=" ".join(numbers),
                 SOME=" ".join(numbers[1:]), OTHER=unused)
    return re.sub(MARKERS, lambda match: texts[match[0]], line)

def table_problem(name, schema, question, rng):
    """A task with new data: linear truth plus noise, columns of very different scale far from zero, gaps in one of
    them, a column of words, and ids that say nothing and lie elsewhere in test.csv, so that using them does harm."""
    kind, target, key, numbers, word = schema
    scales = {c: 10 ** rng.uniform(-2, 2) for c in numbers}
    weights = {c: rng.choice((-1, 1)) * rng.uniform(0.7, 1.5) for c in numbers}
    effects = {v: rng.uniform(-1.5, 1.5) for v in "abc"}
    lines = {"train": [[key, *numbers, word, target]], "test": [[key, *numbers, word]], "answers": [[key, target]]}
    for i, number in enumerate([*range(60), *rng.sample(range(1000, 9999), 40)]):
        z, v = {c: rng.gauss(0, 1) for c in numbers}, rng.choice("abc")
        truth = sum(weights[c] * z[c] for c in numbers) + effects[v] + rng.gauss(0, 0.3)
        truth = f"{50 + 10 * truth:.2f}" if kind == "regression" else "yes" if truth > 0 else "no"
        cells = [number, *[f"{scales[c] * (5 + z[c]):.4g}" for c in numbers], v]
        if rng.random() < 0.2: cells[1] = ""
        for part, row in (("train", [*cells, truth]),) if i < 60 else (("test", cells), ("answers", [number, truth])):
            lines[part].append(row)
    files = {n: "".join(",".join(map(str, line)) + "\n" for line in part).encode() for n, part in lines.items()}
    return Problem(name, question, table=Table(kind, key, (target,), **files, schema=schema))

def table_problems(split):
    """1,024 tasks for "train", 200 for "held-out"; the same in every run."""
    rngs = [random.Random(digest("tables", split, i)) for i in range(1024 if split == "train" else 200)]
    return [table_problem(f"{split}-{i}", *table_schema(rng, split), rng) for i, rng in enumerate(rngs)]

def table_program(agent, schema, rng=None):
    """The right program of an agent for a task; with a rng, one with a typical mistake."""
    lines = TABLE_LINES[agent]
    wrong = rng.choice([(i, m) for i, (_, mistakes, *_) in enumerate(lines) for m in mistakes]) if rng else (-1, "")
    program = [wrong[1] if i == wrong[0] else right for i, (right, *_) in enumerate(lines)]
    return "```python\n" + "\n".join(fill_line(line, schema) for line in program if line) + "\n```"

def table_demonstration(rng):
    """One demonstration for a random agent: half of them with a mistake. Some follow a first try with one."""
    (schema, question), agent = table_schema(rng, "train"), rng.choice(TABLES.agents)
    write = lambda wrong: table_program(agent.name, schema, rng if wrong else None)
    done = {"Engineer": (), "Modeler": TABLE_FILES[2:5], "Analyst": TABLE_FILES[2:6]}[agent.name]
    files = " ".join(sorted([*TABLE_FILES[:2], *(name for name in done if rng.random() < 0.9)]))
    turns = ((write(True), rng.choice(("ok", "error")) + "\n" + files),) if rng.random() < 0.2 else ()
    return Demonstration(agent, {"problem": question, "files": files}, turns, write(rng.random() < 0.5))

TABLES = Pipeline("tables", show=lambda result: "ok" if result.status == "ok" else "error",
                  show_files=lambda files: " ".join(name for name, *_ in files), preload=("csv", "numpy"), agents=(
    Agent("Engineer", "Engineer: {problem}; {files}", max_actions=2, uses_tools=True, must_write=TABLE_FILES[2:5]),
    Agent("Modeler", "Modeler: {problem}; {files}", max_actions=2, uses_tools=True, must_write=TABLE_FILES[5:6]),
    Agent("Analyst", "Analyst: {problem}; {files}", max_actions=2, uses_tools=True, must_write=TABLE_FILES[6:],
          coach_sees_truth=True)), problems=table_problems, pieces=TABLE_PIECES, demonstration=table_demonstration)

PIPELINES = {p.name: p for p in (ARITHMETIC, MATHCHAT, TABLES, DSBENCH)}

def show_prompts(name):
    """Print the agents of a pipeline with their prompts."""
    for agent in PIPELINES[name].agents:
        print(f"--- {agent.name}, up to {agent.max_actions} actions\n{agent.role}\n{agent.prompt}")

# ---- The sandbox -----------------------------------------------------------------------------------------------------
# Runs programs of a language model and believes nothing they leave behind. Four processes, each trusting only those
# before it: host -> zygote -> supervisor -> program. The host (the trainer) never forks or unpickles. The zygote,
# this file as a script in an empty environment (keep it light: no torch), imports once what programs need and forks
# for every run. The supervisor of a run watches time, memory, output, processes and disk, and ends all below it. The
# program first gives up every file but its workspace (and, to read, Python and the system's libraries), root, all
# capabilities, sockets, and every way into other processes. This does NOT protect against:
#   - faults of the kernel; side channels (timing, load, caches): for these put a virtual machine around the trainer
#   - stat() on any path: existence, size and times of files outside show, their contents and lists don't
#   - changed times (utime) of files of the same user; on kernels before 6.2 emptied files of the same user's Python
#   - memory, processes, disk or output taken between two looks, 0.2 s apart (the kernel ends programs first)
#   - reading below sys.prefix, /usr, /lib or /bin: keep no answers and no keys there
#   - lies: what a program prints is its word, not evidence
#   - anything but accidents at the level "limits": such a program reads, changes and kills all that its user can
LINUX, NOBODY = sys.platform == "linux", 65534
LOOK_EVERY, GRACE = 0.2, 60.0       # seconds: between two looks of the supervisor; until we count as having failed
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
LANDLOCK_CREATE, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT = 444, 445, 446               # numbers on every machine
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8                               # the first of Landlock's rights
LOAD, IF_EQUAL, IF_NOT_LESS, IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06      # steps of a seccomp filter,
ALLOW, KILL, FAIL, PERMISSION = 0x7FFF0000, 0x80000000, 0x00050000, 0x00050000 + errno.EPERM    # its verdicts
MACHINES = {"linux x86_64": (0, 0xC000003E), "linux aarch64": (1, 0xC00000B7)}      # column below, audit number
REFUSED = {  # network; others' memory, file names, priority; leaving the core; risky doors; uncounted memory
    "socket": (41, 198), "io_uring_setup": (425, 425), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "inotify_add_watch": (254, 27), "setns": (308, 268),
    "fanotify_init": (300, 262), "setpriority": (141, 140), "sched_setattr": (314, 274), "unshare": (272, 97),
    "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122), "bpf": (321, 280), "userfaultfd": (323, 282),
    "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180)}
SIGNALS = {  # refused before version 6 of Landlock, which confines them; until then even to the program itself
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)}
REFUSED_IF = {  # the first argument is so: (numbers, test, value)
    "clone": ((56, 220), IF_ANY_BIT, 0x10000000),               # CLONE_NEWUSER: gives capabilities back
    "prlimit64": ((302, 261), IF_ANY_BIT, 0xFFFFFFFF),          # limits of a process other than itself (0)
    "prctl": ((157, 167), IF_EQUAL, PR_SET_DUMPABLE)}           # would hide what it writes
# "Done", but not: shutil.copy must work, and the modes of files outside must stay as they are.
PRETENDED = {"chmod": (90, 53), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452)}
READABLE = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/proc/self",
            "/proc/meminfo", "/proc/cpuinfo", "/sys/devices/system/cpu", "/sys/fs/cgroup"]  # joblib needs the last
DEVICES = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
ENVIRONMENT = {  # all that a program sees; the trainer's holds keys. Joblib's semaphores would need /dev/shm
    "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "USER": "agent", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "JOBLIB_MULTIPROCESSING": "0"}
PROBE = """import contextlib, os, socket
os.listdir(os.path.dirname(os.__file__))    # a Python that can't be read would fail later, in a program
with contextlib.suppress(PermissionError): raise SystemExit(f"a program reads {open('/proc/version')}")
with contextlib.suppress(PermissionError): raise SystemExit(f"a program has {socket.socket()}")"""

@dataclass
class Limits:                   # of one run
    timeout: float = 30.0       # seconds by the clock, from the moment it has a core
    memory: int = 4 << 30       # bytes, of one process (address space) and of all together (resident)
    disk: int = 512 << 20       # bytes in the workspace; four times as many may be written over and over
    files: int = 2000           # files and folders in the workspace
    processes: int = 64         # at once
    output: int = 32_000        # bytes of output kept, half from its start and half from its end
    flood: int = 4 << 20        # bytes of output that end the run

@dataclass
class Result:
    status: str                 # ok | error | killed | timeout | memory | disk | processes | flood
    output: str                 # what it printed, standard output and errors in order
    code: "int | None"          # exit code, or minus the signal that killed it; None if we ended it
    seconds: float              # by the clock

class SandboxError(RuntimeError):
    """We failed, not the program: nothing may be concluded about it, least of all a reward."""

def kernel(name, *args, libc=ctypes.CDLL(None, use_errno=True)):
    """Call a libc function. A negative result is an OSError."""
    result = getattr(libc, name)(*[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    if result >= 0: return result
    raise OSError(ctypes.get_errno(), f"{name} {args[0]}: {os.strerror(ctypes.get_errno())}")

def lock_down(workspace, user):
    """Give up for good what a program doesn't need. Any failure is an exception: then it must not run."""
    column, machine = MACHINES[f"{sys.platform} {platform.machine()}"]      # elsewhere no step is skipped in silence
    kernel("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)            # neither setuid files nor exec give any back
    version = kernel("syscall", LANDLOCK_CREATE, None, 0, 1)
    every = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1        # it knows so many rights on files
    features = every, 3 * (version >= 4), 3 * (version >= 6)    # files; TCP; abstract sockets and signals to others
    rules = kernel("syscall", LANDLOCK_CREATE, struct.pack("3Q", *features), 24, 0)
    places = dict.fromkeys([*READABLE, sys.prefix, sys.base_prefix], EXECUTE | READ_FILE | READ_DIR)
    for path, rights in {**places, **dict.fromkeys(DEVICES, READ_FILE | WRITE_FILE), workspace: every}.items():
        if not os.path.isdir(path): rights &= EXECUTE | READ_FILE | WRITE_FILE  # the others are errors on a file
        with suppress(FileNotFoundError):
            rule = struct.pack("=Qi", rights, os.open(path, os.O_PATH))
            kernel("syscall", LANDLOCK_ADD_RULE, rules, 1, rule, 0)
    kernel("syscall", LANDLOCK_RESTRICT, rules, 0)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))           # no capabilities (layout 3)
    kernel("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)                # changing the user took /proc/self away
    kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # dies with its supervisor; a new user clears it
    # seccomp: a filter that looks at the number of the machine, of the call, and at some calls' first argument.
    step = lambda code, value, skip_if=0, skip_else=0: struct.pack("HBBI", code, skip_if, skip_else, value)
    steps = [step(LOAD, 4), step(IF_EQUAL, machine, 1, 0), step(RETURN, KILL), step(LOAD, 0)]
    steps += [step(IF_NOT_LESS, 0x40000000, 0, 1), step(RETURN, PERMISSION)]            # x86: all calls once more
    older = {**(SIGNALS if version < 6 else {}), **({"truncate": (76, 45)} if version < 3 else {})}
    # clone3: "no such call", for a filter can't see its flags, and libc then takes clone.
    for error, calls in ((errno.EPERM, {**REFUSED, **older}), (0, PRETENDED), (errno.ENOSYS, {"clone3": (435, 435)})):
        for numbers in calls.values(): steps += [step(IF_EQUAL, numbers[column], 0, 1), step(RETURN, FAIL + error)]
    for numbers, test, value in REFUSED_IF.values():
        steps += [step(IF_EQUAL, numbers[column], 0, 4), step(LOAD, 16), step(test, value, 0, 1)]
        steps += [step(RETURN, PERMISSION), step(RETURN, ALLOW)]
    code = ctypes.create_string_buffer(b"".join([*steps, step(RETURN, ALLOW)]))
    kernel("prctl", PR_SET_SECCOMP, 2, struct.pack("HxxxxxxP", len(steps) + 1, ctypes.addressof(code)), 0, 0)

def run_program(job, limits, log):
    """In the program's process: shut every door, then execute the code as the interpreter would. Never returns."""
    code, workspace, exit_code = job["code"], job["workspace"], 1
    os.setsid()
    os.nice(10)                 # the supervisor isn't: on the core they share it comes before a fork bomb
    os.chdir(workspace)
    for source, fd in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)): os.dup2(source, fd)
    # Not NPROC: that one counts all threads of the user, the trainer's too.
    most = dict(CPU=int(limits.timeout) + 5, AS=limits.memory, FSIZE=limits.disk, NOFILE=256, CORE=0)
    for name, value in most.items():
        with suppress(ValueError, OSError):                     # a lower one may hold already; macOS has no AS
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
    if job["level"] != "limits": lock_down(workspace, job["user"])
    elif os.geteuid() == 0: raise PermissionError("root runs no program without isolation")
    os.closerange(3, 65536)     # the line to the host too: nothing said from here on is believed
    # By the line, so that what was printed before a kill is kept; "replace" because text can be invalid.
    out, errors = [open(fd, "w", 1, "utf-8", "replace", closefd=False) for fd in (1, 2)]
    sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__, sys.argv = out, errors, out, errors, [""]
    os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = workspace
    sys.path.append(workspace)                                  # last: a pandas.py left there shadows nothing
    if "numpy" in sys.modules: sys.modules["numpy"].random.seed()       # else every fork draws the same numbers
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    linecache.cache["<action>"] = 0, None, code.splitlines(True), "<action>"    # tracebacks show its lines
    try:
        exec(compile(code, "<action>", "exec", dont_inherit=True), main.__dict__)
        exit_code = 0
    except SystemExit as stop:
        exit_code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if not isinstance(stop.code, (int, type(None))): print(stop.code, file=errors)
    except BaseException as error:
        traceback.print_exception(type(error), error, error.__traceback__.tb_next, file=errors)
    with suppress(BaseException):   # the interpreter's end: wait for threads, call what was registered
        threading._shutdown()
        atexit._run_exitfuncs()
        main.__dict__.clear()       # closes files that it left open, else what it wrote last is lost
        gc.collect()
        out.flush()
    os._exit(exit_code & 255)

def supervise(control):
    """In a fork of the zygote: start a program, watch it, end all that is left. Returns its Result's fields."""
    with open(control, "rb", closefd=False) as line: job = json.loads(line.readline())
    workspace, limits = job["workspace"], Limits(**job["limits"])
    if LINUX:
        os.sched_setaffinity(0, [job["core"]])
        kernel("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)     # daemons become children of this process
        Path("/proc/self/oom_score_adj").write_text("1000")     # out of memory, the kernel spares the trainer
    # NOTE: output into a file, not a pipe, whose end any process that inherited it can put off for ever.
    started, file = time.monotonic(), tempfile.TemporaryFile()
    log = file.fileno()
    program = os.fork() or run_program(job, limits, log)
    status, code, next_look, pause, half = None, None, started + LOOK_EVERY, 0.001, limits.output // 2
    while status is None:       # NOTE: no alarm signal: a handler that raises can do so in the middle of the report
        pid, size, now = None, os.fstat(log).st_size, time.monotonic()
        while pid not in (0, program): pid, ended = os.waitpid(-1, os.WNOHANG)      # bury orphans: they count
        if size > limits.flood: status = "flood"
        elif pid == program:
            code = os.waitstatus_to_exitcode(ended)
            status = "ok" if code == 0 else "error" if code > 0 else "killed"
        elif now >= started + limits.timeout: status = "timeout"
        elif now >= next_look: status, next_look = excess(workspace, limits), time.monotonic() + LOOK_EVERY
        elif select.select([control], [], [], pause)[0]: status = "stopped"         # by the host, or it is dead
        pause = min(1.2 * pause, 0.02)
    seconds = time.monotonic() - started
    end_all_below(-program)     # from here on the workspace is at rest
    size = os.fstat(log).st_size
    mark = f"\n... {size - 2 * half} bytes cut ...\n".encode() if size > 2 * half else b""
    output = (os.pread(log, half, 0) + mark + os.pread(log, half, max(half, size - half))).decode("utf-8", "replace")
    return dict(status=excess(workspace, limits) or status, output=output, code=code, seconds=seconds)

def end_all_below(*groups):
    """Kill by descent until nothing is left: a process can leave its group and session, not its ancestors."""
    with suppress(ChildProcessError):                           # there is no child any more
        while True:
            for pid in [*groups, *descendants(os.getpid())]:    # groups: all there is without /proc
                with suppress(OSError): os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0] != 0: pass
            time.sleep(0.001)

def descendants(pid):
    """The ids of all processes below this one (on Linux; elsewhere none are seen)."""
    found = [pid]
    for parent in found:        # grows meanwhile. No recursion: a chain of a thousand processes is an attack
        for path in glob.glob(f"/proc/{parent}/task/*/children"):
            with suppress(OSError): found += [int(child) for child in Path(path).read_text().split()]
    return found[1:]

def excess(workspace, limits):
    """The name of a limit that the run as a whole is over (processes, memory or disk), or None."""
    below, memory, written, size, count, folders = descendants(os.getpid()), 0, 0, 0, 0, [workspace]
    for pid in below:
        with suppress(OSError):
            memory += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
            counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
            written += max(int(counts["wchar"]), int(counts["write_bytes"]))    # the latter: mmap, no tmpfs
    if len(below) > limits.processes: return "processes"
    if memory > limits.memory: return "memory"
    try:
        while folders and size <= limits.disk and count <= limits.files:
            with suppress(FileNotFoundError, NotADirectoryError):
                for entry in os.scandir(folders.pop()):
                    with suppress(FileNotFoundError):           # removed meanwhile; the others still count
                        found = entry.stat(follow_symlinks=False)
                        size, count = size + found.st_blocks * 512, count + 1
                        if stat.S_ISDIR(found.st_mode): folders.append(entry.path)
    except OSError: return "disk"       # a path too long to follow, a folder that may not be listed: they hide files
    if size > limits.disk or count > limits.files: return "disk"
    return "disk" if written > 4 * limits.disk else None    # open files without a name show nowhere else

def zygote(requests, preload):
    """Fork a supervisor per request (one byte, one descriptor) until the host closes the line or is dead."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)               # the kernel buries the supervisors: no zombies
    if LINUX: kernel("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)       # what a killed supervisor leaves comes here
    for name in preload:
        with suppress(ImportError): importlib.import_module(name)
    gc.freeze()                 # a collection in a fork would copy every page
    while (message := socket.recv_fds(requests, 1, 1))[0]:
        control = message[1][0]
        with suppress(OSError):         # no room for a process: the host sees a closed line
            if os.fork() == 0:
                try:
                    requests.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    report = supervise(control)
                except BaseException as error:                  # also a program's that couldn't shut all doors
                    end_all_below()
                    report = dict(status="sandbox", output=f"{type(error).__name__}: {error}")
                with suppress(OSError): os.write(control, json.dumps(report).encode() + b"\n")
                os._exit(1)
        os.close(control)
    end_all_below()

class Sandbox(AbstractContextManager):
    """Runs programs, from many threads at once, each on a core of its own; others queue, clocks stopped. The level
    "landlock" is described above; "limits" (macOS, kernels before 5.13) bounds time, output and disk and protects
    nothing. `preload` names modules to import once for all: a fork with pandas takes 25 ms, importing it 300.
    `cores`: the processors to use, all allowed ones by default. InputError where the level can't be had."""
    def __init__(self, level="landlock", preload=(), cores=None, **limits):
        self.level, self.preload, self.limits, self.workspaces = level, preload, Limits(**limits), set()
        self.process, self.line, self.closed, self.lock = None, None, False, threading.Lock()
        self.cores = queue.SimpleQueue()                        # holding a core is the right to run a program
        allowed = sorted(os.sched_getaffinity(0)) if LINUX else range(os.cpu_count())
        for core in cores or allowed: self.cores.put(core)
        # Below a closed home imports would fail in programs that are nobody: these stay root, without its powers.
        tops = [Path(path).resolve() for path in (sys.prefix, sys.base_prefix, tempfile.gettempdir())]
        reached = all(folder.stat().st_mode & stat.S_IXOTH for top in tops for folder in [top, *top.parents])
        self.user = NOBODY if level != "limits" and os.geteuid() == 0 and reached else None
        atexit.register(self.close)
        try:                    # whether the level holds here, for good: a program tries what it must not
            probed = self.run(PROBE if level != "limits" else "pass", self.make_workspace())
            if probed.status != "ok": raise SandboxError(f"{probed.status}: {probed.output.strip()[-300:]}")
        except SandboxError as error:
            self.close()
            raise InputError(f"no isolation here ({error}); --sandbox limits needs none, but not root") from None
        if level == "limits": print("WARNING: programs run WITHOUT isolation, can do what you can", file=sys.stderr)

    def run(self, code, workspace, **limits):
        """Execute code in a folder of make_workspace (one run at a time in each). Files stay there, processes don't:
        none of the program's is alive afterwards. SandboxError if we failed twice."""
        limits = asdict(replace(self.limits, **limits))
        job = dict(code=code, workspace=workspace, level=self.level, user=self.user, limits=limits)
        core = job["core"] = self.cores.get()
        try:
            with suppress(SandboxError, OSError): return self._attempt(job)     # not the program's failure: again
            return self._attempt(job)
        except OSError as error: raise SandboxError(f"the line to the sandbox broke: {error}") from error
        finally: self.cores.put(core)   # also after Ctrl-C: a lost core is lost for the whole training

    def _attempt(self, job):
        """One try of run(). Every failure that isn't the program's is a SandboxError or an OSError."""
        control, theirs = socket.socketpair()
        with control, theirs:
            with self.lock:
                if self.closed: raise SandboxError("the sandbox is closed")
                if self.process is None or self.process.poll() is not None:
                    self.line, end = socket.socketpair()
                    command = [sys.executable, "-I", "-B", "-X", "utf8", __file__, str(end.fileno()), *self.preload]
                    with end:           # away from the trainer's environment, terminal and process group
                        self.process = subprocess.Popen(command, env=ENVIRONMENT, cwd="/", pass_fds=[end.fileno()],
                                                        stdin=subprocess.DEVNULL, start_new_session=True)
                socket.send_fds(self.line, [b"."], [theirs.fileno()])
            theirs.close()
            control.settimeout(job["limits"]["timeout"] + GRACE)
            try:
                control.sendall(json.dumps(job).encode() + b"\n")
                line = control.makefile("rb").readline()
            finally:            # however it ended for us (Ctrl-C too), wait until the run's processes are gone
                with suppress(OSError):
                    control.shutdown(socket.SHUT_WR)
                    control.makefile("rb").read()
        report = json.loads(line or '{"status": "sandbox", "output": "the supervisor of a run was killed"}')
        if report["status"] == "sandbox": raise SandboxError(report["output"])
        return Result(**report)

    def make_workspace(self, files={}):
        """Make a new private folder with copies of these files (name -> bytes, or a Path). Returns its path."""
        workspace = os.path.realpath(tempfile.mkdtemp(prefix="workspace-"))
        self.workspaces.add(workspace)
        for name, data in files.items():    # copies, not links: a program may write into them
            if isinstance(data, Path): shutil.copyfile(data, Path(workspace, name))
            else: Path(workspace, name).write_bytes(data)
        for path in [workspace, *Path(workspace).iterdir()]:
            if self.user is not None: os.chown(path, self.user, self.user)
        return workspace

    def remove_workspace(self, workspace):
        """Remove a workspace, whatever a program made of it: locked folders, or thousands nested (rmtree fails)."""
        if os.geteuid() != 0: subprocess.run(["chmod", "-R", "u+rwx", "--", workspace], stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", "--", workspace], stderr=subprocess.DEVNULL)
        self.workspaces.discard(workspace)

    def list_files(self, workspace):
        """((name, bytes, "rows x columns" of the first CSVs, else ""), ...) of the plain files in the folder, sorted.
        It goes into prompts: only names that print, cut to 100 characters."""
        found = []
        with suppress(OSError):             # a program may have locked or removed the folder
            for entry in sorted(os.scandir(workspace), key=lambda entry: entry.name):
                if entry.is_file(follow_symlinks=False) and entry.name.isprintable():
                    shape = self.csv_shape(workspace, entry.name) if len(found) < 50 else ""
                    found.append((entry.name[:100], entry.stat().st_size, shape))
        return tuple(found)

    def csv_shape(self, workspace, name):
        """Rows, header not counted, x columns of a CSV, by its line ends and its first line; "" for what is no such."""
        try: data = self.read(workspace, name) if name.endswith(".csv") else b""
        except OSError: data = b""
        head = data.split(b"\n", 1)[0].decode("utf-8", "replace")[:100_000]
        rows, columns = data.rstrip().count(b"\n"), len(next(csv.reader([head]), []))
        return f"{rows} x {columns}" if data else ""

    @staticmethod
    def read(workspace, name, most=64 << 20):
        """The bytes of a file that a program left (never unpickle them): the only way the host takes one. OSError if
        it isn't plain with one name: links may lead to the answers, pipes hang the host, sparse files fill memory."""
        if "/" in name or not name.isprintable(): raise OSError(f"{name[:100]!r} is not the name of a file")
        opener = lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(os.path.join(workspace, name), "rb", opener=opener) as file:
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_size <= most: return file.read(most)
        raise OSError(f"{name!r} is not a plain file of at most {most} bytes")

    def close(self):
        """End every program and the zygote, remove the workspaces that are left. May be called twice."""
        with self.lock:
            self.closed = True
            if self.process is not None:
                with suppress(OSError, subprocess.TimeoutExpired), self.line:
                    self.line.shutdown(socket.SHUT_RDWR)        # a fork of the trainer may hold it open too
                    self.process.wait(10)
                self.process.kill()
                self.process.wait()
        for workspace in list(self.workspaces): self.remove_workspace(workspace)

    __exit__ = lambda self, *_: self.close()

if __name__ == "__main__": zygote(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
