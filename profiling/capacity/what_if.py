"""Changes a measured machine: another host, other batches and caps.

Knows a profile and what to change. Reports which of the requested loads were never measured.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from pat_jax.common.chips import Chip
from pat_jax.common.errors import UserError
from pat_jax.common.json_text import of_json
from pat_jax.config.programs import of_rollouts
from pat_jax.config.rollout import RolloutConfig
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.engine.sizing.draft_choice import drafts_of
from pat_jax.engine.sizing.memory_checks import layouts_without_memory
from pat_jax.models.config import ModelConfig
from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.latency.profile import Profile
from pat_jax.planning.memory import GIB
from pat_jax.planning.types import Split
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic, nearest
from pat_jax.profiling.cross_compile.target_build import Order, TargetBuild
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.simulate.machine import Machine

NO_SPECULATION = SpeculationConfig("none")


@dataclass(frozen=True)
class WhatIf:
    """A load, and changes to the machine of a profile."""

    responses: int
    cap: int  # tokens of a response
    longest_prompt: int
    host_us: float = 0.0  # added to a decode step for each running sequence
    device_memory_gib: float = 0.0  # 0: all sequences find pages
    burst_steps: int = 256
    check_every: int = 16
    speculation: SpeculationConfig = NO_SPECULATION  # drafts whose steps were measured
    draft_model: ModelConfig | None = None  # the model that proposes the drafts, if one does

    def __str__(self) -> str:
        words = [f"{self.responses:,} responses, cap {self.cap:,}"]
        if self.host_us:
            words.append(f"host +{self.host_us:g} us a sequence")
        return ", ".join(words)


def machine_of(profile: Profile, what_if: WhatIf, acceptance: Acceptance | None = None) -> Machine:
    """Returns the profile's machine with the changes of `what_if`. Draft tokens are accepted by
    `acceptance`, or else by the prior. Raises UserError if the profile lacks times that a change
    needs, or if no layout has room."""
    latency = profile.latency
    splits = splits_of(profile.latency)
    drafts = drafts_of(what_if.speculation, profile.subject.backend)
    config = _config(profile, what_if)
    memory = None
    if what_if.device_memory_gib:
        build = _build(profile, config, what_if)
        alone = build.alone
        memory = build.memory
        without_memory = layouts_without_memory(alone, config)
        splits = tuple(split for split in splits if split not in without_memory)
        if not splits:
            best = nearest(alone)
            raise UserError(
                f"option --device_memory_gib is {what_if.device_memory_gib:g}: no layout fits, "
                f"{best} needs {alone.held(best) / GIB:.3g} GiB of a device and "
                f"{alone.usable / GIB:.3g} GiB can be used."
            )
    return Machine.of(
        latency,
        splits,
        config,
        capacity=what_if.responses,
        memory=memory,
        runs_ahead=profile.subject.backend != "cpu",
        host_s_per_sequence=1e-6 * what_if.host_us,
        drafts=drafts,
        acceptance=acceptance or Acceptance.unseen(is_generated=drafts.is_generated),
    )


def profile_words(path: Path, profile: Profile) -> str:
    """Returns words for the profile and where it was measured."""
    subject = profile.subject
    if profile.shards_of:
        return (
            f"profile {path}: shards of {profile.shards_of} measured on one {subject.device_kind}, "
            "links computed"
        )
    return f"profile {path}, measured on {subject.num_devices} x {subject.device_kind}"


def splits_of(latency: LatencyModel) -> tuple[Split, ...]:
    """Returns the layouts that were measured, lowest TP first."""
    return tuple(sorted({split for split, _, _ in latency.decode_table}, key=lambda s: s.tp))


def unmeasured(profile: Profile, machine: Machine) -> str:
    """Returns words for the buckets of a machine that are larger than all measured ones, or ""."""
    table = profile.latency.decode_table
    longest = max(length for _, _, length in table)
    asked = machine.buckets.lengths[-1]
    words = [f"contexts beyond {longest:,} tokens (up to {asked:,})"] if asked > longest else []
    for split in machine.splits:
        most = max(rows for known, rows, _ in table if known == split)
        if (rows := machine.buckets.rows[split][-1]) > most:
            words.append(f"{split} beyond {most:,} rows a replica (up to {rows:,})")
    return "; ".join(words)


def model_of(profile: Profile) -> ModelConfig:
    return of_json(ModelConfig, profile.subject.model)


def _config(profile: Profile, what_if: WhatIf) -> RolloutConfig:
    """Returns options with the measured buckets, and the larger ones that sequences need."""
    latency = profile.latency
    rows = min(rows for _, rows, _ in latency.decode_table)
    length = min(length for _, _, length in latency.decode_table)
    return replace(
        RolloutConfig(),
        prompts_per_step=what_if.responses,
        num_generations=1,
        max_prompt_length=what_if.longest_prompt,
        max_completion_length=what_if.cap,
        min_rows=rows,
        min_length=length,
        page_size=latency.page_size,
        prefill_blocks=latency.prefill_blocks,
        burst_steps=what_if.burst_steps,
        check_every=what_if.check_every,
        device_memory_gib=what_if.device_memory_gib,
        weights=profile.subject.weights,
    )


def _build(profile: Profile, config: RolloutConfig, what_if: WhatIf) -> TargetBuild:
    """Returns a build of as many devices as were measured, each with the requested memory."""
    subject = profile.subject
    limit = int(what_if.device_memory_gib * GIB)
    rates = ("memory_bytes_s", "flops_s", "link_bytes_s", "host_link_bytes_s", "pcie_bytes_s")
    unknown = dict.fromkeys(rates, 0.0)
    chip = Chip(subject.device_kind, "cuda", limit, link="", links=0, **unknown)
    count = subject.num_devices
    target = Target(subject.device_kind, chip, (1, count), count, 1)
    dtype = "float32" if subject.dtype == "float32" else "bfloat16"
    run = of_rollouts(config, what_if.speculation, dtype)
    return by_arithmetic(Order.of(target, run, model_of(profile), (0,), what_if.draft_model))
