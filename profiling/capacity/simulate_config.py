"""Options of `python -m pat_jax.simulate`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from pat_jax.common.options.declared import option
from pat_jax.common.rules import GIVEN, MEMORY_GIB, MOST_REPLAYED, RESPONSES, ROLLOUTS, TOKENS, Rule
from pat_jax.profiling.capacity.replay_options import ReplayOptions

WHOLE = r"[1-9]\d{0,9}"
NUMBER = r"\d{1,9}(\.\d{1,20})?"


def listed(pattern: str, most: int, what: str) -> Rule:
    """Returns the rule for a text that lists numbers of the form `pattern`, each at most `most`."""
    form = re.compile(rf"{pattern}(,{pattern})*")
    expected = f"{what} up to {most:,}, separated by commas"
    return (lambda x: bool(form.fullmatch(x)) and max(map(float, x.split(","))) <= most, expected)


@dataclass(frozen=True)
class SimulateConfig(ReplayOptions):
    """Replays rollouts on a machine that was measured, with other batches, length limits and host
    times. Options that take several values, separated by commas, are combined in every way.

        python -m pat_jax.simulate --profile profile.json --responses 512,2048 \\
            --lengths math --host_us 0,20
    """

    profile: str = option("profile.json", GIVEN)
    """A file of `python -m pat_jax.profile`, which has the time of each step and switch."""
    responses: str = option("1024", listed(WHOLE, MOST_REPLAYED, "whole numbers from 1"))
    """Number of responses in one rollout; one number, or several separated by commas, each of which
    is replayed."""
    max_completion_length: str = option("24576", listed(WHOLE, 2**24, "whole numbers from 1"))
    """Maximum response length in tokens, at which a response is cut; one or several, separated by
    commas."""
    num_generations: int = option(8, RESPONSES)
    """Number of responses to each prompt; their lengths are correlated."""
    host_us: str = option("0", listed(NUMBER, 10**6, "numbers"))
    """Microseconds that the host takes in each decode step for each running sequence, in addition
    to what was measured; one or several, separated by commas."""
    device_memory_gib: float = option(0.0, MEMORY_GIB)
    """Memory of one device in GiB. The KV cache takes what the weights leave, and sequences without
    pages wait or are preempted. With 0, there are enough pages for every sequence."""
    rollouts: int = option(1, ROLLOUTS)
    """Number of rollouts that follow one another; the planner learns from each."""
    burst_steps: int = option(256, TOKENS)
    """Maximum number of decode steps in one burst. After each burst the planner plans again."""
    check_every: int = option(16, TOKENS)
    """Decode steps between two checks, on the device, of whether a burst should end early."""
    out: str = ""
    """JSON file for all results. If it is empty, none is written."""

    def cases(self) -> Iterator[tuple[int, int, float]]:
        """Yields (responses, cap, host microseconds) of each combination to replay."""
        return product(
            map(int, self.responses.split(",")),
            map(int, self.max_completion_length.split(",")),
            map(float, self.host_us.split(",")),
        )
