"""Composed decode steps beside measured ones, and where one wide group of TPUs stops to pay.

    python -m benchmarks.composed_steps --data ../shared/data --out benchmarks/results/composed_steps.json

Measured end to end: the points of `calibration/published/` on GPUs of which there are kernel tables, each
from the page named there. One pair of them (SGLang's issue 1008, TP1, 1 and 128 sequences) is behind
the host time of `profiling/costs/composer.py`; nothing else was fitted to a whole step. Those engines are of
2024 and wait for their hosts in every step, which a composed step does not: it should come out below.

The crossover is of Llama-3.1-70B on 16 TPU v5e, weights in int8 (in bfloat16 they do not fit beside TP8):
the batch at which two groups of TP8 decode as fast as one of TP16.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.kernel_tables import add_data_option
from pat_jax.models.presets import preset
from pat_jax.planning.types import Split
from pat_jax.profiling.costs.composer import Composer
from pat_jax.profiling.costs.kernel_files import NoData
from pat_jax.profiling.costs.sources import kernels_for
from pat_jax.profiling.costs.targets import Target

MODELS = {"llama-3-8b": "llama-3.1-8b", "llama-3-70b": "llama-3.1-70b"}  # equal shapes
TPUS, GROUPS, LARGE = "v5e:4x4", (Split(1, 16), Split(2, 8)), "llama-3.1-70b"
LENGTHS = (256, 1024, 2048)
BATCHES = (2, 4, 8, 16, 32, 64, 128, 256)


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

    def error(self, composed_ms: float) -> float:
        """Percent of what was measured."""
        return 100 * (composed_ms / self.measured_ms - 1)


def points(data: Path) -> Iterator[Point]:
    """Raises NoData where the folder is missing."""
    folder = data / "calibration" / "published"
    if not folder.is_dir():
        raise NoData.of("published measurements", data, "calibration/published/")
    with (folder / "misc_measured_points.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        measured = _step_ms(row)
        if measured is None:
            continue
        name = MODELS.get(row["model"], row["model"])
        chip = row["hardware"].lower() if row["hardware"] in ("A100", "H200") else "h100"
        tp, batch = int(row["tp"]), int(row["batch_or_conc"])
        context = int(row["isl"]) + int(row["osl"]) // 2
        target = Target.parse(f"{chip}:{tp}")
        composed = [
            1e3
            * Composer(kernels_for(target, where), preset(name)).decode_step(
                Split(1, tp), batch, context
            )
            for where in (data, None)
        ]
        source = f"{row['source']}, {row['engine']}"
        yield Point(source, name, chip, tp, batch, context, measured, composed[0], composed[1])


def _step_ms(row: dict[str, str]) -> float | None:
    """Of one decode step, where the row is about one."""
    if row["metric"] in ("decode median latency", "TPOT"):
        return float(row["value"])
    if row["metric"] == "end-to-end latency":
        return float(row["value"]) / int(row["osl"])
    return None


def speed_up(batch: int, length: int) -> float:
    """Of one group of TP16 over two of TP8 with as many sequences."""
    kernels = kernels_for(Target.parse(TPUS), weight_bytes=1)
    composer = Composer(kernels, preset(LARGE))
    one, two = (composer.decode_step(split, batch // split.dp, length) for split in GROUPS)
    return two / one


def crossover(length: int) -> float:
    """Sequences; on a line between the batches around it, in logarithms."""
    gains = [speed_up(batch, length) for batch in BATCHES]
    for (few, gain), (more, loss) in zip(
        zip(BATCHES, gains, strict=True), zip(BATCHES[1:], gains[1:], strict=True), strict=False
    ):
        if gain >= 1 > loss:
            return few * (more / few) ** ((gain - 1) / (gain - loss))
    return float(BATCHES[-1] if gains[-1] >= 1 else BATCHES[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_data_option(parser)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        found = list(points(args.data))
    except NoData as error:
        sys.exit(str(error))
    print(
        f"{'ms of a decode step':58}{'measured':>9}{'tables':>8}{'error':>7}{'coeff.':>8}{'error':>7}"
    )
    for p in found:
        what = f"{p.model} {p.chip} tp{p.tp} batch {p.batch} at {p.context}"
        print(
            f"{what:40}{p.source[:17]:18}{p.measured_ms:9.2f}{p.tables_ms:8.2f}"
            f"{p.error(p.tables_ms):6.0f}%{p.coefficients_ms:8.2f}{p.error(p.coefficients_ms):6.0f}%"
        )
    gains = {
        length: {batch: round(speed_up(batch, length), 2) for batch in BATCHES}
        for length in LENGTHS
    }
    crossovers = {length: round(crossover(length), 1) for length in LENGTHS}
    print(f"\n{LARGE} on {TPUS}: speed-up of {GROUPS[0]} over {GROUPS[1]}, by sequences")
    for length, row in gains.items():
        cells = "".join(f"{batch:>5}: {gain:.2f}" for batch, gain in row.items())
        print(f"  {length:5} tokens {cells}   even at {crossovers[length]:.0f}")
    if args.out:
        content = {
            "command": "python -m benchmarks.composed_steps " + " ".join(sys.argv[1:]),
            "what": (__doc__ or "").split("\n\n", 2)[2],
            "steps": [asdict(point) for point in found],
            "tpu_speed_up": gains,
            "tpu_crossover": crossovers,
        }
        args.out.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
