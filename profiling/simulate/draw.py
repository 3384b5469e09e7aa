"""What the lengths of a rollout's prompts and responses are drawn by."""

import math
from dataclasses import dataclass, replace

CORRELATION = 0.3  # of two samples of a prompt, where nothing is known of it


@dataclass(frozen=True)
class Draw:
    """What one rollout is drawn by."""

    sequences: int
    cap: int  # tokens; longer responses are cut
    samples_per_prompt: int = 8
    correlation: float = CORRELATION  # of the normal scores of two samples of a prompt, ρ
    scale: float = 1.0  # lengths are this many times what the distribution says, before the cut
    prompt_tokens: int = 256  # of every prompt, where the distribution knows none
    seed: int = 0

    def later(self, number: int, growth: float) -> "Draw":
        """So many rollouts on; the logarithm of lengths grows by `growth` in each."""
        return replace(
            self, seed=self.seed + 1 + number, scale=self.scale * math.exp(growth * number)
        )
