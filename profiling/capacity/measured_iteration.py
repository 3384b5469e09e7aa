"""Reads what the stages of a run's last iteration took: the `iteration.json` of its folder.

Knows the file and what it must be of. Does not know what is made of its seconds.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pat_jax.common.chips import chip_of
from pat_jax.common.errors import UserError
from pat_jax.common.json_text import parse_json
from pat_jax.planning.latency.profile import Subject
from pat_jax.planning.placement import in_ranges
from pat_jax.planning.stage_names import ROLLOUT
from pat_jax.profiling.capacity.costs import differences
from pat_jax.profiling.cross_compile.target_build import Order
from pat_jax.profiling.placement.factors import StageSeconds


@dataclass(frozen=True)
class MeasuredIteration:
    """Seconds of an iteration with all models on all devices."""

    path: Path
    target: str
    stages: StageSeconds

    def refused(self, problem: str) -> UserError:
        """Returns the error of a plan that cannot use it."""
        return _refusal(self.path, self.target, problem)


def read_iteration(path: Path, order: Order) -> MeasuredIteration:
    """Reads the iteration in `path`, for a plan of `order`.

    Raises:
      UserError: the file cannot be read, or is something else than iteration.json, or its run had
        another machine, model, arithmetic or placement.
    """
    target = str(order.target)
    try:
        content: Any = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refusal(path, target, f"cannot be read ({error.strerror})") from None
    except ValueError as error:  # JSON's and Unicode's are of this kind
        raise _refusal(path, target, f"truncated or no JSON ({error})") from None
    try:
        found = _File.of(content)
        problem = next(found.problems(order), "")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        problem = f"no iteration.json as this version writes it ({error!r})"
        raise _refusal(path, target, problem) from None
    if problem:
        raise _refusal(path, target, problem)
    return MeasuredIteration(path, target, found.stages)


def _refusal(path: Path, target: str, problem: str) -> UserError:
    return UserError(
        f"option --measured is {str(path)!r}: {problem}; give iteration.json of such a run on {target} "
        "with --placement flatten and no tail, or leave it out."
    )


class _Span(NamedTuple):
    """A part of a stage, as `run/logging/iteration_picture.py` writes it."""

    name: str
    devices: tuple[int, ...]
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class _File:
    """What a file holds, as `run/logging/stage_log.py` writes it."""

    subject: Subject
    hosts: int
    rest: str  # where models waited
    tokens: int
    devices: frozenset[int]  # of the run
    spans: Sequence[_Span]

    @classmethod
    def of(cls, content: Any) -> "_File":
        """Raises KeyError, TypeError or ValueError if the content is something else."""
        spans = [
            _Span(str(x["name"]), tuple(x["devices"]), float(x["begin_s"]), float(x["end_s"]))
            for x in content["spans"]
        ]
        if wrong := [x for x in spans if not 0 <= x.begin_s <= x.end_s < math.inf]:
            raise ValueError(f"{wrong[0].name} from {wrong[0].begin_s} to {wrong[0].end_s} s")
        return cls(
            Subject(**content["subject"]),
            int(content["hosts"]),
            str(content["rest"]),
            int(content["tokens"]),
            frozenset(i for group in content["groups"] for i in group),
            spans,
        )

    def problems(self, order: Order) -> Iterator[str]:
        """Yields why a plan of `order` cannot use it, in words."""
        for span in self.spans:
            if {*span.devices} != self.devices:
                places = f"{in_ranges(span.devices)} of {in_ranges(tuple(sorted(self.devices)))}"
                yield f"of a run with another placement ({span.name} on devices {places})"
        wrong, target = differences(self.subject, order), order.target
        chip = chip_of(self.subject.device_kind)
        if chip is None or chip.name != target.chip.name:
            wrong.insert(0, f"device_kind {self.subject.device_kind}, not {target.chip.name}")
        if self.hosts != target.num_hosts:
            wrong.append(f"hosts {self.hosts}, not {target.num_hosts}")
        if wrong:
            yield f"of something else ({'; '.join(wrong)})"
        if self.rest != "device":
            yield "of models that waited in the host's memory, expected a run with --roles.rest device"
        if (count := len(self._rollouts)) != 1:
            yield f"of an iteration with {count} rollouts, expected 1"
        if self.tokens < 1:
            yield f"field tokens is {self.tokens}, expected those of a run that trains"

    @property
    def _rollouts(self) -> list[_Span]:
        return [span for span in self.spans if span.name == ROLLOUT]

    @property
    def stages(self) -> StageSeconds:
        """The seconds of each stage. What came before the rollout was of an evaluation."""
        (rollout,), found = self._rollouts, dict[str, float]()
        for span in self.spans:
            if span.begin_s >= rollout.begin_s:
                found[span.name] = found.get(span.name, 0.0) + span.end_s - span.begin_s
        return StageSeconds(found, self.tokens)
