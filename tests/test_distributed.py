"""Two real processes (gloo) against one: statistics, gradients, weights and checkpoints, with unequal and empty shares."""
import copy
import math
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import model
import train
from rollout import Action, gather
from train import Config, Sample

CONFIG = Config(problems=4, samples=2, train_batch=4, micro_batch_tokens=20, beta=0.5, lr=1e-2, steps=4)


def network():
    return model.tiny([*"abcdefghijklmnopqrst"], seed=1)[0]


def samples_of(agent):
    """Agent A has 8 actions of unlike lengths, all in the hands of process 0 but one; B has one; C has none at all."""
    reference, out = network(), []
    for i in range({"A": 8, "B": 1, "C": 0}[agent]):
        context, ids = [7 + i] * (i + 1), [6 + (3 * i + t) % 20 for t in range(4 - i % 4)]
        logprobs, _ = model.token_logprobs(reference, [context], [ids])
        old = [x - 0.3 + 0.1 * (i + t) for t, x in enumerate(logprobs.tolist())]  # the policy has moved since
        action = Action(agent, 0, context, ids, old, False, "")
        out.append(Sample(action, ("p", agent, i // 4), i // 4, (i * 7 % 10) / 10, 1.0 if i != 2 else 0.0))
    return out


def share(samples, rank, world):
    """All but the last for process 0, the last for process 1: unequal for A, and nothing at all for process 0 of B."""
    return samples if world == 1 else samples[:-1] if rank == 0 else samples[-1:]


def work(rank, world, folder):
    """Update three agents; leave what came of it in a file. With one process this is the reference."""
    results = {}
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    for agent in "ABC":
        policy = train.Policy((agent,), network(), None)
        policy.optimizer = train.ShardedAdamW(policy.network, CONFIG)
        reference = copy.deepcopy(policy.network).requires_grad_(False)
        metrics = train.update(policy, reference, share(samples_of(agent), rank, world), 0, CONFIG)
        weights = torch.cat([p.detach().flatten() for p in policy.network.parameters()])
        results[agent] = (metrics[agent], weights, policy.optimizer.updates)
        policy.optimizer.save(f"{folder}/{agent}")
    tokens = share([torch.tensor([1.0, 2.0]), torch.tensor([3.0]), torch.tensor([10.0] * 3)], rank, world)
    results["whitened"] = gather(train.whiten(tokens))
    results["grouped"] = gather(train.compare_in_groups(share(samples_of("A"), rank, world), "grpo"))
    optimizer = train.ShardedAdamW(network(), CONFIG)
    optimizer.zero_grad()  # one process alone has a bad gradient: both must hear of it, or one would wait for ever
    optimizer.gradient[0] = float("nan") if rank == world - 1 else 1.0
    results["norm"] = optimizer.step(1e-3)
    torch.save(results, f"{folder}/results-{rank}")
    if world > 1:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """[one process's results, process 0 of 2, process 1 of 2] and the two folders."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    work(0, 1, str(one))
    multiprocessing.spawn(work, (2, str(two)), nprocs=2)
    files = [one / "results-0", two / "results-0", two / "results-1"]
    return [torch.load(f, weights_only=False) for f in files], str(one), str(two)


@pytest.mark.parametrize("agent", ["A", "B", "C"])
def test_two_processes_do_what_one_does(results, agent):
    """FAULTS 1, 3, 5. Symptom: a hang, or other weights, when processes hold unequal numbers of actions, or one holds
    none of an agent (official code drops samples to avoid it). Guard: no collective depends on a process's data, and
    there is one global denominator. Metrics and weights are the same on both, and those of one process."""
    (one, *two), _, _ = results
    for metrics, weights, updates in (r[agent] for r in two):
        assert updates == one[agent][2] == {"A": 2, "B": 1, "C": 0}[agent]
        assert torch.allclose(weights, one[agent][1], atol=1e-5)
        assert metrics == pytest.approx(one[agent][0], abs=1e-5)
    assert torch.equal(two[0][agent][1], two[1][agent][1])
    moved = (one[agent][1] - torch.cat([p.detach().flatten() for p in network().parameters()])).abs().max()
    assert moved > 1e-3 if agent != "C" else moved == 0  # an agent without actions keeps its weights: no Adam momentum


def test_whitening_is_over_all_processes_at_once(results):
    """FAULT 4. Symptom: an action's advantage depends on its neighbours on the same GPU. Cause: whitened per rank (the
    official code: per rank, then again across). Guard: summed counts, sums and squares; 1, 2, 3, 10, 10, 10 together."""
    values = torch.tensor([1.0, 2.0, 3.0, 10.0, 10.0, 10.0])
    expected = (values - values.mean()) / values.std(correction=0)
    for r in results[0]:
        assert torch.allclose(torch.cat(r["whitened"]), expected, atol=1e-6)


def test_groups_reach_across_processes(results):
    (one, *two), _, _ = results
    assert two[0]["grouped"] == two[1]["grouped"] == pytest.approx(one["grouped"])


def test_a_bad_gradient_of_one_process_stops_all(results):
    """FAULT 24: the norm is reduced before it is looked at."""
    assert not any(math.isfinite(r["norm"]) for r in results[0])


def test_a_checkpoint_of_two_processes_is_one_of_any_number(results):
    """A run goes on with another number of processes: shards are cut anew, moments and all."""
    (one, *_), _, folder = results
    assert len([name for name in os.listdir(folder) if name.startswith("A-")]) == 2
    optimizer = train.ShardedAdamW(network(), CONFIG)
    optimizer.load(f"{folder}/A", processes=2)
    assert optimizer.updates == 2 and torch.allclose(optimizer.master[: optimizer.size], one["A"][1], atol=1e-5)
    assert optimizer.mean.abs().max() > 0 and optimizer.square.max() > 0
