"""Checks a run's options and chooses the layouts that it may use.

Knows options and layouts. Does not know when a layout is used: the planner decides that.
"""

from collections.abc import Mapping

import jax

from pat_jax.common.errors import UserError
from pat_jax.common.rules import check, check_context
from pat_jax.config.run import RunConfig
from pat_jax.engine.sizing.memory import layouts_without_memory
from pat_jax.layout.layout import Layout, find_layout
from pat_jax.models.config import ModelConfig
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.planner.scripts import ScriptedPath, Step
from pat_jax.planning.types import Split, recompute_below


def check_lengths(config: RunConfig, model: ModelConfig) -> None:
    """Raises UserError if the longest prompt and response do not fit the model's context."""
    names = ("max_prompt_length", "max_completion_length")
    lengths = {f"rollout.{name}": getattr(config.rollout, name) for name in names}
    check_context(lengths, model.max_position, config.model)


def check_vocabulary_options(config: RunConfig, model: ModelConfig) -> None:
    """Raises OptionError if top_k or max_logprobs is larger than the model's vocabulary."""
    at_most = (
        lambda x: x <= model.vocab_size,
        f"at most the {model.vocab_size:,} tokens of the model",
    )
    check(config.rollout, "top_k max_logprobs", at_most, "rollout.")


def check_batch(config: RunConfig, layouts: dict[Split, Layout]) -> None:
    sequences = config.rollout.prompts_per_step * config.rollout.num_generations
    widest = max(layouts, key=lambda split: split.dp)
    if sequences % widest.dp:
        raise UserError(
            f"option --rollout.prompts_per_step x --rollout.num_generations is {sequences}: expected "
            f"a multiple of {widest.dp}, so that the data parallelism of {widest} can divide it; "
            "change one of them."
        )


def wanted_layouts(
    config: RunConfig, chain: dict[Split, Layout], mesh: jax.sharding.Mesh, model: ModelConfig
) -> dict[Split, Layout]:
    """Returns the layouts that the options can lead to; only these are compiled."""
    if config.switch_to:
        option, names = "switch_to", [str(next(iter(chain))), *config.switch_to.split(",")]
    elif config.layout != "auto":
        option, names = "layout", [config.layout]
    else:
        return chain
    found = [find_layout(chain, name, mesh, model, option=option) for name in dict.fromkeys(names)]
    return {layout.split: layout for layout in found}


def worth_planning(
    config: RunConfig,
    layouts: Mapping[Split, Layout],
    memory: MemoryModel,
    latency: LatencyModel | None,
) -> tuple[dict[Split, Layout], list[str]]:
    """Returns the layouts that the planner may use, and sentences on why the other layouts are left
    out.

    They have enough memory, and their TP stays inside hosts unless crossing them pays.

    Args:
      memory: the memory that each layout takes alone.
    """
    without_memory = layouts_without_memory(memory, config.rollout)
    dropped = [f"layout {split}: {reason}" for split, reason in without_memory.items()]
    fitting = {split: layout for split, layout in layouts.items() if split not in without_memory}
    if all(layout.crosses_hosts for layout in fitting.values()):
        return fitting, dropped  # only layouts across hosts have enough memory
    kept, more = within_hosts(fitting, latency)
    return kept, dropped + more


def within_hosts(
    layouts: Mapping[Split, Layout], latency: LatencyModel | None
) -> tuple[dict[Split, Layout], list[str]]:
    """Returns layouts whose TP stays inside a host, those across hosts that were measured to pay,
    and why the others are left out."""
    inside = {s: layout for s, layout in layouts.items() if not layout.crosses_hosts}
    kept, dropped = dict(inside), []
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

    Links between hosts are slower than those inside one by an order of magnitude, and a layout
    costs its compilation and warm-up before it proves slow. So only measurements count. Steps are
    compared at equal rows per replica and equal cache lengths. A wider layout has at least as many
    rows in its fullest replica, so if it is slower at equal rows, it never pays.
    """
    table = latency.decode_table
    both = [key[1:] for key in table if key[0] == crossing and (inside, *key[1:]) in table]
    return any(table[(crossing, *at)] < table[(inside, *at)] for at in both)


def scripted_planner(config: RunConfig, layouts: dict[Split, Layout]) -> Planner | None:
    """Returns a planner that follows the path of layouts in the options; None if they have none."""
    if not config.switch_to:
        return None
    by_name = {str(split): split for split in layouts}
    below = recompute_below("recompute" if config.rollout.kv_carry == "recompute" else "migrate")
    path = zip(config.switch_to.split(","), map(int, config.switch_at.split(",")), strict=True)
    first = next(iter(layouts))
    return ScriptedPath(first, tuple(Step(by_name[name], at, below) for name, at in path))
