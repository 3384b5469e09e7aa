"""A rollout on a simulated clock: the planner that ships, the engine's rules, known response lengths.

Real are the planner, the buckets and the accounts of the sequences (`engine/sequences/accounts.py`); the loop
follows `engine/rollout.py` and `engine/flight.py` move by move. Every duration is looked up in a
latency model, the truth; the planner may believe in another one. What no latency model knows is free
of charge, but for the time that a `Machine` gives its host for each live sequence. Pools hold every
sequence, or as much as its memory says (`page_counts.py`).
"""

from dataclasses import dataclass
from statistics import fmean

import numpy as np

from pat_jax.engine.sequences.accounts import Accounts
from pat_jax.engine.sequences.balance import options
from pat_jax.engine.sequences.page_reserve import steps_with_room
from pat_jax.engine.trace import Balanced, RolloutTrace, Switch
from pat_jax.planning.held import most_held
from pat_jax.planning.planner.balance import balance_seconds
from pat_jax.planning.planner.carry import carried_seconds
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import Balance, Plan, Ran, Split, way
from pat_jax.profiling.simulate.machine import Machine, Replay, Workload
from pat_jax.profiling.simulate.page_counts import PageCounts


def replay(workload: Workload, planner: Planner, machine: Machine) -> Replay:
    """Runs one rollout to its end under `planner`."""
    flight = _Flight(workload, machine, planner.start(workload.load(machine.capacity)))
    running: _Running | None = None
    while flight.accounts.has_work:
        if running is None:
            flight.refill()
            plan, balance = flight.decide(planner)
            if plan.split != flight.split:
                source, seconds = flight.split, flight.switch(plan)
                planner.observe_switch(source, plan, seconds, flight.switches[-1].kv)
            elif balance is not None:
                planner.observe_balance(balance, flight.balance(balance))
            flight.fit()
            running, stays = flight.launch(plan.threshold), True
        following = None
        if machine.runs_ahead and stays:
            following = flight.launch_next(running, plan.threshold)
        if burst := flight.collect(running):
            planner.observe(burst)
        running = following
        if running is not None and flight.accounts.has_work:
            plan, balance = flight.decide(planner)
            stays = plan.split == flight.split and balance is None
    return flight.report()


@dataclass(frozen=True)
class _Running:
    """A burst on its way: how it will end."""

    length: int
    max_steps: int
    threshold: int


class _Flight:
    """What `engine/flight.py` is to the engine, with a clock in place of devices."""

    def __init__(self, workload: Workload, machine: Machine, split: Split):
        self.machine, self.split, self.buckets = machine, split, machine.buckets
        self.accounts = Accounts(
            workload.prompts,
            np.full(workload.size, workload.cap),
            prompt_id=workload.prompt_id,
            num_groups=split.dp,
            rows_per_group=1,
        )
        self.pages: PageCounts | None = None
        if machine.has_pools:
            assert machine.memory is not None, "pools need a size"
            self.pages = PageCounts(self.accounts, machine.memory, split)
        self.responses = workload.responses
        self.clock_s, self.prefill_s, self.switch_s = 0.0, 0.0, 0.0
        self.step = self.num_preempted = 0
        self.starts_s: list[float] = []
        self.bursts: list[Ran] = []
        self.switches: list[Switch] = []
        self.balanced: list[Balanced] = []

    def refill(self) -> None:
        """Free rows, and pages, to sequences that wait, which are prefilled."""
        self._grow()
        accounts = self.accounts
        if not len(accounts.waiting):
            return
        rows = self.machine.capacity // self.split.dp
        accounts.compact(rows)
        if self.pages is None:
            seated = accounts.deal()
        else:
            steps, at_once = self.machine.burst_steps, self.machine.check_every
            seated = self.pages.admit(rows, steps, at_once=at_once)
        if not len(seated):
            return
        seconds = self.machine.truth.packed(self.split, *self._prefilled(seated))
        self.prefill_s += seconds
        self.clock_s += seconds

    def _prefilled(self, seated: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Groups and tokens of what is to be prefilled: all samples of a fresh prompt at once.

        The last token is left to the first decode step.
        """
        accounts = self.accounts
        group, tokens = accounts.group(seated), accounts.length[seated] - 1
        if accounts.has_prompt_ids:
            is_fresh = accounts.length[seated] == accounts.prompt_length[seated]
            own = len(accounts.prompt_id) + np.arange(len(seated))
            work = np.where(is_fresh, accounts.sibling[seated], own)
            first = np.unique(np.stack([group, work]), axis=1, return_index=True)[1]
            group, tokens = group[first], tokens[first]
        return group, tokens

    def _grow(self) -> None:
        if self.pages is not None:
            check_every = self.machine.check_every
            room = steps_with_room(self.machine.burst_steps, check_every)
            self.num_preempted += self.pages.grow(room, at_once=check_every)

    def fit(self) -> None:
        """Pages for the next few steps, and the smallest row bucket that holds the live sequences."""
        self._grow()
        accounts = self.accounts
        rows = self.buckets.rows_for(self.split, accounts.fullest)
        if rows != accounts.rows_per_group:
            accounts.compact(rows)

    def launch(self, threshold: int) -> _Running:
        length, steps = self._next(steps_before=0)
        return _Running(length, steps, self._stop_at(threshold))

    def _stop_at(self, threshold: int) -> int:
        compact_at = self.buckets.rows_below(self.split, self.accounts.rows_per_group)
        stop_at = max(compact_at, threshold, self.accounts.refill_at)
        return min(stop_at, self.accounts.fullest - 1)

    def launch_next(self, running: _Running, threshold: int) -> _Running | None:
        accounts = self.accounts
        rows = self.buckets.rows_for(self.split, accounts.fullest)
        if len(accounts.waiting) or rows != accounts.rows_per_group:
            return None
        live = accounts.live
        goes_on = live[accounts.end[live] - accounts.length[live] > running.max_steps]
        threshold = max(running.threshold, self._stop_at(threshold))
        if int(np.bincount(accounts.group(goes_on), minlength=1).max()) <= threshold:
            return None
        length, steps = self._next(running.max_steps)
        if length != running.length:
            return None
        if self.pages is not None and not self.pages.suffice(running.max_steps + steps):
            return None
        return _Running(length, steps, threshold)

    def _next(self, steps_before: int) -> tuple[int, int]:
        """Length bucket and most steps of a burst, behind one of up to `steps_before` steps."""
        check_every, accounts = self.machine.check_every, self.accounts
        context = accounts.max_context + steps_before
        last_context = int(accounts.end[accounts.live].max()) - 1
        length = self.buckets.length_for(min(last_context, context + check_every))
        steps = self.machine.burst_steps
        if length < last_context:
            steps = min(steps, length - context) // check_every * check_every
        return length, steps

    def collect(self, running: _Running) -> Ran | None:
        """None if it takes no step: the one before had reached the threshold."""
        accounts, live, check_every = self.accounts, self.accounts.live, self.machine.check_every
        until_threshold = self._steps_until(running.threshold)
        steps = min(running.max_steps, -(-until_threshold // check_every) * check_every)
        left = self._left(live)
        if self.pages is not None:
            steps = self.pages.draw(left, steps, check_every)
        if not steps:
            return None
        rows, machine = accounts.rows_per_group, self.machine
        sampled, context = np.minimum(left, steps), accounts.length[live] - 1
        held = most_held(context, sampled, accounts.group(live), steps, check_every)
        shape = self.split, rows, running.length
        step_s = fmean(machine.truth.decode_step(*shape, tokens) for tokens in held.tolist())
        seconds = steps * (step_s + machine.host_s_per_sequence * len(live))
        burst = Ran(*shape, len(live), float(held.mean()), steps, seconds)
        self.starts_s.append(self.clock_s)
        self.bursts.append(burst)
        accounts.advance(sampled, left > steps, steps)
        if self.pages is not None:
            self.pages.release_ended()
        self.step += steps
        self.clock_s += seconds
        return burst

    def switch(self, plan: Plan) -> float:
        truth, accounts, source, target = self.machine.truth, self.accounts, self.split, plan.split
        load = accounts.load()
        is_recomputed = load.context < plan.recompute_below
        group = accounts.regroup(target.dp, is_recomputed)
        waits = np.zeros(load.live, bool)
        if self.pages is not None:
            steps = self.machine.check_every
            is_recomputed, waits = self.pages.carry(target, group, is_recomputed, steps)
            accounts.leave(accounts.live[waits])
        seconds = truth.reslice(source, target)
        seconds += carried_seconds(truth, source, target, load, is_recomputed, ~waits)
        rows = self.buckets.rows_for(target, int(np.bincount(group[~waits], minlength=1).max()))
        accounts.seat(group[~waits], num_groups=target.dp, rows_per_group=rows)
        self.split = target
        self.clock_s += seconds
        self.switch_s += seconds
        self.switches.append(
            Switch(
                step=self.step,
                live=load.live,
                source=str(source),
                target=str(target),
                bytes_moved=None,
                seconds=seconds,
                predicted_saving_s=plan.predicted_saving_s,
                predicted_cost_s=plan.predicted_cost_s,
                kv=way(int((is_recomputed | waits).sum()), load.live),
                reason=plan.reason,
                recompute_below=plan.recompute_below,
                at_s=self.clock_s - seconds,
                predicted_remaining_s=plan.predicted_remaining_s,
            )
        )
        return seconds

    def decide(self, planner: Planner) -> tuple[Plan, Balance | None]:
        load = self.accounts.load()
        plan = planner.plan(load, self.split)
        if plan.split != self.split:
            return plan, None
        return plan, planner.balance(load, plan, self.balance_options())

    def balance_options(self) -> list[np.ndarray]:
        accounts = self.accounts
        pages = -(-(accounts.length[accounts.live] - 1) // self.machine.truth.page_size)
        free = np.full(self.split.dp, pages.sum())
        if self.pages is not None:
            pages, free = self.pages.held[accounts.live], self.pages.free
        return options(accounts, pages, free, self.buckets.rows[self.split])

    def balance(self, plan: Balance) -> float:
        truth, accounts, load = self.machine.truth, self.accounts, self.accounts.load()
        seconds = balance_seconds(truth, self.split, load, plan.group)
        group = plan.group if self.pages is None else self.pages.balance(plan.group)
        is_moved, before = group != load.group, accounts.fullest
        most = int(np.bincount(group).max())
        accounts.seat(group, num_groups=self.split.dp, rows_per_group=most)
        self.clock_s += seconds
        self.balanced.append(
            Balanced(
                step=self.step,
                layout=str(self.split),
                sequences=int(is_moved.sum()),
                pages=int((-(-load.context[is_moved] // truth.page_size)).sum()),
                fullest=(before, most),
                seconds=seconds,
                predicted_saving_s=plan.predicted_saving_s,
                predicted_cost_s=plan.predicted_cost_s,
            )
        )
        return seconds

    def report(self) -> Replay:
        bursts = self.bursts
        trace = RolloutTrace(
            times_s=tuple(self.starts_s),
            steps=tuple(np.cumsum([0, *(burst.steps for burst in bursts[:-1])]).tolist()),
            live=tuple(burst.live for burst in bursts),
            done_after=tuple(np.sort(self.accounts.done_after).tolist()),
            layout=tuple(str(burst.split) for burst in bursts),
            total_s=self.clock_s,
            total_steps=self.step,
            switches=tuple(self.switches),
            balanced=tuple(self.balanced),
        )
        return Replay(trace, tuple(bursts), self.prefill_s, self.switch_s, self.num_preempted)

    def _left(self, live: np.ndarray) -> np.ndarray:
        """Tokens that each sequence will still say, int[live]: what no planner may see."""
        return self.responses[live] - (self.accounts.length - self.accounts.prompt_length)[live]

    def _steps_until(self, threshold: int) -> int:
        """Decode steps until no group has more than `threshold` live sequences."""
        live = self.accounts.live
        left, group = self._left(live), self.accounts.group(live)
        steps = 0
        for number in range(self.split.dp):
            members = np.sort(left[group == number])
            if len(members) > threshold:
                steps = max(steps, int(members[-1 - threshold]))
        return steps
