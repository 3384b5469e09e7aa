"""Predicts iterations with other placements, from the stages of one with `flatten`.

Passes on half of the devices are assumed to take twice as long. Here r is the seconds of a rollout,
h those of a rollout on half of the devices, t those of the transfer. A *read* is a pass without
gradients over all responses, an *update* all optimizer steps. Sums are over roles:

    flatten      r + t + sum(reads) + sum(updates)
    interleave   the same, but reads of reference, teacher and reward models count twice
    separate     max(h, 2 sum(reads)) + t + 2 sum(updates)
    split        r + t + 2 max(reads of either half) + 2 max(policy's update, critic's)

In `separate` models read responses as these end, assumed to be at an even pace; otherwise after the
rollout. Knows names of stages and seconds. Does not know which placements a run may have.
"""

from collections.abc import Collection, Mapping

from pat_jax.planning.placement import PlacementName
from pat_jax.planning.stage_names import ROLLOUT, TRANSFER

HALF = 2.0  # times as long on half of the devices
ON_HALVES = "reference", "teacher", "reward model"  # roles with half of the devices in `interleave`
SECOND = "critic", "reward model"  # roles of the second half in `split`


def placement_seconds(
    stages: Mapping[str, float],
    half_rollout_s: float,
    names: Collection[PlacementName],
    *,
    reads_as_they_end: bool = True,
) -> dict[PlacementName, float]:
    """Returns the predicted seconds of an iteration's stages, by the name of the placement.

    Args:
      stages: seconds of each stage with `flatten`.
      half_rollout_s: seconds of the same rollout on half of the devices.
      names: the placements to return in addition to `flatten`.
      reads_as_they_end: whether models on other devices read responses while the rollout runs.
    """
    transfer_s = stages.get(TRANSFER, 0.0)
    both_s = stages.get(ROLLOUT, 0.0) + transfer_s
    passes = {stage.rpartition(" of the "): s for stage, s in stages.items()}
    updates = [s for (what, _, _), s in passes.items() if what == "update"]
    reads = [(role, s) for (what, _, role), s in passes.items() if what not in ("", "update")]
    read_s = sum(s for _, s in reads)
    update_s = sum(updates)
    more_s = (HALF - 1) * sum(s for role, s in reads if role in ON_HALVES)
    together = max if reads_as_they_end else sum
    second_s = sum(s for role, s in reads if role in SECOND)
    most_s = max(second_s, read_s - second_s) + max(updates, default=0.0)
    flat_s = both_s + read_s + update_s
    found: dict[PlacementName, float] = {
        "flatten": flat_s,
        "interleave": flat_s + more_s,
        "separate": together([half_rollout_s, HALF * read_s]) + transfer_s + HALF * update_s,
        "split": both_s + HALF * most_s,
    }
    return {name: s for name, s in found.items() if name == "flatten" or name in names}


def described(seconds: Mapping[PlacementName, float]) -> str:
    """Returns a sentence with the seconds of `flatten` and of the other placements."""
    others = [f"{s:.3g} s with {name}" for name, s in seconds.items() if name != "flatten"]
    if not others:
        return "no other placement fits these models, devices and options"
    fastest = min(seconds, key=lambda name: seconds[name])
    advice = f"; --resume --placement {fastest} goes on with it" * (fastest != "flatten")
    return (
        f"the stages of this iteration took {seconds['flatten']:.3g} s with flatten, and would take "
        f"{', '.join(others)} (passes on half of the devices are assumed to take twice as long){advice}"
    )
