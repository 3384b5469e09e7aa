"""The command `doctor`: examines a machine."""

import gc
import io
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from pat_jax.commands.plan import model_of
from pat_jax.commands.profile import check_writable
from pat_jax.common.devices import Device, configure
from pat_jax.profiling.doctor.checks import (
    MODEL,
    devices_found,
    kernels_found,
    links_found,
    switch_found,
    versions_found,
)
from pat_jax.profiling.doctor.config import DoctorConfig
from pat_jax.profiling.doctor.report import Examination, Finding, Report
from pat_jax.train import train
from pat_jax.training.build import DTYPES

LARGEST_GAP = 0.1  # nats: allowed mean gap between the rollout's and trainer's log-probabilities
# What the user can do if a part fails.
ADVICE = {
    "devices": "pip install -e '.[cuda12]' or '.[tpu]', and see that the driver is loaded",
    "versions": "reinstall with pip install -e .",
    "links": "look at the links (nvidia-smi topo -m) and at what NCCL_DEBUG=INFO says",
    "kernels": "train and generate replace such a kernel by plain operations by themselves, which is "
    "slower: report it with the file of --out",
    "switch": "pin one layout with --layout until this is found",
    "iteration": "run python -m pat_jax.train --model tiny --steps 1 and read the whole message",
}


def examine(
    config: DoctorConfig,
    command: str,
    hung: Callable[[Report], None],
    tell: Callable[[str], None] = lambda line: None,
) -> Report:
    """Examines this machine. `command` is the command line, for the report; see `Examination` for
    `hung` and `tell`."""
    out = Path(config.out) if config.out else None
    if out is not None:
        check_writable(out, "report")
    examination = Examination(command, tell, hung, out, config.step_seconds)
    model = model_of(config.model)
    devices: list[Device] = []
    dtype = DTYPES[config.compute_dtype]

    def devices_here() -> Finding:
        devices.extend(configure(config.devices))
        return devices_found(devices)

    examination.look("devices", devices_here, ADVICE["devices"])
    if not devices:
        return examination.finish("")
    parts: dict[str, Callable[[], Finding]] = {
        "versions": lambda: versions_found(devices),
        "links": lambda: links_found(devices, dtype),
        "kernels": lambda: kernels_found(devices, model, config.page_size, dtype),
        "switch": lambda: switch_found(devices),
        "iteration": lambda: iteration_found(devices),
    }
    for name, examine in parts.items():
        examination.look(name, examine, ADVICE[name])
        gc.collect()  # frees the part's arrays on the devices for the next one
    kind = f"{len(devices)} x {devices[0].device_kind}"
    return examination.finish(
        f"all is well on {kind}. Measure it for your model with python -m pat_jax.profile, or train"
    )


def iteration_found(devices: Sequence[Device]) -> Finding:
    """Trains a tiny model for one iteration. Returns its times, and whether the log-probabilities
    of rollout and trainer agree."""
    output = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(output), redirect_stdout(output):
        row = _iteration(len(devices), Path(folder) / "run")
    names = ("train/grad_norm", "train/behavior_gap", "rollout/tokens_per_s")
    figures = {name: value for name, value in row.items() if name.startswith("timing/")}
    figures |= {name: row[name] for name in names}
    stages = [f"{name} {row[f'timing/{name}']:.2f}" for name in ("rollout", "update", "transfer")]
    gap, norm = row["train/behavior_gap"], row["train/grad_norm"]
    trouble = ""
    if gap is None or not gap <= LARGEST_GAP:
        trouble = f"rollout and trainer differ by {gap} nats a token"
    elif norm is None or not 0 < norm < math.inf:
        trouble = f"the gradient has the norm {norm}"
    return Finding(trouble or f"{', '.join(stages)} s, gap {gap:.1g} nats", figures, trouble)


def _iteration(num_devices: int, folder: Path) -> Mapping[str, Any]:
    """Trains for one iteration, and returns its metrics."""
    prompts = num_devices * -(-4 // num_devices)  # a multiple of the devices, at least four
    run = train(
        "demo",
        reward=_lengths,
        model=MODEL,
        devices=num_devices,
        steps=1,
        run_dir=str(folder),
        profile="none",
        rollout={
            "prompts_per_step": prompts,
            "num_generations": 2,
            "max_completion_length": 56,
            "min_length": 128,
            "prefill_blocks": 1,
        },
        algorithm={"tokens_per_micro_batch": 128 * num_devices},
        warm_start={"steps": 0},
        eval={"every": 0},
    )
    (row,) = (row for row in run.metrics if "train/grad_norm" in row)
    return row


def _lengths(completions: Sequence[str], **columns: object) -> list[float]:
    """A reward function: longer responses get more, so that rewards differ."""
    del columns
    return [float(len(text)) for text in completions]
