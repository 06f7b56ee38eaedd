"""train.py: MAPPA. Every agent learns, with its own weights, from the coach's scores of its own actions.

Before this: agents.py, model.py, judge.py, rollout.py, eval.py. For an action with sampled tokens
y_1..y_T and coach score c, R = c / 10 and, with gamma = 1 and within the action only,

    kl_t  = log pi_old(y_t) - log pi_ref(y_t)              k1 estimator, detached; ref = the agent's starting weights
    r_t   = -beta kl_t + [t = T] R                         the KL penalty is part of the reward, not of the loss
    G_t   = sum_{u >= t} r_u
    A_t   = (G_t - mean) / std                             REINFORCE++: over all tokens of all actions of this agent
    rho_t = pi_theta(y_t) / pi_old(y_t)
    L     = - mean over actions, mean over tokens, of min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t)

(pi_old is what token_logprobs() says of the policy before its first update, not what the sampler
said.)

One script, any number of processes: each samples and scores its share of the episodes; statistics
and gradients are summed over all of them, so that the number of processes changes the speed and
nothing else. What is computed in which dtype: see the README, "Numbers and processes".

What we leave out: critic, entropy bonus, KL in the loss, returns across turns or agents (as in the
paper); tensor and pipeline parallelism. Where the official code differs from the paper we follow
the paper, see README.

    python train.py                                        # three tiny agents learn arithmetic on a laptop
    python train.py --pipeline tables                      # three others learn data analysis
    torchrun --standalone --nproc_per_node=8 train.py      # the same run on eight processes
    python train.py --preset mathchat --model FOLDER_OR_ID --train FILE --judge api ...    # the paper's, see README
"""

import argparse
import contextlib
import copy
import datetime
import inspect
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Literal, get_args, get_origin

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

import agents
import rollout
from agents import InputError, digest, read_json, require, write_atomically
from eval import kind_figures, latest_checkpoint, print_summary, shown, summarise, summarise_agent
from judge import ApiModel, Failure, LocalModel, has_rules, judge_by, nobody, rules
from model import Transformer, compute_dtype, load, save, save_adapter, tiny, token_logprobs, with_adapter
from rollout import Action, RunError, Sampling, Stopped, all_reduce, collect, gather, rank, together, world

# ---- Configuration -------------------------------------------------------------------------------


@dataclass
class Config:
    """Each field is an option of the command line. Its comment is its help; other comments are titles in --help."""

    # what is trained, and on which problems
    preset: str = ""  # use the defaults of another pipeline: arithmetic, tables, mathchat or dsbench; empty: its own
    pipeline: str = "arithmetic"  # which agents work on which kind of problem
    model: str = ""  # Hugging Face folder or hub id that every agent starts from; empty: the embedded model
    train: str = ""  # problem file to train on; empty: the pipeline's own problems
    eval: tuple = ()  # problem files to evaluate on; none: the pipeline's own held-out problems
    train_subset: int = 0  # train on so many of them only, drawn as in the paper; 0: on all
    allow_repeats: bool = False  # go on although problems repeat, or are both trained and evaluated on
    data_root: str = ""  # DSBench: folder that the paths in its problem files start from; empty: the current one
    task_texts: str = ""  # DSBench: JSON file of cleaned task texts and column names; empty: the texts as published
    allow_missing: bool = False  # DSBench: leave out tasks whose data are absent
    warm_steps: int = 500  # supervised steps on 64 half-wrong demonstrations each; the embedded model starts there
    warm_lr: float = 8e-3  # their peak learning rate

    # learning
    reward: Literal["process", "outcome", "mixed"] = "process"  # coach scores, the end result, or their mean
    advantage: Literal["reinforce++", "grpo", "rloo"] = "reinforce++"  # see set_advantages()
    share_weights: bool = False  # one set of weights for all agents, the control experiment
    lora_rank: int = 0  # train adapters of this rank over one frozen model for all agents; 0: all weights. See README
    mask_truncated: bool = True  # leave actions that hit the generation limit out of the update
    train_batch: int = 32  # episodes for each optimizer step
    beta: float = 0.01  # weight of the KL penalty in the reward
    clip: float = 0.2  # clipping range of the ratio
    importance_cap: float = 0.0  # weigh tokens by scorer/sampler probability, at most this; 0: off, see README
    lr: float = 4e-4  # peak learning rate
    lr_warmup: float = 0.03  # share of the optimizer steps in which it rises from 0
    lr_final: float = 0.1  # share of it that the cosine ends at
    adam_beta1: float = 0.9  # decay of the gradient mean
    adam_beta2: float = 0.95  # decay of the squared gradient mean
    adam_eps: float = 1e-6  # added to the root of the squared gradient mean; float noise stays below it
    weight_decay: float = 0.0  # decoupled (AdamW)
    max_grad_norm: float = 1.0  # gradients of one agent are scaled down to this global norm

    # sampling
    problems: int = 32  # problems in a rollout
    samples: int = 2  # episodes for each of them
    temperature: float = 1.0  # of sampling, and so of scoring
    thinking: Literal["default", "on", "off"] = "default"  # where the chat template has such a switch (Qwen3)
    date: str = ""  # the date that some chat templates write (Llama 3), such as 2026-01-31; empty: the day of the start
    max_new_tokens: int = 24  # generation limit of one action
    max_context_tokens: int = 512  # an episode ends early if an agent's context gets longer

    # coach
    judge: Literal["rules", "api", "local"] = "rules"  # the coach: offline rules, an API, or a model run here
    judge_url: str = ""  # API: an OpenAI-compatible endpoint, such as http://localhost:8000/v1
    judge_model: str = ""  # API: its name there; local: a Hugging Face folder or hub id
    judge_key_env: str = ""  # API: the environment variable that holds the key; empty: no key
    judge_cache: str = ""  # API: folder for replies, so that no question is paid for twice; empty: none
    judge_budget_calls: int = 0  # API: calls that each process may make; 0: any number
    judge_budget_tokens: int = 0  # API: tokens that they may take; 0: any number
    judge_max_tokens: int = 1024  # API, local: limit of one reply, thinking included; a reply cut off is a Failure
    judge_concurrency: int = 8  # API: calls at once, from each process
    judge_deadline: float = 180.0  # API: seconds until a call that keeps failing is given up; one try gets half
    max_failures: float = 0.2  # stop if the coach fails on more than this share of a rollout's actions

    # run
    out: str = ""  # run folder; empty: runs/PIPELINE
    resume: bool = False  # go on from the run folder's last checkpoint, with its config
    seed: int = 0  # seed of everything: weights, order of problems, sampling
    steps: int = 150  # rollouts; each is followed by one pass over it
    save_every: int = 50  # steps between checkpoints; the last step is always saved
    keep: int = 0  # how many steps' models stay, the newest; 0: all
    eval_problems: int = 200  # held-out problems before and after training; 0: no evaluation
    eval_samples: int = 2  # episodes for each of them
    eval_every: int = 0  # steps between evaluations in between, into evaluations.jsonl; 0: none
    eval_temperature: float = 1.0  # of sampling in evaluations

    # machine
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one
    sample_rows: int = 256  # contexts that each process samples at once, at most
    cache_gib: float = 0.0  # GiB of keys and values in sampling; 0: most of what is free on a GPU, 4 on a CPU
    micro_batch_tokens: int = 8192  # padded tokens in one forward and backward pass; changes memory and speed only
    gradient_checkpointing: bool = False  # recompute activations in backward: less memory, a third more time
    collective_timeout: float = 0.0  # seconds until a process that waits for the others gives up; 0: see time_limit()
    sandbox: Literal["landlock", "limits"] = "landlock"  # isolation of programs; limits is not safe
    sandbox_timeout: float = 5.0  # seconds for one program
    sandbox_disk: int = 512  # MiB that an episode's files may take, those of its task included


PAPER = dict(samples=2, train_batch=16, lr=1e-6, adam_eps=1e-8, gradient_checkpointing=True, warm_steps=0, judge="api")
PRESETS = {  # a pipeline without an entry here starts from the defaults above
    "tables": dict(steps=40, lr=2e-4, max_new_tokens=40, mask_truncated=False)
    | dict(warm_steps=400, save_every=20, sandbox_timeout=10.0),
    "mathchat": PAPER  # 8 passes over 512 problems
    | dict(steps=128, problems=32, train_subset=512, max_new_tokens=4096, max_context_tokens=24_576)
    | dict(eval_problems=10_000, eval_samples=4, eval_every=4, eval_temperature=0.6, save_every=32)
    | dict(micro_batch_tokens=16_384, sample_rows=64, sandbox_timeout=30.0),
    "dsbench": PAPER  # 30 passes over 64 tasks
    | dict(steps=120, problems=16, max_new_tokens=16_384, max_context_tokens=24_576, eval_every=2, save_every=10)
    | dict(micro_batch_tokens=32_768, sample_rows=32, sandbox_timeout=60.0, sandbox_disk=4096),
}

# What may change on --resume: nothing that says what is learned. (Another device, other micro-batches
# or another server of the same coach may change the rounding of numbers, or replies.)
FREE_ON_RESUME = {
    *("resume", "out", "preset", "data_root", "save_every", "keep", "device", "collective_timeout"),
    *("micro_batch_tokens", "gradient_checkpointing", "sample_rows", "cache_gib"),
    *("judge_url", "judge_key_env", "judge_cache", "judge_concurrency", "judge_deadline"),
    *("judge_budget_calls", "judge_budget_tokens"),
}

# the numbers that may be 0, and those that lie in 0 to 1; all others are over 0
FROM_ZERO = {
    *("seed", "beta", "clip", "importance_cap", "weight_decay", "warm_steps", "train_subset", "keep", "lora_rank"),
    *("eval_problems", "eval_every", "judge_budget_calls", "judge_budget_tokens", "collective_timeout", "cache_gib"),
}
SHARES = {"lr_warmup", "lr_final", "max_failures", "adam_beta1", "adam_beta2"}


def option(name):
    """The option of the command line for a field of Config."""
    return "--" + name.replace("_", "-")


def option_groups():
    """Title of a group -> field of Config -> its help; all from the comments in Config's source."""
    groups = {}
    for line in inspect.getsource(Config).splitlines():
        title = re.fullmatch(r"    # (.+)", line)
        field = re.fullmatch(r"    (\w+): .*  # (.+)", line)
        if title:
            group = groups.setdefault(title[1], {})
        elif field:
            group[field[1]] = field[2]
    return groups


def config_parser():
    """An argparse parser with one option for each field of Config; only what was given appears in its result."""
    parser = argparse.ArgumentParser(description="Train agents with MAPPA.", argument_default=argparse.SUPPRESS)
    parser.error = rollout.bad_command_line
    by_name = {field.name: field for field in fields(Config)}
    for title, helps in option_groups().items():
        group = parser.add_argument_group(title)
        for name, text in helps.items():
            field = by_name[name]
            settings = dict(help=f"{text} (default: {field.default})".replace("%", "%%"))
            if field.type is bool:
                settings |= dict(action=argparse.BooleanOptionalAction)
            elif field.type is tuple:
                settings |= dict(nargs="*", metavar="FILE")
            elif get_origin(field.type) is Literal:
                settings |= dict(choices=get_args(field.type))
            else:
                settings |= dict(type=field.type, metavar=field.type.__name__.upper())
            group.add_argument(option(name), **settings)
    return parser


def read_config(argv):
    """The Config of a command line: the options given, over the preset's values (or the saved run's), over defaults."""
    given = vars(config_parser().parse_args(argv))
    preset = given.get("preset") or given.get("pipeline", "arithmetic")
    known = dict.fromkeys([*agents.PIPELINES, *PRESETS])
    require(preset in known, f"there is no preset or pipeline {preset!r}; known are {', '.join(known)}")
    config = Config(**{"pipeline": preset} | PRESETS.get(preset, {}) | given | {"preset": preset})
    pipelines = ", ".join(agents.PIPELINES)
    require(config.pipeline in agents.PIPELINES, f"there is no pipeline {config.pipeline!r}; known are {pipelines}")
    config.out = config.out or os.path.join("runs", config.pipeline)
    if config.resume:
        config = saved_config(config.out, given)
    check_config(config)
    return config


def saved_config(out, given):
    """The config of the run in `out`, with the free options given now; any other one must be as it was."""
    values = read_json(out, "config.json", what="run folder")
    values.pop("problems_digest", None)  # no option, see check_same_problems()
    known = {field.name for field in fields(Config)}
    require(set(values) == known, f"{out} was written by another version of train.py")
    for name, now in given.items():
        was, free = values[name], name in FREE_ON_RESUME
        require(
            free or now == was, f"{out} was started with {option(name)} {was}, which cannot become {now} on --resume"
        )
    return Config(**values | given)


def check_config(config):
    """Raise InputError for values that make no sense, before anything slow has started."""
    for name in [field.name for field in fields(config) if field.type in (int, float)]:
        number = getattr(config, name)
        bound, holds = "over 0", 0 < number < math.inf
        if name in SHARES:
            bound, holds = "in 0 to 1", 0 <= number <= 1
        elif name in FROM_ZERO:
            bound, holds = "0 or more", 0 <= number < math.inf
        require(holds, f"{option(name)} must be {bound}, not {number}")
    pipeline, name = agents.PIPELINES[config.pipeline], config.pipeline
    require(config.model or pipeline.pieces, f"the {name} pipeline needs a model: give --model FOLDER_OR_ID")
    require(config.train or pipeline.problems, f"the {name} pipeline needs problems: give --train FILE")
    dated = config.date == "" or is_date(config.date)
    require(dated, f"--date must be a day such as 2026-01-31, not {config.date}")
    compares = config.samples > 1 or config.advantage == "reinforce++"
    require(compares, f"--advantage {config.advantage} compares samples of a problem: give --samples 2 or more")

    # the coach
    if config.judge == "rules":
        own = has_rules(pipeline) and not config.train
        require(own, "the rules coach knows a miniature's own problems only: give another --judge")
    complete = config.judge_url and config.judge_model
    require(config.judge != "api" or complete, "--judge api needs --judge-url and --judge-model")
    require(config.judge != "local" or config.judge_model, "--judge local needs --judge-model FOLDER_OR_ID")


def is_date(text):
    """Is this a day, written as 2026-01-31?"""
    with contextlib.suppress(ValueError):
        return str(datetime.date.fromisoformat(text)) == text
    return False


# ---- Processes -----------------------------------------------------------------------------------


def time_limit(config):
    """Seconds that processes may wait for each other: what the longest step of one of them can take.

    An upper bound: every action of every agent takes all its tokens (0.1 s each), and its program and
    its verdict take all their time; three times that, for batches and for the update. At least an
    hour.
    """
    actions = sum(agent.max_actions for agent in agents.PIPELINES[config.pipeline].agents)
    action = 0.1 * config.max_new_tokens + config.sandbox_timeout + config.judge_deadline
    return max(3600.0, 3 * actions * action)


# torch 2.13 calls these reduce_scatter_single and all_gather_single, earlier ones as in the second place
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# ---- Rewards and advantages ----------------------------------------------------------------------


@dataclass
class TrainedAction:
    """One action, as the update sees it. T = number of its tokens."""

    action: Action
    group: tuple  # (problem id, agent, turn): what GRPO compares
    update: int  # 0..: which of the rollout's optimizer steps it belongs to
    reward: float  # R, in [0, 1]
    weight: float  # 1.0, or 0.0: left out of statistics and loss alike
    old: torch.Tensor | None = None  # [T] log pi_old, by the scorer
    kl: torch.Tensor | None = None  # [T] log pi_old - log pi_ref
    mismatch: torch.Tensor | None = None  # [T] log pi_old by the scorer, minus what the sampler said
    advantage: torch.Tensor | None = None  # [T]
    # what the forward pass of its update showed about its tokens; actions that are left out keep
    # these values
    entropy: float = 0.0  # sum over tokens, in nats
    clipped: int = 0  # tokens whose ratio lies outside 1 - clip .. 1 + clip
    largest_ratio: float = 1.0  # pi_theta / pi_old

    @property
    def length(self):
        """Tokens in a forward pass over it."""
        return len(self.action.context_ids) + len(self.action.ids)


def reward_of(action, quality, reward):
    """R in [0, 1] of one action; None if it needs a verdict that failed. Only here is the coach's 0-10 scaled.

    reward: process, c / 10; outcome, how good the episode's end result is (Grade.quality), which
    needs no verdict; mixed, the mean of the two.
    """
    if reward == "outcome":
        return quality
    if isinstance(action.verdict, Failure):
        return None
    score = action.verdict.score / 10
    assert 0 <= score <= 1, f"a coach gave {action.verdict.score}"  # NaN fails this too
    return score if reward == "process" else (score + quality) / 2


def trained_actions(episodes, config):
    """A TrainedAction for every action of this process's episodes."""
    scored = []
    for episode in episodes:
        quality = episode.grade.quality
        for action in episode.actions:
            reward = reward_of(action, quality, config.reward)
            left_out = reward is None or (action.truncated and config.mask_truncated)
            scored.append(
                TrainedAction(
                    action,
                    group=(episode.problem.id, action.agent, action.turn),
                    update=episode.index // config.train_batch,
                    reward=0.0 if reward is None else reward,
                    weight=0.0 if left_out else 1.0,
                )
            )
    return scored


def returns_to_go(kl, reward, beta):
    """G_t = sum_{u >= t} (-beta kl_u) + reward, for kl [T].

    >>> returns_to_go(torch.tensor([1.0, -2.0, 3.0]), 0.5, beta=0.1)
    tensor([0.3000, 0.4000, 0.2000])
    """
    r = -beta * kl
    r[-1] += reward
    return r.flip(0).cumsum(0).flip(0)


SMALLEST_SPREAD = 0.01  # of rewards in [0, 1]: a tenth of a point of the coach, the least that scores can tell apart


def whiten(values):
    """(values - mean) / std over all tokens of all processes' tensors; values: list of [T] tensors, possibly empty.

    NOTE: a spread below what rewards can resolve is noise of the KL penalty, and must not be blown
    up to 1. With equal scores and no KL all advantages are 0.
    """
    flat = torch.cat([*values, torch.zeros(0)]).double()  # zeros(0): a process may have no actions
    count, total = all_reduce(torch.tensor([len(flat), flat.sum()], dtype=torch.float64)).tolist()
    mean = total / max(count, 1)
    squares = all_reduce((flat - mean).square().sum()).item()
    std = math.sqrt(squares / max(count, 1))
    if std < 1e-6:  # equal numbers, but for rounding: exactly 0, or Adam would turn the rounding into full steps
        return [torch.zeros_like(v) for v in values]
    return [((v.double() - mean) / max(std, SMALLEST_SPREAD)).float() for v in values]


def compare_in_groups(scored, advantage):
    """The rewards, each compared with its group's, over all processes.

    grpo: (R - mean) / std; rloo: R - mean of the others. Both are 0 where a group does not differ
    or has one member.
    """
    groups = {}
    for group, reward in gather([(s.group, s.reward) for s in scored]):
        groups.setdefault(group, []).append(reward)
    compared = []
    for s in scored:
        rewards = groups[s.group]
        n, std = len(rewards), pstdev(rewards)
        if n == 1:
            scale = 0.0
        elif advantage == "grpo":
            scale = 1 / max(std, SMALLEST_SPREAD)
        else:
            scale = n / (n - 1)  # R - mean of the others = (R - mean of all) n / (n - 1)
        compared.append((s.reward - fmean(rewards)) * scale)
    return compared


def set_advantages(scored, config):
    """Fill in the advantages of one agent's actions (this process's share of them).

    reinforce++: returns-to-go, whitened once, over all tokens, over all processes, never across
    agents.
    grpo, rloo: scores are compared within their group, KL penalties added as they are. (MAPPA's
    later agents see other inputs in every sample of a group, which is why the paper prefers
    reinforce++.)
    """
    used = [s for s in scored if s.weight]
    if config.advantage == "reinforce++":
        advantages = whiten([returns_to_go(s.kl, s.reward, config.beta) for s in used])
    else:
        rewards = compare_in_groups(used, config.advantage)
        pairs = zip(used, rewards, strict=True)
        advantages = [returns_to_go(s.kl, reward, config.beta) for s, reward in pairs]
    for s, advantage in zip(used, advantages, strict=True):
        s.advantage = advantage


# ---- Loss ----------------------------------------------------------------------------------------


def policy_loss(logprobs, old, advantages, weights, clip):
    """Sum over tokens of weight * -min(rho A, clip(rho, 1 - clip, 1 + clip) A). All arguments [N] but the last.

    With weights 1 / (actions * tokens of the action) over ALL actions of an optimizer step, on all
    processes, this is the mean over actions of the mean over tokens, however the actions are split.
    Returns (loss, rho [N] detached).
    """
    ratio = (logprobs - old).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    # where, not a product alone: an advantage of weight 0 may be nan, and 0 * nan is nan
    return -torch.where(weights > 0, weights * objective, 0.0).sum(), ratio.detach()


def pack(scored, budget):
    """Split actions into micro-batches of at most `budget` padded tokens, or of one action that is longer than that."""
    micro_batches = []
    longest = 0
    for s in sorted(scored, key=lambda s: -s.length):
        # sorted: all others of a micro-batch are padded to its first
        if not micro_batches or (len(micro_batches[-1]) + 1) * longest > budget:
            micro_batches.append([])
            longest = s.length
        micro_batches[-1].append(s)
    return micro_batches


def action_logprobs(model, scored, temperature):
    """(log-probabilities, entropies) of the actions' tokens, each a list of [T] tensors."""
    contexts = [s.action.context_ids for s in scored]
    completions = [s.action.ids for s in scored]
    lengths = [len(ids) for ids in completions]
    logprobs, entropies = token_logprobs(model, contexts, completions, temperature)
    return logprobs.split(lengths), entropies.split(lengths)


def micro_batches_of(scored, update, config):
    """The micro-batches of one optimizer step (0.. within the rollout)."""
    return pack([s for s in scored if s.weight and s.update == update], config.micro_batch_tokens)


@torch.no_grad()
def fill_old_and_kl(model, reference, scored, updates, config):
    """Fill in log pi_old and kl_t of every action, before any weight moves.

    NOTE: by the scorer, and in the micro-batches of the update. The sampler computes the same
    numbers with other kernels and shapes, and in bfloat16 that alone makes ratios that are clipped
    before anything is learned. So with policy = reference the first ratios are 1 and all kl_t are
    0, exactly, in any dtype. It costs one more forward pass.
    """
    micro_batches = [part for update in range(updates) for part in micro_batches_of(scored, update, config)]
    # actions that are left out of all updates count in the metrics kl and mismatch
    micro_batches += pack([s for s in scored if not s.weight], config.micro_batch_tokens)
    for micro_batch in micro_batches:
        old, _ = action_logprobs(model, micro_batch, config.temperature)
        by_reference, _ = action_logprobs(reference, micro_batch, config.temperature)
        for s, logprobs, reference_logprobs in zip(micro_batch, old, by_reference, strict=True):
            s.old = logprobs
            s.kl = (logprobs - reference_logprobs).cpu()
            s.mismatch = logprobs.cpu() - torch.tensor(s.action.logprobs)


# ---- Optimizer: AdamW, sharded over the processes (ZeRO stage 1), with float32 master weights ----


class ShardedAdamW:
    """AdamW for one agent's model. With N processes, each holds and updates 1/N of the float32 master weights:

        gradient sums --reduce-scatter--> my shard's gradient --AdamW--> my shard --all-gather--> everybody's weights

    All weights lie in one flat buffer of the model's own dtype, of which its parameters become
    views. NOTE: backward has no collective, each optimizer step exactly three: processes may have
    any number of micro-batches, or none.
    """

    def __init__(self, model, config):
        parameters = [p for p in model.parameters() if p.requires_grad]  # with LoRA those of the adapter
        self.config = config
        self.updates = 0
        self.gradient = None  # float32 sums, while gradients are accumulated
        self.size = sum(p.numel() for p in parameters)
        self.shard_size = math.ceil(self.size / world())  # the last shard is padded with zeros
        self.flat = parameters[0].new_zeros(self.shard_size * world())
        start = 0
        for p in parameters:
            place = slice(start, start + p.numel())
            self.flat[place] = p.detach().flatten()
            p.data = self.flat[place].view_as(p)
            p.register_post_accumulate_grad_hook(partial(self.take, place))
            start += p.numel()
        if world() > 1:
            dist.broadcast(self.flat, 0)
        first = rank() * self.shard_size
        self.master = self.flat[first : first + self.shard_size].float().clone()
        self.mean = torch.zeros_like(self.master)  # m
        self.square = torch.zeros_like(self.master)  # v
        self.state = {"master": self.master, "mean": self.mean, "square": self.square}  # what a checkpoint holds

    def zero_grad(self):
        self.gradient = torch.zeros_like(self.flat, dtype=torch.float32)

    def take(self, place, parameter):
        """Called when backward has made a parameter's gradient: add it to the float32 sums, and free it."""
        self.gradient[place] += parameter.grad.flatten()
        parameter.grad = None

    def step(self, lr):
        """One AdamW step with the summed gradients: m = b1 m + (1-b1) g,  v = b2 v + (1-b2) g^2,

            w = w - lr (m / (1-b1^t) / (sqrt(v / (1-b2^t)) + eps) + decay w)

        Returns the gradients' global norm before clipping. If that is not finite, which all
        processes see, nothing changes.
        """
        config, gradient = self.config, self.gradient
        if world() > 1:
            gradient = torch.empty_like(self.master)
            reduce_scatter(gradient, self.gradient)
        self.gradient = None

        norm = math.sqrt(all_reduce(gradient.double().square().sum()).item())
        if not math.isfinite(norm):
            return norm
        gradient = gradient * min(1.0, config.max_grad_norm / (norm + 1e-6))

        self.updates += 1
        self.mean.lerp_(gradient, 1 - config.adam_beta1)
        self.square.mul_(config.adam_beta2).addcmul_(gradient, gradient, value=1 - config.adam_beta2)
        mean = self.mean / (1 - config.adam_beta1**self.updates)
        root = (self.square / (1 - config.adam_beta2**self.updates)).sqrt()
        self.master -= lr * (mean / (root + config.adam_eps) + config.weight_decay * self.master)
        self.write_weights()
        return norm

    def write_weights(self):
        """Write the master weights, rounded to the model's dtype, into every process's model."""
        shard = self.master.to(self.flat.dtype)
        if world() > 1:
            all_gather(self.flat, shard)
        else:
            self.flat.copy_(shard)

    def save(self, path):
        """Write this process's shard to PATH-RANK-of-WORLD.safetensors."""
        tensors = {name: tensor.cpu() for name, tensor in self.state.items()}
        save_file(tensors, shard_file(path, rank(), world()), metadata={"updates": str(self.updates)})

    def load(self, path, processes):
        """Read this process's shard from the files that `processes` processes wrote; their number may differ."""
        mine = rank() * self.shard_size  # where my shard starts in the flat weights
        their_size = math.ceil(self.size / processes)
        for other in range(processes):
            theirs = other * their_size
            # the part of the flat weights that both shards hold
            first = max(mine, theirs)
            last = min(mine + self.shard_size, theirs + their_size, self.size)
            with safe_open(shard_file(path, other, processes), framework="pt") as file:
                self.updates = int(file.metadata()["updates"])
                if first < last:
                    for name, tensor in self.state.items():
                        tensor[first - mine : last - mine] = file.get_slice(name)[first - theirs : last - theirs]
        self.write_weights()


def shard_file(path, process, processes):
    return f"{path}-{process}-of-{processes}.safetensors"


def learning_rate(update, updates, config):
    """lr of optimizer step `update` = 0.. of `updates`: linear warm-up, then a cosine down to lr * lr_final, clamped.

    >>> c = Config(lr=1.0, lr_warmup=0.2, lr_final=0.1)
    >>> [round(learning_rate(u, 10, c), 3) for u in (0, 1, 2, 6, 10, 15)]
    [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]
    """
    warmup = round(config.lr_warmup * updates)
    if update < warmup:
        return config.lr * (update + 1) / warmup
    progress = min(1.0, (update - warmup) / max(1, updates - warmup))  # clamped: an unclamped cosine climbs again
    return config.lr * (config.lr_final + (1 - config.lr_final) * (1 + math.cos(math.pi * progress)) / 2)


# ---- One update of one set of weights ------------------------------------------------------------


@dataclass
class Policy:
    """One set of weights and the agents that use it: one agent, or all of them with --share-weights."""

    agents: tuple  # of names
    model: Transformer
    optimizer: ShardedAdamW


def update_policy(policy, reference, scored, step, config, stopwatch=None):
    """All optimizer steps of a policy for rollout `step` = 1..; returns agent -> metrics.

    scored: this process's TrainedActions of the policy's agents. Every process must call this, also
    without any. stopwatch: counts scoring and update.
    """
    stopwatch = stopwatch or rollout.Stopwatch()

    # advantages
    updates = math.ceil(config.problems * config.samples / config.train_batch)
    with stopwatch.part("scoring"):
        fill_old_and_kl(policy.model, reference, scored, updates, config)
    for name in policy.agents:
        set_advantages([s for s in scored if s.action.agent == name], config)

    # one denominator: the actions of each optimizer step, on all processes, known before any
    # backward pass
    counts = torch.zeros(updates)
    for s in scored:
        counts[s.update] += s.weight
    all_reduce(counts)

    # optimizer steps
    norms = []
    lr = 0.0
    for update, count in enumerate(counts.tolist()):
        lr = learning_rate((step - 1) * updates + update, config.steps * updates, config)
        if count == 0:  # all processes agree; without this, Adam would move on old gradients alone
            continue
        with stopwatch.part("update"):
            accumulate(policy, micro_batches_of(scored, update, config), count, config)
            norms.append(policy.optimizer.step(lr))
        if not math.isfinite(norms[-1]):
            raise RunError(f"step {step}: a gradient of {policy.agents[0]} is not finite", everywhere=True)

    common = dict(grad_norm=max(norms, default=0.0), lr=lr)
    return {
        name: agent_metrics([s for s in scored if s.action.agent == name], config) | common for name in policy.agents
    }


def accumulate(policy, micro_batches, count, config):
    """Sum the gradients of an optimizer step's loss over micro-batches. count: its actions, over all processes."""
    policy.optimizer.zero_grad()
    device = policy.model.device
    for micro_batch in micro_batches:
        logprobs, entropies = action_logprobs(policy.model, micro_batch, config.temperature)
        old = torch.cat([s.old for s in micro_batch])
        advantages = torch.cat([s.advantage for s in micro_batch]).to(device)
        if config.importance_cap:
            mismatch = torch.cat([s.mismatch for s in micro_batch]).to(device)
            advantages = advantages * mismatch.exp().clamp(max=config.importance_cap)
        weights = torch.cat([torch.full_like(part.detach(), 1 / (count * len(part))) for part in logprobs])
        loss, ratio = policy_loss(torch.cat(logprobs), old, advantages, weights, config.clip)
        loss.backward()
        ratios = ratio.split([len(part) for part in logprobs])
        for s, action_ratio, entropy in zip(micro_batch, ratios, entropies, strict=True):
            s.entropy = entropy.sum().item()
            s.clipped = ((action_ratio - 1).abs() > config.clip).sum().item()
            s.largest_ratio = action_ratio.max().item()


def agent_metrics(scored, config):
    """One agent's metrics over all processes, from this one's TrainedActions; the README says what they mean."""
    used = [s for s in scored if s.weight]
    mismatch = torch.cat([torch.zeros(0), *[s.mismatch for s in scored]]).double()
    clipped_mismatch = (mismatch.exp() - 1).abs() > config.clip
    # sums and maxima over all processes; those behind `tokens` are of all actions, the rest of those in the update
    sums = dict(
        tokens=len(mismatch),
        kl=sum(s.kl.double().sum().item() for s in scored),
        mismatch=mismatch.abs().sum().item(),
        mismatch_clipped=clipped_mismatch.sum().item(),
        used_tokens=sum(len(s.kl) for s in used),
        entropy=sum(s.entropy for s in used),
        clipped=sum(s.clipped for s in used),
    )
    reduced = all_reduce(torch.tensor([*sums.values()], dtype=torch.float64)).tolist()
    total = dict(zip(sums, reduced, strict=True))
    largest_ratio = max((s.largest_ratio for s in used), default=0.0)
    largest_mismatch = mismatch.abs().max().item() if len(mismatch) else 0.0
    maxima = all_reduce(torch.tensor([largest_ratio, largest_mismatch]), dist.ReduceOp.MAX).tolist()
    tokens, used_tokens = max(1, total["tokens"]), max(1, total["used_tokens"])
    return dict(
        kl=total["kl"] / tokens,
        entropy=total["entropy"] / used_tokens,
        ratio_max=maxima[0] if total["used_tokens"] else 1.0,
        clip_fraction=total["clipped"] / used_tokens,
        mismatch=maxima[1],
        mismatch_mean=total["mismatch"] / tokens,
        mismatch_clipped=total["mismatch_clipped"] / tokens,
    )


# ---- Checkpoints: written beside, then renamed; `latest` last ------------------------------------


def publish_folder(partial_folder, final):
    """Give a complete folder its name, after its content has reached the disk."""
    for folder, _, names in os.walk(partial_folder, topdown=False):
        for path in [*(os.path.join(folder, name) for name in names), folder]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(partial_folder, final)


# what a run writes
OWN_FILES = re.compile(r"(step_\d{6}|base|claim|latest|config\.json|[a-z_]+\.jsonl)((\.\d+){0,2}\.partial)?")


def save_checkpoint(out, step, policies, tokenizer, keep=0, base=""):
    """Write OUT/step_NNNNNN: each agent's Hugging Face folder, and the optimizers' shards. All processes call it.

    base: of adapters, the folder or hub id of the frozen model; then an agent's folder is as peft has it.
    keep: how many steps' models stay, the newest; 0: all. Raises RunError on a process that cannot
    write; the last checkpoint is then as it was.
    """
    name = f"step_{step:06d}"
    if latest_checkpoint(out) == name:
        return  # replacing it would leave a moment without any
    together(write_or_fail, out, start_checkpoint, name)
    together(write_or_fail, out, write_checkpoint, name, policies, tokenizer, base)
    together(write_or_fail, out, publish_checkpoint, name, step, keep)


def write_or_fail(out, write, *arguments):
    """Call a function that writes into the run folder; what goes wrong is a RunError in one sentence."""
    try:
        write(out, *arguments)
    except (OSError, SafetensorError) as error:
        last = latest_checkpoint(out) or "none yet"
        raise RunError(f"nothing can be written into {out}: {error}; the last complete checkpoint: {last}") from None


def start_checkpoint(out, name):
    """Make an empty folder to write into, beside the final one."""
    if rank() == 0:
        shutil.rmtree(os.path.join(out, name + ".partial"), ignore_errors=True)
        os.makedirs(os.path.join(out, name + ".partial", "optimizer"))


def write_checkpoint(out, name, policies, tokenizer, base):
    """Write this process's shards, and the first process the models."""
    folder = os.path.join(out, name + ".partial")
    for policy in policies:
        policy.optimizer.save(os.path.join(folder, "optimizer", policy.agents[0]))
        if rank() == 0:
            for agent in policy.agents:
                if base:
                    save_adapter(policy.model, base, os.path.join(folder, agent))
                else:
                    save(policy.model, tokenizer, os.path.join(folder, agent))


def publish_checkpoint(out, name, step, keep):
    """Give the folder its name, then name it the latest, then remove what is no longer needed of earlier ones."""
    if rank() > 0:
        return
    partial_folder = os.path.join(out, name + ".partial")
    write_atomically(os.path.join(partial_folder, "state.json"), json.dumps(dict(step=step, processes=world())))
    publish_folder(partial_folder, os.path.join(out, name))
    write_atomically(os.path.join(out, "latest"), name + "\n")
    # NOTE: delete only what is named step_NNNNNN: the user may have given a folder with other content
    steps = sorted(folder for folder in os.listdir(out) if re.fullmatch(r"step_\d{6}", folder))
    for place, old in enumerate(reversed(steps)):
        if keep and place >= keep:
            shutil.rmtree(os.path.join(out, old), ignore_errors=True)
        elif old != name:  # the shards of one checkpoint are enough to go on from
            shutil.rmtree(os.path.join(out, old, "optimizer"), ignore_errors=True)


def load_checkpoint(out, policies):
    """Bring the policies to the state of the last complete checkpoint; returns its step, 0 if there is none yet."""
    name = latest_checkpoint(out)
    if not name:
        return 0
    folder = os.path.join(out, name)
    try:
        state = read_json(folder, "state.json", what="checkpoint")
        for policy in policies:
            policy.optimizer.load(os.path.join(folder, "optimizer", policy.agents[0]), state["processes"])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InputError(f"the checkpoint {folder} cannot be read: {error}") from None
    return state["step"]


def cut_logs(out, steps):
    """Drop the lines of the logs that belong to steps after `steps`: the resumed run will write them again."""
    for name in ("metrics", "episodes", "evaluations", "eval_episodes"):
        path = os.path.join(out, name + ".jsonl")
        if rank() == 0 and os.path.exists(path):
            lines = [line for line in rollout.read_log(path) if line["step"] <= steps]
            write_atomically(path, json_lines(lines))


def json_lines(objects):
    """The text of a file of JSON lines."""
    return "".join(json.dumps(line) + "\n" for line in objects)


def append_lines(out, name, objects):
    """Append JSON lines to a log in the run folder."""
    with open(os.path.join(out, name), "a", encoding="utf-8") as file:
        file.write(json_lines(objects))


# ---- The embedded model's start: supervised learning on demonstrations of which half are wrong ----


def demonstration_ids(tokenizer, demonstration):
    """(context, completion) of a Demonstration as token ids, terminators included."""

    def completion_of(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]

    context = agents.render(tokenizer, demonstration.agent, demonstration.values)
    for action in demonstration.earlier:
        context = agents.extend(tokenizer, context, completion_of(action.reply), action.observation)
    return context, completion_of(demonstration.reply)


def warm_start(model, tokenizer, pipeline, config):
    """Train a new embedded model until it can do every agent's job, right about half of the time."""
    # NOTE: one thread. More would split sums differently, and hundreds of steps blow such a
    # difference up until a run under torchrun (one thread per process) has another base model than
    # a run without it
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.warm_lr)
    bar = tqdm(range(config.warm_steps), desc="warm start")
    for done in bar:
        rng = random.Random(digest("warm start", config.seed, done))
        pairs = [demonstration_ids(tokenizer, pipeline.demonstration(rng)) for _ in range(64)]
        contexts, completions = zip(*pairs, strict=True)
        logprobs, _ = token_logprobs(model, contexts, completions)
        loss = -logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:  # 50 steps up, then straight down to 0
            group["lr"] = config.warm_lr * min((done + 1) / 50, 1 - done / config.warm_steps)
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    torch.set_num_threads(threads)


def make_embedded_model(out, config):
    """Make OUT/base, the folder of the warm-started embedded model, unless it is there; the first process does it."""
    base = os.path.join(out, "base")
    if rank() == 0 and not os.path.isdir(base):
        pipeline = agents.PIPELINES[config.pipeline]
        model, tokenizer = tiny(pipeline.pieces, config.seed)
        warm_start(model, tokenizer, pipeline, config)
        save(model, tokenizer, base + ".partial")
        publish_folder(base + ".partial", base)


# ---- Before the loop: problems, coach, run folder, policies --------------------------------------


@dataclass
class Run:
    """What all steps of a run share."""

    config: Config
    pipeline: agents.Pipeline
    problems: list  # to train on
    held_out: list  # problems to evaluate on
    coach: Callable  # Cases -> verdicts
    api: ApiModel | None  # behind the coach, if it is one
    tokenizer: object
    reference: Transformer  # frozen: the weights that every agent started from
    policies: list  # of Policy
    sandbox: agents.Sandbox

    def models(self):
        """agent name -> the model that it acts with."""
        return {name: policy.model for policy in self.policies for name in policy.agents}

    def file(self, name):
        """The path of a file in the run folder."""
        return os.path.join(self.config.out, name)

    def log(self, name, objects):
        """Append JSON lines to a file in the run folder; the first process does it. A collective."""
        together(write_or_fail, self.config.out, append_lines, name, objects if rank() == 0 else [])

    def save(self, step):
        """Write a checkpoint, and forget old ones. A collective."""
        base = start_path(self.config) if self.config.lora_rank else ""
        save_checkpoint(self.config.out, step, self.policies, self.tokenizer, self.config.keep, base)


def read_problems(config):
    """(problems to train on, problems to evaluate on). Raises InputError if any repeat, unless that is allowed."""
    pipeline = agents.PIPELINES[config.pipeline]
    data_options = agents.DataOptions(config.data_root, config.task_texts, config.allow_missing)
    if config.train:
        [problems] = agents.load_files([config.train], pipeline, data_options).values()
    else:
        problems = pipeline.problems("train")
    if config.train_subset:
        problems = agents.subset(problems, config.train_subset, seed=42)
    files = agents.load_files(config.eval, pipeline, data_options)
    held_out = [problem for part in files.values() for problem in part]
    if not held_out and pipeline.problems:
        held_out = pipeline.problems("held-out")

    # a pipeline's own problems are disjoint by construction, and ask some questions twice
    from_files = (problems if config.train else [], held_out if config.eval else [])
    for sentence in agents.check_problems(*from_files):
        require(config.allow_repeats, f"{sentence}: give --allow-repeats to go on all the same")
        if rank() == 0:
            rollout.complain("train.py", sentence)
    require(config.problems <= len(problems), f"--problems {config.problems}: there are {len(problems)} only")
    for problem in [*problems, *held_out]:
        size = sum(agents.file_size(data) for data in problem.files.values())
        room = config.sandbox_disk << 19  # half of it is left for what agents write
        require(size < room, f"{problem.id} takes {size >> 20} MiB: --sandbox-disk must be twice that")
    return problems, held_out[: config.eval_problems]


def make_coach(config, device):
    """(coach: Cases -> verdicts, the ApiModel behind it or None). An API first judges a small case."""
    if config.judge == "rules":
        return rules, None
    if config.judge == "local":
        dtype = compute_dtype(device)
        model = LocalModel(config.judge_model, device, dtype, config.judge_max_tokens, date=config.date)
        return partial(judge_by, model), None
    key = config.judge_key_env
    require(not key or os.environ.get(key), f"the environment variable {key}, which --judge-key-env names, is empty")
    api = ApiModel(
        config.judge_url,
        config.judge_model,
        key=os.environ.get(config.judge_key_env, ""),
        cache=config.judge_cache,
        calls=config.judge_budget_calls,
        tokens=config.judge_budget_tokens,
        max_tokens=config.judge_max_tokens,
        concurrency=config.judge_concurrency,
        timeout=config.judge_deadline / 2,
        deadline=config.judge_deadline,
    )
    api.probe()
    return partial(judge_by, api), api


def check_shared_folder(config):
    """Raise InputError unless the run folder is the same one for all processes. A collective."""
    # a word that only this start of the run knows
    word = gather([f"{time.time_ns()} {os.getpid()}"])[0]
    together(write_or_fail, config.out, write_claim, word)
    claim = Path(config.out, "claim")
    found = claim.exists() and claim.read_text(encoding="utf-8") == word
    everywhere = all(gather([found]))
    if rank() == 0:
        claim.unlink()
    sentence = f"the run folder {config.out} is not one folder for all processes: it must be on a shared disk"
    together(require, everywhere, sentence)


def write_claim(out, word):
    """Leave a word in the run folder; the first process does it."""
    if rank() == 0:
        Path(out, "claim").write_text(word, encoding="utf-8")


def check_same_problems(config, problems):
    """Raise InputError if a run that goes on has other problems than it started with."""
    if config.resume:
        started_with = read_json(config.out, "config.json", what="run folder").get("problems_digest")
        changed = f"{config.out} was started with other problems, or in another order: its problem files have changed"
        require(agents.fingerprint(problems) == started_with, changed)


def write_config(config, problems):
    """Make the run folder, with its config.json unless the run goes on."""
    try:
        os.makedirs(config.out, exist_ok=True)
        if rank() == 0 and not config.resume:
            values = asdict(config) | {"problems_digest": agents.fingerprint(problems)}
            write_atomically(os.path.join(config.out, "config.json"), json.dumps(values, indent=1))
    except OSError as error:
        raise InputError(f"the run folder {config.out} cannot be written: {error}") from None


def check_run_folder(config):
    """Raise InputError for a folder that holds another run, or anything that is not a run's."""
    out = config.out
    free = config.resume or not os.path.exists(os.path.join(out, "config.json"))
    require(free, f"{out} holds another run: give another --out, or --resume to go on with it")
    names = os.listdir(out) if os.path.isdir(out) and not config.resume else []
    foreign = sorted(name for name in names if not OWN_FILES.fullmatch(name) and not name.startswith("."))
    example = foreign[0] if foreign else ""
    require(not foreign, f"{out} holds what is not a run's, such as {example}: give another --out")


def make_policies(start, pipeline, config):
    """One Policy for each agent, or a single one with --share-weights; each starts as the starting model.

    start stays as it is, the KL reference: policies are copies of it, or adapters over it.
    """
    names = tuple(agent.name for agent in pipeline.agents)
    groups = [names] if config.share_weights else [(name,) for name in names]
    policies = []
    for group in groups:
        if config.lora_rank:
            model = with_adapter(start, config.lora_rank, digest("adapter", config.seed, group) % 2**63)
        else:
            model = copy.deepcopy(start)
        model.gradient_checkpointing = config.gradient_checkpointing
        policies.append(Policy(group, model, ShardedAdamW(model, config)))
    return policies


# ---- The loop ------------------------------------------------------------------------------------


def run_training(config):
    """Run the whole training that a Config describes. Returns 0, or 130 if it was interrupted (and saved)."""
    check_run_folder(config)  # before the processes meet: none of them can have written into the folder yet
    rollout.start_processes(config.collective_timeout or time_limit(config))
    today = gather([str(datetime.date.today())])[0]
    config = replace(config, date=config.date or today)
    device = together(rollout.choose_device, config.device)
    pipeline = agents.PIPELINES[config.pipeline]
    problems, held_out = together(read_problems, config)
    all_problems = [*problems, *held_out]
    together(check_same_problems, config, all_problems)
    coach, api = together(make_coach, config, device)
    with together(rollout.open_sandbox, config, pipeline) as sandbox:
        reference, tokenizer = load_start(config, device, all_problems)
        policies = make_policies(reference, pipeline, config)
        reference.requires_grad_(False)
        run = Run(config, pipeline, problems, held_out, coach, api, tokenizer, reference, policies, sandbox)
        done = together(load_checkpoint, config.out, policies) if config.resume else 0
        together(write_or_fail, config.out, cut_logs, done)
        if rank() == 0:
            print_start(run, device)
        before = held_out_figures(run, dict.fromkeys(run.models(), reference), 0)
        if not train_until_stopped(run, done):
            return 130
        after = held_out_figures(run, run.models(), config.steps)
    if rank() == 0:
        report(run, before, after)
    return 0


def load_start(config, device, problems):
    """(model, tokenizer) that every agent starts from. Makes the run folder, and the embedded model if need be."""
    arguments = (device, compute_dtype(device), config.max_context_tokens + config.max_new_tokens)
    if config.model:
        start = together(load, config.model, *arguments)  # before the folder is made: the model may be missing
    together(write_config, config, problems)
    check_shared_folder(config)
    if not config.model:
        together(write_or_fail, config.out, make_embedded_model, config)
        start = together(load, os.path.join(config.out, "base"), *arguments)
    return start


def start_path(config):
    """The model that every agent starts from: what --model names (a folder by its whole path), or the embedded one."""
    if config.model and not os.path.isdir(config.model):
        return config.model
    return os.path.abspath(config.model or os.path.join(config.out, "base"))


def print_start(run, device):
    """Say what is about to be trained, and how much disk it takes."""
    if run.pipeline.preload:
        print(f"the agents' programs find these libraries installed: {agents.LIBRARIES}")
    weights = run.policies[0].optimizer.size
    print(f"{len(run.policies)} x {weights:,} weights, {world()} x {device.type}, run folder {run.config.out}")
    models = len(run.pipeline.agents) * weights * run.reference.embed_tokens.weight.element_size()
    optimizer = len(run.policies) * weights * 12  # master weights and two moments in float32
    print(f"a checkpoint takes {models / 1e9:.3g} GB of models and {optimizer / 1e9:.3g} GB of optimizer state", end="")
    kept = f"the models of {run.config.keep} checkpoints stay" if run.config.keep else "all models stay (see --keep)"
    print(f"; {kept}")


def train_until_stopped(run, done):
    """Train from step done + 1 to the last; False if a signal stopped it early. Saves as it goes, and at its end."""
    config = run.config
    signals = StopSignals()
    bar = tqdm(range(done + 1, config.steps + 1), initial=done, total=config.steps, disable=rank() > 0)
    for step in bar:
        finished = step - 1  # the step that the weights are of
        try:
            # the evaluation of the step before opens this step: a run that is stopped in it repeats it on --resume
            if config.eval_every and finished % config.eval_every == 0 and finished > 0:
                held_out_figures(run, run.models(), finished, signals.interruptible)
            metrics = train_step(run, step, signals.interruptible)
            finished = step
            run.log("metrics.jsonl", [metrics])
            show_progress(bar, metrics)
            together(signals.check)
        except Stopped:
            run.save(finished)
            if finished < config.steps:  # else there is nothing left to do but the end
                if rank() == 0:
                    how = f"go on with --out {config.out} --resume"
                    rollout.complain("train.py", f"stopped after step {finished}; {how}")
                return False
        if step % config.save_every == 0 or step == config.steps:
            run.save(step)
    signals.restore()
    return True


class StopSignals:
    """Ctrl-C, or torchrun's SIGTERM. A second Ctrl-C ends the process where it stands.

    NOTE: a launcher waits only so long before it kills (torchrun 30 s), and a step of large models
    takes minutes. While episodes run no weight changes and no collective is open, so there a signal
    raises Stopped at once.
    """

    def __init__(self):
        self.asked = False
        self.raises = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask)

    def ask(self, number, frame):
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.raises:
            self.raises = False
            raise Stopped

    def check(self):
        """Raise Stopped if a signal has come."""
        if self.asked:
            raise Stopped

    @contextlib.contextmanager
    def interruptible(self):
        """A block in which a signal raises Stopped at once."""
        self.raises = True
        try:
            self.check()
            yield
        finally:
            self.raises = False

    def restore(self):
        """From here on signals end the process, as they do by default."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def show_progress(bar, metrics):
    """The most telling figures of a step, behind the progress bar."""
    scores = {name: shown(agent["score"], 1) for name, agent in metrics["agents"].items()}
    kl = max(agent["kl"] for agent in metrics["agents"].values())
    bar.set_postfix(accuracy=f"{metrics['accuracy']:.2f}", **scores, kl=f"{kl:.2f}")


def train_step(run, step, interruptible):
    """Rollout `step` = 1.. and its updates; returns the line of metrics.jsonl. All processes call it together.

    Raises Stopped while episodes run, if a signal comes: nothing of the step is then recorded.
    """
    config, stopwatch = run.config, rollout.Stopwatch()
    started = time.monotonic()

    # collect episodes, each process its share; record them all
    problems = problems_of_step(run.problems, step, config.problems, config.seed)
    sampling = make_sampling(config, ("train", config.seed, step))
    episodes, records = collect(
        run.pipeline,
        run.models(),
        run.tokenizer,
        problems,
        config.samples,
        run.coach,
        run.sandbox,
        sampling,
        interruptible,
        stopwatch,
    )
    run.log("episodes.jsonl", [dict(step=step) | r for r in records])
    stop_if_coach_fails(run, records, step)

    # every agent learns from its own actions
    scored = trained_actions(episodes, config)
    by_agent = {}
    for policy in run.policies:
        own = [s for s in scored if s.action.agent in policy.agents]
        for name, metrics in update_policy(policy, run.reference, own, step, config, stopwatch).items():
            by_agent[name] = summarise_agent(records, name) | metrics

    line = dict(step=step, accuracy=sum(r["correct"] for r in records) / len(records))
    line |= dict(seconds=time.monotonic() - started, agents=by_agent, kinds=kind_figures(records))
    line["parts"] = time_figures(stopwatch, records)
    if run.api:
        line["judge"] = api_metrics(run.api)
    return line


def time_figures(stopwatch, records):
    """Seconds by part of a step, by this process's clock, and tokens a second, of all processes together."""
    seconds = dict(stopwatch.seconds)
    tokens = sum(action["tokens"] for r in records for action in r["actions"])
    per_second = {f"{what}_per_second": tokens / seconds[what] for what in ("sampling", "update") if seconds.get(what)}
    return seconds | per_second


def problems_of_step(problems, step, count, seed):
    """The problems of step 1..: passes over the training problems, each in an order that depends on (seed, pass) alone.

    Nothing needs to be remembered to resume. Problems that do not fill a step at the end of a pass
    are skipped in it.
    """
    steps_in_pass = len(problems) // count
    passes_done, place = divmod(step - 1, steps_in_pass)
    order = list(range(len(problems)))
    random.Random(digest("order", seed, passes_done)).shuffle(order)

    # stratified: spread each kind of task evenly over 0..1 and sort; any part of the order then holds
    # the kinds in the proportion of the whole
    by_kind = {}
    for i in order:
        by_kind.setdefault(problems[i].kind, []).append(i)
    positions = []
    for members in by_kind.values():
        positions += [((k + 0.5) / len(members), i) for k, i in enumerate(members)]
    order = [i for _, i in sorted(positions)]

    start = place * count
    return [problems[i] for i in order[start : start + count]]


def make_sampling(c, stream):
    """How to sample in training, by the Config c; evaluations replace the temperature."""
    limits = (c.max_new_tokens, c.max_context_tokens, c.sample_rows, c.cache_gib)
    return Sampling(stream, c.temperature, *limits, c.thinking, c.date)


def stop_if_coach_fails(run, records, step):
    """Save the step before and raise RunError if the coach failed on too many actions: the rest is a biased sample."""
    config = run.config
    failures = [a["failure"] for r in records for a in r["actions"] if a["failure"]]
    actions = sum(len(r["actions"]) for r in records)
    if len(failures) > config.max_failures * actions:
        run.save(step - 1)
        sentence = f"step {step}: the coach failed on {len(failures)} of {actions} actions, e.g. {failures[0]}"
        raise RunError(sentence, everywhere=True)


def api_metrics(api):
    """Calls, cache hits, retries, failures and tokens of the step, and seconds a call took, over all processes."""
    usages = gather([api.take_usage()])
    counted = ("calls", "hits", "retries", "failures", "tokens")
    metrics = {name: sum(usage.counts[name] for usage in usages) for name in counted}
    seconds = sorted(s for usage in usages for s in usage.seconds)
    for percent in (50, 95):
        metrics[f"seconds_p{percent}"] = seconds[len(seconds) * percent // 100] if seconds else None
    return metrics


def held_out_figures(run, models, step, interruptible=contextlib.nullcontext):
    """eval.summarise() of these models, those after `step`, on held-out problems; None with --eval-problems 0.

    The figures go to evaluations.jsonl, the episodes to eval_episodes.jsonl; what is there already
    is not run again.
    """
    config = run.config
    if not run.held_out:
        return None
    figures = logged_figures(run, step)
    if figures is None:
        sampling = replace(make_sampling(config, ("eval", config.seed)), temperature=config.eval_temperature)
        # other coaches than rules cost time and money, and accuracy needs none
        coach = run.coach if config.judge == "rules" else nobody
        problems, samples = run.held_out, config.eval_samples
        _, records = collect(
            run.pipeline, models, run.tokenizer, problems, samples, coach, run.sandbox, sampling, interruptible
        )
        figures = summarise(records, list(models))
        run.log("eval_episodes.jsonl", [dict(step=step) | r for r in records])
        run.log("evaluations.jsonl", [dict(step=step) | figures])
    if rank() == 0:
        when = {0: "before", config.steps: "after"}.get(step, f"at step {step} of")
        print(f"held-out {run.pipeline.success_name} {when} training: {100 * figures['accuracy']:.1f}%", flush=True)
    return figures


def logged_figures(run, step):
    """What evaluations.jsonl says of a step; None where it does not. A collective: the first process looks."""
    lines = rollout.read_log(run.file("evaluations.jsonl")) if rank() == 0 else []
    found = gather([line for line in lines if line["step"] == step])
    return found[0] if found else None


def report(run, before, after):
    """What a newcomer should see at the end: what was learned, and where to look next."""
    config = run.config
    if after:
        print(f"\n{len(run.held_out)} held-out problems, {config.eval_samples} samples each")
        print_summary("before", before, run.pipeline.success_name)
        print_summary("after ", after, run.pipeline.success_name)
    print(f"every action, its score and the reason: {config.out}/episodes.jsonl; curves: {config.out}/metrics.jsonl")
    print(f"compare again, on other samples: python eval.py --run {config.out} --seed 1")


def main(argv=None):
    """The command. Returns its exit code, see rollout.exit_code()."""
    return rollout.exit_code("train.py", lambda argv: run_training(read_config(argv)), argv)


if __name__ == "__main__":
    code = main()
    if code == rollout.EXIT_CODES[Stopped]:  # threads that still wait for a coach must not keep the process
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
