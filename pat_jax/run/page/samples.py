"""Samples of a run's page: what was asked, said and earned, equal responses once."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby

from pat_jax.common.html.page import section
from pat_jax.common.picture_style import COLOURS
from pat_jax.run.samples import Sample

_LEAST, _MOST = COLOURS[1], COLOURS[2]  # of rewards


def samples(by_step: Mapping[int, Sequence[Sample]]) -> str:
    """The newest first, and open; empty where there are none."""
    if not by_step:
        return ""
    rewards = [x.reward for few in by_step.values() for x in few if x.reward is not None]
    scale = min(rewards, default=0.0), max(rewards, default=0.0)
    parts = [
        f'<details id="step-{step}"{" open" * (step == max(by_step))}>'
        f"<summary>step {step}</summary>{''.join(_asked(few, scale))}</details>"
        for step, few in sorted(by_step.items(), reverse=True)
    ]
    ends = (
        "" if scale[0] == scale[1] else f" from {scale[0]:.3g} (orange) to {scale[1]:.3g} (green)"
    )
    told = f"The colour is the reward{ends}; grey: it has none."
    return section("Samples", *parts, source=f"Responses to the first prompts of a step. {told}")


def _asked(few: Sequence[Sample], scale: tuple[float, float]) -> Iterator[str]:
    for (prompt, answer), group in groupby(few, key=lambda sample: (sample.prompt, sample.answer)):
        yield f'<div class="asked"><p class="source">prompt</p><pre>{_shown(prompt)}</pre>'
        if answer is not None:
            yield f'<p class="source">right answer</p><pre>{_shown(answer)}</pre>'
        for sample, count in _counted([*group]):
            many = f"{count} × " if count > 1 else ""
            yield (
                f'<div class="said" style="border-color:{_colour(sample.reward, scale)}">'
                f'<p class="source">{many}{_shown(sample.facts)}</p>'
                f"<pre>{_shown(sample.completion)}</pre></div>"
            )
        yield "</div>"


def _counted(few: Sequence[Sample]) -> list[tuple[Sample, int]]:
    """Equal ones once, in the order in which they came."""
    once = [sample for i, sample in enumerate(few) if sample not in few[:i]]
    return [(sample, few.count(sample)) for sample in once]


def _colour(reward: float | None, scale: tuple[float, float]) -> str:
    if reward is None:
        return "var(--rule)"
    low, high = scale
    share = (reward - low) / (high - low) if high > low else float(reward > 0)
    ends = zip(_channels(_LEAST), _channels(_MOST), strict=True)
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in ends)


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _shown(text: str) -> str:
    """A file in UTF-8 cannot hold half of a pair of surrogates."""
    return escape(text.encode("utf-8", "replace").decode("utf-8"))
