"""rollout.py: runs the agents of a pipeline on problems and records what they did.

Part of the paper: data collection. For each agent in turn: sample one reply for all episodes, batch by batch, run the
programs of a batch in the sandbox while the next one is sampled, hand the finished actions to the coach, which works in
the background while the next agent generates. Every episode has a workspace of its own, in which files stay from action
to action; all that the host takes from it is a listing, and the bytes of submission.csv. `Action` is the only thing
that rollout, judge and train share: the record of what was sampled, under which ids, with which log-probabilities. Text
is derived from it, for people, coaches and other agents.
What we leave out: asynchronous training on old samples, and refilling the batch with new episodes as rows finish.
Watch agents at work:  python train.py --warm-steps 60 --steps 1; head -n 1 runs/arithmetic/episodes.jsonl"""
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
import judge
from agents import Problem, absent, digest, extend, extract_program, handed_on, render
from model import sample

@dataclass
class Action:
    agent: str
    turn: int  # 0 for the agent's first action in the episode
    context_ids: list  # the exact ids that the reply was sampled under
    ids: list  # the sampled ids, terminator included: what is trained
    logprobs: list  # log pi_old of each, at the sampling temperature
    truncated: bool  # the limit came before a terminator
    text: str  # of ids, without special tokens
    observation: str | None = None  # what its program answered; None if it ran none
    status: str = ""  # how its program ended; "" if it ran none
    before: tuple = ()  # the files in the workspace before it, as Sandbox.list_files tells them
    after: tuple = ()  # and after it
    verdict: judge.Verdict | judge.Failure | None = None

@dataclass
class Episode:
    index: int  # its number among all episodes of the step, on all ranks
    problem: Problem
    sample: int  # 0.. among the episodes of the same problem
    actions: list = field(default_factory=list)
    error: str = ""  # why it ended early
    workspace: str = ""  # its folder, while it runs
    files: tuple = ()  # what is there now; empty for tasks without files
    handed: dict = field(default_factory=dict)  # what the prompt of the agent that acts was filled with
    grade: judge.Grade | None = None  # of its last submission; None if it never came to one

    @property
    def answer(self):
        """The normalised final answer, or None: what the last agent boxed, if the episode got that far."""
        return judge.final_answer(self.actions[-1].text) if self.actions and not self.error else None

    @property
    def correct(self):
        """Is that answer right, or the submission valid? From the truth alone, never from the coach."""
        if self.problem.table: return self.grade is not None and not self.grade.reason
        return self.answer is not None and judge.grade_math(self.actions[-1].text, self.problem.answer)

    @property
    def outcome(self):
        """How good the end result is, in [0, 1]: right or not, or the quality of the submission."""
        if self.problem.table: return self.grade.quality if self.grade else 0.0
        return float(self.correct)

@dataclass(frozen=True)
class Sampling:
    """How to sample. The uniforms of an action are a function of (stream, problem, sample, agent, turn) and no more."""
    stream: tuple  # such as (run seed, step): other streams give other draws
    temperature: float = 1.0
    max_new_tokens: int = 32
    max_context_tokens: int = 512
    rows: int = 256  # contexts in one batch
    thinking: str = "default"  # on, off, or as the chat template has it

def uniforms(stream, problem_id, sample_index, agent, turn, count):
    """One uniform number per token, in [0, 1), for one action. Neither the rank, nor the batch, nor the order of work
    enters: no change of hardware changes a draw. numpy guarantees RandomState's streams for ever."""
    seed = digest(stream, problem_id, sample_index, agent, turn)
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32]).random_sample(count)

def rank():
    """This process's number, 0 without torchrun."""
    return dist.get_rank() if dist.is_initialized() else 0

def world():
    """How many processes work on this run."""
    return dist.get_world_size() if dist.is_initialized() else 1

def gather(items):
    """The concatenated lists of all processes, on every process. A collective: all must call it."""
    parts = [items] * world()
    if world() > 1: dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]

def make_jobs(problems, samples):
    """This process's share of all episodes of a step: new Episodes, dealt out in turn.
    >>> [(e.index, e.problem, e.sample) for e in make_jobs(["p", "q"], 2)]
    [(0, 'p', 0), (1, 'p', 1), (2, 'q', 0), (3, 'q', 1)]"""
    jobs = [Episode(i * samples + k, problem, k) for i, problem in enumerate(problems) for k in range(samples)]
    return jobs[rank() :: world()]

def run_episodes(pipeline, models, tokenizer, episodes, coach, sandbox, how):
    """Run the pipeline on new episodes, in place; returns them. models: agent name -> Transformer; coach: Cases ->
    verdicts; how: Sampling. When this returns, every action has its verdict and no workspace is left."""
    programs, background = ThreadPoolExecutor(16), ThreadPoolExecutor(1)  # threads wait: the sandbox counts the cores
    verdicts = []  # (actions, future of their verdicts)
    try:
        for e in episodes if any(agent.uses_tools for agent in pipeline.agents) else (): open_workspace(e, sandbox)
        for agent in pipeline.agents:
            acting = [e for e in episodes if not e.error]
            for turn in range(agent.max_actions):
                if turn: acting = [e for e in acting if may_act_again(agent, e)]
                for e in acting: e.handed = handed_on(pipeline, e.problem, e.actions, e.files)
                contexts = [next_context(agent, e, turn, tokenizer, how) for e in acting]
                acting, contexts = drop_too_long(acting, contexts, agent, how)
                running = []
                for part in reply(agent, turn, acting, contexts, models[agent.name], tokenizer, how):
                    running += [programs.submit(finish_action, pipeline, agent, e, sandbox) for e in part]
                cases = [future.result() for future in running]
                verdicts.append(([e.actions[-1] for e in acting], background.submit(coach, cases)))
        for actions, future in verdicts:
            for action, verdict in zip(actions, future.result(), strict=True): action.verdict = verdict
    finally:
        for pool in (programs, background): pool.shutdown(cancel_futures=True)
        for workspace in filter(None, [e.workspace for e in episodes]): sandbox.remove_workspace(workspace)
    return episodes

def open_workspace(episode, sandbox):
    """Make the episode's folder, with its task's files. The answers are not among them."""
    table = episode.problem.table
    episode.workspace = sandbox.make_workspace({"train.csv": table.train, "test.csv": table.test} if table else {})
    if table: episode.files = sandbox.list_files(episode.workspace)

def may_act_again(agent, episode):
    """Has the agent's last program failed, or left out a file that it must write?"""
    failed = episode.actions[-1].status not in ("", "ok")
    return not episode.error and (failed or absent(agent.must_write, episode.files) != [])

def next_context(agent, episode, turn, tokenizer, how):
    """The ids under which the agent acts next: rendered for its first turn, extended from its last one afterwards."""
    switches = {} if how.thinking == "default" else {"enable_thinking": how.thinking == "on"}
    if turn:
        last = episode.actions[-1]
        seen = last.observation or "no program was run"
        if agent.must_write: seen += "\n" + episode.handed["files"]
        return extend(tokenizer, last.context_ids, last.ids, seen, **switches)
    return render(tokenizer, agent, episode.handed | {"max_new_tokens": str(how.max_new_tokens)}, **switches)

def drop_too_long(episodes, contexts, agent, how):
    """End the episodes whose next context is over the limit, saying so; cutting it would hide what the agent missed."""
    for episode, context in zip(episodes, contexts):
        if len(context) > how.max_context_tokens:
            episode.error = f"{agent.name}'s context has {len(context)} tokens, over {how.max_context_tokens}"
    pairs = [(e, c) for e, c in zip(episodes, contexts) if not e.error]
    return [e for e, _ in pairs], [c for _, c in pairs]

def reply(agent, turn, episodes, contexts, model, tokenizer, how):
    """Sample the agent's reply in each episode and append it as an Action; yields the episodes batch by batch."""
    for start in range(0, len(episodes), how.rows):
        part = slice(start, start + how.rows)
        who = [(e.problem.id, e.sample, agent.name, turn) for e in episodes[part]]
        draws = [uniforms(how.stream, *identity, how.max_new_tokens) for identity in who]
        completions = sample(model, contexts[part], draws, how.max_new_tokens, how.temperature)
        for episode, context, c in zip(episodes[part], contexts[part], completions):
            text = tokenizer.decode(c.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            # some templates (R1-Distill) open the thinking part themselves: without its mark, thoughts would be answers
            if tokenizer.decode(context[-4:]).rstrip().endswith("<think>"): text = "<think>" + text
            episode.actions.append(Action(agent.name, turn, context, c.ids, c.logprobs, c.truncated, text))
        yield episodes[part]

def finish_action(pipeline, agent, episode, sandbox):
    """Run the program of the episode's last reply, grade what is submitted now, and return what the coach is shown."""
    table = episode.problem.table
    if agent.uses_tools: run_program(pipeline, episode, sandbox)
    if agent.coach_sees_truth and table:
        try: episode.grade = judge.grade_submission(sandbox.read(episode.workspace, "submission.csv"), table)
        except FileNotFoundError: episode.grade = judge.Grade("there is no submission.csv")
        except OSError: episode.grade = judge.Grade("submission.csv is not a plain file of at most 64 MiB")
    return make_case(pipeline, agent, episode)

def run_program(pipeline, episode, sandbox):
    """Run the program in the episode's last reply, if it has one, and record what came of it."""
    action = episode.actions[-1]
    code, action.before = extract_program(action.text), episode.files
    if code is not None:
        result = sandbox.run(code, episode.workspace)
        action.status, action.observation = result.status, pipeline.show(result)
        if result.status == "disk": episode.error = "its workspace is full"  # all later programs would fail
    if episode.problem.table: episode.files = sandbox.list_files(episode.workspace)
    action.after = episode.files

def make_case(pipeline, agent, episode):
    """What the coach is shown of the episode's last action. The truth goes in only where the pipeline says so."""
    action, problem = episode.actions[-1], episode.problem
    text = handed_on(pipeline, problem, [action])[agent.name]
    correct = judge.grade_math(action.text, problem.answer) if agent.coach_sees_truth and not problem.table else None
    return judge.Case(problem, agent, episode.handed, text, action.observation, action.status, correct, action.before,
                      action.after, episode.grade if agent.coach_sees_truth else None)

def record(episode):
    """An episode as a line of episodes.jsonl."""
    actions, e, problem = [], episode, episode.problem
    for a in e.actions:
        v, judged = a.verdict, isinstance(a.verdict, judge.Verdict)
        failure = None if judged or v.kind == "none" else f"{v.kind}: {v.detail}"
        actions.append(dict(agent=a.agent, turn=a.turn, text=a.text, tokens=len(a.ids), truncated=a.truncated,
                            status=a.status, observation=a.observation, score=v.score if judged else None,
                            reason=v.reason if judged else None, opinion=v.correct if judged else None,
                            failure=failure, files=[name for name, *_ in a.after[:50]]))
    grade = e.grade or judge.Grade(e.error or "nothing was submitted")
    data = dict(kind=problem.table.kind, invalid=grade.reason, metrics=grade.metrics) if problem.table else {}
    return data | dict(
        index=e.index, problem=problem.id, question=problem.question, truth=problem.answer, sample=e.sample,
        answer=e.answer, correct=e.correct, outcome=e.outcome, error=e.error, actions=actions)
