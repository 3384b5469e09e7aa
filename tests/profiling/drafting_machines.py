"""Machines whose steps may verify drafts, and what drafts are worth there."""

from dataclasses import replace

import numpy as np
from replays import MACHINE

from pat_jax.layout.buckets import Drafts
from pat_jax.planning.draft_counts import KINDS, MAX_RUN
from pat_jax.planning.drafts import Acceptance
from pat_jax.profiling.simulate.machine import Machine

DRAFTS = Drafts(num_draft_tokens=(1, 3), longest=3, most_tokens=64, texts=4)


def acceptance_of(accepted: float, matched: float = 1.0) -> Acceptance:
    """Every token of a run is as likely `accepted`; runs begin with a match, of one kind, as often
    as that."""
    proposed = np.full((2, KINDS, MAX_RUN), 1e15)  # beside which nothing else counts
    rates = np.full_like(proposed, accepted)
    rates[:, 0] = 0.0
    begun, branch_counts = np.zeros(KINDS), np.zeros((KINDS, KINDS))
    begun[[0, 3]], branch_counts[:, 0] = (1 - matched, matched), 1  # no branches
    return Acceptance(1e15 * begun, proposed, proposed * rates, 1e15 * branch_counts)


ALL, HALF, NOTHING = acceptance_of(1.0), acceptance_of(0.5), acceptance_of(0.0)


def drafting(
    acceptance: Acceptance | None,
    dearer: float = 1.1,
    machine: Machine = MACHINE,
    drafts: Drafts = DRAFTS,
) -> Machine:
    """A step takes `dearer` times as long for each token of the budget of any drafter."""
    truth = machine.truth
    verify = {
        (split, rows, length, num_draft_tokens): seconds * dearer**num_draft_tokens
        for (split, rows, length), seconds in truth.decode_table.items()
        for num_draft_tokens in drafts.of(rows)
    }
    truth = replace(truth, verify_table=verify)
    is_generated = acceptance is not None and acceptance.is_generated
    drafts = replace(drafts, exit_layer=1, texts=0) if is_generated else drafts
    return replace(machine, truth=truth, drafts=drafts, acceptance=acceptance)
