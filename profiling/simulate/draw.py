"""The parameters by which the prompt and response lengths of a rollout are drawn."""

import math
from dataclasses import dataclass, replace

CORRELATION = 0.3  # default correlation of the lengths of two samples of a prompt


@dataclass(frozen=True)
class Draw:
    """The parameters by which the lengths of one rollout are drawn."""

    sequences: int
    cap: int  # tokens; longer responses are cut
    samples_per_prompt: int = 8
    correlation: float = CORRELATION  # of the normal scores of two samples of a prompt, ρ
    scale: float = 1.0  # lengths are this many times what the distribution says, before the cut
    prompt_tokens: int = 256  # length of every prompt, if the distribution has no prompts
    seed: int = 0

    def later(self, number: int, growth: float) -> "Draw":
        """Returns the draw of rollout `number`, if log lengths grow by `growth` in each."""
        return replace(
            self, seed=self.seed + 1 + number, scale=self.scale * math.exp(growth * number)
        )
