"""Drafts that a model generates: early exit, and what it has in common with a draft model.

In early exit, the policy's first layers propose drafts, by an exit head that the run trains.

A generated draft costs one forward pass of the model per token. Model and policy sample a token
with the same noise, that of its position. The closer their distributions are, the more often both
sample the same token. So at temperature 1 such drafts are accepted more often than greedy ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pat_jax.engine.device.decode.decode_step import Moving, kept, views
from pat_jax.engine.device.decode.sampling import Ahead
from pat_jax.engine.device.draft.drafter import Accepted, Asked, Drafter, DraftShapes, Proposal
from pat_jax.engine.device.ngram import Draft
from pat_jax.engine.device.token_batch import Counts, met_by
from pat_jax.engine.sequences.sequence_table import NO_TOKEN
from pat_jax.engine.sequences.state import Runs
from pat_jax.layout.layout import Layout
from pat_jax.models.cache.draft_layer import Line
from pat_jax.models.layers import exit_hidden
from pat_jax.models.partition import Partition

# (two newest tokens of each row, position of the newest, caches) -> (logits, caches)
Pass = Callable[[tuple[Array, Array], Array, tuple], tuple[Float[Array, "rows vocab"], tuple]]


def generated(
    asked: Asked,
    moving: Moving,
    previous: Int[Array, " rows"],
    pass_: Pass,
    caches: Sequence,
    partition: Partition | None = None,
) -> tuple[Proposal, tuple]:
    """Generates `num_draft_tokens` tokens for each row, one after the other.

    Every draft is a run of its own (`token_batch.py`): the model does not compute what would follow
    the draft's last token. Returns the drafts and the caches.

    Args:
      previous: the token before each row's newest one, if `pass_` uses it.
      pass_: one forward pass of the model.
      caches: the caches that `pass_` writes to.
      partition: how the vocabulary of `pass_` is split, by default as the policy's.
    """
    rows = moving.rows
    count = asked.num_draft_tokens
    num_rows = len(rows.running)

    def one_more(turn: Int[Array, ""], carry: tuple) -> tuple:
        previous, newest, proposed, caches = carry
        position = rows.position + turn
        logits, caches = pass_((previous, newest), position, caches)
        token = _drawn(asked, moving, logits, partition, position, turn, proposed)
        return newest, token, proposed.at[:, turn].set(token), caches

    nothing = jnp.full((num_rows, count), NO_TOKEN, jnp.int32)
    carry = previous, rows.last_token, nothing, tuple(caches)
    _, _, proposed, written = jax.lax.fori_loop(0, count, one_more, carry)
    matched, at = jnp.asarray([[1], [0]], jnp.int32).repeat(num_rows, axis=1)
    draft = Draft(proposed, matched, at)
    runs = met_by(draft, Runs(*jnp.zeros((3, num_rows), jnp.int32)))
    return Proposal(draft, runs, jnp.where(rows.running, count, 0)), written


def _drawn(
    asked: Asked,
    moving: Moving,
    logits: Float[Array, "rows vocab"],
    partition: Partition | None,
    position: Int[Array, " rows"],
    turn: Int[Array, ""],
    proposed: Int[Array, "rows draft"],
) -> Int[Array, " rows"]:
    """The token of each row after `position`, sampled from `logits` as the policy would."""
    step = asked.step
    rows = moving.rows
    row = jnp.arange(len(proposed))
    key = asked.keys[moving.output.emitted + turn, row]
    ahead = Ahead(row, proposed)
    endings = step.endings(rows)
    # The compiler drops the computation of the likeliest tokens, which are not used.
    drawn = step.draw(
        logits, None, key, position, rows.sampling, moving.seen, endings, ahead, partition
    )
    return drawn.tokens


def counted(moving: Moving, proposal: Proposal, accepted: Accepted) -> Counts:
    """Returns the counts with one step added. No run continues from one step to the next."""
    left = Runs(*jnp.zeros_like(jnp.stack(proposal.runs)))
    running = moving.rows.running
    return moving.counts.with_step(
        left, proposal.draft, proposal.length, accepted.on_draft, running
    )


@dataclass(frozen=True)
class EarlyExit(Drafter):
    """Proposes what the policy would generate if it ended after layer `drafts.exit_layer`.

    It shares the policy's KV cache: proposing a token writes the same keys and values as verifying
    it. So there is no second cache that has to catch up.
    """

    def propose(self, asked: Asked, moving: Moving) -> tuple[Proposal, Moving]:
        step = asked.step
        rows = moving.rows
        depth = self.drafts.exit_layer

        def pass_(recent: tuple[Array, Array], position: Array, caches: tuple) -> tuple:
            model = step.policy.bind(asked.params)
            row = jnp.arange(len(rows.running))
            line = Line(row, rows.running, jnp.zeros_like(row), row[:, None], position)
            hidden, written, _ = model(
                recent[1][None],
                position[None],
                views(caches, asked.tables, rows, line, 1 + asked.num_draft_tokens),
                partition=step.partition,
                dtype=step.dtype,
                depth=depth,
            )
            assert written is not None  # caches went in
            logits = model.logits(exit_hidden(hidden[0], asked.own_params))
            return logits, tuple(map(kept, written))

        no_matter = rows.last_token
        caches = moving.caches
        proposal, written = generated(asked, moving, no_matter, pass_, caches[:depth])
        return proposal, moving._replace(caches=(*written, *caches[depth:]))

    def catch_up(
        self, asked: Asked, moving: Moving, proposal: Proposal, accepted: Accepted
    ) -> tuple[None, Counts]:
        del asked
        return None, counted(moving, proposal, accepted)

    def params(self, layout: Layout, shapes: DraftShapes) -> jax.ShapeDtypeStruct:
        """Returns the shape of the exit head, whole on every device like the activations."""
        embed = shapes.model.embed_dim
        whole = layout.sharding()
        return jax.ShapeDtypeStruct((embed, embed), shapes.dtype, sharding=whole)

    def learned(
        self, layout: Layout, shapes: DraftShapes, head: np.ndarray | None
    ) -> jax.Array | None:
        like = self.params(layout, shapes)
        head = np.zeros(like.shape) if head is None else head
        return layout.put(head.astype(like.dtype))
