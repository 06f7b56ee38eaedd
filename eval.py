"""eval.py: how good is a system of agents on problems that it was not trained on?

Part of the paper: its evaluation, with the statistics that its code gets wrong. Accuracy comes from the true answers
alone; the coach's scores stand beside it. All intervals resample problems, not samples: the samples of one problem are
not independent, and the paper's Fisher tests, which take them so, are too confident.
Data tasks get "fair" figures as well, in which failed episodes count. What we leave out: significance tests.

    python eval.py --run runs/arithmetic --json     # base model against last checkpoint; a JSON object as the last line
    python eval.py --model Qwen/Qwen3-4B --data aime_2025.json amc_eval_32.json --samples 4 --temperature 0.6"""
import argparse, json, math, os, sys
from collections import Counter

import numpy as np
import torch
import judge
from agents import PIPELINES, InputError, Sandbox, check_problems, load_files, read_json, require
from model import compute_dtype, load
from rollout import Sampling, gather, make_jobs, record, run_episodes

# ---- Statistics ------------------------------------------------------------------------------------------------------
def pass_at_k(samples, correct, k):
    """Unbiased estimate of P(at least one of k samples is right), from `correct` right ones among `samples`.
    1 - C(n-c, k) / C(n, k): the chance that k of the n drawn without replacement are not all wrong.
    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 0, 4), pass_at_k(4, 3, 2)
    (0.25, 0.5, 0.0, 1.0)"""
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)

def majority(answers, right):
    """Is the most frequent answer right? Votes are over the (normalised) answers, not over their correctness.
    answers: one per sample, None (no vote) where there was none; right: the right ones among them. Ties count in part.
    >>> majority(["3", "4", "4", None], {"4"}), majority(["3", "4"], {"4"}), majority([None, None], set())
    (1.0, 0.5, 0.0)"""
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    leaders = [answer for answer, count in votes.items() if count == most]
    return sum(answer in right for answer in leaders) / len(leaders) if leaders else 0.0

def interval(per_problem, resamples=10_000):
    """95% bootstrap interval of the mean over problems; per_problem [P] holds one mean for each problem.
    The same resamples are drawn at every call, so two intervals on the same problems can be compared."""
    values = np.asarray(per_problem, dtype=float)
    picks = np.random.RandomState(0).randint(len(values), size=(resamples, len(values)))
    low, high = np.percentile(values[picks].mean(axis=1), [2.5, 97.5])
    return [float(low), float(high)]

def by_problem(records):
    """problem id -> the records of its samples. Results carry their problem's id; their order means nothing."""
    groups = {}
    for r in records: groups.setdefault(r["problem"], []).append(r)
    return groups

def problem_accuracies(records):
    """The share of right samples of each problem, in order of problem id."""
    groups = by_problem(records)
    return [np.mean([r["correct"] for r in groups[problem]]) for problem in sorted(groups)]

def summarise_agent(records, name):
    """One agent's numbers: mean score (None if no action has one), and shares or counts of its actions."""
    actions = [a for r in records for a in r["actions"] if a["agent"] == name]
    scores = [a["score"] for a in actions if a["score"] is not None]
    count = max(1, len(actions))
    return dict(
        score=float(np.mean(scores)) if scores else None, tokens=sum(a["tokens"] for a in actions) / count,
        truncated=sum(a["truncated"] for a in actions) / count, failures=sum(a["failure"] is not None for a in actions),
        tool_calls=sum(a["status"] != "" for a in actions) / count)

def data_figures(records):
    """kind -> episodes, the share of valid submissions, and every metric's mean over the valid ones (None if there are
    none) and, as fair_..., over all, with a failed episode counted as judge.FAIR."""
    figures = {}
    for kind in sorted({r["kind"] for r in records}):
        part = [r for r in records if r["kind"] == kind]
        valid = [r["metrics"] for r in part if r["correct"]]
        figures[kind] = dict(episodes=len(part), success=len(valid) / len(part))
        for name in ("rmse", "mae", "rmse_range") if kind == "regression" else ("accuracy", "f1", "roc_auc"):
            values = [metrics[name] for metrics in valid if name in metrics]  # roc_auc: of two classes only
            figures[kind][name] = float(np.mean(values)) if values else None
            fair = values + [judge.FAIR[name]] * (len(part) - len(valid)) if name in judge.FAIR else []
            if fair: figures[kind]["fair_" + name] = float(np.mean(fair))
    return figures

def coach_against_truth(records, names):
    """Rows of (agent, kind of task, scored actions, mean score where the episode came out right, and where not,
    correlation of score and outcome): the paper's plot of its coach's bias, as a table. None: nothing can be said."""
    rows, mean = [], lambda values: float(np.mean(values)) if values else None
    for name, kind in [(n, k) for n in names for k in sorted({r.get("kind", "") for r in records})]:
        pairs = [(a["score"], r["outcome"], r["correct"]) for r in records if r.get("kind", "") == kind
                 for a in r["actions"] if a["agent"] == name and a["score"] is not None]
        right, wrong = ([score for score, _, correct in pairs if correct == wanted] for wanted in (True, False))
        spread = all(len({pair[i] for pair in pairs}) > 1 for i in (0, 1))
        correlation = float(np.corrcoef([pair[:2] for pair in pairs], rowvar=False)[0, 1]) if spread else None
        rows.append((name, kind, len(pairs), mean(right), mean(wrong), correlation))
    return rows

def summarise(records, names):
    """The figures of one evaluation: accuracy (avg@k: the share of right answers, or of valid submissions) with its
    interval, pass@k, majority vote, every agent's; and those of data tasks."""
    accuracies, groups = problem_accuracies(records), by_problem(records)
    counts = [(len(group), sum(r["correct"] for r in group)) for group in groups.values()]
    ks = sorted({1, min(counts)[0]})
    passes = {str(k): float(np.mean([pass_at_k(n, right, k) for n, right in counts])) for k in ks}
    votes = [majority([r["answer"] for r in g], {r["answer"] for r in g if r["correct"]}) for g in groups.values()]
    agents = {name: summarise_agent(records, name) for name in names}
    unfinished = sum(r["error"] != "" for r in records)
    figures = dict(accuracy=float(np.mean(accuracies)), interval=interval(accuracies), pass_at=passes,
                   majority=float(np.mean(votes)), unfinished=unfinished, agents=agents)
    return figures | (dict(data=data_figures(records)) if "kind" in records[0] else {})

measure = lambda figures: "success" if "data" in figures else "accuracy"  # what the share of right episodes is called
show = lambda x, digits=3: "none" if x is None else str(x) if isinstance(x, int) else f"{x:.{digits}f}"

def compare(base, trained):
    """Accuracy of trained minus base with a 95% interval, paired: both on the same problems, resampled together."""
    differences = np.subtract(problem_accuracies(trained), problem_accuracies(base))
    return dict(accuracy=float(differences.mean()), interval=interval(differences))

# ---- Running ---------------------------------------------------------------------------------------------------------
def evaluate(pipeline, models, tokenizer, problems, samples, coach, sandbox, how):
    """The records of `samples` episodes for each problem, on every rank. The same how.stream pairs base and trained."""
    episodes = run_episodes(pipeline, models, tokenizer, make_jobs(problems, samples), coach, sandbox, how)
    return gather([record(e) for e in episodes])

def print_summary(title, summary):
    """Show what summarise() returned, for people."""
    low, high = summary["interval"]
    passes = ", ".join(f"pass@{k} {100 * p:.1f}%" for k, p in summary["pass_at"].items() if k != "1")
    votes = "" if "data" in summary else f", majority {100 * summary['majority']:.1f}%"
    print(f"{title}: {measure(summary)} {100 * summary['accuracy']:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"
          f"{', ' + passes if passes else ''}{votes}")
    for kind, figures in summary.get("data", {}).items():
        print(f"    {kind}: " + ", ".join(f"{name} {show(figure)}" for name, figure in figures.items()))
    for name, a in summary["agents"].items():
        print(f"    {name:<10} score {show(a['score'], 2):>5}   truncated {100 * a['truncated']:.1f}%   "
              f"{a['tokens']:.1f} tokens")

def latest_checkpoint(run):
    """The name of the last complete checkpoint in a run folder; nothing if there is none yet."""
    path = os.path.join(run, "latest")
    if not os.path.exists(path): return ""
    with open(path, encoding="utf-8") as f: return f.read().strip()

def nobody(cases):
    """The coach of an evaluation that needs none."""
    return [judge.Failure("none", "no coach was asked")] * len(cases)

def main(argv=None):
    """The command. Exits with 2 on bad input."""
    parser = argparse.ArgumentParser(description="Evaluate a run (base model and last checkpoint) or a model.")
    parser.error = lambda message: sys.exit(print(f"eval.py: {message}", file=sys.stderr) or 2)
    parser.add_argument("--run", help="folder that train.py wrote")
    parser.add_argument("--model", help="Hugging Face folder or hub id, for all agents of the pipeline")
    parser.add_argument("--pipeline", default="mathchat", choices=PIPELINES, help="with a model that is no run")
    parser.add_argument("--data", nargs="+", default=[], help="problem files; none: the pipeline's own problems")
    parser.add_argument("--problems", type=int, default=200, help="the first so many problems of each file")
    parser.add_argument("--samples", type=int, default=2, help="samples of each problem")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--thinking", default="default", choices=("default", "on", "off"), help="model that is no run")
    parser.add_argument("--max-new-tokens", type=int, default=4096, help="with a model that is no run")
    parser.add_argument("--max-context-tokens", type=int, default=24_576, help="with a model that is no run")
    parser.add_argument("--data-root", default="", help="DSBench: where the paths in its problem files start")
    parser.add_argument("--task-texts", default="", help="DSBench: JSON file of cleaned task texts")
    parser.add_argument("--allow-missing", action="store_true", help="DSBench: leave out tasks whose data are absent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the figures as a JSON object on the last line")
    options = parser.parse_args(argv)
    try: figures = evaluate_systems(options)
    except InputError as error: parser.error(str(error))
    for title in sorted({"base", "trained"} & set(figures)): print_summary(title, figures[title])
    for name, per_file in figures["files"].items():
        for title, summary in per_file.items(): print_summary(f"{name}: {title}", summary | {"agents": {}})
    if "difference" in figures:
        difference, (low, high) = figures["difference"]["accuracy"], figures["difference"]["interval"]
        print(f"difference: {100 * difference:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]")
    for name, kind, count, right, wrong, correlation in figures.get("coach", ()):
        print(f"the coach in training, {name} {kind}: {show(right, 2)} where the episode came out right, "
              f"{show(wrong, 2)} where not, correlation with the outcome {show(correlation, 2)} ({count} actions)")
    if options.json: print(json.dumps(figures))

def systems_of(options):
    """({title: one model folder an agent}, config) of a run, or of a model alone."""
    folder = options.run or options.model
    require(folder and not (options.run and options.model), "give either --run or --model")
    if not options.run and not os.path.exists(os.path.join(folder, "metrics.jsonl")):
        names = [agent.name for agent in PIPELINES[options.pipeline].agents]
        how = dict(sandbox="landlock", sandbox_timeout=60.0, sandbox_disk=4096) | vars(options)
        return {"base": [folder] * len(names)}, how
    config = read_json(folder, "config.json", what="run folder")
    require(latest_checkpoint(folder), f"{folder} has no complete checkpoint yet")
    names = [agent.name for agent in PIPELINES[config["pipeline"]].agents]
    checkpoint = os.path.join(folder, latest_checkpoint(folder))
    trained = [os.path.join(checkpoint, name) for name in names]
    return {"base": [config["model"] or os.path.join(folder, "base")] * len(names), "trained": trained}, config

def evaluate_systems(options):
    """Every system on every problem; returns the JSON object that --json prints."""
    possible = options.problems > 0 and options.samples > 0 and 0 <= options.temperature < math.inf
    require(possible, "--problems and --samples start at 1, --temperature at 0")
    systems, config = systems_of(options)
    pipeline, own = PIPELINES[config["pipeline"]], PIPELINES[config["pipeline"]].problems
    require(options.data or own, f"the {pipeline.name} pipeline has no problems of its own: give --data FILE")
    how = dict(root=options.data_root, texts=options.task_texts, allow_missing=options.allow_missing)
    files = {stem: part[: options.problems] for stem, part in load_files(options.data, pipeline, **how).items()}
    problems = [p for part in files.values() for p in part] if files else own("held-out")[: options.problems]
    for sentence in check_problems([], problems if files else []): print(f"eval.py: {sentence}", file=sys.stderr)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    limits = config["max_new_tokens"], config["max_context_tokens"]
    how = Sampling(("eval", options.seed), options.temperature, *limits, rows=64, thinking=config["thinking"])
    coach = judge.rules if own and not files else nobody
    names, records = [agent.name for agent in pipeline.agents], {}
    sandbox_limits = dict(timeout=config["sandbox_timeout"], disk=config["sandbox_disk"] << 20)
    with Sandbox(config["sandbox"], pipeline.preload, **sandbox_limits) as sandbox:
        for title, folders in systems.items():
            loaded = {f: load(f, device, compute_dtype(device)) for f in dict.fromkeys(folders)}  # each of them once
            models, tokenizer = {n: loaded[f][0] for n, f in zip(names, folders)}, loaded[folders[0]][1]
            records[title] = evaluate(pipeline, models, tokenizer, problems, options.samples, coach, sandbox, how)
    figures = {title: summarise(part, names) for title, part in records.items()}
    figures["files"] = {stem: {title: summarise([r for r in part if r["problem"].startswith(stem + "/")], names)
                               for title, part in records.items()} for stem in files}
    if options.run:
        with open(os.path.join(options.run, "episodes.jsonl"), encoding="utf-8") as lines:
            figures["coach"] = coach_against_truth([json.loads(line) for line in lines], names)
    if "trained" in records: figures["difference"] = compare(records["base"], records["trained"])
    return dict(problems=len(problems), samples=options.samples) | figures

if __name__ == "__main__": main()
