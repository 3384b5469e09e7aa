"""Prices a run's placements and chooses one, for `--placement auto` of a plan.

Rollouts are replayed on as many devices as they would have. Passes are packed and composed for as
many as each role would have. `placement/schedule.py` puts both in order. Several hosts are cut
alike, as a run cuts its processes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from pat_jax.config.run import RunConfig
from pat_jax.planning.placement import LEAST_SPLIT, ROLES, PlacedRole
from pat_jax.profiling.capacity.placed_iteration import PlacedIterations
from pat_jax.profiling.capacity.placed_memory import memory_of, update_shortage, waiting
from pat_jax.profiling.capacity.placed_rollouts import PlacedRollouts, Rollouts
from pat_jax.profiling.capacity.placed_size import PlacedSize, placed_role, sized
from pat_jax.profiling.capacity.placed_tail import LEFT, Half
from pat_jax.profiling.capacity.question import Question
from pat_jax.profiling.capacity.resting import with_rest
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic
from pat_jax.profiling.placement.candidates import Candidate, candidates, split_of
from pat_jax.profiling.placement.iteration import Iteration
from pat_jax.profiling.placement.priced import (
    ALIKE,
    ERROR,
    SHOWN,
    Placements,
    Priced,
    PriceSources,
    mean_path,
)
from pat_jax.profiling.placement.schedule import scheduled
from pat_jax.profiling.simulate.machine import Workload


@dataclass(frozen=True)
class Placing:
    """The placements of one question.

    Args:
      run: options that say what may be done while responses are generated; None: the question's.
      cuts: equal groups of the devices, each inside a host, that are cut alike; None: the hosts.
        Candidates number the devices of one group.
      only: the candidates; None: all.
    """

    question: Question
    run: RunConfig | None = None
    cuts: int | None = None
    only: Sequence[Candidate] | None = None

    def placements(self) -> Placements:
        """Returns the candidates with names and the fastest others, each with its price.

        Every candidate is priced first as if its rollout had all memory. Those that could be among
        the fastest are priced again beside the models that wait there.
        """
        every = self.every
        named = [self.best(one) for one in every if self.is_named(one)]
        others = [one for one in every if not self.is_named(one)]
        hoped = [(self.best(one, is_alone=True).seconds, one) for one in others]
        order = sorted(
            ((seconds, one) for seconds, one in hoped if seconds is not None),
            key=lambda pair: pair[0],
        )
        found: list[Priced] = []
        for seconds, one in order:
            known = sorted(each.seconds for each in found if each.seconds is not None)
            if len(known) >= SHOWN and seconds > (1 + ALIKE) * known[SHOWN - 1]:
                break
            found.append(self.best(one))
        can_stream = any(one.overlap == "gradients" for one in every)
        tails = [one for world in self._worlds for one in world.tails]
        found += sorted(tails, key=lambda one: one.at_worst(ERROR))[:1]
        sources, rest = self._sources, (can_stream, len(every), self._num_cuts)
        return Placements((*named, *self._split, *found), ERROR, *rest, sources)

    @property
    def _split(self) -> list[Priced]:
        """The placement that gives models whole hosts, if a run may have it."""
        order, run, cuts = self.question.build.order, self._run, self._num_cuts
        adapters = run.lora.is_on or run.critic.lora.is_on
        is_plain = order.model.experts is None and not self.question.costs.drafts.is_generated
        is_plain &= not (adapters or run.teacher.top_k)
        hosts = order.target.num_hosts
        are_even = cuts % 2 == 0 and (hosts == 1 or hosts % 2 == 0)
        if cuts < LEAST_SPLIT or not are_even or "critic" not in self.roles or not is_plain:
            return []
        one = split_of(order.target.num_devices, self.roles)
        return [replace(self, cuts=1, only=[one]).best(one)]

    @cached_property
    def every(self) -> list[Candidate]:
        """All candidates, wherever models wait."""
        by_key = {one.key: one for world in self._worlds for one in world.candidates}
        return list(by_key.values())

    def best(self, one: Candidate, *, is_alone: bool = False) -> Priced:
        """Prices a candidate with models waiting where it is faster; the arguments are those of
        `iterations`."""
        return self._prices(one, is_alone=is_alone)[0]

    def best_iterations(self, one: Candidate) -> list[Iteration] | str:
        """Returns the `iterations` that `best` has priced."""
        return self._prices(one)[1].iterations(one)

    def _prices(self, one: Candidate, *, is_alone: bool = False) -> tuple[Priced, "Placing"]:
        worlds = [world for world in self._worlds if one in world.candidates]
        found = [(world.priced(one, is_alone=is_alone), world) for world in worlds]
        return min(found, key=lambda x: math.inf if x[0].seconds is None else x[0].seconds)

    @cached_property
    def _worlds(self) -> list["Placing"]:
        """The same question with models that wait in the host's memory, if that is what `auto` has
        settled to, and with models that wait on their devices."""
        order = self.question.build.order
        was_asked = self.question.options.roles.rest != "auto"
        if was_asked or order.config.roles.rest != "host":
            return [self]
        here = replace(self.question, build=by_arithmetic(with_rest(order, "device")))
        return [self, replace(self, question=here)]

    @cached_property
    def candidates(self) -> list[Candidate]:
        if self.only is not None:
            return [*self.only]
        count = self.question.build.order.target.num_devices // self._num_cuts
        streams = not (self._run.gradients_wait_for or self.question.run.gradients_wait_for)
        every = candidates(count, self.roles, streams_gradients=streams)
        return [one for one in every if self._can_run(one)]

    @property
    def _num_cuts(self) -> int:
        return self.cuts or self.question.build.order.target.num_hosts

    @property
    def _run(self) -> RunConfig:
        return self.run or self.question.run

    @cached_property
    def roles(self) -> list[PlacedRole]:
        """The roles that the run has, with places of their own."""
        names = {placed_role(name) for name in self._whole.reads if name != "policy"}
        trained = {"critic"} & {*self._whole.trains}
        return [x for x in ROLES if x in ("rollout", "policy") or x in names | trained]

    def is_named(self, one: Candidate) -> bool:
        return one.known_name(self.roles) is not None

    def iterations(self, one: Candidate, *, is_alone: bool = False) -> list[Iteration] | str:
        """Returns the iterations of a candidate, or why it cannot run.

        Args:
          is_alone: the rollout has all memory of its devices.
        """
        rollouts = self._rollouts(one, is_alone=is_alone)
        return rollouts if isinstance(rollouts, str) else self._priced.of(one, rollouts)

    def priced(self, one: Candidate, *, is_alone: bool = False) -> Priced:
        """Prices a candidate; the arguments are those of `iterations`."""
        rollouts = self._rollouts(one, is_alone=is_alone)
        if isinstance(rollouts, str):
            name = one.name(self.roles)
            memory = () if self._lacks_size(one) else tuple(memory_of(one, self._sizes, 0))
            return Priced(name, memory, one, refusal=rollouts, is_named=self.is_named(one))
        return self._scheduled(one, rollouts, self._priced.of(one, rollouts))

    def _scheduled(
        self, one: Candidate, rollouts: Rollouts, iterations: Sequence[Iteration]
    ) -> Priced:
        done = [scheduled(each) for each in iterations]
        path = mean_path(done)
        bound = max(path, key=lambda stage: path[stage])
        return Priced(
            one.name(self.roles),
            tuple(memory_of(one, self._sizes, rollouts.held)),
            one,
            fmean(each.seconds for each in done),
            bound,
            path[bound] / sum(path.values()),
            done[0],
            is_named=self.is_named(one),
            rest="host" if self.question.run.roles.rest == "host" else "device",
        )

    def with_tail(self, left: int, times: float = 1.0) -> list[Iteration]:
        """Returns the iterations of flatten whose rollouts have a tail from `left` responses on,
        with models waiting where it is faster; empty: there is no tail.

        Args:
          times: by which all on halves of the devices takes longer than is believed.
        """
        tails = [tail for world in self._worlds if (tail := world._tail(left, times))]
        return min(tails, default=[], key=_mean_s)

    def _tail(self, left: int, times: float = 1.0) -> list[Iteration] | None:
        if self._tail_parts is None:
            return None
        rollouts, half = self._tail_parts
        one = replace(self.flat, tail=left)
        return self._priced.with_tail(one, rollouts, replace(half, times=times))

    @property
    def flat(self) -> Candidate:
        """All models on all devices."""
        return next(one for one in self.every if one.placement.is_flat)

    @property
    def tails(self) -> Iterator[Priced]:
        """Flatten with each tail, models waiting where the question says."""
        for left in LEFT:
            found, slower = self._tail(left), self._tail(left, 1 + ERROR)
            if found and slower and self._tail_parts:
                one = replace(self.flat, tail=left)
                priced = self._scheduled(one, self._tail_parts[0], found)
                yield replace(priced, worst_s=_mean_s(slower))

    @cached_property
    def _tail_parts(self) -> tuple[Rollouts, Half] | None:
        """Rollouts on all devices, and what works in their tails; None: they have none."""
        count = len(self.flat.placement.places["rollout"])
        # Halves of a power of two have its layouts.
        if count.bit_count() != 1 or not self._may_have_tail:
            return None
        rollouts, held = self._rollouts(self.flat, is_alone=False), waiting(self.flat, self._sizes)
        if isinstance(rollouts, str) or count // 2 not in self._sizes:
            return None
        whole, half, cuts = self._sizes[count], self._sizes[count // 2], self._num_cuts
        machine, reading = self._replays.machine(half.build, held), half.in_a_tail(cuts)
        copies = reading.copies
        # No pass that only reads takes more than one with gradients.
        taken = sum(copies) + half.role_bytes["policy"].temporaries
        taken += max(copies, default=0) if cuts > 1 else 0  # as `TailModels.check_room`
        if isinstance(machine, str) or held + taken > self.question.build.limit:
            return None
        assert machine.memory is not None, "that of the target"
        inside = [split for split in machine.splits if split.tp <= count // 2]  # of each cut
        if not inside:
            return None
        widest = max(inside, key=lambda split: split.tp)
        weights, chip = machine.memory.weights[widest], whole.target.chip
        moved_s = whole.update.transfer(rollouts.first, weights).total
        moved_s += weights / chip.link_bytes_s
        fsdp_size = self.question.build.order.config.fsdp_size
        is_inside = cuts == 1 or 0 < fsdp_size <= count
        moved_s += sum(copies) / (chip.link_bytes_s if is_inside else chip.host_link_bytes_s)
        moved_s += sum(whole.moves_s.get(name, 0.0) for name in whole.reads)

        def reads_s(work: Workload) -> Mapping[str, float]:
            return self._priced.reads_s(reading, whole.packed_for(reading, work))

        one_layout = replace(machine, splits=(widest,))
        return rollouts, Half(one_layout, moved_s, whole.next_read, reads_s)

    @property
    def _may_have_tail(self) -> bool:
        """Whether a run with these options may ask for a tail (`run/start/tail.py`)."""
        order, run = self.question.build.order, self._run
        adapters = run.lora.is_on or run.critic.lora.is_on
        is_plain = order.model.experts is None and not self.question.costs.drafts.is_generated
        is_told = run.deterministic or run.teacher.top_k > 0
        return bool(self._whole.reads) and is_plain and not (adapters or is_told)

    def _rollouts(self, one: Candidate, *, is_alone: bool) -> Rollouts | str:
        if lacking := self._lacks_size(one):
            return lacking
        limit = self.question.build.limit
        if shortage := update_shortage(one, self._sizes, limit):
            return shortage
        size = self._sizes[len(one.placement.places["rollout"])]
        return self._replays.of(size.build, 0 if is_alone else waiting(one, self._sizes))

    def _lacks_size(self, one: Candidate) -> str:
        places = one.placement.places.values()
        return next((self._refused[len(x)] for x in places if len(x) in self._refused), "")

    def _can_run(self, one: Candidate) -> bool:
        """Whether roles with adapters on the policy's base are with it, and nothing is read early
        that has to wait."""
        places = one.placement.places
        if self._run.deterministic and one.overlap != "none":
            return False
        return all(places[role] == places["policy"] for role in self._on_its_base())

    def _on_its_base(self) -> Iterator[PlacedRole]:
        whole = self.question.build.whole
        if whole.policy.trained.lora:
            yield "reference"
        if whole.critic and whole.critic.trained.shares_base:
            yield "critic"

    @cached_property
    def _whole(self) -> PlacedSize:
        question = self.question
        return PlacedSize.of(question.build, question.options, question.build.order.target)

    @cached_property
    def _all_sizes(self) -> tuple[dict[int, PlacedSize], dict[int, str]]:
        counts = {len(x) for one in self.candidates for x in one.placement.places.values()}
        asked = self.question.build, self.question.options
        return sized(*asked, sorted(counts, reverse=True), self._num_cuts)

    @property
    def _sizes(self) -> dict[int, PlacedSize]:
        return self._all_sizes[0]

    @property
    def _refused(self) -> dict[int, str]:
        return self._all_sizes[1]

    @cached_property
    def _replays(self) -> PlacedRollouts:
        return PlacedRollouts(self.question)

    @cached_property
    def _priced(self) -> PlacedIterations:
        """Raises UserError if an iteration was measured and no rollout has room on all devices."""
        question, target = self.question, self.question.build.order.target
        composed = PlacedIterations(self._sizes, target)
        if question.measured is None:
            return composed
        rollouts = self._replays.of(self._whole.build, 0)
        if isinstance(rollouts, str):
            raise question.measured.refused(f"no iteration with flatten runs here: {rollouts}")
        return composed.scaled(question.measured.stages, rollouts)

    @property
    def _sources(self) -> PriceSources:
        options = self.question.options
        return PriceSources(options.profile != "", options.measured, self._priced.factors)


def _mean_s(iterations: Sequence[Iteration]) -> float:
    return fmean(scheduled(one).seconds for one in iterations)
