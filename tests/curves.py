"""Draws the learning curves of several runs into one SVG file; the README's picture is made by it.

for seed in 0 1 2; do OMP_NUM_THREADS=1 python train.py --seed $seed --out runs/seed$seed; done
python tests/curves.py .figures/arithmetic.svg runs/seed0 runs/seed1 runs/seed2
"""

import json
import sys
from pathlib import Path

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 60, 70, 20, 50  # margins around the plot
COLORS = ["#3b82c4", "#d1662f", "#3d9a5f", "#9a5fb0", "#b09a3d"]  # visible on white and on black
WINDOW = 10  # steps that one point is the mean of

STYLE = """<style>
text { font: 13px sans-serif; fill: #444 } line { stroke: #8885 } polyline { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #ccc } }
</style>"""


def accuracies(run):
    """The share of correct episodes of each step of a run, as means over a window of steps: [(step, share), ...]."""
    lines = Path(run, "metrics.jsonl").read_text().splitlines()
    shares = [json.loads(line)["accuracy"] for line in lines]
    starts = range(0, len(shares) - WINDOW + 1)
    return [(start + WINDOW / 2, sum(shares[start : start + WINDOW]) / WINDOW) for start in starts]


def draw(runs):
    """The SVG of the curves of these run folders."""
    curves = {run: accuracies(run) for run in runs}
    last_step = max(step for curve in curves.values() for step, _ in curve) + WINDOW / 2

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last_step

    def y(share):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">', STYLE]
    for percent in range(0, 101, 20):
        height = y(percent / 100)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{percent}%</text>')
    for step in range(0, int(last_step) + 1, 25):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    label = f"step (64 episodes each); correct training episodes, mean of {WINDOW} steps"
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">{label}</text>')
    for i, (run, curve) in enumerate(curves.items()):
        points = " ".join(f"{x(step):.1f},{y(share):.1f}" for step, share in curve)
        parts.append(f'<polyline stroke="{COLORS[i]}" points="{points}"/>')
        below = y(0.45 - 0.1 * i)
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{below:.1f}" style="fill:{COLORS[i]}">{Path(run).name}</text>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.parent.mkdir(exist_ok=True)
    target.write_text(draw(sys.argv[2:]))
