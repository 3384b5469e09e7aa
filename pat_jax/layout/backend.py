"""How the rollout loop and its programs behave on a kind of device, in one value."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Backend:
    # Whether a burst is dispatched before the results of the previous one are known. On a CPU, the
    # host's work takes the devices' own cores.
    runs_ahead: bool
    # Whether a program that communicates must end before the next one is dispatched. XLA's CPU
    # devices share one pool of threads and start programs in any order: with two communicating
    # programs in flight, each device may wait in a different one, for ever.
    waits: bool
    # Whether a switch to lower TP gathers weights in the host's memory. XLA:CPU compiles an
    # all-gather to slow loops (seen: six times the processor time of copies on the host). Devices
    # with memories and links of their own run a program.
    gathers_on_host: bool
    # What a burst attends to: the pages in place, or a contiguous copy of them.
    cache: Literal["pages", "copy"]

    @classmethod
    def of(
        cls, platform: str, *, spans_processes: bool = False, reads_pages: bool = False
    ) -> "Backend":
        """Returns the behavior for a platform.

        Args:
          platform: the value of `jax.Device.platform`.
          spans_processes: whether the devices belong to several processes.
          reads_pages: whether an attention kernel reads pages; if not, accelerators gather them.
        """
        is_cpu = platform == "cpu"
        return cls(
            runs_ahead=not is_cpu,
            waits=is_cpu,
            gathers_on_host=is_cpu and not spans_processes,
            cache="copy" if is_cpu and not reads_pages else "pages",
        )
