"""rollout.py: the record is what was sampled, programs really run, and the coach is shown neither more nor less."""

import os
from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import as_they_end

import judge
import rollout
from agents import ARITHMETIC, ARITHMETIC_PIECES, Problem, Sandbox
from judge import Failure, Grade, Verdict, nobody, rules
from model import TINY_CHAT, Completion, load, tiny, tiny_tokenizer, token_logprobs
from rollout import Sampling, make_episodes, record, run_episodes

PROBLEM = Problem("p1", "Tom has 12 eggs and buys 7 more.", "19", solution="12+7")
GOOD = "```python\nprint(12+7)\n```"
BROKEN = "```python\nprint(12+7\n```"
RIGHT_REPLIES = ("12+7", GOOD, "\\boxed{19}")
SAMPLING = Sampling(("t",))


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(timeout=60.0) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(ARITHMETIC_PIECES)


@pytest.fixture
def play(monkeypatch, sandbox, tokenizer):
    """A function that runs a pipeline with replies given in order instead of sampled ones; returns its episodes."""

    def run_script(
        replies, coach=rules, pipeline=ARITHMETIC, problems=(PROBLEM,), tokenizer=tokenizer, sampling=SAMPLING
    ):
        script = iter(replies)

        def scripted(model, contexts, draws, max_new_tokens, temperature):
            completions = []
            for _ in contexts:
                ids = tokenizer(next(script))["input_ids"] + [tokenizer.eos_token_id]
                completions.append(Completion(ids, [-0.5] * len(ids), truncated=False))
            return completions

        monkeypatch.setattr(rollout, "sample_as_they_end", as_they_end(scripted))
        models = {agent.name: None for agent in pipeline.agents}
        episodes = make_episodes(problems, 1)
        return run_episodes(pipeline, models, tokenizer, episodes, coach, sandbox, sampling)

    return run_script


class Listener:
    """A coach that keeps its cases, and leaves the verdicts to another one."""

    def __init__(self, coach):
        self.coach = coach
        self.cases = []

    def __call__(self, cases):
        self.cases += cases
        return self.coach(cases)


# ---- Actions -------------------------------------------------------------------------------------


def test_programs_really_run_and_a_failed_one_may_be_mended(play, tokenizer):
    """The Coder's program fails, it sees the error, and tries again.

    Symptom elsewhere: agents are trained on text that a tool wrote, or a second action is scored under the context of
    the first.
    Guard: the second action's context is the first one's context, its sampled ids, and the observation. Tool text is
    real, and it is in contexts only, never in an action.
    """
    [episode] = play(["12+7", BROKEN, GOOD, "\\boxed{19}"])
    turns = [(action.agent, action.turn) for action in episode.actions]
    assert turns == [("Solver", 0), ("Coder", 0), ("Coder", 1), ("Verifier", 0)]
    _, first, second, verifier = episode.actions
    assert (first.status, first.observation) == ("error", "error")
    assert (second.status, second.observation) == ("ok", "19")
    assert second.context_ids[: len(first.context_ids) + len(first.ids)] == first.context_ids + first.ids
    assert tokenizer.decode(second.context_ids).endswith("<|user|>error<|end|><|assistant|>")
    assert tokenizer.decode(second.ids) == GOOD + "<|end|>"  # sampled ids only
    assert tokenizer.decode(verifier.context_ids) == "<|user|>Verifier: 19<|end|><|assistant|>"
    assert [action.verdict.score for action in episode.actions] == [10, 1, 10, 10]
    assert episode.grade == Grade(True, 1.0, answer="19")


def test_text_for_others_has_no_special_tokens(play, tokenizer):
    """Symptom in the official code: terminator strings are pasted into the prompts of the agents that follow."""
    [episode] = play(RIGHT_REPLIES)
    assert [action.text for action in episode.actions] == list(RIGHT_REPLIES)
    assert episode.actions[1].context_ids.count(tokenizer.eos_token_id) == 1


def test_thoughts_are_no_answers_where_the_template_opens_the_thinking(play):
    """Symptom: drafts of programs run, and a thought that was cut off counts as an answer.

    Cause: R1-Distill's prompt ends with <think>, so that no reply holds this mark.
    Guard: the text of an action starts with the mark that its prompt ended with.
    """
    tokenizer = tiny_tokenizer([*ARITHMETIC_PIECES, "<think>", "</think>"])
    tokenizer.chat_template = TINY_CHAT.replace("<|assistant|>", "<|assistant|><think>\n")
    [episode] = play(["12+7", GOOD, "\\boxed{18}</think>\\boxed{19}"], tokenizer=tokenizer)
    coder = episode.actions[1]
    assert (coder.text, coder.status, coder.observation) == ("<think>" + GOOD, "", None)
    assert episode.grade.answer == "19"


def test_the_thinking_switch_and_the_date_reach_the_template(monkeypatch):
    """Qwen3 thinks unless it is told not to; templates without such a switch are given none."""
    seen = []
    monkeypatch.setattr(rollout, "render", lambda *_, **switches: seen.append(switches))
    for thinking in ("default", "off", "on"):
        episode = rollout.Episode(0, PROBLEM, 0)
        rollout.next_context(
            ARITHMETIC.agents[0], episode, 0, None, Sampling(("t",), thinking=thinking, date="2026-01-31")
        )
    day = {"date": "2026-01-31"}
    assert seen == [day, day | {"enable_thinking": False}, day | {"enable_thinking": True}]


def test_a_context_over_the_limit_ends_the_episode_and_says_so(play):
    """Symptom: a prompt is cut in silence, and an agent is trained on half a question.

    Guard: the episode ends there, wrong, and its record says why. Other episodes do not mind.
    """
    long = Problem("p2", "Tom has 999 shells, buys 999 more and loses 999.", "999", solution="999+999-999")
    sampling = Sampling(("t",), max_context_tokens=24)
    first, second = play(RIGHT_REPLIES, problems=[PROBLEM, long], sampling=sampling)
    assert first.grade.correct and len(first.actions) == 3
    assert not second.actions and "over 24" in second.error
    assert second.grade == Grade(False, 0.0, second.error)
    assert record(second)["error"] == record(second)["reason"] == second.error


# ---- Coach and truth -----------------------------------------------------------------------------


def test_the_truth_is_shown_for_marked_agents_only(play):
    """The coach learns how the episode came out when it scores the Verifier, and never for the others."""
    coach = Listener(rules)
    play(RIGHT_REPLIES, coach)
    solver, coder, verifier = coach.cases
    assert [case.agent.name for case in coach.cases] == ["Solver", "Coder", "Verifier"]
    assert solver.grade is None and coder.grade is None and verifier.grade == Grade(True, 1.0, answer="19")
    assert [case.shows_answer for case in coach.cases] == [False, False, True]
    limits = {"max_new_tokens": "32", "program_seconds": "60"}  # of this run, not of a preset
    assert solver.handed == {"problem": PROBLEM.question} | limits and coder.handed["Solver"] == "12+7"
    assert (coder.reply, coder.observation, coder.status) == (GOOD, "19", "ok")


def test_the_last_agent_is_graded_whether_or_not_its_coach_may_know(play):
    """Every episode is graded by its last action; the coach is shown that only where the agent is marked so."""
    unmarked = replace(ARITHMETIC.agents[2], coach_sees_truth=False)
    pipeline = replace(ARITHMETIC, agents=(*ARITHMETIC.agents[:2], unmarked))
    coach = Listener(nobody)
    [episode] = play(RIGHT_REPLIES, coach, pipeline)
    assert [case.grade for case in coach.cases] == [None, None, None]
    assert episode.grade == Grade(True, 1.0, answer="19")


def test_accuracy_does_not_listen_to_the_coach(play):
    """Symptom in the official code: "accuracy" is the coach's opinion.

    Guard: a coach that calls everything right changes no figure.
    """

    def flatterer(cases):
        return [Verdict(10, "great", True) for _ in cases]

    [episode] = play(["12-7", "```python\nprint(12-7)\n```", "\\boxed{5}"], flatterer)
    line = record(episode)
    assert (line["correct"], line["quality"], line["answer"]) == (False, 0.0, "5")
    assert line["reason"] == "the answer is wrong"
    assert line["actions"][2]["opinion"] is True and line["actions"][2]["score"] == 10


def test_own_grading_reads_what_programs_left(play, monkeypatch):
    """A function of GRADERS gets the problem, the reply, and a way to read files of the episode's workspace.

    An agent whose coach sees the truth is graded after its own action; the episode, after the last one.
    """
    seen = []

    def grade_file(problem, reply, read_file):
        data = read_file("left")
        with pytest.raises(FileNotFoundError):
            read_file("absent")
        seen.append((problem, reply, data))
        return Grade(False, len(data) / 4, f"{reply} is not all", metrics={"size": len(data)})

    first, second, last = ARITHMETIC.agents
    marked = replace(second, coach_sees_truth=True)
    pipeline = replace(ARITHMETIC, graded_by="file", agents=(first, marked, last))
    monkeypatch.setitem(judge.GRADERS, "file", grade_file)
    program = "```python\nopen('left', 'w').write('ab')\n```"
    tokenizer = tiny_tokenizer([*ARITHMETIC_PIECES, program, "done"])
    coach = Listener(nobody)
    [episode] = play(["12+7", program, "done"], coach, pipeline, tokenizer=tokenizer)
    assert seen == [(PROBLEM, program, b"ab"), (PROBLEM, "done", b"ab")]
    solver, coder, verifier = coach.cases
    assert solver.grade is None and coder.grade.reason == f"{program} is not all"
    assert episode.grade == verifier.grade == Grade(False, 0.5, "done is not all", {"size": 2})
    line = record(episode)
    assert (line["quality"], line["reason"], line["metrics"]) == (0.5, "done is not all", {"size": 2})


def test_a_failed_verdict_stays_a_failure(play):
    """Symptom elsewhere: a coach that fails is recorded as a score of 0 or 5. Guard: no score, and the reason why."""

    def broken(cases):
        return [Failure("timeout", "no answer in 60 s") for _ in cases]

    [episode] = play(RIGHT_REPLIES, broken)
    actions = record(episode)["actions"]
    assert len(actions) == 3
    for action in actions:
        assert action["score"] is None and action["reason"] is None and action["opinion"] is None
        assert action["failure"] == "timeout: no answer in 60 s"


def test_no_coach_is_no_failure(play):
    """Evaluations ask no coach: their actions have neither a score nor a failure."""
    [episode] = play(RIGHT_REPLIES, nobody)
    assert [action["score"] for action in record(episode)["actions"]] == [None] * 3
    assert [action["failure"] for action in record(episode)["actions"]] == [None] * 3


def test_a_coach_that_answers_too_few_is_noticed(play):
    """Symptom: scores move to other actions. Guard: a coach that leaves a case out is an error."""
    with pytest.raises(ValueError):
        play(RIGHT_REPLIES, coach=lambda cases: rules(cases)[:-1])


# ---- Episodes ------------------------------------------------------------------------------------


def test_a_record_has_the_same_keys_for_every_pipeline(play):
    """Statistics read records alone: mathematics has an empty kind and no metrics, and lacks neither key."""
    [episode] = play(RIGHT_REPLIES)
    line = record(episode)
    actions = line.pop("actions")
    assert line == dict(
        index=0,
        problem="p1",
        sample=0,
        kind="",
        question=PROBLEM.question,
        truth="19",
        answer="19",
        correct=True,
        quality=1.0,
        reason="",
        metrics={},
        measures=[],
        error="",
    )
    assert actions[1] == dict(
        agent="Coder",
        turn=0,
        text=GOOD,
        tokens=len(episode.actions[1].ids),
        truncated=False,
        status="ok",
        observation="19",
        files=[],
        score=10,
        reason="the program computes what it was handed",
        opinion=None,
        failure=None,
    )


@pytest.mark.parametrize("crash", [False, True], ids=["all is well", "the coach crashes"])
def test_no_workspace_is_left(play, sandbox, monkeypatch, crash):
    """Symptom: the disk fills with the folders of past episodes. Guard: all are removed, also after a crash."""
    made = []
    original = sandbox.make_workspace

    def make_workspace(files):
        made.append(original(files))
        return made[-1]

    def coach(cases):
        assert all(os.path.exists(path) for path in made)
        if crash:
            raise RuntimeError("coach is gone")
        return rules(cases)

    monkeypatch.setattr(sandbox, "make_workspace", make_workspace)
    if crash:
        with pytest.raises(RuntimeError, match="coach is gone"):
            play(RIGHT_REPLIES, coach)
    else:
        play(RIGHT_REPLIES, coach)
    assert len(made) == 1 and not os.path.exists(made[0])


# ---- Random numbers ------------------------------------------------------------------------------


def test_random_numbers_are_a_function_of_identity():
    """Symptom: all ranks sample the same completions, or others when the number of ranks changes.

    Cause: one generator for each process.
    Guard: every (stream, problem, sample, agent, turn) has numbers of its own, and nothing else enters.
    """
    streams = [("train", 0, 1), ("train", 0, 2)]
    identities = list(product(streams, ("p1", "p2"), (0, 1), ("Solver", "Coder"), (0, 1)))
    rows = {tuple(rollout.uniforms(*identity, 4)) for identity in identities}
    assert len(rows) == len(identities) == 32
    numbers = rollout.uniforms(("t",), "p", 0, "A", 0, 3)
    assert numbers.tolist() == [0.7016334744070662, 0.18644188949385132, 0.454496826990048]


def test_the_same_episodes_in_any_batch(sandbox):
    """Symptom: results depend on the batch size. Guard: the company of an episode changes none of its tokens.

    Real sampling, one episode at a time against all at once.
    """
    model, tokenizer = tiny(ARITHMETIC_PIECES, seed=2)
    models = {agent.name: model for agent in ARITHMETIC.agents}
    problems = ARITHMETIC.problems("train")[:3]
    together = make_episodes(problems, 2)
    run_episodes(ARITHMETIC, models, tokenizer, together, rules, sandbox, SAMPLING)
    for episode in make_episodes(problems, 2):
        run_episodes(ARITHMETIC, models, tokenizer, [episode], rules, sandbox, SAMPLING)
        assert [a.ids for a in episode.actions] == [a.ids for a in together[episode.index].actions]
    assert len({tuple(episode.actions[0].ids) for episode in together}) == 6


def test_every_turn_scores_as_it_was_sampled(sandbox, base):
    """Symptom in the official code: later turns are scored under a context that they were not sampled under.

    Guard: log-probabilities recomputed from an action's own record are those it was sampled with, for all agents and
    turns.
    """
    model, tokenizer = load(str(base))
    models = {agent.name: model for agent in ARITHMETIC.agents}
    episodes = make_episodes(ARITHMETIC.problems("train")[:24], 1)
    run_episodes(ARITHMETIC, models, tokenizer, episodes, rules, sandbox, SAMPLING)
    actions = [action for episode in episodes for action in episode.actions]
    assert any(action.turn > 0 for action in actions), "there is no second turn to check"
    contexts = [action.context_ids for action in actions]
    scored, _ = token_logprobs(model, contexts, [action.ids for action in actions])
    sampled = torch.tensor([logprob for action in actions for logprob in action.logprobs])
    assert (scored.detach() - sampled).abs().max() < 1e-5
