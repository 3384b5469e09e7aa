"""Which drafts `--speculation.source` comes to, and what is said of a source that cannot draft."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import QWEN3, engine_of, write_checkpoint

from pat_jax.common.errors import UserError
from pat_jax.config.run import RolloutConfig, RunConfig
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.engine.device.decode.sampling import NEG_INF
from pat_jax.engine.device.draft.draft_model import of_size
from pat_jax.engine.device.draft.generated import EarlyExit
from pat_jax.engine.sizing.draft_choice import (
    DraftChoice,
    drafter_of,
    is_padding_alone,
    shape_of,
    tokens_in,
    wanted_drafts,
)
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset


def chosen(source: str, model: ModelConfig = QWEN3) -> DraftChoice:
    config = SpeculationConfig(source=source)
    return wanted_drafts(config, Policy.from_config(model), "cpu", 32)


def test_a_layer_before_the_last_drafts():
    choice = chosen("early_exit:1", replace(QWEN3, num_layers=2))
    assert isinstance(choice.drafter, EarlyExit) and choice.drafter.drafts.exit_layer == 1
    assert "first 1 of 2 layers" in choice.reason


@pytest.mark.parametrize(
    ("source", "num_layers", "words"),
    [
        ("early_exit:2", 2, "early_exit:LAYER with a layer from 1 to 1, because"),
        ("early_exit:40", 2, "early_exit:LAYER with a layer from 1 to 1, because"),
        ("early_exit:1", 1, "because the model has only one layer"),
        ("model:nothing", 2, "is 'model:nothing': expected model:DIR with the folder of a"),
        *((x, 2, "suffix, model:DIR or early_exit:LAYER") for x in ("early_exit:0", "model:", "")),
    ],
)
def test_sources_that_cannot_draft(source: str, num_layers: int, words: str):
    with pytest.raises(UserError, match=words) as refused:
        chosen(source, replace(QWEN3, num_layers=num_layers))
    assert "from 1 to 0" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"vocab_size": 64}, "a draft model with the policy's 300 tokens, but this one has 64"),
        (
            {"max_position": 16},
            "context of 32 tokens, the longest prompt and response together, but this",
        ),
    ],
)
def test_models_that_may_draft(tmp_path: Path, change: dict[str, Any], words: str):
    folder = write_checkpoint(tmp_path / "draft", replace(QWEN3, **change))
    if words:
        with pytest.raises(UserError, match=words):
            chosen(f"model:{folder}")
        return
    choice = chosen(f"model:{folder}")
    assert choice.drafter.policy is not None and choice.drafter.policy.config.num_layers == 1
    assert f"proposed by {folder} (1 layers)" in choice.reason


def test_a_shape_that_is_not_built_in():
    words = r"expected model: and the folder of a checkpoint, or a built-in shape \(demo, tiny"
    with pytest.raises(UserError, match=words) as refused:
        shape_of("tini")
    assert "::" not in str(refused.value) and "is 'model:tini'" in str(refused.value)


SMALLER = replace(QWEN3, vocab_size=280)  # the tokenizer has 263 tokens


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("vocabulary") / "policy")


def draft(folder: Path, change: Callable[[Any], None] = lambda told: None, config=SMALLER) -> Path:
    """A draft model whose tokenizer is the policy's, changed."""
    path = write_checkpoint(folder / "draft", config) / "tokenizer.json"
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))
    return path.parent


def check_tokens(policy: Path, draft: Path) -> None:
    config = SpeculationConfig(source=f"model:{draft}")
    drafter_of(config, QWEN3, "cpu", 32, folder=str(policy))


def swapped(told: Any) -> None:
    """Two tokens have each other's ids."""
    vocabulary = told["model"]["vocab"]
    one, other = (next(t for t, number in vocabulary.items() if number == i) for i in (40, 17))
    vocabulary[one], vocabulary[other] = 17, 40


def added(token: str, number: int) -> Callable[[Any], None]:
    def add(told: Any) -> None:
        told["added_tokens"].append({**told["added_tokens"][0], "content": token, "id": number})

    return add


def test_of_the_same_tokens_embeddings_may_have_any_size(policy: Path, tmp_path: Path):
    assert SMALLER.vocab_size != QWEN3.vocab_size
    check_tokens(policy, draft(tmp_path))
    check_tokens(
        policy, draft(tmp_path / "more", added("<think>", 270))
    )  # that the policy does not know


def test_other_tokens_are_refused_whatever_the_size(policy: Path, tmp_path: Path):
    found = tokens_in(str(policy))
    assert found is not None
    same = replace(SMALLER, vocab_size=QWEN3.vocab_size)
    with pytest.raises(UserError) as refused:
        check_tokens(policy, draft(tmp_path, swapped, same))
    generated = str(refused.value)
    assert generated.startswith(
        f"option --speculation.source is 'model:{tmp_path}/draft': expected "
    )
    assert (
        f"but token 17 is {found[17]!r} there and {found[40]!r} in the draft model; choose"
        in generated
    )
    assert "\n" not in generated
    with pytest.raises(UserError, match=r"token 100 is '.+' there and '<think>' in the draft"):
        check_tokens(policy, draft(tmp_path / "added", added("<think>", 100), same))


def test_a_run_compares_the_tokenizers_of_its_folders(policy: Path, tmp_path: Path):
    rollout = RolloutConfig(max_prompt_length=96, max_completion_length=160)
    options = RunConfig(model=str(policy), train=False, compute_dtype="float32", rollout=rollout)
    source = f"model:{draft(tmp_path, swapped)}"
    config = replace(options, speculation=SpeculationConfig(source=source))
    with pytest.raises(UserError, match="but token 17 is"):
        engine_of(config, jax.devices()[:2])


def test_a_vocabulary_may_be_a_list_and_have_added_tokens(tmp_path: Path):
    vocabulary, added = [["<unk>", 0.0], ["a", -1.5]], [{"content": "<end>", "id": 7}]
    told = {"model": {"vocab": vocabulary}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    assert tokens_in(str(tmp_path)) == {0: "<unk>", 1: "a", 7: "<end>"}
    assert tokens_in(str(tmp_path / "nothing")) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "expected one JSON object"),
        ('{"model": {}}', "lists no tokens"),
        ('{"model": {"vocab": 3}}', "lists no tokens"),
        ('{"model": {"vocab": {"a": 0}}, "added_tokens": [7]}', "lists no tokens"),
    ],
)
def test_a_tokenizer_that_cannot_be_read(policy: Path, tmp_path: Path, content: str, words: str):
    folder = draft(tmp_path)
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=words) as refused:
        check_tokens(policy, folder)
    assert str(folder / "tokenizer.json") in str(refused.value)


@pytest.mark.parametrize(
    ("one", "other", "may"),
    [
        (61, 61, True),
        (61, 64, False),
        (50_257, 50_304, True),  # GPT-2 as it came and as it is often padded
        (32_000, 32_768, False),  # Mistral-7B v0.1 and v0.3, which added 768 tokens
    ],
)
def test_without_tokenizers_embeddings_may_differ_by_padding(one: int, other: int, may: bool):
    assert is_padding_alone(one, other) == is_padding_alone(other, one) == may


def test_built_in_shapes_may_differ_by_padding():
    def choose(draft: str, policy: str) -> None:
        config = SpeculationConfig(source=f"model:{draft}")
        drafter_of(config, preset(policy), "cuda", 4096, preset)

    choose("qwen3-0.6b", "qwen2.5-7b")
    words = "a draft model with the policy's 128256 tokens, but this one has 151936; choose a model"
    with pytest.raises(UserError, match=words):
        choose("qwen3-0.6b", "llama-3.1-8b")


@pytest.mark.parametrize("size", [5, 8])
def test_what_a_model_does_not_know_it_never_says(size: int):
    found = of_size(jnp.ones((2, 6)), size)
    assert found.shape == (2, size) and (np.asarray(found[:, :6]) == 1).all()
    assert (np.asarray(found[:, 6:]) == NEG_INF).all()
