"""Runs whose reward is a model: its scores in the files, nothing compiled late, and what is refused."""

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import counted_compilations
from plain_model import outputs
from runs import CHAT_TEMPLATE, JUDGE, TINY, reward_models, write_checkpoint
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.layout.layout import shard_bytes
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.policy import Policy
from pat_jax.run.roles.reward_models import load_reward_models
from pat_jax.run.scoring import open_scorer
from pat_jax.run.sft.inputs import shape_of_model
from pat_jax.run.start.setup import build


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "judge", JUDGE)


@cache
def model_of(folder: Path) -> tuple[Any, Any, Any]:
    policy = Policy.from_config(check_checkpoint(folder))
    params = load_params(folder, policy, None, jnp.float32)
    return policy, params, AutoTokenizer.from_pretrained(folder)


def expected(folder: Path, messages: list[dict[str, str]]) -> float:
    """The score of one chat alone, without a mesh or padding, as transformers writes the chat."""
    policy, params, tokenizer = model_of(folder)
    tokens = tokenizer.apply_chat_template(messages, return_dict=False)
    return outputs(policy, params, tokens, longest=512)[-1]


def asked(prompt: str, completion: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def options(folder: Path, *more: str) -> Any:
    return parse([*TINY, "--reward", f"model:{folder}", *more])


# --- what scores, what it compiles, what it takes --------------------------------------------------


def test_batches_of_a_run_have_the_scores_of_single_texts(judge: Path):
    config = options(judge, "--reward_model.tokens_per_micro_batch", "512")
    config = replace(config, rollout=replace(config.rollout, max_prompt_length=96))
    models = reward_models(config)
    (role,) = models.values()
    role.reader.compile(by_need=False)
    load_reward_models(models)
    answers = ["4", "four, I think", "", "4" * 60, "4", "<think>2 and 2</think> make 4"]
    prompts = [f"What is {n} + {n}?" for n in range(len(answers))]
    with (
        open_scorer(config.reward, config.reward_limits, models) as scorer,
        counted_compilations() as compiled,
    ):
        rewards = scorer.score(prompts, answers, {})
        alone = [scorer.score([p], [a], {})[0] for p, a in zip(prompts, answers, strict=True)]
    assert compiled == []
    wanted = [expected(judge, asked(p, a)) for p, a in zip(prompts, answers, strict=True)]
    assert np.ptp(wanted) > 0.1
    np.testing.assert_allclose(rewards, wanted, atol=1e-5, rtol=0)
    np.testing.assert_allclose(alone, wanted, atol=1e-5, rtol=0)


def test_its_weights_count_as_resident_beside_the_rollout(judge: Path):
    devices = jax.devices()[:2]
    without = build(parse(TINY), devices)
    setup = build(options(judge), devices)
    (role,) = setup.reward_models.values()
    weights = shard_bytes(role.reader.abstract_params)
    whole = sum(x.size for x in jax.tree.leaves(role.reader.abstract_params)) * 4
    assert whole / 2 <= weights < 0.6 * whole  # split over both devices
    assert setup.memory.resident == without.memory.resident + weights


@pytest.mark.parametrize(
    ("asked", "context", "wanted"),
    [("auto", 512, 512), ("auto", 40_960, 1024), ("300", 512, 300)],
)
def test_the_longest_text_is_the_models_own(judge, tmp_path, asked, context, wanted):
    folder = changed(judge, tmp_path / "m", max_position_embeddings=context)
    config = options(folder, "--reward_model.max_length", asked)
    config = replace(config, rollout=replace(config.rollout, max_prompt_length=96))
    (role,) = reward_models(config).values()
    assert role.scores.max_length == wanted
    assert role.reader.largest[0][1] >= wanted


# --- what is refused, before anything is compiled -----------------------------------------------------------------


def changed(folder: Path, to: Path, **fields: object) -> Path:
    """A copy of a checkpoint with other fields in its config.json; None removes one."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    content = json.loads((to / "config.json").read_text()) | fields
    content = {name: value for name, value in content.items() if value is not None}
    (to / "config.json").write_text(json.dumps(content))
    return to


def without_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def with_template(folder: Path, template: str) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


def with_two_labels(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = np.tile(tensors["score.weight"], (2, 1))
    save_file(tensors, folder / "model.safetensors")


WRONG = [
    ({"architectures": ["GPT2ForSequenceClassification"]}, None, "architectures.*expected one of"),
    (
        {"id2label": {"0": "bad", "1": "good"}},
        with_two_labels,
        "id2label.*one label, as reward models",
    ),
    ({}, without_tokenizer, "no tokenizer files"),
    ({"vocab_size": 100}, None, "embed_tokens|embedding rows"),
    (
        {},
        partial(with_template, template="{{ messages[0].content }}"),
        "leaves out what the assistant answers",
    ),
    (
        {},
        partial(with_template, template=CHAT_TEMPLATE + "{{ raise_exception('closed') }}"),
        "the chat template fails .*closed",
    ),
]


@pytest.mark.parametrize(("fields", "change", "words"), WRONG)
def test_a_model_that_cannot_score_is_one_sentence(judge, tmp_path, fields, change, words):
    folder = changed(judge, tmp_path / "m", **fields)
    if change:
        change(folder)
    with pytest.raises(UserError, match=words) as error:
        build(options(folder), jax.devices()[:2])
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_a_model_that_generates_is_no_reward(tmp_path):
    folder = write_checkpoint(tmp_path / "m")
    with pytest.raises(UserError, match="expected a …ForSequenceClassification checkpoint"):
        build(options(folder), jax.devices()[:2])
    model = shape_of_model(str(folder))
    assert shape_of_model(str(folder), "scalar") == replace(model, head="scalar")  # to train one


@pytest.mark.parametrize("reward", [["model:nosuch"], ["exact", "model:nosuch"]], ids=" ".join)
def test_a_directory_that_does_not_exist_is_one_sentence(reward: list[str]):
    words = r"^option --reward is 'model:nosuch': expected the directory .* there is no such directory.*$"
    with pytest.raises(UserError, match=words):
        build(parse([*TINY, "--reward", *reward]), jax.devices()[:2])


def test_training_goes_on_from_a_reward_model_which_generates_no_text(judge: Path):
    assert shape_of_model(str(judge), "scalar").head == "scalar"
    with pytest.raises(UserError, match="judge"):
        shape_of_model(str(judge))


def test_a_length_beyond_the_context_is_refused(judge: Path):
    config = options(judge, "--reward_model.max_length", "513")
    with pytest.raises(UserError, match="max_length is 513: expected at most the 512 tokens"):
        build(config, jax.devices()[:2])
