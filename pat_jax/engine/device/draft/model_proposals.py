"""Drafts by a model: the policy's own first layers, or a draft model with a cache of its own."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pat_jax.engine.device.decode.decode_step import DecodeStep, Moving, kept, views
from pat_jax.engine.device.decode.sampling import NEVER, Ahead
from pat_jax.engine.device.draft.propose import Guess, one_each, said, two_each
from pat_jax.layout.layout import Layout, ManualPartition
from pat_jax.models.exit_head import ExitHead, exit_hidden
from pat_jax.models.policy import Params, Policy


class Asked(NamedTuple):
    """A draft model inside a program."""

    policy: Policy
    params: Params
    layout: Layout


def exiting(
    step: DecodeStep,
    params: Params,
    head: ExitHead,
    keys: UInt32[Array, "tokens rows 2"],
    tables: Int[Array, "rows width"],
    moving: Moving,
    *,
    depth: int,
    count: int,
) -> tuple[Guess, Moving]:
    """What the policy would say if it ended behind layer `depth`, `count` tokens of each row.

    What they write to the cache is what the verification of the same tokens writes there.
    """
    rows = moving.rows

    def say(
        recent: tuple, position: Array, turn: Array, guesses: Array, caches: tuple
    ) -> tuple[Array, tuple]:
        newest = recent[1]
        model, partition = step.policy.bind(params), ManualPartition(step.layout)
        hidden, written = model(
            newest[None],
            position[None],
            views(caches, tables, rows, one_each(rows.live, position), 1 + count),
            partition=partition,
            dtype=step.dtype,
            depth=depth,
        )
        assert written is not None  # caches went in
        logits = model.logits(exit_hidden(hidden[0], head), partition)
        token = _drawn(step, moving, keys, logits, position, turn, guesses)
        return token, tuple(map(kept, written))

    no_matter = rows.last_token
    guess, written = said(rows, no_matter, say, moving.caches[:depth], count=count)
    return guess, moving._replace(caches=(*written, *moving.caches[depth:]))


def asking(
    step: DecodeStep,
    draft: Asked,
    keys: UInt32[Array, "tokens rows 2"],
    moving: Moving,
    *,
    count: int,
) -> tuple[Guess, Moving]:
    """Drafts by a draft model, `count` tokens of each row.

    Each pass takes a row's newest token and the one before it: after a fully accepted draft its last
    token has not been in a pass. Where one of them is beyond the model's vocabulary its
    embedding is zeros (`Transformer._embed`).
    """
    rows, asked, row = moving.rows, moving.asking, jnp.arange(len(moving.rows.live))
    assert asked is not None
    padded = step.policy.config.padded_vocab_size

    def say(
        recent: tuple, position: Array, turn: Array, guesses: Array, caches: tuple
    ) -> tuple[Array, tuple]:
        line = two_each(rows.live, position)
        tokens = jnp.stack(recent, axis=1)
        tokens = jnp.where((position == 0)[:, None], tokens[:, 1:], tokens)
        model, partition = draft.policy.bind(draft.params), ManualPartition(draft.layout)
        hidden, written = model(
            jnp.reshape(tokens, (1, -1)),
            line.slots[None],
            views(caches, asked.tables, rows, line, 1 + count),
            partition=partition,
            dtype=step.dtype,
        )
        assert written is not None  # caches went in
        newest = jnp.reshape(hidden, (len(row), 2, -1))[row, position - line.start]
        known = draft.policy.config.vocab_size
        logits = _of_size(model.logits(newest, partition)[:, :known], padded)
        token = _drawn(step, moving, keys, logits, position, turn, guesses)
        return token, tuple(map(kept, written))

    guess, written = said(rows, asked.previous, say, asked.pool, count=count)
    return guess, moving._replace(asking=asked._replace(pool=written))


def _drawn(
    step: DecodeStep,
    moving: Moving,
    keys: UInt32[Array, "tokens rows 2"],
    logits: Float[Array, "rows vocab"],
    position: Int[Array, " rows"],
    turn: Int[Array, ""],
    guesses: Int[Array, "rows draft"],
) -> Int[Array, " rows"]:
    """The token of each row behind `position`, as the policy would draw it from these logits."""
    rows, row = moving.rows, jnp.arange(len(guesses))
    key, ahead = keys[moving.output.emitted + turn, row], Ahead(row, guesses)
    endings = step.endings(rows)
    return step.sample(logits, key, position, rows.sampling, moving.seen, endings, ahead)[0]


def _of_size(logits: Float[Array, "rows vocab"], size: int) -> Float[Array, "rows size"]:
    """Another model's logits, of more or fewer tokens: those that it does not know it never says."""
    more = max(0, size - logits.shape[1])
    return jnp.pad(logits[:, :size], ((0, 0), (0, more)), constant_values=NEVER)
