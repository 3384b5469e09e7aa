"""Early exit: the policy's first layers propose drafts, by an exit head that the run trains."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pat_jax.engine.device.decode.decode_step import Moving, kept, views
from pat_jax.engine.device.draft.drafter import Accepted, Asked, Drafter, DraftShapes, Proposal
from pat_jax.engine.device.draft.generated import counted, generated
from pat_jax.engine.device.token_batch import Counts
from pat_jax.layout.layout import Layout
from pat_jax.layout.partitions import ManualPartition
from pat_jax.models.cache.draft_layer import Line
from pat_jax.models.layers import exit_hidden


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
            partition = ManualPartition(step.layout)
            row = jnp.arange(len(rows.running))
            line = Line(row, rows.running, jnp.zeros_like(row), row[:, None], position)
            hidden, written, _ = model(
                recent[1][None],
                position[None],
                views(caches, asked.tables, rows, line, 1 + asked.num_draft_tokens),
                partition=partition,
                dtype=step.dtype,
                depth=depth,
            )
            assert written is not None  # caches went in
            logits = model.logits(exit_hidden(hidden[0], asked.own_params), partition)
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
