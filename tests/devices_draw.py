"""What devices draw from the reserve during a burst, in plain Python."""

import numpy as np

from pat_jax.engine.cache_manager import CacheManager
from pat_jax.engine.sequences.page_allocator import NULL_PAGE
from pat_jax.engine.sequences.state import ReservedPages


def drawn_in_a_burst(
    held: np.ndarray,
    tokens: np.ndarray,
    end: np.ndarray,
    generated: np.ndarray,
    reserved: ReservedPages,
    drawn: list[int],
    *,
    steps: int,
    check_every: int,
    page_size: int,
) -> tuple[list[list[int]], int]:
    """New pages of each row, and the steps run.

    Args:
      held: pages of each row; 0 in empty ones.
      tokens: in the cache of each.
      end: tokens that each may have, with the one that is not in the cache.
      generated: tokens that each would say, 0 in empty rows.
      drawn: of each group, before.
    """
    groups, size = reserved.pages.shape
    new, drawn, done = [[] for _ in held], list(drawn), 0
    while done < steps and generated.max(initial=0) > done:
        wishes = [[] for _ in range(groups)]
        for row in range(len(held)):
            if generated[row] > done:
                filled = min(tokens[row] + done + check_every, end[row] - 1)
                lacking = -(-filled // page_size) - held[row] - len(new[row])
                wishes[row * groups // len(held)] += [row] * max(lacking, 0)
        if any(drawn[g] + len(wishes[g]) > reserved.filled[g] for g in range(groups)):
            break
        for g, rows in enumerate(wishes):
            for row in rows:
                new[row].append(int(reserved.pages[g, drawn[g] % size]))
                drawn[g] += 1
        done += check_every
    return new, done


def draw_in_a_burst(
    cache_manager: CacheManager,
    reserved: ReservedPages,
    generated: np.ndarray,
    *,
    steps: int,
    check_every: int,
) -> tuple[np.ndarray, int]:
    """Pages that the rows of a scheduler's running sequences draw, int32[rows, most], and the steps
    run.

    Args:
      generated: int[running], tokens that each sequence would say.
    """
    table, tables = cache_manager.table, cache_manager.tables
    running, rows = table.running, table.num_replicas * table.rows_per_replica
    held, tokens, end, says = (np.zeros(rows, int) for _ in range(4))
    at = table.row[running]
    held[at], tokens[at] = tables.count[running], table.length[running] - 1
    end[at], says[at] = table.end[running], generated
    size = tables.page_size
    new, done = drawn_in_a_burst(
        held,
        tokens,
        end,
        says,
        reserved,
        [0] * len(reserved.filled),
        steps=steps,
        check_every=check_every,
        page_size=size,
    )
    pages = np.full((rows, -(-steps // size)), NULL_PAGE, np.int32)
    for row, mine in enumerate(new):
        pages[row, : len(mine)] = mine
    return pages, done
