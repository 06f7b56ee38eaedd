"""rollout.py: what is recorded is what was sampled, tools answer for real, and the coach is shown neither more nor less."""
import pytest
import torch

import agents
import judge
import model
import rollout
from agents import ARITHMETIC, Problem
from rollout import Sampling, make_jobs, run_episodes

PROBLEM = Problem("p1", "Tom has 12 eggs and buys 7 more.", "19", "12+7")
GOOD, BROKEN = "```python\nprint(12+7)\n```", "```python\nprint(12+7\n```"


@pytest.fixture(scope="module")
def sandbox():
    with agents.Sandbox(timeout=5.0) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def tokenizer():
    return model.tiny_tokenizer(agents.PIECES)


def play(monkeypatch, sandbox, tokenizer, replies, coach=judge.rules, problems=(PROBLEM,), how=Sampling(("t",))):
    """Run the pipeline with replies given in order instead of sampled ones."""
    script = iter(replies)

    def scripted(network, contexts, draws, limit, temperature):
        completions = []
        for _ in contexts:
            ids = tokenizer(next(script))["input_ids"] + [tokenizer.eos_token_id]
            completions.append(model.Completion(ids, [-0.5] * len(ids), False))
        return completions

    monkeypatch.setattr(rollout, "sample", scripted)
    networks = {agent.name: None for agent in ARITHMETIC.agents}
    return run_episodes(ARITHMETIC, networks, tokenizer, make_jobs(list(problems), 1), coach, sandbox, how)


def test_programs_really_run_and_a_failed_one_may_be_mended(monkeypatch, sandbox, tokenizer):
    """FAULTS 10, 22. The Coder's program fails, it sees the error and tries again. Its second action's context is the
    first one's context, its sampled ids, and the observation: real tool text, in a context and in no action."""
    [e] = play(monkeypatch, sandbox, tokenizer, ["12+7", BROKEN, GOOD, "\\boxed{19}"])
    assert [(a.agent, a.turn) for a in e.actions] == [("Solver", 0), ("Coder", 0), ("Coder", 1), ("Verifier", 0)]
    solver, first, second, verifier = e.actions
    assert (first.status, first.observation, second.status, second.observation) == ("error", "error", "ok", "19")
    assert second.context_ids[: len(first.context_ids) + len(first.ids)] == first.context_ids + first.ids
    assert tokenizer.decode(second.context_ids).endswith("<|user|>error<|end|><|assistant|>")
    assert tokenizer.decode(second.ids) == GOOD + "<|end|>"  # sampled ids only
    assert tokenizer.decode(verifier.context_ids) == "<|user|>Verifier: 19<|end|><|assistant|>"
    assert [a.verdict.score for a in e.actions] == [10, 1, 10, 10] and e.correct and e.answer == "19"


def test_text_for_others_has_no_special_tokens(monkeypatch, sandbox, tokenizer):
    """Official code pastes terminator strings into downstream prompts."""
    [e] = play(monkeypatch, sandbox, tokenizer, ["12+7", GOOD, "\\boxed{19}"])
    assert [a.text for a in e.actions] == ["12+7", GOOD, "\\boxed{19}"]
    assert e.actions[1].context_ids.count(tokenizer.eos_token_id) == 1


def test_the_truth_is_shown_for_marked_agents_only(monkeypatch, sandbox, tokenizer):
    """The coach learns whether the answer is right when it scores the Verifier, and never for the others."""
    cases = []

    def coach(batch):
        cases.extend(batch)
        return judge.rules(batch)

    play(monkeypatch, sandbox, tokenizer, ["12+7", GOOD, "\\boxed{19}"], coach)
    assert [(c.agent.name, c.correct) for c in cases] == [("Solver", None), ("Coder", None), ("Verifier", True)]
    assert cases[0].handed == {"problem": PROBLEM.question} and cases[1].handed["Solver"] == "12+7"
    assert cases[1].observation == "19"


def test_accuracy_does_not_listen_to_the_coach(monkeypatch, sandbox, tokenizer):
    """Official "accuracy" is the coach's opinion. Guard: a coach that calls everything right changes no figure."""

    def flatterer(batch):
        return [judge.Verdict(10, "great", True) for _ in batch]

    [e] = play(monkeypatch, sandbox, tokenizer, ["12-7", "```python\nprint(12-7)\n```", "\\boxed{5}"], flatterer)
    assert not e.correct and rollout.record(e)["actions"][2]["opinion"] is True


def test_a_failed_verdict_stays_a_failure(monkeypatch, sandbox, tokenizer):
    """FAULT 32: it is recorded with its reason, and as no score."""

    def broken(batch):
        return [judge.Failure("timeout", "no answer in 60 s") for _ in batch]

    [e] = play(monkeypatch, sandbox, tokenizer, ["12+7", GOOD, "\\boxed{19}"], broken)
    for action in rollout.record(e)["actions"]:
        assert action["score"] is None and action["failure"] == "timeout: no answer in 60 s"


def test_a_coach_that_answers_too_few_is_noticed(monkeypatch, sandbox, tokenizer):
    with pytest.raises(ValueError):
        play(monkeypatch, sandbox, tokenizer, ["12+7", GOOD, "\\boxed{19}"], coach=lambda batch: [])


def test_a_context_over_the_limit_ends_the_episode_and_says_so(monkeypatch, sandbox, tokenizer):
    """Silently cutting a prompt trains an agent on half a question. Guard: the episode ends, wrong, with the reason."""
    how = Sampling(("t",), max_context_tokens=24)
    long = Problem("p2", "Tom has 999 shells, buys 999 more and loses 999.", "999", "999+999-999")
    replies = ["12+7", GOOD, "\\boxed{19}"]
    first, second = play(monkeypatch, sandbox, tokenizer, replies, problems=[PROBLEM, long], how=how)
    assert first.correct and len(first.actions) == 3
    assert not second.correct and not second.actions and "over 24" in second.error


def test_thoughts_are_no_answers_where_the_template_opens_the_thinking(monkeypatch, sandbox):
    """R1-Distill: the prompt ends with <think>, so the reply never holds that mark. A reply that was cut off while it
    thought would be taken for an answer, and its drafts of programs would run."""
    tokenizer = model.tiny_tokenizer([*agents.PIECES, "<think>", "</think>"])
    tokenizer.chat_template = model.TINY_CHAT.replace("<|assistant|>", "<|assistant|><think>\n")
    [e] = play(monkeypatch, sandbox, tokenizer, ["12+7", GOOD, "\\boxed{18}</think>\\boxed{19}"])
    assert e.actions[1].text == "<think>" + GOOD and e.actions[1].status == ""
    assert e.answer == "19"


def test_no_workspace_is_left(monkeypatch, sandbox, tokenizer):
    """Also when the coach crashes in the middle."""
    made = []
    original = sandbox.make_workspace
    monkeypatch.setattr(sandbox, "make_workspace", lambda files: made.append(original(files)) or made[-1])

    def crash(batch):
        raise RuntimeError("coach is gone")

    with pytest.raises(RuntimeError, match="coach is gone"):
        play(monkeypatch, sandbox, tokenizer, ["12+7", GOOD, "\\boxed{19}"], crash)
    assert made and not any(agents.os.path.exists(path) for path in made)


def test_random_numbers_are_a_function_of_identity():
    """FAULT 6. Symptom: all ranks sample the same completions, or others when the number of ranks changes. Guard: every
    (stream, problem, sample, agent, turn) has numbers of its own, and nothing else enters."""
    identities = [(("train", 0, step), f"p{p}", s, agent, turn) for step in (1, 2) for p in (1, 2) for s in (0, 1)
                  for agent in ("Solver", "Coder") for turn in (0, 1)]  # fmt: skip
    rows = {tuple(rollout.uniforms(*identity, 4)) for identity in identities}
    assert len(rows) == len(identities) == 32
    assert rollout.uniforms(("t",), "p", 0, "A", 0, 3).tolist() == [0.7016334744070662, 0.18644188949385132, 0.454496826990048]


def test_the_same_episodes_in_any_batch(sandbox):
    """FAULTS 6, 20: real sampling, one episode at a time against all at once."""
    network, tokenizer = model.tiny(agents.PIECES, seed=2)
    networks = {agent.name: network for agent in ARITHMETIC.agents}
    problems = ARITHMETIC.problems("train")[:3]
    together = make_jobs(problems, 2)
    run_episodes(ARITHMETIC, networks, tokenizer, together, judge.rules, sandbox, Sampling(("t",)))
    for episode in make_jobs(problems, 2):
        run_episodes(ARITHMETIC, networks, tokenizer, [episode], judge.rules, sandbox, Sampling(("t",)))
        assert [a.ids for a in episode.actions] == [a.ids for a in together[episode.index].actions]
    assert len({tuple(e.actions[0].ids) for e in together}) == 6


def test_every_turn_scores_as_it_was_sampled(sandbox, base):
    """FAULT 10, on the real thing: log-probabilities recomputed from an action's own record are those it was sampled
    with, for all agents and turns."""
    network, tokenizer = model.load(str(base))
    networks = {agent.name: network for agent in ARITHMETIC.agents}
    episodes = make_jobs(ARITHMETIC.problems("train")[:24], 1)
    run_episodes(ARITHMETIC, networks, tokenizer, episodes, judge.rules, sandbox, Sampling(("t",)))
    actions = [a for e in episodes for a in e.actions]
    assert any(a.turn for a in actions), "no second turn to check"
    scored, _ = model.token_logprobs(network, [a.context_ids for a in actions], [a.ids for a in actions])
    sampled = torch.tensor([x for a in actions for x in a.logprobs])
    assert (scored.detach() - sampled).abs().max() < 1e-5


def test_the_thinking_switch_reaches_the_template(monkeypatch):
    """Qwen3 thinks unless told not to; templates without such a switch are given none."""
    seen = []
    monkeypatch.setattr(rollout, "render", lambda *_, **switches: seen.append(switches))
    for thinking in ("default", "off", "on"):
        episode = rollout.Episode(0, PROBLEM, 0)
        rollout.next_context(ARITHMETIC.agents[0], episode, 0, None, Sampling(("t",), thinking=thinking))
    assert seen == [{}, {"enable_thinking": False}, {"enable_thinking": True}]
