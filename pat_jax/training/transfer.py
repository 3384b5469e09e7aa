"""The programs that hand the trainer's parameters to the rollout, and those that check what arrived.

Bits by a checksum; what the rollout makes of them by one log-probability in each of its groups.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pat_jax.common.pytree import with_sharding
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sequences.responses import Request
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params, Policy
from pat_jax.models.weight_formats import QuantizedWeight, is_quantized, stored
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key, ProgramTable
from pat_jax.training.checksum import TreeChecksum, array_sums, base_sums
from pat_jax.training.trained import Trained

PROBE_LENGTH = 8  # tokens of a prompt whose next token's log-probability is compared
# Nats that the trainer's arithmetic and the rollout's may differ by: the first where products of
# float32 are float32, the second where the devices round what they multiply.
EXACT_GAP, ROUNDED_GAP = 1e-3, 0.5


@dataclass(frozen=True)
class Checksums:
    """Checksums of what goes to the rollout, which compare both ends."""

    base: TreeChecksum | None  # of the frozen policy; None: all of it is trained
    sent: TreeChecksum | None  # of what is trained and its base, as they are sent; None: to nobody
    received: Mapping[Split, TreeChecksum]


@dataclass(frozen=True)
class _SentSums:
    """Of an array of the trainer's the checksum of what is sent of it."""

    like: jax.ShapeDtypeStruct | QuantizedWeight  # as the rollout keeps it
    dtype: jnp.dtype
    factor: float

    def __call__(self, x: Array) -> Any:
        scaled = x if self.factor == 1 else self.factor * x
        return array_sums(stored(scaled, self.like, self.dtype))


def declare_transfer(
    table: ProgramTable,
    trained: Trained,
    policy: Policy,
    targets: Mapping[Split, Layout],
    dtype: jnp.dtype,
    score: Callable[[Params, Array], Array],
) -> Checksums:
    """`transfer` to each target, each `checksum` of what is sent and of what is there, and the
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

    def scored(frozen: Params, params: Params, tokens: Array) -> Array:
        return score(sent(frozen, params), tokens)

    base = None
    if trained.lora:
        key, of_base = Key("base_checksum", source.split), base_sums(trained.policy)
        base = TreeChecksum(table, key, trained.abstract_frozen, of_base)
    if not targets:
        return Checksums(base, None, {})
    likes = jax.tree.leaves(policy.abstract_params, is_leaf=is_quantized)
    sums = [
        _SentSums(like, jnp.dtype(dtype), factor)
        for like, factor in zip(likes, trained.factors, strict=True)
    ]
    of_sent = TreeChecksum(table, Key("checksum", source.split), trained.unscaled(*held), sums)
    of_received: dict[Split, TreeChecksum] = {}
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
        key = Key("checksum", source.split, target=split)
        of_received[split] = TreeChecksum(table, key, received)
    return Checksums(base, of_sent, of_received)


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
