"""How well `planning.drafts.Acceptance` foretells what drafts of 1 to 8 tokens say, on prompts it has not seen.

Half of a set's prompts are learned from, with drafts of one length; what it then expects of other lengths is
compared with what came on the other half.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from benchmarks.draft_counting import Steps
from pat_jax.engine.device.suffix import CONTEXT
from pat_jax.planning.drafts import KINDS, MATCHES, MOST, Acceptance, Drafted

BURST = 32  # steps
SHORT = 3  # tokens of a draft: from it too longer ones are foretold


class InRuns(NamedTuple):
    """What the engine knows of each step (`engine/device/lines.py`), in the order of rows and their steps."""

    step: np.ndarray  # of the lockstep
    accepted: np.ndarray
    begun: np.ndarray  # the kind of match with which its run began
    place: np.ndarray  # in the run, of the first token of its draft
    goes_on: np.ndarray  # with the run of the step before
    # Where the step before had left a run that could go on: the place of the token drawn last, else -1.
    last: np.ndarray

    @classmethod
    def of(cls, steps: Steps, draft: int) -> "InRuns":
        steps = steps.of(np.lexsort((steps.step, steps.row)))
        is_next = np.diff(steps.row, prepend=-1) == 0
        full = np.minimum(steps.matched + draft + 1, CONTEXT) * (steps.matched > 0)
        needed = np.roll(np.where(steps.accepted == draft, full, 0), 1) * is_next
        goes_on = (needed > 0) & (steps.matched >= needed)
        first = np.maximum.accumulate(np.where(goes_on, 0, np.arange(len(steps))))
        begun = np.searchsorted(MATCHES, steps.matched, side="right")[first]
        place = np.minimum((np.arange(len(steps)) - first) * (draft + 1), MOST - draft)
        last = np.where(needed > 0, np.minimum(np.roll(place, 1) + draft + 1, MOST) - 1, -1)
        return cls(steps.step, steps.accepted, begun, place, goes_on, last)

    def counts(self, draft: int, chosen: np.ndarray) -> Drafted:
        """Of the steps that a mask chooses."""
        tried, right = np.zeros((2, KINDS, MOST), np.int64)
        begun, place, accepted = (x[chosen] for x in (self.begun, self.place, self.accepted))
        for turn in range(draft):
            np.add.at(tried, (begun, place + turn), accepted >= turn)
            np.add.at(right, (begun, place + turn), accepted > turn)
        # The token behind a draft that was right: of the run of the step before.
        (at,) = np.nonzero(chosen & (self.last >= 0))
        np.add.at(tried, (self.begun[at - 1], self.last[at]), 1)
        np.add.at(right, (self.begun[at - 1], self.last[at]), self.goes_on[at])
        runs = np.bincount(self.begun[chosen & ~self.goes_on], minlength=KINDS)
        return Drafted(runs, tried, right, draft * int(chosen.sum()))


def counts_of(steps: Steps, draft: int) -> Drafted:
    return InRuns.of(steps, draft).counts(draft, np.ones(len(steps), bool))


def prior_of(counts: Sequence[Drafted]) -> tuple[np.ndarray, np.ndarray]:
    """Of several sets, which weigh the same: how often each token of a run is right where those before it
    are, by the kind of match, and the shares of the kinds, none first. See `drafts.PRIOR`."""
    tried, right, begun = (
        np.sum([getattr(x, name) / x.begun.sum() for x in counts], axis=0)
        for name in ("tried", "right", "begun")
    )
    return right[1:, :8] / tried[1:, :8], begun / begun.sum()


@dataclass(frozen=True, eq=False)
class Counted:
    """The steps of a set, with drafts of each length."""

    tokens: np.ndarray  # of each group
    steps: Mapping[int, Steps]  # by the tokens of a draft

    def among(self, groups: np.ndarray) -> "Counted":
        """These groups alone."""
        steps = {n: x.of(np.isin(x.group, groups)) for n, x in self.steps.items()}
        return Counted(self.tokens[groups], steps)

    def came(self, draft: int) -> float:
        """Tokens accepted a step, in the mean."""
        return self.tokens.sum() / len(self.steps[draft]) - 1

    def counts(self, draft: int) -> Drafted:
        return counts_of(self.steps[draft], draft)

    def bursts(self, draft: int) -> list[tuple[int, Drafted]]:
        """Steps of each burst and `counts`, in the order in which they run."""
        known = InRuns.of(self.steps[draft], draft)
        burst = known.step // BURST
        masks = [burst == number for number in range(burst.max() + 1)]
        return [(int(mask.sum()), known.counts(draft, mask)) for mask in masks]


def accepted(known: Acceptance, draft: int) -> float:
    """Tokens of a draft of so many that are expected to be right."""
    return float(known.tokens(draft, draft, rows=1)) - 1


def predictions(learned: Acceptance, unseen: Counted, draft: int, kinds: Drafted) -> dict:
    """Tokens accepted that are expected of a step, by what is known.

    Args:
      kinds: counts of the unseen prompts, with drafts of another length.
    """
    online, expected = learned, []
    for steps, counts in unseen.bursts(draft):  # each before it runs
        expected.append(steps * accepted(online, draft))
        online = online.observed(counts)
    of_these = replace(learned, begun=kinds.begun.astype(float))
    return {
        "before anything was seen": accepted(Acceptance.unseen(), draft),
        "kinds of the prompts learned from": accepted(learned, draft),
        "kinds of the runs that came": accepted(of_these, draft),
        "burst by burst": sum(expected) / len(unseen.steps[draft]),
    }


def errors(counted: Counted, learned_with: int, splits: int) -> dict:
    """Errors in % of the tokens accepted that came, over random halves, by length of a draft."""
    rng, groups = np.random.default_rng(0), len(counted.tokens)
    found: dict[str, list[list[float]]] = {}
    drafts = sorted(counted.steps)
    for _ in range(splits):
        order = rng.permutation(groups)
        seen, unseen = (counted.among(x) for x in (order[: groups // 2], order[groups // 2 :]))
        learned = Acceptance.unseen().observed(seen.counts(learned_with))
        kinds = unseen.counts(learned_with)
        for draft in drafts:
            came = unseen.came(draft)
            for name, expected in predictions(learned, unseen, draft, kinds).items():
                found.setdefault(name, [[] for _ in drafts])
                found[name][drafts.index(draft)].append(100 * (expected / came - 1))
    same = {
        f"on the prompts learned from, with drafts of {n}": _on_the_same(counted, n)
        for n in (learned_with, SHORT)
    }
    came = [round(float(counted.came(n)), 3) for n in drafts]
    return {"accepted a step": came, **{x: _summary(y) for x, y in found.items()}, **same}


def _on_the_same(counted: Counted, learned_with: int) -> list[float]:
    learned = Acceptance.unseen().observed(counted.counts(learned_with))
    expected = {n: accepted(learned, n) for n in counted.steps}
    return [round(float(100 * (x / counted.came(n) - 1)), 1) for n, x in expected.items()]


def _summary(by_draft: Sequence[Sequence[float]]) -> dict:
    """Of the splits' errors: their mean, and the mean of their size."""
    return {
        "mean": [round(float(np.mean(x)), 1) for x in by_draft],
        "mean size": [round(float(np.mean(np.abs(x))), 1) for x in by_draft],
    }
