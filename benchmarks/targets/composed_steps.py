"""Composed decode steps beside measured ones.

    python -m benchmarks.targets.composed_steps --data ../shared/data --out benchmarks/results/composed_steps.json

Prints the ranges of measured by composed steps as well, as `profiling/predict/step_ranges.yaml` has
them.

Measured end to end: the points of `calibration/published/` on GPUs of which there are kernel tables,
each from the page named there. No figure of a composed step was fitted to them. Those engines are of
2024 and wait for their hosts in every step, which a composed step does not: it should be shorter.

On 16 TPU v5e: Llama-3.1-70B, weights and KV cache in int8, products in bfloat16,
jax-ml/jax-llm-examples@440b2a02 (llama3/README.md, Apache-2.0: tokens a second of each sequence).
Steps are composed for full caches. Those of more than 2,048 tokens were not full: measured steps grow
by a quarter of what reading all of them takes at the memory's peak rate. In composing, attention
reaches 0.85 of the memory's rate, and sums run beside products (`profiling/predict/links.py`): these
two numbers were chosen with an eye to the ten rows of 2,048 tokens, none to one of them.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import yaml

from benchmarks.kernel_files import KernelTables
from benchmarks.report import options, write
from pat_jax.models.presets import preset
from pat_jax.planning.types import Split
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.kernel_model import ModelledKernels, precision_of
from pat_jax.profiling.predict.targets import Target

MODELS = {"llama-3-8b": "llama-3.1-8b", "llama-3-70b": "llama-3.1-70b"}  # equal shapes
TPUS, LARGE = "v5e:4x4", "llama-3.1-70b"
BATCHES = (8, 16, 32, 64, 128)
TPU_CONTEXT = 2048  # tokens: the caches of which all batches were measured
TPU_MEASURED = {  # tokens a second of a sequence, by layout and the tokens of a cache, at BATCHES
    (Split(1, 16), 2048): (159.0, 135.0, 108.0, 68.7, 39.3),
    (Split(2, 8), 2048): (84.4, 80.2, 74.5, 58.4, 50.2),
    (Split(1, 16), 4096): (146.0, 129.0, 100.0, 62.7),
    (Split(2, 8), 4096): (83.4, 79.5, 74.0, 58.1),
    (Split(1, 16), 8192): (146.0, 123.0, 93.8),
    (Split(2, 8), 8192): (81.7, 76.9, 71.3),
}
OF_THIS_ENGINE = Path(__file__).parents[1] / "results" / "gpu_decode_h200.json"
NEW_TOKENS = 256  # of each response there: four bursts of 64 steps
OURS = "pat_jax"  # the source of these steps
BFLOAT16, EIGHT_BITS = precision_of(2), precision_of(1)


class KernelsOfOthers(ModelledKernels):
    """Without what was measured of this engine."""

    own: ClassVar[Any] = {}


class TablesOfOthers(KernelTables):
    own: ClassVar[Any] = {}


@dataclass(frozen=True)
class Point:
    source: str
    model: str
    chip: str
    tp: int
    batch: int
    context: int  # tokens, half-way
    measured_ms: float
    tables_ms: float
    coefficients_ms: float


def points(data: Path) -> Iterator[Point]:
    with (data / "calibration" / "published" / "misc_measured_points.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        measured = _step_ms(row)
        if measured is None:
            continue
        name = MODELS.get(row["model"], row["model"])
        chip = row["hardware"].lower() if row["hardware"] in ("A100", "H200") else "h100"
        tp, batch = int(row["tp"]), int(row["batch_or_conc"])
        context = int(row["isl"]) + int(row["osl"]) // 2
        source = f"{row['source']}, {row['engine']}"
        yield point(source, name, chip, tp, batch, context, measured, data)
    yield from own_points(data, is_own=True)


def own_points(data: Path, *, is_own: bool) -> Iterator[Point]:
    """Steps of this engine, priced as such or as those of other engines."""
    for name, cell in json.loads(OF_THIS_ENGINE.read_text())["cells"].items():
        model, _, batch, _, prompt = name.split()
        context, measured = int(prompt) + NEW_TOKENS // 2, cell["device_step_ms"]
        yield point(OURS, model, "h200", 1, int(batch), context, measured, data, is_own=is_own)


def point(
    source: str,
    model: str,
    chip: str,
    tp: int,
    batch: int,
    context: int,
    ms: float,
    data: Path,
    *,
    is_own: bool = False,
) -> Point:
    """With what is composed for it, from the tables in `data` and from coefficients."""
    target = Target.parse(f"{chip}:{tp}")
    kinds = (KernelTables(data, target), ModelledKernels(target))
    if not is_own:
        kinds = TablesOfOthers(data, target), KernelsOfOthers(target)
    composers = [Composer(kernels, preset(model)) for kernels in kinds]
    tables, coefficients = (1e3 * c.decode_step(Split(1, tp), batch, context) for c in composers)
    return Point(source, model, chip, tp, batch, context, ms, tables, coefficients)


def _step_ms(row: dict[str, str]) -> float | None:
    """Of one decode step, where the row is about one."""
    if row["metric"] in ("decode median latency", "TPOT"):
        return float(row["value"])
    if row["metric"] == "end-to-end latency":
        return float(row["value"]) / int(row["osl"])
    return None


@dataclass(frozen=True)
class Step:
    """Of a model whose weights are in eight bits."""

    layout: str
    batch: int  # of all groups
    context: int  # tokens
    measured_ms: float
    composed_ms: float

    @property
    def error(self) -> float:
        return 100 * (self.composed_ms / self.measured_ms - 1)


def tpu_composer() -> Composer:
    kernels = ModelledKernels(Target.parse(TPUS), weight_bytes=1, kv_bytes=1)
    return Composer(kernels, preset(LARGE))


def tpu_steps() -> Iterator[Step]:
    composer = tpu_composer()
    for (split, context), rates in TPU_MEASURED.items():
        for batch, rate in zip(BATCHES, rates, strict=False):
            composed = composer.decode_step(split, batch // split.dp, context)
            yield Step(str(split), batch, context, 1e3 / rate, 1e3 * composed)


def ranges(content: Mapping[str, Any]) -> dict[str, Any]:
    """Least and most of what measured steps took of composed ones, by platform, precision and source."""

    def between(rows: str, composed: str) -> list[float]:
        # On chips where this engine has not run, its steps are priced as those of others.
        also = content["own_steps_as_others"] if rows == "steps" else []
        shares = [row["measured_ms"] / row[composed] for row in (*content[rows], *also)]
        return [round(min(shares), 3), round(max(shares), 3)]

    steps, tpu = content["steps"], content["tpu_steps"]
    of_gpus: dict[str, Any] = {"chips": sorted({row["chip"] for row in steps})}
    of_gpus[BFLOAT16] = {"rows": len(steps), "own": sum(row["source"] == OURS for row in steps)}
    of_gpus[BFLOAT16] |= {"coefficients": between("steps", "coefficients_ms")}
    of_tpus = {"rows": len(tpu), "own": 0, "chip data": between("tpu_steps", "composed_ms")}
    return {"cuda": of_gpus, "tpu": {"chips": [TPUS.partition(":")[0]], EIGHT_BITS: of_tpus}}


def main() -> None:
    parser = options(__doc__, has_data=True)
    args = parser.parse_args()
    found = list(points(args.data))
    content = {
        "what": (__doc__ or "").split("\n\n", 2)[2],
        "steps": [asdict(point) for point in found],
        "own_steps_as_others": [asdict(x) for x in own_points(args.data, is_own=False)],
        "tpu_steps": [asdict(step) for step in tpu_steps()],
    }
    show("GPUs, tables", content["steps"], "tables_ms")
    show("GPUs, coefficients", content["steps"], "coefficients_ms")
    show("this engine priced as others, tables", content["own_steps_as_others"], "tables_ms")
    show(f"{LARGE} on {TPUS} in int8", content["tpu_steps"], "composed_ms")
    print(f"\n{yaml.safe_dump(ranges(content), sort_keys=False)}")
    write(args.out, content)


def show(title: str, steps: Sequence[Mapping[str, Any]], composed: str) -> None:
    """Each step, and the mean error of what is composed."""
    print(f"\n{title}: ms of a decode step, measured, composed, error")
    errors = [100 * (step[composed] / step["measured_ms"] - 1) for step in steps]
    for step, error in zip(steps, errors, strict=True):
        what = ", ".join(str(value) for name, value in step.items() if not name.endswith("_ms"))
        print(f"  {what:75}{step['measured_ms']:8.2f}{step[composed]:8.2f}{error:6.0f}%")
    print(f"  mean error {fmean(map(abs, errors)):.1f}%")


if __name__ == "__main__":
    main()
