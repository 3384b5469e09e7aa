"""Damaged and unsupported checkpoints: one sentence each, naming the file and the field or tensor."""

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from pat_jax.common.errors import UserError
from pat_jax.models.checkpoints.hf_config import to_hf_config
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import check_checkpoint
from pat_jax.models.checkpoints.safetensors_file import StoredTensor, read_header
from pat_jax.models.config import ExpertsConfig, ModelConfig, RopeScaling
from pat_jax.models.hf_tensors import hf_tensors
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset

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
WITH_EXPERTS = {
    "qwen3_moe": preset("tiny-moe"),
    "mixtral": replace(
        CONFIG, architecture="mixtral", rope_scaling=None, experts=ExpertsConfig(4, 2, 24)
    ),
}
ABSENT = Ellipsis  # no JSON value; says the same in every process, as names of tests must
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A sound checkpoint in one file, the same in several, and two with experts."""
    policy = Policy.from_config(CONFIG)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), policy.abstract_params)
    directory = tmp_path_factory.mktemp("pristine")
    export(directory / "single", policy, params, jnp.float32)
    export(directory / "sharded", policy, params, jnp.float32, max_shard_bytes=8_000)
    for name, config in WITH_EXPERTS.items():
        policy = Policy.from_config(config)
        params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), policy.abstract_params)
        export(directory / name, policy, params, jnp.float32)
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
    ({"architectures": ["MistralForCausalLM"]}, "'architectures' is .*LlamaForCausalLM, Qwen2"),
    ({"architectures": None, "model_type": "gemma"}, "'model_type' is 'gemma'.*Qwen3ForCausalLM"),
    ({"architectures": ABSENT, "model_type": ABSENT}, "'model_type' is missing"),
    ({"hidden_size": ABSENT}, "'hidden_size' is missing, expected a positive integer"),
    ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0, expected a positive integer"),
    ({"num_key_value_heads": 3}, r"'num_key_value_heads' is 3, expected a divisor .*\(4\)"),
    ({"head_dim": 5}, "'head_dim' is 5, expected an even number"),
    ({"rms_norm_eps": float("inf")}, "'rms_norm_eps' is inf, expected a positive number"),
    ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' is 'no', expected true or false"),
    ({"mlp_bias": True}, "'mlp_bias' is True, expected false"),
    ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu', expected \"silu\""),
    ({"quantization_config": {"bits": 4}}, "'quantization_config' is {'bits': 4}, expected null"),
    ({"use_sliding_window": True}, "'use_sliding_window' is True, expected false"),
    ({"layer_types": ["full_attention", "sliding"]}, "'layer_types' is .*for every layer"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "'rope_scaling.rope_type' is 'yarn', expected 'def"),
    ({"rope_scaling.factor": ABSENT}, "'rope_scaling.factor' is missing, expected a number"),
    ({"rope_scaling.high_freq_factor": 1.0}, r"'rope_scaling.*' is 1\.0, expected more than"),
    (
        {"rope_scaling": None, "rope_parameters": {"sliding_attention": {"rope_theta": 1e6}}},
        "'rope_parameters.full_attention' is missing, expected .* as all layers here are of that",
    ),
    (
        {"rope_scaling": None, "rope_parameters": {"full_attention": None}},
        "'rope_parameters.full_attention' is None, expected an object",
    ),
    ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5, expected 1.0"),
]
QWEN3_MOE_CASES = [
    ({"num_experts_per_tok": 9}, r"'num_experts_per_tok' is 9, expected at most num_experts \(8\)"),
    ({"num_experts": ABSENT}, "'num_experts' is missing, expected a positive integer"),
    ({"num_experts": 8.5}, "'num_experts' is 8.5, expected a positive integer"),
    ({"num_local_experts": 6}, r"'num_experts' is 8, expected .* num_local_experts \(6\)"),
    ({"moe_intermediate_size": None}, "'moe_intermediate_size' is None, expected a positive"),
    ({"norm_topk_prob": 1}, "'norm_topk_prob' is 1, expected true or false"),
    ({"mlp_only_layers": [0, 3]}, r"'mlp_only_layers' is \[0, 3\], expected .* each of 0 to 2"),
    ({"mlp_only_layers": [True]}, "'mlp_only_layers' is .* each of 0 to 2"),
    ({"mlp_only_layers": "1"}, "'mlp_only_layers' is '1', expected a list"),
    ({"mlp_only_layers": [2, 1, 0]}, "'mlp_only_layers' is .* one of 3 layers left"),
    ({"decoder_sparse_step": 0}, "'decoder_sparse_step' is 0, expected a positive integer"),
    ({"decoder_sparse_step": 4, "mlp_only_layers": []}, "'decoder_sparse_step' is 4, .* has exp"),
    ({"shared_expert_intermediate_size": 64}, "'shared_.*_size' is 64, expected 0"),
    ({"n_shared_experts": 1}, "'n_shared_experts' is 1, expected 0"),
    ({"scoring_func": "sigmoid"}, "'scoring_func' is 'sigmoid', expected \"softmax\""),
    ({"quantization_config": {"quant_method": "fp8"}}, "'quantization_config' is .* null"),
]
MIXTRAL_CASES = [
    ({"sliding_window": 4096}, "'sliding_window' is 4096, expected null"),
    ({"num_local_experts": ABSENT}, "'num_experts' is missing, expected a positive integer"),
    ({"num_local_experts": 1}, r"'num_experts_per_tok' is 2, expected at most num_experts \(1\)"),
]


@pytest.mark.parametrize(
    ("checkpoint", "changes", "words"),
    [
        *(("single", *case) for case in CONFIG_CASES),
        *(("qwen3_moe", *case) for case in QWEN3_MOE_CASES),
        *(("mixtral", *case) for case in MIXTRAL_CASES),
    ],
    ids=lambda case: str(case)[:40],
    indirect=["checkpoint"],
)
def test_a_configuration_is_refused(checkpoint, changes, words):
    edit_json(checkpoint / "config.json", changes)
    message = refusal(checkpoint)
    assert re.search(f"^/config.json: field {words}", message), message


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


Change = Callable[[dict[str, np.ndarray]], object]
EXPERT, ROUTER = "model.layers.2.mlp.experts.5.up_proj.weight", "model.layers.0.mlp.gate.weight"
STACK = "model.layers.0.mlp.experts.gate_up_proj"
NINTH = EXPERT.replace(".5.", ".8.")


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda tensors: tensors.update({name: change(tensors[name]).copy()})


def added(name: str, tensor: np.ndarray) -> Change:
    return lambda tensors: tensors.update({name: tensor})


TENSORS = {
    "missing": ("single", without(Q_PROJ), rf": tensor '{Q_PROJ}' is in none of .* \[16, 16\]"),
    "shape": ("single", changed(Q_PROJ, lambda x: x[:, :-1]), r"has shape \[16, 15\], expected"),
    "type": ("single", changed(Q_PROJ, lambda x: x.astype(np.int8)), "has type I8, expected one"),
    "unexpected": ("single", added("model.layers.2.x", np.ones(1)), "is one of 1 .* with 2 layers"),
    "head": ("single", without("lm_head.weight"), r"in none .*\(tie_word_embeddings is false\)"),
    "expert": ("qwen3_moe", without(EXPERT), rf": tensor '{EXPERT}' is in none of .* \[16, 32\]"),
    "router": ("qwen3_moe", changed(ROUTER, lambda x: x[:-2]), r"\[6, 32\], expected \[8, 32\]"),
    "ninth": ("qwen3_moe", added(NINTH, np.ones((16, 32))), "is one of 1 that .* of 8 experts"),
    "stack": ("qwen3_moe", added(STACK, np.ones((8, 32, 32))), "expected a tensor of each"),
}


@pytest.mark.parametrize(
    ("checkpoint", "change", "words"), TENSORS.values(), ids=TENSORS, indirect=["checkpoint"]
)
def test_tensors_that_disagree_with_the_configuration_are_refused(
    checkpoint, change: Change, words, monkeypatch
):
    tensors = load_file(checkpoint / WEIGHTS)
    change(tensors)
    save_file(tensors, checkpoint / WEIGHTS)
    monkeypatch.delattr(StoredTensor, "view")  # of headers alone
    message = refusal(checkpoint)
    assert re.search(words, message), message
    assert message.startswith((": tensor '", f"/{WEIGHTS}: tensor '")), message


@pytest.mark.parametrize("checkpoint", ["qwen3_moe"], indirect=True)
@pytest.mark.parametrize(
    ("count", "words"),
    [
        (4, rf"^/{WEIGHTS}: tensor '{ROUTER}' has shape \[8, 32\], expected \[4, 32\] by config"),
        (16, r"^: tensor 'model.layers.0.mlp.experts.8\..*' is in none of .* by config.json"),
    ],
)
def test_a_number_of_experts_that_the_files_do_not_have_is_refused(checkpoint, count, words):
    edit_json(checkpoint / "config.json", {"num_experts": count})
    message = refusal(checkpoint)
    assert re.search(words, message), message


def test_the_headers_of_many_experts_are_read_in_seconds(tmp_path):
    """18,867 tensors of sixteen files that have no byte on the disk but their headers."""
    policy = Policy.from_config(preset("qwen3-30b-a3b"))
    config = to_hf_config(policy.config, jnp.bfloat16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {
        name: tensor.stored_shape
        for tensor in jax.tree.leaves(hf_tensors(policy))
        for name in tensor.names
    }
    assert len(shapes) == 18_867
    weight_map = {name: f"model-{i % 16}.safetensors" for i, name in enumerate(shapes)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for file in set(weight_map.values()):
        header, end = {}, 0
        for name in (name for name, place in weight_map.items() if place == file):
            start, end = end, end + 2 * math.prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with (tmp_path / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
    begun = time.monotonic()
    assert check_checkpoint(tmp_path) == policy.config
    assert time.monotonic() - begun < 30


def test_a_tied_head_that_was_trained_apart_is_refused(checkpoint):
    edit_json(checkpoint / "config.json", {"tie_word_embeddings": True})
    assert check_checkpoint(checkpoint).tie_embeddings  # both are all ones
    tensors = load_file(checkpoint / WEIGHTS)
    tensors["lm_head.weight"][3, 4] = 2.0
    save_file(tensors, checkpoint / WEIGHTS)
    assert "'lm_head.weight' differs from 'model.embed_tokens.weight'" in refusal(checkpoint)


def test_a_weights_file_is_refused(checkpoint):
    path = checkpoint / WEIGHTS
    sound = path.read_bytes()
    no_json = (5).to_bytes(8, "little") + b"hello"
    for damaged in (sound[:-5], sound + b"\0", sound[:100], sound[:5], b"", no_json):
        path.write_bytes(damaged)
        assert refusal(checkpoint).startswith(f"/{WEIGHTS}: the file is truncated, damaged or no")
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    assert refusal(checkpoint).startswith(f"/{WEIGHTS}: the file is a Git LFS pointer")
    path.unlink()
    assert refusal(checkpoint).startswith(f": there is neither {WEIGHTS} nor {INDEX}")


@pytest.mark.parametrize("checkpoint", ["sharded"], indirect=True)
def test_an_index_is_refused(checkpoint):
    assert check_checkpoint(checkpoint) == CONFIG
    index, second = checkpoint / INDEX, sorted(checkpoint.glob("*.safetensors"))[1]
    sound, tensors = index.read_text(), load_file(second)
    name = sorted(tensors)[0]
    save_file({key: value for key, value in tensors.items() if key != name}, second)
    assert refusal(checkpoint).startswith(f"/{second.name}: tensor '{name}' is in none")
    second.unlink()
    assert refusal(checkpoint).startswith(
        f"/{second.name}: the file is missing, expected by {INDEX}"
    )
    files = (1, "../secret", "", "\0", "\ud800")
    for weight_map in (None, ["a"], *({"a": file} for file in files)):
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
