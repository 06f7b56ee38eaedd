"""The real commands, as a user types them: they learn, resume exactly, refuse bad input, and stop when asked."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT
from safetensors.torch import load_file

import eval
import train
from judge import Failure, rules

AGENTS = ("Solver", "Coder", "Verifier")
SMALL = ["--steps", "4", "--problems", "6", "--train-batch", "6", "--eval-problems", "0", "--save-every", "2"]


def execute(arguments, folder, code=ROOT):
    """Run Python in the folder `code`; returns the process, which has ended.

    folder: the test's own; temporary files lie in it, for a run that is killed leaves its workspaces behind.
    """
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    changes = {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=code,
        env=os.environ | changes,
        capture_output=True,
        text=True,
        timeout=1800,  # ends a run that hangs
    )


def run(out, options, launcher=()):
    """A training run that must succeed."""
    done = execute([*launcher, "train.py", "--out", str(out), *options], out.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(out):
    """The lines of metrics.jsonl, but for the time that they took."""
    without_time = lines(out / "metrics.jsonl")
    for line in without_time:
        del line["seconds"], line["parts"]
    return without_time


def saved_step(out):
    return int((out / "latest").read_text().removeprefix("step_"))


def weights(folder):
    return load_file(folder / "model.safetensors")


def last_weights(out, agent):
    return weights(out / f"step_{saved_step(out):06d}" / agent)


def assert_same(a, b, tolerance):
    """The same tokens, rewards and metrics, and the same weights up to a tolerance (0: bit for bit)."""
    assert lines(a / "episodes.jsonl") == lines(b / "episodes.jsonl")
    for one, other in zip(metrics(a), metrics(b), strict=True):
        for agent in AGENTS:
            expected = pytest.approx(other["agents"][agent], abs=tolerance, rel=tolerance)
            assert one["agents"][agent] == expected
        assert one | {"agents": {}} == other | {"agents": {}}
    assert saved_step(a) == saved_step(b)
    for agent in AGENTS:
        mine, theirs = last_weights(a, agent), last_weights(b, agent)
        assert max((mine[name] - theirs[name]).abs().max().item() for name in mine) <= tolerance


@pytest.fixture
def out(base, tmp_path):
    """A new run folder, in which the warm start has been done."""
    shutil.copytree(base, tmp_path / "run" / "base")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def straight(base, tmp_path_factory):
    """The run folder of four steps in one go."""
    out = tmp_path_factory.mktemp("straight") / "run"
    shutil.copytree(base, out / "base")
    run(out, SMALL)
    return out


# ---- The miniature -------------------------------------------------------------------------------


def test_the_default_command_and_its_evaluation(tmp_path):
    """A newcomer's first two commands, small: warm start, evaluation before and after, files, and eval.py --json."""
    out = tmp_path / "run"
    done = run(out, ["--steps", "2", "--problems", "4", "--warm-steps", "20", "--eval-problems", "4"])
    assert "held-out accuracy before training" in done.stdout
    assert "held-out accuracy after training" in done.stdout
    assert "eval.py --run" in done.stdout

    # its files
    written = lines(out / "metrics.jsonl")
    assert [line["step"] for line in written] == [1, 2]
    for line in written:
        assert set(line) == {"step", "accuracy", "seconds", "parts", "agents", "kinds"}
        parts = line["parts"]
        timed = {"sampling", "programs", "coach", "scoring", "update"}
        assert set(parts) == timed | {"sampling_per_second", "update_per_second"}
        assert sum(parts[name] for name in timed) <= line["seconds"] and all(seconds >= 0 for seconds in parts.values())
        assert 0 <= line["accuracy"] <= 1 and line["seconds"] > 0 and line["kinds"] == {}
        for agent in AGENTS:
            figures = line["agents"][agent]
            from_records = {"score", "tokens", "truncated", "failures", "tool_calls"}
            from_update = {"kl", "entropy", "ratio_max", "clip_fraction", "grad_norm", "lr"}
            from_update |= {"mismatch", "mismatch_mean", "mismatch_clipped"}
            assert set(figures) == from_records | from_update
            assert figures["mismatch"] < 1e-4
    episodes = lines(out / "episodes.jsonl")
    assert [episode["step"] for episode in episodes] == [1] * 8 + [2] * 8
    assert episodes[0]["question"]
    assert {"text", "observation", "score", "reason"} <= set(episodes[0]["actions"][0])
    assert json.loads((out / "config.json").read_text())["problems"] == 4

    # transformers reads its checkpoints
    for agent in AGENTS:
        folder = out / "step_000002" / agent
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ids = tokenizer("Solver: Tom has 1")["input_ids"]
        assert theirs(torch.tensor([ids])).logits.isfinite().all()

    # its evaluation
    done = execute(["eval.py", "--run", str(out), "--problems", "5", "--samples", "2", "--json"], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["problems"], figures["samples"]) == (5, 2)
    assert set(figures["difference"]) == {"accuracy", "interval"}
    for system in ("base", "trained"):
        assert set(figures[system]["agents"]) == set(AGENTS)
        assert len(figures[system]["interval"]) == 2
    assert [row["agent"] for row in figures["coach"]] == list(AGENTS)
    acted = [action["agent"] for episode in episodes for action in episode["actions"]]
    for row in figures["coach"]:
        assert set(row) == {"agent", "kind", "actions", "if_correct", "if_wrong", "correlation"}
        assert (row["kind"], row["actions"]) == ("", acted.count(row["agent"]))


@pytest.mark.parametrize(
    "options, launcher",
    [
        ([], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]),
        (["--micro-batch-tokens", "150", "--sample-rows", "5", "--gradient-checkpointing"], []),
    ],
    ids=["two processes", "small batches"],
)
def test_any_split_of_the_work_gives_the_same_run(straight, out, options, launcher):
    """Symptom: results depend on the number of processes, or on what fits into memory.

    Guard: two processes, or other batches, sample the same tokens, see the same metrics, and end with the same weights
    (to 1e-5: sums are taken in another order).
    """
    run(out, SMALL + options, launcher)
    assert_same(out, straight, 1e-5)


# train.py, but for a signal that the process gets in the middle of a rollout: arguments are the signal, and at which
# call of the coach it comes. There are four calls a step: of the Solver, twice the Coder, and the Verifier.
SIGNALLED = """
import os
import sys

import train

number, at_call = int(sys.argv[1]), int(sys.argv[2])
rules = train.rules
calls = []

def coach(cases):
    calls.append(cases)
    if len(calls) == at_call:
        os.kill(os.getpid(), number)
    return rules(cases)

train.rules = coach
sys.exit(train.main(sys.argv[3:]))
"""


def test_interrupted_and_killed_runs_go_on_bit_for_bit(straight, out):
    """Symptom: a resumed run repeats data, draws other samples, or cannot be resumed at all.

    Guard: everything is a function of (seed, step). Ctrl-C in the second step abandons it, saves the first, and exits
    with 130; kill -9 in the last step loses what came after the last checkpoint. What comes out in the end is, bit for
    bit, the run of four steps in one go.
    """

    def signalled(number, at_call, options):
        arguments = ["-c", SIGNALLED, str(int(number)), str(at_call), "--out", str(out), *options]
        return execute(arguments, out.parent)

    interrupted = signalled(signal.SIGINT, 4 + 2, SMALL)
    assert interrupted.returncode == 130, interrupted.stderr[-2000:]
    assert "--resume" in interrupted.stderr
    assert saved_step(out) == 1
    assert [line["step"] for line in lines(out / "metrics.jsonl")] == [1]

    # behind the four calls of step 2 and of step 3, in the middle of step 4
    killed = signalled(signal.SIGKILL, 2 * 4 + 3, ["--resume"])
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert saved_step(out) == 2
    assert [line["step"] for line in lines(out / "metrics.jsonl")] == [1, 2, 3]

    run(out, ["--resume"])
    assert_same(out, straight, 0)


def test_controls_run_the_same_way(out):
    """--reward outcome and --share-weights: coach scores are still recorded; shared agents have the same weights."""
    run(out, [*SMALL, "--steps", "1", "--reward", "outcome", "--share-weights", "--advantage", "rloo"])
    figures = metrics(out)[0]["agents"]
    assert all(agent["score"] is not None for agent in figures.values())
    assert all(agent["entropy"] > 0 for agent in figures.values()), "an agent's actions were not trained on"
    first = last_weights(out, "Solver")
    for other in (last_weights(out, "Coder"), last_weights(out, "Verifier")):
        assert all(torch.equal(first[name], other[name]) for name in first)


def exit_code(main, options):
    """The exit code of a command that is called in this process."""
    try:
        return main(options)
    except SystemExit as ended:
        return ended.code


def test_bad_input_ends_in_one_line_and_code_2(straight, tmp_path, capfd, monkeypatch):
    """Symptom: a stack trace after minutes of loading. Guard: one sentence and exit code 2, before anything slow."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (tmp_path / "file").write_text("")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    problems = tmp_path / "problems.json"
    problems.write_text(json.dumps([{"prompt": "What is 1 + 1?", "answer": 2}]))
    cases = [
        (train.main, ["--reward", "money"], "invalid choice: 'money'"),
        (train.main, ["--steps", "many"], "invalid int value"),
        (train.main, ["--train", str(problems), "--out", str(tmp_path / "d")], "a miniature's own problems only"),
        (train.main, ["--model", str(tmp_path / "none"), "--out", str(tmp_path / "a")], "neither a model folder"),
        (train.main, ["--model", str(tmp_path), "--out", str(tmp_path / "b")], "has no config.json"),
        (train.main, ["--out", str(straight)], "holds another run"),
        (train.main, ["--out", str(straight), "--resume", "--lr", "1"], "was started with --lr 0.0004"),
        (train.main, ["--out", str(broken), "--resume"], "config.json cannot be read"),
        (train.main, ["--out", str(tmp_path / "file" / "x")], "cannot be written"),
        (train.main, ["--device", "cuda", "--out", str(tmp_path / "c")], "no usable GPU"),
        (eval.main, ["--run", str(tmp_path / "none")], "is not a run folder"),
        (eval.main, ["--run", str(broken)], "config.json cannot be read"),
        (eval.main, ["--run", str(straight), "--samples", "0"], "start at 1"),
        (eval.main, ["--samples", "many"], "invalid int value"),
        (eval.main, [], "give either --run or --model"),
    ]
    for main, options, message in cases:
        code = exit_code(main, options)
        errors = capfd.readouterr().err
        assert code == 2 and message in errors and errors.count("\n") == 1, (options, code, errors)
    done = execute(["train.py", "--out", str(straight)], tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stdout == ""


def test_a_failing_coach_stops_the_run_with_everything_saved(out, monkeypatch, capfd):
    """The run ends with code 1 and one sentence; the state before the bad rollout is saved, and goes on."""
    calls = []

    def flaky(cases):  # four calls a step: of the Solver, twice the Coder, and the Verifier
        calls.append(cases)
        if len(calls) > 4:
            return [Failure("timeout", "no answer")] * len(cases)
        return rules(cases)

    monkeypatch.setattr(train, "rules", flaky)
    assert train.main(["--out", str(out), *SMALL, "--problems", "2", "--train-batch", "4"]) == 1
    assert "step 2: the coach failed on" in capfd.readouterr().err
    assert (out / "latest").read_text() == "step_000001\n"
    assert [line["step"] for line in lines(out / "metrics.jsonl")] == [1]

    monkeypatch.undo()
    assert train.main(["--out", str(out), "--resume"]) == 0
    assert [line["step"] for line in lines(out / "metrics.jsonl")] == [1, 2, 3, 4]


# ---- The full-size pipeline, with a small model --------------------------------------------------

# no small model can write such an answer: its vocabulary has no such letters
PROBLEMS = [{"prompt": f"What is {i} + {i}?", "answer": f"TRUTH{i}"} for i in range(1, 6)]
MATH = [
    *("--preset", "mathchat", "--train-subset", "0", "--steps", "2", "--problems", "2", "--train-batch", "2"),
    *("--lr", "1e-4", "--max-new-tokens", "12", "--no-mask-truncated", "--eval-samples", "2", "--eval-every", "1"),
]


@pytest.fixture
def files(tmp_path):
    """A file to train on, one to evaluate on, and one that repeats a training problem."""
    parts = {"train": PROBLEMS[:3], "eval": PROBLEMS[3:], "overlap": PROBLEMS[2:]}
    paths = {name: tmp_path / f"{name}.json" for name in parts}
    for name, problems in parts.items():
        paths[name].write_text(json.dumps(problems))
    return {name: str(path) for name, path in paths.items()}


def api_options(endpoint):
    """Options for a coach behind this endpoint."""
    return ["--judge-url", f"http://127.0.0.1:{endpoint.server_port}/v1", "--judge-model", "m"]


def asks_for_opinion(messages):
    """Is a coach asked whether the answer is right? Only of actions whose coach sees the truth."""
    return "CORRECT" in messages[0]["content"]


def test_mathchat_with_a_coach_behind_an_api(long_base, files, tmp_path, endpoint, monkeypatch):
    """The paper's pipeline and preset, small: problem files, a key from the environment, and troubles on the way.

    The troubles are counted in the metrics. No file of the run holds the key. True answers of training problems are in
    the Verifier's requests and in no other; those of evaluation problems are in none.
    """
    monkeypatch.setenv("COACH_KEY", "sk-SECRET")
    endpoint.script = ["SCORE: 1", 500, "garbage", "half", "nothing", 429, "no idea"]  # the first is for the probe
    endpoint.answer = lambda messages: "Fine.\nSCORE: 7, CORRECT: no" if asks_for_opinion(messages) else "SCORE: 4"
    out, cache = tmp_path / "run", tmp_path / "cache"
    options = [*MATH, "--model", str(long_base), "--train", files["train"], "--eval", files["eval"], "--out", str(out)]
    options += [*api_options(endpoint), "--judge-key-env", "COACH_KEY", "--judge-cache", str(cache)]
    assert train.main([*options, "--max-failures", "0.5"]) == 0

    # metrics and records
    first, second = lines(out / "metrics.jsonl")
    assert first["agents"]["Solver"]["score"] == 4 and first["agents"]["Verifier"]["score"] == 7
    assert first["judge"]["calls"] + first["judge"]["hits"] >= 12
    assert second["judge"]["seconds_p95"] is not None
    assert first["judge"]["retries"] == 4  # behind 500, half, nothing and 429
    assert first["judge"]["failures"] == 1  # garbage
    assert second["judge"]["retries"] == second["judge"]["failures"] == 0
    evaluations = lines(out / "evaluations.jsonl")
    assert [figures["step"] for figures in evaluations] == [0, 1, 2]
    assert all(0 <= figures["accuracy"] <= 1 and figures["kinds"] == {} for figures in evaluations)
    episode = lines(out / "episodes.jsonl")[-1]
    assert episode["truth"].startswith("TRUTH") and not episode["correct"] and episode["kind"] == ""
    action = episode["actions"][-1]
    assert (action["agent"], action["opinion"], action["reason"]) == ("Verifier", False, "Fine.")

    # what must not leave, or must not stay
    for path in [*out.rglob("*"), *cache.iterdir()]:
        assert path.is_dir() or b"SECRET" not in path.read_bytes()
    asked = [request.body["messages"] for request in endpoint.seen]
    assert any(asks_for_opinion(messages) for messages in asked)
    for messages in asked:
        assert ("TRUTH" in str(messages)) == asks_for_opinion(messages)
        assert "TRUTH4" not in str(messages) and "TRUTH5" not in str(messages)


def test_mathchat_with_a_local_coach(long_base, files, tmp_path, capfd):
    """A coach that model.py runs, and that speaks no verdicts: all are Failures, the run says so, and none trains."""
    options = [*MATH, "--model", str(long_base), "--train", files["train"]]
    options += ["--judge", "local", "--judge-model", str(long_base), "--judge-max-tokens", "20"]
    assert train.main([*options, "--out", str(tmp_path / "strict")]) == 1
    assert "the coach failed on" in capfd.readouterr().err
    assert train.main([*options, "--max-failures", "1", "--out", str(tmp_path / "patient")]) == 0
    figures = lines(tmp_path / "patient" / "metrics.jsonl")[-1]["agents"]["Solver"]
    assert figures["score"] is None and figures["failures"] == 4 and figures["grad_norm"] == 0
    start = weights(long_base)
    for agent in AGENTS:
        unmoved = last_weights(tmp_path / "patient", agent)
        assert all(torch.equal(unmoved[name], start[name]) for name in start)


def test_bad_mathchat_input(base, files, tmp_path, endpoint, capfd):
    """Bad input, the paper's leak among it, is found before a model is loaded or a folder is claimed."""
    given = [*MATH, "--model", str(base), "--train", files["train"], *api_options(endpoint)]
    given += ["--out", str(tmp_path / "out")]
    endpoint.script = [401]
    cases = [
        ([*given, "--eval", files["overlap"]], "also trained on, such as overlap/1: give --allow-repeats"),
        ([*given, "--train", str(tmp_path / "none.json")], "cannot be read"),
        ([*given, "--judge-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY, which --judge-key-env names, is empty"),
        ([*given, "--judge", "rules"], "the rules coach knows a miniature's own problems only"),
        ([*given, "--judge", "local", "--judge-model", ""], "needs --judge-model"),
        ([*given, "--problems", "4"], "there are 3 only"),
        (given, "status 401"),
    ]
    for options, message in cases:
        assert train.main(options) == 2
        errors = capfd.readouterr().err
        assert message in errors and errors.count("\n") == 1, errors
    assert not (tmp_path / "out").exists()


def test_evaluating_a_model_on_files(long_base, files, capfd):
    """eval.py on a model folder: several files, no coach, one JSON object."""
    options = [
        "--model",
        str(long_base),
        "--data",
        files["train"],
        files["eval"],
        "--samples",
        "2",
        "--temperature",
        "0.6",
    ]
    eval.main([*options, "--max-new-tokens", "12", "--json"])
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert set(figures) == {"problems", "samples", "temperature", "base", "files"}
    assert figures["problems"] == 5 and set(figures["files"]) == {"train", "eval"}
    assert figures["base"]["kinds"] == {} and set(figures["base"]["agents"]) == set(AGENTS)
    for agent in figures["base"]["agents"].values():
        assert agent["score"] is None and agent["failures"] == 0


def test_a_spent_budget_stops_the_run_cleanly(long_base, files, tmp_path, endpoint, capfd):
    """After the first step's verdicts the calls are spent; the second step is not trained on the few that are left.

    The state before it is saved. With a larger budget the run goes on, which is no change of the experiment.
    """
    endpoint.answer = lambda messages: "SCORE: 4, CORRECT: no" if asks_for_opinion(messages) else "SCORE: 4"
    out = tmp_path / "run"
    options = [*MATH, "--eval-every", "0", "--model", str(long_base), "--train", files["train"], *api_options(endpoint)]
    assert train.main([*options, "--out", str(out), "--judge-budget-calls", "16"]) == 1
    errors = capfd.readouterr().err
    assert "step 2: the coach failed on" in errors and "budget: 16 calls" in errors
    assert saved_step(out) == 1
    assert train.main(["--out", str(out), "--resume", "--judge-budget-calls", "0"]) == 0
    assert saved_step(out) == 2
    assert [line["step"] for line in lines(out / "metrics.jsonl")] == [1, 2]


# ---- The second miniature ------------------------------------------------------------------------

# train.py, but for its agents' programs, which take their time, and for two Ctrl-C while they run. The second one
# comes when the first has been heard.
INTERRUPTED_TWICE = '''
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import rollout
import train

PROGRAM = """```python
import time
open("started", "w").close()
time.sleep(0.5)
```"""

def press_ctrl_c():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

def press_twice():
    while not list(Path(tempfile.gettempdir()).glob("workspace-*/started")):
        time.sleep(0.01)
    press_ctrl_c()
    while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        time.sleep(0.01)
    press_ctrl_c()

rollout.text_of = lambda ids, context, tokenizer: PROGRAM
threading.Thread(target=press_twice, daemon=True).start()
sys.exit(train.main(sys.argv[1:]))
'''


def sandboxes(code):
    """The processes of all sandboxes that were started from the files in the folder `code`."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path("/proc", entry, "cmdline").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if f"{code}/agents.py".encode() in command:
            found.add(entry)
    return found


def test_tables_leave_nothing_behind_after_ctrl_c(tmp_path):
    """The second pipeline, small, stopped in the middle of its programs by two Ctrl-C.

    Symptom: folders and processes of the sandbox stay behind, or the run cannot be started again.
    Guard: nothing is left of the programs, and the run goes on.
    """
    # files of our own: sandboxes of other tests at the same time are not ours
    code = tmp_path / "code"
    code.mkdir()
    for file in Path(ROOT).glob("*.py"):
        shutil.copy(file, code)
    out = tmp_path / "run"
    small = ["--pipeline", "tables", "--warm-steps", "3", "--steps", "2", "--problems", "8", "--train-batch", "16"]
    small += ["--eval-problems", "0", "--save-every", "1", "--out", str(out)]
    done = execute(["-c", INTERRUPTED_TWICE, *small], tmp_path, code)
    assert done.returncode == 130, done.stderr[-2000:]
    assert "train.py: interrupted\n" in done.stderr
    assert not (out / "latest").exists()
    assert list((tmp_path / "tmp").glob("workspace-*")) == [] and sandboxes(code) == set()

    done = execute(["train.py", "--out", str(out), "--resume"], tmp_path, code)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line["step"] for line in lines(out / "metrics.jsonl")] == [1, 2]
    assert set(metrics(out)[0]["kinds"]) == {"regression", "classification"}
    for episode in lines(out / "episodes.jsonl"):
        assert episode["kind"] in ("regression", "classification") and episode["answer"] is None
        assert episode["correct"] == (episode["reason"] == "") == (episode["metrics"] != {})
    assert list((tmp_path / "tmp").glob("workspace-*")) == [] and sandboxes(code) == set()


def test_a_run_does_not_go_on_with_other_problems(tmp_path, base, capfd):
    """Symptom: a run that goes on trains on other problems in silence, for its file was edited under the old name.

    Guard: config.json has a digest of all problems in their order; --resume compares it, and rows moved are enough.
    """
    rows = [{"prompt": f"What is {i}+1?", "answer": i + 1} for i in range(6)]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(rows))
    out = str(tmp_path / "run")
    options = [
        "--pipeline",
        "arithmetic",
        "--model",
        str(base),
        "--train",
        str(path),
        "--problems",
        "2",
        "--steps",
        "1",
    ]
    options += ["--train-batch", "4", "--eval-problems", "0", "--judge", "local", "--judge-model", str(base)]
    options += ["--judge-max-tokens", "4", "--max-failures", "1", "--sandbox-timeout", "5"]
    assert train.main(["--out", out, *options]) == 0
    assert len(json.loads(Path(out, "config.json").read_text())["problems_digest"]) == 64
    for changed in (rows[::-1], [*rows, {"prompt": "?", "answer": 1}], [*rows[:-1], rows[-1] | {"answer": 99}]):
        path.write_text(json.dumps(changed))
        assert train.main(["--out", out, "--resume"]) == 2
        assert "was started with other problems" in capfd.readouterr().err
    path.write_text(json.dumps(rows))
    assert train.main(["--out", out, "--resume"]) == 0
