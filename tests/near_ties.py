"""How close each sampled token was to being another one: the judge of the lossless contract.

Knows one forward pass over whole sequences, on one device and without a cache, and NumPy in
float64. Knows nothing of layouts, switches or the engine's sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.engine.sequences.sequence_table import NO_TOKEN
from pat_jax.engine.sequences.state import no_routes
from pat_jax.models.policy import Params, Policy

NEAR_TIE = 1e-4  # a decision with a smaller margin may fall otherwise in another layout
TOLERANCE = 1e-4  # of log-probabilities, nats


@dataclass(frozen=True)
class Decisions:
    """One response looked at again: an entry for each of its tokens, given those before it."""

    tokens: np.ndarray  # int[tokens], what the judge would have taken
    logprobs: np.ndarray  # float64[tokens], of the tokens that were taken
    margins: (
        np.ndarray
    )  # float64[tokens], nats: of the best two, of blocks or of the tokens of the best one
    filter_margins: np.ndarray  # float64[tokens], of which tokens the filters keep
    # float64[prompt + response - 1], of the experts recorded of each token but the last: below 0 where
    # the judge's routers would choose others.
    route_margins: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def is_near_tie(self) -> np.ndarray:
        return np.minimum(self.margins, self.filter_margins) < NEAR_TIE


@dataclass(frozen=True)
class Tally:
    """Counts over many responses; tallies add up."""

    responses: int = 0
    tokens: int = 0  # of the static runs
    compared: int = 0  # up to the first divergence of each response
    near_ties: int = 0  # of the static runs' tokens
    near_tie_routes: int = 0  # of the tokens from which those are drawn, in some layer
    divergences: int = 0  # responses that differ from the static run's
    unexplained: int = 0  # of these, the ones whose first difference is no near-tie
    judge_disagrees: int = (
        0  # static tokens and routes that the judge would not take, near-ties aside
    )
    route_divergences: int = 0  # responses whose first difference is a route
    max_logprob_difference: float = 0.0  # over the compared tokens
    max_logprob_error: float = 0.0  # static run against the judge

    def __add__(self, other: "Tally") -> "Tally":
        def combined(name: str) -> Any:  # an integer or a number, like the field
            pair = getattr(self, name), getattr(other, name)
            return max(pair) if name.startswith("max_") else sum(pair)

        return Tally(**{x.name: combined(x.name) for x in fields(Tally)})


def check_lossless(total: Tally) -> None:
    assert total.compared > 0.9 * total.tokens > 100
    assert total.unexplained == total.judge_disagrees == 0
    assert total.max_logprob_difference <= TOLERANCE
    assert total.max_logprob_error <= TOLERANCE


class Judge:
    """Reconstructs every decision of a response from its tokens."""

    def __init__(self, policy: Policy, params: Params, dtype: jnp.dtype, length: int):
        """
        Args:
          length: at least prompt + response of any sequence; all are padded to it.
        """
        self.policy, self.length = policy, length
        self.params = jax.device_put(params, jax.devices()[0])

        def forward(
            params: Params, tokens: jax.Array, recorded: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            positions = jnp.broadcast_to(jnp.arange(length)[None, :], tokens.shape)
            model = policy.bind(params)
            hidden, _, routed = model(tokens, positions, recorded=recorded, dtype=dtype)
            return model.logits(hidden), routed.margin.min(axis=-1, initial=jnp.inf)

        self._forward = jax.jit(forward)

    def decisions(
        self, requests: Sequence[Request], completions: Sequence[Completion]
    ) -> list[Decisions]:
        tokens = np.full((len(requests), self.length), NO_TOKEN, np.int32)
        recorded = no_routes(self.policy.config, *tokens.shape)
        for row, (request, done) in enumerate(zip(requests, completions, strict=True)):
            known = [*request.tokens, *done.tokens]
            tokens[row, : len(known)] = known
            if done.routed_experts is not None:
                recorded[row, : len(known) - 1] = done.routed_experts
        logits, margins = self._forward(self.params, tokens, recorded)
        logits, margins = np.asarray(logits, np.float64), np.asarray(margins, np.float64)
        logits = logits[:, :, : self.policy.config.vocab_size]
        keys = np.stack([request.key for request in requests])
        noise = noise_of(keys, np.arange(self.length), self.policy.config.padded_vocab_size)
        decided = []
        for row, (request, done) in enumerate(zip(requests, completions, strict=True)):
            # The token at position p is drawn from the logits at p - 1 with the noise of p.
            at = slice(len(request.tokens), len(request.tokens) + len(done.tokens))
            before = logits[row, at.start - 1 : at.stop - 1]
            own = Noise(*(x[row, at] for x in noise))
            one = decide(before, own, request, done.tokens)
            decided.append(replace(one, route_margins=margins[row, : at.stop - 1]))
        return decided


class Noise(NamedTuple):
    """Gumbel variables, float64, of each token that is drawn."""

    places: np.ndarray  # [..., width], of the tokens of a block, by their places in it
    blocks: np.ndarray  # [..., blocks]


def noise_of(keys: np.ndarray, positions: np.ndarray, padded_vocab: int) -> Noise:
    """Of every key, uint32[keys, 2], at every position."""
    width = max(n for n in range(1, 129) if padded_vocab % n == 0)
    count = width + padded_vocab // width

    @jax.jit
    def bits(keys: jax.Array) -> jax.Array:
        fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        folded = jax.vmap(fold, in_axes=(0, None))(jax.random.wrap_key_data(keys), positions)
        each = jax.vmap(jax.vmap(lambda key: jax.random.bits(key, (count,), jnp.uint32)))
        return each(folded)

    uniform = (np.asarray(bits(jnp.asarray(keys)), np.float64) + 0.5) / 2**32
    gumbel = -np.log(-np.log1p(-uniform))
    return Noise(gumbel[..., :width], gumbel[..., width:])


def perturbed(log_probs: np.ndarray, noise: Noise) -> tuple[np.ndarray, np.ndarray]:
    """What the two argmax of a draw are taken of, of blocks and of the tokens of each, float64[tokens,
    blocks] and float64[tokens, blocks, width], from float64[tokens, vocab]."""
    shape = len(log_probs), noise.blocks.shape[1], noise.places.shape[1]
    padding = shape[1] * shape[2] - log_probs.shape[1]
    tokens = np.pad(log_probs, ((0, 0), (0, padding)), constant_values=-np.inf).reshape(shape)
    masses = np.exp(tokens).sum(axis=-1)
    with np.errstate(divide="ignore"):
        blocks = np.log(masses) + noise.blocks
    return blocks, tokens + noise.places[:, None]


def decide(logits: np.ndarray, noise: Noise, request: Request, taken: np.ndarray) -> Decisions:
    """`request`'s sampling, from float64[tokens, vocab] logits and the noise of each token."""
    never, sampling = np.full(len(logits), np.inf), request.sampling
    logits = np.stack(
        [
            _penalize(each, request.tokens, taken[:i], sampling)
            for i, each in enumerate(np.asarray(logits))
        ]
    )
    if sampling.temperature <= 0:
        logprobs = _take(_log_softmax(logits), taken)
        return Decisions(logits.argmax(-1), logprobs, _lead(logits), never)
    scaled = logits / sampling.temperature
    keep, filter_margins = _filters(scaled, sampling.top_k, sampling.top_p)
    if sampling.min_p > 0:
        above = scaled - scaled.max(axis=-1, keepdims=True) - np.log(sampling.min_p)
        filter_margins = np.minimum(filter_margins, np.abs(above).min(axis=-1))
        keep = keep & (above >= 0)
    log_probs = _log_softmax(np.where(keep, scaled, -np.inf))
    of_blocks, of_tokens = perturbed(log_probs, noise)
    block = of_blocks.argmax(axis=-1)
    inside = of_tokens[np.arange(len(block)), block]
    tokens = block * inside.shape[1] + inside.argmax(axis=-1)
    margins = np.minimum(_lead(of_blocks), _lead(inside))
    return Decisions(tokens, _take(log_probs, taken), margins, filter_margins)


def _lead(x: np.ndarray) -> np.ndarray:
    """Of the largest of each row over the next one; infinite where there is no other."""
    top = np.sort(np.pad(x, ((0, 0), (1, 0)), constant_values=-np.inf), axis=-1)
    return top[:, -1] - top[:, -2]


def _penalize(
    logits: np.ndarray, prompt: Sequence[int], output: np.ndarray, sampling: Sampling
) -> np.ndarray:
    """Logits of one token, float64[vocab], by what has been said before it."""
    logits = logits.copy()
    for token in {*map(int, prompt), *map(int, output)}:
        by = sampling.repetition_penalty
        logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
    for token in set(map(int, output)):
        logits[token] -= sampling.presence_penalty
    return logits


def _filters(scaled: np.ndarray, top_k: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens top-k and top-p keep, and how close they were to keeping others."""
    num_tokens, vocab = scaled.shape
    order = np.argsort(-scaled, axis=-1, kind="stable")
    descending = np.take_along_axis(scaled, order, axis=-1)
    margins = np.full(num_tokens, np.inf)
    is_kept = np.ones(scaled.shape, bool)
    if 0 < top_k < vocab:
        margins = descending[:, top_k - 1] - descending[:, top_k]
        is_kept = np.broadcast_to(np.arange(vocab) < top_k, scaled.shape)
    if top_p < 1:
        probs = np.exp(_log_softmax(np.where(is_kept, descending, -np.inf)))
        mass_before = np.cumsum(probs, axis=-1) - probs
        distance = np.min(np.abs(mass_before - top_p), axis=-1, where=is_kept, initial=np.inf)
        margins = np.minimum(margins, distance)
        is_kept = is_kept & (mass_before < top_p)
    keep = np.zeros(scaled.shape, bool)
    np.put_along_axis(keep, order, is_kept, axis=-1)
    return keep, margins


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def _take(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    return np.take_along_axis(x, indices[:, None], axis=-1)[:, 0]


def _first_other_route(one: np.ndarray | None, other: np.ndarray | None) -> int:
    """The first token, of prompt and response, that other experts have computed; else a large
    number."""
    if one is None or other is None:
        return 2**31
    common = min(len(one), len(other))
    differs = np.sort(one[:common], axis=-1) != np.sort(other[:common], axis=-1)
    return int(np.append(np.flatnonzero(differs.any(axis=(1, 2))), 2**31)[0])


def compare(static: Completion, other: Completion, decisions: Decisions) -> Tally:
    """One response of a static run against the same sequence of another run."""
    common = min(len(static.tokens), len(other.tokens))
    differs = np.flatnonzero(static.tokens[:common] != other.tokens[:common])
    is_same = not len(differs) and len(static.tokens) == len(other.tokens)
    prefix = int(differs[0]) if len(differs) else common
    route = _first_other_route(static.routed_experts, other.routed_experts)
    last = len(decisions.route_margins) - len(static.tokens)  # of the prompt
    # Other experts have computed the token before the one drawn, or an earlier one.
    by_route = route - last <= prefix
    if by_route:
        prefix, is_same = max(0, route - last), False
    # A filter at its boundary may keep one token more: same choice, other normalisation.
    is_sure = decisions.filter_margins >= NEAR_TIE
    gap = np.abs(static.logprobs[:prefix] - other.logprobs[:prefix])[is_sure[:prefix]]
    # A token that the judge filters out has no log-probability there: it counts as disagreement.
    is_kept = np.isfinite(decisions.logprobs)
    error = np.abs(static.logprobs - decisions.logprobs)[is_sure & is_kept]
    if by_route:
        is_explained = bool(abs(decisions.route_margins[route]) < NEAR_TIE)
    else:
        is_explained = prefix < len(static.tokens) and bool(decisions.is_near_tie[prefix])
    disagrees = (static.tokens != decisions.tokens) & ~decisions.is_near_tie
    misrouted = decisions.route_margins < -NEAR_TIE
    return Tally(
        responses=1,
        tokens=len(static.tokens),
        compared=prefix,
        near_ties=int(decisions.is_near_tie.sum()),
        near_tie_routes=int((np.abs(decisions.route_margins[max(0, last) :]) < NEAR_TIE).sum()),
        divergences=int(not is_same),
        unexplained=int(not is_same and not is_explained),
        judge_disagrees=int(disagrees.sum() + misrouted.sum()),
        route_divergences=int(by_route),
        max_logprob_difference=float(gap.max(initial=0.0)),
        max_logprob_error=float(error.max(initial=0.0)),
    )
