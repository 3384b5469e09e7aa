"""Scores that the processes of a run tell each other while responses are still generated."""

from collections.abc import Callable, Mapping

from pat_jax.rl.rewards.shares import Shares
from pat_jax.rl.rewards.weighted_sum import Score


class ScoreExchange:
    """The exchange of the scores of one rollout.

    Args:
      number: of the rollout among those with an exchange; the same in every process.
    """

    def __init__(self, shares: Shares, number: int):
        self._shares, self._name = shares, f"scores {number}"

    def tell(self, function: int, scores: Mapping[int, Score]) -> None:
        """Tells all other processes scores of responses, by the number of the function."""
        self._shares.tell(self._name, (function, dict(scores)))

    def begin(self, take: Callable[[int, Mapping[int, Score]], None]) -> None:
        """Has `take` called with what others tell, also with what they have told before."""
        self._shares.listen(self._name, lambda told: take(*told))

    def end(self) -> None:
        self._shares.forget(self._name)
