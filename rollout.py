"""rollout.py: runs the agents of a pipeline on problems and records what they did.

Before this: agents.py, model.py, judge.py. After it: eval.py, train.py.
Part of the paper: data collection. For each agent in turn: sample one reply for every episode; run
the program of a reply in the sandbox while others are still being written; hand the finished
actions to the coach, which works in the background while the next agent generates. Every
episode has a workspace of its own, in which files stay from action to action. All that the host
takes from it is a listing, and the bytes of the file that is graded. `Action` is the only thing
that rollout, judge and train share: the record of what was sampled, under which ids, with which
log-probabilities. Text is derived from it, for people, coaches and other agents.
Also here, at the end: how the processes of a run talk to each other, and how commands end.

What we leave out: asynchronous training on old samples.
Watch agents at work:  python train.py --warm-steps 60 --steps 1; head -n 1 runs/arithmetic/episodes.jsonl
"""

import os
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from agents import (
    InputError,
    Problem,
    Sandbox,
    SandboxError,
    digest,
    extend,
    extract_program,
    handed_values,
    missing_files,
    parse_json,
    render,
    require,
    shown_observation,
    visible_reply,
)
from judge import GRADERS, Case, Failure, Grade, Verdict, measures
from model import sample_as_they_end

# ---- What is recorded ----------------------------------------------------------------------------


@dataclass
class Action:
    agent: str
    turn: int  # 0 for the agent's first action in the episode
    context_ids: list  # the exact ids that the reply was sampled under
    ids: list  # the sampled ids, terminator included: what is trained
    logprobs: list  # of each, as the sampler saw it; what is trained with is the scorer's, see train.py
    truncated: bool  # the limit came before a terminator
    text: str  # of ids, without special tokens
    observation: str | None = None  # what its program answered; None if it ran none
    status: str = ""  # how its program ended; empty if it ran none
    before: tuple = ()  # FileEntries of the workspace before it
    after: tuple = ()  # and after it
    verdict: Verdict | Failure | None = None


@dataclass
class Episode:
    index: int  # its number among all episodes of the step, on all ranks
    problem: Problem
    sample: int  # 0.. among the episodes of the same problem
    actions: list = field(default_factory=list)
    error: str = ""  # why it ended early
    workspace: str = ""  # folder of its files; removed when all episodes are done
    files: tuple = ()  # FileEntries of what is there now; empty where the pipeline shows none
    handed: dict = field(default_factory=dict)  # what the prompt of the agent that acts was filled with
    last_grade: Grade | None = None  # of the last agent's last action; None if it never acted

    @property
    def grade(self):
        """How the episode ended. From the truth alone, never from the coach."""
        return self.last_grade or Grade(False, 0.0, self.error or "the last agent did not act")


@dataclass(frozen=True)
class Sampling:
    """How to sample. The uniforms of an action are a function of (stream, problem, sample, agent, turn) and no more."""

    stream: tuple  # such as ("train", run seed, step): other streams give other draws
    temperature: float = 1.0
    max_new_tokens: int = 32
    max_context_tokens: int = 512
    rows: int = 256  # contexts that are worked on at once, at most
    cache_gib: float = 0.0  # that their keys and values may take; 0: see model.cache_room()
    thinking: str = "default"  # on, off, or as the chat template has it
    date: str = ""  # that a chat template may write, such as 2026-01-31; empty: today's

    def switches(self):
        """The options of the chat template that these settings stand for."""
        switches = {"date": self.date}
        if self.thinking != "default":
            switches["enable_thinking"] = self.thinking == "on"
        return switches


def uniforms(stream, problem_id, sample_index, agent, turn, count):
    """One uniform number per token for one action: [count] float64 in [0, 1).

    Neither the rank, nor the batch, nor the order of work enters: no change of hardware changes a
    draw. numpy guarantees RandomState's streams for ever.
    """
    seed = digest(stream, problem_id, sample_index, agent, turn)
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32]).random_sample(count)


def make_episodes(problems, samples):
    """This process's share of all episodes of a step: new Episodes, dealt out in turn.

    >>> [(e.index, e.problem, e.sample) for e in make_episodes(["p", "q"], 2)]
    [(0, 'p', 0), (1, 'p', 1), (2, 'q', 0), (3, 'q', 1)]
    """
    pairs = [(problem, k) for problem in problems for k in range(samples)]
    episodes = [Episode(index, problem, k) for index, (problem, k) in enumerate(pairs)]
    return episodes[rank() :: world()]


# ---- Running -------------------------------------------------------------------------------------


class Stopwatch:
    """Where the time of a step goes: seconds by the name of a part, by this process's clock."""

    def __init__(self):
        self.seconds = Counter()

    @contextmanager
    def part(self, name):
        """Count the seconds of this block."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - started


def run_episodes(pipeline, models, tokenizer, episodes, coach, sandbox, sampling, stopwatch=None):
    """Run the pipeline on new episodes, in place; returns them.

    models: agent name -> Transformer; coach: Cases -> verdicts. When this returns, every action has
    its verdict and no workspace is left. stopwatch: counts sampling, and waiting for programs and
    for the coach.
    """
    stopwatch = stopwatch or Stopwatch()
    programs = ThreadPoolExecutor(16)  # its threads only wait: the sandbox counts the cores
    background = ThreadPoolExecutor(1)  # for the coach
    judging = []  # (actions, Future of one verdict for each)
    try:
        if any(agent.uses_tools for agent in pipeline.agents):
            for episode in episodes:
                open_workspace(pipeline, episode, sandbox)
        for agent in pipeline.agents:
            acting = [episode for episode in episodes if not episode.error]
            for turn in range(agent.max_actions):
                if turn > 0:
                    acting = [episode for episode in acting if may_act_again(agent, episode)]
                acting, contexts = next_contexts(pipeline, agent, turn, acting, tokenizer, sampling, sandbox.limits)
                # sample; the program of a reply runs while others are still being written
                finishing = {}  # index of an episode -> Future of its case
                model = models[agent.name]
                with stopwatch.part("sampling"):
                    for episode in sample_replies(agent, turn, acting, contexts, model, tokenizer, sampling):
                        finishing[episode.index] = programs.submit(finish_action, pipeline, agent, episode, sandbox)
                with stopwatch.part("programs"):
                    cases = [finishing[episode.index].result() for episode in acting]
                # the coach works while the next agent, or the next turn, is sampled
                judging.append(([episode.actions[-1] for episode in acting], background.submit(coach, cases)))
        with stopwatch.part("coach"):
            for actions, verdicts in judging:
                for action, verdict in zip(actions, verdicts.result(), strict=True):
                    action.verdict = verdict
    finally:
        # on an error or a signal do not wait for running programs: closing the sandbox ends them
        failed = sys.exc_info()[0] is not None
        programs.shutdown(wait=not failed, cancel_futures=True)
        background.shutdown(wait=not failed, cancel_futures=True)
        for episode in episodes:
            if episode.workspace:
                sandbox.remove_workspace(episode.workspace)
    return episodes


def collect(
    pipeline, models, tokenizer, problems, samples, coach, sandbox, sampling, interruptible=nullcontext, stopwatch=None
):
    """Run `samples` episodes for each problem, dealt out to all processes, which call this together.

    interruptible: context manager in which a signal may raise Stopped: weights do not change while
    episodes run. stopwatch: see run_episodes(). Returns (this process's Episodes, the records of all
    processes in order of their index).
    """
    episodes = make_episodes(problems, samples)

    def run():
        with interruptible():
            run_episodes(pipeline, models, tokenizer, episodes, coach, sandbox, sampling, stopwatch)

    together(run)
    records = gather([record(episode) for episode in episodes])
    return episodes, sorted(records, key=lambda r: r["index"])


def open_workspace(pipeline, episode, sandbox):
    """Make the episode's folder, with its problem's files. The answers are not among them."""
    episode.workspace = sandbox.make_workspace(episode.problem.files)
    update_files(pipeline, episode, sandbox)


def update_files(pipeline, episode, sandbox):
    """Look at what is in the workspace now, where the pipeline speaks of files at all."""
    if pipeline.show_files:
        episode.files = sandbox.list_files(episode.workspace)


def may_act_again(agent, episode):
    """Has the agent's last program failed, or left out a file that it must write?"""
    if episode.error:
        return False
    failed = episode.actions[-1].status not in ("", "ok")
    return failed or len(missing_files(agent.must_write, episode.files)) > 0


def next_contexts(pipeline, agent, turn, episodes, tokenizer, sampling, limits):
    """(episodes that go on, the context of each). One over the limit ends: to cut would hide what the agent missed."""
    acting, contexts = [], []
    limit = sampling.max_context_tokens
    allowed = dict(max_new_tokens=str(sampling.max_new_tokens), program_seconds=f"{limits.timeout:g}")
    for episode in episodes:
        handed = handed_values(pipeline, episode.problem, episode.actions, episode.files)
        episode.handed = handed | allowed
        context = next_context(agent, episode, turn, tokenizer, sampling)
        if len(context) > limit:
            episode.error = f"{agent.name}'s context has {len(context)} tokens, over {limit}"
            continue
        acting.append(episode)
        contexts.append(context)
    return acting, contexts


def next_context(agent, episode, turn, tokenizer, sampling):
    """The ids under which the agent acts next: rendered for its first turn, extended from its last one afterwards."""
    if turn == 0:
        return render(tokenizer, agent, episode.handed, **sampling.switches())
    last = episode.actions[-1]
    seen = shown_observation(last.observation)
    if agent.must_write:
        seen += "\n" + episode.handed["files"]
    return extend(tokenizer, last.context_ids, last.ids, seen, **sampling.switches())


def sample_replies(agent, turn, episodes, contexts, model, tokenizer, sampling):
    """Sample the agent's reply in each episode and append it as an Action; yields each episode as its reply ends."""
    count = sampling.max_new_tokens
    draws = [uniforms(sampling.stream, e.problem.id, e.sample, agent.name, turn, count) for e in episodes]
    limits = dict(rows=sampling.rows, cache_bytes=int(sampling.cache_gib * 2**30))
    for i, c in sample_as_they_end(model, contexts, draws, count, sampling.temperature, **limits):
        text = text_of(c.ids, contexts[i], tokenizer)
        episodes[i].actions.append(Action(agent.name, turn, contexts[i], c.ids, c.logprobs, c.truncated, text))
        yield episodes[i]


def text_of(ids, context, tokenizer):
    """The text of sampled ids, without special tokens."""
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    # some templates (R1-Distill's) open the thinking part themselves: without its mark, thoughts
    # would be answers
    if tokenizer.decode(context[-4:]).rstrip().endswith("<think>"):
        text = "<think>" + text
    return text


def finish_action(pipeline, agent, episode, sandbox):
    """Run the program of the episode's last reply, grade what there is now, and return what the coach is shown."""
    action = episode.actions[-1]
    action.before = episode.files
    if agent.uses_tools:
        run_reply(pipeline, episode, sandbox)
        update_files(pipeline, episode, sandbox)
    action.after = episode.files

    is_last = agent is pipeline.agents[-1]
    grade = None
    if is_last or agent.coach_sees_truth:
        read_file = partial(sandbox.read, episode.workspace)
        grade = GRADERS[pipeline.graded_by](episode.problem, action.text, read_file)
    if is_last:
        episode.last_grade = grade

    return Case(
        pipeline=pipeline,
        problem=episode.problem,
        agent=agent,
        handed=episode.handed,
        reply=visible_reply(pipeline, action.text),
        observation=action.observation,
        status=action.status,
        grade=grade if agent.coach_sees_truth else None,
        before=action.before,
        after=action.after,
    )


def run_reply(pipeline, episode, sandbox):
    """Run the program in the episode's last reply, if it has one, and record what came of it."""
    action = episode.actions[-1]
    code = extract_program(action.text)
    if code is None:
        return
    result = sandbox.run(code, episode.workspace)
    action.status = result.status
    action.observation = pipeline.show_result(result)
    if result.status == "disk":
        episode.error = "its workspace is full"  # all later programs would fail


# ---- Records: lines of episodes.jsonl, on which all statistics rest ------------------------------


def record(episode):
    """An episode as a line of episodes.jsonl.

    index     its number among all episodes of the step; records of all ranks are sorted by it
    problem   the problem's id; results belong to it, whatever their order
    sample    0.. among the episodes of the same problem
    kind      classification or regression; empty where all problems are of one kind
    question, truth   as the problem has them; the truth is empty for data tasks
    answer    the normalised final answer, or null
    correct   is the answer right, or the submission valid? By the truth alone
    quality   in [0, 1], what --reward outcome pays
    reason    why it is not correct; empty if it is
    metrics   of a valid submission: name -> figure
    measures  the names that metrics has if the submission is valid
    error     why the episode ended early; empty if it did not
    actions   see record_action()
    """
    grade = episode.grade
    return dict(
        index=episode.index,
        problem=episode.problem.id,
        sample=episode.sample,
        kind=episode.problem.kind,
        question=episode.problem.question,
        truth=episode.problem.answer,
        answer=grade.answer,
        correct=grade.correct,
        quality=grade.quality,
        reason=grade.reason,
        metrics=grade.metrics,
        measures=measures(episode.problem),
        error=episode.error,
        actions=[record_action(action) for action in episode.actions],
    )


def record_action(action):
    """An action as it stands in a record.

    agent, turn, text, truncated   as in Action
    tokens       number of sampled ids
    status       how its program ended; empty if it ran none
    observation  what its program answered; null if it ran none
    files        names in the workspace after it, the first 50
    score        of the coach, 0 to 10; null if there is no verdict
    reason       of the coach
    opinion      does the coach think that the answer is right? null if it was not asked
    failure      why there is no verdict; null if there is one, or no coach was asked
    """
    verdict = action.verdict
    judged = isinstance(verdict, Verdict)
    failed = not judged and verdict.kind != "none"
    return dict(
        agent=action.agent,
        turn=action.turn,
        text=action.text,
        tokens=len(action.ids),
        truncated=action.truncated,
        status=action.status,
        observation=action.observation,
        files=[entry.name for entry in action.after[:50]],
        score=verdict.score if judged else None,
        reason=verdict.reason if judged else None,
        opinion=verdict.opinion if judged else None,
        failure=f"{verdict.kind}: {verdict.detail}" if failed else None,
    )


def read_log(path):
    """The objects of a file of JSON lines, without a last line that a crash cut off; none if there is no file.

    Raises InputError where another line is broken.
    """
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        lines = [line for line in file if line.endswith("\n")]
    return [parse_json(path, number, line) for number, line in enumerate(lines, 1)]


# ---- Processes. Every process calls the same collectives in the same order, whatever its data ----


def rank():
    """This process's number, 0 without torchrun."""
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    """How many processes work on this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def start_processes(timeout):
    """Join the processes that torchrun started, if it did. timeout: seconds until one that waits gives up."""
    if "WORLD_SIZE" in os.environ:
        # numbers and objects are exchanged from the CPU, also where there are GPUs
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))


def choose_device(wanted):
    """This process's device; wanted: auto, cpu or cuda."""
    gpus = 0 if wanted == "cpu" else torch.cuda.device_count()
    local = int(os.environ.get("LOCAL_RANK", 0))
    require(gpus or wanted != "cuda", "--device cuda was asked for, but there is no usable GPU")
    require(not gpus or local < gpus, f"process {local} of this machine has no GPU of its own: there are {gpus}")
    if gpus:
        torch.cuda.set_device(local)
    return torch.device("cuda", local) if gpus else torch.device("cpu")


def gather(items):
    """The concatenated lists of all processes, on every process. A collective: all must call it."""
    parts = [items] * world()
    if world() > 1:
        dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def all_reduce(tensor, operation=dist.ReduceOp.SUM):
    """Sum (or another reduction) of a tensor over all processes, in place; returns it. A collective."""
    if world() > 1:
        dist.all_reduce(tensor, operation)
    return tensor


def barrier():
    """Wait until all processes are here. A collective."""
    if world() > 1:
        dist.barrier()


class RunError(Exception):
    """A run cannot go on, through no fault of its input. One sentence; the run folder holds what to resume from."""

    def __init__(self, sentence, everywhere=False):
        super().__init__(sentence)
        self.everywhere = everywhere  # all processes raise it alike


class Stopped(Exception):
    """A signal asked the run to stop."""


class OtherFailed(Exception):
    """Another process failed and says why; this one ends without a word. Its argument: the exit code."""


EXIT_CODES = {InputError: 2, RunError: 1, SandboxError: 1, Stopped: 130}


def together(function, *arguments):
    """Call a function on every process, and return its result. A collective, so the function must contain none.

    NOTE: it may fail on some processes only. If these left with their error while the others went on
    to the next collective, the others would wait there. Here all learn of it: the failing ones
    raise their own error, the others OtherFailed.
    """
    result, error = None, None
    try:
        result = function(*arguments)
    except (InputError, RunError, SandboxError, Stopped) as caught:
        error = caught
    outcome = (0, "") if error is None else (EXIT_CODES[type(error)], str(error))
    outcomes = gather([outcome])
    failures = [code for code, _ in outcomes if code not in (0, EXIT_CODES[Stopped])]
    if failures:
        said_before = outcome in outcomes[: rank()]  # the same sentence from several processes is said once
        if error is not None and not isinstance(error, Stopped) and not said_before:
            raise error
        raise OtherFailed(failures[0])
    if any(code for code, _ in outcomes):  # one process may have got the signal, or all
        raise Stopped
    return result


def complain(program, message):
    """Say one line on stderr, with the number of this process if there are several."""
    who = f"{program}, process {os.environ['RANK']}" if int(os.environ.get("WORLD_SIZE", 1)) > 1 else program
    print(f"{who}: {message}", file=sys.stderr, flush=True)


def exit_code(program, command, argv):
    """Run a command, say what went wrong in one sentence; 0 done, 1 it cannot go on, 2 bad input, 130 interrupted."""
    try:
        code = command(argv)
    except (InputError, RunError, SandboxError) as error:
        # what all processes of a machine meet alike, one of them says: some RunErrors, and whatever
        # goes wrong before the processes have met
        alike = error.everywhere if isinstance(error, RunError) else not dist.is_initialized()
        if not alike or int(os.environ.get("LOCAL_RANK", 0)) == 0:
            complain(program, error)
        code = EXIT_CODES[type(error)]
    except OtherFailed as failed:  # who failed says why
        code = failed.args[0]
    except KeyboardInterrupt:
        complain(program, "interrupted")
        code = EXIT_CODES[Stopped]
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


def bad_command_line(message):
    """In place of ArgumentParser.error, which prints the usage and exits: raise InputError, as all bad input does."""
    raise InputError(message)


def open_sandbox(settings, pipeline):
    """The sandbox of this process, with its share of the machine's cores. settings: a train.Config or eval.Setup."""
    cores = None
    if hasattr(os, "sched_getaffinity"):
        local, processes = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        cores = sorted(os.sched_getaffinity(0))[local::processes]
    limits = dict(timeout=settings.sandbox_timeout, disk=settings.sandbox_disk << 20)
    return Sandbox(settings.sandbox, pipeline.preload, cores, **limits)
