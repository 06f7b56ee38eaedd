"""agents.py: who works on a problem, in which order, what each agent sees, and what it may do.

Part of the paper: its multi-agent workflows (MathChat: Problem Solver -> Code Executor -> Verifier) and a miniature twin
for the embedded model (arithmetic: Solver -> Coder -> Verifier). An agent's prompt is rendered to token ids once, by the
tokenizer's chat template; a further turn extends those ids and is never rendered again from text.

Also here: the one tool that agents have, a Python sandbox (second half of the file). That is why this file imports the
standard library only: started as a script, it is the sandbox's small server process.

What we leave out: agents that talk in free order, tools other than Python, and the paper's DSBench workflow.

See the prompts of a pipeline:  python -c "import agents; agents.show_prompts('arithmetic')"
"""
import atexit
import contextlib
import ctypes
import dataclasses
import errno
import gc
import hashlib
import importlib
import json
import linecache
import math
import os
import platform
import queue
import random
import re
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass


class InputError(Exception):
    """Bad input from the user. The message is one sentence: what, where, what to do. Commands print it and exit with 2."""


def digest(*parts):
    """A number in [0, 2^64) that depends on nothing but the parts.

    Python's hash() is salted per process for strings: ranks would disagree and a resumed run would draw other numbers.

    >>> digest("seed", 1) == digest("seed", 1), digest("seed", 1) == digest("seed", 2)
    (True, False)
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


# ---- Problems, agents, pipelines -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    id: str  # unique within a file or a generator; part of the seed of every action
    question: str
    answer: str  # the truth: never in a prompt, never in a workspace
    expression: str = ""  # arithmetic only: a right plan, for the offline coach


@dataclass(frozen=True)
class Agent:
    name: str
    prompt: str  # template of the user message; {problem}, {NAME} and {NAME_output} of earlier agents are filled in
    role: str = ""  # system message
    max_actions: int = 1
    uses_tools: bool = False  # the code blocks of its reply run as one program
    coach_sees_truth: bool = False  # only then is the coach shown the true answer


@dataclass(frozen=True)
class Pipeline:
    name: str
    agents: tuple  # of Agent, in order; the last one's reply holds the system's answer
    show: Callable  # Result of a program -> the observation text that agents and coach see
    pass_thinking: bool = True  # False: what other agents and the coach get lacks the thinking part
    problems: Callable | None = None  # split -> list of Problem; None: they come from files
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
    ('It is 12.', '', '12')
    """
    _, closed, rest = text.rpartition("</think>")
    return rest if closed or "<think>" not in text else ""


def extract_program(text):
    r"""The Python blocks of a reply's part after thinking, joined in order to one program; None if there are none.

    Blocks in another language are passed over, and so is one that the output limit cut off.

    >>> extract_program("First\n```python\nx = 2\n```\nthen\n```\nprint(x)\n```\nand\n```json\n{}\n```")
    'x = 2\n\nprint(x)\n'
    >>> extract_program("```python\nprint(1)")
    """
    blocks = re.findall(r"^[ \t]*```(\w*)[ \t]*\n(.*?)^[ \t]*```", after_thinking(text), re.MULTILINE | re.DOTALL)
    programs = [code for language, code in blocks if language.lower() in ("", "python", "python3", "py")]
    return "\n".join(programs) if programs else None


def handed_on(pipeline, problem, actions):
    """What prompts may show of an episode so far: name -> text, from each agent's last action."""
    values = {"problem": problem.question}
    for action in actions:
        values[action.agent] = action.text if pipeline.pass_thinking else after_thinking(action.text)
        values[action.agent + "_output"] = action.observation or "no program was run"
    return values


# ---- From text to token ids ------------------------------------------------------------------------------------------


def defuse(text, tokenizer):
    """Break up what would become a special token, so that an agent cannot end another one's prompt by writing one."""
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, token[:1] + " " + token[1:])
    return text


def render(tokenizer, agent, values):
    """The ids of an agent's first context: system and user message in the model's chat template, ready to answer."""
    values = {name: defuse(text, tokenizer) for name, text in values.items()}
    # str.format looks at the template alone: braces in the values stay what they are
    messages = [{"role": "user", "content": agent.prompt.format(**values)}]
    if agent.role:
        messages.insert(0, {"role": "system", "content": agent.role})
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    # NOTE: templates write the BOS themselves; tokenizing their text afterwards would put a second one in front
    assert tokenizer.bos_token_id is None or ids.count(tokenizer.bos_token_id) <= 1, "more than one BOS in a prompt"
    return ids


def extend(tokenizer, context_ids, ids, observation):
    """The context of an agent's next turn: all ids of the last one, then the observation as a user message.

    NOTE: rendering the whole conversation again would not do. Decoding and encoding do not cancel out, and some
    templates rewrite history (Qwen3 drops earlier thinking), so the agent would be trained on what it never saw.
    """
    mark = "<reply>"
    conversation = [("user", "?"), ("assistant", mark), ("user", defuse(observation, tokenizer))]
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in conversation], add_generation_prompt=True, tokenize=False
    )
    rest = tokenizer(text.split(mark, 1)[1], add_special_tokens=False)["input_ids"]
    # the template ends the reply with a terminator, which the action has already, unless it was truncated
    return context_ids + ids + (rest[1:] if rest[0] == ids[-1] else rest)


# ---- MathChat: competition mathematics with a real model -------------------------------------------------------------

MATH_TEAM = (
    "You are one of three agents who solve a competition problem together, one after another: the Problem Solver works "
    "out the mathematics, the Code Executor checks it with a Python program, and the Verifier states the final answer. "
    "The team succeeds only if the Verifier's final answer is right. Whatever you write, thinking included, is cut off "
    "after {max_new_tokens} tokens.\n\n"
)


def show_math(result):
    """Tool output as the agents and the coach read it; the sandbox has already kept only its head and tail."""
    return f"The program ended with status {result.status}. Its output:\n{result.output or '(none)'}"


MATHCHAT = Pipeline(
    name="mathchat",
    show=show_math,
    agents=(
        Agent(
            name="Solver",
            role=MATH_TEAM + "You are the Problem Solver. Derive the solution step by step, name the facts that you use, "
            "and end with the result that you reached. You cannot run programs.",
            prompt="{problem}",
        ),
        Agent(
            name="Coder",
            role=MATH_TEAM + "You are the Code Executor. Write one Python program, in a ```python block, that computes or "
            "checks the answer independently of the Problem Solver's reasoning, and print what matters. It runs for at "
            "most 30 seconds, without a network. If it fails, you will see the error and may write it once more.",
            prompt="Problem:\n{problem}\n\nThe Problem Solver's work:\n{Solver}",
            max_actions=2,
            uses_tools=True,
        ),
        Agent(
            name="Verifier",
            role=MATH_TEAM + "You are the Verifier. Compare what the Code Executor wrote with what its program printed, "
            "decide what the answer is, and put it alone into \\boxed{{}} at the end of your reply.",
            prompt="Problem:\n{problem}\n\nThe Code Executor's work:\n{Coder}\n\n{Coder_output}",
            coach_sees_truth=True,
        ),
    ),
)

# ---- Arithmetic: the miniature twin, with the same flow of information, for the embedded model -----------------------

NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Lea", "Sam", "Mia")
THINGS = ("apples", "books", "coins", "cards", "pens", "eggs", "keys", "shells")
STORIES = (  # story, right expression
    ("{name} has {a} {thing} and buys {b} more.", "{a}+{b}"),
    ("{name} has {a} {thing} and loses {b}.", "{a}-{b}"),
    ("{name} has {a} boxes of {b} {thing}.", "{a}*{b}"),
    ("{name} has {a} {thing}, buys {b} more and loses {c}.", "{a}+{b}-{c}"),
    ("{name} has {a} {thing}, loses {b} and buys {c} more.", "{a}-{b}+{c}"),
    ("{name} has {a} boxes of {b} {thing} and buys {c} more.", "{a}*{b}+{c}"),
    ("{name} has {a} boxes of {b} {thing} and loses {c}.", "{a}*{b}-{c}"),
)
PIECES = (
    *"0123456789+-*,.) ",
    *NAMES,
    *(" " + thing for thing in THINGS),
    *(" has", " and", " buys", " more", " loses", " boxes", " of"),
    *("Solver: ", "Coder: ", "Verifier: ", "\n", "```python\n", "print(", "\n```", "\\boxed{", "}", "error", "nothing"),
)


def value(expression):
    """The value of sums and differences of products of whole numbers, else None. No eval: a model wrote the text.

    >>> value("2+3*4-1"), value("2+"), value("2**9"), value("__import__('os')")
    (13, None, None, None)
    """
    if not re.fullmatch(r"\d{1,9}([-+*]\d{1,9}){0,9}", expression):
        return None
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
    problems = []
    for i in range(4096 if split == "train" else 1000):
        question, expression = arithmetic_problem(random.Random(digest("arithmetic", split, i)), split)
        problems.append(Problem(f"{split}-{i}", question, str(value(expression)), expression))
    return problems


def spoil(text, rng):
    """A typical mistake in an expression or a number: another operator, or another digit."""
    places = [i for i, c in enumerate(text) if c in "+-*"]
    choices = "+-*"
    if not places or rng.random() < 0.3:
        places = [i for i, c in enumerate(text) if c.isdigit()]
        choices = "123456789"  # no 0: Python refuses numbers that start with one
    i = rng.choice(places)
    return text[:i] + rng.choice([c for c in choices if c != text[i]]) + text[i + 1 :]


def python_block(expression):
    return f"```python\nprint({expression})\n```"


def arithmetic_demonstration(rng):
    """One demonstration for a random agent. Half of the replies are wrong, and so is half of what agents are handed.

    A right Coder translates the plan that it was handed, and a right Verifier reports the output that it was handed,
    even where these are wrong.
    """
    question, expression = arithmetic_problem(rng, "train")
    plan = expression if rng.random() < 0.5 else spoil(expression, rng)
    code = plan if rng.random() < 0.5 else spoil(plan, rng)
    broken = python_block(plan).replace(")", "")  # a syntax error
    solver, coder, verifier = ARITHMETIC.agents
    agent = rng.choice(ARITHMETIC.agents)
    if agent is solver:
        return Demonstration(solver, {"problem": question}, (), plan)
    if agent is coder:
        values = {"problem": question, "Solver": plan}
        if rng.random() < 0.2:
            return Demonstration(coder, values, ((broken, "error"),), python_block(code))
        return Demonstration(coder, values, (), broken if code != plan and rng.random() < 0.3 else python_block(code))
    failed = rng.random() < 0.1
    output = "error" if failed else str(value(code) if value(code) is not None else "error")
    written = broken if failed else python_block(code)
    answer = output if rng.random() < 0.5 or output == "error" else spoil(output.lstrip("-"), rng)
    values = {"problem": question, "Coder": written, "Coder_output": output}
    return Demonstration(verifier, values, (), f"\\boxed{{{answer}}}")


def show_arithmetic(result):
    """One short word or number: the embedded model has no vocabulary for tracebacks."""
    return (result.output.strip()[:12] or "nothing") if result.status == "ok" else "error"


ARITHMETIC = Pipeline(
    name="arithmetic",
    show=show_arithmetic,
    agents=(
        Agent("Solver", prompt="Solver: {problem}"),
        Agent("Coder", prompt="Coder: {Solver}", max_actions=2, uses_tools=True),
        Agent("Verifier", prompt="Verifier: {Coder_output}", coach_sees_truth=True),
    ),
    problems=arithmetic_problems,
    pieces=PIECES,
    demonstration=arithmetic_demonstration,
)

PIPELINES = {p.name: p for p in (ARITHMETIC, MATHCHAT)}


def show_prompts(name):
    """Print the agents of a pipeline with their prompts."""
    for agent in PIPELINES[name].agents:
        print(f"--- {agent.name}: up to {agent.max_actions} actions, tools: {agent.uses_tools}\n{agent.role}\n{agent.prompt}")


LINUX = sys.platform == "linux"
LOOK_EVERY = 0.2      # seconds between two looks of the supervisor
GRACE = 60.0          # seconds beyond its time limit before the host gives a run up as our own failure
NOBODY = 65534        # the user and group that own nothing

# Numbers of <linux/prctl.h>, <linux/landlock.h>, <linux/seccomp.h> and <linux/bpf_common.h>.
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
LANDLOCK_CREATE, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT = 444, 445, 446   # system calls, alike on every machine
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8                   # Landlock's rights, the first four
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}                              # Landlock version: how many rights; else 16
LOAD, IF_EQUAL, IF_NOT_LESS, IF_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06   # instructions of a filter
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000                  # its verdicts; FAIL + an errno
X32_CALLS = 0x40000000                                                  # x86: the same calls by other numbers
CLONE_NEWUSER, ANY = 0x10000000, 0xFFFFFFFF

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}      # column of the tables, audit number
REFUSED = {  # system calls: (x86_64, aarch64). A refused one fails with EPERM.
    "socket": (41, 198), "io_uring_setup": (425, 425),                                      # any network
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),  # other processes
    "pidfd_getfd": (438, 438), "perf_event_open": (298, 241), "syslog": (103, 116),
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "userfaultfd": (323, 282),  # kernel's doors
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),            # memory that no
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),                        # limit counts
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setattr": (314, 274),        # the priority and
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),                         # core of others,
    "sched_setaffinity": (203, 122),                                                        # and its own
    "inotify_add_watch": (254, 27), "fanotify_init": (300, 262),                            # names of files
}
SIGNALS = {  # refused before Landlock version 6, which keeps signals in by itself
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
}
TRUNCATE = {"truncate": (76, 45)}     # refused before Landlock version 3, which looks after it by itself
PRETENDED = {  # answered with success and not done: shutil.copy must work, files of the same user must not change
    "chmod": (90, 53), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
}
ABSENT = {"clone3": (435, 435)}       # "no such call": its flags can't be seen; libc then takes clone
REFUSED_IF = {  # call: (numbers, argument, test, value)
    "clone": ((56, 220), 0, IF_ANY_BIT, CLONE_NEWUSER),         # a user namespace gives capabilities back
    "prlimit64": ((302, 261), 0, IF_ANY_BIT, ANY),              # limits of a process other than itself (0)
    "prctl": ((157, 167), 0, IF_EQUAL, PR_SET_DUMPABLE),        # would hide what it writes from the supervisor
}

READABLE = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd",
            "/proc/self", "/proc/meminfo", "/proc/cpuinfo",
            "/sys/devices/system/cpu", "/sys/fs/cgroup"]    # joblib crashes where it may not read cgroups
DEVICES = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
ENVIRONMENT = {  # all that a program sees; the trainer's holds keys
    "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "USER": "agent", "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "JOBLIB_MULTIPROCESSING": "0",                          # its semaphores would need /dev/shm
}
PROBE = """
import os, socket
os.listdir(os.path.dirname(os.__file__))    # a Python that can't be read fails later, in the middle of programs
for forbidden in (lambda: open({path!r}), socket.socket):
    try:
        forbidden()
    except PermissionError:
        continue
    raise SystemExit("the kernel accepted the restrictions but doesn't keep them")
"""


@dataclass
class Limits:
    """What one run may use."""
    timeout: float = 30.0       # seconds by the clock, from the moment a core is free
    memory: int = 4 << 30       # bytes, of one process (address space) and of all together (resident)
    disk: int = 512 << 20       # bytes in the workspace; four times as many may be written over and over
    files: int = 2000           # files and folders in the workspace
    processes: int = 64         # at once
    output: int = 32_000        # bytes of output kept, half from the start and half from the end
    flood: int = 4 << 20        # bytes of output that end the run


@dataclass
class Result:
    """What came of one run."""
    status: str                 # ok | error | killed | timeout | memory | disk | processes | flood
    output: str                 # what it printed, standard output and errors in order
    code: "int | None"          # exit code, minus the signal's number if killed, None if the supervisor ended it
    seconds: float              # by the clock


class SandboxError(RuntimeError):
    """We failed, not the program: nothing may be concluded about it, least of all a reward."""


# ------------------------------------------------------------------------- giving up rights (in the program)

libc = ctypes.CDLL(None, use_errno=True)


def kernel(what, *args):
    """Call a libc function by name or the kernel by number. Returns its result; a negative one becomes OSError."""
    args = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    function = getattr(libc, what) if isinstance(what, str) else libc.syscall
    got = function(*args) if isinstance(what, str) else function(ctypes.c_long(what), *args)
    if got < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return got


def lock_down(workspace, user):
    """Give up for good what a program doesn't need. Returns Landlock's version; any failure is an OSError."""
    kernel("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)        # setuid programs, and exec by root, give nothing back
    version = kernel(LANDLOCK_CREATE, None, 0, 1)
    restrict_files(version, workspace)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))       # no capabilities, in version 3's layout
    kernel("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)            # again: the change of user took it away
    restrict_calls(filter_of_calls(version))
    return version


def restrict_files(version, workspace):
    """Landlock: all of the workspace, Python and the libraries to read, no TCP, no signals to the outside."""
    every = (1 << FILE_RIGHTS.get(version, 16)) - 1
    tcp = 3 if version >= 4 else 0                          # bind and connect
    scopes = 3 if version >= 6 else 0                       # abstract unix sockets, signals
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = kernel(LANDLOCK_CREATE, struct.pack("3Q", every, tcp, scopes), size, 0)
    allowed = [(path, EXECUTE | READ_FILE | READ_DIR) for path in [*READABLE, sys.prefix, sys.base_prefix]]
    allowed += [(path, READ_FILE | WRITE_FILE) for path in DEVICES]
    for path, rights in [*allowed, (workspace, every)]:
        if not os.path.isdir(path):
            rights &= EXECUTE | READ_FILE | WRITE_FILE      # rights of folders on a file are an error
        with contextlib.suppress(FileNotFoundError):
            at = os.open(path, os.O_PATH)
            kernel(LANDLOCK_ADD_RULE, rules, 1, struct.pack("=Qi", rights, at), 0)
            os.close(at)
    kernel(LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def instruction(code, value, if_true=0, if_false=0):
    """One step of a filter; the last two say how many steps to skip."""
    return struct.pack("HBBI", code, if_true, if_false, value)


def filter_of_calls(version):
    """The seccomp filter as bytes: the first verdict reached counts, what is in no table is allowed."""
    column, machine = MACHINES[platform.machine()]
    refused = REFUSED | (SIGNALS if version < 6 else {}) | (TRUNCATE if version < 3 else {})
    flat = [(refused, errno.EPERM), (PRETENDED, 0), (ABSENT, errno.ENOSYS)]
    steps = [instruction(LOAD, 4), instruction(IF_EQUAL, machine, 1, 0), instruction(RETURN, KILL),
             instruction(LOAD, 0), instruction(IF_NOT_LESS, X32_CALLS, 0, 1), instruction(RETURN, FAIL + errno.EPERM)]
    for table, error in flat:
        for numbers in table.values():
            steps += [instruction(IF_EQUAL, numbers[column], 0, 1), instruction(RETURN, FAIL + error)]
    for numbers, argument, test, value in REFUSED_IF.values():
        steps += [instruction(IF_EQUAL, numbers[column], 0, 4), instruction(LOAD, 16 + 8 * argument),
                  instruction(test, value, 0, 1), instruction(RETURN, FAIL + errno.EPERM), instruction(RETURN, ALLOW)]
    return b"".join([*steps, instruction(RETURN, ALLOW)])


def restrict_calls(steps):
    """Install a filter of system calls for this process and all below it."""
    code = ctypes.create_string_buffer(steps)
    kernel("prctl", PR_SET_SECCOMP, 2, struct.pack("HxxxxxxP", len(steps) // 8, ctypes.addressof(code)), 0, 0)


# ------------------------------------------------------------------------- the program (untrusted from execute on)

def run_program(job, limits, control, out):
    """In the program's process: shut every door, then execute the code. Never returns."""
    try:
        os.setsid()
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.nice(10)             # the supervisor isn't: on the core they share it goes before a fork bomb
        set_limits(limits)
        os.chdir(job["workspace"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        if job["level"] == "landlock":
            lock_down(job["workspace"], job["user"])
        elif os.geteuid() == 0:
            raise PermissionError("root runs no program without isolation")
        if LINUX:
            kernel("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)      # after the change of user, which clears it
    except BaseException as error:
        answer(control, status="sandbox", output=f"{type(error).__name__}: {error}")
    os.closerange(3, 65536)     # among them the line to the host: from here on nothing said is believed
    execute(job["code"], job["workspace"])


def set_limits(limits):
    """Limits of each process. Not NPROC: that one counts all threads of the user, the trainer's too."""
    if LINUX:
        kernel("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)        # the supervisor isn't; else /proc/self belongs to root
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # out of memory, the kernel ends this process and not the trainer
    most = {"CORE": 0, "CPU": int(limits.timeout) + 5, "FSIZE": limits.disk, "NOFILE": 256, "AS": limits.memory}
    for name, value in most.items():
        with contextlib.suppress(ValueError, OSError):      # macOS knows no AS, a hard limit may be lower already
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))


def execute(code, workspace):
    """Execute the code as __main__ and exit as the interpreter would. Never returns."""
    # Line by line, so that what was printed before the end by a signal is kept; "replace" for half characters.
    streams = [open(fd, "w", 1, "utf-8", "replace", closefd=False) for fd in (1, 2)]
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = streams
    os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = workspace
    sys.path.append(workspace)                              # last: a pandas.py left there shadows nothing
    sys.argv = [""]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()                  # else every run draws the numbers of the zygote
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    linecache.cache["<action>"] = 0, None, code.splitlines(True), "<action>"    # tracebacks show its own lines
    exit_code = 1
    try:
        try:
            exec(compile(code, "<action>", "exec", dont_inherit=True), main.__dict__)
            exit_code = 0
        except SystemExit as stop:
            exit_code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
            if not isinstance(stop.code, (int, type(None))):
                print(stop.code, file=streams[1])
        except BaseException as error:
            traceback.print_exception(type(error), error, error.__traceback__.tb_next, file=streams[1])
        threading._shutdown()                               # what the interpreter does at its end: wait for threads,
        atexit._run_exitfuncs()                             # call what was registered
        sys.stdout.flush()
    finally:
        os._exit(exit_code & 255)


# ------------------------------------------------------------------------- the supervisor

def supervise(control, out):
    """In a fork of the zygote: start one program, watch it, end all that is left of it, report. Never returns."""
    with open(control, "rb", closefd=False) as line:
        job = json.loads(line.readline() or "null")
    if job is None:             # the host is gone already
        os._exit(0)
    limits = Limits(**job["limits"])
    if LINUX:
        os.sched_setaffinity(0, [job["core"]])
        kernel("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)     # daemons come to this process, not to init
        kernel("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)            # nobody of the same user looks in
    started = time.monotonic()
    program = os.fork()
    if program == 0:
        run_program(job, limits, control, out)
    os.close(out)
    status, code = watch(program, control, job["workspace"], limits, started + limits.timeout)
    seconds = time.monotonic() - started
    end_all_below(program)      # after this the workspace is at rest
    answer(control, status=excess(job["workspace"], limits) or status, code=code, seconds=seconds)


def watch(program, control, workspace, limits, deadline):
    """Wait until the program ends or has to. Returns (status, exit code or None)."""
    # A byte per dead child in a pipe: no handler raises in the middle of something, no death is missed.
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    events = select.poll()
    events.register(woken, select.POLLIN)
    events.register(control, select.POLLIN)
    next_look = time.monotonic() + LOOK_EVERY
    while True:
        ended = reap() or {}
        if program in ended:
            code = os.waitstatus_to_exitcode(ended[program])
            return ("ok" if code == 0 else "error" if code > 0 else "killed"), code
        now = time.monotonic()
        if now >= deadline:
            return "timeout", None
        if now >= next_look:
            over = excess(workspace, limits)
            if over:
                return over, None
            next_look = time.monotonic() + LOOK_EVERY
        ready = dict(events.poll(1000 * max(0, min(deadline, next_look) - now) + 1))
        if control in ready:    # the host says nothing after the job: it has had enough, or is dead
            return "stopped", None
        if woken in ready:
            os.read(woken, 4096)


def reap():
    """Collect the children that have ended: {pid: wait status}, or None when there is no child at all."""
    ended = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended or None
        if pid == 0:
            return ended
        ended[pid] = status


def end_all_below(program=None):
    """Kill by descent until nothing is left; groups and sessions can be left behind by a program, parents can't."""
    while reap() is not None:
        for pid in [*([-program] if program else []), *descendants(os.getpid())]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def descendants(pid):
    """The ids of all processes below this one (Linux; elsewhere none are seen)."""
    found, todo = [], [pid]
    while todo:                 # no recursion: a chain of a thousand processes is an attack
        folder = f"/proc/{todo.pop()}/task"
        with contextlib.suppress(OSError):
            for task in os.listdir(folder):
                with contextlib.suppress(OSError), open(f"{folder}/{task}/children") as file:
                    children = [int(child) for child in file.read().split()]
                    found += children
                    todo += children
    return found


def excess(workspace, limits):
    """The name of a limit that the run as a whole is over (processes, memory or disk), or None."""
    below = descendants(os.getpid())
    if len(below) > limits.processes:
        return "processes"
    memory = written = 0
    for pid in below:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/statm") as file:
            memory += int(file.read().split()[1]) * resource.getpagesize()
        with contextlib.suppress(OSError), open(f"/proc/{pid}/io") as file:
            counts = dict(line.split(": ") for line in file.read().splitlines())
            written += max(int(counts["wchar"]), int(counts["write_bytes"]))    # tmpfs counts only the first, mmap
    if memory > limits.memory:                                                  # only the second
        return "memory"
    if written > 4 * limits.disk or over_quota(workspace, limits):              # written: files already unlinked
        return "disk"
    return None


def over_quota(workspace, limits):
    """Whether the workspace holds more bytes or entries than allowed, or can't be counted."""
    size = count = 0
    folders = [workspace]
    while folders:
        try:
            for entry in os.scandir(folders.pop()):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    count += 1
                    size += found.st_blocks * 512
                    if stat.S_ISDIR(found.st_mode):
                        folders.append(entry.path)
                if size > limits.disk or count > limits.files:
                    return True
        except (FileNotFoundError, NotADirectoryError):     # gone meanwhile
            pass
        except OSError:         # a path too long to follow, a folder that may not be listed: made to hide files
            return True
    return False


def answer(control, **report):
    """Tell the host how the run went, and exit. Never returns."""
    with contextlib.suppress(OSError), open(control, "wb", closefd=False) as line:
        line.write(json.dumps(report).encode() + b"\n")
    os._exit(0)


# ------------------------------------------------------------------------- the zygote

def zygote(requests, preload):
    """Fork a supervisor per request (one byte and two descriptors) until the host closes the line or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)            # Ctrl-C is the host's affair
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)           # the kernel buries the children: no zombies
    if LINUX:
        kernel("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) # the program of a dead supervisor comes here
    for name in preload:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()                 # forks that collect garbage would copy every page
    while True:
        byte, descriptors, _, _ = socket.recv_fds(requests, 1, 2)
        if not byte:
            break
        with contextlib.suppress(OSError):                  # no room for a process: the host hears a closed line
            if os.fork() == 0:
                requests.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                try:
                    supervise(*descriptors)
                except BaseException as error:
                    end_all_below()
                    answer(descriptors[0], status="sandbox", output=repr(error))
        for descriptor in descriptors:
            os.close(descriptor)
    end_all_below()


# ------------------------------------------------------------------------- the host

class Output:
    """Collects bytes, keeps the first and the last, counts the others."""

    def __init__(self, most):
        self.half = max(1, most // 2)
        self.head = self.tail = b""
        self.total = 0

    def add(self, piece):
        self.total += len(piece)
        room = self.half - len(self.head)
        self.head += piece[:room]
        self.tail = (self.tail + piece[room:])[-self.half:]

    def text(self):
        cut = self.total - len(self.head) - len(self.tail)
        mark = f"\n... {cut} bytes cut ...\n".encode() if cut else b""
        return (self.head + mark + self.tail).decode("utf-8", "replace")


class Sandbox:
    """Runs programs, from many threads at once, one per core at a time (a program's clock starts when it has one).

    level "landlock" is described above. "limits" (macOS, kernels before 5.13) bounds time, output and disk and
    protects nothing. The level is tried out at the start and never changes later. `preload` names modules to
    import once for all programs: a fork with pandas takes 25 ms, importing it takes 300. Raises SandboxError,
    in one sentence, where the level can't be had.
    """

    def __init__(self, level="landlock", preload=(), **limits):
        self.level, self.preload, self.limits = level, list(preload), Limits(**limits)
        self.user = NOBODY if level == "landlock" and nobody_reaches_python() else None
        self.workspaces, self.owner, self.closed = set(), os.getpid(), False
        self.process, self.line, self.lock = None, None, threading.Lock()
        self.cores = queue.SimpleQueue()                    # holding a core is the right to run a program
        for core in sorted(os.sched_getaffinity(0)) if LINUX else range(os.cpu_count()):
            self.cores.put(core)
        atexit.register(self.close)
        try:
            self._probe()
        except BaseException:
            self.close()
            raise
        if level == "limits":
            print("WARNING: programs run WITHOUT isolation: they can read and change all that you can", file=sys.stderr)

    def _probe(self):
        """Raise SandboxError unless the level holds here, shown by a program that tries what it mustn't."""
        hint = "`--sandbox limits` runs programs without isolation, as a user who is not root"
        if self.level == "limits":
            if os.geteuid() == 0:
                raise SandboxError("the sandbox level `limits` is refused to root: a program could do anything")
            program = "pass"
        elif self.level == "landlock":
            if not LINUX or platform.machine() not in MACHINES:
                raise SandboxError(f"no isolation on {sys.platform} {platform.machine()}; {hint}")
            program = PROBE.format(path=os.path.join(self.make_workspace({"secret": b""}), "secret"))
        else:
            raise ValueError(f"unknown sandbox level {self.level!r}: landlock or limits")
        try:
            result = self.run(program, self.make_workspace())
        except SandboxError as error:
            raise SandboxError(f"no isolation here ({error}); {hint}") from None
        if result.status != "ok":
            raise SandboxError(f"no isolation here ({result.status}: {result.output.strip()[-300:]}); {hint}")
        for workspace in list(self.workspaces):
            self.remove_workspace(workspace)

    def run(self, code, workspace, **limits):
        """Execute code in a workspace of make_workspace (one run at a time in each; its files stay). Returns a Result.

        Once it returns no process of the program is alive. Limits given here count for this run. Raises
        SandboxError if we failed twice, ValueError for a folder that isn't a workspace.
        """
        if workspace not in self.workspaces:
            raise ValueError(f"{workspace}: not a workspace of this sandbox")
        limits = dataclasses.replace(self.limits, **limits)
        core = self.cores.get()
        try:
            try:
                return self._attempt(code, workspace, limits, core)
            except SandboxError:
                return self._attempt(code, workspace, limits, core)
        finally:
            self.cores.put(core)    # also after Ctrl-C: a lost core is lost for the whole training

    def _attempt(self, code, workspace, limits, core):
        """One try of run(); every failure that isn't the program's is a SandboxError."""
        job = dict(code=code, workspace=workspace, level=self.level, user=self.user, core=core,
                   limits=dataclasses.asdict(limits))
        with contextlib.ExitStack() as opened:
            try:
                control, theirs = map(opened.enter_context, socket.socketpair())
                reader, writer = [opened.enter_context(open(fd, mode, 0)) for fd, mode in zip(os.pipe(), ("rb", "wb"))]
                self._request(theirs.fileno(), writer.fileno())
                theirs.close()
                writer.close()
                opened.callback(self._settle, control)
                control.settimeout(GRACE)
                control.sendall(json.dumps(job).encode() + b"\n")
                output, report = self._listen(control, reader, limits)
            except OSError as error:
                raise SandboxError(f"the line to the sandbox broke: {error}") from error
        if report["status"] == "sandbox":
            raise SandboxError(report["output"])
        status = "flood" if output.total > limits.flood else report["status"]
        return Result(status, output.text(), report["code"], report["seconds"])

    def _request(self, *descriptors):
        """Hand the zygote the other ends of a run's lines; start it if it doesn't run (any more)."""
        with self.lock:
            if self.closed:
                raise SandboxError("the sandbox is closed")
            if self.process is None or self.process.poll() is not None:
                self._start()
            socket.send_fds(self.line, [b"."], descriptors)

    def _start(self):
        """Start the zygote: this file as a script, apart from the trainer's environment, terminal and group."""
        self.line, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-I", "-B", "-X", "utf8", os.path.abspath(__file__), str(theirs.fileno())]
            self.process = subprocess.Popen([*command, *self.preload], env=ENVIRONMENT, cwd="/", start_new_session=True,
                                            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])

    @staticmethod
    def _listen(control, reader, limits):
        """Take the output, then the supervisor's report. Returns (Output, dict)."""
        output, stopped = Output(limits.output), False
        give_up = time.monotonic() + limits.timeout + GRACE
        events = select.poll()
        events.register(reader, select.POLLIN)
        events.register(control, select.POLLIN)
        while True:
            ready = dict(events.poll(1000 * max(0.0, give_up - time.monotonic())))
            if not ready:
                raise SandboxError("the supervisor of a run doesn't answer")
            if reader.fileno() not in ready:    # the report is here and the pipe is empty. Waiting for the pipe's
                break                           # end instead would hang on any process that inherited it
            piece = os.read(reader.fileno(), 65536)
            if not piece:
                events.unregister(reader)
            output.add(piece)
            if output.total > limits.flood and not stopped:
                control.shutdown(socket.SHUT_WR)    # the supervisor takes this as the order to end the run
                stopped = True
        line = control.makefile("rb").readline()
        if not line:
            raise SandboxError("the supervisor of a run was killed")
        return output, json.loads(line)

    @staticmethod
    def _settle(control):
        """However a run ended for us (Ctrl-C too), wait until its processes are gone."""
        with contextlib.suppress(OSError):
            control.settimeout(5.0)
            control.shutdown(socket.SHUT_WR)
            while control.recv(65536):
                pass

    def make_workspace(self, files={}):
        """Make a new private folder with these files (name -> bytes) and return its path."""
        workspace = os.path.realpath(tempfile.mkdtemp(prefix="workspace-"))
        self.workspaces.add(workspace)
        for name, data in files.items():
            path = os.path.join(workspace, plain_name(name))
            with open(path, "xb") as file:
                file.write(data)
            if self.user is not None:
                os.chown(path, self.user, self.user)
        if self.user is not None:
            os.chown(workspace, self.user, self.user)
        return workspace

    def remove_workspace(self, path):
        """Remove a workspace, whatever a program made of it. Raises ValueError for any other folder."""
        if path not in self.workspaces:
            raise ValueError(f"{path}: not a workspace of this sandbox")
        # Not shutil.rmtree: it fails on thousands of nested folders. chmod: folders may be locked.
        if os.geteuid() != 0:
            subprocess.run(["chmod", "-R", "u+rwx", "--", path], stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", "--", path], stderr=subprocess.DEVNULL)
        self.workspaces.discard(path)

    @staticmethod
    def read(workspace, name, most=64 << 20):
        """The bytes of a file that a program left (never unpickle them): the only way the host takes one.

        Raises OSError for whatever isn't a plain file with one name of at most `most` bytes: a link could be
        the answers in disguise, a pipe would block the host, a sparse file fill its memory.
        """
        path = os.path.join(workspace, plain_name(name))
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                raise OSError(f"{name!r} is not a plain file")
            if found.st_size > most:
                raise OSError(f"{name!r} has {found.st_size} bytes, more than {most}")
            return file.read(most)

    @staticmethod
    def list_files(workspace, most=50):
        """[(name, bytes)] of the regular files, sorted by name. A prompt may show it: names are printable and short."""
        found = []
        for entry in os.scandir(workspace):
            if entry.is_file(follow_symlinks=False):
                name = "".join(c if c.isprintable() else "?" for c in entry.name)[:100]
                found.append((name, entry.stat(follow_symlinks=False).st_size))
        return sorted(found)[:most]

    def close(self):
        """End every program and the zygote, remove the workspaces that are left. May be called twice."""
        if os.getpid() != self.owner:       # a fork of the trainer has none of this
            return
        with self.lock:
            self.closed = True
            if self.process is not None:
                with contextlib.suppress(OSError):
                    self.line.shutdown(socket.SHUT_RDWR)    # not only closed: a fork of the trainer may hold it too
                self.line.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(10)
                self.process.kill()
                self.process.wait()
                self.process = None
        for workspace in list(self.workspaces):
            self.remove_workspace(workspace)
        atexit.unregister(self.close)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def plain_name(name):
    """The name itself if it is one of a file in a folder; OSError if it is a path or no name at all."""
    try:
        if os.fsencode(name) and os.path.basename(name) == name and name not in (".", "..") and "\0" not in name:
            return name
    except (UnicodeError, TypeError):
        pass
    raise OSError(f"{name!r:.120} is not the name of a file")


def nobody_reaches_python():
    """Whether we are root and programs can be nobody: a Python below a closed home could not be read by them."""
    for path in (sys.prefix, sys.base_prefix, tempfile.gettempdir()):
        path = os.path.realpath(path)
        while os.stat(path).st_mode & stat.S_IXOTH:
            if path == "/":
                break
            path = os.path.dirname(path)
        else:
            return False
    return os.geteuid() == 0


if __name__ == "__main__":
    zygote(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
