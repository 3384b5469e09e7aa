"""The reference policy is saved once, and an older run's is found in its checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits
from runs import TINY
from trainers import CHAIN, host_weights, make_trainer, started, with_reference

from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.config.role_table import REFERENCE
from pat_jax.engine.sizing.memory import shard_bytes
from pat_jax.run.checkpoints.checkpoint import Checkpointer
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.roles.role_params import FOLDER, read_reference, save_reference
from pat_jax.run.start.setup import build
from pat_jax.training.reader import Reader
from pat_jax.training.roles import Roles
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import Trainer

STEP = 3


def reader_of(layout: str, dtype: Any = jnp.bfloat16) -> Reader:
    trainer = make_trainer(CHAIN[layout], targets=())
    held = TrainableParams(trainer.policy, trainer.layout, weight_dtype=dtype)
    return with_reference(trainer, held).readers[REFERENCE]


def taken(reader: Reader) -> Reader:
    reader.take(jax.device_put(host_weights()))
    return reader


def in_bfloat16() -> Any:
    return jax.tree.map(lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16)), host_weights())


def test_it_is_read_as_it_was_saved_on_other_shards(tmp_path: Path):
    one, other = taken(reader_of("dp8tp1")), reader_of("dp2tp4")
    assert_same_bits(one.params, in_bfloat16())
    save_reference(str(tmp_path), one.params)
    found = read_reference(str(tmp_path), STEP, other.abstract_params)
    assert_same_bits(found, in_bfloat16())
    assert jax.tree.map(lambda x: x.sharding, found) == other.held.shardings


def test_a_run_that_begins_anew_replaces_it(tmp_path: Path):
    reader = taken(reader_of("dp8tp1"))
    assert reader.params is not None
    save_reference(str(tmp_path), jax.tree.map(jnp.zeros_like, reader.params))
    save_reference(str(tmp_path), reader.params)
    assert_same_bits(read_reference(str(tmp_path), 0, reader.abstract_params), in_bfloat16())


def write_old_checkpoint(run_dir: Path) -> Any:
    """As versions before wrote it: the state of a trainer, and its reference in float32."""
    trainer = make_trainer(CHAIN["dp8tp1"], targets=())
    state = started(trainer)
    reference = jax.tree.map(lambda x: x + 0, state.params)
    with Checkpointer(run_dir / CHECKPOINTS) as checkpoints:
        checkpoints.save(STEP, {"train": state, "reference": reference}, {})
        checkpoints.wait()
    return trainer, jax.device_get(state)


def test_that_of_an_earlier_version_is_read_from_its_checkpoint_and_saved(tmp_path: Path):
    trainer, state = write_old_checkpoint(tmp_path)
    with Checkpointer(tmp_path / CHECKPOINTS) as checkpoints:
        step, found, _ = checkpoints.restore({"train": trainer.abstract_state})
    assert step == STEP and found.keys() == {"train"}
    assert_same_bits(found["train"], state)
    reader = reader_of("dp8tp1")
    params = read_reference(str(tmp_path), STEP, reader.abstract_params)
    assert_same_bits(params, in_bfloat16())
    # The next checkpoints have none, and replace this one.
    again = read_reference(str(tmp_path), STEP + 1, reader.abstract_params)
    assert_same_bits(again, in_bfloat16())


def cut(path: Path) -> None:
    largest = max((x for x in path.rglob("*") if x.is_file()), key=lambda x: x.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def remove(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def test_one_that_is_gone_is_gone_beside_a_checkpoint_too(tmp_path: Path):
    with Checkpointer(tmp_path / CHECKPOINTS) as checkpoints:
        checkpoints.save(STEP, {"train": {"x": jnp.zeros(3)}}, {})
    with pytest.raises(UserError, match=r"is gone: expected the folder .*/reference; "):
        read_reference(str(tmp_path), STEP, reader_of("dp8tp1").abstract_params)
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut, r"^the reference policy in .*/reference is damaged \(.* has .* of .* bytes\); "),
        (remove, r"^the reference policy of this run is gone: expected the folder .*/reference; "),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    tmp_path: Path, harm: Callable[[Path], None], words: str
):
    reader = taken(reader_of("dp8tp1"))
    save_reference(str(tmp_path), reader.params)
    harm(tmp_path / FOLDER)
    with pytest.raises(UserError, match=words) as error:
        read_reference(str(tmp_path), STEP, reader.abstract_params)
    assert str(error.value).endswith("copy that folder back, or begin anew with another --run_dir.")
    assert "\n" not in str(error.value)


def test_a_disk_without_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = "pat_jax.run.roles.role_params.lacking"
    monkeypatch.setattr(module, lambda folder, size: f"{size} bytes are too many")
    reader = taken(reader_of("dp8tp1"))
    words = (
        r"the reference policy was not written to .* \(\d+ bytes are too many\): .* --run_dir\.$"
    )
    with pytest.raises(UserError, match=words):
        save_reference(str(tmp_path), reader.params)
    assert not (tmp_path / FOLDER).exists()


def built(*options: str) -> Roles:
    config = parse([*TINY, "--profile", "none", "--run_dir", "unused", *options])
    return build(config, jax.devices()[:2]).roles


def test_it_is_in_the_type_of_the_forward_pass():
    """Half of the bytes of a policy that is trained, and counted beside it."""
    roles = built("--algorithm.beta", "0.1", "--compute_dtype", "bfloat16")
    trainer, reader = roles.policy, roles.readers[REFERENCE]
    assert {x.dtype for x in jax.tree.leaves(reader.abstract_params)} == {jnp.dtype(jnp.bfloat16)}
    one = shard_bytes(trainer.abstract_params)
    assert 2 * shard_bytes(reader.resident) == one
    without = shard_bytes(built("--compute_dtype", "bfloat16").policy.resident)
    assert shard_bytes(trainer.resident) - without == one // 2


def test_with_adapters_it_is_a_second_set_on_the_policys_base():
    options = "--lora.rank", "4", "--warm_start.steps", "0"
    roles = built(*options, "--algorithm.beta", "0.1")
    trainer, reader = roles.policy, roles.readers[REFERENCE]
    adapters = shard_bytes(trainer.abstract_params)
    assert shard_bytes(reader.resident) == adapters < shard_bytes(trainer.trained.abstract_frozen)
    without = shard_bytes(built(*options).policy.resident)
    assert shard_bytes(trainer.resident) - without == adapters
    base = jax.device_put(host_base(trainer), trainer.trained.base_shardings)
    trainer.freeze(base)
    assert reader.held.frozen is base


def host_base(trainer: Trainer) -> Any:
    return jax.tree.map(lambda x: np.ones(x.shape, x.dtype), trainer.trained.abstract_frozen)
