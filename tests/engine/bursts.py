"""A burst and a switch without devices: what they would have said is given."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from pat_jax.engine.relocation import order
from pat_jax.engine.relocation.order import Placed, Pools, placed
from pat_jax.engine.relocation.rounds import Shipment
from pat_jax.engine.scheduler import Scheduler
from pat_jax.engine.sequences.contents import Contents
from pat_jax.engine.sequences.prefill_calls import PageMoves, PrefillWork
from pat_jax.engine.sequences.responses import Responses
from pat_jax.engine.sequences.state import BurstOutput, Runs
from pat_jax.planning.draft_counts import NONE_DRAFTED


def burst_output(
    tokens: np.ndarray, logprobs: np.ndarray, emitted: np.ndarray, live: np.ndarray
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
        live,
        steps,
        top,
        -top.astype(np.float32),
        none_drawn,
        emitted,
        NONE_DRAFTED,
        Runs.none(len(tokens)),
    )


def retire(responses: Responses, output: BurstOutput) -> None:
    """What the controller does with a burst's results; pages are told apart."""
    table = responses.table
    rows = table.row[table.live]
    emitted, goes_on = np.asarray(output.emitted)[rows], np.asarray(output.live)[rows]
    responses.take(output)
    table.advance(emitted, goes_on, int(output.steps))


def burst(
    responses: Contents,
    emitted: np.ndarray,
    goes_on: np.ndarray,
    tokens: np.ndarray | int = 1,
    steps: int = 4,
) -> None:
    """Each live sequence says one token `emitted` times; int[live], bool[live], int[live]."""
    assert isinstance(responses, Responses)
    table = responses.table
    rows, live = table.num_groups * table.rows_per_group, table.row[table.live]
    said, is_live = np.zeros(rows, np.int32), np.zeros(rows, bool)
    all_tokens = np.zeros((rows, steps), np.int32)
    said[live], is_live[live] = emitted, goes_on
    all_tokens[live] = np.broadcast_to(tokens, len(live))[:, None]
    retire(responses, burst_output(all_tokens, -all_tokens.astype(np.float32), said, is_live))


@contextmanager
def crowded(waits: list[int]) -> Iterator[None]:
    """As many times as there are numbers, `placed` finds that this one of the pages would have to wait
    and may not: as in large pools whose free memory lies scattered."""
    tried, left = order._tried, list(waits)

    def once(moves: PageMoves, old: Pools, new: Pools) -> Placed | np.ndarray:
        if left and len(moves.old_page):
            return np.array([left.pop() % len(moves.old_page)])
        return tried(moves, old, new)

    with patch.object(order, "_tried", once):
        yield


def carry(
    scheduler: Scheduler, num_groups: int, *, num_pages: int, is_recomputed: np.ndarray, steps: int
) -> tuple[list[Shipment], PrefillWork]:
    """A switch, as the controller and the device executor make it.

    Returns:
      What is to be moved, in this order, then computed.
    """
    tables = scheduler.tables
    group = scheduler.table.regroup(num_groups, is_recomputed)
    old = Pools(len(tables.pools), tables.pools[0].num_pages)
    moves, is_left = scheduler.leave(
        group, num_groups=num_groups, num_pages=num_pages, is_recomputed=is_recomputed
    )
    arrivals = placed(moves, tables.holds(moves), old, Pools(num_groups, num_pages))
    is_left |= scheduler.settle(moves, arrivals.new_page)
    work, _ = scheduler.arrive(group, is_left, steps)
    return arrivals.shipments, work
