"""How well `Acceptance` predicts what drafts of 1 to 8 tokens say, on prompts it has not seen:
of chains alone, and of trees with a branch of as many tokens beside each.

Half of a set's prompts are a first rollout, with drafts of one length; the other half is the next, with drafts of
another: each burst is predicted before it runs, and learned from, as the planner does it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pat_jax.planning.drafts import BRANCHES, DRAFTS, KINDS, Acceptance, Drafted
from pat_jax.profiling.simulate.draft_counting import Steps, right_of
from pat_jax.profiling.simulate.draft_runs import InRuns

BURST = 32  # steps
SHORT = 3  # tokens of a draft: from it too longer ones are predicted
SINGLE = "single bursts"  # how far each is off, in the mean


def prior_of(counts: Sequence[Drafted]) -> Mapping[str, np.ndarray]:
    """Of several sets, which weigh the same, by the names that `planning.drafts` has for it."""
    tried, right, begun, forks = (
        np.sum([getattr(x, name) / x.begun.sum() for x in counts], axis=0)
        for name in ("tried", "right", "begun", "forks")
    )
    rates = np.divide(right, tried, where=tried > 0, out=np.zeros(tried.shape))[:, 1:, :8]
    total = forks.sum(axis=1, keepdims=True)
    return {
        "PRIOR": rates[DRAFTS].round(2),
        "PRIOR_BRANCHES": rates[BRANCHES].round(2),
        "PRIOR_FORKS": np.divide(forks, total, where=total > 0, out=np.eye(KINDS)).round(3),
        "PRIOR_BEGUN": (begun / begun.sum()).round(3),
    }


@dataclass(frozen=True, eq=False)
class Counted:
    """What came of a set, with drafts of each length."""

    tokens: np.ndarray  # of each group
    # By the tokens of a draft, int[bursts, groups]: steps of single rows, and tokens of drafts accepted in them.
    steps: Mapping[int, np.ndarray]
    accepted: Mapping[int, np.ndarray]
    # As `Drafted` has it but for sources, arrays with these two axes in front.
    drafted: Mapping[int, Sequence[np.ndarray]]
    has_branches: bool = False  # of as many tokens

    @classmethod
    def of(cls, tokens: np.ndarray, found: Mapping[int, Steps], has_branches: bool) -> "Counted":
        """
        Args:
          tokens: of each group.
          found: by the tokens of a draft.
        """
        steps, accepted, drafted, groups = {}, {}, {}, len(tokens)
        for draft, one in found.items():
            known = InRuns.of(one, draft)
            shape = 1 + int(known.step.max()) // BURST, groups
            part = known.step // BURST * groups + known.group
            counts = known.counts(draft, part, shape[0] * groups)
            drafted[draft] = [x.reshape(*shape, *x.shape[1:]) for x in counts]
            size, right = (
                shape[0] * groups,
                right_of(known.accepted, known.branched, draft * has_branches),
            )
            steps[draft] = np.bincount(part, minlength=size).reshape(shape)
            accepted[draft] = np.bincount(part, right, minlength=size).reshape(shape)
        return cls(tokens, steps, accepted, drafted, has_branches)

    def among(self, groups: np.ndarray) -> "Counted":
        """These groups alone."""
        steps, accepted = (
            {n: x[:, groups] for n, x in of.items()} for of in (self.steps, self.accepted)
        )
        drafted = {n: [y[:, groups] for y in x] for n, x in self.drafted.items()}
        return Counted(self.tokens[groups], steps, accepted, drafted, self.has_branches)

    def came(self, draft: int) -> float:
        """Tokens accepted a step, in the mean."""
        return self.tokens.sum() / self.steps[draft].sum() - 1

    def expected(self, known: Acceptance, draft: int) -> float:
        """The same as predicted."""
        return known.always(draft, draft if self.has_branches else 0) - 1

    def counts(self, draft: int) -> Drafted:
        return Drafted(*(x.sum(axis=(0, 1)) for x in self.drafted[draft]))

    def bursts(self, draft: int) -> list["Burst"]:
        """What came of each, in the order in which they run."""
        found = []
        by_burst = zip(*(x.sum(axis=1) for x in self.drafted[draft]), strict=True)
        steps, accepted = (x[draft].sum(axis=1).tolist() for x in (self.steps, self.accepted))
        for row_steps, right, counts in zip(steps, accepted, by_burst, strict=True):
            if row_steps:
                found.append(Burst(Drafted(*counts), row_steps + int(right), row_steps))
        return found


class Burst(NamedTuple):
    """What came of one."""

    drafted: Drafted
    tokens: int
    row_steps: int  # of single rows


class Told(NamedTuple):
    """Of a rollout, burst by burst, each before it runs."""

    after: Acceptance
    accepted: float  # tokens of drafts expected of a step, in the mean
    off: float  # the mean size of how far that of a burst was from what came


def told(known: Acceptance, counted: Counted, draft: int) -> Told:
    expected = off = 0.0
    for burst in counted.bursts(draft):
        right = counted.expected(known, draft)
        expected += burst.row_steps * right
        off += abs(burst.row_steps * (1 + right) - burst.tokens)
        known = known.observed(burst.drafted)
    steps = counted.steps[draft].sum()
    return Told(known, expected / steps, off / steps)


def errors(counted: Counted, learned_with: int, splits: int) -> dict:
    """Errors in % of the tokens accepted that came, over random halves, by length of a draft."""
    rng, groups = np.random.default_rng(0), len(counted.tokens)
    found: dict[str, list[list[float]]] = {}
    drafts = sorted(counted.steps)
    for _ in range(splits):
        order = rng.permutation(groups)
        seen, unseen = (counted.among(x) for x in (order[: groups // 2], order[groups // 2 :]))
        as_a_whole = Acceptance.unseen().observed(seen.counts(learned_with))
        learned = told(Acceptance.unseen(), seen, learned_with).after
        for draft in drafts:
            came = unseen.came(draft)
            rollout = told(learned, unseen, draft)
            expected = {
                "before anything was seen": unseen.expected(Acceptance.unseen(), draft),
                "as on the prompts learned from": unseen.expected(as_a_whole, draft),
                "a first rollout, burst by burst": told(
                    Acceptance.unseen(), unseen, draft
                ).accepted,
                "burst by burst": rollout.accepted,
            }
            off = {name: 100 * (one / came - 1) for name, one in expected.items()}
            for name, error in (off | {SINGLE: 100 * rollout.off / came}).items():
                found.setdefault(name, [[] for _ in drafts])
                found[name][drafts.index(draft)].append(error)
    same = {
        f"on the prompts learned from, with drafts of {n}": _on_the_same(counted, n)
        for n in (learned_with, SHORT)
    }
    came = [round(float(counted.came(n)), 3) for n in drafts]
    return {"accepted a step": came, **{x: _summary(y) for x, y in found.items()}, **same}


def _on_the_same(counted: Counted, learned_with: int) -> list[float]:
    learned = Acceptance.unseen().observed(counted.counts(learned_with))
    expected = {n: counted.expected(learned, n) for n in counted.steps}
    return [round(float(100 * (x / counted.came(n) - 1)), 1) for n, x in expected.items()]


def _summary(by_draft: Sequence[Sequence[float]]) -> dict:
    """Of the splits' errors: their mean, and the mean of their size."""
    return {
        "mean": [round(float(np.mean(x)), 1) for x in by_draft],
        "mean size": [round(float(np.mean(np.abs(x))), 1) for x in by_draft],
    }
