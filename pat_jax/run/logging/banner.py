"""The lines that a run prints at its beginning and at its end.

Knows what lies in a run's folder. Names no file that is not there.
"""

from collections.abc import Sequence
from pathlib import Path

from pat_jax.common.devices import Device
from pat_jax.config.any_run import AnyRun
from pat_jax.config.run import RunConfig
from pat_jax.models.hf_tensors import num_parameters
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Policy
from pat_jax.run.checkpoints.files import CHECKPOINTS, checkpoints_in
from pat_jax.run.files.folder import PAGE_FILE

_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))
_WRITTEN = {  # files of a run's folder, and their names in the closing lines
    "config.yaml": "the configuration",
    "metrics.jsonl": "metrics.jsonl",
    "completions.jsonl": "completions.jsonl",
    "rollout.svg": "rollout.svg",
    PAGE_FILE: "run.html",
}


def opening(
    config: RunConfig, policy: Policy, devices: Sequence[Device], lora: Lora | None = None
) -> str:
    """Returns a line such as "8 x NVIDIA H100 80GB HBM3 | qwen3, 8.19 B parameters | …"."""
    weights = config.rollout.weights
    more = "" if weights == "auto" else f", {weights} weights in the rollout"
    learning = config.algorithm.title if config.train else ""
    return introduction(config, policy, devices, learning, more, lora)


def introduction(
    config: AnyRun,
    policy: Policy,
    devices: Sequence[Device],
    learning: str,
    arithmetic: str = "",
    lora: Lora | None = None,
) -> str:
    """Returns a line about devices, model, arithmetic and learning. `learning` names the method, ""
    if nothing is learned. `arithmetic` is added to the data type. `lora` has the adapters, if they
    are what is trained."""
    kind, model = devices[0].device_kind, Path(config.model).name
    arithmetic = f"{config.compute_dtype} arithmetic{arithmetic}"
    if learning and config.compute_dtype != "float32":
        arithmetic += f", float32 {'adapters' if lora else 'master weights'}"
    size = f"{_count(num_parameters(policy))} parameters"
    if lora:
        kinds = " ".join(lora.kinds)
        size += f", {_count(lora.num_weights)} in adapters of rank {lora.rank} ({kinds})"
    named = f"{model} ({policy.config.architecture})"
    return " | ".join(
        filter(None, [f"{len(devices)} x {kind}", f"{named}, {size}", arithmetic, learning])
    )


def closing(config: AnyRun, folder: Path, *, compile_s: float, total_s: float) -> str:
    """Returns lines with the seconds of the run and of compilation, and the files it has left."""
    names = [name for file, name in _WRITTEN.items() if (folder / file).is_file()]
    if steps := [path.name for path in checkpoints_in(folder / CHECKPOINTS)]:
        names.append(f"the checkpoint{'s' * (len(steps) > 1)} of step {' and '.join(steps)}")
    lines = [f"whole run {_duration(total_s)}, {_duration(compile_s)} of them compiling"]
    lines.append(f"in {folder}: {', '.join(names)}")
    if (export := config.checkpoint.export_dir) and Path(export).is_dir():
        lines.append(f"in {export}: the {config.TRAINED} as a Hugging Face directory")
    return "\n".join(lines)


def _count(number: int) -> str:
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
