"""Options of a run's placement: which devices each model has."""

import re
from dataclasses import dataclass, field
from typing import Literal

from pat_jax.common.options.declared import SHORT_FORM, Options, option
from pat_jax.common.rules import count, matches

_RANGE = r"\d{1,4}(-\d{1,4})?"
PLACE = matches(
    rf"|all|half|quarter|{_RANGE}(,{_RANGE})*",
    "devices such as 0-3 or 0,2,4-7, or all, half or quarter (the first so many)",
)
SHARES = {"all": 1, "half": 2, "quarter": 4}


@dataclass(frozen=True)
class PlacementConfig(Options):
    """The devices of each model of a run, numbered from 0 in the run's order. With several
    processes, each process numbers its own devices (docs/placement.md)."""

    SECTION = "placement."

    name: Literal["flatten", "interleave", "separate", "split", "auto"] = field(
        default="flatten", metadata=SHORT_FORM
    )
    """flatten: all models have all devices, and the stages of an iteration follow one another.
    interleave: reference and teacher have the first half of the devices, and reward models the
    second half; these models score the responses one after the other. separate: rollouts have the
    first half, and all other models the second half. split, for PPO on four or more processes:
    rollouts have all devices; policy, reference and teacher have the first half of the processes,
    and critic and reward models the second half. With several processes, each process divides its
    own devices into halves, except with split. auto: as flatten; after the second iteration, the
    run prints one line that predicts, from the measured times of the stages, how long the other
    placements would take."""
    lag: int = option(0, count(0, 1))
    """Updates by which the policy that samples a batch is older than the policy that learns from
    it. 1: each batch is generated while the models learn from the batch before, on other devices
    (one step off-policy). --algorithm.rollout_correction none then becomes token_truncate."""
    rollout: str = option("", PLACE)
    """Devices of rollouts, in place of those that --placement gives them: 0-3, 0,2,4-7, all, half
    or quarter. With separate, all other models then have the other devices. With several processes,
    the numbers count the devices of each process from 0, and all processes use the same numbers."""
    policy: str = option("", PLACE)
    """Devices that train the policy."""
    critic: str = option("", PLACE)
    """Devices of the critic."""
    reference: str = option("", PLACE)
    """Devices of the reference model."""
    teacher: str = option("", PLACE)
    """Devices of the teacher model."""
    reward: str = option("", PLACE)
    """Devices of the reward models."""

    def __post_init__(self):
        super().__post_init__()
        if self.name in ("split", "auto"):
            self.need_only(["name"], f"with --placement {self.name}")

    def check_roles(self, **is_there: bool) -> None:
        """Raises OptionError if a model has devices that the run does not have."""
        for role, is_used in is_there.items():
            model = "reward model" if role == "reward" else role
            expected = f"nothing in a run without a {model}"
            self.need(role, is_used or not getattr(self, role), expected)

    def check_lag(self, *, train: bool, deterministic: bool, top_k: int) -> None:
        """Raises OptionError if --placement.lag is 1 and another option excludes that."""
        for is_wrong, expected in (
            (not train, "0 with --train false, which updates nothing"),
            (deterministic, "0 with --deterministic"),
            (top_k > 0, "0 with --teacher.top_k, whose loss no correction weighs"),
        ):
            self.need("lag", not (self.lag and is_wrong), expected)

    def positions(self, role: str, count: int, whole: str) -> tuple[int, ...]:
        """Returns the indices below `count` of the devices that a role's option names; empty if the
        option is not given. Raises OptionError if it names a device that is not there.

        Args:
          whole: whose devices `count` counts, for messages, such as "the run's".
        """
        if (text := getattr(self, role)) in SHARES:
            return tuple(range(max(1, count // SHARES[text])))
        found: set[int] = set()
        for begin, end in re.findall(r"(\d+)(?:-(\d+))?", text):
            found |= {*range(int(begin), int(end or begin) + 1)}
        is_there = (found != set() and max(found) < count) or not text
        self.need(role, is_there, f"devices from 0 to {count - 1}, of {whole} {count}")
        return tuple(sorted(found))
