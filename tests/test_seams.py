"""Where two parts meet: faults that each part's own tests, with made-up values, do not see."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
import transformers
from conftest import Status, as_they_end
from test_judge import QUESTION, api

import agents
import judge
import rollout
import train
from agents import ARITHMETIC, TABLES, FileEntry, Problem
from judge import Failure
from model import Completion, Transformer, load, model_config, sample, save, tiny, tiny_tokenizer, token_logprobs
from rollout import Action, Episode, Sampling, make_episodes, run_episodes, uniforms
from train import Config, Policy, ShardedAdamW, TrainedAction

LETTERS = "abcdefghijklmnopqrst"


def trained_action(context, ids, agent="A", update=0, reward=0.5, weight=1.0):
    action = Action(agent, 0, context, ids, [-1.0] * len(ids), False, "")
    return TrainedAction(action, ("p", agent, 0), update, reward, weight)


# ---- Model and update --------------------------------------------------------------------------------------------


def test_the_kl_is_that_of_the_policy_against_its_reference():
    """With the sign flipped agents are paid for leaving their reference, and nothing else shows it.

    Guard: kl_t = log pi_old - log pi_ref, each computed apart; and where it is positive the return is lower.
    """
    policy, reference = tiny(LETTERS, seed=1)[0], tiny(LETTERS, seed=2)[0]
    scored = [trained_action([6, 7], [8, 9, 10]), trained_action([6], [11], weight=0.0)]
    train.fill_old_and_kl(policy, reference, scored, 1, Config())
    for s in scored:
        old, _ = token_logprobs(policy, [s.action.context_ids], [s.action.ids])
        by_reference, _ = token_logprobs(reference, [s.action.context_ids], [s.action.ids])
        assert torch.allclose(s.kl, (old - by_reference).detach(), atol=1e-5)
        assert torch.allclose(s.old, old.detach(), atol=1e-5)
    assert train.returns_to_go(torch.tensor([2.0]), 0.5, beta=0.1).tolist() == pytest.approx([0.3])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_a_temperature_divides_the_logits(tmp_path, temperature):
    """Multiplied instead of divided: sampler and scorer share the line, so they agree, and nothing else shows it.

    Guard: the distribution is that of transformers' logits divided by the temperature.
    """
    model, tokenizer = tiny(LETTERS, seed=3)
    save(model, tokenizer, str(tmp_path))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    context, ids = [6, 7, 8], [9, 10]
    with torch.no_grad():
        logits = theirs(torch.tensor([context + ids])).logits[0, 2:4].double()
    expected = (logits / temperature).log_softmax(-1)[torch.arange(2), ids]
    mine, _ = token_logprobs(model, [context], [ids], temperature)
    assert mine.tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    # and the sampler: a draw right below and above a token's share of the cumulated probability
    cdf = (logits[0] / temperature).softmax(-1).cumsum(-1)
    edge = cdf[8].item()
    below, above = sample(model, [context] * 2, np.array([[edge - 1e-4], [edge + 1e-4]]), 1, temperature)
    assert (below.ids, above.ids[0] > 8) == ([8], True)


def test_scoring_does_not_keep_the_logits_for_backward():
    """16,384 tokens of a vocabulary of 151,936 are 10 GB of logits, and their softmax as much again.

    Guard: they are made again in backward; no tensor of that size is saved.
    """
    model, _ = tiny([chr(i) for i in range(1000, 3000)], seed=1)
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs, _ = token_logprobs(model, [[6, 7]] * 4, [[8] * 100] * 4, chunk=64)
    vocabulary = model.config.vocab_size
    assert max(sizes) <= max(vocabulary * 64, 4 * 101 * 192) and 400 * vocabulary not in sizes
    assert sum(size >= 60 * vocabulary for size in sizes if size != model.embed_tokens.weight.numel()) == 0
    logprobs.sum().backward()


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scaling_is_read_under_its_older_name_too(key):
    """ "type" was the name of "rope_type": unread, a model with scaled positions runs as if they were not.

    Guard: both are read, in rope_scaling and in rope_parameters.
    """
    llama = dict(model_type="llama", vocab_size=30, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    llama |= dict(num_attention_heads=4, num_key_value_heads=2, rope_theta=500.0, max_position_embeddings=64)
    plain = Transformer(llama, {1}, 30)
    scaled = model_config(llama | dict(rope_scaling={key: "linear", "factor": 4.0}))
    assert scaled.rope["rope_type"] == "linear" and scaled.rope["factor"] == 4.0
    assert scaled.rope["rope_theta"] == plain.config.rope["rope_theta"] == 500.0


def test_shards_are_read_at_their_place_whatever_the_number_of_processes(tmp_path, monkeypatch):
    """A run of 8 processes that goes on with 4: read at the wrong offset, weights are shuffled and training goes on.

    Guard: written by 1, 2 or 3 processes and read by 1, 2 or 3, each shard holds its own part of the flat weights.
    """

    def optimizer(rank, world):
        monkeypatch.setattr(train, "rank", lambda: rank)
        monkeypatch.setattr(train, "world", lambda: world)
        monkeypatch.setattr(train.dist, "broadcast", lambda *_: None)
        monkeypatch.setattr(train, "all_gather", lambda *_: None)
        return ShardedAdamW(torch.nn.Linear(7, 1, bias=False), Config())

    flat = torch.arange(1.0, 8.0)
    for writers in (1, 2, 3):
        for rank in range(writers):
            written = optimizer(rank, writers)
            part = torch.zeros(written.shard_size * writers)
            part[:7] = flat
            mine = part[rank * written.shard_size : (rank + 1) * written.shard_size]
            written.master.copy_(mine)
            written.mean.copy_(mine * 10)
            written.square.copy_(mine * 100)
            written.updates = 5
            written.save(str(tmp_path / f"by{writers}"))
        for readers in (1, 2, 3):
            for rank in range(readers):
                read = optimizer(rank, readers)
                read.master.zero_()
                read.load(str(tmp_path / f"by{writers}"), writers)
                first = rank * read.shard_size
                expected = torch.zeros(read.shard_size)
                expected[: max(0, min(7, first + read.shard_size) - first)] = flat[first : first + read.shard_size]
                assert read.updates == 5
                assert torch.equal(read.master, expected), (writers, readers, rank)
                assert torch.equal(read.mean, expected * 10) and torch.equal(read.square, expected * 100)


def test_shared_weights_learn_from_every_agent():
    """--share-weights that trains the first agent's actions only: the control experiment compares something else.

    Guard: the gradient of a shared policy is that of all its agents' actions.
    """
    config = Config(problems=2, samples=2, train_batch=4, lr=1e-2)
    weights = []
    for names in (("A", "B"), ("A",)):
        model = tiny(LETTERS, seed=1)[0]
        policy = Policy(("A", "B"), model, ShardedAdamW(model, config))
        scored = [trained_action([6, 7 + i], [8 + i, 9], name, reward=i % 2) for i in range(4) for name in names]
        metrics = train.update_policy(policy, tiny(LETTERS, seed=1)[0], scored, 1, config)
        assert set(metrics) == {"A", "B"}
        assert [metrics[name]["entropy"] > 0 for name in ("A", "B")] == [True, "B" in names]
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert not torch.equal(*weights)


def test_left_out_actions_count_in_no_denominator():
    """Actions without a verdict have weight 0. In the denominator they would make every other action count less.

    Guard: the gradient is the same with and without them.
    """
    config = Config(problems=2, samples=2, train_batch=4, lr=1e-2, max_grad_norm=1e9)
    norms = []
    for left_out in (0, 3):
        model = tiny(LETTERS, seed=1)[0]
        policy = Policy(("A",), model, ShardedAdamW(model, config))
        scored = [trained_action([6, 7 + i], [8 + i, 9], reward=i % 2) for i in range(4)]
        scored += [trained_action([6], [12 + i], reward=0.0, weight=0.0) for i in range(left_out)]
        norms.append(train.update_policy(policy, tiny(LETTERS, seed=1)[0], scored, 1, config)["A"]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 1e-3


def test_gradients_start_from_zero_in_every_optimizer_step():
    """Gradients of the first optimizer step that stay in the sums push twice.

    Guard: the norm of a second step alone is that of the second of two.
    """
    config = Config(problems=4, samples=1, train_batch=2, lr=1e-12, max_grad_norm=1e9)
    model, reference = tiny(LETTERS, seed=1)[0], tiny(LETTERS, seed=1)[0]
    policy = Policy(("A",), model, ShardedAdamW(model, config))
    norms = []
    original = policy.optimizer.step

    def step(lr):
        norms.append(original(lr))
        return norms[-1]

    policy.optimizer.step = step
    scored = [trained_action([6, 7 + i], [8 + i, 9], update=i // 2, reward=(i % 2) * (1 + i)) for i in range(4)]
    train.update_policy(policy, reference, scored, 1, config)
    first, second = norms
    policy.optimizer.zero_grad()
    train.accumulate(policy, train.micro_batches_of(scored, 1, config), 2, config)
    alone = policy.optimizer.gradient.norm().item()
    assert second == pytest.approx(alone, rel=1e-3) and abs(first - second) > 1e-3


# ---- Turns -------------------------------------------------------------------------------------------------------


def test_a_third_turn_remembers_the_first_two():
    """A second further turn that forgets the first: the agent is trained on half a conversation.

    Guard: its context starts with the second turn's context and reply, which start with the first's.
    """
    tokenizer = tiny_tokenizer(agents.ARITHMETIC_PIECES)
    end = tokenizer.eos_token_id
    first = agents.render(tokenizer, ARITHMETIC.agents[1], {"Solver": "1+2"})
    reply = [*tokenizer("1+")["input_ids"], end]
    second = agents.extend(tokenizer, first, reply, "error")
    again = [*tokenizer("2+")["input_ids"], end]
    third = agents.extend(tokenizer, second, again, "nothing")
    assert third[: len(second) + len(again)] == second + again and second[: len(first) + len(reply)] == first + reply
    text = tokenizer.decode(third[len(first) :])
    turns = "1+<|end|><|user|>error<|end|><|assistant|>2+<|end|><|user|>nothing<|end|><|assistant|>"
    assert text == turns


def test_a_further_turn_shows_the_files_that_are_there_now():
    """An agent that must write a file acts again, and is not told which files there are: it repeats itself.

    Guard: the next context ends with what its program answered and with the list of files.
    """
    tokenizer = tiny_tokenizer(TABLES.pieces)
    agent = TABLES.agents[0]
    episode = Episode(0, Problem("p", "yield, id key"), 0, files=(FileEntry("X_train.npy", 9, ""),))
    episode.handed = agents.handed_values(TABLES, episode.problem, [], episode.files)
    context = agents.render(tokenizer, agent, episode.handed)
    episode.actions.append(Action("Engineer", 0, context, [tokenizer.eos_token_id], [0.0], False, "", "ok", "ok"))
    following = rollout.next_context(agent, episode, 1, tokenizer, Sampling(("t",)))
    assert tokenizer.decode(following[len(context) :]).endswith("ok\nX_train.npy<|end|><|assistant|>")


def test_every_part_of_an_actions_identity_changes_its_draws(monkeypatch):
    """Draws that ignore the turn repeat a failed program word for word; those that ignore the sample make groups of
    equal samples; those that ignore the step repeat the first rollout.

    Guard: the numbers that reach the sampler are those of (stream, problem, sample, agent, turn), for every action.
    """
    seen = []
    tokenizer = tiny_tokenizer(agents.ARITHMETIC_PIECES)
    broken = [*tokenizer("```python\nprint(1\n```")["input_ids"], tokenizer.eos_token_id]

    def scripted(model, contexts, draws, limit, temperature):
        seen.extend(tuple(row) for row in draws)
        return [Completion(broken, [-1.0] * len(broken), False) for _ in contexts]

    class Sandbox:
        limits = agents.Limits()

        def make_workspace(self, files):
            return "nowhere"

        def remove_workspace(self, workspace):
            pass

        def read(self, workspace, name):
            raise FileNotFoundError

        def run(self, code, workspace):
            return agents.Result("error", "", 1, 0.0)

    monkeypatch.setattr(rollout, "sample_as_they_end", as_they_end(scripted))
    problems = [Problem("p", "1", "1", solution="1"), Problem("q", "2", "2", solution="2")]
    models = dict.fromkeys([agent.name for agent in ARITHMETIC.agents])
    expected = set()
    for stream in (("train", 0, 1), ("train", 0, 2), ("train", 1, 1), ("eval", 0)):
        sampling = Sampling(stream, max_new_tokens=5)
        episodes = make_episodes(problems, 2)
        run_episodes(ARITHMETIC, models, tokenizer, episodes, judge.nobody, Sandbox(), sampling)
        for episode in episodes:
            for action in episode.actions:
                identity = (episode.problem.id, episode.sample, action.agent, action.turn)
                expected.add(tuple(uniforms(stream, *identity, 5)))
    assert len(seen) == len(expected) == 4 * 2 * 2 * 4 and set(seen) == expected


@pytest.mark.parametrize("count, samples", [(1, 1), (3, 2), (5, 3)])
def test_shares_are_a_partition_whatever_the_number_of_processes(monkeypatch, count, samples):
    """Shares that overlap or leave an episode out: some count twice, or nobody runs them.

    Guard: together they are all episodes, each once, with the index and sample that one process gives them.
    """
    problems = [Problem(str(i), "q") for i in range(count)]
    alone = [(e.index, e.problem.id, e.sample) for e in make_episodes(problems, samples)]
    assert [index for index, _, _ in alone] == list(range(count * samples))
    for world in (2, 3, 5):
        dealt = []
        for rank in range(world):
            monkeypatch.setattr(rollout, "rank", lambda rank=rank: rank)
            monkeypatch.setattr(rollout, "world", lambda world=world: world)
            dealt += [(e.index, e.problem.id, e.sample) for e in make_episodes(problems, samples)]
        assert sorted(dealt) == alone


# ---- The coach ---------------------------------------------------------------------------------------------------


def test_a_reply_that_the_limit_cut_off_is_no_reply(base, endpoint, monkeypatch):
    """A coach's reply cut off in the middle may end with "SCORE: 1" of "SCORE: 10".

    Guard: what did not end by itself is a Failure, from an API and from a local model.
    """
    coach = api(endpoint)
    for ending, is_failure in (("stop", False), ("length", True)):
        body = {"choices": [{"message": {"content": "SCORE: 1"}, "finish_reason": ending}]}
        endpoint.script = [Status(200, body=body)]
        assert isinstance(coach.ask(QUESTION), Failure) == is_failure
    local = judge.LocalModel(str(base), "cpu", torch.float32)
    ids = local.tokenizer("1+2")["input_ids"]
    assert isinstance(local.reply_of(Completion(ids, [], truncated=True)), Failure)
    assert local.reply_of(Completion(ids, [], truncated=False)) == "1+2"


@pytest.mark.parametrize("score, text", [(10.0001, "10.0001"), (-0.5, "-0.5"), (10.5, "10.5"), (math.nan, "nan")])
def test_scores_out_of_range_are_none(score, text):
    """A score of 10.5 clamped to 10, or scaled to 1.05, is a score that nobody gave.

    Guard: it is no verdict; and one that a coach of one's own gives stops the update.
    """
    assert isinstance(judge.parse_verdict(f"Fine.\nSCORE: {text}", False), Failure)
    action = Action("A", 0, [1], [2], [-1.0], False, "", verdict=judge.Verdict(score, ""))
    with pytest.raises(AssertionError):
        train.reward_of(action, 0.0, "process")
    assert judge.parse_verdict("SCORE: 10", False).score == 10 and judge.parse_verdict("SCORE: 0", False).score == 0


def test_the_model_that_was_saved_is_the_one_that_is_loaded(tmp_path):
    """A loader that fills a tensor it cannot find with noise gives a model that talks."""
    model, tokenizer = tiny(LETTERS, seed=4)
    save(model, tokenizer, str(tmp_path))
    again, _ = load(str(tmp_path))
    pairs = zip(model.named_parameters(), again.named_parameters(), strict=True)
    assert all(name == other and torch.equal(mine, theirs) for (name, mine), (other, theirs) in pairs)


def test_a_program_that_answered_nothing_was_still_run():
    """An empty observation was told to later agents and to the coach as "no program was run".

    Guard: only None means that none was.
    """
    assert agents.shown_observation("") == "" and agents.shown_observation(None) == "no program was run"
    action = Action("Coder", 0, [1], [2], [-1.0], False, "text", observation="")
    assert agents.handed_values(ARITHMETIC, Problem("p", "q"), [action])["Coder_output"] == ""


def test_a_coach_can_be_shown_any_role_and_prompt_that_an_agent_can_have():
    """A role with {problem}, or a prompt with {max_new_tokens}, worked for the agent and crashed its coach.

    Guard: both are filled with what the agent was handed.
    """
    agent = agents.Agent("A", "{problem}, within {max_new_tokens} tokens", "You solve {problem}.")
    case = judge.Case(agents.MATHCHAT, Problem("p", "1+1"), agent, {"problem": "1+1"}, "2", None, "")
    content = judge.coach_messages(case)[1]["content"]
    assert "You solve 1+1." in content and "1+1, within a set number of tokens" in content


def test_an_evaluation_that_was_stopped_is_made_up(base, tmp_path, monkeypatch):
    """A signal in the evaluation after step 2 lost it: the resumed run began with step 3.

    Guard: the evaluation of a step is due before the next one, and is run unless its figures are there.
    """
    shutil.copytree(base, tmp_path / "run" / "base")
    options = ["--steps", "3", "--problems", "2", "--train-batch", "4", "--eval-problems", "2", "--eval-every", "2"]
    original, calls = train.collect, []

    def collect(*arguments):
        calls.append(arguments)
        if len(calls) == 4:  # before, step 1, step 2, and now the evaluation
            raise rollout.Stopped
        return original(*arguments)

    monkeypatch.setattr(train, "collect", collect)
    assert train.main(["--out", str(tmp_path / "run"), *options]) == 130
    assert (tmp_path / "run" / "latest").read_text() == "step_000002\n"
    assert train.main(["--out", str(tmp_path / "run"), "--resume"]) == 0
    written = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in written] == [0, 2, 3]
