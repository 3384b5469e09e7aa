"""What drafts were worth in recorded responses, drawn for each sequence of a replay.

Counted token by token: drafts from a response's own text and its siblings, which a row sees as they were when
the burst was launched, in the engine's order and room (`draft_counting.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.speculation.draft_acceptance import BURST, ROOM, groups_of, recorded_responses
from benchmarks.speculation.draft_counting import Group, Record, Rules, verify
from benchmarks.speculation.draft_runs import acceptance_in
from pat_jax.engine.device.ngram import CONTEXT
from pat_jax.planning.drafts import Acceptance
from pat_jax.profiling.simulate.machine import Workload

# Whose responses, as `groups_of` names them.
SETS = {"policy in RL": "rl3b, Llama-3.2-3B-Instruct RL", "QwQ-32B": "misguided, QwQ-32B"}
# Of as many responses each, by their tokens a step: one response alone has too few runs to count.
CLASSES = 8
EVERY_SAMPLE = 10**9


@dataclass(frozen=True)
class RecordedDrafts:
    lengths: np.ndarray  # int[responses], tokens
    tokens: np.ndarray  # float[responses], in a step
    accepts: Sequence[Acceptance]  # of each response, that of its class
    pooled: Acceptance  # of all together

    @classmethod
    def counted(cls, groups: Sequence[Group], draft: int) -> "RecordedDrafts":
        """
        Args:
          draft: most tokens of a draft.
        """
        rules = Rules(True, False, draft, draft, burst=BURST, room=ROOM)
        steps = verify(Record(groups, CONTEXT), rules)
        lengths = np.array([len(text) for group in groups for text in group.responses])
        tokens = lengths / np.bincount(steps.row, minlength=len(lengths))
        rank = np.argsort(np.argsort(tokens, kind="stable"), kind="stable")
        of = rank * CLASSES // len(lengths)
        known = [acceptance_in(steps.of(of[steps.row] == i), draft) for i in range(CLASSES)]
        return cls(lengths, tokens, [known[i] for i in of], acceptance_in(steps, draft))

    def draw(self, workload: Workload, seed: int) -> Workload:
        """With the acceptance of a recorded response for each sequence."""
        of_sequence = drawn(self.lengths, workload, seed)
        return replace(workload, accepts=[self.accepts[i] for i in of_sequence])


def drawn(lengths: np.ndarray, workload: Workload, seed: int) -> np.ndarray:
    """A recorded response for each sequence, int[sequences].

    As many responses as there are sequences are drawn, each on its own. The longest of them is that of the
    longest sequence, and so on: lengths in tokens differ from those recorded, their ranks do not.
    """
    rng = np.random.default_rng((seed, workload.size, 2))
    some = rng.choice(len(lengths), workload.size)
    of_sequence = np.empty(workload.size, int)
    by_length = some[np.argsort(lengths[some], kind="stable")]
    of_sequence[np.argsort(workload.responses, kind="stable")] = by_length
    return of_sequence


def groups_named(data: Path, name: str) -> list[Group]:
    """The prompts of one of `SETS`, with the responses that have a token."""
    found = [x for x in groups_of(recorded_responses(data), EVERY_SAMPLE) if x.name == SETS[name]]
    return [replace(one, responses=[x for x in one.responses if len(x)]) for one in found]


@cache
def recorded(data: Path, name: str, draft: int) -> RecordedDrafts:
    return RecordedDrafts.counted(groups_named(data, name), draft)
