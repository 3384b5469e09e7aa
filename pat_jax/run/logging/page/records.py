"""Rollouts and samples of a run's page, as its template shows them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from pat_jax.run.logging.rollout_files import KeptRollout
from pat_jax.run.logging.samples import Sample


def by_title(kept: Mapping[str, KeptRollout]) -> dict[str, KeptRollout]:
    """A rollout that is both the first and the slowest comes once, under both names."""
    names: dict[int, list[str]] = {}
    for name, one in kept.items():
        names.setdefault(one.step, []).append(name)
    return {" and ".join(same): kept[same[0]] for same in names.values()}


def asked(
    few: Sequence[Sample],
) -> Iterator[tuple[str, str | None, list[tuple[Sample, int]]]]:
    """Prompts, right answers, and distinct responses with their counts."""
    for (prompt, answer), group in groupby(few, key=lambda sample: (sample.prompt, sample.answer)):
        every = [*group]
        once = [sample for i, sample in enumerate(every) if sample not in every[:i]]
        yield prompt, answer, [(sample, every.count(sample)) for sample in once]


def rewards_range(by_step: Mapping[int, Sequence[Sample]]) -> tuple[float, float]:
    rewards = [x.reward for few in by_step.values() for x in few if x.reward is not None]
    return min(rewards, default=0.0), max(rewards, default=0.0)
