"""Tensors that no index names, names of other trainers, and numbers that no trained model has."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits
from safetensors.numpy import load_file, save_file

from pat_jax.common.errors import UserError
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset

Arrays = dict[str, np.ndarray]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CAUSAL = preset("tiny", vocab_size=128)
JUDGE = replace(CAUSAL, head="scalar")
CRITIC = replace(JUDGE, head_bias=True)
MOE = replace(preset("tiny-moe"), vocab_size=128)
SCORE, BIAS = "score.weight", "score.bias"


def saved(folder: Path, config=JUDGE) -> tuple[Policy, Arrays]:
    policy, rng = Policy.from_config(config), np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), policy.abstract_params
    )
    export(folder, policy, params, jnp.float32)
    return policy, load_file(folder / WEIGHTS)


def loaded(folder: Path, policy: Policy):
    check_checkpoint(folder, policy.config.head)
    return load_params(folder, policy, None, jnp.dtype(jnp.float32))


def refusal(folder: Path, head=None) -> str:
    with pytest.raises(UserError) as caught:
        check_checkpoint(folder, head)
    words = str(caught.value).removeprefix(str(folder))
    assert words.endswith(".") and ". " not in words and "\n" not in words, "not one sentence"
    return words


def beside(folder: Path, name: str, tensors: Arrays) -> None:
    save_file(tensors, folder / name)


@pytest.mark.parametrize("config", [JUDGE, CRITIC], ids=["sequence", "token"])
@pytest.mark.parametrize("where", [WEIGHTS, "value_head.safetensors"])
@pytest.mark.parametrize(
    "name", ["value_head", "v_head.summary", "classifier", "reward_head", "lm_head", "model.score"]
)
def test_a_head_is_read_under_another_name(tmp_path: Path, name: str, where: str, config):
    policy, tensors = saved(tmp_path / "rm", config)
    expected = loaded(tmp_path / "rm", policy)
    head = {key: tensors.pop(key) for key in (SCORE, BIAS) if key in tensors}
    beside(tmp_path / "rm", WEIGHTS, tensors)
    renamed = {key.replace("score", name): x for key, x in head.items()}
    beside(tmp_path / "rm", where, renamed | (tensors if where == WEIGHTS else {}))
    assert_same_bits(loaded(tmp_path / "rm", policy), expected)


def test_a_head_over_the_vocabulary_beside_it_does_not_matter(tmp_path: Path):
    policy, tensors = saved(tmp_path / "rm")
    expected = loaded(tmp_path / "rm", policy)
    renamed = {"v_head.summary.weight": tensors.pop(SCORE), "lm_head.weight": np.ones((128, 32))}
    beside(tmp_path / "rm", WEIGHTS, tensors | renamed)
    assert_same_bits(loaded(tmp_path / "rm", policy), expected)


HEAD, LAYER = np.ones((1, 32), np.float32), np.ones((32, 32), np.float32)
# The files are parts of the model by their names: what is in them is why they are not read.
NOT_PLAIN: dict[str, tuple[dict[str, Arrays], list[str]]] = {
    "of two layers": ({"head": {"v.0.weight": LAYER, "v.2.weight": HEAD}}, ["v.0.w"]),
    "with a bias": ({"head": {"v.weight": HEAD, "v.bias": HEAD[0, :1]}}, ["v.bias"]),
    "of two": ({stem: {"v.w.weight": HEAD} for stem in ("head", "score")}, ["v.w"]),
    "two": ({"head": {"v.weight": HEAD, "w.weight": HEAD}}, ["v.weight", "w.weight"]),
    "of another version": ({"head": {"model.norm.weight": HEAD[0], SCORE: HEAD}}, ["head.s"]),
    "of another shape": ({"head": {"v.weight": LAYER}}, ["v.weight", "[32, 32]", "head.s"]),
}


@pytest.mark.parametrize("files, names", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_what_may_be_another_head_is_named(tmp_path: Path, files, names):
    _, tensors = saved(tmp_path / "rm")
    del tensors[SCORE]
    beside(tmp_path / "rm", WEIGHTS, tensors)
    for stem, content in files.items():
        beside(tmp_path / "rm", f"{stem}.safetensors", content)
    message = refusal(tmp_path / "rm")
    assert message.startswith(f": tensor '{SCORE}' is in none") and all(x in message for x in names)


@pytest.mark.parametrize("where", [WEIGHTS, "value_head.safetensors"])
def test_a_critic_does_not_begin_with_zeros_where_there_is_a_head(tmp_path: Path, where: str):
    policy, tensors = saved(tmp_path / "policy", CAUSAL)
    head = {"v_head.summary.weight": HEAD, "v_head.summary.bias": HEAD[0, :1]}
    beside(tmp_path / "policy", where, head | (tensors if where == WEIGHTS else {}))
    message = refusal(tmp_path / "policy", "scalar")
    assert "'v_head.summary.weight'" in message and where in message
    if where != WEIGHTS:
        loaded(tmp_path / "policy", policy)  # to generate, it is not needed


Q_PROJ = "model.layers.0.self_attn.q_proj"
LORA = {f"base_model.model.{Q_PROJ}.lora_{x}.weight": np.zeros((1, 32)) for x in "AB"}
FOREIGN: dict[str, tuple[str, str, Arrays]] = {
    "optimizer": ("optimizer", "", {}),
    "optimizer of a rank": ("optimizer_rank0", "module.", {}),
    "scheduler": ("scheduler", "", {}),
    "training state": ("training_state", "", {}),
    "moments": ("model-00002-of-00002", "exp_avg.", {}),
    "moments in part": ("model-00002-of-00002", "", {f"exp_avg.{Q_PROJ}.weight": LAYER}),
    "state": ("head", "state.0.", {}),
    "adapter": ("adapter_model", "base_model.model.", LORA),
    "adapter's head alone": ("adapter_model", "base_model.model.", {}),
    "adapter as shard": ("model-00002-of-00002", "base_model.model.", LORA),
    "adapter's head as shard": ("model-00002-of-00002", "base_model.model.", {}),
    "adapter without prefix": ("lm_head", "", {f"{Q_PROJ}.lora_A.weight": HEAD}),
    "more layers": ("model-00003-of-00003", "", {"model.layers.9.mlp.up_proj.weight": LAYER}),
}
OF_HEADS = [(replace(CAUSAL, tie_embeddings=False), "lm_head.weight"), (JUDGE, SCORE)]


@pytest.mark.parametrize("config, head", OF_HEADS, ids=["policy", "rm"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_of_something_else_has_no_part_of_the_model(tmp_path: Path, kind, config, head):
    _, tensors = saved(tmp_path / "model", config)
    (stem, prefix, others), zeros = FOREIGN[kind], np.zeros_like(tensors.pop(head))
    beside(tmp_path / "model", WEIGHTS, tensors)
    beside(tmp_path / "model", f"{stem}.safetensors", others | {f"{prefix}{head}": zeros})
    message = refusal(tmp_path / "model")
    assert message.startswith(f": tensor '{head}' is in none")
    assert f"'{prefix}{head}'" in message and f" in {stem}.safetensors" in message


UNRELATED: dict[str, Arrays] = {
    "adapter_model": LORA | {"base_model.model.score.weight": HEAD},
    "adapter_model_2": {f"{Q_PROJ}.lora_A.weight": HEAD},
    "my_adapter": {"v_head.weight": HEAD},
    "model-00002-of-00002": LORA,
    "optimizer": {"state.0.weight": HEAD, SCORE: HEAD},
    "score": {"exp_avg.score.weight": HEAD},
}


@pytest.mark.parametrize("stem", UNRELATED)
def test_a_critic_begins_with_zeros_beside_files_of_something_else(tmp_path: Path, stem: str):
    saved(tmp_path / "policy", CAUSAL)
    beside(tmp_path / "policy", f"{stem}.safetensors", UNRELATED[stem])
    critic = Policy.from_config(check_checkpoint(tmp_path / "policy", "scalar"))
    np.testing.assert_array_equal(loaded(tmp_path / "policy", critic)["score"][...], 0)


def test_files_of_something_else_do_not_hide_a_head(tmp_path: Path):
    policy, tensors = saved(tmp_path / "rm")
    expected = loaded(tmp_path / "rm", policy)
    beside(tmp_path / "rm", "value_head.safetensors", {"v_head.weight": tensors.pop(SCORE)})
    beside(tmp_path / "rm", WEIGHTS, tensors)
    for stem, content in UNRELATED.items():
        beside(tmp_path / "rm", f"{stem}.safetensors", content | {"v_head.weight": HEAD * 0})
    (tmp_path / "rm" / "score.safetensors").unlink()  # named as a head, too
    assert_same_bits(loaded(tmp_path / "rm", policy), expected)


@pytest.mark.parametrize("name", [f"{Q_PROJ}.lora_A.weight", "exp_avg.score.weight"])
def test_no_head_is_what_a_layer_or_an_optimizer_has(tmp_path: Path, name: str):
    _, tensors = saved(tmp_path / "rm")
    beside(tmp_path / "rm", WEIGHTS, tensors | {name: tensors.pop(SCORE)})
    message = refusal(tmp_path / "rm")
    assert message.startswith(f": tensor '{SCORE}' is in none") and f"'{name}'" in message


@pytest.mark.parametrize("wrapper", ["", "module.", "base_model.model."])
@pytest.mark.parametrize("stem", ["lm_head", "model-00002-of-00002"])
def test_a_tensor_alone_in_a_file_is_read(tmp_path: Path, stem: str, wrapper: str):
    config, head = OF_HEADS[0]
    policy, tensors = saved(tmp_path / "model", config)
    expected = loaded(tmp_path / "model", policy)
    wrapped = {f"{wrapper}{name}": x for name, x in tensors.items()}
    beside(tmp_path / "model", f"{stem}.safetensors", {wrapper + head: wrapped.pop(wrapper + head)})
    beside(tmp_path / "model", WEIGHTS, wrapped)
    assert_same_bits(loaded(tmp_path / "model", policy), expected)


WRAPPERS: list[Callable[[str], str]] = [
    lambda name: f"module.{name}",
    lambda name: f"_orig_mod.{name}",
    lambda name: f"base_model.model.{name}",
    lambda name: f"model.{name}",
    lambda name: name.removeprefix("model."),
    lambda name: name.replace("model.", "model._orig_mod."),
]


@pytest.mark.parametrize("config", [CAUSAL, JUDGE, MOE], ids=["policy", "rm", "experts"])
@pytest.mark.parametrize("number", range(len(WRAPPERS)))
def test_a_prefix_of_all_names_does_not_matter(tmp_path: Path, number: int, config):
    policy, tensors = saved(tmp_path / "model", config)
    expected = loaded(tmp_path / "model", policy)
    beside(tmp_path / "model", WEIGHTS, {WRAPPERS[number](x): y for x, y in tensors.items()})
    assert_same_bits(loaded(tmp_path / "model", policy), expected)


def shard(folder: Path, tensors: Arrays, **changes: str | None) -> list[str]:
    """Two files and an index, whose entries `changes` replaces or, by None, leaves out."""
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    places = {name: files[i >= len(names) // 2] for i, name in enumerate(names)}
    for file in files:
        beside(folder, file, {name: tensors[name] for name in names if places[name] == file})
    told = {name: file for name, file in (places | changes).items() if file}
    (folder / INDEX).write_text(json.dumps({"weight_map": told}))
    return files


NORM, SECOND = "model.norm.weight", "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    "changes",
    [
        {NORM: None},
        {NORM: SECOND},
        {"lm_head.weight": SECOND, "model.layers.0.self_attn.rotary_emb.inv_freq": SECOND},
        "the second file",
    ],
    ids=["no entry", "the other file", "what is not there", "no file"],
)
def test_an_index_may_lag_behind_its_files(tmp_path: Path, changes):
    policy, tensors = saved(tmp_path / "model", replace(CAUSAL, tie_embeddings=True))
    expected = loaded(tmp_path / "model", policy)
    if isinstance(changes, str):
        changes = dict.fromkeys(sorted(tensors)[len(tensors) // 2 :])
    shard(tmp_path / "model", tensors, **changes)
    assert_same_bits(loaded(tmp_path / "model", policy), expected)


@pytest.mark.parametrize(
    "names", [["pytorch_model.bin"], ["model-00001-of-00001.safetensors"], ["a.gguf", "b.pth"]]
)
def test_files_that_are_not_read_are_named(tmp_path: Path, names: list[str]):
    saved(tmp_path / "model")
    (tmp_path / "model" / WEIGHTS).rename(tmp_path / "model" / names[0])
    for name in names[1:]:
        (tmp_path / "model" / name).touch()
    message = refusal(tmp_path / "model")
    assert all(name in message for name in [WEIGHTS, INDEX, *names])


TYPES = {"bfloat16": jnp.bfloat16, "float16": np.float16, "float32": np.float32, "float64": float}
OF_MODELS = [
    (replace(CAUSAL, tie_embeddings=False), "lm_head.weight"),
    (JUDGE, SCORE),
    (CRITIC, BIAS),
    (MOE, "model.layers.0.mlp.gate.weight"),
    (MOE, "model.layers.2.mlp.experts.5.up_proj.weight"),
]


@pytest.mark.parametrize("number", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("config, name", OF_MODELS, ids=[name for _, name in OF_MODELS])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, config, name: str, number: float):
    policy, tensors = saved(tmp_path / "model", config)
    for kind, weights in zip(TYPES.values(), ("auto", "auto", "auto", "int8"), strict=True):
        stored = {key: x.astype(kind) for key, x in tensors.items()}
        stored[name].flat[-1] = number
        beside(tmp_path / "model", WEIGHTS, stored)
        for dtype in (jnp.float32, jnp.bfloat16):
            with pytest.raises(UserError) as caught:
                kept = policy.with_weights(weights)
                load_params(tmp_path / "model", kept, None, jnp.dtype(dtype))
            assert f"{WEIGHTS}: tensor '{name}'" in str(caught.value)


def test_numbers_beyond_the_type_that_is_computed_in_are_refused(tmp_path: Path, recwarn):
    policy, tensors = saved(tmp_path / "model")
    stored = {key: x.astype(np.float64) for key, x in tensors.items()}
    stored[SCORE][0, 3] = 1e300
    beside(tmp_path / "model", WEIGHTS, stored)
    with pytest.raises(UserError, match=f"'{SCORE}' .* not finite as float32"):
        load_params(tmp_path / "model", policy, None, jnp.dtype(jnp.float32))
    assert not recwarn.list


def test_the_largest_and_smallest_numbers_pass(tmp_path: Path):
    policy, tensors = saved(tmp_path / "model")
    few = np.finfo(np.float32)
    tensors[SCORE][0, :6] = [few.max, few.min, few.smallest_subnormal, -few.tiny, -0.0, 0.0]
    beside(tmp_path / "model", WEIGHTS, tensors)
    found = loaded(tmp_path / "model", policy)["score"][...]
    np.testing.assert_array_equal(found, tensors[SCORE])


def test_the_file_among_several_is_named(tmp_path: Path):
    policy, tensors = saved(tmp_path / "model")
    tensors[SCORE][0, 0] = np.nan
    second = shard(tmp_path / "model", tensors)[1]
    with pytest.raises(UserError, match=f"{second}: tensor '{SCORE}' has numbers"):
        load_params(tmp_path / "model", policy, None, jnp.dtype(jnp.float32))
