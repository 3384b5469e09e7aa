"""The stages of a run's iterations under a placement, with their seconds.

Knows what each role does in an iteration. Does not know when.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from pat_jax.planning import stage_names
from pat_jax.planning.placement import PlacedRole, Positions
from pat_jax.profiling.capacity.placed_rollouts import Rollouts
from pat_jax.profiling.capacity.placed_size import PlacedSize, carried_s, placed_role
from pat_jax.profiling.capacity.update_batches import Packed
from pat_jax.profiling.placement.candidates import Candidate
from pat_jax.profiling.placement.factors import Factors, StageSeconds
from pat_jax.profiling.placement.iteration import Iteration, Stage
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.predict.update_times import Seconds
from pat_jax.profiling.simulate.comparison import Replayed
from pat_jax.profiling.simulate.machine import Workload

# Sizes of a stream's first parts: devices that wait begin with what has ended. The last ones are as
# small, so that little is left after the rollout.
FIRST = (1 / 8, 1 / 8, 1 / 4, 1 / 2)


@dataclass(frozen=True)
class Ended:
    """The parts of an iteration's responses in the order in which they end.

    A part is packed by itself, so that all parts together have more padding than the whole batch.
    """

    ended_s: tuple[float, ...]  # when all responses of each part have ended
    slots: np.ndarray  # float[parts], tokens with padding as shares of those of the whole batch
    pairs: np.ndarray  # float[parts], shares of all pairs of a query and a key
    micro: np.ndarray  # float[parts], micro-batches as shares of those of the whole batch

    @classmethod
    def of(cls, replayed: Replayed, pack: Callable[[Workload], Packed], *, by_group: bool) -> Self:
        """Divides the responses into parts of about a micro-batch each, the first and the last ones
        smaller.

        Args:
          pack: packs responses into micro-batches.
          by_group: responses are used once all of their prompt have ended.
        """
        work, ended_s, whole = replayed.workload, replayed.ended_s, pack(replayed.workload)
        if by_group and work.prompt_id is not None:
            _, group = np.unique(work.prompt_id, return_inverse=True)
            last = np.zeros(group.max() + 1)
            np.maximum.at(last, group, ended_s)
            ended_s = last[group]
        order = np.argsort(ended_s, kind="stable")
        tokens = (work.prompts + work.responses)[order].astype(float)
        before, count = np.cumsum(tokens) - tokens, len(whole.shapes)
        ends = np.cumsum(_sizes(count)) / count * tokens.sum()
        _, of = np.unique(np.searchsorted(ends, before, side="right"), return_inverse=True)
        last = np.zeros(of.max() + 1)
        np.maximum.at(last, of, ended_s[order])
        last, of = np.unique(last[of], return_inverse=True)  # what ends at once is one part
        pairs = np.bincount(of, tokens**2) / (tokens**2).sum()
        packed = [pack(work.only(order[of == part])) for part in range(len(last))]
        slots = np.array([one.slots for one in packed]) / whole.slots
        micro = np.array([len(one.shapes) for one in packed]) / count
        return cls(tuple(last.tolist()), slots, pairs, micro)

    def seconds(self, whole: Seconds) -> tuple[float, ...]:
        """Divides the seconds of a pass over all responses. Every micro-batch sends as much as
        another one: weights are gathered for each."""
        by_tokens = whole.total - whole.attention - whole.links
        each = by_tokens * self.slots + whole.attention * self.pairs + whole.links * self.micro
        return tuple(each.tolist())


def _sizes(count: int) -> list[float]:
    """The sizes of parts in place of `count` micro-batches, as multiples of one of these."""
    if count == 1:
        return [x / 2 for x in (*FIRST, *FIRST[::-1])]
    return [*FIRST, *[1.0] * (count - 2), *FIRST[::-1]]


@dataclass
class PlacedIterations:
    """The iterations of a run on one target."""

    sizes: Mapping[int, PlacedSize]  # by number of devices, of each cut
    target: Target
    by_group: bool  # whether gradients need all responses to a prompt
    factors: Factors = field(default_factory=Factors)  # on composed seconds, of any devices
    _packed: dict[tuple[int, int], Packed] = field(default_factory=dict)
    _endings: dict[tuple[int, int, bool], tuple[Replayed, Ended]] = field(default_factory=dict)
    _transfers: dict[tuple[int, int, int], float] = field(default_factory=dict)
    _reading: dict[tuple[int, int], dict[str, Seconds]] = field(default_factory=dict)
    _training: dict[tuple[int, int], dict[str, tuple[Seconds, Seconds]]] = field(
        default_factory=dict
    )

    def of(self, candidate: Candidate, rollouts: Rollouts) -> list[Iteration]:
        """Returns the iterations of a series of rollouts under a candidate."""
        return [self._one(candidate, rollouts, i) for i in range(len(rollouts.done))]

    def scaled(self, measured: StageSeconds, rollouts: Rollouts) -> "PlacedIterations":
        """Returns the iterations whose stages take as long on all devices as was measured.

        Args:
          rollouts: of all devices.
        """
        return replace(self, factors=Factors.between(measured, self._composed(rollouts)))

    def _composed(self, rollouts: Rollouts) -> StageSeconds:
        """The mean iteration with all models on all devices, where none waits in the host's
        memory."""
        devices, seconds, tokens = max(self.sizes), dict[str, float](), 0
        for number, one in enumerate(rollouts.done):
            asked = devices, number, one.workload
            for name, taken in self._stages(*asked, rollouts).items():
                seconds[name] = seconds.get(name, 0.0) + taken.total
            lengths = one.workload.prompts + one.workload.responses
            tokens += int(lengths.sum()) - sum(self._pack(*asked).shared)
        count = len(rollouts.done)
        return StageSeconds({name: s / count for name, s in seconds.items()}, tokens / count)

    def _stages(
        self, count: int, number: int, workload: Workload, rollouts: Rollouts
    ) -> dict[str, Seconds]:
        """The composed seconds of each stage on `count` devices."""
        size, asked = self.sizes[count], (count, number, workload)
        found = {
            stage_names.predictions(size.reads[name], name): seconds
            for name, seconds in self._of_reading(*asked).items()
        }
        for name, (gradients, step) in self._of_training(*asked).items():
            found |= {stage_names.gradients(name): gradients, stage_names.step(name): step}
        transfer = size.update.transfer(rollouts.first, rollouts.weights)
        return found | {stage_names.TRANSFER: transfer}

    def _one(self, candidate: Candidate, rollouts: Rollouts, number: int) -> Iteration:
        replayed, places = rollouts.done[number], candidate.placement.places
        by_group = self.by_group and candidate.overlap == "gradients"
        ended = self._ended(len(places["policy"]), replayed, by_group=by_group)
        reads = self._reads(candidate, ended, number, replayed.workload)
        names = tuple(stage.name for stage in reads)
        trains = self._trains(candidate, ended, number, replayed.workload, names)
        transfer = self._transfer(candidate, rollouts)
        return Iteration(
            places["rollout"], replayed.total_s, ended.ended_s, (*reads, *trains, transfer)
        )

    def _reads(
        self, candidate: Candidate, ended: Ended, number: int, workload: Workload
    ) -> list[Stage]:
        """The passes without gradients."""
        found: list[Stage] = []
        first = next(iter(self.sizes.values()))
        for name in first.reads:
            role, devices = self._place(candidate, name)
            what = stage_names.predictions(first.reads[name], name)
            seconds = self._of_reading(len(devices), number, workload)[name]
            seconds = seconds.times(self.factors.of(what))
            is_streamed = candidate.overlap != "none" and self._is_apart(candidate, role)
            pieces = [*ended.seconds(seconds)] if is_streamed else [seconds.total]
            if name not in first.trains:  # it comes from the host's memory before it reads
                pieces[0] += self.sizes[len(devices)].moves_s.get(name, 0.0)
            found.append(Stage(what, devices, tuple(pieces), is_streamed=is_streamed))
        return found

    def _trains(
        self,
        candidate: Candidate,
        ended: Ended,
        number: int,
        workload: Workload,
        reads: Sequence[str],
    ) -> list[Stage]:
        """The gradients and steps of the trained roles."""
        found: list[Stage] = []
        streams = candidate.overlap == "gradients"
        for name in next(iter(self.sizes.values())).trains:
            role, devices = self._place(candidate, name)
            size = self.sizes[len(devices)]
            gradients, step = self._of_training(len(devices), number, workload)[name]
            of_gradients, of_step = stage_names.gradients(name), stage_names.step(name)
            gradients = gradients.times(self.factors.of(of_gradients))
            is_streamed = streams and self._is_apart(candidate, role)
            pieces = ended.seconds(gradients) if is_streamed else (gradients.total,)
            found.append(Stage(of_gradients, devices, pieces, tuple(reads), is_streamed))
            step_s = self.factors.of(of_step) * step.total + size.moves_s.get(name, 0.0)
            found.append(Stage(of_step, devices, (step_s,), (of_gradients,)))
        return found

    def _transfer(self, candidate: Candidate, rollouts: Rollouts) -> Stage:
        places = candidate.placement.places
        policy, rollout = places["policy"], places["rollout"]
        key = len(policy), len(rollout), rollouts.weights
        if key not in self._transfers:
            update = self.sizes[len(policy)].update
            self._transfers[key] = update.transfer(rollouts.first, rollouts.weights).total
        seconds = self.factors.of(stage_names.TRANSFER) * self._transfers[key]
        if candidate.placement.are_apart("policy", "rollout"):
            seconds += carried_s(rollouts.weights, self.target, (len(policy), len(rollout)))
        devices = tuple(sorted({*policy, *rollout}))
        needs = (stage_names.step("policy"),)
        return Stage(stage_names.TRANSFER, devices, (seconds,), needs)

    @staticmethod
    def _place(candidate: Candidate, name: str) -> tuple[PlacedRole, Positions]:
        role = "policy" if name == "policy" else placed_role(name)
        return role, candidate.placement.places[role]

    @staticmethod
    def _is_apart(candidate: Candidate, role: PlacedRole) -> bool:
        return candidate.placement.are_apart(role, "rollout")

    def _ended(self, count: int, replayed: Replayed, *, by_group: bool) -> Ended:
        key = count, id(replayed), by_group
        if key not in self._endings:
            pack = self.sizes[count].packed
            # The rollout is kept with it: no other one may have its id.
            self._endings[key] = replayed, Ended.of(replayed, pack, by_group=by_group)
        return self._endings[key][1]

    def _pack(self, count: int, number: int, workload: Workload) -> Packed:
        if (count, number) not in self._packed:
            self._packed[count, number] = self.sizes[count].packed(workload)
        return self._packed[count, number]

    def _of_reading(self, count: int, number: int, workload: Workload) -> dict[str, Seconds]:
        if (count, number) not in self._reading:
            packed = self._pack(count, number, workload)
            self._reading[count, number] = self.sizes[count].reading(packed)
        return self._reading[count, number]

    def _of_training(
        self, count: int, number: int, workload: Workload
    ) -> dict[str, tuple[Seconds, Seconds]]:
        if (count, number) not in self._training:
            packed = self._pack(count, number, workload)
            self._training[count, number] = self.sizes[count].training(packed)
        return self._training[count, number]
