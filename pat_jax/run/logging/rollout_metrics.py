"""The metrics of a rollout (docs/metrics.md)."""

from collections.abc import Sequence

import numpy as np

from pat_jax.engine.record.report import RolloutReport
from pat_jax.rl.batches.types import FinishReason, RolloutGroup


def describe_rollouts(
    groups: Sequence[RolloutGroup], report: RolloutReport
) -> dict[str, float | str]:
    """Returns the metrics of a rollout, by their names in the logs."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = np.array([len(rollout.tokens) for rollout in rollouts])
    is_cut = np.array([rollout.finish is FinishReason.LENGTH for rollout in rollouts])
    return {
        **_describe_lengths("rollout/length_", lengths),
        **_describe_lengths("rollout/ended_length_", lengths[~is_cut]),
        "rollout/truncated": float(is_cut.mean()),
        "rollout/tokens": report.tokens,
        "rollout/tokens_per_s": report.tokens_per_s,
        "rollout/decode_steps": report.decode_steps,
        "rollout/tokens_per_row_step": report.tokens_per_row_step,
        "rollout/drafted": report.drafted,
        "rollout/accepted": report.accepted,
        "rollout/accepted_branches": sum(numbers[2] for numbers in report.by_source),
        **_describe_sources(report.by_source),
        "rollout/draft_saved_seconds": report.drafts.saving_s,
        "rollout/predicted_draft_saving_s": report.drafts.predicted_saving_s,
        "rollout/row_occupancy": report.row_occupancy,
        "rollout/prefill_padding": report.prefill_padding,
        "rollout/kv_waste": report.kv_waste,
        "rollout/layouts": " -> ".join(report.trace.path),
        "rollout/switches": len(report.switches),
        "rollout/switch_seconds": sum(switch.seconds for switch in report.switches),
        "rollout/balanced": sum(balance.sequences for balance in report.balanced),
        "rollout/balance_share": report.balance_share,
        "rollout/predicted_saving_s": sum(switch.predicted_saving_s for switch in report.switches),
        "rollout/predicted_switch_seconds": sum(s.predicted_cost_s for s in report.switches),
        **{f"timing/rollout/{stage}": seconds for stage, seconds in report.seconds.items()},
        "timing/rollout/compile": report.compile_s,
    }


def _describe_sources(by_source: Sequence[Sequence[int]]) -> dict[str, int]:
    """Returns the verified and the accepted draft tokens of each source."""
    names = "own", "siblings", "earlier"
    found = zip(names, by_source, strict=True)
    return {
        f"{what}{name}": number
        for name, numbers in found
        for what, number in zip(("rollout/drafted_", "rollout/accepted_"), numbers[:2], strict=True)
    }


def _describe_lengths(prefix: str, lengths: np.ndarray) -> dict[str, float]:
    """Returns statistics of the lengths, or nothing if there are no responses."""
    if not lengths.size:
        return {}
    percents = {"p50": 50, "p90": 90, "p99": 99}
    shares = {key: np.percentile(lengths, percent) for key, percent in percents.items()}
    whole = {"min": lengths.min(), "mean": lengths.mean(), "max": lengths.max()}
    return {f"{prefix}{key}": float(value) for key, value in (whole | shares).items()}
