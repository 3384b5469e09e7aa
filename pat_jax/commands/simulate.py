"""The command `simulate`: replays rollouts on a measured machine."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pat_jax.common.devices import configure
from pat_jax.common.errors import UserError, shown
from pat_jax.common.files import replace_text
from pat_jax.common.html.figure import Figure
from pat_jax.common.rules import check_context
from pat_jax.common.text_table import Cell, percent, text_table
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.engine.record.plot import draw_rollout
from pat_jax.engine.sizing.draft_choice import drafter_of, shape_of
from pat_jax.planning.latency.profile import Profile, read_profile
from pat_jax.profiling.capacity.costs import measured_drafts
from pat_jax.profiling.capacity.simulate_config import SimulateConfig
from pat_jax.profiling.capacity.what_if import (
    NO_SPECULATION,
    WhatIf,
    machine_of,
    model_of,
    profile_words,
    unmeasured,
)
from pat_jax.profiling.simulate.comparison import Comparison, Series, compare
from pat_jax.profiling.simulate.draft_sources import DraftSource
from pat_jax.profiling.simulate.length_files import find_lengths
from pat_jax.profiling.simulate.response_lengths import ResponseLengths

# Columns about drafts.
DRAFT_HEADER = ("with drafts s", "tokens a step", "the best static takes")


@dataclass(frozen=True)
class Answer:
    """The answer to one what-if question."""

    what_if: WhatIf
    comparison: Comparison
    unmeasured: str  # a text on replayed loads beyond the measured ones; empty: none

    def to_json(self) -> dict[str, Any]:
        return {
            "what_if": asdict(self.what_if),
            "unmeasured": self.unmeasured,
            **self.comparison.to_json(),
        }


@dataclass(frozen=True)
class Simulated:
    """The answers to all what-if questions about one machine and set of response lengths."""

    config: SimulateConfig
    profile: Profile
    lengths: ResponseLengths
    answers: Sequence[Answer]
    told: Sequence[str] = ()  # sentences for the user about drafts

    def plot(self, number: int = 0) -> Figure:
        """Draws an answer's first adaptive rollout: running sequences over time, and the layout.
        Raises UserError if there is no answer of this `number`."""
        if number not in range(len(self.answers)):
            raise UserError(
                f"number is {shown(number)}: expected that of an answer, from 0 to {len(self.answers) - 1}."
            )
        return draw_rollout(self.answers[number].comparison.traces[0])

    def __repr__(self) -> str:
        parts = [
            f"costs: {self.costs}\n"
            f"lengths: {self.lengths.source}\n"
            "replayed: the planner that ships, on a simulated clock",
            _gains(self.answers),
            *(_rollouts(one) for one in self.answers if self.config.rollouts > 1),
        ]
        parts += dict.fromkeys(
            f"extrapolated, for nothing like it was measured: {one.unmeasured}"
            for one in self.answers
            if one.unmeasured
        )
        return "\n\n".join([*parts, *self.told])

    @property
    def costs(self) -> str:
        """A text on the source of the replay's step and switch times."""
        return profile_words(Path(self.config.profile), self.profile)

    def to_json(self) -> dict[str, Any]:
        return {
            "command": "python -m pat_jax.simulate",
            "options": asdict(self.config),
            "costs": {
                "source": "profile",
                "explained": self.costs,
                "subject": asdict(self.profile.subject),
            },
            "lengths": {"source": self.lengths.source},
            "answers": [one.to_json() for one in self.answers],
            "drafts": self.told,
        }


def simulated(config: SimulateConfig) -> Simulated:
    profile = read_profile(Path(config.profile))
    model = model_of(profile)
    lengths = find_lengths(config.lengths)
    for _, cap, *_ in config.cases():
        asked = {"prompt_tokens": longest_prompt(config, lengths), "max_completion_length": cap}
        check_context(asked, model.max_position, config.profile)
    configure(0)
    longest = longest_prompt(config, lengths) + max(cap for _, cap, *_ in config.cases())
    drafter, source, told = _drafts(config, profile, longest)
    answers = [
        answer(config, profile, lengths, drafter, source, responses, cap, host_us)
        for responses, cap, host_us in config.cases()
    ]
    found = Simulated(config, profile, lengths, answers, told)
    if config.out:
        write(Path(config.out), found.to_json())
    return found


def _drafts(
    config: SimulateConfig, profile: Profile, longest: int
) -> tuple[Drafter, DraftSource | None, tuple[str, ...]]:
    """Returns a drafter whose drafts the profile has times of, their source, and notes for users.
    Raises UserError if the profile lacks times for the source that was asked for."""
    asked = config.speculation
    backend = profile.subject.backend
    wanted = drafter_of(asked, model_of(profile), backend, longest, shape_of)
    drafts, told = measured_drafts(wanted, profile.latency)
    if asked.source not in ("auto", "none") and not drafts.num_draft_tokens:
        raise UserError(
            f"option --speculation.source is {asked.source!r}: the profile {config.profile} has no steps that "
            f"verify drafts of --speculation.num_draft_tokens ({' '.join(map(str, asked.num_draft_tokens))}) from {wanted.come_from}; "
            f"measure them with python -m pat_jax.profile --speculation.source {asked.source}, or leave the "
            "option out."
        )
    source = config.draft_source(drafts, config.num_generations)
    told = (*told, *(source.words(drafts.most) if source else ()))
    return replace(wanted, drafts=drafts), source, told


def answer(
    config: SimulateConfig,
    profile: Profile,
    lengths: ResponseLengths,
    drafter: Drafter,
    source: DraftSource | None,
    responses: int,
    cap: int,
    host_us: float,
) -> Answer:
    draw = config.draw(responses, cap, config.num_generations)
    series = Series(draw, config.rollouts)
    numbers = drafter.drafts.num_draft_tokens
    what_if = WhatIf(
        responses,
        cap,
        longest_prompt(config, lengths),
        host_us,
        config.device_memory_gib,
        config.burst_steps,
        config.check_every,
        replace(config.speculation, num_draft_tokens=numbers) if numbers else NO_SPECULATION,
        drafter.policy and drafter.policy.config,
    )
    machine = machine_of(profile, what_if, source and source.acceptance)
    return Answer(what_if, compare(machine, lengths, series), unmeasured(profile, machine))


def longest_prompt(config: SimulateConfig, lengths: ResponseLengths) -> int:
    return config.prompt_tokens if lengths.prompts is None else int(lengths.prompts.max())


def _gains(answers: Sequence[Answer]) -> str:
    """Returns a table with a line for each question: seconds of a rollout, and what adapting
    saves."""
    names = dict.fromkeys(system.name for one in answers for system in one.comparison.static)
    has_drafts = any(one.comparison.drafting for one in answers)
    header = ["what if", "adaptive s", *DRAFT_HEADER * has_drafts, *(f"{name} s" for name in names)]
    header += ["saved of the best", "switches", "preempted"]
    rows = []
    for one in answers:
        found = one.comparison
        static = {system.name: system.mean_s for system in found.static}
        drafts: list[Cell] = []
        if drafting := found.drafting:
            faster = f"{found.best_static.mean_s / drafting.mean_s:.2f} x"
            drafts = [drafting.mean_s, fmean(drafting.tokens_per_step), faster]
        rows.append(
            [
                str(one.what_if),
                found.adaptive.mean_s,
                *drafts,
                *(static.get(name) for name in names),
                f"{percent(found.gain(found.best_static))} ({found.best_static.name})",
                sum(len(trace.switches) for trace in found.traces),
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


def write(path: Path, found: dict[str, Any]) -> None:
    """Writes JSON to --out. Raises UserError if no file can be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise UserError(
            f"option --out is {str(path)!r}: cannot be written ({error.strerror}); name another file."
        ) from None
