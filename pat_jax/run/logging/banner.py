"""The lines that a run prints at its beginning and at its end.

Knows what lies in a run's folder. Names no file that is not there.
"""

from collections.abc import Sequence
from pathlib import Path

from pat_jax.common.devices import Device
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


def introduction(
    model: str,
    policy: Policy,
    devices: Sequence[Device],
    dtype: str,
    learning: str,
    *,
    rollout_weights: str = "auto",
    lora: Lora | None = None,
) -> str:
    """Returns a line such as "8 x NVIDIA H100 80GB HBM3 | qwen3, 8.19 B parameters | …".

    Args:
      model: the model's name or directory.
      dtype: data type of the arithmetic.
      learning: the algorithm; "" if nothing is learned.
      rollout_weights: format of the rollout's weights; auto is the arithmetic's.
      lora: the adapters, if only these are trained.
    """
    kind = devices[0].device_kind
    arithmetic = f"{dtype} arithmetic"
    if rollout_weights != "auto":
        arithmetic += f", {rollout_weights} weights in the rollout"
    if learning and dtype != "float32":
        arithmetic += f", float32 {'adapters' if lora else 'master weights'}"
    size = f"{_count(num_parameters(policy))} parameters"
    if lora:
        kinds = " ".join(lora.kinds)
        size += f", {_count(lora.num_weights)} in adapters of rank {lora.rank} ({kinds})"
    named = f"{Path(model).name} ({policy.config.architecture})"
    return " | ".join(
        filter(None, [f"{len(devices)} x {kind}", f"{named}, {size}", arithmetic, learning])
    )


def closing(
    folder: Path, export_dir: str, exported: str, *, compile_s: float, total_s: float
) -> str:
    """Returns lines with the seconds of the run and of compilation, and the files it has left. What
    it has `exported` is in `export_dir`, unless that is empty."""
    names = [name for file, name in _WRITTEN.items() if (folder / file).is_file()]
    if steps := [path.name for path in checkpoints_in(folder / CHECKPOINTS)]:
        names.append(f"the checkpoint{'s' * (len(steps) > 1)} of step {' and '.join(steps)}")
    lines = [f"whole run {_duration(total_s)}, {_duration(compile_s)} of them compiling"]
    lines.append(f"in {folder}: {', '.join(names)}")
    if export_dir and Path(export_dir).is_dir():
        lines.append(f"in {export_dir}: {exported}")
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
