"""The command `profile`: measures this machine for one model."""

import errno
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pat_jax.commands.expert_width import with_width
from pat_jax.common.bars import counting, note
from pat_jax.common.devices import PROFILE_DIR, Device, configure
from pat_jax.common.errors import UserError
from pat_jax.common.hosts.join import join
from pat_jax.common.hosts.together import process_group
from pat_jax.common.html.figure import Figure
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sizing.layout_choice import check_lengths
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.models.config import ModelConfig
from pat_jax.planning.latency.profile import Profile, ProfileError, Subject, read_profile
from pat_jax.profiling.measure.config import ProfileConfig
from pat_jax.profiling.measure.report import draw_profile, tables
from pat_jax.profiling.predict.shard_profile import ShardProfiler
from pat_jax.profiling.predict.targets import Target, paper_devices
from pat_jax.run.start.engine_setup import build_engine
from pat_jax.run.start.profiles import profile_subject
from pat_jax.run.start.setup import model_config, settled_options
from pat_jax.training.build import DTYPES

log = logging.getLogger(__name__)

SAVE_EVERY_S = 10.0


@dataclass(frozen=True)
class Measured:
    """A profile of this machine, and the file that holds it."""

    profile: Profile
    path: Path

    def plot(self) -> Figure:
        """Draws the time of a decode step by running sequences, a panel for each cache length."""
        return draw_profile(self.profile)

    def __repr__(self) -> str:
        return tables(self.profile)


def measured(config: ProfileConfig) -> Measured:
    join(config.distributed)
    devices = configure(config.devices)
    if config.shards:
        return measure_shards(config, devices[0])
    model = model_config(config.task, config.layout_choice, devices)
    config = _settled(config, model, devices)
    subject = profile_subject(model, config.rollout, config.compute_dtype, devices)
    path = Path(config.out) if config.out else PROFILE_DIR / subject.file_name
    us = process_group()
    known = us.agree("known profile", lambda: known_profile(config, subject, path, shards_of=""))
    rollout = replace(config.rollout, compile="all")  # every program is measured
    engine = build_engine(replace(config.engine, rollout=rollout), config.task, model, devices)
    log.info("%s", engine.drafting)
    us.agree("profile's folder", lambda: check_writable(path))
    own = us.folder(path.parent) / path.name
    return kept(measure(config, engine, subject, known, own), own)


def _settled(config: ProfileConfig, model: ModelConfig, devices: Sequence[Device]) -> ProfileConfig:
    config, shortened = settled_options(with_width(config, devices), model, devices)
    if shortened:
        note(shortened)
    return config


def measure_shards(config: ProfileConfig, device: Device) -> Measured:
    """Measures shards of the machine that `config.shards` names, on one of its devices. Returns
    the profile."""
    target = Target.parse(config.shards)
    model = model_config(config.task, config.layout_choice, paper_devices(target))
    config = _settled(config, model, [device])
    check_lengths(config.rollout, model, config.model)
    subject = profile_subject(model, config.rollout, config.compute_dtype, [device])
    subject = replace(subject, num_devices=target.num_devices)
    path = Path(config.out) if config.out else PROFILE_DIR / subject.file_name
    known = known_profile(config, subject, path, shards_of=str(target))
    rollout = config.rollout
    profiler = ShardProfiler(
        model,
        target,
        rollout,
        device,
        DTYPES[config.compute_dtype],
        capacity=rollout.num_responses,
        seed=config.seed,
        runs=config.runs,
        known=known and known.latency,
    )
    log.info("measuring the shards of %s", ", ".join(map(str, profiler.engines)))
    check_writable(path)

    def so_far() -> Profile:
        return Profile(subject, profiler.latency, shards_of=str(target))

    with counting("measuring", disable=False) as show:
        profiler.measure(saving(show, lambda: so_far().save(path)))
    return kept(so_far(), path)


def known_profile(
    config: ProfileConfig, subject: Subject, path: Path, *, shards_of: str
) -> Profile | None:
    """Returns the profile in the file `path`, or None without that file or with --remeasure. The
    file must have times of the shards of the target `shards_of`, or of whole devices if that is
    empty; otherwise raises ProfileError."""
    if not path.is_file() or config.remeasure:
        return None
    known = read_profile(path, subject)
    if known.shards_of != shards_of:
        there, here = (
            f"the shards of {target}" if target else "whole devices"
            for target in (known.shards_of, shards_of)
        )
        raise ProfileError(path, f"of something else: {there} measured there, {here} here")
    return known


def saving(
    show: Callable[[int, int], None], save: Callable[[], None]
) -> Callable[[int, int], None]:
    """Returns a callback to be called after each measured program. It calls `show`, and `save`
    every 10 seconds."""
    saved = time.monotonic()

    def tick(done: int, total: int) -> None:
        nonlocal saved
        show(done, total)
        if time.monotonic() - saved > SAVE_EVERY_S:
            save()
            saved = time.monotonic()

    return tick


def kept(profile: Profile, path: Path) -> Measured:
    profile.save(path)
    draw_profile(profile).save(path.with_suffix(".svg"))
    return Measured(profile, path)


def check_writable(path: Path, what: str = "profile") -> None:
    """Creates the folder of `path`, and raises UserError if no file can be written there. Called
    before measuring, which takes minutes."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no file", str(path))
        partial = path.with_name(f".{path.name}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise UserError(
            f"{what} {path} cannot be written ({error.strerror}: {error.filename}): expected a file "
            "in a folder that you may write to; name another one with --out."
        ) from None


def measure(
    config: ProfileConfig,
    engine: RolloutEngine,
    subject: Subject,
    known: Profile | None,
    path: Path,
) -> Profile:
    """Measures the times that `known` lacks. Saves the profile to `path` every 10 seconds."""
    with counting("compiling", disable=False) as show:
        engine.compile(show)
    with counting("measuring", disable=False) as show:
        warmup = Warmup(
            engine,
            known=known and known.latency,
            runs=config.runs,
            progress=saving(show, lambda: so_far().save(path)),
        )

        def so_far() -> Profile:
            return Profile(subject, warmup.measured)

        policy = engine.policy
        seed = config.seed
        dtype = DTYPES[config.compute_dtype]
        warmup.measure(lambda layout: policy.init(seed, layout.param_shardings(policy), dtype))
    return so_far()
