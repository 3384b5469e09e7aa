"""What steps and switches take on the machine that is planned: a profile, or kernels composed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pat_jax.engine.buckets import Buckets
from pat_jax.errors import UserError
from pat_jax.models.config import ModelConfig
from pat_jax.planning.latency import LatencyModel
from pat_jax.planning.profile import Profile, read_profile
from pat_jax.planning.types import Split
from pat_jax.profiling.absent.jobs import Plant
from pat_jax.profiling.costs.composer import Composer
from pat_jax.profiling.costs.kernels import BYTES, Source
from pat_jax.profiling.costs.links import Sums
from pat_jax.profiling.costs.sources import EXPLAINED, kernels_for
from pat_jax.profiling.costs.targets import Target
from pat_jax.profiling.what_if import profile_words, splits_of, sums_of


@dataclass(frozen=True)
class Costs:
    """A latency model, and where it is from."""

    latency: LatencyModel
    source: Source
    explained: str
    sum_seconds: Callable[[Split, int], float]  # what a step's devices send, by rows of a group
    notes: tuple[str, ...]  # what is assumed, in sentences


def costs_of(plant: Plant, profile: Path | None, data: Path, sums: Sums) -> Costs:
    """Of every load that the run of a plant may come to.

    Args:
      profile: measured by the user; None: composed from kernels.
      data: a folder with `calibration/`, the kernel tables; where it is not there coefficients that
        ship stand for them.
      sums: how GPUs sum over NVLink.
    """
    order, rollout, buckets = plant.order, plant.order.config.rollout, plant.buckets
    if profile:
        return profiled(profile, order.target, order.model, buckets)
    kernels = kernels_for(
        order.target, data, weight_bytes=BYTES if rollout.weights == "auto" else 1, sums=sums
    )
    composer = Composer(
        kernels,
        order.model,
        page_size=rollout.page_size,
        prefill_blocks=rollout.prefill_blocks,
    )
    return Costs(
        composer.latency_model(buckets),
        kernels.source,
        EXPLAINED[kernels.source],
        lambda split, rows: composer.decode_links_s(rows, split.tp),
        tuple(_assumed(composer, order.target, sums)),
    )


def _assumed(composer: Composer, target: Target, sums: Sums) -> Iterator[str]:
    yield (
        f"{composer.switch_s} s of each switch for draining the burst and the host, beside its bytes "
        "(assumed)."
    )
    if target.chip.platform == "cuda":
        host_us = 1e6 * composer.host_s_per_row
        yield f"GPUs of a host sum as {sums} kernels do; --sums has others."
        yield (
            f"{host_us:.3g} us of the host for each row of a group in each step (measured of another "
            "engine, on an H100)."
        )


def profiled(path: Path, target: Target, model: ModelConfig, buckets: Buckets) -> Costs:
    """From a profile of the user's own.

    Raises:
      UserError: it cannot be read, or is of another model or number of devices.
    """
    profile = read_profile(path)
    _check(path, profile, target, model)
    known = splits_of(profile.latency)
    rows = {split: rows for split, rows in buckets.rows.items() if split in known}
    return Costs(
        profile.latency.on(rows, buckets.lengths),
        "profile",
        profile_words(path, profile),
        sums_of(profile),
        (f"Layouts that {path} has no times of are not planned.",)
        * (len(rows) < len(buckets.rows)),
    )


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
