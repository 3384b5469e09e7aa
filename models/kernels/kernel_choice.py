"""Which computations use Pallas kernels, and which plain operations (`Kernels`).

A layout gives this value to the model. Does not know why a kernel is left out.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

Way = Literal["pallas", "plain"]

PALLAS = "pallas"
PLAIN = "plain"
# Names of the platforms that have kernels, by `jax.Device.platform` and, for "cuda", by lowering.
ACCELERATORS = ("gpu", "cuda", "tpu")
OVER_PAGES = ("decode", "prefill", "verify")
NAMES = (*OVER_PAGES, "rows", "experts")


@dataclass(frozen=True)
class Kernels:
    """How attention and experts are computed on the devices of a platform.

    On a CPU, "pallas" is the GPU's kernel in Pallas's interpreter, for tests.
    """

    platform: str  # as in `jax.Device.platform`, or empty for any platform
    decode: Way = PLAIN  # attention of one query per row to pages
    prefill: Way = PLAIN  # attention of blocks of queries to pages
    verify: Way = PLAIN  # attention of drafts, which may branch, to pages
    rows: Way = PLAIN  # attention in whole rows without a cache, forward and backward
    experts: Way = PLAIN  # the MLPs of experts, forward and backward

    @classmethod
    def of(cls, platform: str) -> "Kernels":
        """Returns a platform's default: all its kernels, or plain operations if it has none."""
        return cls(platform).having(NAMES) if platform in ACCELERATORS else cls(platform)

    def having(self, names: Collection[str]) -> "Kernels":
        return replace(self, **dict.fromkeys(names, PALLAS))

    def without(self, names: Collection[str]) -> "Kernels":
        return replace(self, **dict.fromkeys(names, PLAIN))

    def way(self, name: str) -> Way:
        return getattr(self, name)

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of the operations that Pallas kernels compute."""
        return tuple(name for name in NAMES if self.way(name) == PALLAS)

    @property
    def adds_parts(self) -> bool:
        """Whether a kernel adds the parts of the projections of tokens that are decoded."""
        return self.decode == PALLAS and self.platform != "tpu"

    @property
    def reads_pages(self) -> bool:
        """Whether some kernel reads pages in place."""
        return not set(OVER_PAGES).isdisjoint(self.chosen)


ANYWHERE = Kernels("")  # plain operations alone
