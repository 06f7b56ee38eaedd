"""Data analysis with real pandas and scikit-learn programs: files pass from agent to agent, blame follows them.

Whatever a program does, the episode's truth stays hidden and the run goes on.
"""

import ast
import json
import os
import re
import string
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
from conftest import ROOT, as_they_end

import agents
import eval
import judge
import rollout
import train
from agents import DSBENCH, DataOptions, FileEntry, InputError, Problem, load_problems
from judge import Case, Grade, Verdict, coach_messages, judge_by
from model import Completion, tiny_tokenizer
from rollout import Sampling, make_episodes, run_episodes

ENGINEER = """```python
import pandas as pd
train, test = pd.read_csv('train.csv'), pd.read_csv('test.csv')
X = train.drop(columns=['id', 'target'])
mean, std = X.mean(), X.std()
pd.to_pickle((X - mean) / std, 'X_train.pkl')
pd.to_pickle(train['target'], 'y_train.pkl')
pd.to_pickle((test[X.columns] - mean) / std, 'X_test.pkl')
print('saved X_train.pkl, y_train.pkl and X_test.pkl')
```"""
FORGETFUL = ENGINEER.replace("pd.to_pickle((test[X", "#((test[X")
MODELER = """<think>Which one? ```python
raise SystemExit('never run')
```</think>A linear model.
```python
import pickle, pandas as pd
from sklearn.linear_model import {0}
model = {0}().fit(pd.read_pickle('X_train.pkl'), pd.read_pickle('y_train.pkl'))
pickle.dump(model, open('model.pkl', 'wb'))
```"""
ANALYST = """```python
import pickle, pandas as pd
test, X, model = pd.read_csv('test.csv'), pd.read_pickle('X_test.pkl'), pickle.load(open('model.pkl', 'rb'))
out = pd.DataFrame(dict(id=test['id'], target=model.predict(X)))
out.sample(frac=1, random_state=1).to_csv('submission.csv', index=False)
```"""


def task_line(name, kind, prompt, **paths):
    """A task as a line of one of DSBench's task files; its data lie in a folder of its name."""
    usual = dict(train_file=f"{name}/train.csv", test_file=f"{name}/test.csv", answer_dir=f"{name}/answers")
    metadata = dict(task_id=name, data_type=kind) | usual | paths
    return json.dumps(dict(prompt=prompt, answer=None, metadata=metadata))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """scikit-learn's diabetes and breast cancer, laid out as DSBench lays out its tasks."""
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    pytest.importorskip("pandas", reason="pandas is not installed")
    root = tmp_path_factory.mktemp("dsbench")
    lines = []
    for name, kind in (("diabetes", "regression"), ("breast_cancer", "classification")):
        frame = getattr(datasets, "load_" + name)(as_frame=True).frame.sample(frac=1, random_state=0)
        frame.insert(0, "id", range(1000, 1000 + len(frame)))
        cut = len(frame) * 3 // 4
        (root / name / "answers").mkdir(parents=True)
        frame[:cut].to_csv(root / name / "train.csv", index=False)
        frame[cut:].drop(columns="target").to_csv(root / name / "test.csv", index=False)
        frame[cut:][["id", "target"]].to_csv(root / name / "answers" / "test_answer.csv", index=False)
        lines.append(task_line(name, kind, f"Predict target in {name}.", test_file=f"./{name}/test.csv"))
    (root / "tasks.json").write_text("\n".join(lines))
    return root


@pytest.fixture(scope="module")
def sandbox():
    """A sandbox started beside a secret. So many processes that a fork bomb is always stopped by its memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COACH_KEY", "sk-a-secret-key")
        limits = dict(timeout=15.0, disk=32 << 20, processes=1000)
        with agents.Sandbox(preload=DSBENCH.preload, **limits) as sandbox:
            yield sandbox


@dataclass(frozen=True)
class Shown:
    """What the coach was sent about an action."""

    agent: str
    text: str


def completion_of(tokenizer, text):
    """A reply as the sampler would return it."""
    ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
    return Completion(ids, [-0.5] * len(ids), False)


def play(monkeypatch, sandbox, problems, script):
    """Run the pipeline with scripted replies, in order; returns (episodes, what the coach was shown)."""
    tokenizer = tiny_tokenizer(list(string.printable))
    replies = iter(script)
    shown = []

    def scripted(model, contexts, draws, limit, temperature):
        return [completion_of(tokenizer, next(replies)) for _ in contexts]

    def coach(cases):
        shown.extend(Shown(case.agent.name, coach_messages(case)[1]["content"]) for case in cases)
        return [Verdict(5, "")] * len(cases)

    monkeypatch.setattr(rollout, "sample_as_they_end", as_they_end(scripted))
    models = dict.fromkeys(agent.name for agent in DSBENCH.agents)
    sampling = Sampling(("t",), max_new_tokens=99, max_context_tokens=60_000)
    episodes = run_episodes(DSBENCH, models, tokenizer, make_episodes(problems, 1), coach, sandbox, sampling)
    assert list(replies) == []
    assert not any(os.path.exists(episode.workspace) for episode in episodes)
    return episodes, shown


# ---- Episodes with real programs -------------------------------------------------------------------------------------


def test_a_whole_episode_on_two_real_data_sets(monkeypatch, sandbox, data):
    """Files reach the next agent, the coach sees which are there, and submissions are graded by id.

    The Engineer of the first task forgets X_test.pkl and says that it saved it: the coach is shown that the file is not
    there, and the Engineer acts again. Both Analysts write their rows in random order, and both submissions are good.
    Thinking is neither run nor passed on, and nothing of the answers is in a prompt or in a workspace.
    """
    problems = load_problems(data / "tasks.json", DataOptions(str(data)))
    assert [(p.id, p.kind, p.answer_key.id_column, p.answer_key.targets) for p in problems] == [
        ("tasks/diabetes", "regression", "id", ("target",)),
        ("tasks/breast_cancer", "classification", "id", ("target",)),
    ]
    assert all(set(p.files) == {"train.csv", "test.csv"} for p in problems)
    script = [FORGETFUL, ENGINEER, ENGINEER, MODELER.format("Ridge"), MODELER.format("LogisticRegression")]
    (first, second), shown = play(monkeypatch, sandbox, problems, [*script, ANALYST, ANALYST])

    assert [(a.agent, a.turn, a.status) for a in first.actions] == [
        ("Engineer", 0, "ok"),
        ("Engineer", 1, "ok"),
        ("Modeler", 0, "ok"),
        ("Analyst", 0, "ok"),
    ]
    assert [a.agent for a in second.actions] == ["Engineer", "Modeler", "Analyst"]
    assert first.grade.correct
    assert first.grade.metrics["rmse_range"] < 20
    assert second.grade.correct
    assert second.grade.metrics["accuracy"] > 0.9

    assert [s.agent for s in shown] == ["Engineer"] * 3 + ["Modeler"] * 2 + ["Analyst"] * 2
    about_forgetting, about_mending, about_modeler = shown[0].text, shown[2].text, shown[3].text
    assert "X_test.pkl (missing)" in about_forgetting
    assert "model.pkl" not in about_forgetting
    assert "are not there: <<<\nX_test.pkl\n>>>" in about_forgetting
    assert "train.csv: " in about_forgetting
    assert "331 x 12" in about_forgetting
    assert "test.csv" in about_forgetting
    assert "X_test.pkl (there)" in about_mending
    assert "Its last action" in about_mending
    assert "Which one?" not in about_modeler
    assert "A linear model." in about_modeler
    for s in shown:
        assert ("hidden answers" in s.text) == (s.agent == "Analyst")

    record = rollout.record(first)
    assert (record["kind"], record["correct"], record["reason"]) == ("regression", True, "")
    assert record["metrics"] == first.grade.metrics
    assert record["quality"] == first.grade.quality == pytest.approx(1 - first.grade.metrics["rmse_range"] / 50)
    assert (record["answer"], record["truth"]) == (None, "")
    assert record["actions"][0]["files"] == ["X_train.pkl", "test.csv", "train.csv", "y_train.pkl"]


@dataclass(frozen=True)
class Attack:
    """A program that does harm. ANSWERS in its code is the path of the hidden answers, OWNED that of a new file."""

    name: str
    code: str
    status: str  # that it must end with
    output: str = ""  # that it must show


ATTACKS = [
    Attack("loops for ever", "while True: pass", "timeout"),
    Attack("prints for ever", "while True: print('x' * 1000)", "flood", "characters cut"),
    Attack("forks", "import os\nwhile True: os.fork()", "memory"),  # pages that forks share count for each
    Attack("reads the answers", "print(open(ANSWERS).read())", "error", "PermissionError"),
    Attack("lists the answers", "import os\nprint(os.listdir(os.path.dirname(ANSWERS)))", "error", "PermissionError"),
    Attack("links the answers", "import os\nos.symlink(ANSWERS, 'submission.csv')", "ok"),
    Attack(
        "reads the key",
        "import os\nprint(dict(os.environ))\nprint(open(f'/proc/{os.getppid()}/environ').read())",
        "error",
        "PermissionError",
    ),
    Attack("connects", "import socket\nsocket.create_connection(('127.0.0.1', 80))", "error", "PermissionError"),
    Attack("kills its parent", "import os\nos.kill(os.getppid(), 9)", "error", "PermissionError"),
    Attack(
        "leaves a process",
        """\
import subprocess, sys
late = "import time; time.sleep(2); open('late.txt', 'w')"
subprocess.Popen([sys.executable, '-c', late], start_new_session=True)""",
        "ok",
    ),
    Attack(
        "leaves a pickle that runs a command",
        """\
import os, pickle
class Bad:
    def __reduce__(self):
        return os.system, ('touch ' + OWNED,)
pickle.dump(Bad(), open('X_train.pkl', 'wb'))""",
        "ok",
    ),
    Attack("fills the disk", "with open('big', 'wb') as f:\n while True: f.write(bytes(1 << 20))", "disk"),
]


def test_attacks_are_contained_reported_and_the_run_goes_on(monkeypatch, sandbox, data):
    """An episode in which an agent attacks goes on, and shows what came of it to the agent and to the coach.

    Each episode's Engineer begins with an attack, sees what came of it, and then does its work. All episodes end with a
    good submission but two: the one with a full disk, and the one with a link in place of the submission.
    """
    problem = load_problems(data / "tasks.json", DataOptions(str(data)))[1]
    problems = [replace(problem, id=attack.name) for attack in ATTACKS]
    answers = problem.answer_key.csv
    owned = Path(tempfile.gettempdir(), f"owned-{os.getpid()}")  # a place where everybody may write
    honest = len(ATTACKS) - 1  # episodes that go on
    script = []
    for attack in ATTACKS:
        code = attack.code.replace("ANSWERS", repr(str(answers))).replace("OWNED", repr(str(owned)))
        script.append(f"```python\n{code}\n```")
    script += [ENGINEER] * honest
    script += [MODELER.format("LogisticRegression")] * honest
    script += [ANALYST] * (honest + 3)  # one of them tries four times
    before = set(agents.descendants(os.getpid()))  # the zygote
    episodes, shown = play(monkeypatch, sandbox, problems, script)

    for episode, told, attack in zip(episodes, shown[: len(ATTACKS)], ATTACKS, strict=True):
        first = episode.actions[0]
        assert (attack.name, first.status) == (attack.name, attack.status), first.observation
        assert attack.output in first.observation
        assert attack.status in first.observation
        assert told.agent == "Engineer"
        assert attack.status in told.text
        assert not any("late.txt" in entry.name for action in episode.actions for entry in action.after)
        if attack.name == "fills the disk":
            assert episode.error == "its workspace is full"
            assert episode.grade == Grade(False, 0.0, "its workspace is full")
            assert len(episode.actions) == 1
        elif attack.name == "links the answers":
            # the honest Analyst's to_csv follows the link and may not write there: four tries, and no marks
            assert not episode.grade.correct
            assert "not a plain file" in episode.grade.reason
            assert len(episode.actions) == 7
        else:
            assert episode.grade.correct, (attack.name, episode.grade, [a.observation for a in episode.actions])
            assert len(episode.actions) == 4
    assert not any("sk-a-secret-key" in told.text for told in shown)
    assert not any("sk-a-secret-key" in str(action.observation) for e in episodes for action in e.actions)
    assert not owned.exists()
    assert set(agents.descendants(os.getpid())) == before
    assert not any(is_zombie(pid) for pid in before)


def is_zombie(pid):
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# ---- Programs and sampling at the same time --------------------------------------------------------------------------


def one_coder(show_result):
    """A pipeline of a single agent that runs programs."""
    coder = agents.Agent("Coder", "{problem}", uses_tools=True)
    return agents.Pipeline("p", (coder,), graded_by="answer", show_result=show_result)


def accept_all(cases):
    """A coach that has no objection."""
    return [Verdict(1, "")] * len(cases)


class Meeting:
    """A sampler and a sandbox in one that wait for each other, for batches of two episodes.

    A batch is sampled to its end only when the programs of the batch before have run, and these run to their end only
    when its sampling has begun. If either side waited for the other one before that, both would wait in vain.
    """

    limits = agents.Limits()

    def __init__(self, tokenizer, batches):
        self.tokenizer = tokenizer
        self.batches = batches
        self.events = []  # (what, batch), in order
        self.changed = threading.Condition()
        self.workspaces = 0

    def note(self, what, batch):
        with self.changed:
            self.events.append((what, batch))
            self.changed.notify_all()

    def wait_for(self, what, batch, count):
        """Wait until this has happened so often."""
        with self.changed:
            met = self.changed.wait_for(lambda: self.events.count((what, batch)) == count, timeout=60)
        assert met, f"{what} {batch} was waited for in vain, after {self.events}"

    def sample(self, model, contexts, *_, **limits):
        for batch in range(self.batches):
            self.note("sampling", batch)
            if batch > 0:
                self.wait_for("ran", batch - 1, count=2)
            self.note("sampled", batch)
            for i in (2 * batch, 2 * batch + 1):
                yield i, completion_of(self.tokenizer, "```python\nprint(1)\n```")

    def make_workspace(self, files):
        self.workspaces += 1
        return str(self.workspaces - 1)

    def run(self, code, workspace):
        batch = int(workspace) // 2
        if batch + 1 < self.batches:
            self.wait_for("sampling", batch + 1, count=1)
        self.note("ran", batch)
        return agents.Result("ok", "1", 0, 0.0)

    def read(self, workspace, name):
        raise FileNotFoundError(name)

    def remove_workspace(self, workspace):
        self.workspaces -= 1


def test_programs_overlap_with_generation(monkeypatch):
    """Sampling goes on while the programs of the batch before run, and these do not wait until all is sampled.

    Symptom: a stall that grows with every program.
    """
    tokenizer = tiny_tokenizer(agents.ARITHMETIC_PIECES)
    meeting = Meeting(tokenizer, batches=4)
    monkeypatch.setattr(rollout, "sample_as_they_end", meeting.sample)
    episodes = make_episodes([Problem(str(i), "1") for i in range(8)], 1)
    pipeline = one_coder(show_result=lambda result: result.output)
    run_episodes(pipeline, {"Coder": None}, tokenizer, episodes, accept_all, meeting, Sampling(("t",), rows=2))
    expected = [("sampling", 0), ("sampled", 0)]
    for batch in (1, 2, 3):
        expected += [("sampling", batch), ("ran", batch - 1), ("ran", batch - 1), ("sampled", batch)]
    assert meeting.events == [*expected, ("ran", 3), ("ran", 3)]
    assert all(episode.actions[0].observation == "1" for episode in episodes)
    assert meeting.workspaces == 0


def test_64_programs_finish_without_a_stall(monkeypatch, capsys):
    """64 programs that keep their core busy, beside sampling, take as long as the cores need.

    No zombie, program or workspace is left. The bound on the time leaves a busy machine a minute; a run that stalls is
    tried again after that and its time limit, so that a single one breaks the bound. To see the time with programs of
    one second:

        MAPPA_PROGRAM_SECONDS=1 pytest tests/test_dsbench.py -k 64 -s
    """
    seconds = float(os.environ.get("MAPPA_PROGRAM_SECONDS", 0.1))
    cores = len(os.sched_getaffinity(0))
    tokenizer = tiny_tokenizer(list(string.printable))
    busy = f"```python\nimport time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass\n```"
    sampling_time = 0.0

    def scripted(model, contexts, *_, **limits):
        nonlocal sampling_time
        for i in range(len(contexts)):
            if i % 8 == 0:
                time.sleep(4 * seconds)
                sampling_time += 4 * seconds
            yield i, completion_of(tokenizer, busy)

    monkeypatch.setattr(rollout, "sample_as_they_end", scripted)
    pipeline = one_coder(show_result=lambda result: result.status)
    episodes = make_episodes([Problem(str(i), "1") for i in range(64)], 1)
    others = set(agents.descendants(os.getpid()))
    with agents.Sandbox(preload=DSBENCH.preload) as sandbox:
        started = time.monotonic()
        run_episodes(pipeline, {"Coder": None}, tokenizer, episodes, accept_all, sandbox, Sampling(("t",), rows=8))
        took = time.monotonic() - started
        below = set(agents.descendants(os.getpid())) - others
    with capsys.disabled():
        print(f"\n64 programs of {seconds} s on {cores} cores beside {sampling_time:.1f} s of sampling: {took:.1f} s")
    assert all(episode.actions[0].observation == "ok" for episode in episodes)
    assert not any(os.path.exists(episode.workspace) for episode in episodes)
    assert took < 64 * seconds / cores + sampling_time + agents.GRACE
    assert not any(is_zombie(pid) for pid in below)
    assert len(below) <= 1  # the zygote


# ---- Files in workspaces ---------------------------------------------------------------------------------------------


def listing(sandbox, code):
    """What is in a workspace after a program."""
    workspace = sandbox.make_workspace({"train.csv": b'id,"a, b"\n1,2\n3,4\n'})
    assert sandbox.run(code, workspace).status == "ok"
    return sandbox.list_files(workspace)


def test_listings_hold_plain_files_with_printable_names(sandbox):
    """The list goes into prompts: links, pipes and folders are not files, and names are cut.

    Neither a thousand names nor a sparse file of many bytes slow the host down.
    """
    code = """\
import os
os.symlink('/etc/passwd', 'link.csv')
os.mkfifo('pipe.csv')
os.mkdir('folder')
open('a\\nb', 'w')
open('x' * 200 + '.csv', 'w')
open('empty.csv', 'w')
with open('sparse.csv', 'wb') as f:
    f.truncate(30 << 20)"""
    assert listing(sandbox, code) == (
        FileEntry("empty.csv", 0, ""),
        FileEntry("sparse.csv", 30 << 20, "0 x 1"),
        FileEntry("train.csv", 18, "2 x 2"),
        FileEntry("x" * 100, 0, ""),
    )
    many = listing(sandbox, "for i in range(1000): open(f'{i:04}', 'w')")
    assert len(many) == 1001  # none is hidden
    assert many[0] == FileEntry("0000", 0, "")
    assert many[-1] == FileEntry("train.csv", 18, "")
    shown = agents.show_file_list(many).splitlines()
    assert shown[49] == "0049: 0 bytes"
    assert shown[50:] == ["and 951 more"]


def test_files_that_were_not_closed_are_written(sandbox):
    """A program's last line is out.write(...): Python writes it when it ends, and so must the sandbox."""
    workspace = sandbox.make_workspace()
    assert sandbox.run("out = open('submission.csv', 'w')\nout.write('id,y')", workspace).status == "ok"
    assert sandbox.read(workspace, "submission.csv") == b"id,y"


ALLOWED = '".pkl", ".pickle", ".joblib"'  # among the endings of file names that judge.file_trail() looks for
LOADERS = {"load", "loads", "read_pickle", "Unpickler"}
UNSAFE = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def code_that_unpickles(tree):
    """What in a parsed file could load an object that somebody else wrote."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE]
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            of_library = node.module in ("torch", "numpy") and names & LOADERS
            if node.module.split(".")[0] in UNSAFE or of_library:
                found.append(node.module)
        elif isinstance(node, ast.Attribute) and node.attr in LOADERS:
            owner = ast.unparse(node.value)
            if owner != "json":
                found.append(f"{owner}.{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            found.append(node.arg)
    return found


# the one thing that is loaded by such a name: optimizer shards, which are safetensors
SAFE = {"train": ["policy.optimizer.load"]}


@pytest.mark.parametrize("name", ["agents", "model", "judge", "rollout", "train", "eval"])
def test_the_host_never_unpickles(name):
    """Nothing that an agent wrote is loaded as code by the trainer: no file of ours knows how.

    agents.py speaks of pickles in prompts and in what the sandbox runs; no other file even has the words.
    """
    source = Path(ROOT, f"{name}.py").read_text()
    assert code_that_unpickles(ast.parse(source)) == SAFE.get(name, [])
    if name == "judge":
        assert source.count(ALLOWED) == 1
        source = source.replace(ALLOWED, "")
    if name != "agents":
        words = r"pickle|cloudpickle|dill|joblib|marshal|shelve|(?:torch|np|numpy)\.load\b"
        assert re.findall(words, source) == []


def test_the_check_for_unpickling_sees_every_way():
    lines = [
        "import pickle",
        "import shelve as s",
        "from marshal import loads",
        "from joblib.numpy_pickle import load",
        "from torch import load",
        "torch.load(path)",
        "np.load(path, mmap_mode='r')",
        "open_array(path, allow_pickle=True)",
        "pandas.read_pickle(path)",
    ]
    assert all(code_that_unpickles(ast.parse(line)) for line in lines)
    assert code_that_unpickles(ast.parse("import json\njson.loads(text)\nnp.save(path, x)")) == []


# ---- Task files ------------------------------------------------------------------------------------------------------


def test_absent_data_are_named_and_left_out_only_if_allowed(data, tmp_path, capsys):
    """Silently training on the tasks that happen to be there would change the experiment."""
    lines = (data / "tasks.json").read_text().splitlines()
    lines.append(lines[0].replace("diabetes", "titanic"))
    path = tmp_path / "tasks.json"
    path.write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"the data of 1 tasks are absent: titanic \(no .*train.csv\)"):
        load_problems(path, DataOptions(str(data)))
    problems = load_problems(path, DataOptions(str(data), allow_missing=True))
    assert [p.id for p in problems] == ["tasks/diabetes", "tasks/breast_cancer"]
    assert "titanic" in capsys.readouterr().err
    with pytest.raises(InputError, match="no problems whose data are there"):
        load_problems(path, DataOptions(str(tmp_path), allow_missing=True))


def test_cleaned_texts_are_used_where_they_fit_the_data(data, tmp_path):
    """Some published texts name columns of another competition: the data decide."""
    text = dict(cleaned_prompt="Clean.", task_type="regression", target_column="Transported", id_column="PassengerId")
    (tmp_path / "texts.json").write_text(json.dumps(dict(diabetes=text)))
    problem = load_problems(data / "tasks.json", DataOptions(str(data), str(tmp_path / "texts.json")))[0]
    assert problem.question == "Clean.\n\nsubmission.csv must have exactly these columns: id, target."
    assert problem.kind == "regression"
    answers = data / "diabetes" / "answers" / "test_answer.csv"
    assert asdict(problem.answer_key) == dict(id_column="id", targets=("target",), csv=answers)
    assert answers.exists()


def test_a_regression_of_words_is_a_classification(tmp_path):
    """Some published texts call labels a regression. Any CSV will do for the answers where there is but one."""
    (tmp_path / "w" / "other").mkdir(parents=True)
    (tmp_path / "w" / "train.csv").write_text("id,target\n1,low\n")
    (tmp_path / "w" / "test.csv").write_text("id\n2\n")
    (tmp_path / "w" / "other" / "any.csv").write_text("id,target\n2,high\n")
    (tmp_path / "w.json").write_text(task_line("w", "regression", "?", answer_dir="w/other"))
    [problem] = load_problems(tmp_path / "w.json", DataOptions(str(tmp_path)))
    assert problem.kind == "classification"
    assert problem.answer_key.csv == tmp_path / "w" / "other" / "any.csv"


BROKEN_ANSWERS = [
    ("id,target\n2,0.5\n2,0.6\n", "the id '2' is used twice"),
    ("id,target\n2,0.5\n3,\n", "a true value is missing"),
    ("id,target\n2,0.5\n3,0.5,0.5\n", "line 3 has 3 values, not 2"),
]


def answers_folder(tmp_path, answers):
    """The task file of one regression with these answers."""
    (tmp_path / "w" / "answers").mkdir(parents=True)
    (tmp_path / "w" / "train.csv").write_text("id, target\n1, 0.1\n")
    (tmp_path / "w" / "test.csv").write_text("id\n2\n3\n")
    (tmp_path / "w" / "answers" / "test_answer.csv").write_text(answers)
    (tmp_path / "w.json").write_text(task_line("w", "regression", "?", answer_dir="w/answers"))
    return tmp_path / "w.json"


@pytest.mark.parametrize("answers, why", BROKEN_ANSWERS)
def test_broken_answers_are_refused_when_the_task_is_read(tmp_path, answers, why):
    """Symptom: the run ends in its first grade, after an hour of sampling. Guard: the loader reads the answers."""
    with pytest.raises(InputError, match=why):
        load_problems(answers_folder(tmp_path, answers), DataOptions(str(tmp_path)))


def test_headers_with_spaces_are_read(tmp_path):
    """Symptom: accepted when read, refused when graded. Cause: two readers of one header, and one of them strips it."""
    path = answers_folder(tmp_path, "id, target\n2, 0.5\n3, 0.7\n")
    [problem] = load_problems(path, DataOptions(str(tmp_path)))
    assert problem.kind == "regression"
    assert judge.grade_submission(b"id,target\n2,0.5\n3,0.7\n", problem).quality == 1


@pytest.mark.skipif("MAPPA_DSBENCH" not in os.environ, reason="MAPPA_DSBENCH names no folder with the official files")
@pytest.mark.parametrize("name, count", [("train", 64), ("eval", 8)])
def test_the_official_files_are_read(name, count):
    """All tasks of the folder MAPPA_DSBENCH are read.

    Each of them is named where its data are absent, and none is read with another kind than its data have.
    """
    folder = Path(os.environ["MAPPA_DSBENCH"])
    texts = folder / "dsbench_modeling_cleaned_prompts.json"
    try:
        problems = load_problems(folder / f"dsbench_modeling_{name}.json", DataOptions(str(folder), str(texts)))
    except InputError as error:
        assert f"{count} tasks are absent" in str(error)
        assert str(error).count("(no ") == count
    else:
        assert len(problems) == count
        assert {p.kind for p in problems} == {"regression", "classification"}


# ---- The commands ----------------------------------------------------------------------------------------------------


def small_tasks(root):
    """Two tasks laid out as DSBench's, of a few rows each: enough for a model that writes nonsense."""
    lines = []
    for name, kind, values in (("r", "regression", "123"), ("c", "classification", "010")):
        (root / name / "answers").mkdir(parents=True)
        (root / name / "train.csv").write_text("id,x,y\n1,0,1\n2,1,0\n")
        (root / name / "test.csv").write_text("id,x\n7,0\n8,1\n9,0\n")
        rows = [f"{row_id},{value}\n" for row_id, value in zip((7, 8, 9), values, strict=True)]
        (root / name / "answers" / "test_answer.csv").write_text("id,y\n" + "".join(rows))
        lines.append(task_line(name, kind, "Predict y of " + name))
    (root / "tasks.json").write_text("\n".join(lines))
    return str(root / "tasks.json")


def test_the_commands_run_the_dsbench_preset(long_base, tmp_path, endpoint, monkeypatch, capfd):
    """train.py --preset dsbench and eval.py run to their ends with a model that writes nonsense.

    The task files have the official layout and the coach is behind an API. Every episode ends as an invalid submission
    with its reason, and nothing stalls.
    """
    monkeypatch.setattr(train.signal, "signal", lambda number, handler: None)  # Ctrl-C stays with pytest
    tasks, out = small_tasks(tmp_path), tmp_path / "run"
    options = ["--preset", "dsbench", "--model", str(long_base), "--train", tasks, "--data-root", str(tmp_path)]
    options += ["--max-new-tokens", "12", "--steps", "1", "--problems", "2", "--train-batch", "4", "--eval-every", "1"]
    options += ["--judge-url", f"http://127.0.0.1:{endpoint.server_port}/v1", "--judge-model", "m"]
    options += ["--judge-key-env", "", "--out", str(out)]
    assert train.main(options) == 0, capfd.readouterr().err

    [metrics] = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert metrics["accuracy"] == 0
    assert set(metrics["kinds"]) == {"regression", "classification"}
    assert metrics["kinds"]["regression"]["fair_rmse_range"] == 50.0
    assert metrics["agents"]["Engineer"]["score"] == 7.0
    assert metrics["agents"]["Analyst"]["score"] == 2.0  # the ceiling
    records = [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    assert [(r["reason"], r["quality"], len(r["actions"])) for r in records] == [
        ("there is no submission.csv", 0, 12)
    ] * 4
    question = endpoint.seen[1].body["messages"][1]["content"]  # behind the probe's
    assert "train.csv: 19 bytes, 2 x 3" in question
    capfd.readouterr()

    eval.main(["--run", str(out), "--data", tasks, "--data-root", str(tmp_path), "--samples", "1", "--json"])
    printed = capfd.readouterr().out
    figures = json.loads(printed.splitlines()[-1])
    assert "success 0.0%" in printed
    assert figures["trained"]["kinds"]["classification"]["fair_accuracy"] == 0.5
    assert figures["trained"]["majority"] is None
    analyst = dict(agent="Analyst", kind="regression", actions=8, if_correct=None, if_wrong=2.0, correlation=None)
    assert analyst in figures["coach"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--train", "maths.json"], "1 problems, such as maths/1, are not of the dsbench pipeline's kind"),
        (["--sandbox-disk", "1", "--train", "big.json"], "big/r takes 2 MiB: --sandbox-disk must be twice that"),
        (["--train", "tasks.json", "--data-root", "nowhere"], "the data of 2 tasks are absent: r (no nowhere"),
        (["--train", "tasks.json", "--judge", "rules"], "the rules coach knows a miniature's own problems only"),
        (["--train", "tasks.json", "--task-texts", "none.json"], "it has no none.json"),
        (["--train", "tasks.json", "--task-texts", "list.json"], "list.json must hold one object a task"),
        (["--train", "paths.json"], "paths.json, entry 1: its metadata lack paths"),
    ],
)
def test_bad_data_tasks_are_one_sentence(base, tmp_path, monkeypatch, capfd, options, message):
    monkeypatch.chdir(tmp_path)
    small_tasks(tmp_path)
    Path("maths.json").write_text('[{"prompt": "1 + 1", "answer": 2}]')
    Path("big.json").write_text(Path("tasks.json").read_text())
    Path("list.json").write_text("[]")
    Path("paths.json").write_text('[{"prompt": "?", "metadata": {"train_file": "r/train.csv"}}]')
    if "big.json" in options:
        os.truncate("r/test.csv", 2 << 20)
    given = ["--preset", "dsbench", "--model", str(base), "--problems", "1", "--out", "run"]
    given += ["--judge-url", "http://localhost:1/v1", "--judge-model", "m"]
    assert train.main([*given, *options]) == 2
    errors = capfd.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1, errors
    assert not Path("run").exists()


# ---- The coach -------------------------------------------------------------------------------------------------------


def analyst_case(grade):
    """An Analyst's action that ended with this grade."""
    problem = Problem("p", "?", kind="regression")
    handed = dict(problem="?", files="", Modeler="", Modeler_output="")
    return Case(DSBENCH, problem, DSBENCH.agents[2], handed, "", "", "ok", grade)


def measured(rmse_range):
    """The Grade of a submission whose RMSE is so many percent of the target's range."""
    metrics = dict(rmse=1.0, mae=1.0, rmse_range=rmse_range)
    quality = judge.quality_of(metrics)
    return Grade(True, quality, metrics=metrics, ceiling=judge.ceiling_of(quality))


def test_the_coach_cannot_praise_a_poor_submission():
    """Scores of poor outcomes have ceilings: stated to the coach, and kept."""

    def praise(conversations):
        return ["Fine.\nSCORE: 9"] * len(conversations)

    poor, good = analyst_case(measured(35.0)), analyst_case(measured(5.0))
    invalid = analyst_case(judge.invalid_submission("there is no submission.csv"))
    assert judge_by(praise, [poor, good, invalid]) == [Verdict(3, "Fine."), Verdict(9, "Fine."), Verdict(2, "Fine.")]
    assert not any(case.shows_answer for case in (poor, good, invalid))
    system, user = coach_messages(poor)
    assert "blame follows them" in system["content"]
    assert "rmse_range 35" in user["content"]
    assert "may be 3 at most" in user["content"]
    assert "may be 10 at most" in coach_messages(good)[1]["content"]
    assert "invalid: <<<\nthere is no submission.csv" in coach_messages(invalid)[1]["content"]
