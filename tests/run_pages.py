"""The folder of a run, as a run leaves it."""

import math
from dataclasses import replace
from pathlib import Path

from traces import TRACE

from pat_jax.config.command_line import dump, parse
from pat_jax.run.logging.metrics import MetricsWriter
from pat_jax.run.logging.page.run_page import RunPage
from pat_jax.run.logging.samples import Sample

EVIL = '</pre><script>alert("1")</script>&lt;'


def row(step: int, **changes: object) -> dict[str, object]:
    names = {
        "reward/mean": step / 8,
        "reward/failed": 2,
        "reward/failed/timeout": 2,
        "train/entropy": 1 / step,
        "train/approx_kl": 0.0,
        "rollout/length_p50": 20.0 + step,
        "rollout/length_max": 100.0,
        "rollout/tokens": 4000,
        "rollout/tokens_per_s": 2000.0,
        "rollout/layouts": "dp2tp1 -> dp1tp2" if step % 2 else "dp2tp1",
        "rollout/switches": step % 2,
        "rollout/switch_seconds": 0.25 * (step % 2),
        "rollout/predicted_saving_s": 1.5 * (step % 2),
        "rollout/drafted": 400,
        "rollout/accepted": 100,
        "rollout/drafted_own": 400,
        "rollout/accepted_own": 100,
        "rollout/tokens_per_row_step": 1.25,
        "rollout/draft_saved_seconds": 0.5,
        "rollout/predicted_draft_saving_s": 0.75,
        "timing/rollout": 2.0,
        "timing/step": 4.0,
    }
    return names | changes


def write_run(folder: Path, *, steps: int = 4) -> Path:
    """As a run leaves it; the reward and the length of step 3 are of nothing."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump(parse(["--preset", "demo", "--steps", "9"])))
    page = RunPage(folder)
    with page.kept(0), MetricsWriter(folder) as metrics:
        metrics.write(0, {"eval/reward": 0.25, "eval/reward_ci95": 0.125, "eval/failed": 0})
        for step in range(1, steps + 1):
            metrics.write(step, row(step))
            page.rollout(step, replace(TRACE, total_s=5.0 if step == 2 else 4.0))
        metrics.write(3, {"reward/mean": math.nan, "rollout/length_p50": math.nan})
        metrics.write(steps, {"eval/reward": 0.5, "eval/reward_ci95": 0.125, "eval/failed": 1})
        output = Sample("1+2=", "3", 1.0, 2, "stop", answer="3")
        wrong = replace(output, completion="4", reward=0.0)
        metrics.samples(1, [output, wrong, output, replace(wrong, reward=None)])
        metrics.samples(4, [Sample(EVIL, EVIL, 0.5, 2, EVIL, {EVIL: 1.0}, EVIL)])
    return folder
