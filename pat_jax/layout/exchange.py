"""Sends rows to the devices of their experts and the results back (expert parallelism).

The trainer uses it inside `shard_map`. A row is one token's vector. It is sent once for each of its
experts, whose result is multiplied by the routing weight. No token is dropped: all devices run as
many rounds as the fullest one needs. In a round a device receives at most twice the mean.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pat_jax.layout.layout import Layout
from pat_jax.models.config import ExpertsConfig
from pat_jax.models.experts import NO_EXPERT
from pat_jax.models.partition import ByExpert, Rows

# Share of the links' bandwidth that a ragged all-to-all is taken to reach. For TPUs it is assumed;
# a measurement on eight B200 had 2 % (https://github.com/openxla/xla/issues/33386). XLA:CPU has no
# ragged all-to-all: there every device receives all rows.
LINK_SHARE: Mapping[str, float] = {"tpu": 1.0, "gpu": 0.02, "cuda": 0.02, "cpu": 0.0}
WEIGHTS, WAYS = 3, 2  # matrices of an expert; a row is sent there and back


def most_exchanged(
    option: str, experts: ExpertsConfig | None, layout: Layout, platform: str
) -> int:
    """Returns the most tokens of a replica's micro-batch that an update sends to their experts.

    With more tokens, it gathers the experts' weights instead. The costs compared are the numbers
    that a device receives in a layer, without factors of both: the model's width and the devices.

    Args:
      option: the value of `--experts`.
      platform: platform that the update is for; a plan may use a layout of other devices.
    """
    if option == "gathered" or experts is None or not layout.ep_dp_axes:
        return 0
    if option == "exchanged":
        return sys.maxsize
    weights = WEIGHTS * experts.num_experts * experts.expert_dim
    return int(LINK_SHARE[platform] * weights / (WAYS * experts.num_experts_per_tok))


def round_rows(tokens: int, per_token: int, num_experts: int, layout: Layout) -> int:
    """Returns how many rows a device can receive in a round: twice the mean, or the most possible
    if that is less.

    Args:
      tokens: number of tokens of a replica.
      per_token: number of experts of each token.
      num_experts: number of experts on all devices together.
    """
    devices, parts = layout.size(layout.ep_dp_axes), layout.size(layout.ep_tp_axes)
    mean = -(-tokens * per_token // parts)
    most = devices * tokens * min(per_token, num_experts // (devices * parts))
    return min(2 * mean, most)


def buffer_rows(tokens: int, experts: ExpertsConfig, layout: Layout) -> int:
    """Returns how many rows a device holds at once in a layer's backward pass.

    They are inputs, gradients of inputs and gradients of results: all that it sends, and one round
    of what it receives.

    Args:
      tokens: number of tokens of a replica.
    """
    in_round = round_rows(tokens, experts.num_experts_per_tok, experts.num_experts, layout)
    return 3 * (tokens * experts.num_experts_per_tok + in_round)


def form_of_update(
    option: str, experts: ExpertsConfig | None, layout: Layout, platform: str, tokens: int
) -> str:
    """Returns a sentence that says whether an update sends tokens or experts' weights; empty if
    every replica has all experts.

    Args:
      option, platform: see `most_exchanged`.
      tokens: number of tokens of a replica in the largest micro-batch.
    """
    if experts is None or not layout.ep_dp_axes:
        return ""
    most = most_exchanged(option, experts, layout, platform)
    form = "tokens are sent to them" if tokens <= most else "their weights are brought together"
    bound = f", which sends up to {most:,}" if option == "auto" else ""
    return f"experts in the update: {form}, for {tokens:,} tokens of a replica (--experts {option}{bound})"


@dataclass(frozen=True)
class Exchange:
    """How devices along some mesh axes send rows to one another; each has other experts."""

    axes: tuple[str, ...]
    everywhere: tuple[str, ...]  # all axes of the mesh
    num_devices: int  # along `axes`
    size: int  # the most rows that a device receives in a round
    is_ragged: bool  # by a ragged all-to-all; False: by an all-gather, of which each keeps its rows

    @classmethod
    def of(cls, layout: Layout, chosen: tuple[int, int, int], num_experts: int) -> "Exchange":
        """Returns the exchange for a layout and the shape of a replica's chosen experts.

        Args:
          chosen: rows and length of a replica, and the number of experts of each token.
          num_experts: number of experts on the exchanging devices together.
        """
        rows, length, per_token = chosen
        num_experts *= layout.size(layout.ep_tp_axes)
        return cls(
            layout.ep_dp_axes,
            layout.mesh.axis_names,
            layout.size(layout.ep_dp_axes),
            round_rows(rows * length, per_token, num_experts, layout),
            is_ragged=layout.platform != "cpu",
        )


class Moves(NamedTuple):
    """The contiguous rows that each source sends to each target: their number (`size`), and the
    index of the first in the sent array (`read`) and in the received array (`write`)."""

    size: Int[Array, "source target"]
    read: Int[Array, "source target"]
    write: Int[Array, "source target"]

    @property
    def reversed(self) -> "Moves":
        return Moves(self.size.T, self.write.T, self.read.T)


class Plan(NamedTuple):
    """Where a device sends its rows: each goes once to each expert chosen for it (a choice)."""

    order: Int[Array, " choices"]  # choices sorted by expert; experts outside the exchange are last
    slot: Int[Array, "rows k"]  # each choice's index in `order`; rows · k if outside the exchange
    counts: Int[Array, "source target here"]  # rows from each device for each expert of a target
    rounds: Int[Array, ""]  # number of rounds, the same on all devices


def _planned(exchange: Exchange, chosen: Int[Array, "rows k"], num_here: int) -> Plan:
    num_experts = exchange.num_devices * num_here
    is_sent = (chosen >= 0) & (chosen < num_experts)
    expert = jnp.where(is_sent, chosen, num_experts).reshape(-1)
    order = jnp.argsort(expert, stable=True)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(chosen.size, dtype=order.dtype))
    own = jnp.bincount(expert, length=num_experts + 1)[:-1].reshape(-1, num_here)
    counts = jax.lax.all_gather(own, exchange.axes)
    rounds = -(-jnp.max(jnp.sum(counts, axis=(0, 2))) // exchange.size)
    return Plan(
        order,
        jnp.where(is_sent, places.reshape(chosen.shape), chosen.size),
        counts,
        # A collective waits for all devices, those of other groups included.
        jax.lax.pmax(rounds, exchange.everywhere),
    )


def _moves(counts: Int[Array, "source target here"], first: Array, size: int) -> Moves:
    """The moves of one round, in which each target receives its rows `first` … `first` + `size`."""
    of_pair = jnp.sum(counts, axis=2)
    at_source = jnp.cumsum(of_pair, axis=1) - of_pair
    at_target = jnp.cumsum(of_pair, axis=0) - of_pair  # numbered through all rounds
    begin = jnp.clip(at_target - first, 0, size)
    moved = jnp.clip(at_target + of_pair - first, 0, size) - begin
    read = at_source + begin + first - at_target
    return Moves(moved, jnp.where(moved > 0, read, 0), jnp.where(moved > 0, begin, 0))


def _send(exchange: Exchange, moves: Moves, rows: Array, into: Array) -> Array:
    """Returns `into`, overwritten by the rows received in a round."""
    axes = exchange.axes
    here = jax.lax.axis_index(axes)
    came = moves.size[:, here]
    # A TPU's ragged all-to-all pads a single number to 256 bytes: an all-gather sends less.
    if exchange.is_ragged and rows.ndim > 1:
        read, size, write = (x[here] for x in (moves.read, moves.size, moves.write))
        return jax.lax.ragged_all_to_all(rows, into, read, size, write, came, axis_name=axes)
    place = jnp.arange(len(into))[None] - moves.write[:, here, None]
    is_of = (place >= 0) & (place < came[:, None])
    source = jnp.argmax(is_of, axis=0)
    read = moves.read[source, here] + jnp.take_along_axis(place, source[None], axis=0)[0]
    every = jax.lax.all_gather(rows, axes)
    is_new = is_of.any(axis=0).reshape(-1, *[1] * (into.ndim - 1))
    return jnp.where(is_new, every[source, read], into)


def _experts_of(plan: Plan, first: Array, exchange: Exchange) -> Int[Array, " size"]:
    """The local expert index of each row received in a round; NO_EXPERT for unused rows."""
    here = jax.lax.axis_index(exchange.axes)
    number = first + jnp.arange(exchange.size)
    ends = jnp.cumsum(plan.counts[:, here].reshape(-1))
    expert = jnp.searchsorted(ends, number, side="right") % plan.counts.shape[2]
    return jnp.where(number < ends[-1], expert, NO_EXPERT)


def _of_round(
    compute: ByExpert,
    chosen: Int[Array, " size"],
    x: Float[Array, "size embed"],
    weights: Float[Array, " size"],
    experts: Any,
) -> Float[Array, "size embed"]:
    rows = Rows(x[:, None], chosen[:, None, None], weights[:, None, None])
    return compute(rows, experts, 0)[:, 0]


def _begin(exchange: Exchange, rows: Rows, experts: Any) -> tuple[Plan, Any, Any]:
    """Returns the plan and two functions. The first orders rows [rows, length, embed] for sending,
    as [choices, embed]. The second puts results back in place, as [rows, length, k, embed]."""
    k = rows.chosen.shape[-1]
    plan = _planned(exchange, rows.chosen.reshape(-1, k), len(jax.tree.leaves(experts)[0]))

    def ordered(x: Float[Array, "rows length embed"]) -> Float[Array, "choices embed"]:
        return x.reshape(-1, x.shape[-1])[plan.order // k]

    def returned(back: Array) -> Array:
        each = jnp.take(back, plan.slot, axis=0, mode="fill", fill_value=0)
        return each.reshape(*rows.chosen.shape, *back.shape[1:])

    return plan, ordered, returned


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def exchanged(
    compute: ByExpert, exchange: Exchange, rows: Rows, experts: Any
) -> Float[Array, "rows length embed"]:
    """Returns each row's weighted sum of its experts' outputs, wherever the experts are.

    The number of rounds is known only on the devices, and JAX does not differentiate such loops. So
    `_backward` does: it gets the saved inputs, sends rows and gradients, and recomputes the rest.

    Args:
      compute: returns the weighted outputs of experts, numbered from 0; they are as wide as rows.
      rows: rows and the numbers of their experts along the axes; rows of other experts stay.
      experts: the weights of this device's experts.
    """
    plan, ordered, returned = _begin(exchange, rows, experts)
    x = ordered(rows.x)
    weights = rows.weights.reshape(-1)[plan.order]

    def one_round(i: Array, back: Array) -> Array:
        first = i * exchange.size
        moves = _moves(plan.counts, first, exchange.size)
        rows_came, of_rows = (
            _send(exchange, moves, each, _room(exchange, each)) for each in (x, weights)
        )
        chosen = _experts_of(plan, first, exchange)
        added = _of_round(compute, chosen, rows_came, of_rows, experts)
        return _send(exchange, moves.reversed, added, back)

    back = jax.lax.fori_loop(0, plan.rounds, one_round, jnp.zeros_like(x))
    return jnp.sum(returned(back), axis=2)


def _forward(
    compute: ByExpert, exchange: Exchange, rows: Rows, experts: Any
) -> tuple[Array, tuple[Rows, Any]]:
    return exchanged(compute, exchange, rows, experts), (rows, experts)


def _backward(
    compute: ByExpert, exchange: Exchange, kept: tuple[Rows, Any], grad: Array
) -> tuple[Rows, Any]:
    rows, experts = kept
    plan, ordered, returned = _begin(exchange, rows, experts)
    sent = ordered(rows.x), rows.weights.reshape(-1)[plan.order], ordered(grad)

    def one_round(i: Array, sums: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
        back_x, back_weights, total = sums
        first = i * exchange.size
        moves = _moves(plan.counts, first, exchange.size)
        x, weights, of_results = (
            _send(exchange, moves, each, _room(exchange, each)) for each in sent
        )
        run = partial(_of_round, compute, _experts_of(plan, first, exchange))
        to_x, to_weights, to_experts = jax.vjp(run, x, weights, experts)[1](of_results)
        return (
            _send(exchange, moves.reversed, to_x, back_x),
            _send(exchange, moves.reversed, to_weights, back_weights),
            jax.tree.map(jnp.add, total, to_experts),
        )

    zeros: Any = jax.tree.map(jnp.zeros_like, (*sent[:2], experts))
    back_x, back_weights, to_experts = jax.lax.fori_loop(0, plan.rounds, one_round, zeros)
    to_x = jnp.sum(returned(back_x), axis=2)
    return Rows(to_x, None, returned(back_weights)), to_experts


def _room(exchange: Exchange, rows: Array) -> Array:
    return jnp.zeros((exchange.size, *rows.shape[1:]), rows.dtype)


exchanged.defvjp(_forward, _backward)
