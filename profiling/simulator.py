"""A rollout on a simulated clock: the planner that ships, the engine's rules, known response lengths.

Real are the planner, the buckets and the accounts of the sequences (`engine/accounts.py`); the loop
follows `engine/rollout.py` and `engine/flight.py` move by move. Every duration is looked up in a
latency model, the truth; the planner may believe in another one. Free of charge are what no latency
model knows: the host's work between two bursts. Its pool holds every sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pat_jax.config import RolloutConfig
from pat_jax.engine.accounts import Accounts
from pat_jax.engine.balance import options
from pat_jax.engine.buckets import Buckets
from pat_jax.engine.trace import Balanced, RolloutTrace, Switch
from pat_jax.planning.balance import balance_seconds
from pat_jax.planning.carry import carry_seconds
from pat_jax.planning.latency import LatencyModel
from pat_jax.planning.memory import MemoryModel
from pat_jax.planning.planner import Planner
from pat_jax.planning.types import Balance, Load, Plan, Split, way


@dataclass(frozen=True)
class Workload:
    """One rollout's sequences, and how long each will turn out to be."""

    prompts: np.ndarray  # int[sequences], tokens
    responses: np.ndarray  # int[sequences], tokens; what no planner may see
    cap: int  # tokens; longer responses are cut

    def __post_init__(self):
        if not ((self.responses >= 1).all() and (self.responses <= self.cap).all()):
            raise ValueError(f"response lengths must lie in 1 … {self.cap}, the cap.")

    @property
    def size(self) -> int:
        return len(self.responses)

    def load(self, capacity: int) -> Load:
        """What is known before the first token, when so many sequences have rows at once."""
        live = min(self.size, capacity)
        zeros = np.zeros(live, int)
        budget = np.full(live, self.cap)
        return Load(zeros, zeros, self.prompts[:live], budget, waiting=self.size - live)


@dataclass(frozen=True)
class Burst:
    """Steps of one decode burst, alike in layout and buckets."""

    split: Split
    rows: int  # row bucket of a group
    length: int  # cache length, tokens
    live: int  # unfinished sequences when it began
    steps: int
    seconds: float


@dataclass(frozen=True)
class Replay:
    trace: RolloutTrace
    bursts: tuple[Burst, ...]
    prefill_s: float
    switch_s: float
    balanced: tuple[Balanced, ...] = ()

    @property
    def total_s(self) -> float:
        return self.trace.total_s

    @property
    def decode_s(self) -> float:
        return sum(burst.seconds for burst in self.bursts)

    @property
    def balance_s(self) -> float:
        return sum(balance.seconds for balance in self.balanced)

    @property
    def path(self) -> list[tuple[int, str]]:
        """(decode step, layout) of the start and of every switch."""
        return [
            (0, self.trace.layout[0] if not self.trace.switches else self.trace.switches[0].source),
            *((switch.step, switch.target) for switch in self.trace.switches),
        ]


@dataclass(frozen=True)
class Machine:
    """Where a rollout is replayed: what things really cost there, and the shapes compiled for it."""

    truth: LatencyModel
    splits: tuple[Split, ...]
    buckets: Buckets
    burst_steps: int = 64
    check_every: int = 8
    memory: MemoryModel | None = None  # what fits there; None: everything

    @classmethod
    def of(
        cls,
        truth: LatencyModel,
        splits: Sequence[Split],
        config: RolloutConfig,
        *,
        capacity: int,
        memory: MemoryModel | None = None,
    ) -> "Machine":
        buckets = Buckets.build(
            splits,
            capacity=capacity,
            min_rows=config.min_rows,
            min_length=config.min_length,
            max_length=config.max_prompt_length + config.max_completion_length,
        )
        return cls(truth, tuple(splits), buckets, config.burst_steps, config.check_every, memory)

    @property
    def capacity(self) -> int:
        """Sequences that have rows at once; others wait until one of them ends."""
        return min(split.dp * self.buckets.rows[split][-1] for split in self.splits)


def replay(workload: Workload, planner: Planner, machine: Machine) -> Replay:
    """Runs one rollout to its end under `planner`."""
    flight = _Flight(workload, machine, planner.start(workload.load(machine.capacity)))
    while flight.accounts.has_work:
        flight.refill()
        load = flight.accounts.load()
        plan = planner.plan(load, flight.split)
        if plan.split != flight.split:
            source, seconds = flight.split, flight.switch(plan)
            planner.observe_switch(source, plan, seconds)
        elif (balance := planner.balance(load, plan, flight.balance_options())) is not None:
            planner.observe_balance(balance, flight.balance(balance))
        flight.fit()
        burst = flight.burst(plan.threshold)
        planner.observe(burst.split, burst.rows, burst.length, burst.seconds / burst.steps)
    return flight.report()


class _Flight:
    """What `engine/flight.py` is to the engine, with a clock in place of devices."""

    def __init__(self, workload: Workload, machine: Machine, split: Split):
        self.machine, self.split, self.buckets = machine, split, machine.buckets
        self.accounts = Accounts(
            workload.prompts,
            np.full(workload.size, workload.cap),
            num_groups=split.dp,
            rows_per_group=1,
        )
        self.responses = workload.responses
        self.length = self.buckets.lengths[0]
        self.clock_s, self.prefill_s, self.switch_s, self.step = 0.0, 0.0, 0.0, 0
        self.starts_s: list[float] = []
        self.bursts: list[Burst] = []
        self.switches: list[Switch] = []
        self.balanced: list[Balanced] = []

    def refill(self) -> None:
        """Free rows to sequences that wait, which are prefilled."""
        accounts = self.accounts
        if not len(accounts.waiting):
            return
        accounts.compact(self.machine.capacity // self.split.dp)
        seated = accounts.deal()
        if not len(seated):
            return
        most = int(np.bincount(accounts.group(seated)).max())
        longest = int(accounts.length[seated].max())
        seconds = self.machine.truth.recompute(self.split, most, longest)
        self.prefill_s += seconds
        self.clock_s += seconds

    def fit(self) -> None:
        """The smallest buckets that hold the live sequences and a few more steps of them."""
        accounts = self.accounts
        rows = self.buckets.rows_for(self.split, accounts.fullest)
        if rows != accounts.rows_per_group:
            accounts.compact(rows)
        ahead = accounts.max_context + self.machine.check_every
        self.length = self.buckets.length_for(min(self._last_end() - 1, ahead))

    def burst(self, plan_threshold: int) -> Burst:
        machine, accounts, live = self.machine, self.accounts, self.accounts.live
        rows = accounts.rows_per_group
        compact_at = self.buckets.rows_below(self.split, rows)
        threshold = min(max(compact_at, plan_threshold), accounts.fullest - 1)
        check_every = machine.check_every
        most = min(machine.burst_steps, self._steps_possible()) // check_every * check_every
        until_threshold = self._steps_until(threshold)
        steps = min(most, -(-until_threshold // check_every) * check_every)
        seconds = steps * machine.truth.decode_step(self.split, rows, self.length)
        burst = Burst(self.split, rows, self.length, len(live), steps, seconds)
        self.starts_s.append(self.clock_s)
        self.bursts.append(burst)
        left = self._left(live)
        accounts.advance(np.minimum(left, steps), left > steps, steps)
        self.step += steps
        self.clock_s += seconds
        return burst

    def switch(self, plan: Plan) -> float:
        truth, accounts, source, target = self.machine.truth, self.accounts, self.split, plan.split
        load = accounts.load()
        is_recomputed = load.context < plan.recompute_below
        seconds = truth.reslice(source, target)
        seconds += carry_seconds(truth, source, target, load, plan.recompute_below)
        group = accounts.regroup(target.dp, is_recomputed)
        rows = self.buckets.rows_for(target, int(np.bincount(group).max()))
        accounts.seat(group, num_groups=target.dp, rows_per_group=rows)
        self.split = target
        self.clock_s += seconds
        self.switch_s += seconds
        self.switches.append(
            Switch(
                step=self.step,
                live=load.live,
                source=str(source),
                target=str(target),
                bytes_moved=0,
                seconds=seconds,
                predicted_saving_s=plan.predicted_saving_s,
                predicted_cost_s=plan.predicted_cost_s,
                kv=way(int(is_recomputed.sum()), load.live),
                reason=plan.reason,
                recompute_below=plan.recompute_below,
            )
        )
        return seconds

    def balance_options(self) -> list[np.ndarray]:
        accounts = self.accounts
        pages = -(-(accounts.length[accounts.live] - 1) // self.machine.truth.page_size)
        free = np.full(self.split.dp, pages.sum())
        return options(accounts, pages, free, self.buckets.rows[self.split])

    def balance(self, plan: Balance) -> float:
        truth, accounts, load = self.machine.truth, self.accounts, self.accounts.load()
        seconds = balance_seconds(truth, self.split, load, plan.group)
        is_moved, before = plan.group != load.group, accounts.fullest
        most = int(np.bincount(plan.group).max())
        accounts.seat(plan.group, num_groups=self.split.dp, rows_per_group=most)
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
        )
        return Replay(trace, tuple(bursts), self.prefill_s, self.switch_s, tuple(self.balanced))

    def _last_end(self) -> int:
        return int(self.accounts.end[self.accounts.live].max())

    def _steps_possible(self) -> int:
        """Decode steps before a live sequence would outgrow the length bucket."""
        if self._last_end() - 1 <= self.length:
            return self.machine.burst_steps
        return self.length - self.accounts.max_context

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
