"""eval.py: how good is a system of agents on problems that it was not trained on?

Before this: agents.py, model.py, judge.py, rollout.py. After it: train.py.
Part of the paper: its evaluation, with the statistics that its code gets wrong. Accuracy comes from
the truth alone; the coach's scores stand beside it. All intervals resample problems, not samples:
the samples of one problem are not independent, and the paper's Fisher tests, which take them so,
are too confident. Data tasks get "fair" figures as well, in which failed episodes count.

What we leave out: significance tests.

    python eval.py --run runs/arithmetic --json     # base model against last checkpoint; a JSON object as the last line
    python eval.py --model Qwen/Qwen3-4B --data aime_2025.json amc_eval_32.json --samples 4 --temperature 0.6
"""

import argparse
import json
import math
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass, fields

import numpy as np

import agents
import rollout
from agents import read_json, require
from judge import FAIR, METRICS, has_rules, nobody, rules
from model import compute_dtype, load
from rollout import Sampling, collect, rank, together

# ---- Statistics. All of them take records: what rollout.record() makes of episodes ---------------


def pass_at_k(samples, correct, k):
    """Unbiased estimate of P(at least one of k samples is right), from `correct` right ones among `samples`.

    1 - C(n-c, k) / C(n, k): the chance that k of the n drawn without replacement are not all wrong.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 0, 4), pass_at_k(4, 3, 2)
    (0.25, 0.5, 0.0, 1.0)
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority(answers, right):
    """Is the most frequent answer right? Votes are over the normalised answers, not over their correctness.

    answers: one for each sample, None (no vote) where there was none; right: the right ones among
    them. Of answers that are equally frequent, the share that is right counts.

    >>> majority(["3", "4", "4", None], {"4"}), majority(["3", "4"], {"4"}), majority([None, None], set())
    (1.0, 0.5, 0.0)
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    leaders = [answer for answer, count in votes.items() if count == most]
    return sum(answer in right for answer in leaders) / len(leaders)


def interval(per_problem, resamples=10_000):
    """95% bootstrap interval [low, high] of the mean over problems; per_problem [P] holds one mean for each problem.

    The same resamples are drawn at every call, so two intervals on the same problems can be
    compared.
    """
    values = np.asarray(per_problem, dtype=float)
    picks = np.random.RandomState(0).randint(len(values), size=(resamples, len(values)))
    low, high = np.percentile(values[picks].mean(axis=1), [2.5, 97.5])
    return [float(low), float(high)]


def by_problem(records):
    """problem id -> the records of its samples. Results carry their problem's id; their order means nothing."""
    groups = {}
    for r in records:
        groups.setdefault(r["problem"], []).append(r)
    return groups


def problem_accuracies(records):
    """The share of correct samples of each problem, in order of problem id."""
    groups = by_problem(records)
    return [np.mean([r["correct"] for r in groups[problem]]) for problem in sorted(groups)]


def mean_or_none(values):
    """The mean as a float; None of no values, about which nothing can be said."""
    return float(np.mean(values)) if len(values) else None


def summarise_agent(records, name):
    """One agent's figures: mean score (None if no action has one), and shares or counts of its actions."""
    actions = [action for r in records for action in r["actions"] if action["agent"] == name]
    scores = [action["score"] for action in actions if action["score"] is not None]
    count = max(1, len(actions))
    return dict(
        score=mean_or_none(scores),
        tokens=sum(action["tokens"] for action in actions) / count,
        truncated=sum(action["truncated"] for action in actions) / count,
        failures=sum(action["failure"] is not None for action in actions),
        tool_calls=sum(action["status"] != "" for action in actions) / count,
    )


def kind_figures(records):
    """The figures of data tasks, by kind of task; empty where problems have no kinds.

    kind -> episodes, success (the share of valid submissions), and every metric's mean over the
    valid ones (None if there are none) and, as fair_..., over all, with a failed episode counted as
    judge.FAIR. Both are over the episodes whose task has the metric (ROC-AUC: two classes).
    """
    figures = {}
    for kind in sorted({r["kind"] for r in records} - {""}):
        of_kind = [r for r in records if r["kind"] == kind]
        figures[kind] = dict(episodes=len(of_kind), success=sum(r["correct"] for r in of_kind) / len(of_kind))
        for name in METRICS[kind]:
            measured = [r for r in of_kind if name in r["measures"]]
            values = [r["metrics"][name] for r in measured if r["correct"]]
            figures[kind][name] = mean_or_none(values)
            if name in FAIR and measured:
                fair = values + [FAIR[name]] * (len(measured) - len(values))
                figures[kind]["fair_" + name] = mean_or_none(fair)
    return figures


@dataclass(frozen=True)
class CoachBias:
    """An agent's scores in training against how its episodes came out. None: nothing can be said."""

    agent: str
    kind: str  # of task; empty where there is one kind
    actions: int  # that have a score
    if_correct: float | None  # mean score in correct episodes
    if_wrong: float | None  # and in the others
    correlation: float | None  # of score and quality


def coach_against_truth(records, names):
    """A CoachBias for every agent and kind of task: the paper's plot of its coach's bias, as a table."""
    kinds = sorted({r["kind"] for r in records})
    return [coach_bias([r for r in records if r["kind"] == kind], name, kind) for name in names for kind in kinds]


def coach_bias(records, name, kind):
    """The CoachBias of one agent, from the records of one kind of task."""
    pairs = [(action["score"], r) for r in records for action in r["actions"] if action["agent"] == name]
    pairs = [(score, r) for score, r in pairs if score is not None]
    scores, qualities = [score for score, _ in pairs], [r["quality"] for _, r in pairs]
    if_correct = mean_or_none([score for score, r in pairs if r["correct"]])
    if_wrong = mean_or_none([score for score, r in pairs if not r["correct"]])
    has_spread = len(set(scores)) > 1 and len(set(qualities)) > 1
    correlation = float(np.corrcoef(scores, qualities)[0, 1]) if has_spread else None
    return CoachBias(name, kind, len(pairs), if_correct, if_wrong, correlation)


def summarise(records, names):
    """The figures of one evaluation.

    accuracy (avg@k: the share of correct episodes) with its 95% interval, pass_at (k -> pass@k),
    majority vote (None where results are no answers), unfinished (episodes that ended early),
    agents (name -> summarise_agent()), kinds.
    """
    groups = by_problem(records).values()
    accuracies = problem_accuracies(records)
    passes = {}
    for k in sorted({1, min(len(group) for group in groups)}):
        estimates = [pass_at_k(len(group), sum(r["correct"] for r in group), k) for group in groups]
        passes[str(k)] = float(np.mean(estimates))
    return dict(
        accuracy=float(np.mean(accuracies)),
        interval=interval(accuracies),
        pass_at=passes,
        majority=majority_accuracy(groups),
        unfinished=sum(r["error"] != "" for r in records),
        agents={name: summarise_agent(records, name) for name in names},
        kinds=kind_figures(records),
    )


def majority_accuracy(groups):
    """The share of problems whose majority vote is right; None if no episode has an answer to vote with."""
    votes = []
    for group in groups:
        right = {r["answer"] for r in group if r["correct"]}
        votes.append(majority([r["answer"] for r in group], right))
    has_answers = any(r["answer"] is not None for group in groups for r in group)
    return float(np.mean(votes)) if has_answers else None


def compare(base, trained):
    """Accuracy of trained minus base with a 95% interval, paired: both on the same problems, resampled together."""
    differences = np.subtract(problem_accuracies(trained), problem_accuracies(base))
    return dict(accuracy=float(differences.mean()), interval=interval(differences))


# ---- For people ----------------------------------------------------------------------------------


def shown(figure, digits=3):
    """A figure as text."""
    if figure is None:
        return "none"
    return str(figure) if isinstance(figure, int) else f"{figure:.{digits}f}"


def print_summary(title, summary, success):
    """Show what summarise() returned. success: what the share of correct episodes is called, see agents.Pipeline."""
    low, high = summary["interval"]
    parts = [f"{success} {100 * summary['accuracy']:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"]
    parts += [f"pass@{k} {100 * share:.1f}%" for k, share in summary["pass_at"].items() if k != "1"]
    if summary["majority"] is not None:
        parts.append(f"majority {100 * summary['majority']:.1f}%")
    print(f"{title}: {', '.join(parts)}")
    for kind, figures in summary["kinds"].items():
        print(f"    {kind}: " + ", ".join(f"{name} {shown(figure)}" for name, figure in figures.items()))
    for name, agent in summary["agents"].items():
        score, truncated = shown(agent["score"], 2), 100 * agent["truncated"]
        print(f"    {name:<10} score {score:>5}   truncated {truncated:.1f}%   {agent['tokens']:.1f} tokens")


def print_figures(figures, setup):
    """Show what evaluate_systems() returned."""
    success = setup.pipeline.success_name
    for title in setup.systems:
        print_summary(title, figures[title], success)
    for name, summaries in figures["files"].items():
        for title, summary in summaries.items():
            print_summary(f"{name}: {title}", summary | {"agents": {}}, success)
    if "difference" in figures:
        points = 100 * np.array([figures["difference"]["accuracy"], *figures["difference"]["interval"]])
        print("difference: {:+.1f} points [{:+.1f}, {:+.1f}]".format(*points))
    for row in figures.get("coach", []):
        parts = [
            f"{shown(row['if_correct'], 2)} where the episode came out right",
            f"{shown(row['if_wrong'], 2)} where not",
            f"correlation with the outcome {shown(row['correlation'], 2)} ({row['actions']} actions)",
        ]
        print(f"the coach in training, {row['agent']} {row['kind']}: {', '.join(parts)}")


# ---- Running -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """What is evaluated, and under which limits; see the fields of the same names in train.Config."""

    pipeline: agents.Pipeline
    systems: dict  # title -> one model folder for each agent of the pipeline
    max_new_tokens: int
    max_context_tokens: int
    thinking: str
    sandbox: str = "landlock"
    # with --model: as in the dsbench preset
    sandbox_timeout: float = 60.0
    sandbox_disk: int = 4096
    sample_rows: int = 64
    cache_gib: float = 0.0
    date: str = ""
    # with --run: what the run's own evaluations used
    eval: tuple = ()
    eval_temperature: float = 1.0
    data_root: str = ""
    task_texts: str = ""
    allow_missing: bool = False


def latest_checkpoint(run):
    """The name of the last complete checkpoint in a run folder; empty if there is none yet."""
    path = os.path.join(run, "latest")
    if not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def run_setup(folder, sandbox=None):
    """The Setup of a run folder: the model that its agents started from, and its last checkpoint.

    sandbox: its level, if it is to be another one than the run's.
    """
    config = read_json(folder, "config.json", what="run folder")
    checkpoint = latest_checkpoint(folder)
    require(checkpoint, f"{folder} has no complete checkpoint yet")
    pipeline = agents.PIPELINES[config["pipeline"]]
    base = config["model"] or os.path.join(folder, "base")
    trained = [os.path.join(folder, checkpoint, agent.name) for agent in pipeline.agents]
    limits = {field.name: config[field.name] for field in fields(Setup) if field.name in config}
    systems = {"base": [base] * len(trained), "trained": trained}
    if sandbox:
        limits["sandbox"] = sandbox
    return Setup(**limits | dict(pipeline=pipeline, systems=systems))


def model_setup(options):
    """The Setup of a model alone, which every agent of a pipeline then uses."""
    pipeline = agents.PIPELINES[options.pipeline]
    systems = {"base": [options.model] * len(pipeline.agents)}
    limits = (options.max_new_tokens, options.max_context_tokens, options.thinking)
    return Setup(pipeline, systems, *limits, options.sandbox or "landlock")


def read_problems(options, setup):
    """file name -> its Problems; under an empty name the pipeline's own held-out problems where no file is given."""
    pipeline, paths = setup.pipeline, options.data or setup.eval
    if not paths:
        require(pipeline.problems, f"the {pipeline.name} pipeline has no problems of its own: give --data FILE")
        return {"": pipeline.problems("held-out")[: options.problems]}
    root, texts = options.data_root or setup.data_root, options.task_texts or setup.task_texts
    data_options = agents.DataOptions(root, texts, options.allow_missing or setup.allow_missing)
    files = agents.load_files(paths, pipeline, data_options)
    files = {name: problems[: options.problems] for name, problems in files.items()}
    if rank() == 0:
        for sentence in agents.check_problems([], [problem for problems in files.values() for problem in problems]):
            print(f"eval.py: {sentence}", file=sys.stderr)
    return files


def evaluate_systems(options, setup, device):
    """Every system on every problem, shared among all processes; returns the JSON object that --json prints."""
    # read all input first, so that a file that cannot be read fails now and not after an hour of sampling
    trained_on = together(rollout.read_log, os.path.join(options.run, "episodes.jsonl")) if options.run else []
    files = together(read_problems, options, setup)
    pipeline = setup.pipeline
    names = [agent.name for agent in pipeline.agents]
    problems = [problem for part in files.values() for problem in part]
    coach = rules if has_rules(pipeline) and "" in files else nobody
    temperature = setup.eval_temperature if options.temperature is None else options.temperature
    sampling = Sampling(
        stream=("eval", options.seed),
        temperature=temperature,
        max_new_tokens=setup.max_new_tokens,
        max_context_tokens=setup.max_context_tokens,
        rows=setup.sample_rows,
        cache_gib=setup.cache_gib,
        thinking=setup.thinking,
        date=setup.date,
    )

    # run the systems one after another
    records = {}
    with together(rollout.open_sandbox, setup, pipeline) as sandbox:
        for title, folders in setup.systems.items():
            models, tokenizer = together(load_models, folders, names, setup, device)
            _, records[title] = collect(
                pipeline, models, tokenizer, problems, options.samples, coach, sandbox, sampling
            )

    # figures of each system, of each on each file, and of the difference
    figures = dict(problems=len(problems), samples=options.samples, temperature=temperature, files={})
    figures |= {title: summarise(of_system, names) for title, of_system in records.items()}
    for file_name, of_file in files.items():
        if file_name:
            ids = {problem.id for problem in of_file}
            figures["files"][file_name] = {
                title: summarise([r for r in of_system if r["problem"] in ids], names)
                for title, of_system in records.items()
            }
    if options.run:
        figures["coach"] = [asdict(row) for row in coach_against_truth(trained_on, names)]
    if "trained" in records:
        figures["difference"] = compare(records["base"], records["trained"])
    return figures


def load_models(folders, names, setup, device):
    """(agent name -> its model, tokenizer), each folder loaded once."""
    positions = setup.max_context_tokens + setup.max_new_tokens
    bases = {}
    loaded = {f: load(f, device, compute_dtype(device), positions, bases) for f in dict.fromkeys(folders)}
    models = {name: loaded[folder][0] for name, folder in zip(names, folders, strict=True)}
    return models, loaded[folders[0]][1]


def option_parser():
    """The argparse parser of the command."""
    parser = argparse.ArgumentParser(description="Evaluate a run (base model and last checkpoint) or a model.")
    parser.error = rollout.bad_command_line
    what = parser.add_argument_group("what is evaluated: a run, or a model")
    what.add_argument("--run", help="folder that train.py wrote")
    what.add_argument("--model", help="Hugging Face folder or hub id, for all agents of the pipeline")
    what.add_argument("--pipeline", default="mathchat", choices=agents.PIPELINES, help="with --model")
    what.add_argument("--thinking", default="default", choices=("default", "on", "off"), help="with --model")
    what.add_argument("--max-new-tokens", type=int, default=4096, help="with --model")
    what.add_argument("--max-context-tokens", type=int, default=24_576, help="with --model")
    on = parser.add_argument_group("on which problems")
    on.add_argument("--data", nargs="+", default=[], help="problem files; none: the pipeline's own problems")
    on.add_argument("--problems", type=int, default=200, help="the first so many problems of each file")
    on.add_argument("--data-root", default="", help="DSBench: where the paths in its problem files start")
    on.add_argument("--task-texts", default="", help="DSBench: JSON file of cleaned task texts")
    on.add_argument("--allow-missing", action="store_true", help="DSBench: leave out tasks whose data are absent")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--samples", type=int, default=2, help="episodes for each problem")
    sampling.add_argument("--temperature", type=float, help="default: as the run's own evaluations; 1 for a model")
    sampling.add_argument("--seed", type=int, default=0)
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: a GPU if there is one"
    )
    machine.add_argument("--sandbox", choices=("landlock", "limits"), help="default: as the run, or landlock")
    parser.add_argument("--json", action="store_true", help="print the figures as a JSON object on the last line")
    return parser


def run_command(argv):
    """What main() does but for errors."""
    options = option_parser().parse_args(argv)
    require(bool(options.run) != bool(options.model), "give either --run or --model")
    require(options.problems > 0 and options.samples > 0, "--problems and --samples start at 1")
    require(options.temperature is None or 0 <= options.temperature < math.inf, "--temperature starts at 0")
    setup = run_setup(options.run, options.sandbox) if options.run else model_setup(options)
    rollout.start_processes(timeout=24 * 3600.0)
    figures = evaluate_systems(options, setup, together(rollout.choose_device, options.device))
    if rank() == 0:
        print_figures(figures, setup)
    if rank() == 0 and options.json:
        print(json.dumps(figures))
    return 0


def main(argv=None):
    """The command. Returns its exit code, see rollout.exit_code()."""
    return rollout.exit_code("eval.py", run_command, argv)


if __name__ == "__main__":
    sys.exit(main())
