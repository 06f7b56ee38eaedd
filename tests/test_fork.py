"""A new pipeline is one Pipeline object, its own grading one function, and an offline coach one function per agent.

The pipeline here is registered in three dicts and nowhere else: agents.PIPELINES, judge.GRADERS and judge.RULES.
"""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

import agents
import eval
import judge
import train
from agents import Agent, Pipeline, Problem
from judge import Grade, Verdict
from model import save, tiny

# ---- The fork ------------------------------------------------------------------------------------


def letter_problems(split):
    """Four problems: which letter is to be written?"""
    return [Problem(f"{split}-{i}", question="ab"[i % 2], answer="ab"[i % 2]) for i in range(4)]


def share_of(letter, text):
    """Which share of the text is this letter?"""
    return text.count(letter) / max(1, len(text))


def grade_letters(problem, reply, read_file):
    """An episode is correct if at least half of the last reply is the right letter, and the better the more."""
    share = share_of(problem.answer, reply)
    correct = share >= 0.5
    return Grade(correct, share, "" if correct else "most of it is wrong", metrics={"share": share})


def score_caller(case):
    """One point for every letter, up to ten."""
    return Verdict(min(10, len(case.reply)), "the longer the better")


def score_echo(case):
    """Five points for a correct result, and five for a copy of what was handed."""
    is_copy = case.reply == case.handed["Caller"]
    return Verdict(5 * case.grade.correct + 5 * is_copy, "a copy" if is_copy else "no copy")


LETTERS = Pipeline(
    name="letters",
    agents=(Agent("Caller", "{problem}"), Agent("Echo", "{Caller}", coach_sees_truth=True)),
    graded_by="letters",
    show_result=agents.show_output,
    success_name="success",
    problems=letter_problems,
)
NAMES = ("Caller", "Echo")


@pytest.fixture(scope="module", autouse=True)
def registered():
    """Everything that a fork has to register."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(agents.PIPELINES, "letters", LETTERS)
        patch.setitem(judge.GRADERS, "letters", grade_letters)
        patch.setitem(judge.RULES, ("letters", "Caller"), score_caller)
        patch.setitem(judge.RULES, ("letters", "Echo"), score_echo)
        yield


# ---- What it is used with ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The folder of an untrained model that can write these letters, and little else."""
    folder = tmp_path_factory.mktemp("start")
    save(*tiny("ab", seed=0), str(folder))
    return folder


def options_of(start, out):
    """The options of one step on all problems, with two episodes each."""
    size = ["--steps", "1", "--problems", "4", "--train-batch", "8", "--max-new-tokens", "12", "--no-mask-truncated"]
    return ["--pipeline", "letters", "--model", str(start), "--out", str(out), *size]


@pytest.fixture(scope="module")
def out(start, tmp_path_factory):
    """The run folder of one step."""
    out = tmp_path_factory.mktemp("letters") / "run"
    assert train.main(options_of(start, out)) == 0
    return out


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_graded(record):
    """The record is what grade_letters() must make of the episode, worked out once more from its last text."""
    text = record["actions"][-1]["text"]
    share = sum(letter == record["truth"] for letter in text) / max(1, len(text))
    assert record["correct"] == (share >= 0.5)
    assert record["quality"] == share and record["metrics"] == {"share": share}
    assert record["reason"] == ("" if share >= 0.5 else "most of it is wrong")
    assert record["kind"] == "" and record["answer"] is None


# ---- Training ------------------------------------------------------------------------------------


def test_its_own_grading_decides_how_episodes_came_out(out):
    """Records carry its verdict, quality, metrics and reason; accuracy is the share that it calls right."""
    records = lines(out / "episodes.jsonl")
    assert sorted(record["problem"] for record in records) == [f"train-{i // 2}" for i in range(8)]
    for record in records:
        assert_graded(record)
    assert len({record["correct"] for record in records}) == 2, "there is nothing to tell apart"
    [line] = lines(out / "metrics.jsonl")
    assert line["accuracy"] == sum(record["correct"] for record in records) / 8


def test_its_own_rules_give_the_scores(out):
    """Each agent is judged by its own function, and learns from that."""
    records = lines(out / "episodes.jsonl")
    for record in records:
        caller, echo = record["actions"]
        is_copy = echo["text"] == caller["text"]
        assert (caller["agent"], caller["score"]) == ("Caller", min(10, len(caller["text"])))
        assert caller["reason"] == "the longer the better"
        assert (echo["agent"], echo["score"]) == ("Echo", 5 * record["correct"] + 5 * is_copy)
        assert echo["reason"] == ("a copy" if is_copy else "no copy")
    [line] = lines(out / "metrics.jsonl")
    for place, name in enumerate(NAMES):
        scores = [record["actions"][place]["score"] for record in records]
        assert line["agents"][name]["score"] == pytest.approx(sum(scores) / 8)


def test_both_agents_learn(start, out):
    """Each has weights of its own, and they have moved."""
    before = load_file(start / "model.safetensors")
    first, second = [load_file(out / "step_000001" / name / "model.safetensors") for name in NAMES]
    for one, other in ((before, first), (before, second), (first, second)):
        assert any(not torch.equal(one[name], other[name]) for name in before)


def test_it_needs_no_preset():
    """Without an entry in PRESETS a pipeline starts from the defaults."""
    config = train.read_config(["--pipeline", "letters", "--model", "folder"])
    run_folder = os.path.join("runs", "letters")
    assert config == train.Config(preset="letters", pipeline="letters", model="folder", out=run_folder)


def test_its_quality_is_the_outcome_reward(start, tmp_path, monkeypatch):
    """--reward outcome pays what the grading calls quality, to every action of the episode."""
    rewards = []
    original = train.trained_actions

    def trained_actions(episodes, config):
        scored = original(episodes, config)
        rewards.extend((s.action.text, s.reward) for s in scored)
        return scored

    monkeypatch.setattr(train, "trained_actions", trained_actions)
    out = tmp_path / "run"
    assert train.main([*options_of(start, out), "--reward", "outcome", "--eval-problems", "0"]) == 0
    records = lines(out / "episodes.jsonl")
    assert rewards == [(action["text"], record["quality"]) for record in records for action in record["actions"]]
    assert any(0 < reward < 1 for _, reward in rewards)


# ---- Other coaches -------------------------------------------------------------------------------


def test_without_its_rules_it_needs_another_coach(start, tmp_path, monkeypatch, capfd):
    """The offline coach is offered only where every agent has a function."""
    monkeypatch.delitem(judge.RULES, ("letters", "Echo"))
    assert train.main(options_of(start, tmp_path / "run")) == 2
    assert "give another --judge" in capfd.readouterr().err


def test_a_language_model_coaches_it_without_any_rules(start, tmp_path, monkeypatch, endpoint):
    """A coach behind an API is shown how the episode came out where the agent is marked so, and not elsewhere."""
    for name in NAMES:
        monkeypatch.delitem(judge.RULES, ("letters", name))
    endpoint.answer = lambda messages: "SCORE: 7, CORRECT: no" if "CORRECT" in str(messages) else "SCORE: 3"
    out = tmp_path / "run"
    options = [*options_of(start, out), "--judge", "api", "--judge-model", "m"]
    assert train.main([*options, "--judge-url", f"http://127.0.0.1:{endpoint.server_port}/v1"]) == 0
    for record in lines(out / "episodes.jsonl"):
        assert [action["score"] for action in record["actions"]] == [3, 7]


# ---- Evaluation ----------------------------------------------------------------------------------


def test_it_is_evaluated_by_its_own_grading_and_rules(out, monkeypatch, capfd):
    """Accuracy is what its grading says, mean scores are those of its rules, and the word for success is its own."""
    records = []
    original = eval.collect

    def collect(*arguments):
        episodes, some = original(*arguments)
        records.append(some)
        return episodes, some

    monkeypatch.setattr(eval, "collect", collect)
    capfd.readouterr()
    eval.main(["--run", str(out), "--samples", "4", "--json"])
    printed = capfd.readouterr().out
    figures = json.loads(printed.splitlines()[-1])

    assert (figures["problems"], figures["samples"]) == (4, 4)
    for system, some in zip(("base", "trained"), records, strict=True):
        for record in some:
            assert_graded(record)
        summary = figures[system]
        assert summary["accuracy"] == pytest.approx(sum(record["correct"] for record in some) / 16)
        assert 0 < summary["accuracy"] < 1, "there is nothing to tell apart"
        lengths = [len(record["actions"][0]["text"]) for record in some]
        assert summary["agents"]["Caller"]["score"] == pytest.approx(sum(min(10, n) for n in lengths) / 16)
        copies = sum(record["actions"][1]["text"] == record["actions"][0]["text"] for record in some)
        right = sum(record["correct"] for record in some)
        assert summary["agents"]["Echo"]["score"] == pytest.approx(5 * (copies + right) / 16)
        assert summary["majority"] is None and summary["kinds"] == {}  # its results are no answers, of one kind
        assert f"{system}: success {100 * summary['accuracy']:.1f}%" in printed
    assert [(row["agent"], row["actions"]) for row in figures["coach"]] == [("Caller", 8), ("Echo", 8)]
