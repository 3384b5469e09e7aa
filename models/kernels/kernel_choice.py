"""What is computed by kernels written in Pallas and what by plain operations, in one value.

It goes with the devices' layouts to the model. Does not know why a kernel is left out.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

Way = Literal["pallas", "plain"]

PALLAS, PLAIN = "pallas", "plain"
# What `jax.Device.platform` and, of GPUs of NVIDIA, lowering say of devices that kernels are written for.
ACCELERATORS = ("gpu", "cuda", "tpu")
OVER_PAGES = ("decode", "prefill", "verify")
NAMES = (*OVER_PAGES, "rows", "experts")


@dataclass(frozen=True)
class Kernels:
    """By whom attention and experts are computed on the devices of a platform.

    On a CPU "pallas" is the GPU's kernel, interpreted: that is for tests.
    """

    platform: str  # as `jax.Device.platform` has it; empty: any
    decode: Way = PLAIN  # a query of each row, over pages
    prefill: Way = PLAIN  # blocks of queries, over pages
    verify: Way = PLAIN  # drafts, which may branch, over pages
    rows: Way = PLAIN  # whole rows of sequences, forward and backward
    experts: Way = PLAIN  # the MLPs of experts, forward and backward

    @classmethod
    def of(cls, platform: str) -> "Kernels":
        """What devices of that platform compute with unless a kernel fails there."""
        return cls(platform).having(NAMES) if platform in ACCELERATORS else cls(platform)

    def having(self, names: Collection[str]) -> "Kernels":
        return replace(self, **dict.fromkeys(names, PALLAS))

    def without(self, names: Collection[str]) -> "Kernels":
        return replace(self, **dict.fromkeys(names, PLAIN))

    def way(self, name: str) -> Way:
        return getattr(self, name)

    @property
    def chosen(self) -> tuple[str, ...]:
        """What kernels compute."""
        return tuple(name for name in NAMES if self.way(name) == PALLAS)

    @property
    def reads_pages(self) -> bool:
        """Whether some kernel reads the pages where they lie."""
        return not set(OVER_PAGES).isdisjoint(self.chosen)


ANYWHERE = Kernels("")  # plain operations alone
