"""The programs that hand the trainer's parameters to the rollout, and those that check what arrived.

Bits by a checksum; what the rollout makes of them by one log-probability in each of its groups.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pat_jax.common.pytree import with_sharding
from pat_jax.engine.device.programs import Key, ProgramTable
from pat_jax.engine.device.sampling import sequence_key
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.layout.layout import Layout
from pat_jax.engine.sequences.responses import Request
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Split
from pat_jax.training.trained import Trained

SPREAD = 0x9E3779B9  # 2^32 over the golden ratio, odd: neighbouring places far from each other
PROBE_LENGTH = 8  # tokens of a prompt whose next token's log-probability is compared
# Nats that the trainer's arithmetic and the rollout's may differ by: the first where products of
# float32 are float32, the second where the devices round what they multiply.
EXACT_GAP, ROUNDED_GAP = 1e-3, 0.5


def declare_transfer(
    table: ProgramTable,
    trained: Trained,
    policy: Policy,
    targets: Mapping[Split, Layout],
    dtype: jnp.dtype,
    score: Callable[[Params, Array], Array],
) -> None:
    """`transfer` to each target, the `checksum` of what is sent and of what is there, and the
    `score` of tokens by what is sent: the policy, adapters beside the weights that have one.

    Where nobody receives it, none of these.

    Args:
      policy: as the rollout keeps it, in `dtype` where that quantizes nothing.
      score: log-probabilities of tokens[rows, length], as `PolicyUpdate.score_step`.
    """
    source, held = trained.layout, (trained.abstract_frozen, trained.abstract)
    gathered = source.param_shardings(policy)

    def sent(frozen: Params, params: Params) -> Params:
        return policy.store(trained.whole(frozen, params), dtype)

    def transfer(frozen: Params, params: Params) -> Params:
        # A copy even where nothing changes: the rollout deletes what it was given. Gathered over
        # FSDP first, re-sliced after: the partitioner finds no way to do both at once. Quantized
        # before either, so that every layout gets the same numbers.
        return jax.tree.map(
            lambda x, whole: jax.lax.with_sharding_constraint(jnp.copy(x), whole),
            sent(frozen, params),
            gathered,
        )

    def sent_checksum(frozen: Params, params: Params) -> Array:
        return checksum(sent(frozen, params))

    def scored(frozen: Params, params: Params, tokens: Array) -> Array:
        return score(sent(frozen, params), tokens)

    if trained.lora:
        of_base = partial(base_checksum, trained.policy)
        table.declare(Key("base_checksum", source.split), of_base, trained.abstract_frozen)
    if not targets:
        return
    table.declare(Key("checksum", source.split), sent_checksum, *held)
    by_rows = source.sharding("batch", role="train")
    probes = jax.ShapeDtypeStruct((source.split.dp, PROBE_LENGTH + 1), jnp.int32, sharding=by_rows)
    table.declare(
        Key("score", source.split), scored, *held, probes, out_shardings=source.sharding()
    )
    for split, target in targets.items():
        shardings = target.param_shardings(policy)
        key = Key("transfer", source.split, target=split)
        table.declare(key, transfer, *held, out_shardings=shardings)
        received = with_sharding(policy.abstract(dtype), shardings)
        table.declare(Key("checksum", source.split, target=split), checksum, received)


def logprob_gap(
    engine: RolloutEngine, score: Callable[[Int[np.ndarray, "rows length"]], Array], rows: int
) -> float:
    """|log π(token)| of the rollout less the trainer's, in nats: the largest over the groups.

    Each group of the engine's layout answers a prompt with its likeliest token, by the programs
    that a rollout runs. NaN where the policy itself gives no numbers: its rollout will say so.

    Args:
      score: log-probabilities of next tokens by the trainer.
      rows: that it takes, one for each of its own groups; the rollout has no more.

    Raises:
      RuntimeError: they differ by more than rounding does.
    """
    assert engine.layout is not None, "it has just been given weights"
    split, vocab = engine.layout.split, engine.policy.config.vocab_size
    length = min(PROBE_LENGTH, engine.specs.buckets.lengths[-1] - 1)
    tokens = np.random.default_rng(0).integers(0, vocab, (rows, PROBE_LENGTH + 1), np.int32)
    requests = [
        Request(tuple(row[:length].tolist()), sequence_key(i), 1, Sampling(0.0), ignore_eos=True)
        for i, row in enumerate(tokens[: split.dp])
    ]
    answers, _ = engine.rollout(requests, FixedLayout(split, "check of the transfer"))
    theirs = np.array([np.nan if done.error else done.logprobs[0] for done in answers])
    for row, done in zip(tokens, answers, strict=False):
        row[length] = done.tokens[0] if len(done.tokens) else 0
    ours = np.asarray(score(tokens))[: split.dp, length - 1]
    if np.isnan(ours).any():
        return float("nan")
    gap = float(np.abs(ours - theirs).max())
    is_exact = engine.dtype == jnp.float32 and engine.mesh.devices.flat[0].platform == "cpu"
    if not gap <= (EXACT_GAP if is_exact else ROUNDED_GAP):
        raise RuntimeError(
            f"after the weight transfer to {split} a token's log-probability is {theirs.tolist()} by "
            f"the rollout's groups, {ours.tolist()} by the trainer: the rollout would sample another "
            "policy."
        )
    return gap


def checksum(params: Any, counted: Sequence[tuple[int, ...]] | None = None) -> Array:
    """Of bits and their places, modulo 2^32: the same in whatever order a layout adds them up.

        Σ_leaves (2 · leaf + 1) · Σ_values mix(bits ^ SPREAD · place),   place counted in its leaf

    As `mix` is one to one, a single value that differs always shows; values that changed places,
    as the shards of a wrong resharding, show but for one case in 2^32.

    Args:
      counted: of each leaf the shape of the part that counts, as if there were no more; None: all.
    """
    total, leaves = jnp.zeros((), jnp.uint32), jax.tree.leaves(params)
    for i, (x, shape) in enumerate(zip(leaves, counted or [x.shape for x in leaves], strict=True)):
        # The leaf's number stays outside: leaves of a shape are one kernel, traced and compiled once.
        total += jnp.uint32(2 * i + 1) * _leaf_checksum(x, shape)
    return total


def base_checksum(policy: Policy, params: Params) -> Array:
    """Of the values of a policy that is frozen: the same in bfloat16 and float32, and however many
    devices it is padded for."""
    # Checkpoints hold sums with the vocabulary's usual padding. That of other numbers of devices is not
    # counted.
    multiple = math.gcd(policy.config.vocab_multiple, 128)
    config = replace(policy.config, vocab_multiple=multiple, query_multiple=1)
    counted = Policy.from_config(config).abstract_params
    values = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    return checksum(values, [x.shape for x in jax.tree.leaves(counted)])


@partial(jax.jit, static_argnums=1)
def _leaf_checksum(x: Array, counted: tuple[int, ...]) -> Array:
    spread, padding = jnp.zeros(x.shape, jnp.uint32), []
    for dim, size in enumerate(counted):
        stride = jnp.uint32(SPREAD * math.prod(counted[dim + 1 :]) % 2**32)
        place = jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim)
        spread += stride * place
        if size < x.shape[dim]:
            padding.append(place >= size)
    mixed = _mix(_bits(x) ^ spread)
    for is_padding in padding:
        mixed = jnp.where(is_padding, 0, mixed)
    return jnp.sum(mixed, dtype=jnp.uint32)


def _bits(x: Array) -> Array:
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _mix(x: Array) -> Array:
    """Spreads each bit over the word, one to one: the end of MurmurHash3
    (https://github.com/aappleby/smhasher, `fmix32`)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
