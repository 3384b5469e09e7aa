"""Options of `python -m pat_jax.simulate`."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from pat_jax.common.rules import (
    GIVEN,
    MEMORY_GIB,
    MOST_REPLAYED,
    RESPONSES,
    ROLLOUTS,
    SEED,
    TOKENS,
    Rule,
    check,
    positive,
    require,
)
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.planning.drafts import PRIOR_SAID
from pat_jax.profiling.capacity.plan_config import check_draft_acceptance
from pat_jax.profiling.simulate.draw import CORRELATION

MOST_GROWTH = 20  # of a logarithm, over all rollouts
WHOLE, NUMBER = r"[1-9]\d{0,9}", r"\d{1,9}(\.\d{1,20})?"


def listed(pattern: str, most: int, what: str) -> Rule:
    """The rule of a text that lists numbers of the form `pattern`, none of them above `most`."""
    form = re.compile(rf"{pattern}(,{pattern})*")
    expected = f"{what} up to {most:,}, separated by commas"
    return (
        lambda x: bool(form.fullmatch(x)) and max(map(float, x.split(","))) <= most,
        expected,
    )


@dataclass(frozen=True)
class SimulateConfig:
    """Replays rollouts of a measured machine: other batches, caps and links. Options that take several
    values, separated by commas, are combined in every way.

        python -m pat_jax.simulate --profile examples/profile.json --responses 64,128 \\
            --prompt_tokens 60 --max_completion_length 132 --link_slowdown 1,4
    """

    profile: str = "profile.json"
    """A file of `python -m pat_jax.profile`: what each step and switch takes."""
    lengths: str = ""
    """Response lengths: a .csv, .json or .jsonl file, or reasoning, pat, math or short; empty takes those of
    --responses_file, or reasoning."""
    responses_file: str = ""
    """Recorded responses as token ids, several to a prompt, a .jsonl, .json or .parquet file such as python -m
    pat_jax.generate writes: what drafts are worth is counted in them; empty takes what is built in."""
    draft_acceptance: float = PRIOR_SAID
    """How likely a token of a draft is right where those before it are, of drafts that a model says
    (--speculation.source model:DIR or early_exit:LAYER); those that are copied are counted."""
    responses: str = "1024"
    """Responses of one rollout; several, separated by commas, are each replayed."""
    max_completion_length: str = "24576"
    """The cap in tokens at which a response is cut; several, separated by commas."""
    link_slowdown: str = "1"
    """Times that sums over devices and moves between them take longer; several, by commas."""
    host_us: str = "0"
    """Microseconds of the host in each decode step for each live sequence, beside what was measured;
    several, by commas."""
    device_memory_gib: float = 0.0
    """Memory of a device: the KV cache takes what the weights leave, and sequences without pages wait
    or are preempted; 0 lets every sequence have its pages."""
    num_generations: int = 8
    """Responses to one prompt, whose lengths are alike."""
    correlation: float = CORRELATION
    """Correlation of the normal scores of two responses to one prompt; 0 makes them strangers."""
    prompt_tokens: int = 256
    """Length of every prompt, where the file of lengths has none."""
    length_scale: float = 1.0
    """Times that responses are longer than the file or the distribution says."""
    rollouts: int = 1
    """Rollouts that follow one another; the planner learns from each."""
    growth: float = 0.0
    """By which the logarithm of response lengths grows from one rollout to the next; 0.02 doubles
    them in 35."""
    burst_steps: int = 256
    """Most decode steps of one burst, after which the planner looks again."""
    check_every: int = 16
    """Decode steps between two tests of the stop condition on the device."""
    seed: int = 0
    """Seed of the rollouts drawn."""
    out: str = ""
    """A JSON file for all that was found; empty writes none."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self):
        check(self, "profile", GIVEN)
        check(self, "responses", listed(WHOLE, MOST_REPLAYED, "whole numbers from 1"))
        check(self, "max_completion_length", listed(WHOLE, 2**24, "whole numbers from 1"))
        check(self, "link_slowdown host_us", listed(NUMBER, 10**6, "numbers"))
        check(self, "num_generations", RESPONSES)
        check(self, "prompt_tokens burst_steps check_every", TOKENS)
        check(self, "rollouts", ROLLOUTS)
        growth = abs(self.growth) * self.rollouts <= MOST_GROWTH
        expected = f"a number whose --rollouts ({self.rollouts}) come to at most {MOST_GROWTH}"
        require(growth, "growth", self.growth, expected)
        check(self, "correlation", (lambda x: 0 <= x < 1, "a number in [0, 1)"))
        check(self, "length_scale", positive(1000))
        check(self, "device_memory_gib", MEMORY_GIB)
        check(self, "seed", SEED)
        check_draft_acceptance(self.draft_acceptance, self.speculation)

    def cases(self) -> Iterator[tuple[int, int, float, float]]:
        """(responses, cap, link slowdown, host microseconds) of each question."""

        def values(text: str, kind: Callable[[str], Any]) -> list[Any]:
            return [kind(value) for value in text.split(",")]

        return product(
            values(self.responses, int),
            values(self.max_completion_length, int),
            values(self.link_slowdown, float),
            values(self.host_us, float),
        )
