"""Weights of tokens in the loss of a mini-batch. Knows only lengths."""

from collections.abc import Sequence
from typing import Literal

Aggregation = Literal["token", "sequence", "constant"]


def token_weights(
    counts: Sequence[int], aggregation: Aggregation, max_completion_length: int
) -> list[float]:
    """Returns for each response the weight of each of its tokens in the mini-batch's loss.

        weight = 1 / (tokens in the loss)                             aggregation = "token"
        weight = 1 / (tokens of its response * responses in the loss)               "sequence"
        weight = 1 / (max_completion_length * responses)                            "constant"

    Responses that are not in the loss, such as masked truncated ones, have weight 0. "token" and
    "sequence" average over the others alone, so that all weights add up to 1. With "constant" they
    add up to less, but a token weighs the same in every mini-batch, however long responses are and
    however many are masked.

    Args:
      counts: number of tokens of each response; 0 if it is not in the loss.
      max_completion_length: most tokens that a response may have; only "constant" needs it.

    Reference: Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 8 ("token");
    Shao et al. 2024, https://arxiv.org/abs/2402.03300, eq. 3 ("sequence");
    Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2 ("constant": Dr. GRPO).
    """
    num_tokens = sum(counts)
    num_sequences = sum(count > 0 for count in counts)
    match aggregation:
        case "token":
            return [1 / num_tokens if count else 0.0 for count in counts]
        case "sequence":
            return [1 / (count * num_sequences) if count else 0.0 for count in counts]
        case "constant":
            each = 1 / (max_completion_length * len(counts))
            return [each if count else 0.0 for count in counts]
