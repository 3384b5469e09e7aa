"""How far a policy with quantized weights is from the one with its full weights.

Both are asked for the log-probability of the same tokens by the model alone: what drew them
(temperature, filters, penalties) has no part in it. Knows policies, layouts and tokens; does not
know files, nor where full weights come from.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from pat_jax.common.pytree import on_host, with_sharding
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sizing.memory import shard_bytes
from pat_jax.layout.layout import Layout, layout_chain
from pat_jax.layout.partitions import ManualPartition
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.memory import GIB, USABLE
from pat_jax.rl.algorithm.logprobs import next_tokens, token_logprobs

TOKENS_OF_ONE = 512  # of one response, at most: many responses tell more than one long one
CALL_TOKENS = 4096  # of all rows of a call, padding included, where rows are not longer
SHORTEST = 128  # tokens of a row
LOGIT_TOKENS = 512  # of a device, whose logits exist at a time

LoadWeights = Callable[[Policy, Layout], Params]


@dataclass
class Sample:
    """The first responses of a run, up to a number of tokens."""

    max_tokens: int  # of responses
    num_tokens: int = 0  # the same
    # Prompt and response, int32[length], and the length of the prompt.
    sequences: list[tuple[np.ndarray, int]] = field(default_factory=list)

    def add(self, prompt: Sequence[int], response: Sequence[int]) -> None:
        """Takes as much of a response as there is room for."""
        room = min(self.max_tokens - self.num_tokens, TOKENS_OF_ONE)
        if kept := response[:room]:
            self.sequences.append((np.array([*prompt, *kept], np.int32), len(prompt)))
            self.num_tokens += len(kept)


@dataclass(frozen=True)
class Gap:
    """|log π_quantized(token) - log π(token)| in nats, over the tokens of a sample."""

    mean: float
    largest: float


@dataclass(frozen=True)
class NoRoom:
    """Why there is no gap: bytes of a device, in the layout whose shards are smallest."""

    needed: float
    usable: float

    def __str__(self) -> str:
        return (
            f"the full weights take {self.needed / GIB:.3g} GiB of a device, "
            f"{self.usable / GIB:.3g} can be used; more devices would hold them"
        )


def measure_gap(
    engine: RolloutEngine, sample: Sample, load_weights: LoadWeights, *, limit: float
) -> Gap | NoRoom:
    """The gap of an engine that has generated `sample`; its weights are gone afterwards.

    First the quantized weights are asked, then freed, then the full ones loaded: no device ever
    holds both, nor the KV cache.

    Args:
      load_weights: gives the weights of a policy in a layout, in the engine's data type.
      limit: bytes that a device has.
    """
    policy = Policy.from_config(engine.policy.config)
    kernels = next(iter(engine.layouts.values())).kernels
    *_, layout = layout_chain(engine.mesh, policy.config, kernels)[0].values()
    shards = with_sharding(policy.abstract(engine.dtype), layout.param_shardings(policy))
    if shard_bytes(shards) > USABLE * limit:
        return NoRoom(shard_bytes(shards), USABLE * limit)
    assert engine.params is not None and engine.layout is not None, "it has just generated"
    quantized = _Scorer(engine.policy, engine.layout, engine.dtype)
    full = _Scorer(policy, layout, engine.dtype)
    total = len(quantized.calls(sample)) + len(full.calls(sample))
    with tqdm(
        total=total, unit="call", desc="comparing weights", disable=None, dynamic_ncols=True
    ) as bar:
        theirs = quantized.logprobs(engine.params, sample, bar.update)
        engine.release_weights()
        params = load_weights(policy, layout)
        differences = np.abs(theirs - full.logprobs(params, sample, bar.update))
    for leaf in jax.tree.leaves(params):
        leaf.delete()
    return Gap(float(differences.mean()), float(differences.max()))


@dataclass(frozen=True)
class _Scorer:
    """Log-probabilities by one policy, without a cache: prompt and response in one call."""

    policy: Policy
    layout: Layout
    dtype: jnp.dtype

    def logprobs(
        self, params: Params, sample: Sample, tick: Callable[[], object]
    ) -> Float[np.ndarray, " tokens"]:
        """Log-probabilities of every token of every response, one response after the other."""
        found: dict[int, np.ndarray] = {}
        for places, tokens in self.calls(sample):
            rows = on_host(self._program(params, tokens))
            for place, row in zip(places, rows, strict=False):
                sequence, prompt = sample.sequences[place]
                found[place] = row[prompt - 1 : len(sequence) - 1]
            tick()
        return np.concatenate([found[place] for place in range(len(found))])

    def calls(self, sample: Sample) -> list[tuple[list[int], Int[np.ndarray, "rows length"]]]:
        """Places in the sample, and their tokens: rows of like length, as many in every replica."""
        by_length: defaultdict[int, list[int]] = defaultdict(list)
        for place, (tokens, _) in enumerate(sample.sequences):
            by_length[max(SHORTEST, 1 << (len(tokens) - 1).bit_length())].append(place)
        found, groups = [], self.layout.split.dp
        for length, places in sorted(by_length.items()):
            most = max(1, CALL_TOKENS // (length * groups)) * groups
            rows = min(most, -(-len(places) // groups) * groups)
            for begin in range(0, len(places), rows):
                part, padded = places[begin : begin + rows], np.zeros((rows, length), np.int32)
                for row, place in zip(padded, part, strict=False):
                    tokens = sample.sequences[place][0]
                    row[: len(tokens)] = tokens
                found.append((part, padded))
        return found

    @cached_property
    def _program(self) -> Callable[[Params, np.ndarray], Array]:
        """Compiled for each shape of rows."""
        rows = self.layout.spec("batch")

        def run(params: Params, tokens: Int[Array, "rows length"]) -> Float[Array, "rows length"]:
            model, partition = self.policy.bind(params), ManualPartition(self.layout)
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
            hidden = model(tokens, positions, partition=partition, dtype=self.dtype).hidden
            logprobs, _ = token_logprobs(
                hidden,
                next_tokens(tokens),
                lambda hidden: model.logits(hidden, partition),
                vocab_size=self.policy.config.vocab_size,
                chunk=max(1, LOGIT_TOKENS // tokens.shape[0]),
            )
            return logprobs

        return jax.jit(
            jax.shard_map(
                run,
                mesh=self.layout.mesh,
                in_specs=(self.layout.param_specs(self.policy), rows),
                out_specs=rows,
                check_vma=False,
            )
        )
