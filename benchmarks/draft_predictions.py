"""How well `planning.drafts.Acceptance` foretells what drafts of 1 to 8 tokens say, on prompts it has not seen:
of chains alone, and of trees with a branch of as many tokens beside each.

Half of a set's prompts are learned from, with drafts of one length; what it then expects of other lengths is
compared with what came on the other half.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pat_jax.planning.drafts import BRANCHES, DRAFTS, KINDS, Acceptance, Drafted
from pat_jax.profiling.simulate.draft_counting import Steps
from pat_jax.profiling.simulate.draft_runs import InRuns

BURST = 32  # steps
SHORT = 3  # tokens of a draft: from it too longer ones are foretold


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
    steps: Mapping[int, np.ndarray]  # int[bursts, groups], by the tokens of a draft
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
        steps, drafted, groups = {}, {}, len(tokens)
        for draft, one in found.items():
            known = InRuns.of(one, draft)
            shape = 1 + int(known.step.max()) // BURST, groups
            part = known.step // BURST * groups + known.group
            counts = known.counts(draft, part, shape[0] * groups)
            drafted[draft] = [x.reshape(*shape, *x.shape[1:]) for x in counts]
            steps[draft] = np.bincount(part, minlength=shape[0] * groups).reshape(shape)
        return cls(tokens, steps, drafted, has_branches)

    def among(self, groups: np.ndarray) -> "Counted":
        """These groups alone."""
        steps = {n: x[:, groups] for n, x in self.steps.items()}
        drafted = {n: [y[:, groups] for y in x] for n, x in self.drafted.items()}
        return Counted(self.tokens[groups], steps, drafted, self.has_branches)

    def came(self, draft: int) -> float:
        """Tokens accepted a step, in the mean."""
        return self.tokens.sum() / self.steps[draft].sum() - 1

    def expected(self, known: Acceptance, draft: int) -> float:
        """The same as foretold."""
        return known.always(draft, draft if self.has_branches else 0) - 1

    def counts(self, draft: int) -> Drafted:
        return Drafted(*(x.sum(axis=(0, 1)) for x in self.drafted[draft]))

    def bursts(self, draft: int) -> list[tuple[int, Drafted]]:
        """Steps of each burst and `counts`, in the order in which they run."""
        by_burst = [x.sum(axis=1) for x in self.drafted[draft]]
        steps = self.steps[draft].sum(axis=1).tolist()
        return [(n, Drafted(*of)) for n, *of in zip(steps, *by_burst, strict=True) if n]


def predictions(learned: Acceptance, unseen: Counted, draft: int, kinds: Drafted) -> dict:
    """Tokens accepted that are expected of a step, by what is known.

    Args:
      kinds: counts of the unseen prompts, with drafts of another length.
    """
    online, expected = learned, []
    for steps, counts in unseen.bursts(draft):  # each before it runs
        expected.append(steps * unseen.expected(online, draft))
        online = online.observed(counts)
    of_these = replace(learned, begun=kinds.begun.astype(float))
    return {
        "before anything was seen": unseen.expected(Acceptance.unseen(), draft),
        "kinds of the prompts learned from": unseen.expected(learned, draft),
        "kinds of the runs that came": unseen.expected(of_these, draft),
        "burst by burst": sum(expected) / unseen.steps[draft].sum(),
    }


def errors(counted: Counted, learned_with: int, splits: int) -> dict:
    """Errors in % of the tokens accepted that came, over random halves, by length of a draft."""
    rng, groups = np.random.default_rng(0), len(counted.tokens)
    found: dict[str, list[list[float]]] = {}
    drafts = sorted(counted.steps)
    for _ in range(splits):
        order = rng.permutation(groups)
        seen, unseen = (counted.among(x) for x in (order[: groups // 2], order[groups // 2 :]))
        learned = Acceptance.unseen().observed(seen.counts(learned_with)).of_new_rollout()
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
    expected = {n: counted.expected(learned, n) for n in counted.steps}
    return [round(float(100 * (x / counted.came(n) - 1)), 1) for n, x in expected.items()]


def _summary(by_draft: Sequence[Sequence[float]]) -> dict:
    """Of the splits' errors: their mean, and the mean of their size."""
    return {
        "mean": [round(float(np.mean(x)), 1) for x in by_draft],
        "mean size": [round(float(np.mean(np.abs(x))), 1) for x in by_draft],
    }
