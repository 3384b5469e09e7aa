"""Composed updates beside published training of other programs on the same chips.

    python -m benchmarks.composed_updates --data ../shared/data --out benchmarks/results/composed_updates.json

No update of ours ran on an accelerator. What others published of Llama-3.1-8B, rows of 8,192 tokens, parameters
split over all devices, in tokens a second of a device:

- torchtitan on 8 H100 (pytorch/torchtitan@31a17bfd, benchmarks/llama3_h100_202412_torchtitan.md): 2 rows a device;
  it keeps some activations and computes others anew. Its H100s have HBM2e at 2.4 TB/s and 500 W, which ours
  do not.
- MaxText on 8 and 256 v6e (AI-Hypercomputer/tpu-recipes@10ca5b92, v6e-8; maxtext@20a91e12,
  docs/reference/models/tiering.md, its configuration llama3_1-8b-8192): 3 and 4 rows a device; inputs of layers
  and projections of attention wait in the host's memory, the rest is computed anew.

What is composed is our update's arithmetic for these rows: forward and backward, with and without computing each
layer anew, and the optimizer. None of its numbers was fitted to these.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.kernel_tables import add_data_option
from pat_jax.common.text_table import text_table
from pat_jax.models.presets import preset
from pat_jax.profiling.predict.composer import Composer, num_weights
from pat_jax.profiling.predict.sources import kernels_for
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.predict.update_times import UpdateTimes
from pat_jax.profiling.predict.update_work import Rows, UpdateWork, apply_work

MODEL, LENGTH = "llama-3.1-8b", 8192
FLOAT32 = 4


@dataclass(frozen=True)
class Published:
    source: str
    target: str
    rows: int  # of a device
    tokens_s: float  # of a device


POINTS = (
    Published("torchtitan", "h100:8", 2, 5762),
    Published("torchtitan, compiled", "h100:8", 2, 6667),
    Published("MaxText", "v6e:2x4", 3, 7138.89),
    Published("MaxText", "v6e:16x16", 4, 7207),
)


@dataclass(frozen=True)
class Beside:
    """Tokens a second of a device."""

    source: str
    target: str
    published: float
    recomputing: float  # composed, each layer computed anew
    keeping: float  # composed, everything kept

    def error(self, composed: float) -> float:
        """Percent of what was published."""
        return 100 * (composed / self.published - 1)


def composed(point: Published, data: Path, *, remat: str) -> float:
    target, model = Target.parse(point.target), preset(MODEL)
    times = UpdateTimes(Composer(kernels_for(target, data, sums="nccl"), model), target)
    ways, tokens = target.num_devices, point.rows * LENGTH
    rows = Rows(tokens, point.rows * LENGTH * (LENGTH + 1) / 2)
    params = FLOAT32 * num_weights(model) // ways
    work = UpdateWork(model, ways, ways, remat)
    spent = times.seconds(work.gradients(rows), tokens)
    spent += times.seconds(apply_work(params, params, 2 * params))
    return tokens / spent.total


def measure(data: Path) -> list[Beside]:
    return [
        Beside(
            point.source,
            point.target,
            point.tokens_s,
            *(composed(point, data, remat=remat) for remat in ("full", "none")),
        )
        for point in POINTS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_data_option(parser)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    found = measure(options.data)
    header = ["source", "target", "published", "recomputing", "off, %", "keeping", "off, %"]
    rows = [
        [x.source, x.target, x.published, a, x.error(a), b, x.error(b)]
        for x in found
        for a, b in [(x.recomputing, x.keeping)]
    ]
    print(
        f"{MODEL}, rows of {LENGTH:,} tokens, tokens a second of a device\n{text_table(header, rows)}"
    )
    if options.out:
        content = {
            "command": "python -m benchmarks.composed_updates " + " ".join(sys.argv[1:]),
            "what": (__doc__ or "").split("\n\n", 2)[2],
            "points": [asdict(x) for x in found],
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
