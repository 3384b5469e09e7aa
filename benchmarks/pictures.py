"""Draws pictures of the pages: a rollout, step times by layout, the stages of an iteration, and how
a real model learns.

    python -m benchmarks.pages --draw

The first two are from a plan that compiles nothing, the last from `results/`. The screenshot
`docs/run.png` is of a run's page:

    pat_jax train --run_dir first
    chromium --headless --hide-scrollbars --window-size=1400,1000 --screenshot=docs/run.png \\
        first/run.html
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import pat_jax
from pat_jax.common.html.charts import COMPUTED, Axis, Line, Plot, colour, layout_colour
from pat_jax.common.html.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
LEARNED = Path(__file__).parent / "results" / "real_model_cpu2.json"
MODEL, TARGET, TOKENS = "llama-3.1-8b", "h100:8", 1024
# The stages of an iteration: name, what runs, and whose models do it.
STAGES = (
    ("rollout", "responses, in changing layouts", "policy"),
    ("rewards", "a score for each response", "functions, reward models"),
    ("scores", "log-probabilities and values", "reference, teacher, critic"),
    ("update", "gradients and optimizer steps", "policy, critic"),
    ("transfer", "new weights to the rollout", "policy"),
)
WIDTH, HEIGHT, GAP, EDGE = 172, 84, 30, 10  # of a stage's box, in pixels


def crossover(steps: Mapping[str, Any]) -> Figure:
    """Returns milliseconds of a decode step by running requests, a line for each layout, from the
    steps of a `plan.json`."""
    running = steps["running"]
    of_layouts = zip(*steps["seconds"][steps["contexts"].index(TOKENS)], strict=True)
    lines = [
        Line(
            f"dp{dp}tp{tp}",
            [(n, 1000 * s) for n, s in zip(running, seconds, strict=True) if s is not None],
            layout_colour(f"dp{dp}tp{tp}"),
            is_dotted=True,
        )
        for (dp, tp), seconds in zip(steps["splits"], of_layouts, strict=True)
    ]
    plot = Plot(
        lines,
        Axis.over(running, is_log=True),
        Axis.over([ms for line in lines for _, ms in line.points]),
        "running requests",
        f"milliseconds of a decode step at {TOKENS:,} tokens of context",
        note=COMPUTED,
        title=f"{MODEL} on {TARGET}",
    )
    return Figure([plot])


def iteration() -> str:
    """Returns an SVG of the stages of an iteration from left to right, and the way back."""
    width = len(STAGES) * (WIDTH + GAP) - GAP + 2 * EDGE
    bottom = EDGE + HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 60}"'
        f' width="{width}" height="{bottom + 60}" font-family="Helvetica, Arial, sans-serif"'
        ' font-size="12" text-anchor="middle">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
        ' markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#5f6b7a"/></marker></defs>',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    arrow = '<path d="{}" fill="none" stroke="#5f6b7a" stroke-width="1.5" marker-end="url(#tip)"/>'
    for i, (name, what, models) in enumerate(STAGES):
        left = EDGE + i * (WIDTH + GAP)
        middle = left + WIDTH / 2
        parts += [
            f'<rect x="{left}" y="{EDGE}" width="{WIDTH}" height="{HEIGHT}" rx="6"'
            f' fill="#0072b2" fill-opacity="0.12" stroke="#0072b2"/>',
            f'<text x="{middle}" y="{EDGE + 24}" font-size="15" font-weight="600">{name}</text>',
            f'<text x="{middle}" y="{EDGE + 46}">{what}</text>',
            f'<text x="{middle}" y="{EDGE + 68}" fill="#0072b2">{models}</text>',
        ]
        if i:
            parts.append(arrow.format(f"M{left - GAP} {EDGE + HEIGHT / 2}H{left - 2}"))
    first, last = EDGE + WIDTH / 2, width - EDGE - WIDTH / 2
    parts += [
        arrow.format(f"M{last} {bottom}V{bottom + 26}H{first}V{bottom + 3}"),
        f'<text x="{width / 2}" y="{bottom + 46}" fill="#5f6b7a">the next iteration, with the new'
        " weights</text>",
        "</svg>\n",
    ]
    return "\n".join(parts)


def learning(found: Mapping[str, Any]) -> Figure:
    """Returns the rewards of both systems of `learning/real_model.py`, over steps and over
    minutes, with the interval of their seeds."""
    plots = []
    for across in ("step", "minutes"):
        lines = []
        for i, (name, of_system) in enumerate(found["summary"].items()):
            band = of_system["reward"]
            steps = np.arange(len(band["mean"])) + len(found["seeds"]["0"][name]["reward"])
            steps = steps - len(band["mean"])  # the last step of each moving average
            taken = [np.cumsum(seed[name]["seconds"]) / 60 for seed in found["seeds"].values()]
            x = (steps + 1 if across == "step" else np.mean(taken, 0)[steps]).tolist()
            mean, low, high = (np.clip(band[part], 0, 1) for part in ("mean", "low", "high"))
            lines.append(
                Line(
                    name,
                    [*zip(x, mean, strict=True)],
                    colour(i),
                    interval=[*zip(x, low, high, strict=True)],
                )
            )
        most = Axis.over([x for line in lines for x, _ in line.points])
        plots.append(Plot(lines, most, Axis(0, 1), across, "mean reward", note=""))
    return Figure(plots, columns=2, width=450)


def draw() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plan = pat_jax.plan(
            model=MODEL, target=TARGET, responses=1024, compile=False, run_dir=f"{folder}/plan"
        )
        plan.plot().save(DOCS / "rollout.svg")
        steps = json.loads(plan.figures.read_text(encoding="utf-8"))["steps"]
    crossover(steps).save(DOCS / "crossover.svg")
    found = json.loads(LEARNED.read_text(encoding="utf-8"))
    learning(found).save(DOCS / "learning.svg")
    (DOCS / "iteration.svg").write_text(iteration(), encoding="utf-8")
