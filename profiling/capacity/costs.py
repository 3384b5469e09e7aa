"""Finds the seconds of steps and switches for a plan: from a profile or kernel times."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pat_jax.common.errors import UserError
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.layout.buckets import NO_DRAFTS, Buckets, Drafts
from pat_jax.layout.chain import expert_ways, kv_ways
from pat_jax.layout.division import padding_of_heads
from pat_jax.models.config import PADDING
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.latency.profile import Subject, read_profile
from pat_jax.profiling.capacity.what_if import profile_words, splits_of
from pat_jax.profiling.cross_compile.target_build import Order, TargetBuild
from pat_jax.profiling.predict.composer import DRAFTING_S, Composer
from pat_jax.profiling.predict.kernel_model import (
    BYTES,
    EXPLAINED,
    ModelledKernels,
    Source,
    StepRange,
    range_of,
)
from pat_jax.profiling.predict.links import Sums


@dataclass(frozen=True)
class SourcedLatency:
    """A latency model, and where its times are from."""

    latency: LatencyModel
    source: Source
    explained: str  # what `source` means
    notes: tuple[str, ...]  # assumptions, in sentences
    range: StepRange | None  # of measured / predicted seconds; None: not verified
    drafts: Drafts = NO_DRAFTS  # those whose step times are known


def costs_of(build: TargetBuild, profile: Path | None, sums: Sums) -> SourcedLatency:
    """Returns the latency model of the run of `build`: from the user's `profile`, or composed from
    kernel times. `sums` is the way in which GPUs sum over NVLink."""
    order = build.order
    rollout = build.order.run.rollout
    buckets = build.buckets
    if profile:
        return profiled(profile, order, buckets, build.drafter)
    kernels = ModelledKernels(order.target, BYTES if rollout.weights == "auto" else 1, sums)
    ways, width = expert_ways(build.layouts)
    composer = Composer(
        kernels,
        order.model,
        page_size=rollout.page_size,
        prefill_blocks=rollout.prefill_blocks,
        divided=kv_ways(build.layouts),
        expert_ways=ways,
        expert_width=width,
    )
    drafts = build.drafter.drafts
    draft = order.draft_model
    # Its weights are never quantized.
    draft_model = draft and Composer(ModelledKernels(order.target, sums=sums), draft)
    return SourcedLatency(
        composer.latency_model(buckets, drafts, draft_model),
        kernels.source,
        EXPLAINED[kernels.source],
        (*_assumed(composer, build, sums), *_drafts_assumed(build.drafter)),
        # All measured steps are of models without experts.
        None
        if order.model.experts
        else range_of(order.target.chip, kernels.source, kernels.weight_bytes),
        drafts,
    )


def _assumed(composer: Composer, build: TargetBuild, sums: Sums) -> Iterator[str]:
    chip = build.order.target.chip
    gaps = composer.unlisted
    model = build.order.model
    yield (
        f"{composer.switch_s} s of each switch for draining the burst and the host, beside its bytes "
        "(assumed)."
    )
    if chip.platform == "cuda":
        yield f"GPUs of a host sum as {sums} kernels do (assumed); --sums has others."
        yield (
            f"{1e6 * gaps.layer:.3g} us of each layer and {1e6 * gaps.row:.3g} us of each row of a replica "
            "in a step are in no kernel (what steps composed for an H100 lack of measured ones)."
            if not composer.kernels.own
            else "Attention is this engine's as it ran on one H200, and no time passes between kernels."
        )
    else:
        yield "A layer's sums go on while its weights are read, as far as they were seen to on a v5e-16."
    if model.experts is not None:
        yield f"--expert_width is {composer.expert_width}: devices that share the width of an expert."
        yield (
            "Each token chooses its experts independently and evenly (assumed); the device that has the most "
            "of them to read is waited for. Their products are priced as those of one fused kernel that was "
            "measured on an H100, on a TPU as other products."
        )
    yield "The KV cache is in bfloat16: the engine has no other."
    widest = max(split.tp for split in build.layouts)
    if (copies := widest // composer.kv_ways(widest)) > 1:
        yield (
            f"At TP{widest} each of {model.num_kv_heads} KV heads is on {copies} devices: the engine "
            "does not divide the tokens of a head."
        )
    if note := padding_of_heads(model):
        yield note


def _drafts_assumed(drafter: Drafter) -> Iterator[str]:
    if not drafter.drafts.num_draft_tokens:
        return
    of_drafter = ""
    if drafter.drafts.is_generated:
        of_drafter = f", and for each of its tokens of drafts a pass of {drafter.come_from}"
    yield (
        "A step that verifies drafts is composed as one of as many tokens as it has room for, each "
        f"sequence's KV cache read once, and {1e6 * DRAFTING_S:.3g} us for finding drafts and taking them "
        f"over (assumed){of_drafter}. None was measured."
    )
    if drafter.policy:
        yield (
            "What the draft model computes to catch up with its policy, behind a stretch without drafts or "
            "a switch, is not in it."
        )


def profiled(path: Path, order: Order, buckets: Buckets, drafter: Drafter) -> SourcedLatency:
    """Returns the latency model of a user's profile, without drafts if none were measured. Raises
    UserError if the profile cannot be read, or is of another model, dtype, or number or kind of
    devices."""
    profile = read_profile(path)
    _check(path, profile.subject, order)
    known = splits_of(profile.latency)
    rows = {split: rows for split, rows in buckets.rows.items() if split in known}
    notes = (f"Layouts that {path} has no times of are not planned.",) * (
        len(rows) < len(buckets.rows)
    )
    drafts, told = measured_drafts(drafter, profile.latency)
    return SourcedLatency(
        profile.latency.on(rows, buckets.lengths),
        "profile",
        profile_words(path, profile),
        (*notes, *told),
        range_of(order.target.chip, "profile"),
        drafts,
    )


def measured_drafts(drafter: Drafter, latency: LatencyModel) -> tuple[Drafts, tuple[str, ...]]:
    """Returns the requested drafts that were measured; if none were, also sentences to print."""
    drafts = drafter.drafts
    come_from = drafter.come_from
    if not drafts.num_draft_tokens:
        return NO_DRAFTS, ()
    if latency.num_draft_tokens and latency.drafts_from != come_from:
        told = f"The profile's drafts are from {latency.drafts_from}, not from {come_from}: none are made."
        return NO_DRAFTS, (told,)
    numbers = tuple(n for n in drafts.num_draft_tokens if n in latency.num_draft_tokens)
    if not numbers:
        return NO_DRAFTS, ("The profile has no steps that verify drafts: none are made.",)
    return replace(drafts, num_draft_tokens=numbers), ()


# Fields of a model that do not change the time of a step.
_UNTIMED = {*PADDING, "max_position", "rope_theta", "rope_scaling", "norm_eps"}


def _check(path: Path, subject: Subject, order: Order) -> None:
    target = order.target
    run = order.run
    model = json.loads(json.dumps(asdict(order.model)))  # a profile's has lists, no tuples
    model = {name: value for name, value in model.items() if name not in _UNTIMED}
    expected = model | {
        "devices": target.num_devices,
        "backend": "gpu" if target.chip.platform == "cuda" else target.chip.platform,
        "dtype": run.dtype,
        "weights": run.rollout.weights,
    }
    found = {**subject.model, "devices": subject.num_devices}
    found |= {name: getattr(subject, name) for name in ("backend", "dtype", "weights")}
    wrong = [
        f"{name} {found.get(name)}, not {n}" for name, n in expected.items() if found.get(name) != n
    ]
    if wrong:
        raise UserError(
            f"option --profile is {str(path)!r}: of something else ({'; '.join(wrong)}); measure one "
            "with python -m pat_jax.profile, or leave it out."
        )
