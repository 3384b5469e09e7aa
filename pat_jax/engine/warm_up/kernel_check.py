"""Checks that the kernels that a run is about to use compile on its devices and are right.

Each kernel is compared with plain operations in float32 on the same numbers and device. A wrong one
is replaced by plain operations for the run. Right ones are recorded in a file and then skipped.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.common.devices import CACHE_DIR, Device
from pat_jax.common.files import replace_text
from pat_jax.common.hosts.together import process_group
from pat_jax.common.json_text import JsonError, parse_json
from pat_jax.engine.warm_up.kernel_cases import Case, Part, cases_of, parts_of
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.config import ModelConfig
from pat_jax.models.kernels import kernel_choice
from pat_jax.models.kernels.kernel_choice import ANYWHERE, Kernels
from pat_jax.models.weight_formats import WeightFormat
from pat_jax.version import __version__

log = logging.getLogger(__name__)

KEPT = CACHE_DIR.parent / "kernels.json"
# Relative errors allowed in a query's result or a gradient's row. TPUs multiply float32 in parts of
# bfloat16, and GPUs in TF32.
TOLERANCES = {"bfloat16": 3e-2, "float32": 1e-2}
LONGEST = 200  # characters of a compiler's message


@dataclass(frozen=True)
class Checked:
    """The result of checking one kernel at one shape."""

    name: str
    kernel: str  # its name in `Kernels`
    part: Part
    error: float  # relative error of the worst row; NaN if the kernel did not run
    trouble: str  # what is wrong in a few words; empty if the kernel is right
    seconds: float = 0.0  # to compile and run the kernel, without the plain operations

    def sentence(self, device: str) -> str:
        return (
            f"kernel {self.name!r} ({self.part}) {self.trouble} on {device}: "
            "plain operations compute it in this run."
        )


def usable_kernels(
    layouts: Sequence[Layout],
    model: ModelConfig,
    *,
    page_size: int,
    dtype: jnp.dtype,
    weights: WeightFormat = "auto",
    names: Collection[str] = kernel_choice.NAMES,
) -> Kernels:
    """Returns the layouts' kernels without those that fail on this machine; logs each failure.

    Args:
      weights: the format of a rollout's weights.
      names: the kernels that are about to be used; others are not checked.
    """
    wanted = layouts[0].kernels
    asked = wanted.without(set(kernel_choice.NAMES) - set(names))
    if not asked.chosen:
        return wanted

    def look() -> frozenset[str]:
        # The model may have the devices of other processes, which are like those of this one.
        own = (x for x in layouts[0].devices if x.process_index == jax.process_index())
        device = next(own, jax.local_devices()[0])
        parts = parts_of(layouts, model, page_size, dtype, weights)
        found = check_kernels(device, parts, asked, kept=KEPT)
        wrong = {x.kernel: x for x in found if x.trouble}
        for one in wrong.values():
            log.warning("%s", one.sentence(device.device_kind))
        return frozenset(wrong)

    return wanted.without(process_group().agree("kernels", look))


def with_usable_kernels(
    layout: Layout, model: ModelConfig, *, page_size: int, dtype: jnp.dtype
) -> Layout:
    """Returns `layout` without those kernels for packed rows and experts that fail here.

    It is `layout` itself if none of them fails."""
    names = ("rows", "experts")
    kernels = usable_kernels([layout], model, page_size=page_size, dtype=dtype, names=names)
    return layout if kernels == layout.kernels else replace(layout, kernels=kernels)


def check_kernels(
    device: Device, parts: Iterable[Part], kernels: Kernels, *, kept: Path | None = None
) -> list[Checked]:
    """Checks every kernel of `kernels` at every shape of `parts`.

    Args:
      kept: a file of passed checks, which are skipped; checks that pass now are added to it.
    """
    known = set() if kept is None else _read(kept)
    cases = [
        (part, case, _key(device, part, case.name))
        for part in parts
        for case in cases_of(part, kernels)
    ]
    found = [
        check_kernel(device, part, case, kernels) for part, case, key in cases if key not in known
    ]
    right = {_key(device, one.part, one.name) for one in found if not one.trouble}
    if kept is not None and right - known:
        with suppress(OSError):  # it is checked again next time
            kept.parent.mkdir(parents=True, exist_ok=True)
            replace_text(kept, json.dumps(sorted(known | right), indent=1))
    return found


def check_kernel(device: Device, part: Part, case: Case, kernels: Kernels) -> Checked:
    """Checks one kernel on one device; errors of compiler and driver become its `trouble`."""
    start = time.perf_counter()
    rounded = [x.astype(part.dtype) if x.dtype == np.float32 else x for x in case.arrays]
    try:
        got = _computed(device, case, kernels, rounded)
    except Exception as error:  # a compiler or a driver may raise any exception
        message = " ".join(f"{type(error).__name__}: {error}".split())
        trouble = f"does not run ({message[:LONGEST]})"
        return Checked(case.name, case.kernel, part, float("nan"), trouble)
    seconds = time.perf_counter() - start
    exact = [x.astype(np.float32) if x.dtype == part.dtype else x for x in rounded]
    with jax.default_matmul_precision("highest"):
        wanted = _computed(device, case, ANYWHERE, exact)
    worst = max(_error(x, y, case.floor) for x, y in zip(got, wanted, strict=True))
    most = tolerance(part, kernels.platform)
    trouble = "" if worst <= most else f"is wrong (relative error {worst:.2g}, allowed {most:.2g})"
    return Checked(case.name, case.kernel, part, worst, trouble, seconds)


def tolerance(part: Part, platform: str) -> float:
    return TOLERANCES["bfloat16" if platform == "tpu" else part.dtype]


def program_of(layout: Layout, case: Case, kernels: Kernels) -> Callable[..., Any]:
    """Returns a function to jit that runs a case in `shard_map`; every device computes the same."""
    whole = layout.spec()
    return jax.shard_map(
        partial(case.run, kernels, case.kernel),
        mesh=layout.mesh,
        in_specs=whole,
        out_specs=whole,
        check_vma=False,  # kernels do not declare over which axes their results vary
    )


def _computed(
    device: Device, case: Case, kernels: Kernels, arrays: Sequence[np.ndarray]
) -> list[np.ndarray]:
    layout = Layout(factored_mesh([device]), Kernels.of(device.platform))
    placed = jax.device_put(list(arrays), layout.sharding())
    out = jax.jit(program_of(layout, case, kernels))(*placed)
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(out)]


def _error(got: np.ndarray, wanted: np.ndarray, floor: float) -> float:
    """The error of the worst row, relative to its norm plus `floor` times a usual row's norm."""
    usual = np.sqrt(np.mean(np.sum(wanted**2, axis=-1)))
    size = np.linalg.norm(wanted, axis=-1) + floor * usual
    worst = np.max(np.linalg.norm(got - wanted, axis=-1) / size)
    return float(worst) if np.isfinite(worst) else float("inf")


def _key(device: Device, part: Part, name: str) -> str:
    where = device.device_kind, device.client.platform_version, jax.__version__, __version__
    content = [*where, sources(), name, asdict(part)]
    return json.dumps(content, sort_keys=True)


def sources() -> str:
    """Returns a hash of the kernels' code, so that edited kernels are checked again."""
    files = sorted(Path(kernel_choice.__file__).parent.glob("*.py"))
    texts = [file.read_bytes() for file in files]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def _read(path: Path) -> set[str]:
    """The names of checks that passed before; empty if the file is missing or damaged."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, JsonError):
        return set()
    return {x for x in found if isinstance(x, str)} if isinstance(found, list) else set()
