"""The programs that hand the trainer's parameters to the rollout, and check what arrived.

A checksum checks the bits. One log-probability in each replica checks what the rollout computes
with them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from pat_jax.common.owners import is_absent, known_to_all
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
from pat_jax.training.carrier import Carrier, carried, passed_on
from pat_jax.training.checksum import TreeChecksum, array_sums, base_sums
from pat_jax.training.trainable_params import TrainableParams

PROBE_LENGTH = 8  # tokens of a prompt whose next token's log-probability is compared
# Largest allowed difference in nats between the log-probabilities of trainer and rollout: EXACT_GAP
# if float32 products are exact, ROUNDED_GAP if the devices round the factors.
EXACT_GAP = 1e-3
ROUNDED_GAP = 0.5


@dataclass(frozen=True)
class Receivers:
    """The rollouts that a trainer hands its policy to."""

    dtype: jnp.dtype  # dtype of the weights that rollouts do not quantize
    layouts: Mapping[Split, Layout] = field(default_factory=dict)  # empty: there are no rollouts
    policy: Policy | None = None  # the policy in the rollouts' weight format; None: the trainer's
    # For each rollout layout, how weights come there from the trainer's devices. Empty if rollouts
    # run on the trainer's devices.
    carriers: Mapping[Split, Carrier] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        """The largest number of replicas among the rollouts' layouts."""
        return max((split.dp for split in self.layouts), default=1)


@dataclass(frozen=True)
class _SentSums:
    """A function that returns the checksum of a trainer's array in the form in which it is sent."""

    like: jax.ShapeDtypeStruct | QuantizedWeight  # the array in the rollout's weight format
    dtype: jnp.dtype
    factor: float

    def __call__(self, x: Array) -> Any:
        scaled = x if self.factor == 1 else self.factor * x
        return array_sums(stored(scaled, self.like, self.dtype))


class Transfer:
    """Sends the policy to the rollout, and checks that the bits that arrive are those sent.

    Adapters are sent as separate arrays. For each rollout layout there is a program `transfer`, and
    programs `checksum` for the sent and for the arrived weights. The program `score` computes
    log-probabilities with the sent weights. Without receivers there are none of these programs.
    """

    def __init__(
        self,
        table: ProgramTable,
        trained: TrainableParams,
        receivers: Receivers,
        score: Callable[[Params, Array], Array],
    ):
        """
        Args:
          score: function that returns log-probabilities of tokens, as `Predictor.score_step`.
        """
        self._table = table
        self._trained = trained
        self._dtype = receivers.dtype
        self._policy = receivers.policy or trained.policy
        self.sent: int | None = None  # checksum of the policy that was sent last
        self._base: TreeChecksum | None = None  # of the frozen policy; None without adapters
        self._of_received: dict[Split, TreeChecksum] = {}
        self._carriers = receivers.carriers
        self._split = split = trained.layout.split
        # Number of rows of tokens that `score` takes: a multiple of the trainer's replicas.
        self.probes = split.dp * -(-receivers.replicas // split.dp)
        if trained.lora:
            sums = base_sums(trained.policy)
            key = Key("base_checksum", split)
            self._base = TreeChecksum(table, key, trained.abstract_frozen, sums)
        if receivers.layouts:
            self._of_sent = self._declare_sent(score)
        for target, layout in receivers.layouts.items():
            self._of_received[target] = self._declare_received(layout)

    def _declare_sent(self, score: Callable[[Params, Array], Array]) -> TreeChecksum:
        """Declares the sent weights' checksum, and the program that scores tokens with them."""
        trained = self._trained
        source = self._trained.layout
        frozen = trained.abstract_frozen
        weights = trained.abstract

        def scored(frozen: Params, params: Params, tokens: Array) -> Array:
            return score(self._stored(frozen, params), tokens)

        by_rows = source.sharding("batch", role="train")
        shape = (self.probes, PROBE_LENGTH + 1)
        probes = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=by_rows)
        key = Key("score", self._split)
        self._table.declare(key, scored, frozen, weights, probes, out_shardings=source.sharding())
        likes = jax.tree.leaves(self._policy.abstract_params, is_leaf=is_quantized)
        sums = [
            _SentSums(like, jnp.dtype(self._dtype), factor)
            for like, factor in zip(likes, trained.factors, strict=True)
        ]
        unscaled = trained.unscaled(frozen, weights)
        return TreeChecksum(self._table, Key("checksum", self._split), unscaled, sums)

    def _declare_received(self, layout: Layout) -> TreeChecksum:
        """Declares the transfer to a layout, and the checksum of the weights that arrive there."""
        trained = self._trained
        shardings = layout.param_shardings(self._policy)
        gathered = trained.layout.param_shardings(self._policy)
        received = with_sharding(self._policy.abstract(self._dtype), shardings)
        if carrier := self._carriers.get(layout.split):
            wanted = shardings
            shardings = carrier.sent(self._policy)
            if carrier.spreads:
                gathered = shardings
            if carrier.spreads or carrier.target.split != layout.split:
                arrived = with_sharding(received, carrier.arriving(self._policy))
                key = self._arrival(layout.split)
                arrive = partial(_arrive, self._policy, carrier, wanted)
                self._table.declare(key, arrive, arrived, out_shardings=wanted)

        def transfer(frozen: Params, params: Params) -> Params:
            # Copy even where nothing changes: the rollout deletes what it was given. Quantize
            # first, so that every layout gets the same values.
            kept = jax.tree.map(jnp.copy, self._stored(frozen, params))
            return _resharded(kept, gathered, shardings)

        frozen = trained.abstract_frozen
        key = Key("transfer", self._split, target=layout.split)
        self._table.declare(key, transfer, frozen, trained.abstract, out_shardings=shardings)
        return TreeChecksum(self._table, key._replace(name="checksum"), received)

    def _stored(self, frozen: Params, params: Params) -> Params:
        """Returns the policy's parameters in the rollout's format."""
        return self._policy.store(self._trained.whole(frozen, params), self._dtype)

    def __call__(self, params: Params, layout: Layout) -> Params:
        """Returns the policy's parameters on the shards of a rollout's layout. Raises RuntimeError
        if the checksums of the sent and the arrived weights differ."""
        target = layout.split
        frozen = self._trained.frozen
        self.sent = sent_sum = self._of_sent(self._trained.unscaled(frozen, params))
        received = self._table[Key("transfer", self._split, target=target)](frozen, params)
        if carrier := self._carriers.get(target):
            received = carried(received, carrier.arriving(self._policy))
            if carrier.spreads or carrier.target.split != target:
                wider = received
                received = self._table[self._arrival(target)](received)
                for leaf in jax.tree.leaves(wider):
                    leaf.delete()
        received_sum = self._of_received[target](received)
        if sent_sum != received_sum:
            raise RuntimeError(
                f"weight transfer {self._split} to {target}: checksum {received_sum} arrived, "
                f"{sent_sum} was sent; the rollout would sample another policy."
            )
        return received

    def _arrival(self, target: Split) -> Key:
        """Returns the key of the program that brings arrived weights into the layout `target`."""
        return Key("arrive", self._split, target=target)

    def score(self, params: Params, tokens: ArrayLike) -> Float[np.ndarray, "rows length"]:
        """Returns log π(next token) in nats at each of the `tokens` [rows, length]. It is computed
        with the weights that a transfer sends."""
        found = self._table[Key("score", self._split)](self._trained.frozen, params, tokens)
        if is_absent(devices := self._trained.layout.devices):
            return known_to_all("score", devices, np.zeros(found.shape))
        return known_to_all("score", devices, np.asarray(found))

    def base_checksum(self, base: Params) -> int:
        """Returns the checksum of the policy under the adapters, equal in bfloat16 and float32."""
        assert self._base is not None, "there are adapters"
        return self._base(base)


def _arrive(policy: Policy, carrier: Carrier, shardings: Params, params: Params) -> Params:
    """Returns the arrived weights in the rollout's layout, which may need more or fewer shards. If
    `carrier.spreads`, the devices that have shards first send them to the others."""
    if not carrier.spreads:
        return params
    specs = jax.tree.map(lambda sharding: sharding.spec, carrier.arriving(policy))
    parts = passed_on(params, carrier.target.mesh, specs)
    return _resharded(parts, carrier.target.param_shardings(policy), shardings)


def _resharded(tree: Any, gathered: Any, shardings: Any) -> Any:
    """Gathers each array over FSDP, then reshards it: the partitioner finds no way to do both at
    once. Barriers force one array at a time: the compiler would else gather all of them first."""
    place = jax.lax.with_sharding_constraint
    done = list[Array]()
    for x, whole, to in zip(*map(jax.tree.leaves, (tree, gathered, shardings)), strict=True):
        if done:
            x, done[-1] = jax.lax.optimization_barrier((x, done[-1]))
        done.append(place(place(x, whole), to))
    return jax.tree.unflatten(jax.tree.structure(tree), done)


def _probe(number: int, prompt: Int[np.ndarray, " length"]) -> Request:
    """Returns a request for the likeliest token after a prompt."""
    greedy = Sampling(temperature=0.0)
    return Request(tuple(prompt.tolist()), sequence_key(number), 1, greedy, ignore_eos=True)


def logprob_gap(
    engine: RolloutEngine,
    score: Callable[[Int[np.ndarray, "rows length"]], Float[ArrayLike, "rows length"]],
    rows: int,
) -> float:
    """Returns the largest |log π_rollout(token) - log π_trainer(token)| over replicas, in nats.
    Raises RuntimeError if the two differ by more than rounding.

    Each replica of the engine's layout generates the likeliest token for a prompt, by the programs
    that a rollout runs. The gap is NaN if the policy itself gives NaN; the rollout reports that.

    Args:
      score: function that returns the trainer's log-probabilities of next tokens.
      rows: number of rows that `score` takes, at least one for each replica of the rollout.
    """
    assert engine.layout is not None, "it has just been given weights"
    split = engine.layout.split
    vocab = engine.policy.config.vocab_size
    length = min(PROBE_LENGTH, engine.specs.buckets.lengths[-1] - 1)
    tokens = np.random.default_rng(0).integers(0, vocab, (rows, PROBE_LENGTH + 1), np.int32)
    probes = [_probe(i, row[:length]) for i, row in enumerate(tokens[: split.dp])]
    answers, _ = engine.rollout(probes, FixedLayout(split, reason="check of the transfer"))
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
