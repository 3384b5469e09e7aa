"""Rollouts and samples of a run's page, as its template shows them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from pat_jax.common.html.charts import Plot
from pat_jax.common.html.layouts import live_plot
from pat_jax.common.picture_style import COMPUTED
from pat_jax.engine.trace import RolloutTrace
from pat_jax.run.plot import live_curve
from pat_jax.run.rollouts import KeptRollout
from pat_jax.run.samples import Sample


def by_title(kept: Mapping[str, KeptRollout]) -> dict[str, KeptRollout]:
    """One that is the first and the slowest is shown once."""
    names: dict[int, list[str]] = {}
    for name, one in kept.items():
        names.setdefault(one.step, []).append(name)
    return {" and ".join(same): kept[same[0]] for same in names.values()}


def live(trace: RolloutTrace) -> Plot:
    """Live requests over time, above the layouts in force."""
    edges = [*trace.times_s, trace.total_s]
    return live_plot(
        [*zip(*live_curve(trace, edges), strict=True)],
        edges,
        trace.layout,
        [switch.at_s for switch in trace.switches],
        note=COMPUTED if trace.is_computed else "",
    )


def asked(
    few: Sequence[Sample],
) -> Iterator[tuple[str, str | None, list[tuple[Sample, int]]]]:
    """Prompts, right answers, and responses with how often each is there: equal ones come once."""
    for (prompt, answer), group in groupby(few, key=lambda sample: (sample.prompt, sample.answer)):
        every = [*group]
        once = [sample for i, sample in enumerate(every) if sample not in every[:i]]
        yield prompt, answer, [(sample, every.count(sample)) for sample in once]


def rewards_range(by_step: Mapping[int, Sequence[Sample]]) -> tuple[float, float]:
    rewards = [x.reward for few in by_step.values() for x in few if x.reward is not None]
    return min(rewards, default=0.0), max(rewards, default=0.0)
