"""Predicts milliseconds of a model's layers on one device of a replica, and of their collectives.

In a layer of experts a device gathers the rows of all replicas, computes its own experts for those,
and scatters the sums: see `docs/models.md`. Rows and sums have the width of an expert's input.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial

from pat_jax.engine.device.decode.gumbel import has_whole_blocks
from pat_jax.models.config import ModelConfig
from pat_jax.planning.types import Split
from pat_jax.profiling.predict.kernel_model import BYTES, ModelledKernels
from pat_jax.profiling.predict.links import added, waiting_s
from pat_jax.profiling.predict.model_sizes import num_dense, passes, widths_of

LOGIT_BYTES = 4  # bytes of a logit, in float32
ROUTE_BYTES = 8  # of a token and each of its experts: a number and a weight, four bytes each


@dataclass(frozen=True)
class LayerTimes:
    """Predicts the times of one model's layers, by a chip's kernels and links."""

    kernels: ModelledKernels
    model: ModelConfig
    # By TP degree, the number of parts of the KV heads, if it is not the greatest common divisor of
    # heads and TP. The other devices of a replica have copies.
    divided: Mapping[int, int] = field(default_factory=dict)
    # Number of parts of the experts; 0: the greatest common divisor of experts and devices.
    expert_ways: int = 0
    expert_width: int = 1  # number of parts of each expert's width

    def kv_ways(self, tp: int) -> int:
        """Returns the number of parts into which a replica divides the KV heads."""
        return self.divided.get(tp) or math.gcd(tp, self.model.num_kv_heads)

    def kinds(self, layers: int | None = None) -> dict[bool, int]:
        """Returns the number of layers with experts (True) and without (False) among the first
        `layers`, by default all. A kind without layers is left out."""
        layers = layers or self.model.num_layers
        dense = num_dense(self.model, layers)
        return {kind: n for kind, n in ((True, layers - dense), (False, dense)) if n}

    def expert_split(self, split: Split) -> Split:
        """Returns over how many replicas, and devices of each, experts are divided."""
        assert self.model.experts is not None
        devices = split.dp * split.tp // self.expert_width
        ways = self.expert_ways or math.gcd(devices, self.model.experts.num_experts)
        ways *= self.expert_width
        over_tp = math.gcd(split.tp, ways)
        return Split(ways // over_tp, over_tp)

    def experts_ms(self, tokens: float, split: Split) -> float:
        """Returns the milliseconds of one layer's experts on the device that reads most of them,
        for `tokens` of each replica on average."""
        model = self.model
        experts = self.model.experts
        over = self.expert_split(split)
        assert experts is not None
        ways = over.dp * over.tp // self.expert_width
        met = max(1, tokens * over.dp)
        chosen = 1 - (1 - experts.num_experts_per_tok / experts.num_experts) ** met
        active = most_active(experts.num_experts // ways, ways, chosen)
        rows = max(active, met * experts.num_experts_per_tok / ways)
        grouped = partial(self.kernels.grouped, rows, active)
        units = experts.expert_dim // self.expert_width
        width = model.expert_embed_dim
        return grouped(2 * units, width) + grouped(width, units)

    def products_ms(self, tokens: int, split: Split, *, is_sparse: bool = False) -> float:
        """Returns milliseconds of a layer's products on a device, for `tokens` of each replica."""
        model = self.model
        gemm = self.kernels.gemm
        tp = split.tp
        attention = gemm(tokens, sum(widths_of(model, tp, self.kv_ways(tp))), model.embed_dim)
        attention += gemm(tokens, model.embed_dim, model.padded_num_heads * model.head_dim // tp)
        if is_sparse:
            assert model.experts is not None
            router = self.kernels.head(tokens, model.experts.num_experts, model.embed_dim)
            shared = 0.0
            if latent := model.experts.latent_dim:
                shared = gemm(tokens, latent, model.embed_dim)
                shared += gemm(tokens, model.embed_dim, latent)
            return attention + router + shared + self.experts_ms(tokens, split)
        return (
            attention
            + gemm(tokens, 2 * model.mlp_dim // tp, model.embed_dim)
            + gemm(tokens, model.embed_dim, model.mlp_dim // tp)
        )

    def _layers_ms(self, tokens: int, split: Split, layers: int | None = None) -> float:
        """Returns milliseconds of all layers' products and elementwise kernels on one device."""
        total = 0.0
        for is_sparse, count in self.kinds(layers).items():
            kv_ways = self.kv_ways(split.tp)
            moved = passes(self.model, tokens, split.tp, kv_ways, is_sparse=is_sparse)
            layer = self.products_ms(tokens, split, is_sparse=is_sparse)
            total += count * (layer + sum(map(self.kernels.elementwise, moved)))
        return total

    def _sum_ms(self, numbers: int, devices: int) -> float:
        if devices == 1:
            return 0.0
        waiting_ms = 1e3 * waiting_s(self.kernels.chip, devices)
        return self.kernels.all_reduce(devices, numbers) + waiting_ms

    def layer_links_ms(self, tokens: int, split: Split, *, is_sparse: bool = False) -> float:
        """Returns the milliseconds of one layer's collectives for `tokens` of each replica: a sum
        after attention and one after the MLP. In a layer of experts the latter is a gather of rows
        and routes and a scatter over the replicas, and a sum."""
        of_attention = self._sum_ms(tokens * self.model.embed_dim, split.tp)
        if not is_sparse:
            return 2 * of_attention
        assert self.model.experts is not None
        over = self.expert_split(split)
        width = self.model.expert_embed_dim
        exchanged = 0.0
        if over.dp > 1:
            rows = tokens * over.dp
            routes = ROUTE_BYTES * self.model.experts.num_experts_per_tok // BYTES
            exchanged = self.kernels.all_gather(over.dp, rows * (width + routes))
            exchanged += self.kernels.all_gather(over.dp, rows * width)  # a scatter takes as long
            exchanged += 2e3 * waiting_s(self.kernels.chip, over.dp)
        return of_attention + exchanged + self._sum_ms(tokens * width, over.tp)

    def sampled_logits(self, tp: int) -> int:
        """Returns the number of logits from which a device samples each token: those of its shard,
        or all if shards split blocks of tokens."""
        vocab = self.model.padded_vocab_size
        return vocab // tp if has_whole_blocks(vocab // tp, tp) else vocab

    def decode_links_s(self, tokens: int, split: Split, layers: int | None = None) -> float:
        """Returns the seconds that links add to a step with `tokens` of each replica: in the first
        `layers`, by default all, for the sum of embeddings and for sampling."""
        chip = self.kernels.chip
        seconds = 0.0
        for is_sparse, count in self.kinds(layers).items():
            sent = self.layer_links_ms(tokens, split, is_sparse=is_sparse)
            if sent:
                beside = self.products_ms(tokens, split, is_sparse=is_sparse)
                seconds += count * added(chip, sent, beside) / 1e3
        if split.tp == 1:
            return seconds
        vocab = self.model.padded_vocab_size
        # Of each shard the largest logit, then four numbers of its candidate; or all logits.
        is_whole = self.sampled_logits(split.tp) == vocab
        gathered = (vocab,) if is_whole else (split.tp, 4 * split.tp)
        gathers = (
            self.kernels.all_gather(split.tp, tokens * n * LOGIT_BYTES // BYTES) for n in gathered
        )
        of_embedding = self._sum_ms(tokens * self.model.embed_dim, split.tp)
        return seconds + (of_embedding + sum(gathers)) / 1e3


@lru_cache(maxsize=4096)
def most_active(here: int, ways: int, chosen: float) -> float:
    """Returns the expected number of experts that the device with most of them reads.

    Args:
      here: experts of a device.
      ways: number of devices with different experts.
      chosen: probability that some token chooses an expert, independent of the others.
    """
    at_most = []
    below = 0.0
    for n in range(here):
        below += math.comb(here, n) * chosen**n * (1 - chosen) ** (here - n)
        at_most.append(min(1.0, below))
    return sum(1 - share**ways for share in at_most)
