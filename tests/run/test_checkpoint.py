"""Checkpoints come back bit for bit, on any sharding, and survive a kill in the middle of a save."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import assert_same_bits, bits
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from runs import QWEN3, SMALL_ROLLOUT, run, write_checkpoint, write_problems

from pat_jax.common.errors import UserError
from pat_jax.layout.mesh import padded_for
from pat_jax.models.checkpoints.hf_load import load_params
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.rl.algorithm.optimizer import make_optimizer
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.run.checkpoints.checkpoint import Checkpointer
from pat_jax.run.checkpoints.orbax_io import read_part
from pat_jax.run.logging.metrics import read_metrics

MODEL = {"num_layers": 2, "embed": 16, "rope": {"theta": 1e4}, "axes": ("a", "b")}


class TwoLayers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        kernel = jax.random.normal(rngs.params(), (16, 32))
        self.embed = nnx.Param(kernel, axes=("embed", "mlp"))
        self.layers = nnx.List(
            [nnx.Linear(16, 32, rngs=rngs, param_dtype=jnp.bfloat16) for _ in range(2)]
        )


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)


def put(tree: Any, mesh: Mesh, matrices: P) -> Any:
    def place(x: jax.Array) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, matrices if x.ndim == 2 else P()))

    return jax.tree.map(place, tree)


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


@pytest.fixture
def state(mesh: Mesh) -> dict:
    params = nnx.state(TwoLayers(nnx.Rngs(0)))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    tree = {"params": params, "optimizer": optimizer.init(params), "key": jax.random.key(3)}
    return put(tree, mesh, P("a", ("b", "c")))


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path / "checkpoints", 2, fingerprint=MODEL) as opened:
        yield opened


def test_state_and_metadata_come_back_bit_for_bit(checkpointer: Checkpointer, state: dict):
    meta = {"data_position": 37, "lengths": [1, 2], "planner": {"spent": 0.1 + 0.2}, "none": None}
    checkpointer.save(3, state, meta)
    step, restored, read = checkpointer.restore(abstract(state))
    assert (step, read) == (3, meta)
    assert_same_bits(restored, state)
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert one.sharding == other.sharding
    assert restored["params"]["embed"].get_metadata()["axes"] == ("embed", "mlp")


def test_a_checkpoint_comes_back_onto_another_sharding(checkpointer, mesh, state: dict):
    checkpointer.save(1, state, {})
    elsewhere = put(state, mesh, P(("c", "a")))
    _, restored, _ = checkpointer.restore(abstract(elsewhere))
    assert_same_bits(restored, state)
    assert restored["params"]["embed"][...].sharding.spec == P(("c", "a"))


def test_the_state_may_be_donated_while_it_is_being_written(checkpointer, mesh):
    state = {"x": put(jnp.arange(2**20, dtype=jnp.float32).reshape(8, -1), mesh, P("a"))}
    before = bits(state["x"])
    checkpointer.save(1, state, {})
    clear = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    shape = abstract(state)
    overwritten = clear(clear(state["x"]))
    assert bits(overwritten) != before
    assert bits(checkpointer.restore(shape)[1]["x"]) == before


def test_only_the_newest_are_kept(checkpointer: Checkpointer, tmp_path: Path):
    for step in (1, 2, 3):
        checkpointer.save(step, {"x": jnp.float32(step)}, {})
    checkpointer.wait()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]
    assert checkpointer.latest_step() == 3


def test_the_last_step_may_be_saved_twice_and_an_older_one_never(checkpointer: Checkpointer):
    checkpointer.save(5, {"x": jnp.float32(5)}, {})
    checkpointer.save(5, {"x": jnp.float32(6)}, {})
    with pytest.raises(ValueError, match=r"cannot save step 4: .* already holds 5"):
        checkpointer.save(4, {"x": jnp.float32(4)}, {})
    assert checkpointer.restore(abstract({"x": jnp.float32(0)}))[1]["x"] == 5


def test_a_checkpoint_of_another_model_is_refused_before_arrays_are_read(checkpointer, tmp_path):
    checkpointer.save(1, {"x": jnp.zeros(3)}, {})
    checkpointer.wait()
    other = {key: value for key, value in MODEL.items() if key != "rope"} | {"embed": 32}
    with (
        Checkpointer(tmp_path / "checkpoints", fingerprint=other) as reader,
        pytest.raises(UserError, match=r"embed \(16 there, 32 here\), rope .* nothing here\)"),
    ):
        reader.restore({"no": "array of this kind"})


def test_a_checkpoint_of_an_earlier_version_lacks_fields_that_have_defaults_now(tmp_path: Path):
    """Such as `head`, of models that all had the vocabulary's."""
    model = asdict(preset("tiny"))
    earlier = {k: v for k, v in model.items() if k not in ("head", "head_bias", "experts")}
    with Checkpointer(tmp_path, fingerprint=earlier) as writer:
        writer.save(1, {"x": jnp.float32(1)}, {})
    with Checkpointer(tmp_path, fingerprint=model) as reader:
        assert reader.restore(abstract({"x": jnp.float32(0)}))[0] == 1
    with (
        Checkpointer(tmp_path, fingerprint=model | {"head": "scalar"}) as reader,
        pytest.raises(UserError, match=r"head \(vocab there, scalar here\)"),
    ):
        reader.restore(abstract({"x": jnp.float32(0)}))


def test_without_a_checkpoint_there_is_nothing_to_resume_from(checkpointer: Checkpointer):
    assert checkpointer.latest_step() is None
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        checkpointer.restore({})


KILLED = """
import logging, os, sys
logging.basicConfig(level=logging.INFO)
import jax.numpy as jnp
from pat_jax.run.checkpoints.checkpoint import Checkpointer

checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, {"x": jnp.arange(4.0)}, {"data_position": 10})
checkpointer.wait()
checkpointer.save(2, {"x": jnp.zeros(20_000_000)}, {"data_position": 20})
while not any("tmp" in name for name in os.listdir(sys.argv[1])):
    pass
os._exit(9)
"""


def test_a_run_killed_in_the_middle_of_a_save_resumes_from_the_one_before(tmp_path: Path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    killed = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert killed.returncode == 9
    assert "absl" not in killed.stdout + killed.stderr  # Orbax keeps quiet
    assert any("tmp" in path.name for path in tmp_path.iterdir())
    with Checkpointer(tmp_path) as checkpointer:
        shape = abstract({"x": jnp.zeros(4)})
        step, state, meta = checkpointer.restore(shape)
        assert (step, state["x"].tolist(), meta["data_position"]) == (1, [0, 1, 2, 3], 10)
        checkpointer.save(2, {"x": jnp.ones(4)}, {})
        assert checkpointer.restore(shape)[0] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


CONFIG = ModelConfig("qwen2", 61, 24, 48, 1, 9, 3, 4, attention_bias=True, vocab_multiple=8)
# What random weights write differs by it, so that a run learns.
REWARD = """
def score(prompts, completions, **columns):
    return [float(sum(map(ord, text)) % 2) for text in completions]
"""
OPTIMIZER = make_optimizer(learning_rate=1e-3, total_steps=9)


def state_of(policy: Policy) -> TrainState:
    """Weights, and moments that are twice as large; zeros in what pads heads."""
    params = policy.init(0)
    doubled, structure = jax.tree.map(lambda x: 2 * x, params), jax.tree.structure(params)

    def is_params(x: object) -> bool:
        return jax.tree.structure(x) == structure

    moments = jax.tree.map(
        lambda x: doubled if is_params(x) else x, OPTIMIZER.init(params), is_leaf=is_params
    )
    return TrainState(params, moments, jnp.int32(3))


@pytest.mark.parametrize("saved, wanted", [(4, 1), (2, 3)])
def test_parameters_and_moments_come_back_with_other_padding(tmp_path, saved: int, wanted: int):
    there, here = (
        Policy.from_config(replace(CONFIG, query_multiple=n, vocab_multiple=8 * n))
        for n in (saved, wanted)
    )
    with Checkpointer(tmp_path, 2, fingerprint=asdict(there.config)) as checkpoints:
        checkpoints.save(3, state_of(there), {})
        checkpoints.wait()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    expected = state_of(here)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), expected
    )
    with Checkpointer(tmp_path, 2, fingerprint=asdict(here.config)) as checkpoints:
        _, found, _ = checkpoints.restore(like)
    assert_same_numbers(found, expected)
    part = read_part(tmp_path / "3", {"params": like.params})
    assert_same_numbers(part["params"], expected.params)


def assert_same_numbers(found: Any, expected: Any) -> None:
    """But for rows that pad the vocabulary, the only dimension that is so long."""
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert ours.shape == theirs.shape
        a, b = (np.atleast_1d(x)[: CONFIG.vocab_size] for x in (ours, theirs))
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow  # whole commands
@pytest.mark.parametrize("lora", [[], ["--lora.rank", "2"]], ids=["whole", "adapters"])
def test_a_run_goes_on_where_other_heads_are_padded(tmp_path: Path, lora: list[str]):
    config = replace(QWEN3, num_layers=1, num_heads=14, num_kv_heads=2)
    base, problems = tmp_path / "base", write_problems(tmp_path / "sums.jsonl")
    reward, plain = tmp_path / "reward.py", Policy.from_config(config)
    reward.write_text(REWARD)
    write_checkpoint(base, config)
    options = [
        *SMALL_ROLLOUT, "--model", str(base), "--data", str(problems), *lora,
        *("--rollout.max_prompt_length", "128", "--rollout.prompts_per_step", "6"),
        *("--optimizer.learning_rate", "1e-2", "--algorithm.mini_batch_size", "6"),
        *("--reward", f"{reward}:score", "--eval.every", "0"),
    ]  # fmt: skip

    def exported(folder: Path, devices: int, *more: str) -> list[jax.Array]:
        export = tmp_path / f"export{devices}"
        where = ["--devices", str(devices), "--layout", f"dp1tp{devices}"]
        run("--run_dir", str(folder), *where, "--checkpoint.export_dir", str(export), *more)
        return jax.tree.leaves(load_params(export, plain, None, jnp.float32))

    wanted = exported(tmp_path / "2", 2, *options)
    begun = jax.tree.leaves(load_params(base, plain, None, jnp.float32))
    assert any((ours != before).any() for ours, before in zip(wanted, begun, strict=True))
    for devices, num_heads in ((2, 14), (3, 18), (4, 16)):
        padded = padded_for(jax.devices()[:devices], config, [devices])
        assert padded.padded_num_heads == num_heads
        if devices > 2:
            folder = shutil.copytree(tmp_path / "2", tmp_path / str(devices))
            without_learning = ["--steps", "3", "--optimizer.learning_rate", "0"]
            without_learning += ["--rollout.check_integrity", "true"]
            without_learning += ["--reward", f"{reward}:score"]  # never taken from a folder
            found = exported(folder, devices, "--resume", *without_learning)
            row = read_metrics(folder / "metrics.jsonl")[-1]
            assert row["step"] == 3 and row["train/transfer_gap"] < 1e-4
            for ours, theirs in zip(found, wanted, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-7)
