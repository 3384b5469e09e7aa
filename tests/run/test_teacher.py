"""On-policy distillation: what a teacher says, which teachers fit, and what is made of it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_model import outputs
from rollouts import group_of
from row_writing import write_lines
from runs import (
    QWEN3,
    SMALL_ROLLOUT,
    TINY,
    presets_of_one_layer,
    run_to_end,
    write_checkpoint,
    write_problems,
)

from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.config.role_table import TEACHER
from pat_jax.layout.layout import shard_bytes
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.rl.batches.batches import to_train_batch
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.rl.batches.types import Prompt, RolloutGroup
from pat_jax.run.advantages import with_teacher
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.roles.role_params import load_frozen
from pat_jax.run.start.setup import Setup, build
from pat_jax.training.build import micro_shapes

# Another family, wider and deeper than the policy, with a longer embedding.
LLAMA = ModelConfig(*("llama", 320, 48, 64, 3, 6, 2, 8), max_position=512)
DISTILLED = ["--algorithm.name", "distill", "--rollout.max_prompt_length", "160"]


def setup(tmp_path: Path, teacher: Path, *options: str) -> Setup:
    model = tmp_path / "model"
    if not model.exists():
        write_checkpoint(model)
    data = str(write_problems(tmp_path / "sums.jsonl"))
    asked = [*SMALL_ROLLOUT, *DISTILLED, "--model", str(model), "--data", data, "--reward", "math"]
    asked += ["--run_dir", "unused", "--teacher.model", str(teacher), "--profile", "none", *options]
    config = parse(asked)
    return build(config, jax.devices()[: config.devices])


def made_up_groups(vocab_size: int) -> list[RolloutGroup]:
    rng = np.random.default_rng(0)

    def of(number: int) -> RolloutGroup:
        prompt = Prompt(number, tuple(rng.integers(0, vocab_size, 9).tolist()), "", {})
        return group_of([rng.integers(0, vocab_size, n) for n in (30, 4)], prompt)

    return [of(number) for number in range(4)]


def batch_of(groups: list[RolloutGroup], shapes: list[tuple[int, int]]) -> TrainBatch:
    return to_train_batch(
        groups,
        np.random.default_rng(1).normal(size=(len(groups), 2)),
        mini_batch_size=len(groups),
        micro_shapes=shapes,
        aggregation="token",
        truncated="score",
    )


def test_prompts_without_answers_need_no_reward(tmp_path: Path):
    rows = [{"question": f"What is {i} + {i}?"} for i in range(60)]
    data = write_lines(tmp_path / "prompts.jsonl", *rows)
    teacher = write_checkpoint(tmp_path / "teacher")
    one = setup(tmp_path, teacher, "--data", str(data), "--reward", "none", "--eval.every", "0")
    assert len(one.task.train.first(4)) == 4


def test_a_larger_teacher_of_another_family_gives_its_log_probabilities(tmp_path: Path):
    teacher = write_checkpoint(tmp_path / "teacher", LLAMA)
    one = setup(tmp_path, teacher)
    assert [*one.roles.readers] == [TEACHER]
    reader, config = one.roles.readers[TEACHER], one.config
    load_frozen(one.roles)
    shapes = micro_shapes(config.micro_batches, one.trainer.layout.split.dp, "cpu")
    groups = made_up_groups(263)
    found = reader.read(batch_of(groups, shapes)).by_response("teacher_logprobs")

    policy = Policy.from_config(check_checkpoint(teacher))
    params = load_params(teacher, policy, None, jnp.float32)
    for rollout, ours in zip((x for group in groups for x in group.rollouts), found, strict=True):
        logits = outputs(policy, params, [*rollout.prompt.tokens, *rollout.tokens])
        logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        first = len(rollout.prompt.tokens) - 1
        wanted = logprobs[first + np.arange(len(rollout.tokens)), rollout.tokens]
        np.testing.assert_allclose(ours, wanted, atol=1e-4)
    # It lies on the devices beside training, and is counted there.
    held = shard_bytes(reader.resident)
    numbers = sum(x.size for x in jax.tree.leaves(policy.abstract_params))
    assert shard_bytes(one.trainer.others) == held >= 4 * numbers / len(one.devices)


def changed_tokenizer(folder: Path, change: Callable[[dict[str, int]], None]) -> None:
    path = folder / "tokenizer.json"
    told = json.loads(path.read_text())
    change(told["model"]["vocab"])
    path.write_text(json.dumps(told))


def swap(vocabulary: dict[str, int]) -> None:
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]


def drop(vocabulary: dict[str, int]) -> None:
    del vocabulary["z"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swap, r"but token \d+ is 'A' there and 'B' in the teacher; take a teacher of the same"),
        (drop, r"whose token \d+ is 'z', which this one does not have; take a teacher of the same"),
    ],
)
def test_a_teacher_with_another_tokenizer_is_refused(tmp_path, change, words):
    teacher = write_checkpoint(tmp_path / "teacher")
    changed_tokenizer(teacher, change)
    with pytest.raises(UserError, match=words) as error:
        setup(tmp_path, teacher)
    assert str(error.value).startswith("option --teacher.model is ")


def test_a_teacher_for_shorter_texts_is_refused(tmp_path: Path):
    teacher = write_checkpoint(tmp_path / "teacher", replace(QWEN3, max_position=100))
    with pytest.raises(
        UserError, match=r"a model for texts of 216 tokens, .* this one is for 100;"
    ):
        setup(tmp_path, teacher)


def test_a_teacher_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"--teacher\.model is '.*nowhere': expected a Hugging"):
        setup(tmp_path, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--algorithm.name", "distill"], r"--teacher\.model is '': expected a model that teaches"),
        (["--reward", "none"], r"--reward is .*none.*: expected a reward to learn from, unless"),
        (["--teacher.model", "x"], r"--teacher\.model is 'x': expected nothing unless"),
        (
            ["--teacher.model", "x", "--algorithm.name", "distill", "--train", "false"],
            r"--teacher\.model is 'x': expected nothing unless --train is true",
        ),
        (["--algorithm.reward_coef", "0"], "reward_coef is 0.*: expected above 0 without a"),
        (["--teacher.top_k", "5"], r"--teacher\.top_k is 5: expected 0 without a teacher \(--alg"),
        (["--teacher.top_k", "257"], r"--teacher\.top_k is 257.*: expected an integer from 0 to"),
    ],
)
def test_a_teacher_and_its_algorithm_belong_together(options: list[str], words: str):
    with pytest.raises(UserError, match=words):
        parse(options)


@pytest.mark.parametrize(("of_reward", "of_teacher"), [(0.0, 1.0), (1.0, 0.25)])
def test_advantages_are_weighted_sums_by_hand(of_reward: float, of_teacher: float):
    algorithm = AlgorithmConfig(reward_coef=of_reward, distill_coef=of_teacher)
    rng, batch = np.random.default_rng(2), batch_of(made_up_groups(50), [(4, 64)])
    lengths = [len(x) for x in batch.by_response("advantages")]
    columns = {
        name: [rng.normal(-2, 1, n).astype(np.float32) for n in lengths]
        for name in ("advantages", "old_logprobs", "teacher_logprobs")
    }
    for name, values in columns.items():
        batch = batch.with_column(name, values)
    found, measured = with_teacher(algorithm, batch, columns["advantages"])
    apart = [
        y.astype(np.float64) - x
        for x, y in zip(columns["old_logprobs"], columns["teacher_logprobs"], strict=True)
    ]
    wanted = [
        of_reward * x + of_teacher * y for x, y in zip(columns["advantages"], apart, strict=True)
    ]
    for ours, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
    assert measured["train/teacher_kl"] == pytest.approx(-np.concatenate(apart).mean(), abs=1e-6)


def test_with_tokens_of_the_teacher_in_the_loss_advantages_are_the_rewards_alone():
    batch = batch_of(made_up_groups(50), [(4, 64)])
    own = batch.by_response("advantages")
    algorithm = AlgorithmConfig(reward_coef=0.5, distill_coef=2.0)
    found, measured = with_teacher(algorithm, batch, own, top_k=3)
    assert measured == {}
    for ours, expected in zip(found, own, strict=True):
        np.testing.assert_array_equal(ours, 0.5 * expected)


TOP_K = """
    --layout dp1tp2 --seed 3 --warm_start.steps 2 --eval.every 0 --steps 4
    --algorithm.name distill --optimizer.learning_rate 1e-2
"""


@pytest.fixture(autouse=True, scope="module")
def one_layer() -> Iterator[None]:
    with presets_of_one_layer("tiny"):
        yield


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random model with the demonstration's tokens."""
    folder = tmp_path_factory.mktemp("teacher")
    policy = Policy.from_config(preset("tiny", vocab_size=43))  # as many tokens as arithmetic has
    export(folder, policy, policy.init(11), jnp.float32)
    return folder


def top_k_setup(other_model: Path, run_dir: Path, *more: str) -> Setup:
    asked = ["--teacher.model", str(other_model), "--run_dir", str(run_dir)]
    config = parse([*TINY, *TOP_K.split(), *asked, *more])
    return build(config, jax.devices()[: config.devices])


@pytest.mark.slow  # `training/test_teacher_top_k.py` has the updates
def test_the_policy_comes_nearer_to_its_teacher(other_model: Path, tmp_path: Path):
    made = top_k_setup(other_model, tmp_path / "run", "--teacher.top_k", "8")
    assert not made.trainer.predicts  # no pass of the policy before its update
    run_to_end(made)
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"] > 0]
    apart = [row["train/teacher_kl"] for row in rows]
    assert np.isfinite(apart).all() and apart[0] > apart[-1] > 0
    # Rewards teach nothing: the loss is the KL.
    assert [row["train/loss"] for row in rows] == pytest.approx(apart, rel=1e-5)


def test_more_tokens_than_the_vocabulary_has_are_refused(other_model: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"--teacher\.top_k is 50: expected at most 43, the tokens"):
        top_k_setup(other_model, tmp_path / "run", "--teacher.top_k", "50")
