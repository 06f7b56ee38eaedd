"""What holds the six files together: each fault here leaves every part in order, and the whole run wrong."""

import contextlib
import copy
import json
import math
import os
import re
import string
from dataclasses import dataclass, field, replace
from itertools import product
from types import SimpleNamespace

import conftest
import pytest
import torch
import transformers
from conftest import api, as_they_end

import agents
import eval
import judge
import model
import rollout
import train
from agents import ARITHMETIC, MATHCHAT, Agent, FileEntry, Pipeline, Problem, Result, Sandbox
from judge import Case, Failure, Grade, LocalModel, Verdict
from model import Completion, tiny, tiny_tokenizer, token_logprobs
from rollout import Action, Episode, Sampling, make_episodes, record, run_episodes
from train import Config, Policy, ShardedAdamW, TrainedAction

LETTERS = "abcdefghijklmnopqrst"  # the vocabulary of the models that are trained here
CHARACTERS = tiny_tokenizer(list(string.printable))  # one token a character: any text comes back from its ids
SUM = Problem("p", "2+3", "5")

# ---- Scripted episodes ---------------------------------------------------------------------------


@dataclass
class ScriptedSampler:
    """Stands in for rollout.sample. The model of an agent is its name; an agent's replies come turn by turn.

    A reply that ends in "~" is one that the limit cut off. The last reply is said again if there are more turns.
    """

    replies: dict  # agent -> texts, one for each turn
    calls: list = field(default_factory=list)  # names of agents, in order
    draws: list = field(default_factory=list)  # the uniform numbers of each action, as tuples

    def __call__(self, agent, contexts, draws, max_new_tokens, temperature):
        turn = min(self.calls.count(agent), len(self.replies[agent]) - 1)
        self.calls.append(agent)
        self.draws += [tuple(row) for row in draws]
        text = self.replies[agent][turn]
        truncated = text.endswith("~")
        ids = CHARACTERS(text.removesuffix("~"))["input_ids"]
        if not truncated:
            ids = ids + [CHARACTERS.eos_token_id]
        return [Completion(ids, [-0.5] * len(ids), truncated) for _ in contexts]


class ScriptedSandbox:
    """Stands in for the sandbox. A program fails if it says so, and leaves the file that it names after "write"."""

    limits = agents.Limits()

    def __init__(self):
        self.files = {}  # workspace -> names

    def make_workspace(self, files):
        workspace = f"workspace {len(self.files)}"
        self.files[workspace] = list(files)
        return workspace

    def run(self, code, workspace):
        self.files[workspace] += re.findall(r"write (\S+)", code)
        status = "error" if "fail" in code else "ok"
        return Result(status, f"<{code.strip()}>", 0, 0.0)

    def list_files(self, workspace):
        return tuple(FileEntry(name, 1, "") for name in sorted(self.files[workspace]))

    def read(self, workspace, name):
        raise FileNotFoundError(name)

    def remove_workspace(self, workspace):
        """There is none."""


def program(text):
    """A reply with one block of code."""
    return f"```python\n{text}\n```"


def one_agent(**options):
    """A pipeline of one agent, which runs programs and sees all that they print."""
    coder = Agent("Coder", "Coder: {problem}", uses_tools=True, **options)
    return Pipeline("one", (coder,), graded_by="answer", show_result=lambda result: result.output)


def play(monkeypatch, pipeline, replies, problems=(SUM,), samples=1, sandbox=None, coach=None):
    """Run a pipeline with scripted replies; returns (episodes, sampler)."""
    sampler = ScriptedSampler(replies)
    monkeypatch.setattr(rollout, "sample_as_they_end", as_they_end(sampler))
    models = {agent.name: agent.name for agent in pipeline.agents}
    sampling = Sampling(("t",), max_new_tokens=8, max_context_tokens=100_000)
    work = (pipeline, models, CHARACTERS, make_episodes(problems, samples), coach or judge.nobody)
    return run_episodes(*work, sandbox or ScriptedSandbox(), sampling), sampler


def text_of(ids):
    """Token ids as text, special tokens included."""
    return CHARACTERS.decode(ids)


# ---- Made-up actions -----------------------------------------------------------------------------


def made_up(agent="A", score=5.0, tokens=3, first=6, update=0, weight=1.0):
    """A TrainedAction with made-up ids."""
    ids = [6 + (first + i) % len(LETTERS) for i in range(tokens)]
    action = Action(agent, 0, [7, 8], ids, [-1.0] * tokens, False, "", verdict=Verdict(score, ""))
    return TrainedAction(action, ("p", agent, 0), update, reward=score / 10, weight=weight)


def new_policy(config, names=("A",)):
    """A policy with an untrained model, the same each time."""
    network, _ = tiny(LETTERS, seed=1)
    return Policy(names, network, ShardedAdamW(network, config))


def logprobs_of(network, scored):
    """log pi of one action's tokens."""
    logprobs, _ = token_logprobs(network, [scored.action.context_ids], [scored.action.ids])
    return logprobs


# ---- The KL penalty ------------------------------------------------------------------------------


def test_the_kl_penalty_pulls_back_to_the_reference():
    """Symptom: with the penalty on, agents drift away from their start faster than without it.

    Cause: the sign of the KL is flipped, in kl_t or where it enters the return.
    Guard: a policy has learned to write one action and to avoid another. With equal scores, what it writes more often
    than the reference gets the lower return and the negative advantage, and the other one the positive.
    """
    config = Config(beta=1.0)
    policy, liked, avoided = new_policy(config), made_up(first=0), made_up(first=10)
    reference = copy.deepcopy(policy.model)
    policy.optimizer.zero_grad()
    (logprobs_of(policy.model, avoided).sum() - logprobs_of(policy.model, liked).sum()).backward()
    policy.optimizer.step(1e-3)

    train.fill_old_and_kl(policy.model, reference, [liked, avoided], 1, config)
    with torch.no_grad():
        for s in (liked, avoided):
            expected = logprobs_of(policy.model, s) - logprobs_of(reference, s)
            assert torch.allclose(s.kl, expected, atol=1e-5)
    assert liked.kl.sum() > 0.1 and avoided.kl.sum() < -0.1, "the policy has not moved"
    train.set_advantages([liked, avoided], config)
    assert liked.advantage[0] < 0 < avoided.advantage[0]
    assert train.returns_to_go(liked.kl, 0.5, 1.0)[0] < 0.5 < train.returns_to_go(avoided.kl, 0.5, 1.0)[0]


# ---- Sampler and scorer against transformers -----------------------------------------------------


def test_a_temperature_divides_the_logits(tmp_path):
    """Symptom: at temperature 0.7 samples are wilder than at 1, and nothing else shows it.

    Cause: the logits are multiplied by the temperature. Sampler and scorer share the line, so that they agree.
    Guard: both are compared with transformers, which opens what we saved: softmax(logits / 0.7).
    """
    network, tokenizer = tiny(LETTERS, seed=3)
    model.save(network, tokenizer, str(tmp_path))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    context, count = [7, 8, 9], 12
    draws = torch.rand(1, count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    network.stop_ids = []  # write on to the limit
    [completion] = model.sample(network, [context], draws, count, temperature=0.7)
    with torch.no_grad():
        logits = theirs(torch.tensor([context + completion.ids])).logits[0, len(context) - 1 : -1]
        scored, _ = token_logprobs(network, [context], [completion.ids], temperature=0.7)
    ids = torch.tensor(completion.ids)
    expected = (logits / 0.7).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)
    assert torch.allclose(scored, expected, atol=1e-4)
    # the tokens are those that this distribution gives for these numbers
    cdf = (logits / 0.7).double().softmax(-1).cumsum(-1)
    assert ids.tolist() == [int((row <= u).sum()) for row, u in zip(cdf, draws[0], strict=True)]


def test_logits_of_bfloat16_weights_are_float32():
    """Symptom: in bfloat16 many tokens have exactly the same probability.

    Cause: logits that are rounded to bfloat16, which has 8 bits, before the softmax.
    Guard: logits and log-probabilities are float32, and finer than bfloat16 could hold.
    """
    network = tiny(LETTERS, seed=1)[0].bfloat16()
    hidden = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = network.logits(hidden)
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9
    logprobs, _ = token_logprobs(network, [[7]], [[8, 9]])
    assert logprobs.dtype == torch.float32


class Backward:
    """Counts the numbers that autograd keeps for the backward pass."""

    def __init__(self):
        self.kept = {}  # address -> numbers

    def keep(self, tensor):
        self.kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)


def test_no_logits_are_kept_for_the_backward_pass(monkeypatch):
    """Symptom: out of memory at the first update of a model with a large vocabulary.

    Cause: the logits are made in chunks, but all chunks are kept for the backward pass.
    Guard: nothing that autograd keeps is as large as a chunk's logits, but the head's weights themselves.
    """
    monkeypatch.setattr(model, "FEW_LOGITS", 0)
    network, _ = tiny([f"w{i:03}" for i in range(994)], seed=1, hidden_size=8, layers=1, heads=1, kv_heads=1)
    assert network.config.vocab_size == 1000
    with Backward() as backward:
        logprobs, _ = token_logprobs(network, [[6]] * 8, [[7] * 10] * 8, chunk=20)
    weights = {parameter.data_ptr() for parameter in network.parameters()}
    largest = max(numbers for address, numbers in backward.kept.items() if address not in weights)
    assert largest < 20 * 1000
    logprobs.sum().backward()  # and gradients can be had all the same
    assert network.embed_tokens.weight.grad.abs().max() > 0


# ---- Rotary positions in older files -------------------------------------------------------------

OLD_SCALINGS = {
    "linear": dict(factor=4.0),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    "yarn": dict(factor=4.0, original_max_position_embeddings=32),
}


@pytest.mark.parametrize("name", OLD_SCALINGS)
def test_rope_scaling_under_its_older_key(name, tmp_path):
    """Symptom: a model with a scaled context talks sense in short prompts and nonsense in long ones.

    Cause: older files name the kind of scaling "type", and a reader that knows "rope_type" alone takes it for none.
    Guard: a file as older versions wrote it gives the logits of transformers.
    """
    sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128)
    scaling = dict(rope_type=name) | OLD_SCALINGS[name]
    config = transformers.LlamaConfig(**sizes, rope_theta=1000.0, rope_scaling=scaling, tie_word_embeddings=True)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in theirs.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path)
    CHARACTERS.save_pretrained(tmp_path)

    written = json.loads((tmp_path / "config.json").read_text())
    written.pop("rope_parameters", None)
    written |= dict(rope_theta=1000.0, rope_scaling=dict(type=name) | OLD_SCALINGS[name])
    (tmp_path / "config.json").write_text(json.dumps(written))
    ours, _ = model.load(str(tmp_path))
    ours.n_tokens = 128
    ids = torch.randint(0, 128, (2, 100))
    with torch.no_grad():
        found = ours.logits(ours(ids, torch.arange(100).expand_as(ids)))
        assert (found - theirs(ids).logits).abs().max() < 1e-3

    # a kind that is not known is refused under the older key as well
    with pytest.raises(agents.InputError, match="rope scaling dynamic"):
        model.model_config(written | dict(rope_scaling=dict(type="dynamic", factor=2.0)))


# ---- The schedule over a whole run ---------------------------------------------------------------


class ScriptedOptimizer:
    """Stands in for the optimizer; keeps the learning rates of the steps that were taken."""

    def __init__(self):
        self.rates = []

    def step(self, lr):
        self.rates.append(lr)
        return 1.0


def rates_of_a_run(monkeypatch, config, updates_with_actions):
    """The learning rates of all optimizer steps of a run, in which these updates of each rollout have an action."""
    monkeypatch.setattr(train, "fill_old_and_kl", lambda *_: None)
    monkeypatch.setattr(train, "set_advantages", lambda *_: None)
    monkeypatch.setattr(train, "accumulate", lambda *_: None)
    monkeypatch.setattr(train, "agent_metrics", lambda *_: {})
    policy = Policy(("A",), None, ScriptedOptimizer())
    for step in range(1, config.steps + 1):
        train.update_policy(policy, None, [made_up(update=update) for update in updates_with_actions], step, config)
    return policy.optimizer.rates


def test_the_schedule_ends_with_the_run_and_not_before(monkeypatch):
    """Symptom: most of a run is trained at the lowest learning rate, or the first step is wasted at a rate of 0.

    Cause: the schedule's total is counted in rollouts, and its place in optimizer steps; or warm-up is off by one.
    Guard: 5 rollouts of 4 optimizer steps are one schedule of 20: 2 steps of warm-up, then the cosine. It is at half
    of its way after half of the other 18, and its last step is the 20th.
    """
    config = Config(lr=1.0, lr_warmup=0.1, lr_final=0.1, steps=5, problems=4, samples=2, train_batch=2)
    rates = rates_of_a_run(monkeypatch, config, range(4))
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * done / 18)) / 2 for done in range(18)]
    assert rates == pytest.approx([0.5, 1.0, *cosine])
    assert rates[2 + 9] == pytest.approx(0.55)
    assert all(earlier > later for earlier, later in zip(rates[2:], rates[3:], strict=False))


def test_an_update_without_actions_takes_no_step_and_the_others_do(monkeypatch):
    """Symptom: an agent that seldom acts moves on old momentum alone, or misses the steps that it should take.

    Cause: an empty update is stepped, or ends the loop, or shifts the schedule.
    Guard: with actions in updates 0 and 2 of 4, there are two steps a rollout, at the rates of these places.
    """
    config = Config(lr=1.0, lr_warmup=0.1, lr_final=0.1, steps=5, problems=4, samples=2, train_batch=2)
    everywhere = rates_of_a_run(monkeypatch, config, range(4))
    assert rates_of_a_run(monkeypatch, config, (0, 2)) == everywhere[::2]
    assert rates_of_a_run(monkeypatch, config, (3,)) == everywhere[3::4]


# ---- Optimizer states of other numbers of processes ----------------------------------------------


def optimizer_of(monkeypatch, process, processes, values):
    """An optimizer with these weights, as process number `process` of `processes` would make it."""
    monkeypatch.setattr(train, "rank", lambda: process)
    monkeypatch.setattr(train, "world", lambda: processes)
    monkeypatch.setattr(train, "all_gather", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_: None)
    layer = torch.nn.Linear(len(values), 1, bias=False)
    layer.weight.data = values[None].clone()
    return ShardedAdamW(layer, Config())


@pytest.mark.parametrize("writers, readers", [(1, 2), (2, 1), (3, 2), (2, 3), (1, 1), (4, 3), (1, 5), (5, 1)])
@pytest.mark.parametrize("size", [10, 7])
def test_shards_are_cut_anew_for_any_number_of_processes(monkeypatch, tmp_path, writers, readers, size):
    """Symptom: a run that goes on with more processes gets worse at once.

    Cause: a process reads the shards from the wrong place, for instance all from their start.
    Guard: each number of the weights and of both moments is where it was, also where nothing divides evenly.
    """
    whole = {"master": torch.arange(1.0, size + 1), "mean": torch.arange(size) / 7, "square": torch.arange(size) + 50.0}
    for process in range(writers):
        optimizer = optimizer_of(monkeypatch, process, writers, whole["master"])
        first, length = process * optimizer.shard_size, optimizer.shard_size
        for name in ("mean", "square"):
            mine = whole[name][first : first + length]
            optimizer.state[name][: len(mine)] = mine
        optimizer.updates = 9
        optimizer.save(str(tmp_path / "A"))

    read = {name: [] for name in whole}
    for process in range(readers):
        optimizer = optimizer_of(monkeypatch, process, readers, torch.zeros(size))
        optimizer.load(str(tmp_path / "A"), writers)
        assert optimizer.updates == 9
        for name in whole:
            read[name].append(getattr(optimizer, name))
    for name, parts in read.items():
        assert torch.cat(parts)[:size].tolist() == whole[name].tolist(), name
        assert torch.cat(parts)[size:].tolist() == [0.0] * (len(torch.cat(parts)) - size)


# ---- Which actions train which weights -----------------------------------------------------------


def acted(index, scores):
    """An episode in which each agent acted once, with these scores."""
    episode = Episode(index, Problem(f"p{index}", "q", "1"), 0)
    for place, (agent, score) in enumerate(scores.items()):
        action = made_up(agent, score, first=5 * place + 2 * index).action
        action.logprobs = [-3.0] * len(action.ids)
        episode.actions.append(action)
    return episode


def trained_step(monkeypatch, config, episodes):
    """One train_step() on these episodes; returns ([(agent, advantages)] as trained, agent -> its weights moved)."""
    trained = []
    accumulate = train.accumulate

    def watched(policy, micro_batches, *rest):
        trained.extend((s.action.agent, s.advantage.tolist()) for batch in micro_batches for s in batch)
        accumulate(policy, micro_batches, *rest)

    monkeypatch.setattr(train, "accumulate", watched)
    monkeypatch.setattr(train, "collect", lambda *_: (episodes, [record(episode) for episode in episodes]))
    start, _ = tiny(LETTERS, seed=1)
    policies = train.make_policies(start, ARITHMETIC, config)
    problems = [episode.problem for episode in episodes]
    run = train.Run(config, ARITHMETIC, problems, [], None, None, None, start, policies, None)
    monkeypatch.setattr(run, "log", lambda *_: None)
    train.train_step(run, 1, contextlib.nullcontext)
    moved = {}
    for name, network in run.models().items():
        pairs = zip(network.parameters(), start.parameters(), strict=True)
        moved[name] = any(not torch.equal(mine, theirs) for mine, theirs in pairs)
    return sorted(trained), moved


# the Solver's actions are all equally good, the Coder's and the Verifier's are not, and the Verifier's are mostly poor
SCORES = [dict(Solver=8.0, Coder=10.0, Verifier=2.0), dict(Solver=8.0, Coder=6.0, Verifier=0.0)]
EXPECTED = [("Coder", [-1.0] * 3), ("Coder", [1.0] * 3), ("Solver", [0.0] * 3), ("Solver", [0.0] * 3)]
EXPECTED += [("Verifier", [-1.0] * 3), ("Verifier", [1.0] * 3)]


@pytest.mark.parametrize("share", [False, True], ids=["weights apart", "weights shared"])
def test_all_actions_train_and_each_agent_is_whitened_alone(monkeypatch, share):
    """Symptom: with --share-weights only the first agent gets better; or an agent learns from how others did.

    Cause: a policy picks the actions of its first agent alone; or advantages are whitened over several agents.
    Guard: the advantages that reach the loss are those of each agent compared with itself, and all of them reach it.
    Weights move where they should, and only there.
    """
    config = Config(share_weights=share, problems=2, samples=1, train_batch=2, beta=0.0)
    trained, moved = trained_step(monkeypatch, config, [acted(i, scores) for i, scores in enumerate(SCORES)])
    assert [agent for agent, _ in trained] == [agent for agent, _ in EXPECTED]
    for (_, advantages), (_, expected) in zip(trained, EXPECTED, strict=True):
        assert advantages == pytest.approx(expected, abs=1e-5)
    assert moved == dict(Solver=share, Coder=True, Verifier=True)


def test_shared_weights_are_one_set_for_all():
    """Symptom: the control experiment trains three sets of weights under the name of one. Guard: there is one."""
    start, _ = tiny(LETTERS, seed=1)
    [shared] = train.make_policies(start, ARITHMETIC, Config(share_weights=True))
    assert shared.agents == ("Solver", "Coder", "Verifier")
    apart = train.make_policies(start, ARITHMETIC, Config())
    assert [policy.agents for policy in apart] == [("Solver",), ("Coder",), ("Verifier",)]
    assert len({id(policy.model) for policy in apart}) == 3


def updated(scored, config):
    """(gradients of each optimizer step, metrics, weights) of an update on these actions."""
    policy = new_policy(config)
    gradients, step = [], policy.optimizer.step

    def watched(lr):
        gradients.append(policy.optimizer.gradient.clone())
        return step(lr)

    policy.optimizer.step = watched
    metrics = train.update_policy(policy, new_policy(config).model, scored, 1, config)["A"]
    return gradients, metrics, policy.optimizer.master


def test_actions_that_are_left_out_change_nothing():
    """Symptom: the more actions are cut off, the smaller the steps of all others; or failures are trained after all.

    Cause: actions of weight 0 count in the denominator, in the mean and std, or in the loss. Adam hides a wrong scale,
    so the gradients are compared.
    Guard: an update with them is bit for bit the one without them.
    """
    config = Config(problems=2, samples=2, train_batch=2)

    def used():
        return [made_up(score=score, first=i, update=i // 2) for i, score in enumerate((2.0, 9.0, 5.0, 6.0))]

    left_out = [made_up(score=0.0, tokens=9, first=i, update=i // 2, weight=0.0) for i in range(4)]
    gradients, metrics, weights = updated(used(), config)
    with_others, metrics_with_others, weights_with_others = updated(used() + left_out, config)
    assert len(gradients) == len(with_others) == 2
    for mine, theirs in zip(gradients, with_others, strict=True):
        assert mine.abs().max() > 0 and torch.equal(mine, theirs)
    assert torch.equal(weights, weights_with_others)
    for name in ("grad_norm", "entropy", "clip_fraction"):
        assert metrics[name] == metrics_with_others[name]
    assert all(s.advantage is None and s.entropy == 0.0 for s in left_out)


def test_gradients_of_one_optimizer_step_are_not_in_the_next():
    """Symptom: later steps of a rollout move ever further.

    Cause: sums of gradients, or the parameters' own, are not set back between optimizer steps.
    Guard: the same micro-batches, while no weight moves, give the same gradient twice.
    """
    config = Config()
    policy, scored = new_policy(config), [made_up(first=0), made_up(first=4)]
    for s in scored:
        s.old, s.advantage = logprobs_of(policy.model, s).detach(), torch.ones(3)
    found = []
    for _ in range(2):
        train.accumulate(policy, [scored], 2, config)
        found.append(policy.optimizer.gradient.clone())
        policy.optimizer.step(0.0)
    assert found[0].abs().max() > 0 and torch.equal(*found)
    assert all(parameter.grad is None for parameter in policy.model.parameters())


# ---- Further turns -------------------------------------------------------------------------------


def test_a_third_turn_remembers_both_earlier_ones(monkeypatch):
    """Symptom: at its third try an agent repeats the mistake of its first.

    Cause: a further turn extends the first context, or renders the prompt again, and forgets what was in between.
    Guard: the third context is the second one, the second reply and its observation; and so it holds both.
    """
    replies = {"Coder": [program("fail 1"), program("fail 2"), program("well")]}
    [episode], _ = play(monkeypatch, one_agent(max_actions=3), replies)
    first, second, third = episode.actions
    assert [action.turn for action in episode.actions] == [0, 1, 2]
    assert second.context_ids[: len(first.context_ids + first.ids)] == first.context_ids + first.ids
    assert third.context_ids[: len(second.context_ids + second.ids)] == second.context_ids + second.ids
    assert text_of(third.context_ids) == (
        "<|user|>Coder: 2+3<|end|><|assistant|>"
        + program("fail 1")
        + "<|end|><|user|><fail 1><|end|><|assistant|>"
        + program("fail 2")
        + "<|end|><|user|><fail 2><|end|><|assistant|>"
    )
    assert text_of(third.ids) == program("well") + "<|end|>"


def test_each_reply_is_ended_once(monkeypatch):
    """Symptom: agents begin their second turn with an empty message, or write on in the first one's.

    Cause: the template's terminator is written behind a reply that has one, or not behind one that was cut off.
    Guard: a whole reply keeps its own, a cut one gets one, and no context has two in a row.
    """
    whole, cut = program("fail 1"), program("fail 2") + " and so~"
    replies = {"Coder": [whole, cut, cut, program("well")]}
    [episode], _ = play(monkeypatch, one_agent(max_actions=4), replies)
    assert [action.truncated for action in episode.actions] == [False, True, True, False]
    last = text_of(episode.actions[-1].context_ids)
    assert last.count("<|end|>") == 1 + 3 + 3  # the prompt, three replies, three observations
    assert "<|end|><|end|>" not in last
    assert last.count(" and so<|end|><|user|>") == 2


def test_who_owes_files_is_told_which_are_there(monkeypatch):
    """Symptom: an agent whose program ended well acts again without a reason, and repeats itself.

    Cause: its further turn shows what the program printed, but not which files there are: it cannot know what lacks.
    Guard: the list as it is after the program stands in the further turn; for agents that owe none there is no list.
    """
    names = agents.show_file_names
    pipeline = replace(one_agent(max_actions=3, must_write=("a.npy", "b.npy")), show_files=names)
    problem = Problem("p", "q", "5", files={"train.csv": b"x"})
    replies = {"Coder": [program("write a.npy"), program("idle"), program("write b.npy")]}
    [episode], _ = play(monkeypatch, pipeline, replies, [problem])
    first, second, third = episode.actions
    assert "csv" not in text_of(first.context_ids)
    assert text_of(second.context_ids).endswith("<|user|><write a.npy>\na.npy train.csv<|end|><|assistant|>")
    assert text_of(third.context_ids).endswith("<|user|><idle>\na.npy train.csv<|end|><|assistant|>")
    assert names(third.before) == "a.npy train.csv" and names(third.after) == "a.npy b.npy train.csv"

    pipeline = replace(one_agent(max_actions=2), show_files=names)
    [episode], _ = play(monkeypatch, pipeline, {"Coder": [program("fail")]}, [problem])
    assert text_of(episode.actions[1].context_ids).endswith("<|user|><fail><|end|><|assistant|>")


# ---- Coaches: what they say, and what it costs ---------------------------------------------------


def case_of(problem=SUM, grade=None):
    """A MathChat action: the Coder's."""
    handed = {"problem": problem.question, "Solver": "7", "Coder": "code", "Coder_output": "7"}
    return Case(MATHCHAT, problem, MATHCHAT.agents[1], handed, "It is 7.", "7", "ok", grade)


QUESTION = [{"role": "user", "content": "?"}]


@pytest.fixture
def cut_off(monkeypatch):
    """From here on the endpoint says of each reply that its limit cut it off."""
    whole = conftest.completion

    def completion(text):
        body = json.loads(whole(text))
        body["choices"][0]["finish_reason"] = "length"
        return json.dumps(body).encode()

    monkeypatch.setattr(conftest, "completion", completion)


def test_a_reply_of_the_api_that_was_cut_off_is_no_verdict(endpoint, cut_off, tmp_path):
    """Symptom: the coach's scores are mostly low, and end in the middle of a thought.

    Cause: a reply that the limit cut off is read as if it were whole: "SCORE: 1" may have become a "SCORE: 10".
    Guard: it is a Failure, which is neither kept in the cache nor free of charge.
    """
    coach = api(endpoint, cache=str(tmp_path), tokens=10)
    [verdict] = judge.judge_by(coach, [case_of()])
    assert isinstance(verdict, Failure) and verdict.kind == "reply"
    assert list(tmp_path.iterdir()) == []
    assert coach.spent == dict(calls=1, tokens=7)
    coach.ask(QUESTION)
    assert coach.ask(QUESTION) == Failure("budget", "2 calls and 14 tokens are spent")
    assert coach.take_usage().counts == dict(calls=2, tokens=14, failures=3)


@pytest.mark.parametrize("truncated", [False, True])
def test_a_reply_of_a_local_coach_that_was_cut_off_is_no_verdict(monkeypatch, tmp_path, truncated):
    """The same of a coach that is run here: only a reply that came to its end is read."""
    network, tokenizer = tiny(list(string.printable), seed=1)
    network.hf_config["max_position_embeddings"] = 100_000
    model.save(network, tokenizer, str(tmp_path))
    coach = LocalModel(str(tmp_path), "cpu", torch.float32, max_new_tokens=9)
    ids = CHARACTERS("SCORE: 1")["input_ids"]
    completion = Completion(ids, [0.0] * len(ids), truncated)
    monkeypatch.setattr(judge, "sample", lambda model, contexts, *_, **__: [completion] * len(contexts))
    [verdict] = judge.judge_by(coach, [case_of()])
    if truncated:
        assert isinstance(verdict, Failure) and verdict.kind == "reply"
    else:
        assert verdict == Verdict(1.0, "")


def test_a_cache_knows_who_was_asked_and_keeps_no_failure(endpoint, tmp_path):
    """Symptom: a new coach gives the old one's scores; or a question that failed once fails for ever.

    Cause: replies are kept under the question alone, or with their failures.
    Guard: another name, address or limit is another question; a Failure is asked for again, and then the reply is kept.
    """

    def coach(**options):
        return api(endpoint, cache=str(tmp_path), **options)

    endpoint.script = ["SCORE: 1", "SCORE: 2", "SCORE: 3", "SCORE: 4", 400, "empty", "SCORE: 5"]
    assert coach().ask(QUESTION) == "SCORE: 1"
    other = coach()
    other.name = "other"
    assert other.ask(QUESTION) == "SCORE: 2"
    assert coach(host="localhost").ask(QUESTION) == "SCORE: 3"
    assert coach(max_tokens=9).ask(QUESTION) == "SCORE: 4"
    again, harder = coach(), [{"role": "user", "content": "harder?"}]
    assert again.ask(QUESTION) == "SCORE: 1"
    assert [getattr(again.ask(harder), "kind", None) for _ in range(2)] == ["refused", "reply"]
    assert [again.ask(harder) for _ in range(2)] == ["SCORE: 5"] * 2
    assert len(endpoint.seen) == 7
    assert again.take_usage().counts == dict(hits=2, failures=2, calls=1, tokens=7)


def test_every_try_is_paid_for_once(endpoint, monkeypatch):
    """Symptom: a budget of 4 calls allows 40, or only 2.

    Cause: tries that fail are not counted, or a call is counted where it starts and where it ends.
    Guard: a budget of 4 is two tries that fail, one reply, and one more; usage counts replies and retries apart.
    """
    monkeypatch.setattr(judge, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: None))
    endpoint.script = [500, 503]
    coach = api(endpoint, calls=4)
    assert [coach.ask(QUESTION) for _ in range(2)] == ["SCORE: 7"] * 2
    assert coach.ask(QUESTION) == Failure("budget", "4 calls and 14 tokens are spent")
    assert len(endpoint.seen) == 4
    assert coach.take_usage().counts == dict(calls=2, tokens=14, retries=2, failures=1)


def test_the_deadline_counts_from_the_first_try(endpoint, monkeypatch):
    """Symptom: a coach that hangs holds up all processes for an hour, although the deadline is three minutes.

    Cause: the deadline is measured from the last try, and every try starts it anew.
    Guard: where each try takes 10 s, a deadline of 35 s leaves room for four tries, the last of which ends past it.
    """
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    def answer(messages):
        now[0] += 10.0
        return 500 if len(endpoint.seen) < 20 else 400  # the tries end, whatever the deadline

    monkeypatch.setattr(judge, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    endpoint.answer = answer
    failure = api(endpoint, deadline=35.0).ask(QUESTION)
    assert isinstance(failure, Failure) and failure.kind == "deadline"
    assert len(endpoint.seen) == 4 and now[0] <= 45.0


def test_scores_at_the_edge():
    """Symptom: a reward just above 1, from a coach that was carried away.

    Cause: the range is checked by rounded numbers, or not at all on one of the two ways in.
    Guard: 0, -0.0 and 10 are scores; what is out of range by a hair is none, in the reader and in the reward alike.
    """
    for text, score in (("10", 10.0), ("10.0", 10.0), ("0", 0.0), ("-0", 0.0), ("-0.0", 0.0), ("9.9999", 9.9999)):
        assert judge.parse_verdict(f"SCORE: {text}", False) == Verdict(score, "")
        assert train.reward_of(made_up(score=score).action, 0.0, "process") == score / 10
    for text in ("10.0001", "-0.0001", "11", "100"):
        assert judge.parse_verdict(f"SCORE: {text}", False).kind == "verdict"
        for kind in ("process", "mixed"):
            with pytest.raises(AssertionError, match="a coach gave"):
                train.reward_of(made_up(score=float(text)).action, 0.0, kind)


@pytest.mark.parametrize("rounds", [["SCORE: 10"], ["well done", "SCORE: 10"]], ids=["at once", "asked again"])
def test_a_ceiling_holds_whenever_the_verdict_comes(rounds):
    """Symptom: some poor submissions have full marks.

    Cause: the outcome bounds the coach's first reply, and not the one that it is asked for after an unreadable one.
    Guard: both are bounded by what the submission was worth, and a lower score stays what it is.
    """
    poor = Problem("1", "Predict y.")
    for said, score in ((rounds, 3), ([*rounds[:-1], "SCORE: 2"], 2)):
        replies = iter(said)

        def ask(conversations, replies=replies):
            return [next(replies) for _ in conversations]

        [verdict] = judge.judge_by(ask, [case_of(poor, Grade(True, 0.3, ceiling=3))])
        assert verdict.score == score
        assert list(replies) == []


# ---- Draws of whole runs -------------------------------------------------------------------------

TWO_AGENTS = replace(
    one_agent(max_actions=2), agents=(*one_agent(max_actions=2).agents, Agent("Verifier", "Verifier: {Coder}"))
)
TRIES = {"Coder": [program("fail")], "Verifier": ["5"]}  # the Coder acts twice


def test_every_action_of_a_rollout_has_draws_of_its_own(monkeypatch):
    """Symptom: an agent's second try is its first one again; or all samples of a problem are alike.

    Cause: the turn, the sample, the problem or the agent does not enter the draws.
    Guard: 2 problems x 2 samples x (2 turns of the Coder, 1 of the Verifier) draw 12 different rows.
    """
    problems = [Problem("p1", "2+3", "5"), Problem("p2", "2+3", "5")]
    episodes, sampler = play(monkeypatch, TWO_AGENTS, TRIES, problems, samples=2)
    assert sum(len(episode.actions) for episode in episodes) == 12
    assert len(sampler.draws) == len(set(sampler.draws)) == 12


def draws_of_a_step(monkeypatch, seed, step):
    """[draws of one training step, draws of an evaluation after it], through the functions that train.py calls."""
    config = Config(seed=seed, problems=2, samples=2, steps=9, max_failures=1.0)
    problems = [Problem("p1", "2+3", "5"), Problem("p2", "2+3", "5")]
    models = {agent.name: agent.name for agent in TWO_AGENTS.agents}
    run = SimpleNamespace(config=config, pipeline=TWO_AGENTS, problems=problems, held_out=problems, policies=[])
    run.coach, run.api = judge.nobody, None
    run.tokenizer, run.sandbox = CHARACTERS, ScriptedSandbox()
    run.models, run.log, run.file = (lambda: models), (lambda *_: None), (lambda name: os.path.join("nowhere", name))
    training, evaluation = ScriptedSampler(TRIES), ScriptedSampler(TRIES)
    monkeypatch.setattr(rollout, "sample_as_they_end", as_they_end(training))
    train.train_step(run, step, contextlib.nullcontext)
    monkeypatch.setattr(rollout, "sample_as_they_end", as_they_end(evaluation))
    train.held_out_figures(run, models, step)
    return [set(training.draws), set(evaluation.draws)]


def test_every_step_and_every_seed_draws_anew(monkeypatch):
    """Symptom: each step samples the same texts, two seeds are one run, or the evaluation repeats the training.

    Cause: the step, the seed or the purpose is not part of the stream.
    Guard: no row of draws is shared between two steps, two seeds, or training and evaluation. But evaluations of one
    seed draw alike after every step: what they differ in is the weights.
    """
    runs = {identity: draws_of_a_step(monkeypatch, *identity) for identity in ((0, 1), (0, 2), (1, 1))}
    training = [runs[identity][0] for identity in runs]
    assert [len(draws) for draws in training] == [12] * 3
    assert len(set().union(*training)) == 36
    assert runs[0, 1][1] == runs[0, 2][1]
    assert runs[0, 1][1].isdisjoint(runs[1, 1][1])
    for _, evaluation in runs.values():
        assert evaluation.isdisjoint(set().union(*training))


# ---- Shares of the work --------------------------------------------------------------------------


def shares_of(monkeypatch, problems, samples, processes):
    """The episodes of each of so many processes."""
    monkeypatch.setattr(rollout, "world", lambda: processes)
    shares = []
    for process in range(processes):
        monkeypatch.setattr(rollout, "rank", lambda process=process: process)
        shares.append(make_episodes(problems, samples))
    return shares


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
@pytest.mark.parametrize("problems, samples", [(1, 1), (2, 2), (4, 3), (7, 2), (10, 1)])
def test_shares_make_up_the_whole(monkeypatch, processes, problems, samples):
    """Symptom: some problems are sampled twice as often as others, some never, as soon as there are several processes.

    Cause: shares that overlap, or that drop what does not divide.
    Guard: together they are the episodes of one process, each once, under the same number; sizes differ by at most 1.
    """
    problems = [Problem(f"p{i}", "q") for i in range(problems)]
    [whole] = shares_of(monkeypatch, problems, samples, 1)
    assert [(e.problem.id, e.sample) for e in whole] == list(product([p.id for p in problems], range(samples)))
    shares = shares_of(monkeypatch, problems, samples, processes)
    dealt = sorted((e.index, e.problem.id, e.sample) for share in shares for e in share)
    assert dealt == [(e.index, e.problem.id, e.sample) for e in whole]
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_records_come_in_the_order_of_their_numbers(monkeypatch):
    """Symptom: episodes.jsonl depends on the number of processes, and two runs cannot be compared line by line.

    Cause: records stay in the order in which processes hand them over.
    Guard: with three processes they come by their number, each with its own problem and sample; and a process gets back
    its own episodes, not the others'.
    """
    problems = [Problem(f"p{i}", "q") for i in range(3)]
    shares = shares_of(monkeypatch, problems, 2, 3)

    def gather(items):
        if isinstance(items[0], dict):
            return [record(episode) for share in shares for episode in share]
        return items

    monkeypatch.setattr(rollout, "gather", gather)
    monkeypatch.setattr(rollout, "run_episodes", lambda *_: None)
    own, records = rollout.collect(None, None, None, problems, 2, None, None, None)
    assert [r["index"] for r in records] == list(range(6))
    assert [(r["problem"], r["sample"]) for r in records] == list(product(("p0", "p1", "p2"), (0, 1)))
    assert [episode.index for episode in own] == [2, 5]  # of the last process


# ---- Figures -------------------------------------------------------------------------------------


def line(problem="p", correct=True, answer="1", opinion=None, score=5.0, **others):
    """A record of an episode with one action."""
    action = dict(agent="A", turn=0, tokens=3, truncated=False, status="", score=score, failure=None, opinion=opinion)
    usual = dict(index=0, problem=problem, sample=0, kind="", answer=answer, correct=correct, quality=float(correct))
    return usual | dict(metrics={}, measures=[], error="", actions=[action]) | others


def test_a_valid_episode_without_a_metric_has_not_failed():
    """Symptom: a system looks worse the more three-class tasks it solves.

    Cause: three classes have no ROC-AUC, and an episode without one is counted as a failed one.
    Guard: it counts in the metrics that its task has, and nowhere in the others.
    """
    two, three = ["accuracy", "f1", "roc_auc"], ["accuracy", "f1"]
    common = dict(kind="classification", answer=None)
    solved = line(measures=two, metrics=dict(accuracy=0.9, f1=0.9, roc_auc=0.9), **common)
    no_auc = line(measures=three, metrics=dict(accuracy=0.8, f1=0.7), **common)
    failed = line(correct=False, measures=two, **common)
    figures = eval.kind_figures([solved, no_auc, no_auc, no_auc, failed])["classification"]
    assert figures["roc_auc"] == pytest.approx(0.9)
    assert figures["fair_roc_auc"] == pytest.approx((0.9 + 0.5) / 2)
    assert figures["fair_accuracy"] == pytest.approx((0.9 + 3 * 0.8 + 0.5) / 5)
    assert figures["fair_f1"] == pytest.approx((0.9 + 3 * 0.7) / 5)
    assert figures["success"] == pytest.approx(4 / 5)
    alone = eval.kind_figures([no_auc])["classification"]
    assert alone["roc_auc"] is None and "fair_roc_auc" not in alone


@pytest.mark.parametrize(
    "answers, share",
    [
        (["1", "1", "2"], 1.0),
        (["1", "2"], 1 / 2),
        (["2", "1"], 1 / 2),
        (["1", "2", "3"], 1 / 3),
        (["3", "2", "1", None], 1 / 3),
        (["1", "2", "2", "1", "3"], 1 / 2),
        (["2", "2", "1"], 0.0),
        ([None, None, "1"], 1.0),
        ([None, None, "2"], 0.0),
        ([None], 0.0),
        ([], 0.0),
    ],
)
def test_votes_with_ties_and_without_answers(answers, share):
    """Symptom: majority accuracy depends on the order of samples, or on how many had no answer.

    Cause: a tie goes to the answer that came first, or None is an answer.
    Guard: of answers that lead together the share that is right counts; "1" is right here.
    """
    assert eval.majority(answers, {"1"}) == pytest.approx(share)


def test_no_figure_listens_to_an_opinion(monkeypatch):
    """Symptom in the official code: accuracy rises although answers get no better: the coach has got kinder.

    Cause: what the coach thinks of the answer is taken for the truth somewhere.
    Guard: with every opinion turned around, and with none at all, rewards and all figures are what they were.
    """

    def figures(opinion):
        """opinion: correct -> what the coach thinks."""
        outcomes = [("p", True, "1"), ("p", False, "2"), ("q", False, "2"), ("q", False, "3"), ("r", True, "1")]
        records = [
            line(problem, correct, answer, opinion(correct), score=7.0 if correct else 4.0, measures=["accuracy"])
            | dict(kind="classification", metrics=dict(accuracy=0.8) if correct else {})
            for problem, correct, answer in outcomes
        ]
        bias = eval.coach_against_truth(records, ["A"])
        compared = eval.compare(records, records[::-1])
        rewards = []
        for kind in ("process", "outcome", "mixed"):
            for correct in (True, False):
                episode = Episode(0, Problem("p", "q", "1"), 0, last_grade=Grade(correct, float(correct)))
                episode.actions = [made_up().action]
                episode.actions[0].verdict = Verdict(4.0, "", opinion(correct))
                rewards += [s.reward for s in train.trained_actions([episode], Config(reward=kind))]
                assert record(episode)["correct"] == correct == bool(record(episode)["quality"])
        return eval.summarise(records, ["A"]), bias, compared, rewards

    truth = figures(lambda correct: correct)
    assert figures(lambda correct: not correct) == truth
    assert figures(lambda correct: None) == truth
    assert truth[0]["accuracy"] == pytest.approx(0.5)
    assert truth[3] == pytest.approx([0.4, 0.4, 1.0, 0.0, 0.7, 0.2])

    # the grade of an episode comes from its reply, whatever the coach says of it
    for reply, correct in (("\\boxed{5}", True), ("\\boxed{6}", False)):
        [episode], _ = play(
            monkeypatch,
            one_agent(coach_sees_truth=True),
            {"Coder": [reply]},
            coach=lambda cases, correct=correct: [Verdict(5, "", not correct) for _ in cases],
        )
        assert episode.actions[0].verdict.opinion is not correct
        assert record(episode)["correct"] is correct and episode.grade.quality == float(correct)


# ---- Which folders are evaluated -----------------------------------------------------------------


def evaluated_folders(monkeypatch, run):
    """system -> agent -> the folder whose model it acts with, and the figures, of eval.py on a run folder."""
    seen = []

    def collect(pipeline, models, tokenizer, problems, samples, *_):
        seen.append(models)
        trained = all("step" in os.path.relpath(folder, run) for folder in models.values())
        return [], [line(problem.id, trained) for problem in problems]

    monkeypatch.setattr(eval, "load", lambda folder, *_: (str(folder), None))
    monkeypatch.setattr(eval, "collect", collect)
    monkeypatch.setattr(rollout, "open_sandbox", lambda *_: contextlib.nullcontext())
    options = eval.option_parser().parse_args(["--run", str(run), "--problems", "4"])
    figures = eval.evaluate_systems(options, eval.run_setup(str(run)), torch.device("cpu"))
    return [{name: os.path.relpath(folder, run) for name, folder in models.items()} for models in seen], figures


@pytest.mark.parametrize("latest, folders", [(12, (3, 12)), (3, (3, 12)), (3, (3,))])
def test_each_agent_is_evaluated_with_its_own_last_weights(monkeypatch, tmp_path, latest, folders):
    """Symptom: training seems to change nothing, or one agent's change shows for all.

    Cause: the base model is evaluated twice; every agent gets the first one's folder; or the folder is not that of
    `latest`, which alone is known to be complete.
    Guard: the base for all agents first, then each agent's own folder of the step that `latest` names; figures and
    difference say so.
    """
    (tmp_path / "config.json").write_text(json.dumps(train.asdict(Config(out=str(tmp_path)))))
    for step, name in product(folders, ("Solver", "Coder", "Verifier")):
        (tmp_path / f"step_{step:06d}" / name).mkdir(parents=True)
    (tmp_path / "latest").write_text(f"step_{latest:06d}\n")
    (base, trained), figures = evaluated_folders(monkeypatch, tmp_path)
    assert base == dict.fromkeys(("Solver", "Coder", "Verifier"), "base")
    assert trained == {name: os.path.join(f"step_{latest:06d}", name) for name in ("Solver", "Coder", "Verifier")}
    assert figures["base"]["accuracy"] == 0.0 and figures["trained"]["accuracy"] == 1.0
    assert figures["difference"]["accuracy"] == 1.0


# ---- Problems and their truth --------------------------------------------------------------------

BUILT_IN = [pipeline for pipeline in agents.PIPELINES.values() if pipeline.problems]


@pytest.mark.parametrize("pipeline", BUILT_IN, ids=lambda pipeline: pipeline.name)
def test_held_out_problems_are_not_trained_on(pipeline):
    """Symptom: held-out accuracy is as high as that of training, and new problems are not solved.

    Cause: training reads the held-out problems, or the evaluation those to train on.
    Guard: train.py and eval.py agree about which are which, and no text or right solution is on both sides.
    """
    config = Config(pipeline=pipeline.name, eval_problems=30)
    problems, evaluation = train.read_problems(config)
    setup = SimpleNamespace(pipeline=pipeline, eval=())
    options = SimpleNamespace(data=[], problems=30)
    [by_eval] = eval.read_problems(options, setup).values()
    assert evaluation == by_eval and len(evaluation) == 30
    assert len(problems) > 500
    solutions = {str(problem.solution) for problem in problems}
    assert solutions.isdisjoint(str(problem.solution) for problem in evaluation)
    assert {problem.id for problem in problems}.isdisjoint(problem.id for problem in evaluation)
    assert not any(agents.is_held_out(key_of(problem)) for problem in problems)
    assert all(agents.is_held_out(key_of(problem)) for problem in evaluation)


def key_of(problem):
    """The text by which a problem belongs to one side."""
    return problem.solution if isinstance(problem.solution, str) else problem.question


SHOW_ALL = program("import os\nfor name in sorted(os.listdir('.')):\n    print(name, open(name).read())")


def leaks(text, problem):
    """Does a text hold the truth of a problem? Of a data task: the id and the value of a test row in one line."""
    if problem.answer_key is None:
        return any(secret in text for secret in (problem.answer, problem.solution))
    truths = dict(row.split(",") for row in problem.answer_key.csv.decode().splitlines()[1:])
    rows = [re.split(r"[\s,]+", row.strip()) for row in text.splitlines()]
    return any(cell in truths and truths[cell] in row for row in rows for cell in row)


@pytest.mark.parametrize("pipeline", BUILT_IN, ids=lambda pipeline: pipeline.name)
def test_no_agent_can_find_the_truth(monkeypatch, pipeline):
    """Symptom: accuracy is 100% after a few steps, and the programs read a file, or the prompt, for the answer.

    Cause: the answer is in a workspace, in what an agent is handed, or in what it sees at a further turn.
    Guard: every agent that has the tool prints all files that it can find, and is shown all of it. The truth is in no
    context, in no output, and in nothing that was handed on.
    """
    problems = [*pipeline.problems("train")[:3], *pipeline.problems("held-out")[:2]]
    if pipeline.graded_by == "answer":  # numbers that stand nowhere by chance
        problems = [replace(problem, answer="98765", solution="54321+44444") for problem in problems]
    replies = {agent.name: [SHOW_ALL if agent.uses_tools else "1+1"] for agent in pipeline.agents}
    everything = replace(pipeline, show_result=lambda result: result.output)
    with Sandbox(timeout=60.0) as sandbox:
        episodes, _ = play(monkeypatch, everything, replies, problems, sandbox=sandbox)
    for episode in episodes:
        assert len(episode.actions) >= len(pipeline.agents) and not episode.error
        handed = "\n".join(str(value) for value in episode.handed.values())
        assert not leaks(handed, episode.problem), f"prompts may show {handed}"
        for action in episode.actions:
            for text in (text_of(action.context_ids), action.observation or ""):
                assert not leaks(text, episode.problem), f"{action.agent} sees {text}"
            assert action.status in ("", "ok"), action.observation
    if pipeline.graded_by == "submission":
        last = episodes[0].actions[-1]
        assert "test.csv" in last.observation and "train.csv" in text_of(last.context_ids)
        assert leaks(problems[0].answer_key.csv.decode(), problems[0]), "the check cannot fail"


# ---- Going on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("done", [0, 1, 4, 6])
def test_a_run_goes_on_with_the_step_after_the_saved_one(monkeypatch, tmp_path, done):
    """Symptom: after --resume one step is trained twice, or left out.

    Cause: the run starts at the step that was saved, not behind it.
    Guard: a run of 6 steps takes exactly those that are missing, and saves at the same steps as a run in one go.
    """
    steps, saved = [], []

    def train_step(run, step, interruptible):
        steps.append(step)
        return dict(accuracy=0.0, agents={"A": dict(score=None, kl=0.0)})

    monkeypatch.setattr(train, "train_step", train_step)
    run = SimpleNamespace(config=Config(steps=6, save_every=4, out=str(tmp_path)), log=lambda *_: None)
    run.save = saved.append
    assert train.train_until_stopped(run, done)
    assert steps == list(range(done + 1, 7))
    assert saved == [step for step in (4, 6) if step > done]


@pytest.mark.parametrize("signalled", [True, False], ids=["stopped", "crashed"])
def test_resume_goes_by_the_checkpoint(monkeypatch, tmp_path, signalled):
    """The same through the command: what is saved, what is read back, and where the loop begins.

    A signal in step 3 saves step 2; a crash in step 4 leaves the checkpoint of step 2 as well. Both runs go on with
    step 3, and each step up to 6 is in the log once.
    """
    model.save(*tiny(list(string.printable), seed=1), str(tmp_path / "model"))
    steps = []

    def train_step(run, step, interruptible):
        steps.append(step)
        if steps == [1, 2, 3] and signalled:
            raise train.Stopped
        if steps == [1, 2, 3, 4] and not signalled:
            raise RuntimeError("the power is gone")
        return dict(step=step, accuracy=0.0, agents={"A": dict(score=None, kl=0.0)})

    monkeypatch.setattr(train, "train_step", train_step)
    out = str(tmp_path / "run")
    options = ["--model", str(tmp_path / "model"), "--steps", "6", "--save-every", "2", "--eval-problems", "0"]
    if signalled:
        assert train.main([*options, "--out", out]) == 130
    else:
        with pytest.raises(RuntimeError, match="the power is gone"):
            train.main([*options, "--out", out])
    assert eval.latest_checkpoint(out) == "step_000002"
    before = len(steps)
    assert train.main(["--out", out, "--resume"]) == 0
    assert steps[before:] == [3, 4, 5, 6]
    assert [logged["step"] for logged in rollout.read_log(os.path.join(out, "metrics.jsonl"))] == [1, 2, 3, 4, 5, 6]
    assert eval.latest_checkpoint(out) == "step_000006"
