"""Distributions of response lengths, from a file or built in, and rollouts drawn from them.

Knows numbers of tokens. Does not know machines or planners. The built-in distributions are
quantiles of public sets, whose responses are not kept here. Between two quantiles the logarithm of
the length is linear in the normal score, as in a lognormal distribution.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import ndtr, ndtri

from pat_jax.profiling.simulate.draw import Draw
from pat_jax.profiling.simulate.machine import Workload

PROBABILITIES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 0.9999)
POINTS = 8192  # equally likely lengths that stand for a built-in distribution
# Responses pile up at their longest length if they are at least this many, at least this share of
# all, and more than `PILE` times as many as those of the tenth of lengths below.
FEWEST_CUT = 3
LEAST_CUT = 0.005
PILE = 3
NEAR = 0.9


@dataclass(frozen=True)
class Quantiles:
    """A built-in distribution; the outermost quantiles are its ends."""

    tokens: tuple[int, ...]  # the length at each of PROBABILITIES
    source: str


BUILT_IN: Mapping[str, Quantiles] = {
    # A reasoning model's: the longest hundredth is eight times as long as the median.
    "reasoning": Quantiles(
        (184, 319, 505, 663, 1081, 1586, 3355, 5811, 7705, 12_446, 18_660, 24_464),
        "quantiles of a DeepSeek-R1 tenant's 395,572 responses in production "
        "(alibaba/ServeGen@f891d118)",
    ),
    # The same made longer until as many exceed 8,192 tokens as PAT reports of its training.
    "pat": Quantiles(
        (271, 469, 743, 975, 1590, 2333, 4935, 8548, 11_334, 18_308, 27_449, 35_986),
        "quantiles of a DeepSeek-R1 tenant's responses (alibaba/ServeGen@f891d118) times 1.47, so that "
        "10.85 % exceed 8,192 tokens as in PAT (arXiv 2605.23945)",
    ),
    # Chains of thought of a model without reinforcement learning; one in forty never ends.
    "math": Quantiles(
        (71, 174, 236, 270, 370, 525, 749, 1033, 1340, 4096, 4096, 4096),
        "quantiles of Qwen2.5-7B-Instruct's 721 answers to MATH level 5, cut at 4,096 tokens "
        "(WildEval/ZeroEval@8c1485ed)",
    ),
    # No tail to speak of: the longest hundredth is little more than twice as long as the median.
    "short": Quantiles(
        (58, 71, 86, 95, 117, 147, 183, 219, 257, 336, 418, 516),
        "quantiles of Qwen2-7B-Instruct's 1,319 answers to GSM8K, without the few that never end "
        "(WildEval/ZeroEval@8c1485ed)",
    ),
}


@dataclass(frozen=True)
class ResponseLengths:
    """Response lengths, and how often each occurred."""

    source: str  # where the lengths are from, as text to print
    tokens: np.ndarray  # int[lengths], at least 1, ascending
    counts: np.ndarray  # float[lengths], positive
    prompts: np.ndarray | None = None  # int[lengths], tokens of their prompts, if known

    @classmethod
    def built_in(cls, name: str) -> "ResponseLengths":
        quantiles = BUILT_IN[name]
        scores = ndtri((np.arange(POINTS) + 0.5) / POINTS)
        known = ndtri(np.array(PROBABILITIES))
        log_tokens = np.interp(scores, known, np.log(quantiles.tokens))
        tokens = np.maximum(1, np.rint(np.exp(log_tokens))).astype(int)
        return cls(f"built-in {name!r}: {quantiles.source}", tokens, np.ones(POINTS))

    @cached_property
    def _cumulative(self) -> np.ndarray:
        total = np.cumsum(self.counts)
        return total / total[-1]

    def quantile(self, probability: np.ndarray) -> np.ndarray:
        """Returns the shortest length that a share `probability` of responses do not exceed."""
        return self.tokens[self._index(probability)]

    def _index(self, probability: np.ndarray) -> np.ndarray:
        last = len(self.tokens) - 1
        return np.minimum(np.searchsorted(self._cumulative, probability), last)

    def share_beyond(self, tokens: float) -> float:
        """Returns P(a response is longer than `tokens`)."""
        return float(self.counts[self.tokens > tokens].sum() / self.counts.sum())

    @property
    def cut_at(self) -> int | None:
        """The longest length, if so many responses have it that a cap seems to have cut them, or
        None."""
        longest = int(self.tokens[-1])
        pile = self.counts[self.tokens == longest].sum()
        near = self.counts[(self.tokens >= NEAR * longest) & (self.tokens < longest)].sum()
        is_cut = pile >= FEWEST_CUT and pile > PILE * near and self.share_of(longest) >= LEAST_CUT
        return longest if is_cut else None

    def share_of(self, tokens: int) -> float:
        """Returns P(a response has exactly `tokens`)."""
        return float(self.counts[self.tokens == tokens].sum() / self.counts.sum())

    def mean(self, cap: int, scale: float = 1.0) -> float:
        """Returns the mean tokens of responses that are `scale` times as long and cut at `cap`."""
        return float(np.average(np.minimum(scale * self.tokens, cap), weights=self.counts))

    def draw(self, draw: Draw) -> Workload:
        """Returns one rollout: the same for an equal `draw`, with other prompts for another seed.
        Samples of a prompt have correlated lengths: their normal scores are √ρ·θ + √(1 - ρ)·ε, with
        one θ per prompt. A single length has this distribution for any ρ (a Gaussian copula)."""
        rng = np.random.default_rng((draw.seed, draw.sequences, draw.samples_per_prompt))
        num_prompts = -(-draw.sequences // draw.samples_per_prompt)
        prompt = np.repeat(np.arange(num_prompts), draw.samples_per_prompt)[: draw.sequences]
        of_prompt = rng.standard_normal(num_prompts)[prompt]
        own = rng.standard_normal(draw.sequences)
        score = np.sqrt(draw.correlation) * of_prompt + np.sqrt(1 - draw.correlation) * own
        at = self._index(ndtr(score))
        responses = np.clip(np.rint(draw.scale * self.tokens[at]), 1, draw.cap).astype(int)
        if self.prompts is None:
            prompts = np.full(draw.sequences, draw.prompt_tokens)
        else:
            first = np.arange(draw.sequences) // draw.samples_per_prompt * draw.samples_per_prompt
            prompts = self.prompts[at][first]
        return Workload(prompts, responses, draw.cap, prompt + draw.seed * num_prompts)
