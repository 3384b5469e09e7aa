"""Predicts the seconds of an update's programs on a machine that is not here.

Products run at the rate that the chip's kernels reach for this model's products of as many tokens.
Everything else runs at the memory's rate, as elementwise kernels do. Collectives are priced by
`links.py`, on GPUs as NCCL's. Attention runs at a share of the peak.

Assumed: these shares (`ATTENTION`); that gradients multiply as fast as the forward pass; that on a
GPU nothing overlaps with sending, and on a TPU as much as in `links.added`. The time of the host to
launch programs and to pack rows is left out.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Self

from pat_jax.layout.exchange import LINK_SHARE
from pat_jax.profiling.predict.composer import ONE, Composer
from pat_jax.profiling.predict.links import HostLinks, TorusLinks, added
from pat_jax.profiling.predict.model_sizes import active_weights
from pat_jax.profiling.predict.update_work import Collective, Work

# Share of the peak that kernels of training attention reach. Those of GPUs are built like
# FlashAttention-2, which reaches 50 to 73 % on an A100 (Dao 2023, https://arxiv.org/abs/2307.08691)
# and 35 % on an H100 (Shah et al. 2024, https://arxiv.org/abs/2407.08608). An H200 and a B200 are
# assumed to be like an H100, an A40 like an A100. The shares of TPUs are assumed.
ATTENTION: Mapping[str, float] = {
    **dict.fromkeys(("a100", "a100-40gb", "a40"), 0.5),
    **dict.fromkeys(("h100", "h200", "b200"), 0.35),
    **dict.fromkeys(("v5e", "v5p", "v6e"), 0.4),
}


@dataclass(frozen=True)
class Seconds:
    """Seconds of a program, by the kind of work that takes them."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0  # what is not a product: norms, logits, casts, the optimizer
    links: float = 0.0  # what collectives add to the times above
    host: float = 0.0  # to copy moments or models from the host's memory and back

    @property
    def total(self) -> float:
        return sum(astuple(self))

    def __add__(self, other: Self) -> "Seconds":
        return Seconds(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, factor: float) -> "Seconds":
        return Seconds(*(factor * x for x in astuple(self)))


@dataclass(frozen=True)
class UpdateTimes:
    """Predicts seconds of an update's programs, for one model on one target."""

    composer: Composer  # with kernels of bfloat16 weights, and sums by NCCL

    @property
    def links(self) -> HostLinks | TorusLinks:
        return self.composer.kernels.links

    def seconds(self, work: Work, tokens: int = 1) -> Seconds:
        """Returns the seconds of `work`, whose products are over `tokens` tokens of a device."""
        kernels = self.composer.kernels
        products = work.flops / self.rate(tokens) if work.flops else 0.0
        attention = max(
            work.attention_flops / (ATTENTION[kernels.chip.name] * kernels.chip.flops_s),
            self._moved_s(work.attention_bytes),
        )
        memory = self._moved_s(work.num_bytes)
        sent = sum(each.count * self.sent_s(each) for each in work.sent)
        links = added(kernels.chip, sent, products + attention + memory) if sent else 0.0
        # Copies come before and after the program.
        host = work.host_bytes / kernels.chip.pcie_bytes_s
        return Seconds(products, attention, memory, links, host)

    def rate(self, tokens: int) -> float:
        """Returns the operations per second of the layers' products over `tokens` tokens."""
        flops = 2 * tokens * active_weights(self.composer.model)
        spent_ms = sum(
            count * self.composer.products_ms(tokens, ONE, is_sparse=is_sparse)
            for is_sparse, count in self.composer.kinds().items()
        )
        return 1e3 * flops / spent_ms

    def sent_s(self, one: Collective) -> float:
        """Returns the seconds of one collective. A reduce-scatter takes as long as a gather of its
        input."""
        if one.group == 1:
            return 0.0
        match one.kind:
            case "all-reduce":
                return self.links.all_reduce_s(one.group, one.num_bytes, one.hosts)
            case "all-gather":
                return self.links.all_gather_s(one.group, one.num_bytes, one.hosts)
            case "reduce-scatter":
                return self.links.all_gather_s(one.group, one.num_bytes * one.group, one.hosts)
            case "ragged-all-to-all":
                share = LINK_SHARE[self.composer.kernels.chip.platform]
                return one.num_bytes / (share * self.links.exchange_bytes_s(one.group))
        return one.num_bytes / self.links.exchange_bytes_s(one.group)

    def _moved_s(self, num_bytes: float) -> float:
        return self.composer.kernels.elementwise(num_bytes) / 1e3 if num_bytes else 0.0
