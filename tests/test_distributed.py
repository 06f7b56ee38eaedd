"""Two real processes (gloo) against one: statistics, gradients, weights and checkpoints, with unequal shares."""

import copy
import math
import os
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import train
from model import tiny, token_logprobs
from rollout import Action, gather
from train import Config, Policy, ShardedAdamW, TrainedAction

CONFIG = Config(problems=4, samples=2, train_batch=4, micro_batch_tokens=20, beta=0.5, lr=1e-2, steps=4)
ACTIONS = {"A": 8, "B": 1, "C": 0}  # agent -> how many it has, on all processes
UPDATES = {"A": 2, "B": 1, "C": 0}  # and how many optimizer steps these make


@dataclass
class Trained:
    """What an update made of one agent, as one process sees it."""

    metrics: dict
    weights: torch.Tensor  # all of the model's, flat
    updates: int


@dataclass
class Results:
    """What one process found."""

    trained: dict  # agent -> Trained
    whitened: list  # of all processes
    grouped: list  # of all processes
    bad_norm: float  # of a gradient that is nan on the last process alone


def new_model():
    return tiny("abcdefghijklmnopqrst", seed=1)[0]


def flat(model):
    """All weights of a model as one tensor."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def all_actions(agent):
    """An agent's TrainedActions, of unlike lengths; one of A's is left out of the update."""
    model = new_model()
    scored = []
    for i in range(ACTIONS[agent]):
        context = [7 + i] * (i + 1)
        ids = [6 + (3 * i + t) % 20 for t in range(4 - i % 4)]
        logprobs, _ = token_logprobs(model, [context], [ids])
        old = [x - 0.3 + 0.1 * (i + t) for t, x in enumerate(logprobs.tolist())]  # a sampler that disagrees
        action = Action(agent, 0, context, ids, old, False, "")
        weight = 0.0 if i == 2 else 1.0
        scored.append(TrainedAction(action, ("p", agent, i // 4), i // 4, reward=(i * 7 % 10) / 10, weight=weight))
    return scored


def share(items, rank, world):
    """All but the last for process 0, the last for process 1: unequal for A, and nothing for process 0 of B."""
    if world == 1:
        return items
    return items[:-1] if rank == 0 else items[-1:]


def train_agent(agent, rank, world, folder):
    """Update an agent, and save its optimizer."""
    model = new_model()
    reference = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        reference.norm.weight.mul_(0.8)  # the policy has moved since: each token has a KL of its own
    policy = Policy((agent,), model, ShardedAdamW(model, CONFIG))
    metrics = train.update_policy(policy, reference, share(all_actions(agent), rank, world), 1, CONFIG)
    policy.optimizer.save(f"{folder}/{agent}")
    return Trained(metrics[agent], flat(model), policy.optimizer.updates)


def norm_of_a_bad_gradient(rank, world):
    """The norm of a gradient that is nan on the last process alone."""
    optimizer = ShardedAdamW(new_model(), CONFIG)
    optimizer.zero_grad()
    optimizer.gradient[0] = math.nan if rank == world - 1 else 1.0
    return optimizer.step(1e-3)


def work(rank, world, folder):
    """Do everything that the tests look at, and leave the Results in a file. One process is the reference."""
    if world > 1:
        # a hang ends in an error
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(minutes=10)
        )
    trained = {agent: train_agent(agent, rank, world, folder) for agent in ACTIONS}
    values = [torch.tensor([1.0, 2.0]), torch.tensor([3.0]), torch.tensor([10.0, 10.0, 10.0])]
    whitened = gather(train.whiten(share(values, rank, world)))
    grouped = gather(train.compare_in_groups(share(all_actions("A"), rank, world), "grpo"))
    results = Results(trained, whitened, grouped, norm_of_a_bad_gradient(rank, world))
    torch.save(results, f"{folder}/results-{rank}")
    if world > 1:
        dist.destroy_process_group()


@dataclass
class Runs:
    """The Results of one process, and of each of two."""

    one: Results
    two: list
    folder: str  # where the two left their optimizers

    @property
    def all(self):
        return [self.one, *self.two]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same work by one process, and by two."""
    one, two = str(tmp_path_factory.mktemp("one")), str(tmp_path_factory.mktemp("two"))
    work(0, 1, one)
    multiprocessing.spawn(work, (2, two), nprocs=2)
    paths = [f"{one}/results-0", f"{two}/results-0", f"{two}/results-1"]
    alone, *both = [torch.load(path, weights_only=False) for path in paths]
    return Runs(alone, both, two)


@pytest.mark.parametrize("agent", ACTIONS)
def test_two_processes_do_what_one_does(runs, agent):
    """Symptom: a hang, or other weights, when processes hold unequal numbers of actions, or one holds none.

    Cause: collectives or denominators that depend on a process's data; the official code drops samples to avoid it.
    Guard: no collective depends on them, and there is one global denominator. Metrics and weights are the same on both
    processes, and those of one process.
    """
    alone = runs.one.trained[agent]
    first, second = [results.trained[agent] for results in runs.two]
    for trained in (first, second):
        assert trained.updates == alone.updates == UPDATES[agent]
        assert torch.allclose(trained.weights, alone.weights, atol=1e-5)
        assert trained.metrics == pytest.approx(alone.metrics, abs=1e-5)
    assert torch.equal(first.weights, second.weights)


@pytest.mark.parametrize("agent", ACTIONS)
def test_agents_with_actions_move_and_others_do_not(runs, agent):
    """An agent without actions keeps its weights: Adam's momentum alone moves nothing."""
    for results in runs.all:
        moved = (results.trained[agent].weights - flat(new_model())).abs().max()
        if UPDATES[agent]:
            assert moved > 1e-3
        else:
            assert moved == 0


def test_whitening_is_over_all_processes_at_once(runs):
    """Symptom: an action's advantage depends on its neighbours on the same GPU.

    Cause: it is whitened by each rank; in the official code, then once more across ranks.
    Guard: counts, sums and squares are summed over all; 1, 2, 3, 10, 10, 10 are whitened together.
    """
    values = torch.tensor([1.0, 2.0, 3.0, 10.0, 10.0, 10.0])
    expected = (values - values.mean()) / values.std(correction=0)
    for results in runs.all:
        assert torch.allclose(torch.cat(results.whitened), expected, atol=1e-6)


def test_groups_reach_across_processes(runs):
    """The samples of a problem lie on several processes, and are compared all the same."""
    first, second = runs.two
    assert first.grouped == second.grouped == pytest.approx(runs.one.grouped)


def test_a_bad_gradient_of_one_process_stops_all(runs):
    """Symptom: one process stops, and the others wait for it for ever.

    Guard: the norm is reduced before it is looked at, so that all hear of it.
    """
    assert not any(math.isfinite(results.bad_norm) for results in runs.all)


def test_a_checkpoint_of_two_processes_is_one_of_any_number(runs):
    """A run goes on with another number of processes: shards are cut anew, moments and all."""
    assert len([name for name in os.listdir(runs.folder) if name.startswith("A-")]) == 2
    optimizer = ShardedAdamW(new_model(), CONFIG)
    optimizer.load(f"{runs.folder}/A", processes=2)
    assert optimizer.updates == 2
    assert torch.allclose(optimizer.master[: optimizer.size], runs.one.trained["A"].weights, atol=1e-5)
    assert optimizer.mean.abs().max() > 0 and optimizer.square.max() > 0
