"""How long the earlier responses to a prompt were: one running mean each.

Knows tokens. Does not know the distribution of lengths, nor what a plan is.
"""

from dataclasses import dataclass, field

import numpy as np

MAX_PROMPTS = 16_384  # remembered; the first ones seen (see `PromptMeans.updated`)


@dataclass(frozen=True)
class PromptMeans:
    """The running mean length of each prompt that was seen."""

    prompt: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # ids, ascending
    mean: np.ndarray = field(default_factory=lambda: np.zeros(0))  # float64[prompts], tokens

    def expected(self, prompt: np.ndarray, otherwise: np.ndarray | float) -> np.ndarray:
        """Tokens of the next response to each prompt, float64[prompts]; of unknown ones
        `otherwise`."""
        at, is_known = self._find(prompt)
        mean = np.full(len(prompt), otherwise)
        mean[is_known] = self.mean[at[is_known]]
        return mean

    def updated(self, lengths: np.ndarray, prompt: np.ndarray) -> "PromptMeans":
        """After a rollout: int[responses] tokens, and the id of each one's prompt.

        What came before counts as much as this rollout. A new prompt is remembered while there is
        room. The oldest is not dropped for it: where prompts come round in turn, each would be
        dropped shortly before it is needed.
        """
        ids, of = np.unique(prompt, return_inverse=True)
        mean = np.bincount(of, lengths) / np.bincount(of)
        mean = np.round((self.expected(ids, mean) + mean) / 2, 1)  # short in a checkpoint
        at, is_known = self._find(ids)
        means = self.mean.copy()
        means[at[is_known]] = mean[is_known]
        new = np.flatnonzero(~is_known)[: MAX_PROMPTS - len(self.prompt)]
        prompts, means = np.append(self.prompt, ids[new]), np.append(means, mean[new])
        order = np.argsort(prompts)
        return PromptMeans(prompts[order], means[order])

    def _find(self, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each prompt is among the known ones, and whether it is."""
        at = np.searchsorted(self.prompt, prompt)
        is_known = at < len(self.prompt)
        is_known[is_known] = self.prompt[at[is_known]] == prompt[is_known]
        return at, is_known
