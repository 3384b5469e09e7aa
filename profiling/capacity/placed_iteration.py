"""The stages of a run's iterations under a placement, with their seconds.

Knows what each role does in an iteration. Does not know when.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pat_jax.planning import stage_names
from pat_jax.planning.placement import PlacedRole, Positions
from pat_jax.profiling.capacity.ended_parts import EndedParts, Streams, streams_of
from pat_jax.profiling.capacity.placed_rollouts import Rollouts
from pat_jax.profiling.capacity.placed_size import PlacedSize, carried_s, placed_role, spread_s
from pat_jax.profiling.capacity.placed_tail import Half, with_tail
from pat_jax.profiling.capacity.update_batches import Packed
from pat_jax.profiling.placement.candidates import Candidate
from pat_jax.profiling.placement.factors import Factors, StageSeconds
from pat_jax.profiling.placement.iteration import Iteration, Stage
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.predict.update_times import Seconds
from pat_jax.profiling.simulate.comparison import Replayed
from pat_jax.profiling.simulate.machine import Workload


@dataclass
class PlacedIterations:
    """The iterations of a run on one target."""

    sizes: Mapping[int, PlacedSize]  # by number of devices, of each cut
    target: Target
    factors: Factors = field(default_factory=Factors)  # on composed seconds, of any devices
    _packed: dict[tuple[int, int], Packed] = field(default_factory=dict)
    _streams: dict[tuple[object, ...], tuple[Replayed, Streams]] = field(default_factory=dict)
    _transfers: dict[tuple[int, int, int], float] = field(default_factory=dict)
    _reading: dict[tuple[int, int], dict[str, Seconds]] = field(default_factory=dict)
    _training: dict[tuple[int, int], dict[str, tuple[Seconds, Seconds]]] = field(
        default_factory=dict
    )

    def of(self, candidate: Candidate, rollouts: Rollouts) -> list[Iteration]:
        """Returns the iterations of a series of rollouts under a candidate."""
        return [self._one(candidate, rollouts, i) for i in range(len(rollouts.done))]

    def with_tail(
        self, candidate: Candidate, rollouts: Rollouts, half: Half
    ) -> list[Iteration] | None:
        """Returns the iterations of rollouts with a tail; None: a rollout has none."""
        found: list[Iteration] = []
        for number, done in enumerate(rollouts.done):
            if (tail := with_tail(done, candidate.tail, half)) is None:
                return None
            flat = self._one(candidate, rollouts, number)
            rest = done.workload.only(np.flatnonzero(~tail.is_read))
            left = self._of_rest(len(flat.devices), rest)
            stages = (
                replace(stage, seconds=(left.get(stage.name, stage.total_s),))
                for stage in flat.stages
            )
            made_of = flat.devices, tail.rollout_s, tuple(stages)
            found.append(Iteration(*made_of, beside=tail.read_s))
        return found

    def reads_s(self, size: PlacedSize, packed: Packed) -> dict[str, float]:
        """Seconds in which each model reads what is packed, by stage."""
        found = dict[str, float]()
        for name, seconds in size.reading(packed).items():
            what = stage_names.predictions(size.reads[name], name)
            found[what] = self.factors.of(what) * seconds.total
        return found

    def _of_rest(self, count: int, rest: Workload) -> dict[str, float]:
        """Seconds in which all devices read what was not read before, by stage."""
        size = self.sizes[count]
        whats = {stage_names.predictions(what, name): name for name, what in size.reads.items()}
        if not rest.size:
            return dict.fromkeys(whats, 0.0)
        read_s = self.reads_s(size, size.packed(rest))
        return {what: read_s[what] + size.moves_s.get(name, 0.0) for what, name in whats.items()}

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
        streams = self._streams_of(candidate, replayed, number)
        reads = self._reads(candidate, streams.reads, number, replayed.workload)
        names = tuple(stage.name for stage in reads)
        trains = self._trains(candidate, streams.gradients, number, replayed.workload, names)
        transfer = self._transfer(candidate, rollouts)
        return Iteration(places["rollout"], replayed.total_s, (*reads, *trains, transfer))

    def _reads(
        self, candidate: Candidate, parts: EndedParts, number: int, workload: Workload
    ) -> list[Stage]:
        """The passes without gradients."""
        found: list[Stage] = []
        first = next(iter(self.sizes.values()))
        for name in first.reads:
            role, devices = self._place(candidate, name)
            what = stage_names.predictions(first.reads[name], name)
            seconds = self._of_reading(len(devices), number, workload)[name]
            seconds = seconds.times(self.factors.of(what))
            is_early = candidate.overlap != "none" and self._is_apart(candidate, role)
            pieces = [*parts.seconds(seconds)] if is_early else [seconds.total]
            if name not in first.trains:  # it comes from the host's memory before it reads
                pieces[0] += self.sizes[len(devices)].moves_s.get(name, 0.0)
            ready_s = parts.ready_s if is_early else ()
            found.append(Stage(what, devices, tuple(pieces), ready_s=ready_s))
        return found

    def _trains(
        self,
        candidate: Candidate,
        parts: EndedParts,
        number: int,
        workload: Workload,
        reads: Sequence[str],
    ) -> list[Stage]:
        """The gradients and steps of the trained roles."""
        found: list[Stage] = []
        for name in next(iter(self.sizes.values())).trains:
            role, devices = self._place(candidate, name)
            size = self.sizes[len(devices)]
            gradients, step = self._of_training(len(devices), number, workload)[name]
            of_gradients, of_step = stage_names.gradients(name), stage_names.step(name)
            gradients = gradients.times(self.factors.of(of_gradients))
            is_early = candidate.overlap == "gradients" and self._is_apart(candidate, role)
            pieces = parts.seconds(gradients) if is_early else (gradients.total,)
            ready_s = parts.ready_s if is_early else ()
            found.append(Stage(of_gradients, devices, pieces, tuple(reads), ready_s))
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
        elif policy != rollout:
            seconds += spread_s(rollouts.first.tp * rollouts.weights, self.target)
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

    def _streams_of(self, candidate: Candidate, replayed: Replayed, number: int) -> Streams:
        """The parts in which responses are used while others are generated."""
        if candidate.overlap == "none":
            return Streams(EndedParts(), EndedParts())
        reads, gradients = self._busiest(candidate, replayed, number)
        count = len(candidate.placement.places["policy"])
        key = count, id(replayed), reads.total, gradients.total
        if key not in self._streams:
            size = self.sizes[count]
            made_of = size.packed_early, size.packed, reads, gradients
            # The rollout is kept with it: no other one may have its id.
            self._streams[key] = replayed, streams_of(replayed, *made_of)
        return self._streams[key][1]

    def _busiest(
        self, candidate: Candidate, replayed: Replayed, number: int
    ) -> tuple[Seconds, Seconds]:
        """The passes that begin during the rollout on the devices that are busiest with them: those
        without gradients, and the others."""
        lanes: dict[Positions, tuple[Seconds, Seconds]] = {}
        first = next(iter(self.sizes.values()))
        for name in dict.fromkeys((*first.reads, *first.trains)):
            role, devices = self._place(candidate, name)
            if not self._is_apart(candidate, role):
                continue
            asked = len(devices), number, replayed.workload
            reads, gradients = lanes.get(devices, (Seconds(), Seconds()))
            if name in first.reads:
                what = stage_names.predictions(first.reads[name], name)
                reads += self._of_reading(*asked)[name].times(self.factors.of(what))
            if name in first.trains and candidate.overlap == "gradients":
                what = stage_names.gradients(name)
                gradients += self._of_training(*asked)[name][0].times(self.factors.of(what))
            lanes[devices] = reads, gradients
        return max(lanes.values(), key=lambda both: both[0].total + both[1].total)

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
