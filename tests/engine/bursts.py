"""A burst and a switch without devices: what they would have said is given."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from pat_jax.engine.cache_manager import CacheManager
from pat_jax.engine.relocation import order
from pat_jax.engine.relocation.order import Placed, Pools, placed
from pat_jax.engine.relocation.rounds import Shipment
from pat_jax.engine.sequences.contents import Contents
from pat_jax.engine.sequences.prefill_calls import PageMoves, PrefillWork
from pat_jax.engine.sequences.responses import Responses
from pat_jax.engine.sequences.state import BurstOutput, Runs
from pat_jax.planning.draft_counts import NONE_DRAFTED


def burst_output(
    tokens: np.ndarray, logprobs: np.ndarray, emitted: np.ndarray, running: np.ndarray
) -> BurstOutput:
    """The likeliest tokens are made up from those sampled, three of each."""
    top = tokens[:, :, None] + np.arange(3)[None, None, :]
    steps = np.int32(tokens.shape[1])
    none_drawn = np.zeros((len(tokens), 1), np.int32)
    return BurstOutput(
        tokens,
        logprobs,
        2 * logprobs,
        emitted,
        running,
        steps,
        top,
        -top.astype(np.float32),
        none_drawn,
        emitted,
        NONE_DRAFTED,
        Runs.none(len(tokens)),
        np.zeros((*tokens.shape, 0, 0), np.int16),
    )


def retire(responses: Responses, output: BurstOutput) -> None:
    """What the scheduler does with a burst's results; pages are told apart."""
    table = responses.table
    rows = table.row[table.running]
    emitted, goes_on = np.asarray(output.emitted)[rows], np.asarray(output.running)[rows]
    responses.take(output)
    table.advance(emitted, goes_on, int(output.steps))


def burst(
    responses: Contents,
    emitted: np.ndarray,
    goes_on: np.ndarray,
    tokens: np.ndarray | int = 1,
    steps: int = 4,
) -> None:
    """Each running sequence says one token `emitted` times; int[running], bool[running],
    int[running]."""
    assert isinstance(responses, Responses)
    table = responses.table
    rows, running = table.num_replicas * table.rows_per_replica, table.row[table.running]
    generated, is_running = np.zeros(rows, np.int32), np.zeros(rows, bool)
    all_tokens = np.zeros((rows, steps), np.int32)
    generated[running], is_running[running] = emitted, goes_on
    all_tokens[running] = np.broadcast_to(tokens, len(running))[:, None]
    retire(
        responses, burst_output(all_tokens, -all_tokens.astype(np.float32), generated, is_running)
    )


@contextmanager
def crowded(waits: list[int]) -> Iterator[None]:
    """As many times as there are numbers, `placed` finds that this one of the pages would have to wait
    and may not: as in large pools whose free memory lies scattered."""
    proposed, left = order._tried, list(waits)

    def once(moves: PageMoves, old: Pools, new: Pools) -> Placed | np.ndarray:
        if left and len(moves.old_page):
            return np.array([left.pop() % len(moves.old_page)])
        return proposed(moves, old, new)

    with patch.object(order, "_tried", once):
        yield


def carry(
    cache_manager: CacheManager,
    num_replicas: int,
    *,
    num_pages: int,
    is_recomputed: np.ndarray,
    steps: int,
) -> tuple[list[Shipment], PrefillWork]:
    """A switch, as the scheduler and the device executor make it.

    Returns:
      What is to be moved, in this order, then computed.
    """
    tables = cache_manager.tables
    replica = cache_manager.table.regroup(num_replicas, is_recomputed)
    old = Pools(len(tables.pools), tables.pools[0].num_pages)
    moves, is_left = cache_manager.leave(
        replica, num_replicas=num_replicas, num_pages=num_pages, is_recomputed=is_recomputed
    )
    arrivals = placed(moves, tables.holds(moves), old, Pools(num_replicas, num_pages))
    is_left |= cache_manager.settle(moves, arrivals.new_page)
    work, _ = cache_manager.arrive(replica, is_left, steps)
    return arrivals.shipments, work
