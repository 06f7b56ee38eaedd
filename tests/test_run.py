"""The real commands, as a user types them: they learn, resume exactly, refuse bad input, and stop when asked."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import transformers
from conftest import ROOT
from safetensors.torch import load_file

import eval
import judge
import train

AGENTS = ("Solver", "Coder", "Verifier")
SMALL = ["--steps", "4", "--problems", "6", "--train-batch", "6", "--eval-problems", "0", "--save-every", "2"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def command(out, options, base=None, launcher=()):
    """The command line of a run; with a base it starts from that warm-started model."""
    if base is not None and not (out / "base").exists():
        shutil.copytree(base, out / "base")
    return [sys.executable, *launcher, "train.py", "--out", str(out), *options]


def run(*args, **kwargs):
    done = subprocess.run(command(*args, **kwargs), cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(out):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines(out / "metrics.jsonl")]


def saved_step(out):
    return int((out / "latest").read_text().removeprefix("step_"))

def weights(out, agent):
    return load_file(out / f"step_{saved_step(out):06d}" / agent / "model.safetensors")


def assert_same(a, b, tolerance):
    """The same tokens, rewards and metrics, and the same weights up to a tolerance (0: bit for bit)."""
    assert lines(a / "episodes.jsonl") == lines(b / "episodes.jsonl")
    for one, other in zip(metrics(a), metrics(b), strict=True):
        for agent in AGENTS:
            assert one["agents"][agent] == pytest.approx(other["agents"][agent], abs=tolerance, rel=tolerance)
        assert (one["step"], one["accuracy"]) == (other["step"], other["accuracy"])
    for agent in AGENTS:
        mine, theirs = weights(a, agent), weights(b, agent)
        assert max((mine[k] - theirs[k]).abs().max().item() for k in mine) <= tolerance


@pytest.fixture(scope="module")
def straight(base, tmp_path_factory):
    """The run folder of four steps in one go."""
    out = tmp_path_factory.mktemp("straight")
    run(out, SMALL, base)
    return out


def test_the_default_command_and_its_evaluation(tmp_path):
    """A newcomer's first two commands, small: warm start, evaluation before and after, files, and eval.py --json."""
    done = run(tmp_path / "r", ["--steps", "2", "--problems", "4", "--warm-steps", "20", "--eval-problems", "4"])
    assert "held-out accuracy before training" in done.stdout and "eval.py --run" in done.stdout
    for step, line in enumerate(lines(tmp_path / "r" / "metrics.jsonl"), 1):
        assert line["step"] == step and 0 <= line["accuracy"] <= 1 and line["seconds"] > 0
        for agent in AGENTS:
            expected = {"score", "kl", "entropy", "ratio_max", "clip_fraction", "tokens", "truncated", "failures",
                        "tool_calls", "grad_norm", "lr"}  # fmt: skip
            assert expected <= set(line["agents"][agent])
            assert line["agents"][agent]["mismatch"] < 1e-4
    first = lines(tmp_path / "r" / "episodes.jsonl")[0]
    assert first["question"] and {"text", "observation", "score", "reason"} <= set(first["actions"][0])
    assert json.loads((tmp_path / "r" / "config.json").read_text())["problems"] == 4
    for agent in AGENTS:
        folder = tmp_path / "r" / "step_000002" / agent
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert theirs(torch.tensor([tokenizer("Solver: Tom has 1")["input_ids"]])).logits.isfinite().all()
    options = ["--run", str(tmp_path / "r"), "--problems", "5", "--samples", "2", "--json"]
    done = subprocess.run([sys.executable, "eval.py", *options], cwd=ROOT, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["problems"], figures["samples"]) == (5, 2)
    assert set(figures["difference"]) == {"accuracy", "interval"}
    for system in ("base", "trained"):
        assert set(figures[system]["agents"]) == set(AGENTS) and len(figures[system]["interval"]) == 2


@pytest.mark.parametrize(
    "options, launcher",
    [
        ([], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]),
        (["--micro-batch-tokens", "150", "--sample-rows", "5", "--gradient-checkpointing"], []),
    ],
    ids=["two processes", "small batches"],
)
def test_any_split_of_the_work_gives_the_same_run(straight, base, tmp_path, options, launcher):
    """FAULTS 3, 6: two processes, or other batches, sample the same tokens, see the same metrics, and end with the same
    weights (to 1e-5: sums in another order)."""
    run(tmp_path, SMALL + options, base, launcher)
    assert_same(tmp_path, straight, 1e-5)


def start(out, options, base=None):
    return subprocess.Popen(
        command(out, options, base), cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(condition, process):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None, "the run ended or hung too early"
        time.sleep(0.01)


def test_interrupted_and_killed_runs_go_on_bit_for_bit(straight, base, tmp_path):
    """FAULTS 29, 30. Symptom: a resumed run repeats data, draws other samples, or cannot be resumed at all. Guard: all
    is a function of (seed, step). Ctrl-C early on saves and exits with 130; kill -9 in the last step loses what came
    after the last checkpoint; what comes out in the end is, bit for bit, the run of four steps in one go."""
    process = start(tmp_path, SMALL, base)
    wait_for((tmp_path / "config.json").exists, process)
    wait_for(lambda: "0/4" in process.stderr.readline(), process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume" in errors
    assert 1 <= saved_step(tmp_path) < 4 and len(lines(tmp_path / "metrics.jsonl")) == saved_step(tmp_path)

    process = start(tmp_path, ["--resume"])
    wait_for(lambda: len(lines(tmp_path / "metrics.jsonl")) >= 3, process)
    process.kill()
    process.communicate()
    assert 2 <= saved_step(tmp_path) < 4

    run(tmp_path, ["--resume"])
    assert_same(tmp_path, straight, 0)


def test_controls_run_the_same_way(base, tmp_path):
    """--reward outcome and --share-weights: coach scores are still recorded; shared agents have the same weights."""
    run(tmp_path, [*SMALL, "--steps", "1", "--reward", "outcome", "--share-weights", "--advantage", "rloo"], base)
    assert all(agent["score"] is not None for agent in metrics(tmp_path)[0]["agents"].values())
    first, second = weights(tmp_path, "Solver"), weights(tmp_path, "Verifier")
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_bad_input_ends_in_one_line_and_code_2(straight, tmp_path, capfd):
    """FAULT 38. Symptom: a stack trace after minutes of loading. Guard: one sentence, exit code 2, before anything slow."""
    (tmp_path / "file").write_text("")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    cases = [
        (train.main, ["--reward", "money"], "invalid choice: 'money'"),
        (train.main, ["--steps", "many"], "invalid int value"),
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
    ]
    for main, options, message in cases:
        try:
            code = main(options)
        except SystemExit as exit:
            code = exit.code
        errors = capfd.readouterr().err
        assert code == 2 and message in errors and errors.count("\n") == 1, (options, code, errors)
    done = subprocess.run([sys.executable, "train.py", "--out", str(straight)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stdout == ""

def test_a_failing_coach_stops_the_run_with_everything_saved(base, tmp_path, monkeypatch, capfd):
    """FAULT 32: the run ends with code 1 and one sentence; the state before the bad rollout is saved, and goes on."""
    calls, rules = [], judge.rules

    def flaky(cases):  # four calls a step: Solver, Coder, Coder again, Verifier
        calls.append(cases)
        return [judge.Failure("timeout", "no answer")] * len(cases) if len(calls) > 4 else rules(cases)

    monkeypatch.setattr(train.judge, "rules", flaky)
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)  # pytest's own Ctrl-C stays as it is
    shutil.copytree(base, tmp_path / "base")
    assert train.main(["--out", str(tmp_path), *SMALL, "--problems", "2", "--train-batch", "4"]) == 1
    assert "step 2: the coach failed on" in capfd.readouterr().err
    assert (tmp_path / "latest").read_text() == "step_000001\n"
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1]


# ---- The full-size pipeline, with a small model ------------------------------------------------------------------------------

PROBLEMS = [{"prompt": f"What is {i} + {i}?", "answer": 2 * i} for i in range(1, 6)]
MATH = ["--preset", "mathchat", "--train-subset", "0", "--steps", "2", "--problems", "2", "--train-batch", "2", "--lr",
        "1e-4", "--max-new-tokens", "12", "--no-mask-truncated", "--eval-samples", "2", "--eval-every", "1"]  # fmt: skip


@pytest.fixture
def files(tmp_path):
    """A file to train on, one to evaluate on, and one that repeats a training problem."""
    for name, part in (("train", PROBLEMS[:3]), ("eval", PROBLEMS[3:]), ("overlap", PROBLEMS[2:])):
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
    return {name: str(tmp_path / f"{name}.json") for name in ("train", "eval", "overlap")}


def test_mathchat_with_a_coach_behind_an_api(base, files, tmp_path, endpoint, monkeypatch):
    """The paper's pipeline and preset, small: problem files, a key from the environment, troubles of all kinds on the
    way, counts in the metrics; no file of the run holds the key. The embedded model is no mathematician."""
    monkeypatch.setenv("COACH_KEY", "sk-SECRET")
    endpoint.script = ["SCORE: 1", 500, "garbage", "half", "nothing", 429, "no idea"]
    out = tmp_path / "run"
    options = [*MATH, "--model", str(base), "--train", files["train"], "--eval", files["eval"], "--judge", "api", "--max-failures",
               "0.5", "--judge-url", f"http://127.0.0.1:{endpoint.server_port}/v1", "--judge-model", "m", "--judge-key-env",
               "COACH_KEY", "--judge-cache", str(tmp_path / "cache"), "--out", str(out)]  # fmt: skip
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    endpoint.answer = lambda messages: "Fine.\nSCORE: 7, CORRECT: no" if "CORRECT" in messages[0]["content"] else "SCORE: 4"
    assert train.main(options) == 0
    first, second = lines(out / "metrics.jsonl")
    assert first["agents"]["Solver"]["score"] == 4 and first["agents"]["Verifier"]["score"] == 7
    [between] = lines(out / "evaluations.jsonl")
    assert between["step"] == 1 and 0 <= between["accuracy"] <= 1
    assert first["judge"]["calls"] + first["judge"]["hits"] >= 12 and second["judge"]["p95"] is not None
    action = lines(out / "episodes.jsonl")[-1]["actions"][-1]
    assert (action["agent"], action["opinion"], action["reason"]) == ("Verifier", False, "Fine.")
    for path in [*out.rglob("*"), *(tmp_path / "cache").iterdir()]:
        assert path.is_dir() or b"SECRET" not in path.read_bytes()
    assert all("TRUTH" not in str(body) for _, _, body in endpoint.seen)


def test_mathchat_with_a_local_coach(base, files, tmp_path, monkeypatch, capfd):
    """The same with a coach that model.py runs. This one speaks no verdicts: all are Failures, and the run says so."""
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    options = [*MATH, "--model", str(base), "--train", files["train"], "--judge", "local", "--judge-model", str(base),
               "--judge-max-tokens", "20"]  # fmt: skip
    assert train.main([*options, "--out", str(tmp_path / "strict")]) == 1
    assert "the coach failed on" in capfd.readouterr().err
    assert train.main([*options, "--max-failures", "1", "--out", str(tmp_path / "patient")]) == 0
    step = lines(tmp_path / "patient" / "metrics.jsonl")[-1]["agents"]["Solver"]
    assert step["score"] is None and step["failures"] == 4 and step["grad_norm"] == 0
    unmoved = load_file(tmp_path / "patient" / "step_000002" / "Solver" / "model.safetensors")
    start = load_file(base / "model.safetensors")
    assert all(torch.equal(unmoved[k], start[k]) for k in start)


def test_bad_mathchat_input(base, files, tmp_path, endpoint, capfd, monkeypatch):
    """FAULT 38, and the paper's leak: all of it before a model is loaded or a folder is claimed."""
    api = ["--judge-url", f"http://127.0.0.1:{endpoint.server_port}/v1", "--judge-model", "m"]
    given = [*MATH, "--model", str(base), "--train", files["train"], *api, "--out", str(tmp_path / "out")]
    endpoint.script = [401]
    cases = [
        ([*given, "--eval", files["overlap"]], "also trained on, such as overlap/1: give --allow-repeats"),
        ([*given, "--train", str(tmp_path / "none.json")], "cannot be read"),
        ([*given, "--judge-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY, which --judge-key-env names, is empty"),
        ([*given, "--judge", "rules"], "the rules coach knows the miniature only"),
        ([*given, "--judge", "local", "--judge-model", ""], "needs --judge-model"),
        ([*given, "--problems", "4"], "there are 3 only"),
        (given, "status 401"),
    ]
    for options, message in cases:
        assert train.main(options) == 2
        errors = capfd.readouterr().err
        assert message in errors and errors.count("\n") == 1, errors
    assert not (tmp_path / "out").exists()


def test_evaluating_a_model_on_files(base, files, capfd):
    """eval.py on a folder: several files, no coach, one JSON object."""
    options = ["--model", str(base), "--data", files["train"], files["eval"], "--samples", "2", "--temperature", "0.6"]
    eval.main([*options, "--max-new-tokens", "12", "--json"])
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert figures["problems"] == 5 and set(figures["files"]) == {"train", "eval"} and "difference" not in figures
    assert figures["base"]["agents"]["Solver"] | {"score": None, "failures": 0} == figures["base"]["agents"]["Solver"]


def test_a_spent_budget_stops_the_run_cleanly(base, files, tmp_path, endpoint, monkeypatch, capfd):
    """FAULT 34: after the first step's verdicts the calls are spent. The second step is not trained on what is left; the
    state before it is saved, and with a larger budget the run goes on, which is no change of the experiment."""
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    endpoint.answer = lambda messages: "SCORE: 4, CORRECT: no" if "CORRECT" in messages[0]["content"] else "SCORE: 4"
    out = tmp_path / "run"
    options = [*MATH, "--eval-every", "0", "--model", str(base), "--train", files["train"], "--judge-url",
               f"http://127.0.0.1:{endpoint.server_port}/v1", "--judge-model", "m", "--out", str(out)]  # fmt: skip
    assert train.main([*options, "--judge-budget-calls", "16"]) == 1
    assert "step 2: the coach failed on" in (errors := capfd.readouterr().err) and "budget: 16 calls" in errors
    assert saved_step(out) == 1
    assert train.main(["--out", str(out), "--resume", "--judge-budget-calls", "0"]) == 0
    assert saved_step(out) == 2 and [line["step"] for line in lines(out / "metrics.jsonl")] == [1, 2]


def sandboxes():
    """The processes of all sandboxes that were started from these files."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                found |= {pid} if f"{ROOT}/agents.py".encode() in f.read() else set()
        except OSError:
            pass
    return found


def test_tables_leave_nothing_behind_after_ctrl_c(tmp_path):
    """The second pipeline, small, stopped in the middle of its programs by two Ctrl-C: no workspace and no process of
    the sandbox is left, and the run goes on when it is started again."""
    workspaces = tmp_path / "tmp"
    workspaces.mkdir()
    for folder in (workspaces, *workspaces.parents):  # programs run as nobody, which must reach its workspace
        if folder.owner() == "root" and folder != workspaces.anchor:
            folder.chmod(folder.stat().st_mode | 0o711)
    before, environment = sandboxes(), ENVIRONMENT | {"TMPDIR": str(workspaces)}
    small = ["--pipeline", "tables", "--warm-steps", "3", "--steps", "2", "--problems", "8", "--train-batch", "16"]
    begin = command(tmp_path / "run", [*small, "--eval-problems", "0", "--save-every", "1"])
    process = subprocess.Popen(begin, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(list(workspaces.glob("workspace-*"))) > 8, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    again = command(tmp_path / "run", ["--resume"])
    assert subprocess.run(again, cwd=ROOT, env=environment, capture_output=True).returncode == 0
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert {"regression", "classification"} <= set(metrics(tmp_path / "run")[0]["data"])
    assert list(workspaces.glob("workspace-*")) == []
    assert not sandboxes() - before
