"""What steps and switches take on the machine that is planned: a profile, or kernels composed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pat_jax.engine.buckets import Buckets
from pat_jax.errors import UserError
from pat_jax.models.config import ModelConfig
from pat_jax.planning.latency import LatencyModel
from pat_jax.planning.profile import Profile, read_profile
from pat_jax.planning.types import Split
from pat_jax.profiling.absent_jobs import Plant
from pat_jax.profiling.composer import SWITCH_S, Composer
from pat_jax.profiling.cost_sources import EXPLAINED, kernels_for
from pat_jax.profiling.kernels import BYTES, Kernels, Source
from pat_jax.profiling.links import waiting_s
from pat_jax.profiling.paper import padded
from pat_jax.profiling.targets import Target
from pat_jax.profiling.what_if import splits_of, sums_of


@dataclass(frozen=True)
class Costs:
    """A latency model, and where it is from."""

    latency: LatencyModel
    source: Source
    sum_seconds: Callable[[Split, int], float]  # sums over devices of a step, by rows of a group
    notes: tuple[str, ...]  # what is assumed, in sentences

    @property
    def explained(self) -> str:
        return EXPLAINED[self.source]


def costs_of(plant: Plant, profile: Path | None, data: Path) -> Costs:
    """Of every load that the run of a plant may come to.

    Args:
      profile: measured by the user; None: composed from kernels.
      data: a folder with `calibration/`, the kernel tables; where it is not there coefficients that
        ship stand for them.
    """
    order, rollout = plant.order, plant.order.config.rollout
    buckets = Buckets.build(
        tuple(plant.layouts),
        capacity=plant.capacity,
        min_rows=rollout.min_rows,
        min_length=rollout.min_length,
        max_length=rollout.max_prompt_length + rollout.max_completion_length,
    )
    if profile:
        return profiled(profile, order.target, order.model, buckets)
    return composed(order.target, order.model, buckets, data, weights=rollout.weights)


def composed(
    target: Target, model: ModelConfig, buckets: Buckets, data: Path, *, weights: str = "auto"
) -> Costs:
    """From the kernels of the target's chip.

    Args:
      weights: auto for bfloat16, or int8 or fp8.
    """
    kernels = kernels_for(target, data, weight_bytes=BYTES if weights == "auto" else 1)
    model = padded(model, target.num_devices)
    composer = Composer(kernels, model)
    host_us = 1e6 * composer.host_s_per_row
    notes = [
        f"{SWITCH_S} s of each switch for draining the burst and the host, beside its bytes "
        "(assumed).",
        f"{host_us:.3g} us of the host for each row of a group in each step (measured of another "
        "engine, on an H100)."
        if host_us
        else "No host time in a step.",
    ]
    sums = _sum_seconds(kernels, model)
    return Costs(composer.latency_model(buckets), kernels.source, sums, tuple(notes))


def _sum_seconds(kernels: Kernels, model: ModelConfig) -> Callable[[Split, int], float]:
    """Two sums a layer and the embedding's, each with the wait of the devices for one another."""

    def seconds(split: Split, rows: int) -> float:
        if split.tp == 1:
            return 0.0
        one = 1e-3 * kernels.all_reduce(split.tp, rows * model.embed_dim)
        return (2 * model.num_layers + 1) * (one + waiting_s(kernels.chip, split.tp))

    return seconds


def profiled(path: Path, target: Target, model: ModelConfig, buckets: Buckets) -> Costs:
    """From a profile of the user's own.

    Raises:
      UserError: it cannot be read, or is of another model or number of devices.
    """
    profile = read_profile(path)
    _check(path, profile, target, model)
    known = splits_of(profile.latency)
    rows = {split: rows for split, rows in buckets.rows.items() if split in known}
    notes = (f"Layouts that {path} has no times of are not planned.",) * (
        len(rows) < len(buckets.rows)
    )
    return Costs(profile.latency.on(rows, buckets.lengths), "profile", sums_of(profile), notes)


def _check(path: Path, profile: Profile, target: Target, model: ModelConfig) -> None:
    subject = profile.subject
    names = ("embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads")
    expected = {name: getattr(model, name) for name in names} | {"devices": target.num_devices}
    found = {name: subject.model.get(name) for name in names} | {"devices": subject.num_devices}
    wrong = [f"{name} {found[name]}, not {n}" for name, n in expected.items() if found[name] != n]
    if wrong:
        raise UserError(
            f"option --profile is {str(path)!r}: of something else ({'; '.join(wrong)}); measure one "
            "with python -m pat_jax.profile, or leave it out."
        )
