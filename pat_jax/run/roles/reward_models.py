"""The reward models that --reward names: finds their files, and builds what scores with them.

Knows options and checkpoints. Does not know when responses are scored, nor how scores are added.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pat_jax.common.devices import Device
from pat_jax.common.errors import UserError
from pat_jax.common.hub import local_checkpoint
from pat_jax.common.json_text import read_json_object
from pat_jax.common.rules import require
from pat_jax.config.rewards import RewardModelOptions
from pat_jax.config.role_table import Role
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.sizing.draft_choice import checkpoint_shape
from pat_jax.layout.buckets import ladder, largest_length
from pat_jax.layout.layout import shard_bytes
from pat_jax.layout.mesh import padded_for
from pat_jax.models.checkpoints.hf_config import CONFIG_FILE
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.planning.memory import MemoryModel, gib
from pat_jax.rl.batches.packing import shapes
from pat_jax.rl.rewards.model import RewardModel
from pat_jax.rl.text.scored_text import check_template
from pat_jax.rl.text.tokenizer import Chat, HuggingFaceTokenizer, check_vocabulary
from pat_jax.run.roles.role_models import Division, layout_of
from pat_jax.run.roles.role_params import load_reader
from pat_jax.training.build import DTYPES, ROW_UNIT
from pat_jax.training.reader import Reader, TextScorer
from pat_jax.training.role_model import RoleModel

LEAST_LENGTH = 1024  # tokens of the longest text, where the option is auto
SHORTEST_ROW = 128  # tokens
_OTHERWISE = ", or write a function of a module that is called model as model.py:function"


@dataclass(frozen=True)
class RewardRole:
    """One reward model, before and after its weights are loaded."""

    model: RoleModel
    scorer: TextScorer
    scores: RewardModel

    @property
    def reader(self) -> Reader:
        return self.scorer.reader

    def load(self) -> None:
        """Loads the weights into their shards."""
        load_reader(self.model, self.reader)


RewardModels = Mapping[str, RewardRole]  # by the value of --reward


def build_reward_models(
    roles: Iterable[Role],
    options: RewardModelOptions,
    rollout: RolloutConfig,
    devices: Sequence[Device],
    division: Division,
) -> RewardModels:
    """Returns the reward models of a run, without their weights.

    Args:
      roles: the run's roles; those that are no reward models are left out.

    Raises:
      UserError: a directory does not exist, or holds no usable reward model, tokenizer or template.
    """
    number = rollout.num_responses
    found: dict[str, RewardRole] = {}
    for role in roles:
        if role.devices == "reward":
            one = find_reward_model(role, f"option --reward is {role.name!r}", _OTHERWISE)
            longest = _max_length(options, role.source, one.shape, rollout.max_length)
            found[role.name] = one.handle(options, longest, number, devices, division)
    return found


@dataclass(frozen=True)
class FoundRewardModel:
    """A reward model's shape and tokenizer; its programs are still to be made."""

    role: Role
    folder: Path
    shape: ModelConfig
    tokenizer: HuggingFaceTokenizer

    @property
    def pad_id(self) -> int | None:
        """The checkpoint's `pad_token_id`; see `RewardModel`."""
        return read_json_object(self.folder / CONFIG_FILE).get("pad_token_id")

    def handle(
        self,
        options: RewardModelOptions,
        max_length: int,
        number: int,
        devices: Sequence[Device],
        division: Division,
    ) -> RewardRole:
        """Returns the model with what scores texts, `number` of them at once, the longest of
        `max_length` tokens. Nothing is compiled or loaded yet."""
        policy = Policy.from_config(padded_for(devices, self.shape))
        dtype = DTYPES[self.role.compute.dtype]
        layout = layout_of(policy.config, devices, dtype, division)
        model = RoleModel(self.role, policy, layout)
        longest = largest_length(max_length, ROW_UNIT)
        buckets = ladder(min(SHORTEST_ROW, longest), longest)
        rows = shapes(buckets, options.tokens_per_micro_batch, layout.split.dp, number)
        scorer = TextScorer(model.reader(rows), rows)
        scores = RewardModel(
            self.role.name,
            self.tokenizer,
            scorer,
            max_length=max_length,
            pad_id=self.pad_id,
            fills=scorer.fills,
        )
        return RewardRole(model, scorer, scores)


def find_reward_model(
    role: Role, option: str, otherwise: str = "", chat: Chat | None = None
) -> FoundRewardModel:
    """Returns the reward model in the files of a role.

    Args:
      option: the option and its value, and `otherwise` what else it could be, for messages.
      chat: settings of its chat template.

    Raises:
      UserError: there is no such model, or its tokenizer or chat template cannot be used.
    """
    shape = checkpoint_shape(role.source, role.option, head=None)
    if shape is None:
        raise UserError(
            f"{option}: expected the directory of a reward model, or its name on the Hugging Face Hub as "
            f"owner/name, and there is no such directory; correct it{otherwise}."
        )
    if shape.head != "scalar":
        raise UserError(
            f"{option}: expected a …ForSequenceClassification checkpoint with one label, and this model "
            "generates text; choose a reward model, or train one from it."
        )
    folder = Path(local_checkpoint(role.source, option=role.option, weights=False))
    tokenizer = HuggingFaceTokenizer(folder, chat)
    check_vocabulary(tokenizer, shape.vocab_size, source=str(folder))
    check_template(tokenizer)
    return FoundRewardModel(role, folder, shape, tokenizer)


def _max_length(options: RewardModelOptions, name: str, shape: ModelConfig, longest: int) -> int:
    """Returns the most tokens of a text, in rollouts of up to `longest` tokens of the policy."""
    asked = options.max_length
    context = shape.max_position
    if asked is None:
        return min(context, max(LEAST_LENGTH, 2 * longest))
    expected = f"at most the {context:,} tokens of the context of {name!r}"
    require(asked <= context, "reward_model.max_length", asked, expected)
    return asked


def resident_of(models: RewardModels) -> list[Any]:
    """Returns shapes with shardings of the weights, which stay on the devices."""
    return [tree for one in models.values() for tree in one.reader.resident]


def load_reward_models(models: RewardModels) -> None:
    for one in models.values():
        one.load()


def check_room(
    models: RewardModels,
    memory: MemoryModel,
    alone: Callable[[Reader], int | None] = lambda _: None,
) -> None:
    """Checks, after compilation, that there is room for the largest pass of a reward model.

    It runs after a rollout, whose weights are still there and whose KV cache is not.

    Args:
      memory: the memory of the rollouts.
      alone: returns the bytes that models hold on a reader's devices; None if these do rollouts.

    Raises:
      UserError: a device has less memory than that pass needs.
    """
    for spec, one in models.items():
        programs = one.reader.programs
        weights = max(memory.weights.values())
        resident = memory.resident
        if (held := alone(one.reader)) is not None:
            weights = 0
            resident = held
        taken = max((programs.bytes_taken(key) or 0 for key in programs), default=0)
        held = resident + shard_bytes(one.reader.visiting)
        if (needed := held + weights + taken) > memory.limit:
            raise UserError(
                f"reward {spec!r} needs {gib(needed)} of a device ({gib(held)} of models and training "
                f"state, {gib(weights)} of the rollout's weights, {gib(taken)} while it runs), but it has "
                f"{gib(memory.limit)}; lower --reward_model.max_length or "
                "--reward_model.tokens_per_micro_batch, or use more devices."
            )
