"""Checkpoints come back bit for bit, on any sharding, and survive a kill in the middle of a save."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from arrays import assert_same_bits, bits
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pat_jax.common.errors import UserError
from pat_jax.models.presets import preset
from pat_jax.run.checkpoints.checkpoint import Checkpointer

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


def test_a_checkpoint_of_another_model_is_refused_before_arrays_are_read(
    checkpointer: Checkpointer, tmp_path: Path
):
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
