"""train.py: MAPPA. Every agent learns, with its own weights, from the coach's scores of its own actions.

For an action with sampled tokens y_1..y_T and coach score c, R = c / 10 and, with gamma = 1 and within the action only,

    kl_t  = log pi_old(y_t) - log pi_ref(y_t)              k1 estimator, detached; ref = the agent's starting weights
    r_t   = -beta kl_t + [t = T] R                         the KL penalty is part of the reward, not of the loss
    G_t   = sum_{u >= t} r_u
    A_t   = (G_t - mean) / std                             REINFORCE++: over all tokens of all actions of this agent
    rho_t = pi_theta(y_t) / pi_old(y_t)
    L     = - mean over actions, mean over tokens, of min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t)

One script, any number of processes: each samples and scores its share of the episodes; statistics and gradients are
summed over all of them, so that the number of processes changes the speed and nothing else.

    what                              CPU       GPU        why
    weights for sampling and scoring  float32   bfloat16   every process holds those of all agents: sampling is local
    logits, loss, sums of gradients   float32   float32
    master weights, Adam moments      float32   float32    1/N per process; at lr 1e-6 a bfloat16 weight never moves

What we leave out: critic, entropy bonus, KL in the loss, returns across turns or agents (as in the paper); tensor and
pipeline parallelism. Where the official code differs from the paper we follow the paper, see README.

    python train.py                                        # three tiny agents learn arithmetic on a laptop
    python train.py --pipeline tables                      # three others learn data analysis
    torchrun --standalone --nproc_per_node=8 train.py      # the same run on eight processes
    python train.py --preset mathchat --model FOLDER_OR_ID --train FILE --judge api ...    # the paper's, see README"""
import argparse, contextlib, copy, inspect, json, math, os, random, re, shutil, signal, sys, threading, time, typing
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import partial
from statistics import fmean, pstdev

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm
import judge, model
from agents import LIBRARIES, PIPELINES, InputError, Pipeline, Sandbox, SandboxError, digest, extend, render, require
from agents import check_problems, load_files, read_json, subset
from eval import data_figures, evaluate, latest_checkpoint, measure, nobody, print_summary, summarise, summarise_agent
from rollout import Sampling, gather, make_jobs, rank, record, run_episodes, world

# ---- Configuration. Each field is an option of the command line, with its comment as help ----------------------------
@dataclass
class Config:
    preset: str = ""  # named set of defaults: arithmetic, tables, mathchat, dsbench; as --pipeline if that is given
    pipeline: str = "arithmetic"  # which agents work on which kind of problem
    model: str = ""  # Hugging Face folder or hub id that every agent starts from; empty: the embedded model
    train: str = ""  # problem file to train on; empty: the pipeline's own problems
    eval: tuple = ()  # problem files to evaluate on; none: the pipeline's own held-out problems
    train_subset: int = 0  # train on so many of them only, drawn as in the paper; 0: on all
    data_root: str = ""  # DSBench: folder that the paths in its problem files start from; empty: the current one
    task_texts: str = ""  # DSBench: JSON file of cleaned task texts and column names; empty: the texts as published
    allow_missing: bool = False  # DSBench: leave out tasks whose data are absent
    allow_repeats: bool = False  # go on although problems repeat, or are both trained and evaluated on
    out: str = ""  # run folder; empty: runs/PIPELINE
    resume: bool = False  # go on from the run folder's last checkpoint, with its config
    seed: int = 0  # seed of everything: weights, order of problems, sampling
    steps: int = 150  # rollouts; each is followed by one pass over it
    problems: int = 32  # problems in a rollout
    samples: int = 2  # episodes for each of them
    train_batch: int = 32  # episodes for each optimizer step
    reward: typing.Literal["process", "outcome", "mixed"] = "process"  # coach scores, the end result, or their mean
    advantage: typing.Literal["reinforce++", "grpo", "rloo"] = "reinforce++"  # see set_advantages()
    share_weights: bool = False  # one set of weights for all agents, the control experiment
    beta: float = 0.01  # weight of the KL penalty in the reward
    clip: float = 0.2  # clipping range of the ratio
    lr: float = 4e-4  # peak learning rate
    lr_warmup: float = 0.03  # share of the optimizer steps in which it rises from 0
    lr_final: float = 0.1  # share of it that the cosine ends at
    adam_beta1: float = 0.9  # decay of the gradient mean
    adam_beta2: float = 0.95  # decay of the squared gradient mean
    adam_eps: float = 1e-6  # added to the root of the squared gradient mean; float noise stays below it
    weight_decay: float = 0.0  # decoupled (AdamW)
    max_grad_norm: float = 1.0  # gradients of one agent are scaled down to this global norm
    temperature: float = 1.0  # of sampling, and so of scoring
    thinking: typing.Literal["default", "on", "off"] = "default"  # where the chat template has such a switch (Qwen3)
    max_new_tokens: int = 24  # generation limit of one action
    max_context_tokens: int = 512  # an episode ends early if an agent's context gets longer
    mask_truncated: bool = True  # leave actions that hit the generation limit out of the update
    max_failures: float = 0.2  # stop if the coach fails on more than this share of a rollout's actions
    judge: typing.Literal["rules", "api", "local"] = "rules"  # the coach: offline rules, an API, or a model run here
    judge_url: str = ""  # API: an OpenAI-compatible endpoint, such as http://localhost:8000/v1
    judge_model: str = ""  # API: its name there; local: a Hugging Face folder or hub id
    judge_key_env: str = ""  # API: the environment variable that holds the key; empty: no key
    judge_cache: str = ""  # API: folder for replies, so that no question is paid for twice; empty: none
    judge_budget_calls: int = 0  # API: calls that each process may make; 0: any number
    judge_budget_tokens: int = 0  # API: tokens that they may take; 0: any number
    judge_max_tokens: int = 1024  # API, local: limit of one reply, thinking included; a reply cut off is a Failure
    judge_concurrency: int = 8  # API: calls at once, from each process
    judge_deadline: float = 180.0  # API: seconds until a call that keeps failing is given up; one try gets half
    sample_rows: int = 256  # contexts sampled in one batch, on each process
    micro_batch_tokens: int = 8192  # padded tokens in one forward and backward pass; changes memory and speed only
    gradient_checkpointing: bool = False  # recompute activations in backward: less memory, a third more time
    warm_steps: int = 500  # supervised steps on 64 half-wrong demonstrations each; the embedded model starts there
    warm_lr: float = 8e-3  # their peak learning rate
    save_every: int = 50  # steps between checkpoints; the last step is always saved
    eval_problems: int = 200  # held-out problems before and after training; 0: no evaluation
    eval_every: int = 0  # steps between evaluations in between, into evaluations.jsonl; 0: none
    eval_samples: int = 2  # samples of each
    eval_temperature: float = 1.0  # of sampling in evaluations
    sandbox: typing.Literal["landlock", "limits"] = "landlock"  # isolation of programs; limits is not safe
    sandbox_timeout: float = 5.0  # seconds for one program
    sandbox_disk: int = 512  # MiB that an episode's files may take, those of its task included
    device: typing.Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one
    collective_timeout: float = 3600.0  # seconds until a process that waits for the others gives up

PAPER = dict(samples=2, train_batch=16, lr=1e-6, adam_eps=1e-8, gradient_checkpointing=True, warm_steps=0, judge="api")
PRESETS = {
    "arithmetic": {},  # the defaults above
    "tables": dict(steps=40, lr=2e-4, max_new_tokens=40, mask_truncated=False, warm_steps=400, save_every=20,
                   sandbox_timeout=10.0),
    "mathchat": PAPER | dict(  # 8 passes over 512 problems
        steps=128, problems=32, max_new_tokens=4096, max_context_tokens=24_576, sandbox_timeout=30.0, save_every=32,
        micro_batch_tokens=16_384, sample_rows=64, train_subset=512, eval_problems=10_000, eval_samples=4, eval_every=4,
        eval_temperature=0.6),
    "dsbench": PAPER | dict(  # 30 passes over 64 tasks
        steps=120, problems=16, max_new_tokens=16_384, max_context_tokens=65_536, sandbox_timeout=60.0, save_every=10,
        sandbox_disk=4096, micro_batch_tokens=32_768, sample_rows=32, eval_every=2)}

# what may change when a run goes on: none of these changes a number
FREE_ON_RESUME = ("resume", "out", "preset", "data_root", "save_every", "micro_batch_tokens", "gradient_checkpointing",
                  "sample_rows", "device", "collective_timeout", "judge_url", "judge_key_env", "judge_cache",
                  "judge_budget_calls", "judge_budget_tokens", "judge_concurrency", "judge_deadline")

option = lambda name: "--" + name.replace("_", "-")

class RunError(Exception):
    """A run cannot go on, through no fault of its input. One sentence; the run folder holds what to resume from."""

def config_parser():
    """An argparse parser with one option for each field of Config; only what was given appears in its result."""
    parser = argparse.ArgumentParser(description="Train agents with MAPPA.", argument_default=argparse.SUPPRESS)
    parser.error = lambda message: sys.exit(complain(message, 2))
    comments = dict(re.findall(r"^    (\w+): .*  # (.*)$", inspect.getsource(Config), re.MULTILINE))
    for f in fields(Config):
        how = dict(help=f"{comments[f.name]} (default: {f.default})".replace("%", "%%"))
        if f.type is bool: how |= dict(action=argparse.BooleanOptionalAction)
        elif f.type is tuple: how |= dict(nargs="*", metavar="FILE")
        elif typing.get_origin(f.type) is typing.Literal: how |= dict(choices=typing.get_args(f.type))
        else: how |= dict(type=f.type, metavar=f.type.__name__.upper())
        parser.add_argument(option(f.name), **how)
    return parser

def read_config(argv):
    """The Config of a command line: the options given, over the preset's values (or the saved run's), over defaults."""
    given = vars(config_parser().parse_args(argv))
    preset = given.get("preset") or given.get("pipeline", "arithmetic")
    require(preset in PRESETS, f"there is no preset or pipeline {preset!r}; known are {', '.join(PRESETS)}")
    config = Config(**{"pipeline": preset, **PRESETS[preset], **given, "preset": preset})
    require(config.pipeline in PIPELINES, f"there is no pipeline {config.pipeline!r}; known are {', '.join(PIPELINES)}")
    config.out = config.out or os.path.join("runs", config.pipeline)
    if config.resume: config = saved_config(config.out, given)
    check_config(config)
    return config

def saved_config(out, given):
    """The config of the run in `out`, with the free options given now; any other one must be as it was."""
    values = read_json(out, "config.json", what="run folder")
    require(set(values) == {f.name for f in fields(Config)}, f"{out} was written by another version of train.py")
    saved = Config(**values)
    for name, now in given.items():
        was, same = getattr(saved, name), name in FREE_ON_RESUME or now == getattr(saved, name)
        require(same, f"{out} was started with {option(name)} {was}, which cannot become {now} on --resume")
        setattr(saved, name, now)
    return saved

def check_config(c):
    """Raise InputError for values that make no sense, before anything slow has started."""
    from_zero = ("seed", "beta", "clip", "weight_decay", "warm_steps", "eval_problems", "train_subset",
                 "eval_every", "judge_budget_calls", "judge_budget_tokens")
    shares = ("lr_warmup", "lr_final", "max_failures", "adam_beta1", "adam_beta2")
    for name, number in [(f.name, getattr(c, f.name)) for f in fields(c) if f.type in (int, float)]:
        if name in shares: bound, holds = "in 0 to 1", 0 <= number <= 1
        elif name in from_zero: bound, holds = "0 or more", 0 <= number < math.inf
        else: bound, holds = "over 0", 0 < number < math.inf
        require(holds, f"{option(name)} must be {bound}, not {number}")
    pipeline, several = PIPELINES[c.pipeline], c.samples > 1 or c.advantage == "reinforce++"
    require(c.model or pipeline.pieces, f"the {c.pipeline} pipeline needs a model: give --model FOLDER_OR_ID")
    require(c.train or pipeline.problems, f"the {c.pipeline} pipeline needs problems: give --train FILE")
    require(c.judge != "rules" or pipeline.problems, "the rules coach knows the miniature only: give another --judge")
    require(c.judge != "api" or (c.judge_url and c.judge_model), "--judge api needs --judge-url and --judge-model")
    require(c.judge != "local" or c.judge_model, "--judge local needs --judge-model FOLDER_OR_ID")
    key = c.judge_key_env
    require(not key or os.environ.get(key), f"the environment variable {key}, which --judge-key-env names, is empty")
    require(several, f"--advantage {c.advantage} compares samples of a problem: give --samples 2 or more")

# ---- Processes. Every process calls the same collectives in the same order, whatever its data ------------------------
def start_processes(config):
    """Join the processes that torchrun started, if it did; returns this process's device."""
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    local = int(os.environ.get("LOCAL_RANK", 0))
    require(gpus or config.device != "cuda", "--device cuda was asked for, but there is no usable GPU")
    require(not gpus or local < gpus, f"process {local} of this machine has no GPU of its own: there are {gpus}")
    if gpus: torch.cuda.set_device(local)
    if "WORLD_SIZE" in os.environ:
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"  # numbers and objects are exchanged from the CPU
        dist.init_process_group(backend, timeout=timedelta(seconds=config.collective_timeout))
    return torch.device("cuda", local) if gpus else torch.device("cpu")

def all_reduce(tensor, op=dist.ReduceOp.SUM):
    """Sum (or another reduction) of a tensor over all processes, in place; returns it."""
    if world() > 1: dist.all_reduce(tensor, op)
    return tensor

def barrier():
    if world() > 1: dist.barrier()

# torch 2.13 renamed these two
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# ---- Rewards and advantages ------------------------------------------------------------------------------------------
@dataclass
class Sample:
    """One action, as the update sees it. T = number of its tokens."""
    action: object  # rollout.Action
    group: tuple  # (problem id, agent, turn): what GRPO compares
    batch: int  # which of the rollout's optimizer steps it belongs to
    reward: float  # R, in [0, 1]
    weight: float  # 1.0, or 0.0: left out of statistics and loss alike
    kl: torch.Tensor = None  # [T] log pi_old - log pi_ref
    advantage: torch.Tensor = None  # [T]
    seen: dict = None  # what its forward pass showed, see accumulate()

def reward_of(action, outcome, kind):
    """R in [0, 1] of one action, or None if its verdict failed. The one place where the coach's 0-10 is scaled.
    process: c / 10; outcome: how good the episode's end result is (Episode.outcome); mixed: the mean of the two."""
    if kind == "outcome": return outcome
    if isinstance(action.verdict, judge.Failure): return None
    score = action.verdict.score / 10
    assert 0 <= score <= 1, f"a coach gave {action.verdict.score}"  # NaN fails this too
    return score if kind == "process" else (score + outcome) / 2

def make_samples(episodes, config):
    """A Sample for every action of this process's episodes."""
    samples = []
    for e, a in [(e, a) for e in episodes for a in e.actions]:
        reward = reward_of(a, e.outcome, config.reward)
        kept = reward is not None and not (a.truncated and config.mask_truncated)
        group, batch = (e.problem.id, a.agent, a.turn), e.index // config.train_batch
        samples.append(Sample(a, group, batch, reward or 0.0, float(kept)))
    return samples

def returns_to_go(kl, reward, beta):
    """G_t = sum_{u >= t} (-beta kl_u) + reward, for kl [T].
    >>> returns_to_go(torch.tensor([1.0, -2.0, 3.0]), 0.5, beta=0.1)
    tensor([0.3000, 0.4000, 0.2000])"""
    r = -beta * kl
    r[-1] += reward
    return r.flip(0).cumsum(0).flip(0)

def whiten(values):
    """(values - mean) / std over all tokens of all processes' tensors; values: list of [T] tensors, possibly empty.
    NOTE: a spread below 1e-4 (rewards lie in [0, 1]) is float noise, out of which large advantages must not be made."""
    flat = torch.cat([*values, torch.zeros(0)]).double()
    count, total = all_reduce(torch.tensor([len(flat), flat.sum()], dtype=torch.float64)).tolist()
    mean = total / max(count, 1)
    std = math.sqrt(all_reduce((flat - mean).square().sum()).item() / max(count, 1))
    scale = 1 / std if std > 1e-4 else 0.0
    return [((v.double() - mean) * scale).float() for v in values]

def compare_in_groups(samples, kind):
    """The samples' rewards, each compared with its group's, over all processes.
    grpo: (R - mean) / std; rloo: R - mean of the others. Both are 0 where a group hardly differs or has one member."""
    groups = {}
    for group, reward in gather([(s.group, s.reward) for s in samples]): groups.setdefault(group, []).append(reward)
    compared = []
    for s in samples:
        n, mean, std = len(groups[s.group]), fmean(groups[s.group]), pstdev(groups[s.group])
        scale = 0.0 if std < 1e-4 else 1 / std if kind == "grpo" else n / (n - 1)
        compared.append((s.reward - mean) * scale)
    return compared

def set_advantages(samples, config):
    """Fill in the advantages of one agent's samples (this process's share of them). reinforce++: returns-to-go,
    whitened once, over all tokens, over all processes, never across agents.
    grpo, rloo: scores are compared within their group, KL penalties added as they are. (MAPPA's later agents see other
    inputs in every sample of a group, which is why the paper prefers reinforce++.)"""
    used = [s for s in samples if s.weight]
    plain = config.advantage == "reinforce++"
    rewards = [s.reward for s in used] if plain else compare_in_groups(used, config.advantage)
    returns = [returns_to_go(s.kl, reward, config.beta) for s, reward in zip(used, rewards)]
    for s, advantage in zip(used, whiten(returns) if plain else returns): s.advantage = advantage

# ---- Loss ------------------------------------------------------------------------------------------------------------
def policy_loss(logprobs, old, advantages, weights, clip):
    """Sum over tokens of weight * -min(rho A, clip(rho, 1 - clip, 1 + clip) A). All arguments [N] but the last.
    With weights 1 / (actions * tokens of the action) over ALL actions of an optimizer step, on all processes, this is
    the mean over actions of the mean over tokens, however the actions are split. Returns (loss, rho [N] detached)."""
    ratio = (logprobs - old).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    # where, not a product alone: 0 * nan is nan
    return -torch.where(weights > 0, weights * objective, 0.0).sum(), ratio.detach()

def pack(samples, budget):
    """Split samples into micro-batches of at most `budget` padded tokens, or of one sample that is longer than that."""
    batches, longest = [], 0
    for s in sorted(samples, key=lambda s: -len(s.action.context_ids) - len(s.action.ids)):
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
            longest = len(s.action.context_ids) + len(s.action.ids)  # sorted: all others are padded to the first
        batches[-1].append(s)
    return batches

def score(network, samples, temperature):
    """log-probabilities and entropies of the samples' tokens, each as a list of [T] tensors."""
    contexts, ids = [s.action.context_ids for s in samples], [s.action.ids for s in samples]
    lengths = [len(y) for y in ids]
    return [flat.split(lengths) for flat in model.token_logprobs(network, contexts, ids, temperature)]

@torch.no_grad()
def set_kl(samples, reference, config):
    """Fill in kl_t of every sample, from the reference's log-probabilities."""
    for micro in pack(samples, config.micro_batch_tokens):
        for s, logprobs in zip(micro, score(reference, micro, config.temperature)[0]):
            s.kl = torch.tensor(s.action.logprobs) - logprobs.cpu()

# ---- Optimizer: AdamW, sharded over the processes (ZeRO stage 1), with float32 master weights ------------------------
class ShardedAdamW:
    """AdamW for one agent's network. With N processes, each holds and updates 1/N of the float32 master weights:
        gradient sums --reduce-scatter--> my shard's gradient --AdamW--> my shard --all-gather--> everybody's weights
    All weights lie in one flat buffer of the network's own dtype, of which its parameters become views. NOTE: backward
    has no collective, each optimizer step exactly three: processes may have any number of micro-batches, or none."""
    def __init__(self, network, config):
        parameters = list(network.parameters())
        self.config, self.gradient, self.updates = config, None, 0
        self.size = sum(p.numel() for p in parameters)
        self.shard_size = -(-self.size // world())  # rounded up; the last shard is padded with zeros
        self.flat = parameters[0].new_zeros(self.shard_size * world())
        start = 0
        for p in parameters:
            place = slice(start, start + p.numel())
            self.flat[place] = p.detach().flatten()
            p.data = self.flat[place].view_as(p)
            p.register_post_accumulate_grad_hook(lambda p, place=place: self.take(p, place))
            start += p.numel()
        if world() > 1: dist.broadcast(self.flat, 0)
        self.master = self.flat[rank() * self.shard_size :][: self.shard_size].float().clone()
        self.mean, self.square = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.shard = {"master": self.master, "mean": self.mean, "square": self.square}

    def zero_grad(self):
        self.gradient = torch.zeros_like(self.flat, dtype=torch.float32)

    def take(self, p, place):
        """Called when backward has made a parameter's gradient: add it to the float32 sums, and free it."""
        self.gradient[place] += p.grad.flatten()
        p.grad = None

    def step(self, lr):
        """One AdamW step with the summed gradients: m = b1 m + (1-b1) g,  v = b2 v + (1-b2) g^2,
        w = w - lr (m / (1-b1^t) / (sqrt(v / (1-b2^t)) + eps) + decay w). Returns the gradients' global norm before
        clipping. If that is not finite, which all processes see, nothing changes."""
        c, g = self.config, self.gradient
        if world() > 1:
            g = torch.empty_like(self.master)
            reduce_scatter(g, self.gradient)
        self.gradient = None
        norm = math.sqrt(all_reduce(g.double().square().sum()).item())
        if not math.isfinite(norm): return norm
        g = g * min(1.0, c.max_grad_norm / (norm + 1e-6))
        self.updates += 1
        self.mean.lerp_(g, 1 - c.adam_beta1)
        self.square.mul_(c.adam_beta2).addcmul_(g, g, value=1 - c.adam_beta2)
        mean = self.mean / (1 - c.adam_beta1**self.updates)
        root = (self.square / (1 - c.adam_beta2**self.updates)).sqrt()
        self.master -= lr * (mean / (root + c.adam_eps) + c.weight_decay * self.master)
        self.publish()
        return norm

    def publish(self):
        """Write the master weights, rounded to the network's dtype, into every process's network."""
        shard = self.master.to(self.flat.dtype)
        if world() > 1: all_gather(self.flat, shard)
        else: self.flat.copy_(shard)

    def save(self, path):
        """Write this process's shard to PATH-RANK-of-WORLD.safetensors."""
        file = f"{path}-{rank()}-of-{world()}.safetensors"
        save_file({k: v.cpu() for k, v in self.shard.items()}, file, metadata={"updates": str(self.updates)})

    def load(self, path, processes):
        """Read this process's shard from the files that `processes` processes wrote; their number may differ."""
        size, start = -(-self.size // processes), rank() * self.shard_size
        for other in range(processes):
            first = max(start, other * size)  # the part of the flat weights that both shards hold
            last = min(start + self.shard_size, (other + 1) * size, self.size)
            with safe_open(f"{path}-{other}-of-{processes}.safetensors", framework="pt") as f:
                self.updates = int(f.metadata()["updates"])
                for name, tensor in self.shard.items() if first < last else ():
                    tensor[first - start : last - start] = f.get_slice(name)[first - other * size : last - other * size]
        self.publish()

def learning_rate(update, updates, config):
    """lr of optimizer step `update` = 0.. of `updates`: linear warm-up, then a cosine down to lr * lr_final, clamped.
    >>> c = Config(lr=1.0, lr_warmup=0.2, lr_final=0.1)
    >>> [round(learning_rate(u, 10, c), 3) for u in (0, 1, 2, 6, 10, 15)]
    [0.5, 1.0, 1.0, 0.55, 0.1, 0.1]"""
    warmup = round(config.lr_warmup * updates)
    if update < warmup: return config.lr * (update + 1) / warmup
    progress = min(1.0, (update - warmup) / max(1, updates - warmup))  # clamped: an unclamped cosine climbs again
    return config.lr * (config.lr_final + (1 - config.lr_final) * (1 + math.cos(math.pi * progress)) / 2)

# ---- One update of one set of weights --------------------------------------------------------------------------------
@dataclass
class Policy:
    """One set of weights and the agents that use it: one agent, or all of them with --share-weights."""
    agents: tuple  # of names
    network: model.Transformer
    optimizer: ShardedAdamW

def update(policy, reference, samples, step, config):
    """All optimizer steps of a policy for rollout `step` = 0..; returns agent -> metrics.
    samples: this process's Samples of the policy's agents. Every process must call this, also without samples."""
    set_kl(samples, reference, config)
    for name in policy.agents: set_advantages([s for s in samples if s.action.agent == name], config)
    batches = -(-config.problems * config.samples // config.train_batch)
    # one denominator: the actions of each optimizer step, on all processes, known before any backward pass
    actions = torch.zeros(batches)
    for s in samples: actions[s.batch] += s.weight
    norms, lr = [], 0.0
    for batch, count in enumerate(all_reduce(actions).tolist()):
        lr = learning_rate(step * batches + batch, config.steps * batches, config)
        if count:  # all processes agree; without this, Adam would move on old gradients alone
            accumulate(policy, [s for s in samples if s.batch == batch and s.weight], count, config)
            norms.append(policy.optimizer.step(lr))
            if not math.isfinite(norms[-1]):
                raise RunError(f"step {step + 1}: a gradient of {policy.agents[0]} is not finite")
    common = dict(grad_norm=max(norms, default=0.0), lr=lr)
    rows = gather([(s.action.agent, s.batch, len(s.kl), s.kl.double().sum().item(), s.seen) for s in samples])
    return {name: agent_metrics([row[1:] for row in rows if row[0] == name]) | common for name in policy.agents}

def accumulate(policy, samples, actions, config):
    """Sum the gradients of an optimizer step's loss over micro-batches; `actions`: its number, over all processes."""
    policy.optimizer.zero_grad()
    for micro in pack(samples, config.micro_batch_tokens):
        logprobs, entropies = score(policy.network, micro, config.temperature)
        device = policy.network.device
        old = torch.tensor([x for s in micro for x in s.action.logprobs], device=device)
        advantages = torch.cat([s.advantage for s in micro]).to(device)
        weights = torch.cat([torch.full_like(x.detach(), 1 / (actions * len(x))) for x in logprobs])
        loss, ratio = policy_loss(torch.cat(logprobs), old, advantages, weights, config.clip)
        loss.backward()
        for s, r, h in zip(micro, ratio.split([len(x) for x in logprobs]), entropies):
            clipped = ((r - 1).abs() > config.clip).sum().item()
            s.seen = dict(entropy=h.sum().item(), clipped=clipped, ratio=r.max().item(), off=r.log().abs().max().item())

def agent_metrics(rows):
    """One agent's metrics, from (batch, tokens, sum of kl, seen) of its actions on all processes. mismatch: the largest
    |log pi_theta - log pi_old| before any weight has moved: how far sampler and scorer disagree."""
    tokens = max(1, sum(n for _, n, _, _ in rows))
    trained = [(batch, n, seen) for batch, n, _, seen in rows if seen]
    n_trained = max(1, sum(n for _, n, _ in trained))
    return dict(
        kl=sum(kl for _, _, kl, _ in rows) / tokens, entropy=sum(seen["entropy"] for _, _, seen in trained) / n_trained,
        ratio_max=max((seen["ratio"] for _, _, seen in trained), default=1.0),
        clip_fraction=sum(seen["clipped"] for _, _, seen in trained) / n_trained,
        mismatch=max((seen["off"] for batch, _, seen in trained if batch == 0), default=0.0))

# ---- Checkpoints: written beside, then renamed; `latest` last --------------------------------------------------------
def write_atomically(path, text):
    """Replace a file's content so that a reader, or a crash, sees the old one or the new one and nothing between."""
    with open(path + ".partial", "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".partial", path)

def publish_folder(partial, final):
    """Give a complete folder its name, after its content has reached the disk."""
    for folder, _, names in os.walk(partial, topdown=False):
        for path in [os.path.join(folder, name) for name in (*names, "")]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(partial, final)

def save_checkpoint(out, step, policies, tokenizer):
    """Write OUT/step_NNNNNN: each agent's Hugging Face folder, and the optimizers' shards. All processes call it."""
    name = f"step_{step:06d}"
    if latest_checkpoint(out) == name: return  # replacing it would leave a moment without any
    final = os.path.join(out, name)
    partial, shards = final + ".partial", os.path.join(final + ".partial", "optimizer")
    if rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        os.makedirs(shards)
    barrier()
    for policy in policies:
        policy.optimizer.save(os.path.join(shards, policy.agents[0]))
        for agent in policy.agents if rank() == 0 else ():
            model.save(policy.network, tokenizer, os.path.join(partial, agent))
    barrier()
    if rank() == 0:
        write_atomically(os.path.join(partial, "state.json"), json.dumps(dict(step=step, processes=world())))
        publish_folder(partial, final)
        write_atomically(os.path.join(out, "latest"), name + "\n")
        for old in os.listdir(out):  # the shards of one checkpoint are enough to go on from
            if old != name: shutil.rmtree(os.path.join(out, old, "optimizer"), ignore_errors=True)
    barrier()

def load_checkpoint(out, policies):
    """Bring the policies to the state of the last complete checkpoint; returns its step, 0 if there is none yet."""
    name = latest_checkpoint(out)
    if not name: return 0
    folder = os.path.join(out, name)
    try:
        state = read_json(folder, "state.json", what="checkpoint")
        for policy in policies:
            policy.optimizer.load(os.path.join(folder, "optimizer", policy.agents[0]), state["processes"])
    except Exception as error:  # safetensors raises a type of its own
        raise InputError(f"the checkpoint {folder} cannot be read: {error}") from None
    return state["step"]

def cut_log(path, steps):
    """Drop the lines of a log that belong to steps after `steps`: the resumed run will write them again."""
    if os.path.exists(path):
        with open(path, encoding="utf-8") as old, open(path + ".partial", "w", encoding="utf-8") as new:
            for line in old:
                with contextlib.suppress(ValueError):  # a line that a crash cut off
                    if json.loads(line)["step"] <= steps: new.write(line)
        os.replace(path + ".partial", path)

# ---- The embedded model's start: supervised learning on demonstrations of which half are wrong -----------------------
def demonstration_ids(tokenizer, demonstration):
    """(context ids, ids to learn, terminator included) of a Demonstration."""
    context = render(tokenizer, demonstration.agent, demonstration.values)
    replies = [*(text for text, _ in demonstration.turns), demonstration.reply]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for text in replies]
    for reply_ids, (_, observation) in zip(ids, demonstration.turns):
        context = extend(tokenizer, context, reply_ids, observation)
    return context, ids[-1]

def warm_start(network, tokenizer, pipeline, config):
    """Train a new embedded model until it can do every agent's job, right about half of the time."""
    # NOTE: one thread. More would split sums differently, and hundreds of steps blow such a difference up until a run
    # under torchrun (one thread per process) has another base model than a run without it
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=config.warm_lr)
    bar = tqdm(range(config.warm_steps), desc="warm start")
    for step in bar:
        rng = random.Random(digest("warm start", config.seed, step))
        pairs = [demonstration_ids(tokenizer, pipeline.demonstration(rng)) for _ in range(64)]
        logprobs, _ = model.token_logprobs(network, [x for x, _ in pairs], [y for _, y in pairs])
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        for group in optimizer.param_groups:  # 50 steps up, then straight down to 0
            group["lr"] = config.warm_lr * min((step + 1) / 50, 1 - step / config.warm_steps)
        optimizer.step()
        bar.set_postfix(loss=f"{-logprobs.mean().item():.3f}")
    torch.set_num_threads(threads)

def embedded_model(config):
    """The folder of the warm-started embedded model, RUN/base, made by the first process unless it is there already."""
    base, pipeline = os.path.join(config.out, "base"), PIPELINES[config.pipeline]
    if rank() == 0 and not os.path.isdir(base):
        network, tokenizer = model.tiny(pipeline.pieces, config.seed)
        warm_start(network, tokenizer, pipeline, config)
        model.save(network, tokenizer, base + ".partial")
        publish_folder(base + ".partial", base)
    barrier()
    return base

# ---- The loop --------------------------------------------------------------------------------------------------------
def read_problems(config):
    """(problems to train on, problems to evaluate on). Raises InputError if any repeat, unless that is allowed."""
    pipeline, own = PIPELINES[config.pipeline], PIPELINES[config.pipeline].problems
    how = dict(root=config.data_root, texts=config.task_texts, allow_missing=config.allow_missing)
    [train] = load_files([config.train], pipeline, **how).values() if config.train else [own("train")]
    train = subset(train, config.train_subset, seed=42) if config.train_subset else train
    held_out = [problem for part in load_files(config.eval, pipeline, **how).values() for problem in part]
    for sentence in check_problems(train if config.train else [], held_out):
        require(config.allow_repeats, f"{sentence}: give --allow-repeats to go on all the same")
        complain(sentence, 0)
    require(config.problems <= len(train), f"--problems {config.problems}: there are {len(train)} only")
    for p in [*train, *held_out] if config.train else ():  # half of the room is left for what agents write
        size = sum(file.stat().st_size for file in (p.table.train, p.table.test)) if p.table else 0
        require(size < config.sandbox_disk << 19, f"{p.id} takes {size >> 20} MiB: --sandbox-disk must be twice that")
    return train, (held_out or (own("held-out") if own else []))[: config.eval_problems]

def make_coach(config, device, dtype):
    """(function from cases to verdicts, the ApiModel behind it or None). An API is asked one question first."""
    if config.judge == "rules": return judge.rules, None
    if config.judge == "local":
        local = judge.LocalModel(config.judge_model, device, dtype, config.judge_max_tokens)
        return partial(judge.judge_by, local), None
    key, budget = os.environ.get(config.judge_key_env, ""), (config.judge_budget_calls, config.judge_budget_tokens)
    limits = dict(timeout=config.judge_deadline / 2, deadline=config.judge_deadline)
    api = judge.ApiModel(config.judge_url, config.judge_model, key, config.judge_cache, *budget,
                         config.judge_max_tokens, config.judge_concurrency, **limits)
    if rank() == 0: api.probe()
    return partial(judge.judge_by, api), api

@dataclass
class Run:
    """What all steps of a run share."""
    config: Config
    pipeline: Pipeline
    train: list  # problems to train on
    held_out: list  # problems to evaluate on
    coach: typing.Callable  # cases -> verdicts
    api: judge.ApiModel | None  # behind the coach
    tokenizer: object
    reference: model.Transformer  # frozen: the weights that every agent started from
    policies: list  # of Policy
    sandbox: Sandbox

def open_run(config):
    """Claim the run folder by writing config.json into it, unless the run goes on."""
    if config.resume: return
    try:
        os.makedirs(config.out, exist_ok=True)
        text = json.dumps(asdict(config), indent=1)
        if rank() == 0: write_atomically(os.path.join(config.out, "config.json"), text)
    except OSError as error: raise InputError(f"the run folder {config.out} cannot be written: {error}") from None

def make_policies(start, pipeline, config):
    """One Policy for each agent, or a single one with --share-weights; each a copy of the starting network."""
    names = tuple(agent.name for agent in pipeline.agents)
    groups = [names] if config.share_weights else [(name,) for name in names]
    networks = [copy.deepcopy(start) for _ in groups]
    for network in networks: network.gradient_checkpointing = config.gradient_checkpointing
    return [Policy(group, network, ShardedAdamW(network, config)) for group, network in zip(groups, networks)]

def stop_on_signals():
    """An Event that Ctrl-C, or torchrun's SIGTERM, sets; a second Ctrl-C ends the process where it stands."""
    asked = threading.Event()
    ask = lambda *_: (asked.set(), signal.signal(signal.SIGINT, signal.default_int_handler))
    for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, ask)
    return asked

def problems_of_step(problems, step, count, seed):
    """The problems of step 0..: passes over the training problems, each in an order that depends on (seed, pass) alone.
    Nothing needs to be remembered to resume. What does not fill a step at the end of a pass is left to later passes."""
    steps, order, kinds = len(problems) // count, list(range(len(problems))), {}
    random.Random(digest("order", seed, step // steps)).shuffle(order)
    for i in order: kinds.setdefault(problems[i].table and problems[i].table.kind, []).append(i)
    # stratified: every part of the order holds classification and regression in the proportion of the whole
    order = [i for _, i in sorted(((k + 0.5) / len(kind), i) for kind in kinds.values() for k, i in enumerate(kind))]
    start = step % steps * count
    return [problems[i] for i in order[start : start + count]]

def open_sandbox(config, pipeline):
    """The sandbox of this process, with its share of the machine's cores."""
    local, processes = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cores = sorted(os.sched_getaffinity(0))[local::processes] if hasattr(os, "sched_getaffinity") else None
    limits = dict(timeout=config.sandbox_timeout, disk=config.sandbox_disk << 20)
    return Sandbox(config.sandbox, pipeline.preload, cores, **limits)

def train(config):
    """Run the whole training that a Config describes. Returns 0, or 130 if it was interrupted (and saved)."""
    # looked at before the processes meet: none of them can have written into the folder yet
    free = config.resume or not os.path.exists(os.path.join(config.out, "config.json"))
    require(free, f"{config.out} holds another run: give another --out, or --resume to go on with it")
    device, pipeline = start_processes(config), PIPELINES[config.pipeline]
    dtype = model.compute_dtype(device)
    (problems, held_out), (coach, api) = read_problems(config), make_coach(config, device, dtype)
    with open_sandbox(config, pipeline) as sandbox:
        if config.model:
            start = model.load(config.model, device, dtype)  # before the folder is claimed: the model may be missing
            open_run(config)
        else:
            open_run(config)
            start = model.load(embedded_model(config), device, dtype)
        reference, tokenizer = start
        policies = make_policies(reference, pipeline, config)
        reference.requires_grad_(False)
        run = Run(config, pipeline, problems, held_out, coach, api, tokenizer, reference, policies, sandbox)
        done = load_checkpoint(config.out, policies) if config.resume else 0
        if rank() == 0:
            for name in ("metrics", "episodes", "evaluations"): cut_log(os.path.join(config.out, name + ".jsonl"), done)
            size = sum(p.numel() for p in reference.parameters())
            if pipeline.preload: print(f"the agents' programs find these libraries installed: {LIBRARIES}")
            print(f"{len(policies)} x {size:,} weights, {world()} x {device.type}, run folder {config.out}")
        before = held_out_figures(run, dict.fromkeys(networks(policies), reference), "before")
        if not steps_until_stop(run, done): return 130
        after = held_out_figures(run, networks(policies), "after")
    if rank() == 0: report(run, before, after)
    return 0

def steps_until_stop(run, done):
    """Train from step done + 1 to the last; False if a signal stopped it early. Saves as it goes, and at its end."""
    config, out = run.config, run.config.out
    asked = stop_on_signals()
    bar = tqdm(range(done + 1, config.steps + 1), initial=done, total=config.steps, disable=rank() > 0)
    for step in bar:
        metrics = train_step(run, step)
        if rank() == 0:
            append_lines(os.path.join(out, "metrics.jsonl"), [metrics])
            scores = {n: "none" if a["score"] is None else f"{a['score']:.1f}" for n, a in metrics["agents"].items()}
            kl = max(a["kl"] for a in metrics["agents"].values())
            bar.set_postfix(accuracy=f"{metrics['accuracy']:.2f}", **scores, kl=f"{kl:.2f}")
        if config.eval_every and step % config.eval_every == 0 and step < config.steps:
            figures = held_out_figures(run, networks(run.policies), f"at step {step} of")
            if figures and rank() == 0:
                append_lines(os.path.join(out, "evaluations.jsonl"), [dict(step=step) | figures])
        stop = all_reduce(torch.tensor(asked.is_set(), dtype=torch.int), dist.ReduceOp.MAX).item()
        if stop or step % config.save_every == 0 or step == config.steps:
            save_checkpoint(out, step, run.policies, run.tokenizer)
        if stop and step < config.steps:
            return not complain(f"stopped after step {step}; go on with --out {out} --resume", 130)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return True

def train_step(run, step):
    """Rollout `step` = 1.. and its updates; returns the line of metrics.jsonl. All processes call it together."""
    started, config = time.monotonic(), run.config
    problems = problems_of_step(run.train, step - 1, config.problems, config.seed)
    todo, how = make_jobs(problems, config.samples), sampling(config, ("train", config.seed, step))
    episodes = run_episodes(run.pipeline, networks(run.policies), run.tokenizer, todo, run.coach, run.sandbox, how)
    records = sorted(gather([record(e) for e in episodes]), key=lambda r: r["index"])
    if rank() == 0: append_lines(os.path.join(config.out, "episodes.jsonl"), [dict(step=step) | r for r in records])
    if (too_many := too_many_failures(records, config)):
        save_checkpoint(config.out, step - 1, run.policies, run.tokenizer)
        raise RunError(f"step {step}: {too_many}")
    samples, agents = make_samples(episodes, config), {}
    for policy in run.policies:
        own = [s for s in samples if s.action.agent in policy.agents]
        for name, metrics in update(policy, run.reference, own, step - 1, config).items():
            agents[name] = summarise_agent(records, name) | metrics
    accuracy = sum(r["correct"] for r in records) / len(records)
    metrics = dict(step=step, accuracy=accuracy, seconds=time.monotonic() - started, agents=agents)
    if "kind" in records[0]: metrics["data"] = data_figures(records)
    return metrics | (dict(judge=judge_metrics(run.api)) if run.api else {})

def judge_metrics(api):
    """Calls, cache hits, retries, failures and tokens of the step, and the calls' latency, over all processes."""
    parts = gather([api.take_counts()])
    seconds = sorted(s for _, part in parts for s in part)
    counts = {name: sum(c[name] for c, _ in parts) for name in ("calls", "hits", "retries", "failures", "tokens")}
    return counts | {f"p{q}": seconds[len(seconds) * q // 100] if seconds else None for q in (50, 95)}

def too_many_failures(records, config):
    """A sentence if the coach failed on too many actions (the rest would be a biased choice of them), else nothing."""
    failures = [a["failure"] for r in records for a in r["actions"] if a["failure"]]
    actions = sum(len(r["actions"]) for r in records)
    if len(failures) > config.max_failures * actions:
        return f"the coach failed on {len(failures)} of {actions} actions, e.g. {failures[0]}"

def networks(policies):
    """agent name -> the network that it acts with."""
    return {name: policy.network for policy in policies for name in policy.agents}

def sampling(config, stream):
    limits = config.max_new_tokens, config.max_context_tokens
    return Sampling(stream, config.temperature, *limits, config.sample_rows, config.thinking)

def append_lines(path, objects):
    with open(path, "a", encoding="utf-8") as f: f.writelines(json.dumps(o) + "\n" for o in objects)

def held_out_figures(run, models, when):
    """eval.py's figures of these networks on held-out problems; None with --eval-problems 0."""
    c = run.config
    if not run.held_out: return None
    how = replace(sampling(c, ("eval", c.seed)), temperature=c.eval_temperature)
    coach = run.coach if c.judge == "rules" else nobody  # others cost time and money, and accuracy needs none
    arguments = models, run.tokenizer, run.held_out, c.eval_samples, coach, run.sandbox, how
    figures = summarise(evaluate(run.pipeline, *arguments), list(models))
    share = f"{measure(figures)} {when} training: {100 * figures['accuracy']:.1f}%"
    if rank() == 0: print(f"held-out {share}", flush=True)
    return figures

def report(run, before, after):
    """What a newcomer should see at the end: what was learned, and where to look next."""
    config = run.config
    if after:
        print(f"\n{len(run.held_out)} held-out problems, {config.eval_samples} samples each")
        print_summary("before", before)
        print_summary("after ", after)
    print(f"every action, its score and the reason: {config.out}/episodes.jsonl; curves: {config.out}/metrics.jsonl")
    print(f"compare again, on other samples: python eval.py --run {config.out} --seed 1")

def complain(message, code):
    """Say one line on stderr, from one process; returns the exit code."""
    if int(os.environ.get("RANK", 0)) == 0: print(f"train.py: {message}", file=sys.stderr)
    return code

def main(argv=None):
    """The command. Returns its exit code: 0 done, 1 the run cannot go on, 2 bad input, 130 interrupted."""
    try: code = train(read_config(argv))
    except InputError as error: code = complain(error, 2)
    except (RunError, SandboxError) as error: code = complain(error, 1)
    except KeyboardInterrupt: code = complain("interrupted", 130)
    if dist.is_initialized(): dist.destroy_process_group()
    return code

if __name__ == "__main__": sys.exit(main())
