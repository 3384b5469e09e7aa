"""What one rollout did, burst by burst and switch by switch: a record to plot, store and replay.

Knows numbers and names. Does not know who measured them.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Self

from pat_jax.common.json_text import parse_json
from pat_jax.planning.types import MIGRATE_ALL, Carry


@dataclass(frozen=True)
class Switch:
    """A change of layout during generation, as predicted and as it went."""

    step: int  # decode steps done when it happened
    live: int  # unfinished sequences at that moment
    source: str  # such as dp2tp1
    target: str
    # From device to device, weights and KV together, all devices; None of a replay, which moves none.
    bytes_moved: int | None
    seconds: float  # what it took
    predicted_saving_s: float  # decode time saved until the end, before the cost
    predicted_cost_s: float
    kv: Carry
    reason: str
    recompute_below: int = MIGRATE_ALL  # see Plan
    least_bytes: int = 0  # of these, what no other way of moving the same could save
    extra_bytes: int = 0  # of one device, at most, beside what it held before
    at_s: float = 0.0  # when it began, since the rollout began
    predicted_remaining_s: float = 0.0  # from then to the end, itself included

    @property
    def predicted_stay_s(self) -> float:
        """What staying in `source` to the end would have taken."""
        return self.predicted_remaining_s + self.predicted_saving_s


@dataclass(frozen=True)
class Balanced:
    """Sequences moved between the groups of a layout, as predicted and as it went."""

    step: int  # decode steps done when it happened
    layout: str
    sequences: int  # that moved
    pages: int  # that moved; one that several sequences share counts once
    fullest: tuple[int, int]  # live sequences of the fullest group, before and after
    seconds: float
    predicted_saving_s: float  # decode time to the end, before the cost
    predicted_cost_s: float
    bytes_moved: int = 0  # from device to device, all devices; empty slots of buffers included
    least_bytes: int = 0  # of the pages that moved


@dataclass(frozen=True)
class RolloutTrace:
    """One entry for each burst, all taken when the burst began.

    The last burst ends at `total_s` with no live sequence; the time between two bursts is the
    host's, switches included.
    """

    times_s: tuple[float, ...]  # since the rollout began
    steps: tuple[int, ...]  # decode steps done
    live: tuple[int, ...]  # unfinished sequences, over all data-parallel groups
    layout: tuple[str, ...]  # in force during the burst
    total_s: float
    total_steps: int
    switches: tuple[Switch, ...] = ()
    balanced: tuple[Balanced, ...] = ()
    done_after: tuple[int, ...] = ()  # decode steps after which each sequence was done, ascending
    tokens_per_step: tuple[float, ...] = ()  # of a sequence, in each burst; above 1 with drafts
    drafted: tuple[int, ...] = ()  # tokens of drafts that each burst has verified
    accepted: tuple[int, ...] = ()  # of these, those that were said
    # Of each burst, for each of `draft_counts.SOURCES`: tokens verified, said, and said on branches; zeros of drafts
    # that are not copied.
    by_source: tuple[tuple[tuple[int, ...], ...], ...] = ()
    draft_saving_s: float | None = None  # of bursts whose drafts were priced; None: there were none
    predicted_draft_saving_s: float | None = None
    # What a replay needs beside. Of each sequence: tokens of its prompt and of its response, its prompt's id,
    # and where a planner has predicted them, the tokens of the response that were expected.
    sequences: tuple[tuple[float, ...], ...] = ()
    capacity: int = 0  # sequences that can run at once
    is_computed: bool = False  # on a simulated clock: nothing ran

    def __post_init__(self):
        lengths = {len(self.times_s), len(self.steps), len(self.live), len(self.layout)}
        if len(lengths) > 1:
            raise ValueError(f"a trace needs one entry for each burst: got lengths {lengths}.")

    @property
    def path(self) -> list[str]:
        """Layouts one after the other; the first may have been left before a token was decoded."""
        first = [switch.source for switch in self.switches[:1]] or list(self.layout[:1])
        return first + [switch.target for switch in self.switches]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raises ValueError, TypeError, KeyError or AttributeError where `to_json` has not written it."""
        fields: Any = parse_json(text)
        return cls.from_fields(fields)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """From what `dataclasses.asdict` made of one."""
        fields = dict(fields)
        switches = tuple(Switch(**switch) for switch in fields.pop("switches"))
        balanced = tuple(map(_balanced, fields.pop("balanced", ())))
        rest: dict[str, Any] = {name: _as_tuples(x) for name, x in fields.items()}
        return cls(**rest, switches=switches, balanced=balanced)


def _balanced(move: dict[str, Any]) -> Balanced:
    """Older traces have moves in two stages."""
    retired = ("pages_sent", "steps_between")
    rest: dict[str, Any] = {name: x for name, x in move.items() if name not in retired}
    rest["fullest"] = tuple(move["fullest"])
    return Balanced(**rest)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value
