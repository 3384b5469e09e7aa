"""The parts of a run that work in the tail of a rollout, on a half of the devices each.

The rollout ends on the first half. Copies of the models that read it are on the second. Knows
options, roles and devices. Does not know when the tail begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pat_jax.common.devices import Device
from pat_jax.common.errors import UserError
from pat_jax.common.rules import require
from pat_jax.config.run import RunConfig
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sizing.memory import gib, shard_bytes
from pat_jax.rl.rewards.model import RewardModel
from pat_jax.run.reward_models import RewardModels
from pat_jax.run.start.placed_layouts import PlacedLayouts
from pat_jax.run.start.places import Places
from pat_jax.run.start.rollouts import Rollouts
from pat_jax.training.build_copies import copied_readers, half_layouts
from pat_jax.training.copied_reader import CopiedReader, frozen_params
from pat_jax.training.reader import Reader
from pat_jax.training.roles import Prediction, Roles
from pat_jax.training.text_scorer import TextScorer


@dataclass(frozen=True)
class CopiedJudge:
    """A reward model with a copy of its parameters."""

    scores: RewardModel
    scorer: TextScorer  # by the copy


@dataclass(frozen=True)
class TailModels:
    """What works in the tail of a run's rollouts."""

    at: int  # responses left
    engine: RolloutEngine  # of the first half
    devices: Sequence[Device]  # the second half
    columns: Sequence[CopiedReader]
    judges: Sequence[CopiedJudge]
    copies: Sequence[CopiedReader]  # of all models

    @property
    def reads(self) -> list[Prediction]:
        """The predictions of the copies."""
        return [Prediction(x.column, x.reader.devices, True, x.read) for x in self.columns]

    @property
    def described(self) -> str:
        layout, *_ = self.engine.layouts
        return (
            f"the last {self.at} responses of a rollout continue on half of the devices, in {layout}; "
            "models read on the other half"
        )

    @property
    def readers(self) -> list[Reader]:
        return [one.reader for one in self.copies]

    def to_compile(self, *, by_need: bool) -> int:
        """Returns how many programs are to be compiled; see `Reader.to_compile`."""
        of_copies = (len(reader.to_compile(by_need=by_need)) for reader in self.readers)
        return sum(of_copies) + self.engine.to_compile()

    def compile(self, *, by_need: bool) -> None:
        """Compiles the programs of the copies; see `Reader.compile`."""
        for reader in self.readers:
            reader.compile(by_need=by_need)

    def check_room(self, roles: Roles, limit: float) -> None:
        """Checks, after compilation, that the second half has room for the copies.

        Args:
          limit: bytes of a device.

        Raises:
          UserError: a device has less memory than they need.
        """
        held, copies = (
            shard_bytes(roles.resident_on(self.devices)),
            shard_bytes([reader.abstract_params for reader in self.readers]),
        )
        if len({device.process_index for device in self.devices}) > 1:
            # Other parts than a device keeps, of one model after the other.
            copies += max(shard_bytes(one.gathered) for one in self.copies)
        # With one process what `gather` gives is a copy.
        every = [(x.programs, key) for x in self.readers for key in x.programs]
        programs = [pair for pair in every if pair[1].name == "predict"]
        taken = max((table.bytes_taken(key) or 0 for table, key in programs), default=0)
        if (needed := held + copies + taken) > limit:
            raise UserError(
                f"option --placement.tail is {self.at}: while the rollout ends, {gib(needed)} of a device are "
                f"needed ({gib(held)} of models and training state, {gib(copies)} of copies of models, "
                f"{gib(taken)} while they read), but it has {gib(limit)}; expected 0, or more devices."
            )


def build_tail(
    config: RunConfig,
    places: Places,
    placed: PlacedLayouts,
    roles: Roles,
    rollouts: Rollouts,
    reward_models: RewardModels,
    eos_ids: Sequence[int],
) -> TailModels | None:
    """Returns what works in the tail of rollouts; None: they end on all devices.

    Raises:
      UserError: it does not fit these options, models or devices.
    """
    at = config.placement.tail
    if not at:
        return None
    first, second = places.halves
    generates = rollouts.drafter.drafts.is_generated
    expected = "0 with drafts that a model generates (--speculation.source suffix makes others)"
    require(not generates, "placement.tail", at, expected)
    columns = list(copied_readers(config, roles, second))
    judges, copies = [], list(columns)
    for one in reward_models.values():
        source, target = half_layouts(config, one.reader.held, second)
        scorer = one.scorer_in(target)
        params = partial(frozen_params, one.reader)
        copies.append(CopiedReader(scorer.reader, one.reader.held, source, params))
        judges.append(CopiedJudge(one.scores, scorer))
    expected = (
        "0 where no model reads responses before an update (no reference, critic or reward model)"
    )
    require(len(copies) > 0, "placement.tail", at, expected)
    on_half = rollouts.on(first)
    layouts, resident = dict(placed.tail), roles.resident_on(first)
    on_half.memory_alone(layouts, resident, f"option --placement.tail is {at}")
    engine = on_half.engine(layouts, eos_ids, resident, most=at)
    return TailModels(at, engine, second, columns, judges, copies)
