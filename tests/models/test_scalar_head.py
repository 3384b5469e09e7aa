"""Reward models and critics: a scalar head as transformers computes, stores and names it."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits
from safetensors.numpy import load_file, save_file

from pat_jax.common.errors import UserError
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.checkpoints.hf_config import read_config, to_hf_config
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.models.transformer import values

REFERENCE = Path(__file__).parent / "reference"
CASES = [f"{x}-{head}" for x in ("llama", "qwen2", "qwen3") for head in ("sequence", "token")]
PAD = 60  # of the recorded tokens
WEIGHTS = "model.safetensors"


def computed(policy, params, tokens):
    """The value at each token."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    model = policy.bind(params)
    hidden = model(tokens, positions).hidden
    return values(model.scalar_head, hidden)


def assert_is_recorded(found, case):
    """A class for sequences has the value at the last token of each row, others have all."""
    expected = load_file(REFERENCE / case / "expected.safetensors")
    is_real, wanted = expected["tokens"] != PAD, expected["values"]
    found = np.asarray(found)
    assert np.ptp(wanted[is_real] if wanted.ndim > 1 else wanted) > 0.3, "too flat to tell"
    if wanted.ndim == 1:
        found, is_real = found[np.arange(len(found)), is_real.sum(axis=1) - 1], np.ones(2, bool)
    largest = np.abs(wanted[is_real]).max()
    np.testing.assert_allclose(found[is_real], wanted[is_real], atol=1e-5 * largest, rtol=0)


def recorded_tokens(case):
    return jnp.asarray(load_file(REFERENCE / case / "expected.safetensors")["tokens"])


@pytest.mark.parametrize("case", CASES)
def test_values_equal_transformers(case):
    config = check_checkpoint(REFERENCE / case)
    assert (config.head, config.head_bias) == ("scalar", case.endswith("-token"))
    policy = Policy.from_config(config)
    params = load_params(REFERENCE / case, policy, None, jnp.float32)
    assert_is_recorded(computed(policy, params, recorded_tokens(case)), case)


CAUSAL = preset("tiny", vocab_size=128)
SAVED = {
    "ForSequenceClassification": replace(CAUSAL, head="scalar"),
    "ForTokenClassification": replace(CAUSAL, head="scalar", head_bias=True),
}


@cache
def policy_and_params(config):
    policy, rng = Policy.from_config(config), np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), policy.abstract_params
    )
    return policy, params


def saved(directory, config):
    policy, params = policy_and_params(config)
    export(directory, policy, params, jnp.float32)
    return directory


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize("kind", SAVED)
def test_it_is_written_and_read_back(tmp_path, kind, family):
    experts = {"architecture": "qwen3_moe", "experts": preset("tiny-moe").experts, "num_layers": 3}
    config = replace(SAVED[kind], **(experts if family == "Qwen3Moe" else {}))
    directory = saved(tmp_path / "out", replace(config, vocab_multiple=128))
    assert check_checkpoint(directory) == check_checkpoint(directory, "scalar")
    policy, params = policy_and_params(check_checkpoint(directory))
    assert_same_bits(load_params(directory, policy, None, jnp.float32), params)
    fields, tensors = (
        json.loads((directory / "config.json").read_text()),
        load_file(directory / WEIGHTS),
    )
    assert fields["architectures"] == [family + kind]
    assert (fields["id2label"], fields["label2id"]) == ({"0": "LABEL_0"}, {"LABEL_0": 0})
    head = {name: x.shape for name, x in tensors.items() if not name.startswith("model.")}
    bias = {"score.bias": (1,)} if config.head_bias else {}
    assert head == {"score.weight": (1, config.embed_dim), **bias}


@pytest.mark.parametrize("name", [None, "lm_head.weight"], ids=["tied", "under the head's name"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("head_bias", [True, False])
def test_it_begins_with_the_layers_of_a_policy_and_zeros(tmp_path, name, tie_embeddings, head_bias):
    config = replace(CAUSAL, tie_embeddings=tie_embeddings, vocab_multiple=128)
    directory = saved(tmp_path / "out", config)
    if name and tie_embeddings:
        tensors = load_file(directory / WEIGHTS)
        tensors[name] = tensors.pop("model.embed_tokens.weight")
        save_file(tensors, directory / WEIGHTS)
    assert check_checkpoint(directory) == check_checkpoint(directory, "vocab") == config
    found = check_checkpoint(directory, "scalar")
    assert found == replace(config, head="scalar")
    policy = Policy.from_config(replace(found, head_bias=head_bias))
    chain, _ = layout_chain(factored_mesh(jax.devices()), policy.config)
    layout = list(chain.values())[1]
    shardings = layout.param_shardings(policy, role="train")
    loaded = load_params(directory, policy, shardings, jnp.float32)
    trunk = {key: x for key, x in policy_and_params(config)[1].items() if key != "lm_head"}
    own = {key: x for key, x in loaded.items() if not key.startswith("score")}
    assert_same_bits(dict(own), trunk)
    zeros = {key: x[...] for key, x in loaded.items() if key.startswith("score")}
    assert list(zeros) == ["score", "score_bias"][: 1 + head_bias]
    assert not any(np.any(x) for x in zeros.values())
    for x, sharding in zip(jax.tree.leaves(loaded), jax.tree.leaves(shardings), strict=True):
        assert x.sharding == sharding


def refusal(directory, head=None):
    with pytest.raises(UserError) as caught:
        check_checkpoint(directory, head)
    words = str(caught.value).removeprefix(str(directory))
    assert words.endswith(".") and ". " not in words, "not one sentence"
    return words


@pytest.mark.parametrize("kind", SAVED)
def test_it_is_no_policy(tmp_path, kind):
    words = refusal(saved(tmp_path / "out", SAVED[kind]), "vocab")
    assert words.startswith(
        f"/config.json: field 'architectures' is ['Qwen3{kind}'], expected ['Qwen3ForCausalLM'], as "
    )


CONFIGS = [
    ({"id2label": {"0": "bad", "1": "good"}}, "field 'id2label' is .*'good'.*, expected one label"),
    ({"num_labels": 2}, "field 'num_labels' is 2, expected 1: one label"),
    ({"id2label": None}, "field 'id2label' is None, expected one label, .* there are two"),
    ({"id2label": []}, r"field 'id2label' is \[\], expected an object"),
    (
        {"architectures": ["Gemma2ForSequenceClassification"]},
        "field 'architectures' is .*, expected one of Llama.*, or .* ForSequenceClass",
    ),
    ({"architectures": ["Qwen3ForQuestionAnswering"]}, "field 'architectures' is .*, expected one"),
]


@pytest.mark.parametrize("head", [None, "scalar"])
@pytest.mark.parametrize("changes, words", CONFIGS, ids=lambda case: str(case)[:40])
def test_a_configuration_is_refused(tmp_path, changes, words, head):
    directory = saved(tmp_path / "out", SAVED["ForSequenceClassification"])
    fields = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(fields))
    message = refusal(directory, head)
    assert re.search(f"^/config.json: {words}", message), message


def test_the_number_of_labels_may_stand_alone(tmp_path):
    fields = to_hf_config(SAVED["ForTokenClassification"], jnp.float32)
    told = {key: x for key, x in fields.items() if key != "id2label"} | {"num_labels": 1}
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert read_config(tmp_path) == replace(SAVED["ForTokenClassification"], vocab_multiple=128)


SEQUENCE, TOKEN = SAVED
TENSORS = [
    (SEQUENCE, {"score.weight": None}, "'score.weight' is in none of"),
    (TOKEN, {"score.bias": None}, "'score.bias' is in none of"),
    (SEQUENCE, {"score.weight": np.ones((2, 32))}, r"has shape \[2, 32\], expected \[1, 32\]"),
    (SEQUENCE, {"score.bias": np.ones(1)}, "'score.bias' is one of 1 that qwen3 .* does not have"),
]


@pytest.mark.parametrize("kind, changes, words", TENSORS)
def test_tensors_that_disagree_with_the_configuration_are_refused(tmp_path, kind, changes, words):
    directory = saved(tmp_path / "out", SAVED[kind])
    tensors = load_file(directory / WEIGHTS) | changes
    save_file({key: x for key, x in tensors.items() if x is not None}, directory / WEIGHTS)
    message = refusal(directory)
    assert re.search(words, message), message
    with pytest.raises(UserError):
        load_params(directory, Policy.from_config(SAVED[kind]), None, jnp.float32)


# --- heads over the vocabulary, by the same recorded checkpoints ----------------------------------

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
LOGITS = [f"{family}{tied}" for family in FAMILIES for tied in ("", "-tied")]


@pytest.mark.parametrize("case", LOGITS)
def test_logits_equal_transformers(case):
    config = check_checkpoint(REFERENCE / case)
    policy = Policy.from_config(config)
    params = load_params(REFERENCE / case, policy, None, jnp.float32)
    expected = load_file(REFERENCE / case / "expected.safetensors")
    tokens = jnp.asarray(expected["tokens"])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    model = policy.bind(params)
    logits = np.asarray(model.logits(model(tokens, positions).hidden))[..., : config.vocab_size]

    assert np.ptp(expected["logits"]) > 1, "the reference is too flat to tell models apart"
    largest = np.abs(expected["logits"]).max()
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-5 * largest, rtol=0)
