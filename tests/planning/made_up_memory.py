"""A made-up account of what lies on a device."""

from dataclasses import replace

from fakes import SPLITS

from pat_jax.config.rollout import RolloutConfig
from pat_jax.planning.memory import USABLE, MemoryModel

PAGE = 16  # tokens


def make_memory(
    limit: float, *, weights: int = 800, page: int = 64, pages: int = 264, **changes
) -> MemoryModel:
    """Every TP degree halves the weights and a page, and doubles the pages; KV heads are replicated
    beyond TP4. 33 pages hold a row of 512 tokens.
    """
    memory = MemoryModel(
        limit=limit / USABLE,
        resident=0,
        weights={split: weights // split.tp for split in SPLITS},
        page={split: page // min(split.tp, 4) for split in SPLITS},
        pages={split: pages * min(split.tp, 4) for split in SPLITS},
        page_size=PAGE,
        chunk=40,
        staging=7,
        ahead=RolloutConfig().check_every,
    )
    return replace(memory, **changes)
