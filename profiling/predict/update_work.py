"""Computes the work of an update's programs on a device: operations, bytes and collectives.

Knows shapes of models and rows. Does not know how long anything takes (`update_times.py`), nor what
a compiler makes of it. A run trains in a layout without tensor parallelism: rows are split over
`dp` devices, parameters over `fsdp` of them. All experts of a layer are gathered, or tokens are
sent to them, and a token is multiplied with the few that it chooses.

Attention is counted over the pairs that a causal mask within each sequence leaves, n (n + 1) / 2
for n tokens. It takes 2 products forward and 7 backward. Its kernels compute scores and their
gradients once for queries and once more for keys (`models/kernels/row_kernels_gpu.py`, JAX's splash
attention). Masked pairs that kernels compute in blocks at the diagonal are left out.

Work other than products is that of programs compiled for H100s (benchmarks/reports/costs.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Self

from pat_jax.models.config import ModelConfig
from pat_jax.profiling.predict.kernel_model import BYTES
from pat_jax.profiling.predict.model_sizes import (
    active_weights,
    expert_passes,
    expert_weights,
    last_weights,
    num_dense,
    num_weights,
    passes,
    stored_weights,
)

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 7  # of attention
# Times that the backward pass moves the bytes which the forward pass moves outside of products.
BACKWARD_PASSES = 2
FLOAT32 = 4  # bytes of a logit, of a gradient that is added up, of the embeddings looked up
# Times that a logit is read or written outside of its product; the backward pass recomputes it,
# reads it once and writes its gradient in the dtype of products.
LOGIT_PASSES = 2
BACKWARD_LOGIT_PASSES = 1
# Bytes moved for each weight of the head to round it (read 4, write 2), and, for each chunk of
# tokens whose logits exist at a time, to add the chunk's gradient (read 4, write 4).
HEAD_BYTES = 6
HEAD_GRADIENT_BYTES = 8
# Times that a token's row is sent for each of its experts: to it and back; in the backward pass the
# row and its result's gradient there, and the row's gradient back (`layout/exchange.py`).
SENT = 2
SENT_BACKWARD = 3
# Values of `remat` with which the backward pass recomputes attention; products with weights; or
# anything, so that weights are gathered again.
KEEP_LEAST = ("full",)
KEEP_NO_PRODUCT = ("full", "attention")
KEEP_LESS = (*KEEP_NO_PRODUCT, "dots")


class Collective(NamedTuple):
    """A collective of a program, and how often it occurs."""

    kind: str  # all-reduce, all-gather, all-to-all, ragged-all-to-all or reduce-scatter
    num_bytes: float  # of the result, on one device
    group: int  # number of devices that take part
    count: int = 1  # how often it occurs in one run of the program
    hosts: int = 1  # number of hosts over which these devices are spread


@dataclass(frozen=True)
class Work:
    """The work of one device in one run of a program."""

    flops: float = 0.0  # operations of matrix products, without attention
    num_bytes: float = 0.0  # bytes read and written outside of products
    sent: tuple[Collective, ...] = ()
    attention_flops: float = 0.0
    attention_bytes: float = 0.0
    host_bytes: float = 0.0  # bytes copied to and from the host's memory

    def times(self, count: int) -> Self:
        """Returns the work of a program that does this `count` times."""
        names = (field.name for field in fields(self) if field.name != "sent")
        sent = tuple(one._replace(count=count * one.count) for one in self.sent)
        return replace(self, sent=sent, **{name: count * getattr(self, name) for name in names})


class Rows(NamedTuple):
    """The part of a micro-batch that one device has."""

    tokens: int  # padding included
    pairs: float  # number of pairs of a query and a key that it attends to


@dataclass(frozen=True)
class UpdateWork:
    """Computes the work of the programs of one model's update."""

    model: ModelConfig
    dp: int
    fsdp: int  # number of the `dp` devices that parameters are split over
    remat: str = "full"  # what the backward pass keeps of a layer (`models/rematerialization.py`)
    adapter_weights: int | None = None  # number of trained adapter weights; None: all are trained
    itemsize: int = BYTES  # bytes of one number in the forward pass
    # Tokens of a device whose logits exist at a time, if each such chunk adds to the head's
    # gradient in memory, as in programs of GPUs; 0: it does not.
    logit_tokens: int = 0
    # Most tokens of a device that are sent to their experts; with more, experts are gathered.
    exchanged_tokens: int = 0
    ep: int = 1  # number of devices over which experts are divided
    hosts: int = 1  # hosts over which devices with the same part of the parameters are spread

    def scores(self, rows: Rows) -> Work:
        """Returns the work of a forward pass that computes log-probabilities."""
        forward, head, logits = self._forward(rows.tokens)
        attention_flops, attention_bytes = self._attention(rows, FORWARD_PRODUCTS, 1)
        return Work(
            forward.flops + head + 2 * rows.tokens * (self.adapter_weights or 0),
            forward.num_bytes + LOGIT_PASSES * logits + self._head_bytes(rows, 0),
            (*self._gathers(rows, 1), *self._exchanges(rows, SENT)),
            attention_flops,
            attention_bytes,
        )

    def gradients(self, rows: Rows) -> Work:
        """Returns the work of a forward and a backward pass, and of summing the gradients."""
        forward, head, logits = self._forward(rows.tokens)
        adapters = self.adapter_weights
        multiplied, attended, seen = (
            1 + (self.remat in remats) for remats in (KEEP_NO_PRODUCT, KEEP_LEAST, KEEP_LESS)
        )
        # No gradient needs the results of the last products of MLPs and experts.
        last = 2.0 * rows.tokens * last_weights(self.model)
        again = (multiplied - 1) * (forward.flops - last)
        # Gradients of inputs and, if weights are trained, of weights.
        backward = 2 if adapters is None else 1
        # Logits are recomputed (`rl/algorithm/logprobs.py`), unless all of them exist at a time.
        # The values of a scalar head are not.
        again += head if self.model.head == "vocab" and self._chunks(rows) != 1 else 0
        flops = (1 + backward) * (forward.flops + head) + again
        flops += 2 * (2 + multiplied) * rows.tokens * (adapters or 0)
        trained = num_weights(self.model) if adapters is None else adapters
        attention_flops, attention_bytes = self._attention(
            rows, FORWARD_PRODUCTS * attended + BACKWARD_PRODUCTS, attended + 2
        )
        return Work(
            flops,
            (seen + BACKWARD_PASSES) * forward.num_bytes
            + (LOGIT_PASSES + BACKWARD_LOGIT_PASSES + self.itemsize / FLOAT32) * logits
            + self._head_bytes(rows, HEAD_GRADIENT_BYTES if adapters is None else 0)
            + 3 * FLOAT32 * trained / self.fsdp,  # added to those of the micro-batches before
            (
                *self._gathers(rows, seen),
                *self._exchanges(rows, SENT + SENT_BACKWARD),
                *self._sums(rows),
            ),
            attention_flops,
            attention_bytes,
        )

    def _forward(self, tokens: int) -> tuple[Work, float, float]:
        """Returns the work of all layers, operations of the head, and bytes of the logits."""
        model = self.model
        num_bytes = num_dense(model) * sum(passes(model, tokens, 1, 1))
        if sparse := len(model.sparse_layers):
            of_experts = expert_passes(model, tokens)
            num_bytes += sparse * (sum(passes(model, tokens, 1, 1, is_sparse=True)) + of_experts)
        layers = Work(2.0 * tokens * active_weights(model), num_bytes * self.itemsize / BYTES)
        logits = float(tokens * model.padded_head_outputs * FLOAT32)
        return layers, 2.0 * tokens * self._head, logits

    @property
    def _head(self) -> int:
        return self.model.padded_head_outputs * self.model.embed_dim

    def _head_bytes(self, rows: Rows, of_chunk: int) -> float:
        """Returns the bytes moved to round the head once and, for each chunk, `of_chunk` of each
        weight."""
        chunks = self._chunks(rows)
        return float((HEAD_BYTES + chunks * of_chunk) * self._head) if chunks else 0.0

    def _chunks(self, rows: Rows) -> int:
        return -(-rows.tokens // self.logit_tokens) if self.logit_tokens else 0

    def _attention(self, rows: Rows, products: int, passes: int) -> tuple[float, float]:
        """Returns operations and bytes of attention. A pass moves queries, results, keys and
        values."""
        model = self.model
        width = model.num_layers * model.head_dim
        read = 2 * rows.tokens * width * (model.padded_num_heads + model.num_kv_heads)
        operations = 2.0 * products * rows.pairs * width * model.padded_num_heads
        return operations, float(passes * read * self.itemsize)

    def _gathers(self, rows: Rows, count: int) -> Iterator[Collective]:
        """Yields the all-gathers of weights: of the layers `count` times, of the head once. The
        embedding is not gathered: devices exchange the rows that they look up."""
        if self.fsdp > 1:
            yield Collective("all-gather", self._layer_bytes(rows), self.fsdp, count=count)
            yield Collective("all-gather", float(self.itemsize * self._head), self.fsdp)
            yield self._lookup(rows)

    def _exchanges(self, rows: Rows, times: int) -> Iterator[Collective]:
        """Yields the exchanges of tokens with their experts' devices, one for each expert."""
        if self.model.experts is not None and rows.tokens <= self.exchanged_tokens:
            numbers = (
                rows.tokens * self.model.experts.num_experts_per_tok * self.model.expert_embed_dim
            )
            count = times * len(self.model.sparse_layers)
            num_bytes = float(self.itemsize * numbers)
            yield Collective("ragged-all-to-all", num_bytes, self.ep, count=count)

    def _sums(self, rows: Rows) -> Iterator[Collective]:
        """Yields the sums of gradients: a layer's end on the devices with its weights, the head's
        on all. FSDP groups sum theirs once an update (`training/trainable_params.py`), unless the
        model has experts."""
        summed = self.dp if self.model.experts else self.fsdp
        if self.adapter_weights is not None:
            yield Collective("all-reduce", float(FLOAT32 * self.adapter_weights), summed)
            return
        shard = self._layer_bytes(rows) / self.fsdp
        if self.fsdp > 1:
            yield Collective("reduce-scatter", shard, self.fsdp)
            yield self._lookup(rows)
        if summed > self.fsdp:
            yield Collective("all-reduce", shard, summed // self.fsdp, hosts=self.hosts)
        if summed > 1:
            yield Collective("all-reduce", float(FLOAT32 * self._head), summed)

    def _layer_bytes(self, rows: Rows) -> float:
        """Returns the bytes of all layers' gathered weights, in the type that products use."""
        gathered, of_experts = stored_weights(self.model), expert_weights(self.model)
        if rows.tokens <= self.exchanged_tokens:
            # A device needs only its own experts; with more devices, others have parts of them.
            gathered -= of_experts - (of_experts // self.ep if self.dp > self.ep else 0)
        return float(self.itemsize * gathered)

    def _lookup(self, rows: Rows) -> Collective:
        num_bytes = float(FLOAT32 * rows.tokens * self.model.embed_dim)
        return Collective("all-to-all", num_bytes, self.fsdp)


def apply_work(
    params: int,
    gradients: int,
    optimizer: int,
    *,
    offloaded: int = 0,
    sent: tuple[Collective, ...] = (),
) -> Work:
    """Returns the work of one optimizer step, which sets the gradients to zero at its end.

    Gradients are read for their norm and for the step. Parameters and the optimizer's state are
    read and written.

    Args:
      params, gradients, optimizer: bytes on one device.
      offloaded: bytes of the optimizer's state that come from host memory before and go back after.
      sent: all-reduces of gradients over FSDP groups.
    """
    num_bytes = 2.0 * (params + optimizer) + 3.0 * gradients
    return Work(num_bytes=num_bytes, host_bytes=2.0 * offloaded, sent=sent)


def transfer_work(params: int, gathered: int, kept: int, fsdp: int) -> Work:
    """Returns the work of a transfer: parameters are rounded, gathered, and cut to the rollout's
    shards.

    Args:
      params: bytes of the parameters on one device in training.
      gathered: bytes of all weights as the rollout keeps them.
      kept: bytes of the weights on one device in the rollout's first layout.
    """
    sent = (Collective("all-gather", float(gathered), fsdp),) * (fsdp > 1)
    return Work(num_bytes=float(params + gathered + 2 * kept), sent=sent)


def checksum_work(params: int, kept: int) -> Work:
    """Returns the work of a transfer's checksums; the arguments are those of `transfer_work`."""
    return Work(num_bytes=float(params + kept))
