"""The source of the drafts in replayed rollouts, and how often draft tokens are accepted.

The acceptance of copied drafts is built in; that of a model's drafts is assumed.

Knows tables. Does not know what a step costs.
"""

from dataclasses import dataclass

import numpy as np

from pat_jax.layout.buckets import Drafts
from pat_jax.planning.draft_counts import GENERATED, KINDS, MAX_RUN
from pat_jax.planning.drafts import PRIOR_BRANCH_COUNTS, Acceptance

OWN = "own text"
SIBLINGS = "own text, siblings"
# The tables of `planning.drafts` are for own text and siblings; these are for own text alone.
OWN_ACCEPTED = (
    (0.24, 0.47, 0.56, 0.63, 0.65, 0.71, 0.73, 0.77),
    (0.40, 0.51, 0.58, 0.65, 0.67, 0.73, 0.72, 0.75),
    (0.47, 0.57, 0.63, 0.67, 0.71, 0.73, 0.75, 0.75),
    (0.53, 0.65, 0.70, 0.73, 0.76, 0.78, 0.79, 0.81),
    (0.68, 0.76, 0.79, 0.81, 0.82, 0.85, 0.85, 0.86),
    (0.84, 0.86, 0.89, 0.90, 0.92, 0.92, 0.95, 0.91),
)
OWN_BRANCHES = (
    (0.16, 0.44, 0.55, 0.61, 0.65, 0.71, 0.71, 0.72),
    (0.24, 0.48, 0.57, 0.61, 0.65, 0.68, 0.73, 0.72),
    (0.30, 0.52, 0.62, 0.65, 0.70, 0.71, 0.74, 0.78),
    (0.32, 0.58, 0.70, 0.71, 0.73, 0.77, 0.81, 0.79),
    (0.48, 0.66, 0.75, 0.82, 0.76, 0.86, 0.85, 0.90),
    (0.68, 0.88, 0.85, 0.84, 0.89, 0.94, 0.94, 0.96),
)
OWN_BEGUN = (0.229, 0.400, 0.182, 0.121, 0.052, 0.013, 0.004)
OWN_BRANCH_COUNTS = (
    (1.000, 0.000, 0.000, 0.000, 0.000, 0.000, 0.000),
    (0.267, 0.727, 0.002, 0.002, 0.001, 0.001, 0.000),
    (0.198, 0.309, 0.484, 0.003, 0.003, 0.003, 0.000),
    (0.119, 0.246, 0.228, 0.396, 0.005, 0.005, 0.001),
    (0.101, 0.183, 0.159, 0.241, 0.301, 0.013, 0.002),
    (0.114, 0.188, 0.143, 0.173, 0.192, 0.168, 0.022),
    (0.157, 0.210, 0.139, 0.136, 0.116, 0.087, 0.155),
)
SURE = 1e9  # runs: so many that the prior does not count
BUILT_IN_ORIGIN = (
    "built in: counted on 1,261 responses of seven models, which weigh the same (DeepSeek-R1-0528, QwQ-32B, "
    "QwQ-32B-Preview, Qwen3-235B-A22B and Qwen3-30B-A3B thinking, Qwen2.5-Math-Instruct, Llama-3.2-3B-Instruct "
    "in RL; benchmarks/reports/README.md)"
)


@dataclass(frozen=True)
class DraftSource:
    """The source of a rollout's drafts, with their acceptance."""

    name: str
    acceptance: Acceptance
    origin: str = BUILT_IN_ORIGIN  # where the acceptance is from, as text to print

    @classmethod
    def built_in(cls, drafts: Drafts, samples: int) -> "DraftSource":
        """Returns the source of copied drafts: siblings too, if `drafts` copies from other texts
        and prompts have several samples."""
        if drafts.texts and samples > 1:
            return cls(SIBLINGS, Acceptance.unseen())
        return cls(OWN, _own_text())

    @classmethod
    def generated(cls, source: str, accepted: float) -> "DraftSource":
        """Returns the source of drafts that a model generates, each token right with probability
        `accepted`. `source` is the option `--speculation.source`."""
        origin = (
            f"assumed: each token with a probability of {accepted:g} where those before it are right "
            "(--draft_acceptance)"
        )
        return cls(source, generated(accepted), origin)

    def alone(self, draft: int) -> float:
        """Returns the mean tokens of a step of a sequence that runs alone, with drafts of `draft`
        tokens."""
        return float(np.asarray(self.acceptance.tokens(draft, draft, 1)))

    def words(self, draft: int) -> tuple[str, ...]:
        """Returns the assumptions in sentences, for drafts of at most `draft` tokens."""
        yours = (
            " Your texts may repeat more or less: rollout/tokens_per_row_step of a run has yours."
        )
        return (
            f"Drafts are right as often as {self.origin}."
            + yours * (self.origin == BUILT_IN_ORIGIN),
            f"A sequence alone generates {self.alone(draft):.3g} tokens a step with drafts of {draft} "
            f"from {self.name}.",
        )


def generated(accepted: float) -> Acceptance:
    """Returns the acceptance of a model's drafts: each token is right with probability `accepted`
    if those before it are."""
    begun = np.eye(KINDS)[GENERATED]
    proposed = np.full((2, KINDS, MAX_RUN), SURE)
    branch_counts = np.array(PRIOR_BRANCH_COUNTS)
    return Acceptance(begun, proposed, accepted * proposed, branch_counts, is_generated=True)


def _own_text() -> Acceptance:
    """Returns the acceptance of drafts from own text, by the tables above without the prior."""
    nothing = [0.0] * len(OWN_ACCEPTED[0])
    of_places = np.array([[nothing, *OWN_ACCEPTED], [nothing, *OWN_BRANCHES]])
    rate = np.pad(of_places, ((0, 0), (0, 0), (0, MAX_RUN - of_places.shape[2])), mode="edge")
    proposed = np.full_like(rate, SURE)
    branch_counts = np.array(OWN_BRANCH_COUNTS)
    return Acceptance(np.array(OWN_BEGUN), proposed, SURE * rate, branch_counts)
