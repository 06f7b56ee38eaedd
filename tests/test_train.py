"""train.py: advantages, loss, optimizer and schedule against numbers worked by hand; and what must not change them."""
import json
import math
import os

import pytest
import torch

import judge
import model
import train
from agents import InputError, Problem, Table
from judge import Failure, Verdict
from rollout import Action, Episode
from train import Config, Sample


def action(agent="A", tokens=3, score=10.0, context=2, truncated=False, logprob=-1.0, turn=0):
    verdict = Failure("timeout", "late") if score is None else Verdict(score, "")
    ids = [6 + i % 20 for i in range(tokens)]
    return Action(agent, turn, [7] * context, ids, [logprob] * tokens, truncated, "", verdict=verdict)


def sample(reward, kl, weight=1.0, group=("p", "A", 0), batch=0):
    s = Sample(action(tokens=len(kl)), group, batch, reward, weight)
    s.kl = torch.tensor(kl)
    return s


def close(tensors, numbers):
    return all(a == pytest.approx(b, abs=1e-6) for a, b in zip([t.tolist() for t in tensors], numbers, strict=True))


# ---- Rewards and advantages ------------------------------------------------------------------------------------------------


def test_rewards_lie_between_0_and_1():
    """Official code: score / 10 in one domain, raw 0 to 10 in the other, and so a ten times weaker KL penalty."""
    a = action(score=7)
    assert train.reward_of(a, True, "process") == 0.7
    assert train.reward_of(a, True, "outcome") == 1.0 and train.reward_of(a, False, "outcome") == 0.0
    assert train.reward_of(a, True, "mixed") == pytest.approx(0.85)
    with pytest.raises(AssertionError, match="a coach gave"):
        train.reward_of(action(score=11), True, "process")
    with pytest.raises(AssertionError, match="a coach gave"):
        train.reward_of(action(score=math.nan), True, "process")


def test_truth_stays_out_of_process_rewards():
    """The paper's reward is the coach's score alone; whether the answer is right must not move it."""
    for score in (0, 4, 10):
        a = action(score=score)
        assert train.reward_of(a, True, "process") == train.reward_of(a, False, "process")


def test_the_kl_penalty_is_in_the_reward_of_each_token():
    """FAULT 27. beta = 0.1, kl = (1, -2, 3), R = 0.5. r = (-0.1, 0.2, -0.3 + 0.5), G = (0.3, 0.4, 0.2). The k1 estimate
    may be negative: it is unbiased, and nothing is clamped."""
    returns = train.returns_to_go(torch.tensor([1.0, -2.0, 3.0]), 0.5, 0.1)
    assert returns.tolist() == pytest.approx([0.3, 0.4, 0.2])


def test_whitening_over_all_tokens_of_all_actions():
    """REINFORCE++ by hand, beta = 0: one action of 1 token with R = 1, one of 3 tokens with R = 0. Over the four tokens
    the mean is 1/4 and the std sqrt(3)/4, so A = sqrt(3) and -1/sqrt(3). (Over the two actions it would be 1 and -1.)"""
    samples = [sample(1.0, [0.0]), sample(0.0, [0.0, 0.0, 0.0])]
    train.set_advantages(samples, Config(beta=0.0))
    assert close([s.advantage for s in samples], [[3**0.5], [-(3**-0.5)] * 3])


def test_agents_are_whitened_apart(monkeypatch):
    """FAULT 4. Symptom: an agent whose coach is generous learns that all it does is good. Guard: update() whitens each
    agent's samples on their own, also under --share-weights."""
    seen = []
    monkeypatch.setattr(train, "set_kl", lambda *_: None)
    monkeypatch.setattr(train, "set_advantages", lambda samples, config: seen.append([s.action.agent for s in samples]))
    policy = train.Policy(("A", "B"), None, None)
    samples = [sample(1.0, [0.0], weight=0.0) for _ in range(2)]
    samples[1].action.agent = "B"
    train.update(policy, None, samples, 0, Config())
    assert seen == [["A"], ["B"]]


def test_no_spread_gives_no_advantage():
    """FAULTS 24, 25. Symptom: nan from a batch of equal rewards, or a spread of 1e-7 blown up to advantages of 2.
    Guard: population std, and a spread below 1e-4 counts as none."""
    for values in ([0.5, 0.5], [0.5, 0.5 + 1e-7], [0.5]):
        assert close(train.whiten([torch.tensor([v]) for v in values]), [[0.0]] * len(values))
    assert train.whiten([]) == []
    for kind in ("grpo", "rloo"):
        assert train.compare_in_groups([sample(0.3, [0.0])], kind) == [0.0]


def test_groups_by_hand():
    """Rewards 1, 0, 0.5 in one group: mean 0.5, std sqrt(1/6); the mean of the others is 0.25, 0.75, 0.5. A second group
    (another agent on the same problem) has a mean of its own."""
    samples = [sample(r, [0.0]) for r in (1.0, 0.0, 0.5)]
    samples += [sample(r, [0.0], group=("p", "B", 0)) for r in (0.9, 0.7)]
    grpo = train.compare_in_groups(samples, "grpo")
    assert grpo == pytest.approx([6**0.5 / 2, -(6**0.5) / 2, 0.0, 1.0, -1.0])
    assert train.compare_in_groups(samples, "rloo") == pytest.approx([0.75, -0.75, 0.0, 0.2, -0.2])
    train.set_advantages(samples, Config(advantage="rloo", beta=0.0))
    assert samples[0].advantage.tolist() == pytest.approx([0.75])


def test_truncated_and_failed_actions_count_on_neither_side():
    """FAULTS 23, 32. Symptom: masked actions still move mean and std (official code), or failures are trained as a 5.
    Guard: weight 0 leaves an action out of the statistics and of the loss; both are counted in the metrics."""
    episode = Episode(0, Problem("p", "q", "1"), 0)
    episode.actions = [action(score=10), action(score=2), action(score=0, truncated=True), action(score=None)]
    samples = train.make_samples([episode], Config())
    assert [s.weight for s in samples] == [1.0, 1.0, 0.0, 0.0]
    for s in samples:
        s.kl = torch.zeros(3)
    train.set_advantages(samples, Config())
    assert close([s.advantage for s in samples[:2]], [[1.0] * 3, [-1.0] * 3])
    kept = train.make_samples([episode], Config(mask_truncated=False))
    assert [s.weight for s in kept] == [1.0, 1.0, 1.0, 0.0]
    outcome = train.make_samples([episode], Config(reward="outcome"))  # needs no verdict
    assert [s.weight for s in outcome] == [1.0, 1.0, 0.0, 1.0]


def test_a_failing_coach_stops_the_run():
    """FAULT 32: past --max-failures the remaining verdicts are no fair sample of the actions."""
    bad, good = dict(failure="timeout: late"), dict(failure=None)
    records = [dict(actions=[bad, good, good, good])]
    assert not train.too_many_failures(records, Config(max_failures=0.25))
    sentence = train.too_many_failures(records, Config(max_failures=0.2))
    assert sentence == "the coach failed on 1 of 4 actions, e.g. timeout: late"


# ---- Loss ------------------------------------------------------------------------------------------------------------------


def test_the_loss_by_hand():
    """Four tokens, rho = 1, 2, 2, 0.5, A = 1, 1, -1, -1, clip 0.2: min(1, 1), min(2, 1.2), min(-2, -1.2), min(-0.5, -0.8),
    so -mean = -(1 + 1.2 - 2 - 0.8) / 4 = 0.15; gradients flow through the unclipped tokens 1 and 3 only."""
    rho = torch.tensor([1.0, 2.0, 2.0, 0.5])
    logprobs = rho.log().requires_grad_()
    loss, ratio = train.policy_loss(
        logprobs, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.full((4,), 0.25), 0.2
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.15) and torch.allclose(ratio, rho)
    assert logprobs.grad.tolist() == pytest.approx([-0.25, 0.0, 0.5, 0.0])


def test_a_nan_of_weight_zero_stays_out():
    """FAULT 24: 0 * nan is nan, in the loss and in the gradient."""
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    advantages, weights = torch.tensor([1.0, math.nan]), torch.tensor([1.0, 0.0])
    loss, _ = train.policy_loss(logprobs, logprobs.detach(), advantages, weights, 0.2)
    assert loss.item() == pytest.approx(-1.0)


def make_batch():
    """Samples of unlike lengths with advantages, two optimizer steps' worth."""
    samples = []
    for i, tokens in enumerate([1, 5, 2, 9, 3, 1]):
        s = Sample(action(tokens=tokens, context=2 + i), ("p", "A", 0), 0, 0.5, 1.0)
        s.kl, s.advantage = torch.zeros(tokens), torch.linspace(-1, 1, tokens) + i / 5
        samples.append(s)
    return samples


def gradient_of(budget, samples, parts=1, actions=6):
    """The summed gradients with a micro-batch budget, samples dealt to `parts` processes one after another."""
    network, _ = model.tiny([*"abcdefghijklmnopqrst"], seed=1)
    policy = train.Policy(("A",), network, train.ShardedAdamW(network, Config()))
    total = 0
    for part in range(parts):
        train.accumulate(policy, samples[part::parts], actions, Config(micro_batch_tokens=budget))
        total = total + policy.optimizer.gradient
    return total


def test_micro_batches_and_ranks_do_not_change_the_gradient():
    """FAULT 3. Symptom: results depend on the number of GPUs and on accumulation. Cause: a mean of means. Guard: every
    token's weight comes from the global number of actions, so any split gives the same sum."""
    whole = gradient_of(10_000, make_batch())
    assert whole.abs().max() > 1e-3
    for budget, parts in ((1, 1), (20, 1), (10_000, 2), (20, 4), (1, 6), (1, 9)):  # the last with idle processes
        assert torch.allclose(gradient_of(budget, make_batch(), parts), whole, atol=1e-6), (budget, parts)


def test_the_loss_is_a_mean_over_actions_of_means_over_tokens():
    """Checked against autograd on the formula as the paper writes it, one action at a time."""
    network, _ = model.tiny([*"abcdefghijklmnopqrst"], seed=1)
    total = 0
    for s in make_batch():
        logprobs, _ = model.token_logprobs(network, [s.action.context_ids], [s.action.ids])
        ratio = (logprobs - torch.tensor(s.action.logprobs)).exp()
        total = total - torch.minimum(ratio * s.advantage, ratio.clamp(0.8, 1.2) * s.advantage).mean() / 6
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in network.parameters()])
    assert torch.allclose(gradient_of(10_000, make_batch()), expected, atol=1e-6)


def test_packing_keeps_to_the_budget():
    """FAULT 28. Symptom: out of memory now and then. Cause: one long row pads all others over the budget. Guard: no
    micro-batch over it, padding included, but a single row that is longer by itself; and every sample is in one."""
    lengths = [5, 60, 7, 7, 30, 2, 2, 2, 90, 31]
    samples = [Sample(action(tokens=n, context=0), (), 0, 0.0, 1.0) for n in lengths]
    batches = train.pack(samples, 64)
    assert sorted(len(s.action.ids) for batch in batches for s in batch) == sorted(lengths)
    for batch in batches:
        assert len(batch) * max(len(s.action.ids) for s in batch) <= 64 or len(batch) == 1
    assert len(batches) == 4
    assert train.pack([], 64) == []


# ---- Optimizer ---------------------------------------------------------------------------------------------------------------


def one_parameter(value, dtype=torch.float32):
    network = torch.nn.Linear(len(value), 1, bias=False)
    network.weight.data = torch.tensor([value], dtype=dtype)
    return network


def step(optimizer, gradient, lr):
    optimizer.zero_grad()
    optimizer.gradient += torch.tensor(gradient)
    return optimizer.step(lr)


def test_the_optimizer_is_adamw():
    """Ten steps against torch.optim.AdamW, clipping and weight decay included."""
    ours, theirs = one_parameter([1.0, -2.0, 3.0]), one_parameter([1.0, -2.0, 3.0])
    config = Config(weight_decay=0.1, max_grad_norm=1.0, adam_eps=1e-8)
    optimizer = train.ShardedAdamW(ours, config)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for i in range(10):
        gradient = [math.sin(i), 2.0 * math.cos(i), 0.1]
        theirs.weight.grad = torch.tensor([gradient])
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        assert step(optimizer, gradient, 0.1) == pytest.approx(expected.item())
        reference.step()
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-6)


def test_bfloat16_weights_move_at_the_papers_learning_rate():
    """FAULT 14. Symptom: rewards never rise in bfloat16 at lr 1e-6. Cause: the update rounds to nothing. Guard: float32
    master weights. 99% of them move at every step, and the rounded ones follow."""
    torch.manual_seed(0)
    network = torch.nn.Linear(100, 100, bias=False).bfloat16()
    start = network.weight.detach().clone()
    optimizer = train.ShardedAdamW(network, Config())
    masters = optimizer.master.clone()
    gradient = torch.randn(10_000).tolist()
    for _ in range(20):
        before = optimizer.master.clone()
        step(optimizer, gradient, 1e-6)
        assert (optimizer.master != before).float().mean() > 0.99
    assert (network.weight != start).float().mean() < 0.2  # most rounded weights have not got anywhere yet
    for _ in range(2000):
        step(optimizer, gradient, 1e-6)
    moved = (network.weight - start).abs().max().item()
    assert moved > 1e-3 and (optimizer.master - masters).abs().max() == pytest.approx(2020e-6, rel=0.1)


def test_a_gradient_that_is_not_finite_stops_the_run_and_no_weight_moves():
    """FAULT 24: one nan, and Adam's moments are nan for ever."""
    network = one_parameter([1.0, 2.0])
    optimizer = train.ShardedAdamW(network, Config())
    assert math.isnan(step(optimizer, [1.0, math.nan], 0.1))
    assert network.weight.tolist() == [[1.0, 2.0]] and optimizer.updates == 0


def test_which_gradient_was_not_finite_is_said(monkeypatch):
    network, _ = model.tiny([*"abcdefghijklmnopqrst"], seed=1)
    policy = train.Policy(("A",), network, train.ShardedAdamW(network, Config()))
    samples = make_batch()
    samples[0].action.logprobs = [math.nan] * len(samples[0].action.ids)
    monkeypatch.setattr(train, "set_advantages", lambda *_: None)
    with pytest.raises(train.RunError, match="step 7: a gradient of A is not finite"):
        train.update(policy, network, samples, 6, Config())


def test_learning_rate_by_hand():
    """Official cosine climbs back after its end. lr 1, 10 steps, 2 of warm-up, final 0.1: half, full, then the cosine."""
    c = Config(lr=1.0, lr_warmup=0.2, lr_final=0.1)
    rates = [train.learning_rate(u, 10, c) for u in range(30)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[4] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 0.25)) / 2)
    assert rates[10:] == [pytest.approx(0.1)] * 20
    assert train.learning_rate(0, 1, Config(lr=1.0)) == 1.0


# ---- Data order, configuration -------------------------------------------------------------------------------------------------


def test_the_order_of_problems_is_a_function_of_seed_and_step():
    """FAULT 29. Symptom: a resumed run repeats or skips problems. Guard: nothing to remember; every pass takes each
    problem once, in another order."""
    problems = [Problem(str(i), "q") for i in range(12)]
    first = [train.problems_of_step(problems, step, 4, seed=0) for step in range(6)]
    by_number = lambda part: sorted(sum(part, []), key=lambda problem: int(problem.id))
    assert by_number(first[:3]) == problems == by_number(first[3:])
    assert first[:3] != first[3:] and first[4] == train.problems_of_step(problems, 4, 4, seed=0)
    assert first != [train.problems_of_step(problems, step, 4, seed=1) for step in range(6)]


def test_every_step_holds_both_kinds_of_data_tasks():
    """Stratified batches: 34 regressions and 30 classifications, 16 a step, never 16 of a kind or an odd mixture."""
    tables = {kind: Table(kind, "id", ("y",), b"", b"", b"") for kind in ("regression", "classification")}
    problems = [Problem(str(i), "q", table=tables["regression" if i < 34 else "classification"]) for i in range(64)]
    for step in range(8):
        batch = train.problems_of_step(problems, step, 16, seed=0)
        assert len(set(batch)) == 16 and 8 <= sum(p.table.kind == "regression" for p in batch) <= 9


@pytest.mark.parametrize(
    "options, message",
    [
        (["--pipeline", "chess"], "no preset or pipeline 'chess'"),
        (["--preset", "chess"], "no preset or pipeline 'chess'"),
        (["--steps", "0"], "--steps must be over 0, not 0"),
        (["--lr", "nan"], "--lr must be over 0"),
        (["--beta", "-1"], "--beta must be 0 or more"),
        (["--max-failures", "3"], "--max-failures must be in 0 to 1"),
        (["--advantage", "grpo", "--samples", "1"], "compares samples"),
        (["--pipeline", "mathchat"], "needs a model"),
        (["--resume", "--out", "no/such/run"], "is not a run folder"),
    ],
)
def test_bad_options_are_one_sentence(options, message):
    with pytest.raises(InputError, match=message) as error:
        train.read_config(options)
    assert "\n" not in str(error.value)


def test_every_field_of_the_config_is_an_option_with_help(capsys):
    with pytest.raises(SystemExit):
        train.read_config(["--help"])
    shown = capsys.readouterr().out
    for f in train.fields(Config):
        assert train.option(f.name) in shown
    config = train.read_config(["--no-mask-truncated", "--share-weights", "--reward", "mixed", "--adam-beta2", "0.9"])
    assert (config.mask_truncated, config.share_weights, config.reward, config.adam_beta2) == (False, True, "mixed", 0.9)


def test_the_mathchat_preset_has_the_papers_numbers():
    """32 problems x 2 samples, 16 episodes an optimizer step, 128 rollouts, and the schedule of the paper."""
    c = Config(**train.PRESETS["mathchat"])
    assert (c.problems, c.samples, c.train_batch, c.steps, c.lr, c.beta, c.clip) == (32, 2, 16, 128, 1e-6, 0.01, 0.2)
    assert (c.adam_beta1, c.adam_beta2, c.weight_decay, c.max_grad_norm, c.lr_warmup, c.lr_final) == (
        0.9, 0.95, 0.0, 1.0, 0.03, 0.1)  # fmt: skip
    assert (c.max_new_tokens, c.max_context_tokens, c.temperature, c.mask_truncated) == (4096, 24_576, 1.0, True)


# ---- Files ---------------------------------------------------------------------------------------------------------------------


def test_logs_are_cut_at_the_checkpoint(tmp_path):
    """FAULT 29: lines written after the last checkpoint would appear twice; the last one may be torn."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in (1, 2, 3)) + '{"step": 4, "accu')
    train.cut_log(str(path), 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("moment", ["shards", "rename", "latest"])
def test_a_crash_while_saving_leaves_the_last_checkpoint(tmp_path, monkeypatch, moment):
    """FAULT 30. Symptom: a run cannot resume: its only checkpoint is half written. Guard: written beside, renamed,
    `latest` last; whichever step the crash comes before, the earlier checkpoint is found and loads."""
    network, tokenizer = model.tiny(["a"])
    policies = [train.Policy(("A",), network, train.ShardedAdamW(network, Config()))]
    train.save_checkpoint(str(tmp_path), 1, policies, tokenizer)
    saved = policies[0].optimizer.master.clone()
    policies[0].optimizer.master += 1.0

    def crash(*args, **kwargs):
        raise KeyboardInterrupt

    if moment == "latest":
        original = train.write_atomically
        monkeypatch.setattr(train, "write_atomically", lambda p, t: crash() if p.endswith("latest") else original(p, t))
    else:
        monkeypatch.setattr(*{"shards": (model, "save"), "rename": (os, "rename")}[moment], crash)
    with pytest.raises(KeyboardInterrupt):
        train.save_checkpoint(str(tmp_path), 2, policies, tokenizer)
    monkeypatch.undo()
    assert train.load_checkpoint(str(tmp_path), policies) == 1
    assert torch.equal(policies[0].optimizer.master, saved)
    train.save_checkpoint(str(tmp_path), 2, policies, tokenizer)  # and what the crash left is in nobody's way
    assert train.load_checkpoint(str(tmp_path), policies) == 2


def test_a_damaged_checkpoint_is_one_sentence(tmp_path):
    network, tokenizer = model.tiny(["a"])
    policies = [train.Policy(("A",), network, train.ShardedAdamW(network, Config()))]
    train.save_checkpoint(str(tmp_path), 1, policies, tokenizer)
    (tmp_path / "step_000001" / "optimizer" / "A-0-of-1.safetensors").write_bytes(b"rubbish")
    with pytest.raises(InputError, match="cannot be read"):
        train.load_checkpoint(str(tmp_path), policies)


def test_mismatch_shows_a_sampler_that_disagrees_with_the_scorer():
    """FAULT 11: the first optimizer step of every rollout compares both sides; a stale or foreign log-probability shows."""
    rows = [(0, 3, 0.3, dict(entropy=1.0, clipped=0, ratio=1.5, off=0.405)), (1, 3, 0.0, dict(entropy=2.0, clipped=3, ratio=9.0, off=2.2)),
            (0, 2, -0.1, None)]  # fmt: skip
    m = train.agent_metrics(rows)
    assert m["mismatch"] == 0.405 and m["ratio_max"] == 9.0
    assert m["kl"] == pytest.approx(0.2 / 8) and m["entropy"] == 0.5 and m["clip_fraction"] == 0.5
    assert judge.Failure("a", "b") != judge.Verdict(1, "")
