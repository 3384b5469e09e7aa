"""Composes the latency model of a machine that is not here from the kernel times of one layer.

Computed:

- A decode step is the sum of its kernels over all layers, the embedding, the head and the sampling
  from its logits. The all-reduces of a layer overlap with its products as far as the links allow
  (`links.added`).
- Experts are divided over all devices, in the same way in every layout. In a layer with experts a
  device gathers the rows of all replicas, computes its own experts for them, and scatters the sums
  over the replicas. With tensor parallelism the devices of a replica sum as well. Each token
  chooses its experts independently and evenly (assumed). The device with the most experts to read
  sets the time.
- Resharding reads and writes the new shards at the memory's rate. To a lower TP it also gathers
  them over the links. It moves no expert.
- Migrating, and moving sequences between the replicas of a layout, sends the pages of a device
  at the rate of the links. Between replicas, pages are also read and written twice at the memory's
  rate, to pack and to unpack them.
- Recomputing is a prefill.

Assumed: `UNLISTED` seconds of a step that are in no kernel table; `SWITCH_S` of host and launch
time per switch; a move between replicas takes only the time of its bytes; the KV cache fits.

A step that verifies drafts is priced as a step of as many tokens as it has room for. Its attention
reads the cache of each row once. The further queries of a row come on top, at the rate of a
prefill. `DRAFTING_S` is assumed for finding drafts, ranking them and accepting the right tokens.
These are many small kernels, since a token of text has four bytes where the cache has some hundred
thousand. A decode step without drafts has none of them.

If a model proposes drafts, the step begins with one pass of all rows for each draft token. With
early exit a pass is a decode step of the policy's first layers, with the matrix of the exit head.
With a draft model it is a pass of the whole model on each device, which takes two tokens of a row
and draws one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product

import numpy as np

from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.relocation.rounds import SIZES
from pat_jax.layout.buckets import NO_DRAFTS, Buckets, Drafts
from pat_jax.models.cache.paged_layer import reads_what_rows_hold
from pat_jax.models.kernels import kernel_choice
from pat_jax.planning.latency.model import ROUNDS, LatencyModel
from pat_jax.planning.types import Reads, Split
from pat_jax.profiling.predict.kernel_model import HEAD_DIM
from pat_jax.profiling.predict.layer_times import LayerTimes
from pat_jax.profiling.predict.model_sizes import (
    heads_of,
    weight_bytes,
)

SWITCH_S = 0.05  # assumed seconds: draining the burst, launching, host's work
DRAFTING_S = 5e-5  # assumed seconds of a step: some twenty kernels of 2 to 3 us
SAMPLING_BYTES = 16  # moved per logit: read, laid out as rows, and read twice
PREFILL_BLOCKS = 128  # pages of a replica in one call
PREFILL_ROWS = 16  # prompts of the measured attention
LONG_PROMPT = 8192  # tokens
PAGE_SIZE = RolloutConfig().page_size
ONE = Split(1, 1)

StepSeconds = Callable[[Split, int, int], float]  # by layout, rows of a replica and length


@dataclass(frozen=True)
class Unlisted:
    """Seconds of a decode step that are in no kernel table."""

    layer: float = 0.0  # seconds of each layer: launches, gaps between kernels
    row: float = 0.0  # seconds of each row of a replica


# A burst runs on the device: no host schedules its steps. Others' steps of Llama-3.1-8B on H100s
# take 16 us a layer and 0 to 3 us a row more than their kernels, over TP 1 to 8 and all batches.
# Where this engine ran, its own are in `kernel_coefficients.yaml`.
UNLISTED = {"cuda": Unlisted(1.6e-5, 1.5e-6), "tpu": Unlisted()}


@dataclass(frozen=True)
class Composer(LayerTimes):
    """Composes one model's decode steps, prefills and switches from a chip's kernels."""

    switch_s: float = SWITCH_S
    page_size: int = PAGE_SIZE  # tokens of a page
    prefill_blocks: int = PREFILL_BLOCKS  # pages of a replica in one call

    @property
    def unlisted(self) -> Unlisted:
        if own := self.kernels.own.get("unlisted"):
            return Unlisted(1e-6 * own["layer_us"], 1e-6 * own["row_us"])
        return UNLISTED[self.kernels.chip.platform]

    @property
    def round_tokens(self) -> int:
        """Tokens of a replica that one round of a migration moves."""
        return SIZES[0] * self.page_size

    @property
    def reads(self) -> Reads:
        """How much of the KV cache a decode step of the engine reads on this target."""
        platform = self.kernels.chip.platform
        is_held = reads_what_rows_hold(
            kernel_choice.Kernels.of(platform), self.page_size, self.model.head_dim
        )
        return "held" if is_held else "bucket"

    def prefill_links_s(self, split: Split) -> float:
        """Returns the seconds of a prefill call's collectives. They do not overlap with its
        products, which do not wait for memory."""
        tokens = self.prefill_blocks * self.page_size
        return sum(
            count * self.layer_links_ms(tokens, split, is_sparse=is_sparse) / 1e3
            for is_sparse, count in self.kinds().items()
        )

    def sampling_s(self, rows: int, vocab: int) -> float:
        """Returns the seconds to sample from `vocab` logits of each row."""
        return self.kernels.elementwise(SAMPLING_BYTES * rows * vocab) / 1e3

    def decode_step(self, split: Split, rows: int, length: int, num_draft_tokens: int = 0) -> float:
        """Returns the seconds of a step that verifies `num_draft_tokens` draft tokens per row,
        without the passes that propose them."""
        each = 1 + num_draft_tokens
        seconds = self._pass_s(split, rows, length, each=each, drawn=each)
        return seconds + DRAFTING_S * (num_draft_tokens > 0)

    def _pass_s(
        self,
        split: Split,
        rows: int,
        length: int,
        *,
        each: int,
        drawn: int,
        layers: int | None = None,
    ) -> float:
        """Returns the seconds of a pass: `each` tokens of each row go through the first `layers`
        (by default all), and `drawn` of them through the head."""
        model = self.model
        tokens = rows * each
        layers = layers or model.num_layers
        of_each = self._attention_ms(rows, length, each - 1, split.tp) + 1e3 * self.unlisted.layer
        in_layers = self._layers_ms(tokens, split, layers) + layers * of_each
        head = self.kernels.head(rows * drawn, model.padded_vocab_size // split.tp, model.embed_dim)
        sampling = self.sampling_s(rows * drawn, self.sampled_logits(split.tp))
        on_device = (in_layers + head) / 1e3 + sampling
        return on_device + self.decode_links_s(tokens, split, layers) + self.unlisted.row * tokens

    def early_exit(self, split: Split, rows: int, length: int, layers: int) -> float:
        """Returns the seconds of a pass through the first `layers` and the exit head, which
        proposes one token of each row's draft."""
        seconds = self._pass_s(split, rows, length, each=1, drawn=1, layers=layers)
        return seconds + self.kernels.gemm(rows, self.model.embed_dim, self.model.embed_dim) / 1e3

    def asked(self, rows: int, length: int) -> float:
        """Returns the seconds of a pass in which this model, as draft model, proposes a token for
        each row."""
        return self._pass_s(ONE, rows, length, each=2, drawn=1)

    def _attention_ms(self, rows: int, length: int, num_draft_tokens: int, tp: int) -> float:
        model = self.model
        heads, kv_heads = heads_of(self.model, tp, self.kv_ways(tp))
        attended = max(1, round(length * model.head_dim / HEAD_DIM))  # as many bytes
        read = self.kernels.decode_attention(rows, attended, heads, kv_heads)
        if not num_draft_tokens:
            return read
        # A query of a prompt sees half of it on average, one of a draft all. These prompts are so
        # long that only their pairs of tokens count.
        whole = self.kernels.prefill_attention(PREFILL_ROWS, LONG_PROMPT, heads, kv_heads)
        share = 2 * rows * num_draft_tokens * length / (PREFILL_ROWS * LONG_PROMPT**2)
        return read + share * whole * model.head_dim / HEAD_DIM

    def prefill_call(self, split: Split, length: int) -> float:
        """Returns the seconds of a prefill call in the bucket `length`. Attention is a share of
        whole prompts'. Positions in a bucket are in the upper half of `length`: they attend to 1.5
        times the mean."""
        model = self.model
        tp = split.tp
        tokens = self.prefill_blocks * self.page_size
        heads, kv_heads = heads_of(model, tp, self.kv_ways(tp))
        attention = self.kernels.prefill_attention(PREFILL_ROWS, length, heads, kv_heads)
        share = 1.5 * tokens / (PREFILL_ROWS * length) * model.head_dim / HEAD_DIM
        on_device = self._layers_ms(tokens, split) + model.num_layers * attention * share
        return on_device / 1e3 + self.prefill_links_s(split)

    def reshard(self, source: Split, target: Split) -> float:
        shard = weight_bytes(self.model, self.kernels.weight_bytes) / target.tp
        if target.tp > source.tp:
            return self.switch_s + 2 * shard / self.kernels.chip.memory_bytes_s
        rate = self.kernels.exchange_bytes_s(source.tp)
        return self.switch_s + shard * (1 - target.tp / source.tp) / rate

    def migrate(self, source: Split, target: Split) -> float:
        """Returns the seconds of a round of pages. Each device of a merging replica keeps the part
        of the pages that it holds in both layouts. All replicas together take as long as one,
        because each device has its own link."""
        narrow, wide = sorted((source.tp, target.tp))
        held = self.round_tokens * self.model.kv_bytes_per_token / self.kv_ways(wide)
        return held * (wide // narrow - 1) / self.kernels.exchange_bytes_s(wide)

    def _shift(self, split: Split) -> float:
        """Returns the seconds of a round of pages to other replicas of a layout. Each device of a
        replica packs its part of all pages, sends it, and unpacks what it gets."""
        sent = self.round_tokens * self.model.kv_bytes_per_token / self.kv_ways(split.tp)
        packed_s = 4 * sent / self.kernels.chip.memory_bytes_s
        return packed_s + sent / self.kernels.exchange_bytes_s(split.dp * split.tp)

    def _steps(
        self, split: Split, rows: Sequence[int], lengths: Sequence[int], seconds: StepSeconds
    ) -> dict[tuple[Split, int, int], float]:
        """Returns the seconds at each bucket; a larger one never takes less than a smaller one."""
        step = np.array([[seconds(split, n, m) for m in lengths] for n in rows])
        step = np.maximum.accumulate(np.maximum.accumulate(step, axis=0), axis=1)
        sizes = product(rows, lengths)
        return {(split, *at): s for at, s in zip(sizes, step.ravel().tolist(), strict=True)}

    def latency_model(
        self, buckets: Buckets, drafts: Drafts = NO_DRAFTS, draft_model: "Composer | None" = None
    ) -> LatencyModel:
        """Returns the latency model for `buckets`. A draft model is on the same chips."""
        assert drafts.has_model == (draft_model is not None), "who generates drafts"
        splits = tuple(buckets.rows)
        lengths = buckets.lengths
        decode, verify = {}, {}

        def drafted(num_draft_tokens: int, split: Split, rows: int, length: int) -> float:
            """Returns the seconds to verify drafts, with the passes that propose them."""
            proposed = draft_model.asked(rows, length) if draft_model else 0.0
            if drafts.exit_layer:
                proposed = self.early_exit(split, rows, length, drafts.exit_layer)
            verified = self.decode_step(split, rows, length, num_draft_tokens)
            return verified + num_draft_tokens * proposed

        for split, rows in buckets.rows.items():
            decode |= self._steps(split, rows, lengths, self.decode_step)
            for n in drafts.num_draft_tokens:
                verifying = [count for count in rows if n in drafts.of(count)]
                drafting = partial(drafted, n)
                steps = self._steps(split, verifying, lengths, drafting) if verifying else {}
                verify |= {(*at, n): seconds for at, seconds in steps.items()}
        pairs = list(permutations(splits, 2))
        rounds = {(a, b, kind): self.migrate(a, b) for a, b in pairs for kind in ROUNDS}
        rounds |= {(one, one, ROUNDS[0]): self._shift(one) for one in splits if one.dp > 1}
        return LatencyModel(
            decode_table=decode,
            reshard_table={(a, b): self.reshard(a, b) for a, b in pairs},
            migrate_table=rounds,
            prefill_table={(x, n): self.prefill_call(x, n) for x, n in product(splits, lengths)},
            prefill_blocks=self.prefill_blocks,
            page_size=self.page_size,
            round_tokens=self.round_tokens,
            reads=self.reads,
            verify_table=verify,
            drafts_from=drafts.come_from(draft_model and draft_model.model),
            routed=self._routed(buckets),
        )

    def _routed(self, buckets: Buckets) -> tuple[np.ndarray, np.ndarray]:
        """Returns `LatencyModel.routed`: numbers of tokens, and the seconds of all layers'
        experts."""
        num_sparse = self.kinds().get(True, 0)
        split = next(iter(buckets.rows))
        tokens = np.unique(np.geomspace(1, split.dp * buckets.rows[split][-1], 64).round())
        each = [num_sparse and self.experts_ms(n / split.dp, split) for n in tokens]
        return tokens, num_sparse * np.array(each) / 1e3
