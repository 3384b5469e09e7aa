"""A latency model of a machine that is not here, composed from the kernels of one layer. Seconds.

Computed:

- A decode step is the sum of its kernels over all layers, the embedding, the head and what sampling
  does with its logits. The sums of a layer run beside its products as far as its links let them
  (`links.added`).
- Resharding reads and writes the new shards at the memory's rate. Going down, it gathers them over
  the links.
- Migrating, and moving sequences between the replicas of a layout, sends what a device gives away
  at the rate of the links. What moves between replicas is also read and written twice at the
  memory's rate, to pack it and to unpack it.
- Recomputing is a prefill.

Assumed: `UNLISTED` seconds of a step that are in no kernel table; `SWITCH_S` of host and launch
time a switch; a move between replicas is charged its bytes alone. The KV cache is taken to fit.

A step that verifies drafts is one of as many tokens as it has room for. Its attention reads the
cache of each row once. What the further queries of a row compute comes on top, at the rate of a
prefill's. `DRAFTING_S` is assumed for what finds drafts, ranks them and takes over what was right.
These are many kernels with little to do, since a text has four bytes where the cache has some
hundred thousand. A decode step has none of these.

Where a model proposes drafts, the step begins with a pass for each token of the budget, every row
live. With early exit the pass is one of the policy's first layers, as a decode step of so many,
with the matrix of the exit head. With a draft model it is one of the whole model on each device,
which takes two tokens of a row and draws one.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.relocation.rounds import SIZES
from pat_jax.layout.buckets import NO_DRAFTS, Buckets, Drafts
from pat_jax.models.cache.paged_layer import reads_what_rows_hold
from pat_jax.models.config import ModelConfig
from pat_jax.models.kernels import kernel_choice
from pat_jax.planning.latency.model import ROUNDS, LatencyModel
from pat_jax.planning.types import Reads, Split
from pat_jax.profiling.predict.kernels import BYTES, HEAD_DIM, Kernels
from pat_jax.profiling.predict.links import added, waiting_s

LOGIT_BYTES = 4  # gathered in float32
SWITCH_S = 0.05  # assumed: draining the burst, launching, host accounts
DRAFTING_S = 5e-5  # assumed, of a step: some twenty kernels of 2 to 3 us
SAMPLING_BYTES = 16  # of a logit: read, laid out as rows, and read twice
PREFILL_BLOCKS = 128  # pages of a group in one call
PREFILL_ROWS = 16  # prompts of the measured attention
LONG_PROMPT = 8192  # tokens
PAGE_SIZE = RolloutConfig().page_size
ROUND_TOKENS = SIZES[0] * PAGE_SIZE

StepSeconds = Callable[[Split, int, int], float]  # of a step, by rows of a group and length


@dataclass(frozen=True)
class Unlisted:
    """Seconds of a decode step that are in no kernel table."""

    layer: float = 0.0  # of each, whatever is live: launches, gaps between kernels
    row: float = 0.0  # of a group


# A burst runs on the device: no host schedules its steps. What composed kernels lack of whole steps of
# Llama-3.1-8B on H100s, over TP 1 to 8 and all batches, is 16 us a layer and 0 to 3 us a row.
UNLISTED = {"cuda": Unlisted(1.6e-5, 1.5e-6), "tpu": Unlisted()}


class Composer:
    """One model's decode steps, prefills and switches from a chip's kernels."""

    def __init__(
        self,
        kernels: Kernels,
        model: ModelConfig,
        switch_s: float = SWITCH_S,
        unlisted: Unlisted | None = None,
        *,
        page_size: int = PAGE_SIZE,
        prefill_blocks: int = PREFILL_BLOCKS,
        kv_ways: Mapping[int, int] | None = None,
    ):
        """
        Args:
          kv_ways: in how many ways the KV heads are divided at a TP degree, where that is not as many as
            divide both; the other devices of a group have copies.
          page_size: tokens.
          prefill_blocks: pages of a group in one call.
          unlisted: not given: that of the platform.
        """
        self.kernels, self.model, self.switch_s = kernels, model, switch_s
        self.page_size, self.prefill_blocks = page_size, prefill_blocks
        self.unlisted = unlisted or UNLISTED[kernels.chip.platform]
        self._kv_ways = kv_ways or {}

    @property
    def round_tokens(self) -> int:
        """Tokens of a group that one round of a migration moves."""
        return SIZES[0] * self.page_size

    @property
    def reads(self) -> Reads:
        """What the engine's programs would read there."""
        platform = self.kernels.chip.platform
        is_held = reads_what_rows_hold(
            kernel_choice.Kernels.of(platform), self.page_size, self.model.head_dim
        )
        return "held" if is_held else "bucket"

    def kv_ways(self, tp: int) -> int:
        """In how many ways a group divides the KV heads."""
        return self._kv_ways.get(tp) or math.gcd(tp, self.model.num_kv_heads)

    def products_ms(self, tokens: int, tp: int) -> float:
        """Milliseconds of one layer's matrix products on one device."""
        model, gemm = self.model, self.kernels.gemm
        return (
            gemm(tokens, sum(_widths(model, tp, self.kv_ways(tp))), model.embed_dim)
            + gemm(tokens, model.embed_dim, model.padded_num_heads * model.head_dim // tp)
            + gemm(tokens, 2 * model.mlp_dim // tp, model.embed_dim)
            + gemm(tokens, model.embed_dim, model.mlp_dim // tp)
        )

    def _layer_ms(self, tokens: int, tp: int) -> float:
        """One layer's products, and what is done number by number; on one device."""
        moved = passes(self.model, tokens, tp, self.kv_ways(tp))
        return self.products_ms(tokens, tp) + sum(map(self.kernels.elementwise, moved))

    def _sum_ms(self, tokens: int, tp: int) -> float:
        waiting_ms = 1e3 * waiting_s(self.kernels.chip, tp)
        return self.kernels.all_reduce(tp, tokens * self.model.embed_dim) + waiting_ms

    def decode_links_s(self, tokens: int, tp: int, layers: int | None = None) -> float:
        """What its links add to a step: two sums a layer, one embedding, the logits.

        Args:
          layers: that it goes through; all where not given.
        """
        if tp == 1:
            return 0.0
        one, logits = self._sum_ms(tokens, tp), tokens * self.model.padded_vocab_size
        layer = added(self.kernels.chip, 2 * one, self.products_ms(tokens, tp))
        gather = self.kernels.all_gather(tp, logits * LOGIT_BYTES // BYTES)
        return ((layers or self.model.num_layers) * layer + one + gather) / 1e3

    def prefill_links_s(self, tp: int) -> float:
        """Seconds of the sums of a prefill call. Its products do not wait for memory, so they come on top."""
        tokens = self.prefill_blocks * self.page_size
        return 2 * self.model.num_layers * self._sum_ms(tokens, tp) / 1e3 if tp > 1 else 0.0

    def sampling_s(self, rows: int, vocab: int) -> float:
        """Seconds of sampling from so many logits of each row, which every device of a group does."""
        return self.kernels.elementwise(SAMPLING_BYTES * rows * vocab) / 1e3

    def decode_step(self, split: Split, rows: int, length: int) -> float:
        return self.verify_step(split, rows, length, 0)

    def verify_step(self, split: Split, rows: int, length: int, budget: int) -> float:
        """A step with room for `budget` tokens of drafts for each row, all of it used; who says the
        drafts is not in it."""
        each = 1 + budget
        seconds = self._pass_s(split.tp, rows, length, each=each, drawn=each)
        return seconds + DRAFTING_S * (budget > 0)

    def _pass_s(
        self, tp: int, rows: int, length: int, *, each: int, drawn: int, layers: int | None = None
    ) -> float:
        """Through the first `layers`, or all where not given, and the head.

        Args:
          each: tokens of each row.
          drawn: of these, the ones whose next is drawn.
        """
        model, tokens = self.model, rows * each
        layers = layers or model.num_layers
        layer = self._layer_ms(tokens, tp) + self._attention_ms(rows, length, each - 1, tp)
        layer += 1e3 * self.unlisted.layer
        vocab = model.padded_vocab_size
        head = self.kernels.head(rows * drawn, vocab // tp, model.embed_dim)
        on_device = (layers * layer + head) / 1e3 + self.sampling_s(rows * drawn, vocab)
        return on_device + self.decode_links_s(tokens, tp, layers) + self.unlisted.row * tokens

    def early_exit(self, split: Split, rows: int, length: int, layers: int) -> float:
        """A pass that proposes one token of each row's draft, through the first `layers` and the
        exit head."""
        seconds = self._pass_s(split.tp, rows, length, each=1, drawn=1, layers=layers)
        return seconds + self.kernels.gemm(rows, self.model.embed_dim, self.model.embed_dim) / 1e3

    def asked(self, rows: int, length: int) -> float:
        """A pass of this model that proposes one token of each row's draft for another model."""
        return self._pass_s(1, rows, length, each=2, drawn=1)

    def _attention_ms(self, rows: int, length: int, budget: int, tp: int) -> float:
        """One layer's attention of a step on one device."""
        model, heads = self.model, _heads(self.model, tp, self.kv_ways(tp))
        attended = max(1, round(length * model.head_dim / HEAD_DIM))  # as many bytes
        read = self.kernels.decode_attention(rows, attended, *heads)
        if not budget:
            return read
        # A query of a prompt sees half of it on average, one of a draft all. Prompts so long that nothing
        # but their pairs of tokens counts.
        whole = self.kernels.prefill_attention(PREFILL_ROWS, LONG_PROMPT, *heads)
        share = 2 * rows * budget * length / (PREFILL_ROWS * LONG_PROMPT**2)
        return read + share * whole * model.head_dim / HEAD_DIM

    def prefill_call(self, split: Split, length: int) -> float:
        """One call of positions up to `length`; attention as its share of whole prompts' prefill.

        A bucket holds the upper half of its positions: they see half as much again as the mean.
        """
        model, tp, tokens = self.model, split.tp, self.prefill_blocks * self.page_size
        heads = _heads(model, tp, self.kv_ways(tp))
        attention = self.kernels.prefill_attention(PREFILL_ROWS, length, *heads)
        share = 1.5 * tokens / (PREFILL_ROWS * length) * model.head_dim / HEAD_DIM
        layer = self._layer_ms(tokens, tp) + attention * share
        return model.num_layers * layer / 1e3 + self.prefill_links_s(tp)

    def reslice(self, source: Split, target: Split) -> float:
        shard = weight_bytes(self.model, self.kernels.weight_bytes) / target.tp
        if target.tp > source.tp:
            return self.switch_s + 2 * shard / self.kernels.chip.memory_bytes_s
        rate = self.kernels.exchange_bytes_s(source.tp)
        return self.switch_s + shard * (1 - target.tp / source.tp) / rate

    def migrate(self, source: Split, target: Split) -> float:
        """A round of pages; each device of a merging group keeps the part it holds in both layouts.

        Whether all groups send or one: the link of a device is what takes the time.
        """
        narrow, wide = sorted((source.tp, target.tp))
        shards = self.kv_ways(wide)
        sent = self.round_tokens * self.model.kv_bytes_per_token / shards * (wide // narrow - 1)
        return sent / self.kernels.exchange_bytes_s(wide)

    def _shifts(self, split: Split) -> dict[tuple[Split, Split, str], float]:
        """A round of pages to other groups, as `LatencyModel.migrate_table` has it.

        Each device of a group packs its part of all of them, sends it, and unpacks what comes.
        """
        shards = self.kv_ways(split.tp)
        sent = self.round_tokens * self.model.kv_bytes_per_token / shards
        packed_s = 4 * sent / self.kernels.chip.memory_bytes_s
        sent_s = sent / self.kernels.exchange_bytes_s(split.dp * split.tp)
        return {(split, split, ROUNDS[0]): packed_s + sent_s}

    def _steps(
        self, split: Split, rows: Sequence[int], lengths: Sequence[int], seconds: StepSeconds
    ) -> dict[tuple[Split, int, int], float]:
        """Times at every bucket; a larger one never costs less than a smaller one."""
        step = np.array([[seconds(split, n, m) for m in lengths] for n in rows])
        step = np.maximum.accumulate(np.maximum.accumulate(step, axis=0), axis=1)
        return {
            (split, n, m): float(step[i, j])
            for i, n in enumerate(rows)
            for j, m in enumerate(lengths)
        }

    def _drafted_step(
        self, drafts: Drafts, draft_model: "Composer | None", budget: int
    ) -> StepSeconds:
        """A step that verifies drafts, with what it takes to say them."""

        def seconds(split: Split, rows: int, length: int) -> float:
            said = 0.0
            if drafts.exit_layer:
                said = self.early_exit(split, rows, length, drafts.exit_layer)
            elif draft_model:
                said = draft_model.asked(rows, length)
            return self.verify_step(split, rows, length, budget) + budget * said

        return seconds

    def latency_model(
        self,
        buckets: Buckets,
        drafts: Drafts = NO_DRAFTS,
        draft_model: "Composer | None" = None,
    ) -> LatencyModel:
        """
        Args:
          draft_model: on the same chips; where one says drafts.
        """
        assert drafts.has_model == (draft_model is not None), "who says drafts"
        splits, lengths = tuple(buckets.rows), buckets.lengths
        decode, verify = {}, {}
        for split, rows in buckets.rows.items():
            decode |= self._steps(split, rows, lengths, self.decode_step)
            for budget in drafts.budgets:
                verifying = [n for n in rows if budget in drafts.of(n)]
                drafted = self._drafted_step(drafts, draft_model, budget)
                steps = self._steps(split, verifying, lengths, drafted) if verifying else {}
                verify |= {(*at, budget): seconds for at, seconds in steps.items()}
        pairs = list(permutations(splits, 2))
        rounds = {(*pair, kind): self.migrate(*pair) for pair in pairs for kind in ROUNDS}
        for split in splits:
            rounds |= self._shifts(split) if split.dp > 1 else {}
        return LatencyModel(
            decode_table=decode,
            reslice_table={pair: self.reslice(*pair) for pair in pairs},
            migrate_table=rounds,
            prefill_table={
                (split, m): self.prefill_call(split, m) for split in splits for m in lengths
            },
            prefill_blocks=self.prefill_blocks,
            page_size=self.page_size,
            round_tokens=self.round_tokens,
            reads=self.reads,
            verify_table=verify,
            drafts_from=drafts.come_from(draft_model and draft_model.model),
        )


def passes(model: ModelConfig, tokens: int, tp: int, kv_ways: int) -> Iterator[int]:
    """Bytes of each kernel of a layer that is not a product: read and written once."""
    for _ in range(2):  # norms: the residual and the input, both read and written
        yield BYTES * 4 * tokens * model.embed_dim
    yield BYTES * 2 * tokens * sum(_widths(model, tp, kv_ways))  # rotation, and into the cache
    if model.qk_norm:
        yield BYTES * 2 * tokens * sum(_heads(model, tp, kv_ways)) * model.head_dim
    yield BYTES * 3 * tokens * model.mlp_dim // tp  # activation: two halves into one


def _heads(model: ModelConfig, tp: int, kv_ways: int) -> tuple[int, int]:
    """Query and KV heads of one device."""
    return model.padded_num_heads // tp, model.num_kv_heads // kv_ways


def _widths(model: ModelConfig, tp: int, kv_ways: int) -> tuple[int, int]:
    """Of the queries, and of the keys and values, of one device."""
    heads, kv_heads = _heads(model, tp, kv_ways)
    return heads * model.head_dim, 2 * kv_heads * model.head_dim


def weight_bytes(model: ModelConfig, per_number: float = BYTES) -> float:
    """Bytes of the matrices; norms are too small to count.

    Args:
      per_number: of the layers' matrices. Embedding and head are not kept in fewer than bfloat16's.
    """
    layers = model.num_layers * layer_weights(model)
    return per_number * layers + max(per_number, BYTES) * _end_weights(model)


def num_weights(model: ModelConfig) -> int:
    """Number of weights of all matrices, the embedding's and the head's padding included."""
    return model.num_layers * layer_weights(model) + _end_weights(model)


def _end_weights(model: ModelConfig) -> int:
    """Of the embedding and the head."""
    return (1 if model.tie_embeddings else 2) * model.padded_vocab_size * model.embed_dim


def layer_weights(model: ModelConfig) -> int:
    """Number of weights of the matrices of one layer."""
    queries, keys_and_values = _widths(model, 1, 1)
    return (2 * queries + keys_and_values + 3 * model.mlp_dim) * model.embed_dim
