"""`python -m pat_jax.simulate`: replays what-if questions on a measured machine.

    python -m pat_jax.simulate --profile P --lengths L --responses 512,2048 --link_slowdown 1,4

The planner that ships runs on a simulated clock whose durations are those of a profile, with response
lengths from a file or a built-in distribution, against every layout for good. Nothing runs on a
device. Options that take several values, separated by commas, are combined in every way.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pat_jax.common.devices import configure
from pat_jax.common.errors import UserError
from pat_jax.common.files import replace_text
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
    check_context,
    positive,
    require,
)
from pat_jax.common.text_table import percent, text_table
from pat_jax.config.command_line import parse, run_command
from pat_jax.planning.latency.profile import Profile, read_profile
from pat_jax.profiling.capacity.what_if import (
    WhatIf,
    machine_of,
    model_of,
    profile_words,
    unmeasured,
)
from pat_jax.profiling.simulate.comparison import Comparison, Series, compare
from pat_jax.profiling.simulate.length_files import find_lengths
from pat_jax.profiling.simulate.response_lengths import CORRELATION, Draw, ResponseLengths

MOST_GROWTH = 20  # of a logarithm, over all rollouts
WHOLE, NUMBER = r"[1-9]\d{0,9}", r"\d{1,9}(\.\d{1,20})?"


def listed(pattern: str, most: int, what: str) -> Rule:
    """Of a text: numbers of that form, none of them above `most`."""
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

        python -m pat_jax.simulate --profile FILE --responses 512,2048 --link_slowdown 1,4
    """

    profile: str = "profile.json"
    """A file of `python -m pat_jax.profile`: what each step and switch takes."""
    lengths: str = "reasoning"
    """Response lengths: a .csv, .json or .jsonl file, or reasoning, pat, math or short."""
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
    """Of the normal scores of two responses to one prompt; 0 makes them strangers."""
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

    def __post_init__(self):
        check(self, "profile lengths", GIVEN)
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


@dataclass(frozen=True)
class Answer:
    """What came of one question."""

    what_if: WhatIf
    comparison: Comparison
    unmeasured: str  # loads that no run was measured at

    def to_json(self) -> dict[str, Any]:
        return {
            "what_if": asdict(self.what_if),
            "unmeasured": self.unmeasured,
            **self.comparison.to_json(),
        }


def main() -> None:
    config = parse(
        sys.argv[1:],
        SimulateConfig,
        prog="python -m pat_jax.simulate",
        presets=None,
    )
    lengths, profile = find_lengths(config.lengths), read_profile(Path(config.profile))
    for _, cap, *_ in config.cases():
        asked = {
            "prompt_tokens": longest_prompt(config, lengths),
            "max_completion_length": cap,
        }
        check_context(asked, model_of(profile).max_position, config.profile)
    configure(0)
    answers = [answer(config, profile, lengths, *case) for case in config.cases()]
    print(tables(config, profile, lengths, answers))
    if config.out:
        write(Path(config.out), content(config, profile, lengths, answers))


def answer(
    config: SimulateConfig,
    profile: Profile,
    lengths: ResponseLengths,
    responses: int,
    cap: int,
    link_slowdown: float,
    host_us: float,
) -> Answer:
    draw = Draw(
        responses,
        cap,
        config.num_generations,
        config.correlation,
        config.length_scale,
        config.prompt_tokens,
        config.seed,
    )
    series = Series(draw, config.rollouts, config.growth)
    what_if = WhatIf(
        responses,
        cap,
        longest_prompt(config, lengths),
        link_slowdown,
        host_us,
        config.device_memory_gib,
        config.burst_steps,
        config.check_every,
    )
    machine = machine_of(profile, what_if)
    return Answer(what_if, compare(machine, lengths, series), unmeasured(profile, machine))


def longest_prompt(config: SimulateConfig, lengths: ResponseLengths) -> int:
    return config.prompt_tokens if lengths.prompts is None else int(lengths.prompts.max())


def tables(
    config: SimulateConfig, profile: Profile, lengths: ResponseLengths, answers: Sequence[Answer]
) -> str:
    parts = [
        f"costs: {profile_words(Path(config.profile), profile)}\n"
        f"lengths: {lengths.source}\n"
        "replayed: the planner that ships, on a simulated clock",
        _gains(answers),
        *(_rollouts(one) for one in answers if config.rollouts > 1),
    ]
    parts += dict.fromkeys(
        f"extrapolated, for nothing like it was measured: {one.unmeasured}"
        for one in answers
        if one.unmeasured
    )
    return "\n\n".join(parts)


def _gains(answers: Sequence[Answer]) -> str:
    """One line for each question: seconds of a rollout, and what adapting saves."""
    names = dict.fromkeys(system.name for one in answers for system in one.comparison.static)
    header = ["what if", "adaptive s", *(f"{name} s" for name in names)]
    header += ["saved of the best", "switches", "after the first", "preempted"]
    rows = []
    for one in answers:
        found = one.comparison
        static = {system.name: system.mean_s for system in found.static}
        rows.append(
            [
                str(one.what_if),
                found.adaptive.mean_s,
                *(static.get(name) for name in names),
                f"{percent(found.gain(found.best_static))} ({found.best_static.name})",
                sum(len(trace.switches) for trace in found.traces),
                percent(found.share_after_switch),
                sum(found.adaptive.num_preempted),
            ]
        )
    return text_table(header, rows)


def _rollouts(one: Answer) -> str:
    found = one.comparison
    header = ["rollout", "tokens", "adaptive s", *(f"{system.name} s" for system in found.static)]
    rows = [
        [i, tokens, found.adaptive.total_s[i], *(system.total_s[i] for system in found.static)]
        for i, tokens in enumerate(found.tokens)
    ]
    return f"{one.what_if}\n{text_table(header, rows)}"


def content(
    config: SimulateConfig, profile: Profile, lengths: ResponseLengths, answers: Sequence[Answer]
) -> dict[str, Any]:
    return {
        "command": "python -m pat_jax.simulate",
        "options": asdict(config),
        "costs": {
            "source": "profile",
            "explained": profile_words(Path(config.profile), profile),
            "subject": asdict(profile.subject),
        },
        "lengths": {"source": lengths.source},
        "answers": [one.to_json() for one in answers],
    }


def write(path: Path, found: dict[str, Any]) -> None:
    """
    Raises:
      UserError: no file can be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise UserError(
            f"option --out is {str(path)!r}: cannot be written ({error.strerror}); name another file."
        ) from None


if __name__ == "__main__":
    run_command(main)
