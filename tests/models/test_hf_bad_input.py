"""Damaged and unsupported checkpoints: one sentence each, naming the file and the field or tensor."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from pat_jax.common.errors import UserError
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.checkpoints.safetensors_file import read_header
from pat_jax.models.config import ModelConfig, RopeScaling
from pat_jax.models.policy import Policy

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=61,
    embed_dim=16,
    mlp_dim=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64),
    max_position=128,
)
ABSENT = Ellipsis  # no JSON value; says the same in every process, as names of tests must
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A sound checkpoint in one file, and the same in several."""
    policy = Policy.from_config(CONFIG)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), policy.abstract_params)
    directory = tmp_path_factory.mktemp("pristine")
    export(directory / "single", policy, params, jnp.float32)
    export(directory / "sharded", policy, params, jnp.float32, max_shard_bytes=8_000)
    return directory


@pytest.fixture
def checkpoint(pristine, tmp_path, request):
    kind = getattr(request, "param", "single")
    for file in (pristine / kind).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def refusal(directory):
    """The message with which the checkpoint is refused, the same by both functions, nothing read."""
    with pytest.raises(UserError) as caught:
        check_checkpoint(directory)
    message = str(caught.value)
    assert message.startswith(str(directory)) and message.endswith(".")
    words = message.removeprefix(str(directory))
    assert ". " not in words and "\n" not in words, f"more than one sentence: {message}"
    assert "expected" in words, f"does not say what was expected: {message}"
    return words


def edit_json(path, changes):
    content = json.loads(path.read_text())
    for dotted, value in changes.items():
        *parents, name = dotted.split(".")
        place = content
        for parent in parents:
            place = place[parent]
        if value is ABSENT:
            del place[name]
        else:
            place[name] = value
    path.write_text(json.dumps(content))


CONFIG_CASES = [
    (
        {"architectures": ["MistralForCausalLM"]},
        "field 'architectures' is .'MistralForCausalLM'.*LlamaForCausalLM, Qwen2",
    ),
    (
        {"architectures": None, "model_type": "gemma"},
        "field 'model_type' is 'gemma'.*Qwen3ForCausalLM",
    ),
    ({"architectures": ABSENT, "model_type": ABSENT}, "field 'model_type' is missing"),
    ({"hidden_size": ABSENT}, "field 'hidden_size' is missing, expected a positive integer"),
    ({"num_hidden_layers": 0}, "field 'num_hidden_layers' is 0, expected a positive integer"),
    ({"num_key_value_heads": 3}, r"field 'num_key_value_heads' is 3, expected a divisor .*\(4\)"),
    ({"head_dim": 5}, "field 'head_dim' is 5, expected an even number"),
    ({"rms_norm_eps": float("inf")}, "field 'rms_norm_eps' is inf, expected a positive number"),
    ({"tie_word_embeddings": "no"}, "field 'tie_word_embeddings' is 'no', expected true or false"),
    ({"mlp_bias": True}, "field 'mlp_bias' is True, expected false"),
    ({"hidden_act": "gelu"}, "field 'hidden_act' is 'gelu', expected \"silu\""),
    (
        {"quantization_config": {"bits": 4}},
        "field 'quantization_config' is {'bits': 4}, expected null",
    ),
    ({"use_sliding_window": True}, "field 'use_sliding_window' is True, expected false"),
    (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "field 'layer_types' is .*'full_attention' for every layer",
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "field 'rope_scaling.rope_type' is 'yarn', expected 'default' or 'llama3'",
    ),
    (
        {"rope_scaling.factor": ABSENT},
        "field 'rope_scaling.factor' is missing, expected a number",
    ),
    (
        {"rope_scaling.high_freq_factor": 1.0},
        "field 'rope_scaling.high_freq_factor' is 1.0, expected more than",
    ),
    (
        {"rope_scaling": None, "rope_parameters": {"sliding_attention": {"rope_theta": 1e6}}},
        "field 'rope_parameters.full_attention' is missing, expected an object, "
        "as all layers here are of that type",
    ),
    (
        {"rope_scaling": None, "rope_parameters": {"full_attention": None}},
        "field 'rope_parameters.full_attention' is None, expected an object",
    ),
    ({"partial_rotary_factor": 0.5}, "field 'partial_rotary_factor' is 0.5, expected 1.0"),
]


@pytest.mark.parametrize(("changes", "words"), CONFIG_CASES, ids=lambda case: str(case)[:40])
def test_a_configuration_is_refused(checkpoint, changes, words):
    edit_json(checkpoint / "config.json", changes)
    message = refusal(checkpoint)
    assert re.search(f"^/config.json: {words}", message), message


def test_a_configuration_file_is_refused(checkpoint):
    path = checkpoint / "config.json"
    path.write_text('{\n  "vocab_size": 61,\n  "hidden_size" 16\n}')
    assert refusal(checkpoint).startswith("/config.json, line 3, column 17: broken JSON (")
    path.write_text("[1]")
    assert refusal(checkpoint).startswith("/config.json: the file holds a JSON list")
    path.write_bytes(b'{"a": "\xff"}')
    assert refusal(checkpoint).startswith("/config.json: byte 7 is not UTF-8 text")
    path.unlink()
    assert refusal(checkpoint).startswith("/config.json: the file is missing")
    assert refusal(checkpoint / "absent").startswith(": there is no such directory")


def change_tensors(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


TENSOR_CASES = [
    (
        lambda t: t.pop(Q_PROJ),
        rf"^: tensor '{Q_PROJ}' is in none of .* shape \[16, 16\] by config.json",
    ),
    (
        lambda t: t.update({Q_PROJ: t[Q_PROJ][:, :-1].copy()}),
        rf"^/{WEIGHTS}: tensor '{Q_PROJ}' has shape \[16, 15\], expected \[16, 16\]",
    ),
    (
        lambda t: t.update({Q_PROJ: t[Q_PROJ].astype(np.int8)}),
        rf"^/{WEIGHTS}: tensor '{Q_PROJ}' has type I8, expected one of BF16, F16, F32, F64",
    ),
    (
        lambda t: t.update({"model.layers.2.x": np.ones(1)}),
        rf"^/{WEIGHTS}: tensor 'model.layers.2.x' is one of 1 .* llama with 2 layers",
    ),
    (
        lambda t: t.pop("lm_head.weight"),
        r"^: tensor 'lm_head.weight' is in none .*\(tie_word_embeddings is false\)",
    ),
]


@pytest.mark.parametrize(
    ("change", "words"), TENSOR_CASES, ids=["missing", "shape", "type", "unexpected", "head"]
)
def test_tensors_that_disagree_with_the_configuration_are_refused(checkpoint, change, words):
    change_tensors(checkpoint / WEIGHTS, change)
    message = refusal(checkpoint)
    assert re.search(words, message), message
    with pytest.raises(UserError):
        load_params(checkpoint, Policy.from_config(CONFIG), None, jnp.float32)


def test_a_tied_head_that_was_trained_apart_is_refused(checkpoint):
    edit_json(checkpoint / "config.json", {"tie_word_embeddings": True})
    assert check_checkpoint(checkpoint).tie_embeddings  # both are all ones
    change_tensors(checkpoint / WEIGHTS, lambda t: t["lm_head.weight"].__setitem__((3, 4), 2.0))
    assert "'lm_head.weight' differs from 'model.embed_tokens.weight'" in refusal(checkpoint)


def test_a_weights_file_is_refused(checkpoint):
    path = checkpoint / WEIGHTS
    sound = path.read_bytes()
    path.write_bytes(sound[:-5])
    assert refusal(checkpoint).startswith(
        f"/{WEIGHTS}: the file has {len(sound) - 5} bytes, expected {len(sound)} by its header"
    )
    path.write_bytes(sound[:100])
    assert "bytes long in a file of 100 bytes" in refusal(checkpoint)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    assert refusal(checkpoint).startswith(f"/{WEIGHTS}: the file is a Git LFS pointer")
    path.write_bytes((5).to_bytes(8, "little") + b"hello")
    assert refusal(checkpoint).startswith(f"/{WEIGHTS}: the header is not JSON")
    path.unlink()
    assert refusal(checkpoint).startswith(f": there is neither {WEIGHTS} nor {INDEX}")


@pytest.mark.parametrize("checkpoint", ["sharded"], indirect=True)
def test_an_index_is_refused(checkpoint):
    assert check_checkpoint(checkpoint) == CONFIG
    index, second = checkpoint / INDEX, sorted(checkpoint.glob("*.safetensors"))[1]
    sound, tensors = index.read_text(), load_file(second)
    name = sorted(tensors)[0]
    save_file({key: value for key, value in tensors.items() if key != name}, second)
    assert refusal(checkpoint).startswith(f"/{second.name}: tensor '{name}' is missing")
    second.unlink()
    assert refusal(checkpoint).startswith(
        f"/{second.name}: the file is missing, expected by {INDEX}"
    )
    for weight_map in (
        None,
        ["a"],
        {"a": 1},
        {"a": "../secret"},
        {"a": ""},
        {"a": "\0"},
        {"a": "\ud800"},
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert refusal(checkpoint).startswith(f"/{INDEX}: field 'weight_map' is missing or damaged")
    index.write_text(sound[:-30])
    assert refusal(checkpoint).startswith(f"/{INDEX}, line ")


@given(data=st.data())
def test_no_damage_to_a_header_escapes_as_another_error(pristine, tmp_path_factory, data):
    sound = bytearray((pristine / "single" / WEIGHTS).read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        sound[data.draw(st.integers(0, 300))] = data.draw(st.integers(0, 255))
    length = data.draw(st.one_of(st.just(len(sound)), st.integers(0, len(sound) - 1)))
    path = tmp_path_factory.mktemp("damaged") / WEIGHTS
    path.write_bytes(sound[:length])
    try:
        tensors = read_header(path)
    except UserError:
        return
    assert length == len(sound)
    assert all(tensor.path == path for tensor in tensors.values())
