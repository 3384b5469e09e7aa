"""The drafter of n-gram drafts, which copies them from a row's own text and other responses."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.engine.device.decode.decode_step import Moving
from pat_jax.engine.device.draft.drafter import (
    Accepted,
    Asked,
    Drafter,
    DraftFeed,
    DraftShapes,
    Proposal,
    Rollout,
)
from pat_jax.engine.device.ngram import append, find
from pat_jax.engine.device.token_batch import Counts, left_by, lengths, met_by, source_of
from pat_jax.engine.sequences.sequence_table import NO_TOKEN
from pat_jax.engine.sequences.state import Drafting, Runs, abstract_index
from pat_jax.engine.sequences.texts import texts
from pat_jax.layout.buckets import Drafts, Shape
from pat_jax.layout.layout import Layout


@dataclass(frozen=True)
class TextDrafter(Drafter):
    """Proposes n-gram drafts: what followed the longest match of each row's newest tokens."""

    def propose(self, asked: Asked, moving: Moving) -> tuple[Proposal, Moving]:
        rows = moving.rows
        drafting = moving.drafting
        newest = self._own(asked, drafting) + rows.position
        draft, branch = find(drafting.text, newest, most=self.drafts.longest)
        runs = met_by(draft, drafting.runs)
        room = len(rows.running) * (1 + asked.num_draft_tokens)
        accept_prob = jnp.asarray(asked.accept_prob)
        length, of_branch = lengths(draft, branch, runs, rows.running, accept_prob, room=room)
        return Proposal(draft, runs, length, (branch, of_branch)), moving

    def catch_up(
        self, asked: Asked, moving: Moving, proposal: Proposal, accepted: Accepted
    ) -> tuple[Drafting, Counts]:
        rows = moving.rows
        drafting = moving.drafting
        own = self._own(asked, moving.drafting)
        draft, runs, length, _ = proposal
        tokens, count, on_draft, on_branch, taken = accepted
        assert proposal.branch is not None, "texts have branches"
        branch, of_branch = proposal.branch
        counts = moving.counts.with_step(drafting.runs, draft, length, on_draft, rows.running)
        counts = counts.with_branches(
            runs.kind, draft, branch, of_branch, on_branch, tokens[:, 0], rows.running
        )
        num_accepted = jnp.maximum(count - 1, 0)
        both = (draft, length, ~taken), (branch, of_branch, taken)
        for place, (one, verified, is_accepted) in enumerate(both):
            accepted_of_one = jnp.where(is_accepted, num_accepted, 0)
            source = source_of(one, drafting.borders, own)
            counts = counts.with_sources(source, verified, accepted_of_one, is_branch=place > 0)
        text = append(drafting.text, tokens, count, own + rows.position + 1)
        return Drafting(text, left_by(runs, length, on_draft, taken), drafting.borders), counts

    def _own(self, asked: Asked, drafting: Drafting) -> int:
        """The column where a row's own text begins."""
        return drafting.text.shape[1] - own_columns(asked.length, self.drafts)

    def state(self, layout: Layout, rows: int, length: int, shapes: DraftShapes) -> Drafting:
        columns = text_room(self.drafts, length, shapes)
        columns += own_columns(shapes.tokens(length), self.drafts)
        runs = Runs(*[abstract_index(layout, rows)] * len(Runs._fields))
        return Drafting(
            abstract_index(layout, rows, columns), runs, abstract_index(layout, rows, 2)
        )

    def blank(self, zeros: Drafting, num_replicas: int) -> Drafting:
        """Returns texts without tokens: a step takes as long with matches as without."""
        del num_replicas
        return zeros._replace(text=zeros.text + NO_TOKEN)

    def feed(self, rollout: Rollout) -> DraftFeed:
        return TextFeed(self.drafts, rollout)


class TextFeed(DraftFeed):
    """Lays out the texts that rows draft from, anew for each burst not launched behind another."""

    def __init__(self, drafts: Drafts, rollout: Rollout):
        self.drafts = drafts
        self.rollout = rollout
        self._laid_out: Any = None  # the fields of a `Drafting` on the host

    @property
    def told(self) -> tuple[np.ndarray, ...]:
        return tuple(jax.tree.leaves(self._laid_out))

    def prepare(self, shape: Shape) -> None:
        self._laid_out = None
        if shape.num_draft_tokens:
            shapes = self.rollout.shapes
            responses = self.rollout.responses
            own = own_columns(shapes.tokens(shape.length), self.drafts)
            room = text_room(self.drafts, shape.length, shapes)
            text, borders = texts(responses, room, own, self.rollout.earlier)
            self._laid_out = text, responses.runs_of_rows(), borders

    def state(self, layout: Layout, shape: Shape, before: Any) -> Any:
        del shape
        if before is not None or self._laid_out is None:
            return before
        text, runs, borders = layout.put(self._laid_out, "batch")
        return Drafting(text, runs, borders)


def own_columns(length: int, drafts: Drafts) -> int:
    """Returns the columns of a row's text for its own tokens and those of a last step."""
    return length + 1 + drafts.longest


def text_room(drafts: Drafts, length: int, shapes: DraftShapes) -> int:
    """Returns the columns of a row's text for other responses, if it has `length` own tokens."""
    return drafts.text_room(shapes.tokens(length), shapes.tokens(shapes.buckets.lengths[-1]))
