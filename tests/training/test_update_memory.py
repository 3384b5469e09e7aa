"""The update's memory, predicted from its compiled programs."""

import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from runs import QWEN3, SMALL_ROLLOUT, TINY, run, write_checkpoint, write_problems
from trainers import CHAIN, LENGTH, ROWS, compile_named, make_trainer

from pat_jax.commands import plan
from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.engine.device.draft.draft_model import ModelDrafter
from pat_jax.engine.sizing.draft_memory import draft_bytes
from pat_jax.layout.buckets import Drafts
from pat_jax.layout.layout import shard_bytes
from pat_jax.models.presets import preset
from pat_jax.planning.memory import GIB
from pat_jax.profiling.capacity.page import plan_text
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.planned import planned
from pat_jax.profiling.capacity.report import UpdateMemory
from pat_jax.programs.programs import Key
from pat_jax.run.start.exit_head_state import learned_head
from pat_jax.run.start.setup import Setup, build
from pat_jax.training.build import micro_shapes
from pat_jax.training.roles import Roles
from pat_jax.training.trainer import Trainer
from pat_jax.training.update_memory import (
    STEP,
    Stage,
    check_state,
    check_update,
    shortage,
    stages_of,
    update_stages,
)

CONFIG = parse([*TINY, "--run_dir", "unused"])
OPTIONS = CONFIG.memory_options
SHAPES = [(ROWS, LENGTH), (ROWS, 16 * LENGTH)]
TARGETS = ["dp8tp1", "dp1tp8"]  # of the transfers: the narrowest layout and the widest
OF_ROWS = ["--compute_dtype bfloat16", "--algorithm.tokens_per_micro_batch"]
OF_STATE = ["--optimizer.offload true", "--optimizer.moment_dtype", "--optimizer.weight_dtype"]


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    targets = [CHAIN[name] for name in TARGETS]
    made = make_trainer(CHAIN["dp4tp2"], micro_shapes=SHAPES, targets=targets)
    compile_named(made, "grad", "apply", "transfer")
    return made


def bytes_on_a_device(tree: object) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def test_the_stages_hold_what_is_there_and_take_what_their_programs_say(trainer: Trainer):
    stages = {stage.name: stage for stage in update_stages(Roles(trainer))}
    short, long = (f"gradients of {rows} x {length} tokens" for rows, length in SHAPES)
    transfers = {f"the transfer to {name}" for name in TARGETS}
    assert stages.keys() == {short, long, "the optimizer's step", *transfers}

    params = trainer.trained.init(0)
    gradients, state = bytes_on_a_device(params), shard_bytes(trainer.resident)
    assert state >= 3 * gradients
    for name, stage in stages.items():
        assert stage.held == state + (0 if name in transfers else gradients)
    # Beside the gradients that are added up there are those of the micro-batch, and activations:
    # of each layer's input at least, in float32, of the rows of a device.
    config = trainer.policy.config
    for name, (rows, length) in zip((short, long), SHAPES, strict=True):
        inputs = config.num_layers * rows // 4 * length * config.embed_dim * 4
        assert gradients + inputs < stages[name].taken
    assert stages[long].taken > 4 * stages[short].taken
    for name in TARGETS:
        layout = CHAIN[name]
        received = trainer.policy.init(0, layout.param_shardings(trainer.policy))
        assert bytes_on_a_device(received) <= stages[f"the transfer to {name}"].taken


def test_the_largest_stage_decides():
    stages = [Stage("small", 2 * GIB, GIB), Stage("large", GIB, 3 * GIB)]
    printed = "large: 4 GiB of a device, 3 GiB of them while it runs"
    assert (
        check_update(stages, math.inf, OPTIONS) == check_update(stages, 5 * GIB, OPTIONS) == printed
    )
    with pytest.raises(UserError, match="the update needs 4 GiB of a device for large") as error:
        check_update(stages, 3.9 * GIB, OPTIONS)
    message = str(error.value)
    assert "activations and other temporaries 3 GiB), but it has 3.9 GiB; " in message
    for option in ("--compute_dtype bfloat16", "--algorithm.tokens_per_micro_batch (1024)"):
        assert option in message
    assert "\n" not in message and ("--remat full" in message) == (OPTIONS.compute.remat != "full")
    assert "does not say" in check_update([], 1.0, OPTIONS)


def test_what_would_help_most_is_said_first():
    def advised(stage: Stage, *options: str) -> list[str]:
        own = parse([*TINY, "--run_dir", "unused", *options]).memory_options
        printed = shortage(stage, 1.0, own).rpartition("; ")[2]
        found = {printed.find(name): name for name in OF_ROWS + OF_STATE}
        return [name for at, name in sorted(found.items()) if at >= 0]

    state, rows = Stage("a pass", 3 * GIB, GIB), Stage("a pass", GIB, 3 * GIB)
    assert advised(state) == [*OF_STATE, *OF_ROWS] and advised(rows) == [*OF_ROWS, *OF_STATE]
    step = Stage(STEP, 3 * GIB, GIB, has_rows=False)  # moments are there, wherever they rest
    assert advised(step) == OF_STATE[1:]
    assert advised(step, "--optimizer.moment_dtype", "bfloat16") == OF_STATE[2:]
    assert advised(state, "--optimizer.offload", "true")[0] == OF_STATE[1]
    assert advised(state, "--lora.rank", "8") == OF_ROWS


def test_a_state_without_room_is_refused_before_anything_is_compiled(trainer: Trainer):
    need = shard_bytes(trainer.resident) + 2 * shard_bytes(trainer.abstract_params)
    check_state(Roles(trainer), need)
    with pytest.raises(UserError, match=r"the update needs more than .* gradients twice") as error:
        check_state(Roles(trainer), need - 1)
    assert "use more devices" in str(error.value) and "beta" not in str(error.value)


@pytest.mark.slow  # a whole command
def test_a_run_whose_update_cannot_fit_says_so_before_its_first_rollout(tmp_path: Path):
    """A limit between what the rollout needs and what the update does."""
    held = build(CONFIG, jax.devices()[: CONFIG.devices]).memory
    limit = 1.2 * max(map(held.held, held.weights)) / GIB
    wide = ["--algorithm.tokens_per_micro_batch", "65536", "--rollout.device_memory_gib"]
    output = run(*TINY, *wide, str(limit), "--run_dir", str(tmp_path / "run"), code=2)
    assert "the update needs" in output and "lower --algorithm.tokens_per_micro_batch" in output
    assert "step 1/" not in output and "warm start:" not in output and "Traceback" not in output


def on_first_device(tree: object) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def setup(*options: str, asked: Sequence[str] = TINY) -> Setup:
    config = parse([*asked, "--run_dir", "unused", *options])
    return build(config, jax.devices()[: config.devices])


def check_counted(one: Setup, drafts: int) -> None:
    """In every program of the update, the transfer among them, and no more."""
    trainer = one.trainer
    alone = shard_bytes([trainer.abstract_state, trainer.trained.abstract_frozen])
    gradients = shard_bytes(trainer.trained.abstract_gradients)
    split = trainer.layout.split
    keys = (
        Key("predict", split, 8, 64),
        Key("grad", split, 8, 64),
        Key("transfer", split, target=split),
    )
    found = stages_of(trainer, dict.fromkeys(keys, 0))
    assert [stage.held for stage in found] == [
        alone + drafts,
        alone + gradients + drafts,
        alone + drafts,
    ]
    assert {stage.drafts for stage in found} == {drafts}
    need = alone + drafts + 2 * gradients
    check_state(Roles(trainer), need)
    words = (
        r"training state .* GiB, drafts .* GiB, .* but the drafts, or make no drafts that a model"
    )
    with pytest.raises(UserError, match=words):
        check_state(Roles(trainer), need - 1)


def test_what_a_head_has_learned_lies_beside_rollouts_and_updates():
    source = "--speculation.source", "early_exit:1"
    one, none = setup(*source), setup("--speculation.source", "none")
    config = parse([*TINY, "--run_dir", "unused", *source])
    layout = one.trainer.layout
    shapes = micro_shapes(config.micro_batches, layout.split.dp, layout.platform)
    head = learned_head(config.run_dir, one.trainer, 1, shapes, config.rollout.temperature)
    there = on_first_device(head.trainer.state)
    embed = one.policy.config.embed_dim
    assert 0 <= there - 3 * 4 * embed**2 < 64  # with two moments, and counters
    assert one.memory.resident - none.memory.resident == there
    check_counted(one, there)
    assert (
        setup(*source, "--train", "false").memory.resident < one.memory.resident
    )  # learns nothing


def test_a_draft_model_lies_beside_updates_and_is_the_drafts_of_rollouts(tmp_path: Path):
    model = write_checkpoint(tmp_path / "model")
    draft = write_checkpoint(tmp_path / "draft")
    data = str(write_problems(tmp_path / "sums.jsonl"))
    asked = [*SMALL_ROLLOUT, "--model", str(model), "--data", data, "--reward", "math"]
    asked += ["--rollout.max_prompt_length", "160"]
    one = setup("--speculation.source", f"model:{draft}", asked=asked)
    none = setup("--speculation.source", "none", asked=asked)
    one.engine.load_draft_model()
    there = on_first_device(one.engine.draft_params)
    assert there > 4 * QWEN3.vocab_size * QWEN3.embed_dim
    check_counted(one, there)
    assert one.memory.resident == none.memory.resident
    assert all(each.source > there for each in one.memory.drafts.values())


def test_where_no_burst_drafts_they_are_there_as_well():
    """Too many rows for drafts: a draft model is loaded all the same, without a cache."""
    one = setup("--speculation.source", "none")
    specs, policy = one.engine.specs, one.policy
    few = Drafts(num_draft_tokens=(7,), longest=7, most_tokens=1, has_model=True)
    found = draft_bytes(specs.layouts, specs.draft_shapes, ModelDrafter(few, policy))
    weights = sum(4 * x.size for x in jax.tree.leaves(policy.abstract(jnp.float32)))
    assert {tuple(each) for each in found.values()} == {(weights, 0)}


ASKED = "--target h100:8 --responses 32 --rollouts 1 --max_completion_length 1024 --max_prompt_length 64"
ASKED += " --prompt_tokens 16 --lengths short"


def update_of(model: str, source: str) -> tuple[UpdateMemory, str]:
    argv = ["--model", model, *ASKED.split(), "--speculation.source", source]
    config = parse(argv, PlanConfig, prog="plan", presets=None)
    report = planned(plan.question_of(config, "it"), None)
    assert report.update is not None
    return report.update.memory, plan_text(report)


def test_a_plan_counts_them():
    none, _ = update_of("tiny", "none")
    embed = preset("tiny").embed_dim
    head, told = update_of("tiny", "early_exit:1")
    assert 0 <= head.drafts - 3 * 4 * embed**2 < 64 and head.total - none.total == head.drafts
    assert "drafts" in told
    same, _ = update_of("tiny", "model:tiny")
    assert same.total - none.total == same.drafts
    # Weights of the same shape, whole on every device, in the type that the rollout computes in.
    config = preset("tiny")
    embedding = config.vocab_size * embed
    heads = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    layer = embed * heads + 3 * embed * config.mlp_dim + 2 * embed + 2 * config.head_dim
    parameters = embedding + config.num_layers * layer + embed
    assert same.drafts == 2 * parameters
