"""Packs responses into arrays of a few fixed shapes. Knows tokens, lengths and weights, no model.

A row holds packed examples, each a prompt + response (`packing.py`), then zeros as padding. If
examples share their prompt, the row holds it once. Each then has its own copy of the prompt's last
token, which predicts the first token of the response. The per-token arrays have the shape of
`tokens` and belong to *targets*: position t describes the token at t + 1, which the hidden state at
t predicts. So a response of n tokens occupies the n positions from the prompt's last token on, and
the last column is always empty. Everything here runs on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
from jaxtyping import Float

from pat_jax.rl.batches.packing import Prefix, Shape, Spot, pack_rows
from pat_jax.rl.batches.train_batch import (
    COLUMNS,
    SCALE,
    MicroBatch,
    Place,
    TrainBatch,
    empty_micro_batch,
    with_no_routes,
)
from pat_jax.rl.batches.types import FinishReason, Rollout, RolloutGroup

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


@dataclass(frozen=True)
class Example:
    """A prompt and a response, not yet packed."""

    prompt: Sequence[int] | np.ndarray
    response: np.ndarray  # int[n]
    behavior_logprobs: np.ndarray  # float[n], nats: `Rollout.policy_logprobs`
    sampled_logprobs: np.ndarray  # float[n], nats: `Rollout.logprobs`
    advantage: np.ndarray  # float[n] for each token, or float[] if all tokens have the same
    in_loss: bool  # if False, the tokens have weight 0
    # `Rollout.routed_experts`, int16[tokens - 1, layers, k].
    routed_experts: np.ndarray | None = None

    def __post_init__(self):
        if not len(self.prompt):
            raise ValueError(
                "an example needs a prompt of at least one token to predict from; got 0."
            )

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)

    @property
    def targets(self) -> slice:
        """The positions in the example whose hidden states predict the response's tokens."""
        return slice(len(self.prompt) - 1, len(self) - 1)


def to_train_batch(
    groups: Sequence[RolloutGroup],
    advantages: Float[np.ndarray, "groups samples"] | Sequence[Sequence[np.ndarray]],
    *,
    mini_batch_size: int,
    micro_shapes: Sequence[Shape],
    aggregation: Aggregation,
    truncated: Literal["mask", "score"],
    max_completion_length: int = 0,
    shares_prompts: bool = False,
) -> TrainBatch:
    """Returns mini-batches of whole groups, each split into micro-batches.

    Args:
      advantages: advantage of each rollout or of each of its tokens, in the order of `groups` and
        of their rollouts. If it is NaN, the rollout's tokens have weight 0.
      mini_batch_size: number of prompts in a mini-batch; the last may hold fewer.
      micro_shapes: micro-batch shapes from `packing.shapes`.
      aggregation: how tokens are weighted, see `token_weights`.
      truncated: "mask" gives weight 0 to the tokens of truncated responses.
      max_completion_length: most tokens that a response may have; "constant" divides by it.
      shares_prompts: whether the responses of a group may share their prompt in a row, where that
        saves computation; the attention must support branches (`row_attention.knows_branches`).
    """
    pairs = zip(groups, advantages, strict=True)
    examples_G = [_examples(group, row, truncated) for group, row in pairs]
    mini_batches, places = [], []
    for i in range(0, len(groups), mini_batch_size):
        chosen = examples_G[i : i + mini_batch_size]
        micro_batches, placed = pack(
            list(chain(*chosen)),
            micro_shapes,
            aggregation,
            max_completion_length,
            prefixes=prompt_prefixes(chosen) if shares_prompts else None,
        )
        places += [at._replace(mini=len(mini_batches)) for at in placed]
        mini_batches.append(micro_batches)
    num_tokens = sum(map(len, chain(*examples_G))) - sum(at.shared for at in places)
    return TrainBatch(mini_batches, _padding_efficiency(num_tokens, mini_batches), places)


def _examples(
    group: RolloutGroup, advantages: np.ndarray | Sequence[np.ndarray], truncated: str
) -> list[Example]:
    return [
        Example(
            prompt=rollout.prompt.tokens,
            response=rollout.tokens,
            behavior_logprobs=rollout.policy_logprobs,
            sampled_logprobs=rollout.logprobs,
            advantage=np.asarray(np.nan_to_num(advantage)),
            in_loss=not np.isnan(advantage).any()
            and (truncated == "score" or rollout.finish is not FinishReason.LENGTH),
            routed_experts=rollout.routed_experts,
        )
        for rollout, advantage in zip(group.rollouts, advantages, strict=True)
    ]


def to_supervised_batch(
    demonstrations: Sequence[tuple[Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]],
    *,
    micro_shapes: Sequence[Shape],
) -> Sequence[MicroBatch]:
    """Returns the micro-batches of one mini-batch of demonstrations.

    Advantages are 1, and the rollout's log-probabilities 0, as if it were certain of each token.

    Args:
      demonstrations: (prompt tokens, response tokens), the end-of-sequence token included.
      micro_shapes: from `packing.shapes`.
    """
    examples = [
        Example(prompt, np.asarray(response), zeros, zeros, np.ones(()), True)
        for prompt, response in demonstrations
        for zeros in [np.zeros(len(response))]
    ]
    return pack(examples, micro_shapes, "token")[0]


def to_read_batch(
    rollouts: Sequence[Rollout], micro_shapes: Sequence[Shape], *, shares_prompts: bool = False
) -> TrainBatch:
    """Returns one mini-batch of responses for models that predict, without learning from it.

    Args:
      micro_shapes: from `packing.shapes`.
      shares_prompts: as in `to_train_batch`.
    """
    examples = [
        Example(one.prompt.tokens, one.tokens, zeros, zeros, zeros, True, one.routed_experts)
        for one in rollouts
        for zeros in [np.zeros(len(one.tokens))]
    ]
    # Siblings can share their prompt without its last token, as in `prompt_prefixes`.
    shared = [Prefix(one.prompt.id, len(one.prompt.tokens) - 1) for one in rollouts]
    prefixes = shared if shares_prompts else None
    micro_batches, places = pack(examples, micro_shapes, "token", prefixes=prefixes)
    num_tokens = sum(map(len, examples)) - sum(at.shared for at in places)
    return TrainBatch([micro_batches], _padding_efficiency(num_tokens, [micro_batches]), places)


def pack(
    examples: Sequence[Example],
    micro_shapes: Sequence[Shape],
    aggregation: Aggregation,
    max_completion_length: int = 0,
    prefixes: Sequence[Prefix] | None = None,
) -> tuple[list[MicroBatch], list[Place]]:
    """Packs every example once into one mini-batch. Raises ValueError if an example is longer than
    every row. Returns the micro-batches, and the `Place` of each example, with `mini` 0.

    Args:
      prefixes: the prefix that each example may share, which must contain none of its targets; None
        if examples share nothing.
    """
    packing = pack_rows([len(example) for example in examples], micro_shapes, prefixes)
    counts = [len(example.response) if example.in_loss else 0 for example in examples]
    weights = token_weights(counts, aggregation, max_completion_length)
    total = sum(weight * count for weight, count in zip(weights, counts, strict=True)) or 1.0
    columns = (*COLUMNS, SCALE) if aggregation == "constant" else COLUMNS
    micro_batches = [empty_micro_batch(shape, columns) for shape in packing.shapes]
    recorded = [x.routed_experts for x in examples if x.routed_experts is not None]
    if recorded:
        shape = recorded[0].shape[1:]
        micro_batches = [with_no_routes(micro, shape) for micro in micro_batches]
    places = []
    for example, weight, spot in zip(examples, weights, packing.spots, strict=True):
        begin = spot.start - spot.shared  # where the example would begin with its whole prompt
        targets = slice(begin + example.targets.start, begin + example.targets.stop)
        places.append(Place(0, spot.micro, spot.row, targets, spot.shared))
        _write(micro_batches[spot.micro], spot, targets, example, weight)
        if aggregation == "constant":
            micro_batches[spot.micro].columns[SCALE][spot.row, targets] = 1 / total
    return micro_batches, places


def prompt_prefixes(groups: Sequence[Sequence[Example]]) -> list[Prefix]:
    """Returns the prefix that each example can share with its group: the prompt without its last
    token. That token predicts the first one of the response."""
    return [
        Prefix(number, len(example.prompt) - 1)
        for number, examples in enumerate(groups)
        for example in examples
    ]


def _write(micro: MicroBatch, spot: Spot, targets: slice, example: Example, weight: float) -> None:
    row = spot.row
    whole = np.concatenate([example.prompt, example.response])
    own = slice(spot.start, spot.start + len(whole) - spot.shared)
    micro.tokens[row, own] = whole[spot.shared :]
    micro.positions[row, own] = np.arange(spot.shared, len(whole))
    micro.responses[row, targets] = spot.number
    micro.weights[row, targets] = weight
    micro.columns["advantages"][row, targets] = example.advantage
    micro.columns["behavior_logprobs"][row, targets] = example.behavior_logprobs
    micro.columns["sampled_logprobs"][row, targets] = example.sampled_logprobs
    if example.routed_experts is not None and micro.routes is not None:
        known = example.routed_experts[spot.shared :]
        micro.routes[row, spot.start : spot.start + len(known)] = known


def _padding_efficiency(num_tokens: int, mini_batches: Sequence[Sequence[MicroBatch]]) -> float:
    slots = sum(micro.tokens.size for micro_batches in mini_batches for micro in micro_batches)
    return num_tokens / slots if slots else 1.0
