"""Decides whether to compile another layout.

The seconds that rollouts are predicted to save with it, over the remaining iterations, must
outweigh the seconds of its compilation. Until then no plan uses the layout.
"""

from collections.abc import Mapping
from dataclasses import replace

from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.types import Load, Split

HOPED_SAVING = 0.05  # of a rollout, by a layout without measured times


def worth_compiling(
    planner: CostModelPlanner, load: Load, compile_s: Mapping[Split, float], iterations_left: int
) -> list[Split]:
    """Returns the layouts to compile, largest gain first. A layout's gain assumes that the layouts
    before it are compiled too.

    Args:
      planner: its `splits` are the layouts that are compiled.
      load: a rollout that has not begun.
      compile_s: predicted seconds to compile each layout that is not compiled.
    """
    known = {key[0] for key in planner.latency.decode_table}
    missing = {split: s for split, s in compile_s.items() if _has_room(planner, split)}
    wanted: list[Split] = []
    while missing:
        ready = (*planner.splits, *known.intersection(wanted))
        now_s = replace(planner, splits=ready).rollout_s(load)
        gain = {split: -seconds for split, seconds in missing.items()}
        for split in missing:
            saving_s = HOPED_SAVING * now_s
            if split in known:
                saving_s = now_s - replace(planner, splits=(*ready, split)).rollout_s(load)
            gain[split] += iterations_left * saving_s
        best = max(missing, key=gain.__getitem__)
        if gain[best] <= 0:
            break
        wanted.append(best)
        del missing[best]
    return wanted


def _has_room(planner: CostModelPlanner, split: Split) -> bool:
    return planner.memory is None or bool(planner.memory.has_room([*planner.splits, split])[-1])
