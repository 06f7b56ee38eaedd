"""Data analysis with real pandas and scikit-learn programs: files pass from agent to agent, blame follows them, and
whatever a program does, the episode's truth stays hidden and the run goes on."""
import json
import os
import string
import time
from pathlib import Path

import pytest

import agents
import eval
import judge
import model
import rollout
import train
from agents import DSBENCH, InputError, Problem, Table, load_problems
from rollout import Sampling, make_jobs, run_episodes

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


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """scikit-learn's diabetes and breast cancer, laid out as DSBench lays out its tasks."""
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    pytest.importorskip("pandas", reason="pandas is not installed")
    root, lines = tmp_path_factory.mktemp("dsbench"), []
    for name, kind in (("diabetes", "regression"), ("breast_cancer", "classification")):
        frame = getattr(datasets, "load_" + name)(as_frame=True).frame.sample(frac=1, random_state=0)
        frame.insert(0, "id", range(1000, 1000 + len(frame)))
        cut, target = len(frame) * 3 // 4, ["target"]
        (root / name / "answers").mkdir(parents=True)
        frame[:cut].to_csv(root / name / "train.csv", index=False)
        frame[cut:].drop(columns=target).to_csv(root / name / "test.csv", index=False)
        frame[cut:][["id", *target]].to_csv(root / name / "answers" / "test_answer.csv", index=False)
        meta = dict(task_id=name, data_type=kind, train_file=f"{name}/train.csv", test_file=f"./{name}/test.csv",
                    answer_dir=f"{name}/answers")  # fmt: skip
        lines.append(json.dumps(dict(prompt=f"Predict target in {name}.", answer=None, metadata=meta)))
    (root / "tasks.json").write_text("\n".join(lines))
    return root


@pytest.fixture(scope="module")
def sandbox():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COACH_KEY", "sk-a-secret-key")
        with agents.Sandbox(preload=DSBENCH.preload, timeout=8.0, disk=32 << 20) as sandbox:
            yield sandbox


def play(monkeypatch, sandbox, problems, script):
    """Run the pipeline with scripted replies, in order; returns (episodes, what the coach was sent)."""
    tokenizer, script, sent = model.tiny_tokenizer(list(string.printable)), iter(script), []

    def scripted(network, contexts, draws, limit, temperature):
        replies = [tokenizer(next(script))["input_ids"] + [tokenizer.eos_token_id] for _ in contexts]
        return [model.Completion(ids, [-0.5] * len(ids), False) for ids in replies]

    def coach(cases):
        sent.extend((case.agent.name, judge.coach_messages(case)[1]["content"]) for case in cases)
        return [judge.Verdict(5, "")] * len(cases)

    monkeypatch.setattr(rollout, "sample", scripted)
    networks, how = dict.fromkeys([agent.name for agent in DSBENCH.agents]), Sampling(("t",), 1.0, 99, 60_000)
    episodes = run_episodes(DSBENCH, networks, tokenizer, make_jobs(problems, 1), coach, sandbox, how)
    assert not any(os.path.exists(episode.workspace) for episode in episodes)
    return episodes, sent


def test_a_whole_episode_on_two_real_data_sets(monkeypatch, sandbox, data):
    """The Engineer of the first task forgets X_test.pkl and says that it saved it: the coach is shown that the file is
    not there, and the Engineer acts again. Both Analysts write their rows in random order: graded by id, both are good.
    Thinking is neither run nor passed on, and nothing of the answers is in a prompt or in a workspace."""
    problems = load_problems(data / "tasks.json", root=data)
    assert [(p.id, p.table.kind, p.table.targets) for p in problems] == [
        ("tasks/diabetes", "regression", ("target",)), ("tasks/breast_cancer", "classification", ("target",))]
    script = [FORGETFUL, ENGINEER, ENGINEER, MODELER.format("Ridge"), MODELER.format("LogisticRegression"), *[ANALYST] * 2]
    (first, second), sent = play(monkeypatch, sandbox, problems, script)
    assert [(a.agent, a.turn, a.status) for a in first.actions] == [
        ("Engineer", 0, "ok"), ("Engineer", 1, "ok"), ("Modeler", 0, "ok"), ("Analyst", 0, "ok")]
    assert [a.agent for a in second.actions] == ["Engineer", "Modeler", "Analyst"]
    assert first.correct and first.grade.metrics["rmse_range"] < 20
    assert second.correct and second.grade.metrics["accuracy"] > 0.9
    about_forgetting, about_modeler = sent[0][1], next(text for name, text in sent if name == "Modeler")
    assert "X_test.pkl (missing)" in about_forgetting and "model.pkl" not in about_forgetting
    assert "are not there: <<<\nX_test.pkl\n>>>" in about_forgetting
    assert "train.csv: " in about_forgetting and "331 x 12" in about_forgetting and "test.csv" in about_forgetting
    assert "X_test.pkl (there)" in sent[2][1] and "Its last action" in sent[2][1]
    assert "Which one?" not in about_modeler and "A linear model." in about_modeler
    for name, text in sent:
        assert ("hidden answers" in text) == (name == "Analyst")
    record = rollout.record(first)
    assert record["kind"] == "regression" and record["invalid"] == "" and record["metrics"] == first.grade.metrics
    assert record["actions"][0]["files"] == ["X_train.pkl", "test.csv", "train.csv", "y_train.pkl"]


ATTACKS = {
    "loops for ever": ("while True: pass", "timeout", ""),
    "prints for ever": ("while True: print('x' * 1000)", "flood", "characters cut"),
    "forks": ("import os\nwhile True: os.fork()", "memory", ""),  # pages that forks share count for each
    "reads the answers": ("print(open({answers!r}).read())", "error", "PermissionError"),
    "lists the answers": ("import os\nprint(os.listdir(os.path.dirname({answers!r})))", "error", "PermissionError"),
    "links the answers": ("import os\nos.symlink({answers!r}, 'submission.csv')", "ok", ""),
    "reads the key": ("import os\nprint(dict(os.environ))\nprint(open(f'/proc/{{os.getppid()}}/environ').read())",
                      "error", "PermissionError"),
    "connects": ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "error", "PermissionError"),
    "kills its parent": ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", "error", "PermissionError"),
    "leaves a process": ("import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', \"import time\\ntime.sleep(2)"
                         "\\nopen('late.txt', 'w')\"], start_new_session=True)", "ok", ""),
    "unpickles trouble": ("import os, pickle\nclass Bad:\n def __reduce__(self): return os.system, ('touch /tmp/owned',)\n"
                          "pickle.dump(Bad(), open('X_train.pkl', 'wb'))", "ok", ""),
    "fills the disk": ("with open('big', 'wb') as f:\n while True: f.write(bytes(1 << 20))", "disk", ""),
}  # fmt: skip


def test_attacks_are_contained_reported_and_the_run_goes_on(monkeypatch, sandbox, data):
    """FAULTS 36. Each episode's Engineer begins with an attack, sees what came of it, and then does its work: all
    episodes but the one with a full disk end with a good submission."""
    problem = load_problems(data / "tasks.json", root=data)[1]
    problems = [Problem(name, problem.question, table=problem.table) for name in ATTACKS]
    attacks = [code.format(answers=str(problem.table.answers)) for code, _, _ in ATTACKS.values()]
    honest = len(ATTACKS) - 1
    script = [f"```python\n{code}\n```" for code in attacks]
    script += [ENGINEER] * honest + [MODELER.format("LogisticRegression")] * honest + [ANALYST] * (honest + 3)
    before = set(agents.descendants(os.getpid()))  # the zygote
    episodes, sent = play(monkeypatch, sandbox, problems, script)
    for episode, (name, text), (what, (_, status, shown)) in zip(episodes, sent, ATTACKS.items()):
        first = episode.actions[0]
        assert (what, first.status) == (what, status) and shown in first.observation, first.observation
        assert status in first.observation and "sk-a-secret-key" not in first.observation
        assert name == "Engineer" and status in text and "sk-a-secret-key" not in text
        if what == "fills the disk":
            assert episode.error and not episode.correct and len(episode.actions) == 1
        elif what == "links the answers":
            # the honest Analyst's to_csv follows the link and may not write there: four tries, and no marks
            assert not episode.correct and "not a plain file" in episode.grade.reason and len(episode.actions) == 7
        else:
            assert episode.correct, (what, episode.grade, [a.observation for a in episode.actions])
    assert not os.path.exists("/tmp/owned")
    assert set(agents.descendants(os.getpid())) == before and not any(map(is_zombie, before))


def is_zombie(pid):
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_programs_overlap_with_generation(monkeypatch):
    """A stall that grows with every program: sampling must go on while the programs of the batch before run."""
    events, tokenizer = [], model.tiny_tokenizer(agents.PIECES)

    def scripted(network, contexts, draws, limit, temperature):
        time.sleep(0.2)
        events.append("sampled")
        ids = tokenizer("```python\nprint(1)\n```")["input_ids"]
        return [model.Completion(ids, [-1.0] * len(ids), False) for _ in contexts]

    class Sandbox:
        make_workspace, remove_workspace = lambda self, files: "nowhere", lambda self, workspace: None

        def run(self, code, workspace):
            events.append("ran")
            return agents.Result("ok", "1", 0, 0.0)

    monkeypatch.setattr(rollout, "sample", scripted)
    coder = agents.Pipeline("p", (agents.Agent("Coder", "{problem}", uses_tools=True),), show=lambda r: r.output)
    jobs, how = make_jobs([Problem(str(i), "1") for i in range(8)], 1), Sampling(("t",), rows=2)
    coach = lambda cases: [judge.Verdict(1, "")] * len(cases)
    run_episodes(coder, {"Coder": None}, tokenizer, jobs, coach, Sandbox(), how)
    assert events == ["sampled", "ran", "ran"] * 4 and all(e.actions[0].observation == "1" for e in jobs)


def test_64_programs_finish_without_a_stall(monkeypatch, capsys):
    """64 programs that keep their core busy, while the batches behind them are sampled: they take as long as the cores
    need, and no zombie, program or workspace is left. The full measure:
    MAPPA_PROGRAM_SECONDS=1 pytest tests/test_dsbench.py -k 64 -s"""
    seconds, sampling, cores = float(os.environ.get("MAPPA_PROGRAM_SECONDS", 0.1)), 0.0, len(os.sched_getaffinity(0))
    tokenizer = model.tiny_tokenizer(list(string.printable))
    busy = f"```python\nimport time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass\n```"
    ids = tokenizer(busy)["input_ids"] + [tokenizer.eos_token_id]

    def scripted(network, contexts, draws, limit, temperature):
        nonlocal sampling
        time.sleep(4 * seconds)
        sampling += 4 * seconds
        return [model.Completion(ids, [-1.0] * len(ids), False) for _ in contexts]

    monkeypatch.setattr(rollout, "sample", scripted)
    coder = agents.Pipeline("p", (agents.Agent("Coder", "{problem}", uses_tools=True),), show=lambda r: r.status)
    jobs, how = make_jobs([Problem(str(i), "1") for i in range(64)], 1), Sampling(("t",), rows=8)
    others = set(agents.descendants(os.getpid()))
    with agents.Sandbox(preload=DSBENCH.preload) as sandbox:
        started = time.monotonic()
        run_episodes(coder, {"Coder": None}, tokenizer, jobs, lambda cases: [judge.Verdict(1, "")] * 64, sandbox, how)
        took = time.monotonic() - started
        below = set(agents.descendants(os.getpid())) - others
    with capsys.disabled():
        print(f"\n64 programs of {seconds} s on {cores} cores beside {sampling:.1f} s of sampling: {took:.1f} s")
    assert all(e.actions[0].observation == "ok" and not os.path.exists(e.workspace) for e in jobs)
    assert took < 64 * (seconds + 0.4) / cores + sampling  # 0.4 s: other work on the machine; a stall takes minutes
    assert not any(is_zombie(pid) for pid in below) and len(below) <= 1  # the zygote


def listing(sandbox, code):
    workspace = sandbox.make_workspace({"train.csv": b'id,"a, b"\n1,2\n3,4\n'})
    assert sandbox.run(code, workspace).status == "ok"
    return sandbox.list_files(workspace)


def test_listings_hold_plain_files_with_printable_names(sandbox):
    """SANDBOX trap 11: the list goes into prompts. Links, pipes and folders are not files, names are cut, and neither a
    million names nor a sparse file of many bytes slow the host down."""
    code = (
        "import os\nos.symlink('/etc/passwd', 'link.csv')\nos.mkfifo('pipe.csv')\nos.mkdir('folder')\n"
        "open('a\\nb', 'w')\nopen('x' * 200 + '.csv', 'w')\nopen('empty.csv', 'w')\n"
        "with open('sparse.csv', 'wb') as f: f.truncate(30 << 20)"
    )
    found = listing(sandbox, code)
    assert found == (("empty.csv", 0, ""), ("sparse.csv", 30 << 20, "0 x 1"), ("train.csv", 18, "2 x 2"),
                     ("x" * 100, 0, ""))  # fmt: skip
    many = listing(sandbox, "for i in range(1000): open(f'{i:04}', 'w')")
    assert len(many) == 1001 and many[0] == ("0000", 0, "") and many[-1] == ("train.csv", 18, "")  # none is hidden
    shown = agents.show_files(many).splitlines()
    assert shown[49] == "0049: 0 bytes" and shown[50:] == ["and 951 more"]


def test_files_that_were_not_closed_are_written(sandbox):
    """A program's last line is out.write(...): Python writes it when it ends, and so must the sandbox."""
    workspace = sandbox.make_workspace()
    assert sandbox.run("out = open('submission.csv', 'w')\nout.write('id,y')", workspace).status == "ok"
    assert sandbox.read(workspace, "submission.csv") == b"id,y"


def test_absent_data_are_named_and_left_out_only_if_allowed(data, tmp_path, capsys):
    """Silently training on the tasks that happen to be there would change the experiment."""
    lines = (data / "tasks.json").read_text().splitlines()
    lines.append(lines[0].replace("diabetes", "titanic"))
    (tmp_path / "tasks.json").write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"the data of 1 tasks are absent: titanic \(no .*train.csv\)"):
        load_problems(tmp_path / "tasks.json", root=data)
    assert len(load_problems(tmp_path / "tasks.json", root=data, allow_missing=True)) == 2
    assert "titanic" in capsys.readouterr().err
    with pytest.raises(InputError, match="no problems whose data are there"):
        load_problems(tmp_path / "tasks.json", root=tmp_path, allow_missing=True)


def test_cleaned_texts_are_used_where_they_fit_the_data(data, tmp_path):
    """Some published texts call labels a regression, or name columns of another competition: the data decide."""
    text = dict(cleaned_prompt="Clean.", task_type="regression", target_column="Transported", id_column="PassengerId")
    (tmp_path / "texts.json").write_text(json.dumps(dict(diabetes=text)))
    problem = load_problems(data / "tasks.json", root=data, texts=tmp_path / "texts.json")[0]
    assert problem.question == "Clean.\n\nsubmission.csv must have exactly these columns: id, target."
    assert (problem.table.id_column, problem.table.targets, problem.table.kind) == ("id", ("target",), "regression")
    answers = data / "diabetes" / "answers" / "test_answer.csv"
    words = tmp_path / "words"
    for name in ("train", "test"):
        (words / name).mkdir(parents=True)
    (words / "train" / "train.csv").write_text("id,target\n1,low\n")
    (words / "train" / "test.csv").write_text("id\n2\n")
    (words / "test" / "any.csv").write_text("id,target\n2,high\n")
    meta = dict(task_id="w", data_type="regression", train_file="train/train.csv", test_file="train/test.csv",
                answer_dir="test")  # fmt: skip
    (tmp_path / "w.json").write_text(json.dumps(dict(prompt="?", metadata=meta)))
    assert load_problems(tmp_path / "w.json", root=words)[0].table.kind == "classification"
    assert answers.exists()


@pytest.mark.skipif("MAPPA_DSBENCH" not in os.environ, reason="MAPPA_DSBENCH names no folder with the official files")
def test_the_official_files_are_read():
    """MAPPA_DSBENCH: a folder with the official task files. 64 tasks to train on and 8 to evaluate on; each of them is
    named where its data are absent, and none is read with another kind than its data have."""
    folder = Path(os.environ["MAPPA_DSBENCH"])
    for name, count in (("train", 64), ("eval", 8)):
        path, texts = folder / f"dsbench_modeling_{name}.json", folder / "dsbench_modeling_cleaned_prompts.json"
        try:
            problems = load_problems(path, root=folder, texts=texts)
        except InputError as error:
            assert f"{count} tasks are absent" in str(error) and str(error).count("(no ") == count
        else:
            assert len(problems) == count and {p.table.kind for p in problems} == {"regression", "classification"}


def small_tasks(root):
    """Two tasks laid out as DSBench's, of four rows each: enough for a model that writes nonsense."""
    lines = []
    for name, kind, values in (("r", "regression", "123"), ("c", "classification", "010")):
        (root / name).mkdir()
        (root / name / "train.csv").write_text("id,x,y\n1,0,1\n2,1,0\n")
        (root / name / "test.csv").write_text("id,x\n7,0\n8,1\n9,0\n")
        (root / name / "answers").mkdir()
        rows = "".join(f"{i},{v}\n" for i, v in zip((7, 8, 9), values))
        (root / name / "answers" / "test_answer.csv").write_text("id,y\n" + rows)
        meta = dict(task_id=name, data_type=kind, train_file=f"{name}/train.csv", test_file=f"{name}/test.csv",
                    answer_dir=f"{name}/answers")  # fmt: skip
        lines.append(json.dumps(dict(prompt="Predict y of " + name, answer=None, metadata=meta)))
    (root / "tasks.json").write_text("\n".join(lines))
    return str(root / "tasks.json")


def test_the_commands_run_the_dsbench_preset(base, tmp_path, endpoint, monkeypatch, capfd):
    """train.py --preset dsbench and eval.py, whole, on task files in the official layout, with a coach behind an API and
    a model that writes nonsense: every episode ends as an invalid submission with its reason, and nothing stalls."""
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    tasks, out = small_tasks(tmp_path), tmp_path / "run"
    small = ["--max-new-tokens", "12", "--steps", "1", "--problems", "2", "--train-batch", "4", "--eval-every", "1"]
    given = ["--preset", "dsbench", "--model", str(base), "--train", tasks, "--data-root", str(tmp_path), *small]
    coach = ["--judge-url", f"http://127.0.0.1:{endpoint.server_port}/v1", "--judge-model", "m", "--out", str(out)]
    assert train.main([*given, *coach, "--judge-key-env", ""]) == 0, capfd.readouterr().err
    [metrics] = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert metrics["accuracy"] == 0 and metrics["data"]["regression"]["fair_rmse_range"] == 50.0
    assert metrics["agents"]["Engineer"]["score"] == 7.0 and metrics["agents"]["Analyst"]["score"] == 2.0  # the ceiling
    first = json.loads((out / "episodes.jsonl").read_text().splitlines()[0])
    assert first["invalid"] == "there is no submission.csv" and len(first["actions"]) == 12
    assert "train.csv: 19 bytes, 2 x 3" in endpoint.seen[1][2]["messages"][1]["content"]
    capfd.readouterr()
    options = ["--run", str(out), "--data", tasks, "--data-root", str(tmp_path), "--samples", "1", "--json"]
    eval.main(options)
    printed = capfd.readouterr().out
    figures = json.loads(printed.splitlines()[-1])
    assert figures["trained"]["data"]["classification"]["fair_accuracy"] == 0.5 and "success 0.0%" in printed
    assert ["Analyst", "regression", 8, None, 2.0, None] in figures["coach"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--train", "maths.json"], "are not of the dsbench pipeline's kind"),
        (["--sandbox-disk", "1", "--train", "big.json"], "--sandbox-disk must be twice that"),
        (["--train", "tasks.json", "--data-root", "nowhere"], "the data of 2 tasks are absent: r (no nowhere"),
        (["--train", "tasks.json", "--judge", "rules"], "the rules coach knows the miniature only"),
        (["--train", "tasks.json", "--task-texts", "none.json"], "it has no none.json"),
    ],
)
def test_bad_data_tasks_are_one_sentence(base, tmp_path, monkeypatch, capfd, options, message):
    monkeypatch.chdir(tmp_path)
    small_tasks(tmp_path)
    (tmp_path / "maths.json").write_text('[{"prompt": "1 + 1", "answer": 2}]')
    (tmp_path / "big.json").write_text((tmp_path / "tasks.json").read_text())
    with open(tmp_path / "r" / "test.csv", "a") as f:
        f.truncate(2 << 20 if "big.json" in options else 99)
    given = ["--preset", "dsbench", "--model", str(base), "--judge-url", "http://localhost:1/v1", "--judge-model", "m",
             "--problems", "1", "--out", "run"]  # fmt: skip
    assert train.main([*given, *options]) == 2
    errors = capfd.readouterr().err
    assert message in errors and errors.count("\n") == 1, errors


def test_the_host_never_unpickles():
    """Nothing that an agent wrote is loaded as code by the trainer: no file of ours knows how."""
    root = Path(__file__).parents[1]
    for name in ("model", "judge", "rollout", "train", "eval"):
        source = (root / f"{name}.py").read_text()
        assert "pickle" not in source.replace(".pkl|pickle|joblib", "").replace("csv|pkl|pickle", ""), name


def analyst_case(metrics, reason=""):
    table = Table("regression", "id", ("y",), b"", b"", b"")
    handed = dict(problem="?", files="", Modeler="", Modeler_output="")
    return judge.Case(Problem("p", "?", table=table), DSBENCH.agents[2], handed, "", "", "ok", None,
                      grade=judge.Grade(reason, metrics))  # fmt: skip


def test_the_coach_cannot_praise_a_poor_submission():
    """Score ceilings for poor outcomes: stated to the coach, and kept."""
    case = analyst_case(dict(rmse=1.0, mae=1.0, rmse_range=35.0))
    assert "rmse_range 35" in judge.coach_messages(case)[1]["content"]
    assert "may be 3 at most" in judge.coach_messages(case)[1]["content"]
    assert [v.score for v in judge.judge_by(lambda asked: ["Fine.\nSCORE: 9"] * len(asked), [case])] == [3]
    good, invalid = analyst_case(dict(rmse=1.0, mae=1.0, rmse_range=5.0)), analyst_case({}, "there is no submission.csv")
    assert judge.judge_by(lambda asked: ["SCORE: 9"] * len(asked), [good])[0].score == 9
    assert judge.judge_by(lambda asked: ["SCORE: 9"] * len(asked), [invalid])[0].score == 2
    assert "invalid: <<<\nthere is no submission.csv" in judge.coach_messages(invalid)[1]["content"]
