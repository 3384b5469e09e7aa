"""The parameters by which the prompt and response lengths of a rollout are drawn."""

from dataclasses import dataclass

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
