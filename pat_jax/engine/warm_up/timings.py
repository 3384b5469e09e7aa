"""The times of an engine's programs: those known before, and those that a warm-up measures.

Known times are kept if the programs still take as long, and rescaled if not. Knows tables and runs.
Does not know what a program does.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from pat_jax.common.hosts.together import process_group
from pat_jax.engine.device.programs.program_specs import ProgramSpecs
from pat_jax.engine.relocation.rounds import SIZES
from pat_jax.layout.layout import Layout
from pat_jax.planning.latency.model import ROUNDS, TABLES, LatencyModel
from pat_jax.planning.types import Split

log = logging.getLogger(__name__)

ENOUGH_S = 1.0  # a program whose timed runs took so many seconds is not run again
NOISE = 1.1  # times that differ by at most this factor count as equal
Table = Mapping[Any, float]  # seconds, by a tuple with one layout, or the two layouts of a switch
Layouts = tuple[Split, ...]


class Timed(NamedTuple):
    """A program to time."""

    table: str  # the field of `LatencyModel` that has its time
    key: tuple
    once: Callable[[], float]  # runs the program; returns the seconds that it took
    per: int = 1  # number by which the seconds of a run are divided, such as steps of a burst


class Timings:
    """The seconds of programs, in the tables of `LatencyModel`. `known` has those measured before,
    `new` those of other programs, `again` those of known programs that are measured once more."""

    def __init__(
        self, specs: ProgramSpecs, known: LatencyModel | None, *, recheck: bool, runs: int
    ):
        """
        Args:
          known, recheck, runs: see `Warmup`.
        """
        self.specs = specs
        self.recheck = recheck
        self.runs = runs
        self.known, self.new, self.again = ({name: {} for name in TABLES} for _ in range(3))
        self.sample: Split | None = None  # the layout whose bursts are rechecked for all layouts
        self.drafts_from = specs.drafter.come_from
        if known and not specs.drafts.num_draft_tokens:
            self.drafts_from = known.drafts_from  # keep known times of another drafter
        if known:
            self.known |= self._usable(known.of_drafts_from(self.drafts_from))
        # A CPU has no communicators to create. If few programs are measured there, no program has
        # to run before it is needed, and a first run that takes a second is as good as others.
        platform = next(iter(specs.layouts.values())).platform
        self.is_brief = platform == "cpu" and specs.first is not None

    def _usable(self, known: LatencyModel) -> dict[str, dict]:
        """The known tables that were measured with programs of the same sizes as this engine's."""
        specs = self.specs
        names = {"decode_table", "verify_table", "reshard_table"}
        if known.round_tokens == self._round_tokens:
            names.add("migrate_table")
        one_call = (specs.prefill_blocks, specs.page_size)
        if (known.prefill_blocks, known.page_size) == one_call:
            names.add("prefill_table")
        return {name: dict(getattr(known, name)) for name in names}

    @property
    def _round_tokens(self) -> int:
        return SIZES[0] * self.specs.page_size

    @property
    def measured(self) -> LatencyModel:
        """See `Warmup.measured`."""
        tables: dict[str, Any] = {
            name: rescaled(self.known[name], self.again[name], self.sample) | self.new[name]
            for name in TABLES
        }
        return LatencyModel(
            **tables,
            prefill_blocks=self.specs.prefill_blocks,
            page_size=self.specs.page_size,
            round_tokens=self._round_tokens,
            reads=self.specs.reads,
            drafts_from=self.drafts_from,
        )

    def note(self, *programs: Timed) -> None:
        """Runs each program and records the fastest run, because noise only adds time.

        A program with a known time is timed only to recheck it. Programs take turns, so that other
        load on the machine affects all of them alike."""
        is_known = [program.key in self.known[program.table] for program in programs]
        wanted = [int(self.recheck) if known else self.runs for known in is_known]
        seconds: list[list[float]] = [[] for _ in programs]
        for nth in range(1 + max(wanted)):
            for program, runs, took in zip(programs, wanted, seconds, strict=True):
                if nth > runs or sum(took[0 if self.is_brief else 1 :]) >= ENOUGH_S:
                    continue
                here_s = program.once()
                took.append(
                    process_group().agree("seconds of a program", lambda here_s=here_s: here_s)
                )
        for program, known, runs, took in zip(programs, is_known, wanted, seconds, strict=True):
            if runs:
                noted = self.again if known else self.new
                noted[program.table][program.key] = min(took) / program.per

    def are_taken(self, table: str, *keys: tuple) -> bool:
        """Returns whether the known times of all `keys` are used, so that their programs need not
        run again."""
        return self.is_brief and all(key in self.known[table] for key in keys)

    def know_all_of(self, layout: Layout) -> bool:
        """Returns whether the times of all programs of a layout are known."""
        split = layout.split
        measured = self.specs.measured
        known = self.known
        if split.dp > 1 and (split, split, ROUNDS[0]) not in known["migrate_table"]:
            return False
        if not all((split, length) in known["prefill_table"] for length in measured.lengths):
            return False
        at = [(split, *one) for one in product(measured.rows[split], measured.lengths)]
        drafting = [
            (*one, num_draft_tokens)
            for one in at
            for num_draft_tokens in self.specs.measured_drafts(*one)
        ]
        tables = (known["decode_table"], at), (known["verify_table"], drafting)
        return all(one in table for table, ones in tables for one in ones)

    def log_changes(self) -> None:
        for name in TABLES:
            for line in describe(name, self.known[name], self.again[name]):
                log.info("%s", line)


def changes(known: Table, again: Table) -> dict[Layouts, float]:
    """Returns the factor by which the times of each layout and switch changed, if above noise.

    All times of a layout or switch are taken to have changed by the same factor: the median factor
    of the programs measured again. So one odd run among several changes nothing.

    Args:
      again: seconds of some programs of `known`, measured now.
    """
    ratios = defaultdict(list)
    for key, seconds in again.items():
        ratios[_layouts(key)].append(seconds / known[key])
    factors = {layouts: median(seen) for layouts, seen in ratios.items()}
    return {k: factor for k, factor in factors.items() if not 1 / NOISE <= factor <= NOISE}


def rescaled(known: Table, again: Table, sample: Split | None = None) -> dict[Any, float]:
    """Returns the `known` seconds, multiplied by the factors of `changes`.

    Args:
      sample: the layout whose change applies to layouts of which nothing was measured again.
    """
    factors = changes(known, again)
    ran = set(map(_layouts, again))
    for key in known:
        if sample is not None and (layouts := _layouts(key)) not in ran:
            factors[layouts] = factors.get((sample,), 1.0)
    return {key: seconds * factors.get(_layouts(key), 1.0) for key, seconds in known.items()}


def describe(name: str, known: Table, again: Table) -> list[str]:
    """Returns a log line for each layout or switch whose times in the table `name` changed."""
    return [
        f"profile: {name} of {_named(layouts)} takes {factor:.2f} times as long now"
        for layouts, factor in changes(known, again).items()
    ]


def _named(layouts: Layouts) -> str:
    if len(layouts) > len(set(layouts)):
        return f"{layouts[0]}, between its replicas,"
    return " to ".join(map(str, layouts))


def _layouts(key: tuple) -> Layouts:
    return tuple(part for part in key if isinstance(part, Split))
