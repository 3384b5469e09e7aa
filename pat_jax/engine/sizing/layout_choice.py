"""Checks a run's options and chooses the layouts that it may use.

Knows options and layouts. Does not know when a layout is used: the planner decides that.
"""

from collections.abc import Mapping

import jax

from pat_jax.common.errors import UserError
from pat_jax.common.rules import check_context
from pat_jax.config.rollout import RolloutConfig
from pat_jax.config.shared import LayoutChoice
from pat_jax.engine.sizing.memory_checks import layouts_without_memory
from pat_jax.layout.chain import find_layout
from pat_jax.layout.layout import Layout
from pat_jax.models.config import ModelConfig
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.planner.scripts import ScriptedPath, Step
from pat_jax.planning.types import Split


def check_lengths(rollout: RolloutConfig, model: ModelConfig, name: str) -> None:
    """Raises UserError if the longest prompt and response do not fit the model's context.

    Args:
      name: the name of the model in the message.
    """
    options = ("max_prompt_length", "max_completion_length")
    lengths = {f"rollout.{option}": getattr(rollout, option) for option in options}
    check_context(lengths, model.max_position, name)


def check_vocabulary_options(rollout: RolloutConfig, model: ModelConfig) -> None:
    """Raises OptionError if top_k is larger than the model's vocabulary."""
    expected = f"at most the {model.vocab_size:,} tokens of the model"
    rollout.need("top_k", rollout.top_k <= model.vocab_size, expected)


def check_batch(rollout: RolloutConfig, layouts: dict[Split, Layout]) -> None:
    """Raises UserError if the replicas of a layout cannot divide the responses of an iteration."""
    sequences = rollout.num_responses
    widest = max(layouts, key=lambda split: split.dp)
    if sequences % widest.dp:
        raise UserError(
            f"option --rollout.prompts_per_step x --rollout.num_generations is {sequences}: expected "
            f"a multiple of {widest.dp}, so that the data parallelism of {widest} can divide it; "
            "change one of them."
        )


def wanted_layouts(
    choice: LayoutChoice, chain: dict[Split, Layout], mesh: jax.sharding.Mesh, model: ModelConfig
) -> dict[Split, Layout]:
    """Returns the layouts that a rollout with these options may use; only these are compiled."""
    if choice.is_planned:
        return chain
    names = [choice.layout]
    if choice.path:
        names = [str(next(iter(chain))), *(name for name, _ in choice.path)]
    found = [find_layout(chain, name, mesh, model) for name in dict.fromkeys(names)]
    return {layout.split: layout for layout in found}


def worth_planning(
    rollout: RolloutConfig,
    layouts: Mapping[Split, Layout],
    memory: MemoryModel,
    latency: LatencyModel | None,
) -> tuple[dict[Split, Layout], list[str]]:
    """Returns the layouts that the planner may use, and sentences on why the other layouts are left
    out.

    The kept layouts fit in memory, and their TP stays inside a host unless crossing hosts pays.

    Args:
      memory: the memory that each layout takes if it is the only one, see `memory_alone`.
    """
    without_memory = layouts_without_memory(memory, rollout)
    dropped = [f"layout {split}: {reason}" for split, reason in without_memory.items()]
    fitting = {split: layout for split, layout in layouts.items() if split not in without_memory}
    if all(layout.crosses_hosts for layout in fitting.values()):
        return fitting, dropped  # only layouts across hosts have enough memory
    kept, more = within_hosts(fitting, latency)
    return kept, dropped + more


def within_hosts(
    layouts: Mapping[Split, Layout], latency: LatencyModel | None
) -> tuple[dict[Split, Layout], list[str]]:
    """Returns the layouts whose TP stays inside a host or was measured to be faster across hosts,
    and sentences on why the others are left out."""
    inside = {s: layout for s, layout in layouts.items() if not layout.crosses_hosts}
    kept = dict(inside)
    dropped = []
    widest = max(inside, key=lambda split: split.tp)
    for split in layouts.keys() - inside.keys():
        if latency is None or not is_measured(latency, split):
            dropped.append(
                f"layout {split}: its TP crosses hosts, and no profile has times of it "
                f"(python -m pat_jax.profile measures it; --layout {split} pins it)"
            )
        elif not pays_across_hosts(latency, split, widest):
            dropped.append(
                f"layout {split}: its TP crosses hosts, and by the profile no decode step of it is "
                f"faster than one of {widest}"
            )
        else:
            kept[split] = layouts[split]
    return {split: layouts[split] for split in layouts if split in kept}, dropped


def is_measured(latency: LatencyModel, split: Split) -> bool:
    return any(key[0] == split for key in latency.decode_table)


def pays_across_hosts(latency: LatencyModel, crossing: Split, inside: Split) -> bool:
    """Returns whether `crossing` has a faster decode step than `inside` in any measured bucket.

    Links between hosts are ten times slower than those inside one. A layout has to be compiled and
    warmed up before it proves slow, so only measurements count. Steps are compared at equal rows
    per replica and equal cache lengths. A layout with more TP has at least as many rows in its
    fullest replica. If it is slower at equal rows, it never pays.
    """
    table = latency.decode_table
    both = [key[1:] for key in table if key[0] == crossing and (inside, *key[1:]) in table]
    return any(table[(crossing, *at)] < table[(inside, *at)] for at in both)


def scripted_planner(choice: LayoutChoice, layouts: dict[Split, Layout]) -> Planner | None:
    """Returns a planner that follows the path of layouts in the options; None if they have none."""
    if not choice.path:
        return None
    by_name = {str(split): split for split in layouts}
    steps = tuple(Step(by_name[name], running) for name, running in choice.path)
    return ScriptedPath(next(iter(layouts)), steps)
