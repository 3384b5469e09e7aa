"""Hugging Face directories: written and read back bit for bit, and refused in words when damaged."""

import functools
import json
import tracemalloc
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from pat_jax.common.errors import UserError
from pat_jax.models.checkpoints.hf_export import check_export, export
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.checkpoints.safetensors_file import StoredTensor, read_header
from pat_jax.models.config import ExpertsConfig, ModelConfig, RopeScaling
from pat_jax.models.policy import Policy

BASE = ModelConfig(
    architecture="llama",
    vocab_size=61,
    embed_dim=16,
    mlp_dim=24,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=6,
)
CONFIGS = {
    "llama": replace(BASE, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64), norm_eps=1e-5),
    "qwen2": replace(BASE, architecture="qwen2", attention_bias=True, tie_embeddings=True),
    "qwen3": replace(BASE, architecture="qwen3", qk_norm=True),
    "qwen3_moe": replace(
        BASE,
        architecture="qwen3_moe",
        qk_norm=True,
        num_layers=3,
        experts=ExpertsConfig(8, 3, 10, norm_topk_prob=False, dense_layers=(1,)),
    ),
    "mixtral": replace(BASE, architecture="mixtral", experts=ExpertsConfig(8, 2, 24)),
    "bigmac": replace(
        BASE, architecture="bigmac", qk_norm=True, experts=ExpertsConfig(8, 2, 24, latent_dim=4)
    ),
}
WEIGHTS = "model.safetensors"
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
TREE_AXES = {
    "embed": "c",
    "mlp": ("a", "b"),
    "kv_heads": "a",
    "queries_per_kv": "b",
    "vocab": ("a", "b"),  # 32 rows a shard: one is padded in part, two are padding only
    "expert": ("b", "a"),  # two a shard
}


@functools.cache
def policy_and_params(name):
    """Parameters with zeros in the rows that pad the vocabulary, as loading makes them."""
    policy = Policy.from_config(CONFIGS[name])
    generator = np.random.default_rng(0)

    def random(leaf, axes):
        value = generator.normal(size=leaf.shape).astype(np.float32)
        if "vocab" in axes:
            padding = [slice(None)] * leaf.ndim
            padding[axes.index("vocab")] = slice(BASE.vocab_size, None)
            value[tuple(padding)] = 0
        return jnp.asarray(value)

    return policy, jax.tree.map(random, policy.abstract_params, policy.param_axes)


def tree_shardings(policy):
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    mesh = Mesh(devices, ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    return jax.tree.map(
        lambda axes: NamedSharding(mesh, PartitionSpec(*(TREE_AXES.get(axis) for axis in axes))),
        policy.param_axes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_export_then_load_is_the_identity(tmp_path, name, dtype):
    policy, params = policy_and_params(name)
    params = jax.tree.map(lambda x: x.astype(DTYPES[dtype]), params)
    export(tmp_path / "out", policy, params, DTYPES[dtype])
    assert check_checkpoint(tmp_path / "out") == policy.config
    assert_same_bits(load_params(tmp_path / "out", policy, None, DTYPES[dtype]), params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    (tmp_path / "made by hand").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "made by hand").stat().st_mode


def test_a_sharded_export_has_an_index_and_loads_alike(tmp_path):
    policy, params = policy_and_params("qwen3")
    export(tmp_path / "out", policy, params, jnp.float32, max_shard_bytes=8_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    stored = {name: load_file(tmp_path / "out" / name) for name in files}
    for name, file in index["weight_map"].items():
        assert name in stored[file]
    sizes = [sum(x.nbytes for x in tensors.values()) for tensors in stored.values()]
    assert index["metadata"]["total_size"] == sum(sizes) and max(sizes) <= 8_000
    assert_same_bits(load_params(tmp_path / "out", policy, None, jnp.float32), params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_land_in_their_shards_on_eight_devices(tmp_path, name, dtype):
    policy, params = policy_and_params(name)
    shardings = tree_shardings(policy)
    export(tmp_path / "out", policy, jax.device_put(params, shardings), jnp.float32)
    loaded = load_params(tmp_path / "out", policy, shardings, DTYPES[dtype])
    assert_same_bits(loaded, jax.tree.map(lambda x: x.astype(DTYPES[dtype]), params))
    for leaf, sharding in zip(jax.tree.leaves(loaded), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding == sharding
    query = policy.bind(loaded).layers[0].attention.query[...]
    assert {shard.data.shape for shard in query.addressable_shards} == {(1, 2, 6, 8)}


def test_a_zero_keeps_its_sign_on_its_way_out_of_a_split_stack(tmp_path):
    policy = policy_and_params("mixtral")[0]
    params = jax.tree.map(lambda leaf: -jnp.zeros(leaf.shape), policy.abstract_params)
    export(tmp_path / "out", policy, jax.device_put(params, tree_shardings(policy)), jnp.float32)
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    assert all(np.signbit(x).all() and not x.any() for x in tensors.values())


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_a_process_reads_the_experts_it_has_and_no_others(tmp_path, monkeypatch, weights):
    """Two of eight devices belong to it, which have the experts 2 and 3."""
    policy, params = policy_and_params("qwen3_moe")
    kept = policy.with_weights(weights)
    export(tmp_path / "out", policy, params, jnp.float32)
    shardings, opened = tree_shardings(kept), []
    names = {
        (x.path, x.offset): name for name, x in read_header(tmp_path / "out" / WEIGHTS).items()
    }
    view = StoredTensor.view

    def counted(tensor):
        opened.append(names[tensor.path, tensor.offset])
        return view(tensor)

    def of_one_process(shape, sharding, read, dtype):
        shards = sharding.devices_indices_map(shape)
        of_it = {device: read(shards[device]) for device in jax.devices()[2:4]}
        return jax.device_put(
            np.broadcast_to(next(iter(of_it.values())).ravel()[0], shape), sharding
        )

    monkeypatch.setattr(StoredTensor, "view", counted)
    monkeypatch.setattr(jax, "make_array_from_callback", of_one_process)
    load_params(tmp_path / "out", kept, shardings, jnp.float32)
    others = [name for name in names.values() if ".experts." not in name]
    experts = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in (0, 2)
        for expert in (4, 5)
        for part in ("gate", "up", "down")
    ]
    assert sorted(set(opened)) == sorted([*others, *experts])
    assert max(Counter(name for name in opened if ".experts." in name).values()) == 1


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_neither_way_holds_the_model_twice(tmp_path, name):
    config = replace(CONFIGS[name], embed_dim=128, mlp_dim=256, num_layers=8)
    largest = 4 * 128 * 256
    if config.experts is not None:
        config, largest = (
            replace(config, num_layers=3, experts=replace(config.experts, expert_dim=1024)),
            4 * 128 * 1024,
        )
    policy = Policy.from_config(config)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), policy.abstract_params)
    params = jax.device_put(params, tree_shardings(policy))
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
    tracemalloc.start()
    export(tmp_path / "out", policy, params, jnp.float32)
    export_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.clear_traces()
    tracemalloc.reset_peak()
    loaded = load_params(tmp_path / "out", policy, None, jnp.float32)
    load_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(jax.tree.leaves(loaded)) == len(sizes)
    slack = 400_000  # Python's own objects
    # Of a stack of experts no more than one is on its way.
    assert max(sizes) == (8 * largest if config.experts else largest)
    assert export_peak < 2 * largest + slack < sum(sizes)
    assert load_peak < sum(sizes) + 2 * max(sizes) + slack


def test_loaded_parameters_do_not_depend_on_the_file(tmp_path):
    policy, params = policy_and_params("qwen3")
    export(tmp_path / "out", policy, params, jnp.float32)
    loaded = load_params(tmp_path / "out", policy, None, jnp.float32)
    with (tmp_path / "out" / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(b"\xff" * size)
    assert_same_bits(loaded, params)


def test_rotary_buffers_and_a_repeated_tied_head_are_ignored(tmp_path):
    policy, params = policy_and_params("qwen2")
    export(tmp_path / "out", policy, params, jnp.float32)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    assert_same_bits(load_params(tmp_path / "out", policy, None, jnp.float32), params)


def test_a_tied_tensor_is_read_under_either_name(tmp_path):
    policy, params = policy_and_params("qwen2")
    export(tmp_path / "out", policy, params, jnp.float32)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    assert check_checkpoint(tmp_path / "out") == policy.config
    assert_same_bits(load_params(tmp_path / "out", policy, None, jnp.float32), params)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_numbers_of_eight_bytes_are_rounded_once(tmp_path, dtype):
    policy, params = policy_and_params("llama")
    export(tmp_path / "out", policy, params, jnp.float32)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    # Far below the last bit of float32: nothing of it may be left.
    longer = {name: x.astype(np.float64) * (1 + 1e-12) for name, x in tensors.items()}
    save_file(longer, tmp_path / "out" / "model.safetensors")
    loaded = load_params(tmp_path / "out", policy, None, dtype)
    assert_same_bits(loaded, jax.tree.map(lambda x: x.astype(dtype), params))


def test_export_keeps_what_the_source_knew(tmp_path):
    policy, params = policy_and_params("qwen3")
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"eos_token_id": [7, 8], "hidden_size": 1}')
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        (source / name).write_text(f'"{name}"')
    (source / "model.bin").write_text("not a tokenizer")
    export(tmp_path / "new" / "out", policy, params, jnp.bfloat16, source)
    written = {path.name for path in (tmp_path / "new" / "out").iterdir()}
    assert written == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
    }
    assert (tmp_path / "new" / "out" / "tokenizer.json").read_text() == '"tokenizer.json"'
    fields = json.loads((tmp_path / "new" / "out" / "config.json").read_text())
    assert (fields["eos_token_id"], fields["bos_token_id"], fields["hidden_size"]) == (
        [7, 8],
        None,
        16,
    )
    assert fields["torch_dtype"] == "bfloat16"


def test_export_writes_into_an_empty_directory_and_leaves_nothing_when_it_fails(tmp_path):
    policy, params = policy_and_params("qwen3")
    (tmp_path / "out").mkdir()
    other_params = policy_and_params("llama")[1]
    with pytest.raises(ValueError):
        export(tmp_path / "out", policy, other_params, jnp.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not any(
        (tmp_path / "out").iterdir()
    )
    export(tmp_path / "out", policy, params, jnp.float32)
    assert check_checkpoint(tmp_path / "out") == policy.config


def test_export_refuses_before_it_writes(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    cases = [
        (tmp_path / "full", None, "full: the directory is not empty"),
        (tmp_path / "full" / "file", None, "file: this is a file"),
        (tmp_path / "full" / "file" / "out", None, "file: nothing can be written there"),
        (tmp_path / "out", tmp_path / "absent", "absent: there is no such directory"),
    ]
    for directory, tokenizer_dir, words in cases:
        with pytest.raises(UserError, match=words):
            check_export(directory, tokenizer_dir)
    policy, params = policy_and_params("qwen3")
    with pytest.raises(UserError, match="not empty"):
        export(tmp_path / "full", policy, params, jnp.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
