"""train.py: advantages, loss, optimizer and schedule against numbers worked by hand, and what must not change them."""

import json
import math
import os
from types import SimpleNamespace

import pytest
import torch

import agents
import train
from agents import ARITHMETIC, InputError, Problem
from judge import Failure, Grade, Verdict
from model import tiny, token_logprobs
from rollout import Action, Episode
from train import Config, Policy, RunError, ShardedAdamW, TrainedAction

LETTERS = "abcdefghijklmnopqrst"  # the vocabulary of the models here


def action(agent="A", tokens=3, score=10.0, context=2, truncated=False):
    """An action with made-up ids. score: the coach's, None where its verdict failed."""
    verdict = Failure("timeout", "late") if score is None else Verdict(score, "")
    ids = [6 + i % 20 for i in range(tokens)]
    return Action(agent, 0, [7] * context, ids, [-1.0] * tokens, truncated, "", verdict=verdict)


def trained_action(reward, kl, weight=1.0, group=("p", "A", 0), update=0, agent="A"):
    """A TrainedAction with this KL, a number for each token."""
    return TrainedAction(
        action(agent, tokens=len(kl)), group, update=update, reward=reward, weight=weight, kl=torch.tensor(kl)
    )


def advantages(scored):
    """The advantages of all actions, as lists."""
    return [s.advantage.tolist() for s in scored]


# ---- Rewards and advantages ----------------------------------------------------------------------


def test_rewards_lie_between_0_and_1():
    """Symptom in the official code: the KL penalty is ten times weaker in one domain than in the other.

    Cause: the reward is score / 10 in one, and the raw 0 to 10 in the other.
    Guard: one function makes rewards, and refuses what lies outside of 0 to 1.
    """
    judged = action(score=7)
    assert train.reward_of(judged, 1.0, "process") == 0.7
    assert train.reward_of(judged, 0.25, "outcome") == 0.25
    assert train.reward_of(judged, 1.0, "mixed") == pytest.approx(0.85)
    assert train.reward_of(judged, 0.25, "mixed") == pytest.approx(0.475)
    for score in (11, -1, math.nan):
        with pytest.raises(AssertionError, match="a coach gave"):
            train.reward_of(action(score=score), 1.0, "process")


def test_a_failed_verdict_is_no_reward():
    """Only the outcome can do without a verdict."""
    failed = action(score=None)
    assert train.reward_of(failed, 1.0, "process") is None
    assert train.reward_of(failed, 1.0, "mixed") is None
    assert train.reward_of(failed, 0.25, "outcome") == 0.25


def test_truth_stays_out_of_process_rewards():
    """The paper's reward is the coach's score alone: whether the answer is right must not move it."""
    for score in (0, 4, 10):
        judged = action(score=score)
        assert train.reward_of(judged, 1.0, "process") == train.reward_of(judged, 0.0, "process") == score / 10


def test_the_kl_penalty_is_in_the_reward_of_each_token():
    """beta = 0.1, kl = (1, -2, 3), R = 0.5: r = (-0.1, 0.2, -0.3 + 0.5), G = (0.3, 0.4, 0.2).

    The k1 estimate may be negative: it is unbiased, and nothing is clamped.
    """
    returns = train.returns_to_go(torch.tensor([1.0, -2.0, 3.0]), 0.5, 0.1)
    assert returns.tolist() == pytest.approx([0.3, 0.4, 0.2])


def test_whitening_over_all_tokens_of_all_actions():
    """REINFORCE++ by hand, beta = 0: one action of 1 token with R = 1, one of 3 tokens with R = 0.

    Over the four tokens the mean is 1/4 and the std sqrt(3)/4, so A = sqrt(3) and -1/sqrt(3). (Over the two actions it
    would be 1 and -1.)
    """
    scored = [trained_action(1.0, [0.0]), trained_action(0.0, [0.0, 0.0, 0.0])]
    train.set_advantages(scored, Config(beta=0.0))
    first, second = advantages(scored)
    assert first == pytest.approx([3**0.5], abs=1e-6)
    assert second == pytest.approx([-(3**-0.5)] * 3, abs=1e-6)


def scored_already(model, reference, scored, updates, config):
    """Instead of fill_old_and_kl: every token is as the sampler said, and the KL is what the test gave."""
    for s in scored:
        s.old = torch.tensor(s.action.logprobs)
        s.mismatch = torch.zeros(len(s.action.logprobs))


def test_agents_are_whitened_apart(monkeypatch):
    """Symptom: an agent whose coach is generous learns that all it does is good.

    Guard: update_policy() whitens each agent's actions on their own, also under --share-weights.
    """
    seen = []
    monkeypatch.setattr(train, "fill_old_and_kl", scored_already)
    monkeypatch.setattr(train, "set_advantages", lambda scored, config: seen.append([s.action.agent for s in scored]))
    scored = [trained_action(1.0, [0.0], weight=0.0, agent=agent) for agent in ("A", "B")]
    train.update_policy(Policy(("A", "B"), None, None), None, scored, 1, Config())
    assert seen == [["A"], ["B"]]


def test_no_spread_gives_no_advantage():
    """Symptom: nan from a batch of equal rewards, or a spread of 1e-7 blown up to advantages of 2.

    Guard: the population's std, and a divisor of at least a tenth of a point of the coach.
    """
    for values in ([0.5, 0.5], [0.5, 0.5 + 1e-7], [0.5]):
        whitened = train.whiten([torch.tensor([value]) for value in values])
        assert [part.tolist() for part in whitened] == [[0.0]] * len(values)
    assert train.whiten([]) == []
    for kind in ("grpo", "rloo"):
        assert train.compare_in_groups([trained_action(0.3, [0.0])], kind) == [0.0]


def test_groups_by_hand():
    """Rewards 1, 0, 0.5 in one group: mean 0.5, std sqrt(1/6); the mean of the others is 0.25, 0.75, 0.5.

    A second group (another agent on the same problem) has a mean of its own.
    """
    scored = [trained_action(reward, [0.0]) for reward in (1.0, 0.0, 0.5)]
    scored += [trained_action(reward, [0.0], group=("p", "B", 0)) for reward in (0.9, 0.7)]
    grpo = train.compare_in_groups(scored, "grpo")
    assert grpo == pytest.approx([6**0.5 / 2, -(6**0.5) / 2, 0.0, 1.0, -1.0])
    assert train.compare_in_groups(scored, "rloo") == pytest.approx([0.75, -0.75, 0.0, 0.2, -0.2])
    train.set_advantages(scored, Config(advantage="rloo", beta=0.0))
    assert scored[0].advantage.tolist() == pytest.approx([0.75])


def test_truncated_and_failed_actions_count_on_neither_side():
    """Symptom in the official code: masked actions still move mean and std, and failures are trained as a 5.

    Guard: weight 0 leaves an action out of the statistics and of the loss.
    """
    episode = Episode(0, Problem("p", "q", "1"), 0)
    episode.actions = [action(score=10), action(score=2), action(score=0, truncated=True), action(score=None)]
    scored = train.trained_actions([episode], Config())
    assert [s.weight for s in scored] == [1.0, 1.0, 0.0, 0.0]
    for s in scored:
        s.kl = torch.zeros(3)
    train.set_advantages(scored, Config())
    assert scored[0].advantage.tolist() == pytest.approx([1.0] * 3, abs=1e-6)
    assert scored[1].advantage.tolist() == pytest.approx([-1.0] * 3, abs=1e-6)
    assert scored[2].advantage is None and scored[3].advantage is None
    kept = train.trained_actions([episode], Config(mask_truncated=False))
    assert [s.weight for s in kept] == [1.0, 1.0, 1.0, 0.0]
    outcome = train.trained_actions([episode], Config(reward="outcome"))  # needs no verdict
    assert [s.weight for s in outcome] == [1.0, 1.0, 0.0, 1.0]


def test_the_outcome_is_the_quality_of_the_whole_episode():
    """Every action of an episode gets its quality, which need not be 0 or 1; who ended early gets 0."""
    episode, unfinished = Episode(0, Problem("p", "q"), 0), Episode(5, Problem("p", "q"), 1, error="too long")
    episode.actions, unfinished.actions = [action("A"), action("B")], [action("A")]
    episode.last_grade = Grade(True, 0.25)
    scored = train.trained_actions([episode, unfinished], Config(reward="outcome", train_batch=4))
    assert [s.reward for s in scored] == [0.25, 0.25, 0.0]
    assert [s.group for s in scored] == [("p", "A", 0), ("p", "B", 0), ("p", "A", 0)]
    assert [s.update for s in scored] == [0, 0, 1]  # by the episode's index


def test_a_failing_coach_stops_the_run():
    """Past --max-failures the remaining verdicts are no fair sample of the actions.

    The state before the bad rollout is saved first, so that the run can go on from there.
    """
    saved = []
    bad, good = dict(failure="timeout: late"), dict(failure=None)
    records = [dict(actions=[bad, good]), dict(actions=[good, good])]
    patient = SimpleNamespace(config=Config(max_failures=0.25), save=saved.append)
    train.stop_if_coach_fails(patient, records, 3)
    assert saved == []
    strict = SimpleNamespace(config=Config(max_failures=0.2), save=saved.append)
    with pytest.raises(RunError) as stopped:
        train.stop_if_coach_fails(strict, records, 3)
    assert str(stopped.value) == "step 3: the coach failed on 1 of 4 actions, e.g. timeout: late"
    assert saved == [2]


# ---- Loss ----------------------------------------------------------------------------------------


def test_the_loss_by_hand():
    """Four tokens, rho = 1, 2, 2, 0.5, A = 1, 1, -1, -1, clip 0.2.

    min(1, 1), min(2, 1.2), min(-2, -1.2), min(-0.5, -0.8), so -mean = -(1 + 1.2 - 2 - 0.8) / 4 = 0.15; gradients flow
    through the unclipped tokens 1 and 3 only.
    """
    rho = torch.tensor([1.0, 2.0, 2.0, 0.5])
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0])
    logprobs = rho.log().requires_grad_()
    loss, ratio = train.policy_loss(logprobs, torch.zeros(4), signs, torch.full((4,), 0.25), 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(0.15) and torch.allclose(ratio, rho)
    assert logprobs.grad.tolist() == pytest.approx([-0.25, 0.0, 0.5, 0.0])


def test_a_nan_of_weight_zero_stays_out():
    """Symptom: a masked nan makes the loss nan. Cause: 0 * nan is nan. Guard: it is left out, not multiplied."""
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    with_nan, weights = torch.tensor([1.0, math.nan]), torch.tensor([1.0, 0.0])
    loss, _ = train.policy_loss(logprobs, logprobs.detach(), with_nan, weights, 0.2)
    assert loss.item() == pytest.approx(-1.0)


def make_batch():
    """Six TrainedActions of unlike lengths, with advantages: one optimizer step's worth."""
    scored = []
    for i, tokens in enumerate([1, 5, 2, 9, 3, 1]):
        s = TrainedAction(action(tokens=tokens, context=2 + i), ("p", "A", 0), update=0, reward=0.5, weight=1.0)
        s.kl = s.mismatch = torch.zeros(tokens)
        s.old = torch.tensor(s.action.logprobs)
        s.advantage = torch.linspace(-1, 1, tokens) + i / 5
        scored.append(s)
    return scored


def make_policy(config):
    """A new policy for agent A."""
    model, _ = tiny(LETTERS, seed=1)
    return Policy(("A",), model, ShardedAdamW(model, config))


def gradient_of(budget, scored, parts=1):
    """The summed gradients with a micro-batch budget, the actions dealt to `parts` processes one after another."""
    config = Config()
    policy = make_policy(config)
    total = torch.zeros_like(policy.optimizer.flat)
    for part in range(parts):
        train.accumulate(policy, train.pack(scored[part::parts], budget), len(scored), config)
        total += policy.optimizer.gradient
    return total


def test_micro_batches_and_ranks_do_not_change_the_gradient():
    """Symptom: results depend on the number of GPUs and on accumulation.

    Cause: a mean of means.
    Guard: every token's weight comes from the global number of actions, so that any split gives the same sum.
    """
    whole = gradient_of(10_000, make_batch())
    assert whole.abs().max() > 1e-3
    splits = ((1, 1), (20, 1), (10_000, 2), (20, 4), (1, 6), (1, 9))  # the last one with idle processes
    for budget, parts in splits:
        assert torch.allclose(gradient_of(budget, make_batch(), parts), whole, atol=1e-6), (budget, parts)


def test_the_loss_is_a_mean_over_actions_of_means_over_tokens():
    """The gradient is autograd's of the formula as the paper writes it, one action at a time."""
    model, _ = tiny(LETTERS, seed=1)
    total = 0
    for s in make_batch():
        logprobs, _ = token_logprobs(model, [s.action.context_ids], [s.action.ids])
        ratio = (logprobs - torch.tensor(s.action.logprobs)).exp()
        clipped = ratio.clamp(0.8, 1.2)
        total = total - torch.minimum(ratio * s.advantage, clipped * s.advantage).mean() / 6
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(gradient_of(10_000, make_batch()), expected, atol=1e-6)


def test_packing_keeps_to_the_budget():
    """Symptom: out of memory now and then.

    Cause: one long row pads all others over the budget.
    Guard: no micro-batch is over it, padding included, but a single row that is longer by itself; and every action is
    in one of them.
    """
    lengths = [5, 60, 7, 7, 30, 2, 2, 2, 90, 31]
    scored = [TrainedAction(action(tokens=n, context=0), (), update=0, reward=0.0, weight=1.0) for n in lengths]
    micro_batches = train.pack(scored, 64)
    assert sorted(s.length for micro_batch in micro_batches for s in micro_batch) == sorted(lengths)
    for micro_batch in micro_batches:
        assert len(micro_batch) * max(s.length for s in micro_batch) <= 64 or len(micro_batch) == 1
    assert len(micro_batches) == 4
    assert train.pack([], 64) == []


# ---- Optimizer -----------------------------------------------------------------------------------


def one_parameter(values):
    """A model with one row of weights."""
    model = torch.nn.Linear(len(values), 1, bias=False)
    model.weight.data = torch.tensor([values])
    return model


def take_step(optimizer, gradient, lr):
    """One step with these gradients; returns their norm."""
    optimizer.zero_grad()
    optimizer.gradient += torch.tensor(gradient)
    return optimizer.step(lr)


def test_the_optimizer_is_adamw():
    """Ten steps are those of torch.optim.AdamW, clipping and weight decay included."""
    ours, theirs = one_parameter([1.0, -2.0, 3.0]), one_parameter([1.0, -2.0, 3.0])
    optimizer = ShardedAdamW(ours, Config(weight_decay=0.1, max_grad_norm=1.0, adam_eps=1e-8))
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for i in range(10):
        gradient = [math.sin(i), 2.0 * math.cos(i), 0.1]
        theirs.weight.grad = torch.tensor([gradient])
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        assert take_step(optimizer, gradient, 0.1) == pytest.approx(expected.item())
        reference.step()
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-6)


def test_bfloat16_weights_move_at_the_papers_learning_rate():
    """Symptom: rewards never rise in bfloat16 at lr 1e-6.

    Cause: the update rounds to nothing.
    Guard: float32 master weights. 99% of them move at every step, and the rounded ones follow.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 100, bias=False).bfloat16()
    start = model.weight.detach().clone()
    optimizer = ShardedAdamW(model, Config())
    masters = optimizer.master.clone()
    gradient = torch.randn(10_000).tolist()
    for _ in range(20):
        before = optimizer.master.clone()
        take_step(optimizer, gradient, 1e-6)
        assert (optimizer.master != before).float().mean() > 0.99
    assert (model.weight != start).float().mean() < 0.2  # most rounded weights have not got anywhere yet
    for _ in range(2000):
        take_step(optimizer, gradient, 1e-6)
    assert (model.weight - start).abs().max() > 1e-3
    assert (optimizer.master - masters).abs().max() == pytest.approx(2020e-6, rel=0.1)


def test_a_gradient_that_is_not_finite_moves_no_weight():
    """Symptom: one nan, and Adam's moments are nan for ever. Guard: the norm says so, and nothing has changed."""
    model = one_parameter([1.0, 2.0])
    optimizer = ShardedAdamW(model, Config())
    assert math.isnan(take_step(optimizer, [1.0, math.nan], 0.1))
    assert model.weight.tolist() == [[1.0, 2.0]] and optimizer.updates == 0
    assert optimizer.mean.tolist() == optimizer.square.tolist() == [0.0, 0.0]


def test_which_gradient_was_not_finite_is_said(monkeypatch):
    """The run stops with the step and the agent."""
    policy = make_policy(Config())
    scored = make_batch()
    scored[0].advantage = torch.full_like(scored[0].advantage, math.nan)
    monkeypatch.setattr(train, "set_advantages", lambda *_: None)
    with pytest.raises(RunError, match="step 7: a gradient of A is not finite"):
        train.update_policy(policy, policy.model, scored, 7, Config())


def test_learning_rate_by_hand():
    """Symptom in the official code: the cosine climbs back after its end.

    lr 1, 10 optimizer steps, 2 of warm-up, final 0.1: half, full, then the cosine, and 0.1 ever after.
    """
    config = Config(lr=1.0, lr_warmup=0.2, lr_final=0.1)
    rates = [train.learning_rate(update, 10, config) for update in range(30)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[4] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 0.25)) / 2)
    assert rates[10:] == [pytest.approx(0.1)] * 20
    assert train.learning_rate(0, 1, Config(lr=1.0)) == 1.0


def test_the_schedule_goes_by_the_step_alone(monkeypatch):
    """With two optimizer steps a rollout, the second of step 3 has the rate of number 5 (from 0) of 20.

    This is so whether or not any was skipped for want of actions: nothing needs to be remembered to resume.
    """
    monkeypatch.setattr(train, "fill_old_and_kl", scored_already)
    config = Config(steps=10, problems=4, samples=2, train_batch=4)
    scored = [trained_action(1.0, [0.0], weight=0.0)]
    metrics = train.update_policy(Policy(("A",), None, None), None, scored, 3, config)
    assert metrics["A"]["lr"] == train.learning_rate(5, 20, config)
    assert metrics["A"]["grad_norm"] == 0.0


# ---- Data order, configuration -------------------------------------------------------------------


def test_the_order_of_problems_is_a_function_of_seed_and_step():
    """Symptom: a resumed run repeats or skips problems.

    Guard: there is nothing to remember. Every pass takes each problem once, in another order.
    """
    problems = [Problem(str(i), "q") for i in range(12)]

    def steps(seed):
        return [train.problems_of_step(problems, step, 4, seed) for step in range(1, 7)]

    def sorted_pass(pass_steps):
        taken = [problem for part in pass_steps for problem in part]
        return sorted(taken, key=problems.index)

    parts = steps(seed=0)
    assert sorted_pass(parts[:3]) == problems == sorted_pass(parts[3:])
    assert parts[:3] != parts[3:]
    assert parts[4] == train.problems_of_step(problems, 5, 4, seed=0)
    assert parts != steps(seed=1)


def test_every_step_holds_both_kinds_of_data_tasks():
    """Stratified batches: of 34 regressions and 30 classifications, 16 a step hold 8 or 9 regressions."""
    kinds = ["regression"] * 34 + ["classification"] * 30
    problems = [Problem(str(i), "q", kind=kind) for i, kind in enumerate(kinds)]
    for step in range(1, 9):
        batch = train.problems_of_step(problems, step, 16, seed=0)
        assert len(set(batch)) == 16
        assert 8 <= sum(problem.kind == "regression" for problem in batch) <= 9


@pytest.mark.parametrize(
    "options, message",
    [
        (["--pipeline", "chess"], "no preset or pipeline 'chess'"),
        (["--preset", "chess"], "no preset or pipeline 'chess'"),
        (["--preset", "tables", "--pipeline", "chess"], "no pipeline 'chess'"),
        (["--steps", "0"], "--steps must be over 0, not 0"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--lr", "nan"], "--lr must be over 0"),
        (["--beta", "-1"], "--beta must be 0 or more"),
        (["--max-failures", "3"], "--max-failures must be in 0 to 1"),
        (["--reward", "money"], "invalid choice: 'money'"),
        (["--rewards"], "unrecognized arguments: --rewards"),
        (["--advantage", "grpo", "--samples", "1"], "compares samples"),
        (["--pipeline", "mathchat"], "needs a model"),
        (["--pipeline", "mathchat", "--model", "m"], "needs problems"),
        (["--train", "file.json"], "the rules coach knows a miniature's own problems only"),
        (["--judge", "api"], "--judge api needs --judge-url and --judge-model"),
        (["--resume", "--out", "no/such/run"], "is not a run folder"),
    ],
)
def test_bad_options_are_one_sentence(options, message):
    """Whatever is wrong with the command line, the user reads one line about it."""
    with pytest.raises(InputError, match=message) as error:
        train.read_config(options)
    assert "\n" not in str(error.value)


def test_every_field_of_the_config_is_an_option_with_help(capsys):
    """--help names every option, under one of the titles in Config."""
    with pytest.raises(SystemExit) as ended:
        train.read_config(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    names = {field.name for field in train.fields(Config)}
    assert all(train.option(name) in shown for name in names)
    groups = train.option_groups()
    assert {name for helps in groups.values() for name in helps} == names
    assert all(f"{title}:" in shown for title in groups)


def test_options_go_over_presets_and_these_over_defaults():
    """A pipeline needs no preset: without one it starts from the defaults."""
    config = train.read_config(["--no-mask-truncated", "--share-weights", "--reward", "mixed", "--adam-beta2", "0.9"])
    assert (config.mask_truncated, config.share_weights) == (False, True)
    assert (config.reward, config.adam_beta2) == ("mixed", 0.9)
    assert set(train.PRESETS) <= set(agents.PIPELINES)

    assert ARITHMETIC.name not in train.PRESETS
    out = os.path.join("runs", "arithmetic")
    assert train.read_config([]) == Config(preset="arithmetic", pipeline="arithmetic", out=out)

    config = train.read_config(["--pipeline", "tables", "--lr", "1"])
    assert (config.preset, config.pipeline, config.lr) == ("tables", "tables", 1.0)
    assert config.steps == train.PRESETS["tables"]["steps"] != Config.steps


def test_the_mathchat_preset_has_the_papers_numbers():
    """32 problems x 2 samples, 16 episodes an optimizer step, 128 rollouts, and the schedule of the paper."""
    config = Config(**train.PRESETS["mathchat"])
    assert (config.problems, config.samples, config.train_batch, config.steps) == (32, 2, 16, 128)
    assert (config.lr, config.lr_warmup, config.lr_final) == (1e-6, 0.03, 0.1)
    assert (config.beta, config.clip, config.max_grad_norm) == (0.01, 0.2, 1.0)
    assert (config.adam_beta1, config.adam_beta2, config.weight_decay) == (0.9, 0.95, 0.0)
    assert (config.max_new_tokens, config.max_context_tokens) == (4096, 24_576)
    assert (config.temperature, config.mask_truncated) == (1.0, True)


# ---- Files and metrics ---------------------------------------------------------------------------


def test_logs_are_cut_at_the_checkpoint(tmp_path):
    """Symptom: after a crash the steps since the last checkpoint appear twice, or the log ends in half a line.

    Guard: the run that goes on drops these lines, which it will write again.
    """
    path = tmp_path / "metrics.jsonl"
    whole = [json.dumps({"step": step}) + "\n" for step in (1, 2, 3)]
    path.write_text("".join(whole) + '{"step": 4, "accu')
    train.cut_logs(str(tmp_path), 2)
    assert path.read_text() == "".join(whole[:2])


def saved_policies(folder):
    """(policies, tokenizer), whose first checkpoint is in the folder."""
    model, tokenizer = tiny(["a"])
    policies = [Policy(("A",), model, ShardedAdamW(model, Config()))]
    train.save_checkpoint(str(folder), 1, policies, tokenizer)
    return policies, tokenizer


@pytest.mark.parametrize("moment", ["before the weights", "before the new name", "before `latest`"])
def test_a_crash_while_saving_leaves_the_last_checkpoint(tmp_path, monkeypatch, moment):
    """Symptom: a run cannot resume, for its only checkpoint is half written.

    Guard: it is written beside the last one, then renamed, and `latest` is changed after that. Whichever step the crash
    comes before, the earlier checkpoint is found and loads; and what the crash left is in nobody's way.
    """
    policies, tokenizer = saved_policies(tmp_path)
    saved = policies[0].optimizer.master.clone()
    policies[0].optimizer.master += 1.0
    write_atomically = train.write_atomically

    def crash(*_):
        raise KeyboardInterrupt

    def crash_at_latest(path, text):
        if path.endswith("latest"):
            crash()
        write_atomically(path, text)

    if moment == "before the weights":
        monkeypatch.setattr(train, "save", crash)
    elif moment == "before the new name":
        monkeypatch.setattr(os, "rename", crash)
    else:
        monkeypatch.setattr(train, "write_atomically", crash_at_latest)
    with pytest.raises(KeyboardInterrupt):
        train.save_checkpoint(str(tmp_path), 2, policies, tokenizer)
    monkeypatch.undo()

    assert train.load_checkpoint(str(tmp_path), policies) == 1
    assert torch.equal(policies[0].optimizer.master, saved)
    train.save_checkpoint(str(tmp_path), 2, policies, tokenizer)
    assert train.load_checkpoint(str(tmp_path), policies) == 2


def test_a_damaged_checkpoint_is_one_sentence(tmp_path):
    """The sentence says which checkpoint cannot be read."""
    policies, _ = saved_policies(tmp_path)
    (tmp_path / "step_000001" / "optimizer" / "A-0-of-1.safetensors").write_bytes(b"rubbish")
    with pytest.raises(InputError, match="step_000001 cannot be read"):
        train.load_checkpoint(str(tmp_path), policies)


def test_metrics_of_an_agent_by_hand():
    """Three actions of 3, 3 and 2 tokens, the last one left out of the update: it counts in the KL alone.

    kl = (0.3 + 0 - 0.2) / 8, entropy = (1 + 2) / 6, clipped = (0 + 3) / 6. The scorer is 0.1, 0.3 and -0.2 nats from
    the sampler on three of eight tokens: of exp(0.1), exp(0.3), exp(-0.2) the second alone lies outside 0.8 to 1.2.
    """
    first = trained_action(0.0, [0.1, 0.1, 0.1], update=0)
    first.entropy, first.clipped, first.largest_ratio = 1.0, 0, 1.5
    first.mismatch = torch.tensor([0.1, 0.3, 0.0])
    second = trained_action(0.0, [0.0, 0.0, 0.0], update=1)
    second.entropy, second.clipped, second.largest_ratio = 2.0, 3, 9.0
    second.mismatch = torch.zeros(3)
    left_out = trained_action(0.0, [-0.1, -0.1], weight=0.0, update=0)
    left_out.mismatch = torch.tensor([0.0, -0.2])
    figures = dict(kl=0.1 / 8, entropy=0.5, ratio_max=9.0, clip_fraction=0.5)
    figures |= dict(mismatch=0.3, mismatch_mean=0.6 / 8, mismatch_clipped=1 / 8)
    assert train.agent_metrics([first, second, left_out], Config()) == pytest.approx(figures)
    nothing = dict.fromkeys(figures, 0.0) | dict(ratio_max=1.0)
    assert train.agent_metrics([], Config()) == nothing


def test_a_scorer_that_disagrees_with_the_sampler_shows():
    """Symptom: a stale or foreign sampler goes unnoticed, or its numbers clip updates before anything is learned.

    Guard: a sampler that is 0.5 nats off is a mismatch of 0.5 in the metrics, and the ratio, which has the scorer on
    both sides, stays 1.
    """
    policy = make_policy(Config())
    scored = make_batch()
    for s in scored:
        logprobs, _ = token_logprobs(policy.model, [s.action.context_ids], [s.action.ids])
        s.action.logprobs = (logprobs.detach() - 0.5).tolist()
    metrics = train.update_policy(policy, policy.model, scored, 1, Config(problems=3, samples=2))["A"]
    assert metrics["mismatch"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["mismatch_mean"] == pytest.approx(0.5, abs=1e-4) and metrics["mismatch_clipped"] == 1.0
    assert metrics["ratio_max"] == 1.0 and metrics["clip_fraction"] == 0.0
