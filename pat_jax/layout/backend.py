"""How the rollout loop and its programs behave on a kind of device, in one value."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Backend:
    # Bursts are dispatched before the results of the one before are known. On CPU the host's work takes
    # the devices' own cores.
    runs_ahead: bool
    # A program that communicates has to be over before the next one is dispatched. XLA's CPU devices
    # share one pool of threads and start programs in any order: with two in flight that communicate,
    # each device may wait in another one, for ever.
    waits: bool
    # Weights are gathered in the host's memory when TP falls. XLA:CPU compiles an all-gather to slow
    # loops (seen: six times the processor time of copies on the host); devices with memories and links
    # of their own run a program.
    gathers_on_host: bool
    # What a burst decodes with: pages where a kernel reads them, or a copy of them in one piece.
    cache: Literal["pages", "copy"]

    @classmethod
    def of(
        cls, platform: str, *, spans_processes: bool = False, reads_pages: bool = False
    ) -> "Backend":
        """Returns the behavior for a platform.

        Args:
          platform: the value of `jax.Device.platform`.
          spans_processes: no host has all of the devices' memory.
          reads_pages: an attention kernel reads pages. Without one, accelerators gather the pages.
        """
        is_cpu = platform == "cpu"
        return cls(
            runs_ahead=not is_cpu,
            waits=is_cpu,
            gathers_on_host=is_cpu and not spans_processes,
            cache="copy" if is_cpu and not reads_pages else "pages",
        )
