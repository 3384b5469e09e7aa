"""Decode steps of machines that are not here, composed from published kernel measurements.

    python -m benchmarks.kernel_tables --data ../shared/data

Measured, on the GPU named (aiconfigurator@095f58a5: SGLang 0.5.10, bf16): every GEMM, decode and
prefill attention of one layer, the all-reduce inside a CUDA graph. Between measured points times are
interpolated in a straight line; past the last one they go on with the slope of the last two. What is
computed and what is assumed: `profiling/predict/composer.py`.
"""

import argparse
import sys
from functools import cache
from pathlib import Path

from pat_jax.models.presets import preset
from pat_jax.planning.types import Split
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.kernel_files import KernelTables, NoData
from pat_jax.profiling.predict.targets import Target

GPUS = {"8xH100": "h100:8", "8xA100": "a100:8"}
NUM_DEVICES = 8
SPLITS = tuple(Split(NUM_DEVICES // tp, tp) for tp in (1, 2, 4, 8))
MODELS = ("llama-3.1-8b", "qwen3-14b")


@cache
def measured_kernels(data: Path, gpu: str) -> KernelTables:
    """The tables of one of `GPUS`.

    Raises:
      NoData: they are not there.
    """
    return KernelTables(data, Target.parse(GPUS[gpu]))


def add_data_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("../shared/data"),
        help="folder that holds calibration/ (kernel tables) and lengths/",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_data_option(parser)
    parser.add_argument("--length", type=int, default=1024, help="context in tokens")
    args = parser.parse_args()
    try:
        for gpu in GPUS:
            for name in MODELS:
                composer = Composer(measured_kernels(args.data, gpu), preset(name))
                print_steps(composer, f"{name} on {gpu}", args.length)
    except NoData as error:
        sys.exit(str(error))


def print_steps(composer: Composer, title: str, length: int) -> None:
    print(f"{title}: one decode step in ms, {length} tokens of context")
    print("live sequences", *(f"{split!s:>8}" for split in SPLITS))
    for live in (8, 16, 32, 64, 128, 256, 512, 1024, 2048):
        steps = [composer.decode_step(split, -(-live // split.dp), length) for split in SPLITS]
        print(f"{live:14}", *(f"{1e3 * seconds:8.2f}" for seconds in steps))


if __name__ == "__main__":
    main()
