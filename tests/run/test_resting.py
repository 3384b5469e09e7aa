"""The reference is saved once, and models wait in the host's memory: the same numbers, and more room."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits
from runs import TINY, run_to_end
from trainers import CHAIN, host_weights, make_trainer, started, with_reference

from pat_jax.common.devices import HOST_MEMORY
from pat_jax.common.errors import UserError
from pat_jax.common.rules import OptionError
from pat_jax.config.command_line import parse
from pat_jax.config.role_table import REFERENCE
from pat_jax.layout.layout import shard_bytes
from pat_jax.run.checkpoints.checkpoint import Checkpointer
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.opened import Run
from pat_jax.run.roles import resting
from pat_jax.run.roles.resting import Rest, settled_rest
from pat_jax.run.roles.role_params import FOLDER, read_reference, save_reference
from pat_jax.run.start.setup import build
from pat_jax.training.reader import Reader
from pat_jax.training.roles import Roles
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import Trainer
from pat_jax.training.update_memory import update_stages

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
def test_what_cannot_be_read_is_one_sentence(tmp_path, harm: Callable[[Path], None], words: str):
    reader = taken(reader_of("dp8tp1"))
    save_reference(str(tmp_path), reader.params)
    harm(tmp_path / FOLDER)
    with pytest.raises(UserError, match=words) as error:
        read_reference(str(tmp_path), STEP, reader.abstract_params)
    assert str(error.value).endswith("copy that folder back, or begin anew with another --run_dir.")
    assert "\n" not in str(error.value)


def test_a_disk_without_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
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


PPO = "--algorithm.name ppo --algorithm.beta 0.05 --eval.every 0 --warm_start.steps 0"
REWARD = "def score(completions, **_):\n    return [len(set(x)) for x in completions]\n"


def ended(folder: Path, rest: str) -> Run:
    (reward := folder.with_suffix(".py")).write_text(REWARD)
    options = [*PPO.split(), "--layout", "dp2tp1", "--roles.rest", rest, "--run_dir", str(folder)]
    export = str(folder.parent / f"{rest}-c")
    options += ["--reward", f"{reward}:score", "--critic.export_dir", export]
    config = parse([*TINY, *options])
    setup = build(config, jax.devices()[: config.devices])
    return run_to_end(setup)


def memories(tree: Any) -> set[str]:
    """Of arrays that have a dimension."""
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


@pytest.mark.slow  # two runs; role by role `training/test_rest.py` compares the same
def test_a_run_of_three_roles_that_rest_is_the_run_of_roles_that_stay(tmp_path: Path):
    staying, rested = (ended(tmp_path / rest, rest) for rest in ("device", "host"))
    rows = [read_metrics(tmp_path / rest / "metrics.jsonl") for rest in ("device", "host")]
    learned = [
        [
            {k: v for k, v in row.items() if k.startswith(("train/", "critic/", "reward/m"))}
            for row in x
        ]
        for x in rows
    ]
    assert len(learned[0]) == 2 and "critic/loss" in learned[0][0]
    for name in ("train/mfu", "train/tokens_per_s"):  # they depend on the clock
        for row in (*learned[0], *learned[1]):
            row.pop(name, None)
    np.testing.assert_equal(learned[0], learned[1])  # for which NaN is NaN
    assert learned[0][1]["critic/grad_norm"] > 0 and learned[0][1]["train/grad_norm"] > 0
    exported = [tmp_path / f"{rest}-c" / "model.safetensors" for rest in ("device", "host")]
    assert exported[0].read_bytes() == exported[1].read_bytes()
    roles, states = rested.setup.roles, rested.learner.states
    assert roles.critic is not None and memories(states["critic"]) == {HOST_MEMORY}
    assert memories(states["train"].opt_state) == {HOST_MEMORY}
    assert memories(states["train"].params) == {"device"}
    assert memories(roles.readers["reference"].params) == {HOST_MEMORY}
    # The rollout has the memory of two moments, of a critic with two, and of the reference.
    policy, critic = (shard_bytes(x.state_in_a_step.params) for x in (roles.policy, roles.critic))
    reference = shard_bytes(roles.readers["reference"].abstract_params)
    saved = staying.setup.memory.resident - rested.setup.memory.resident
    assert saved == 2 * policy + 3 * critic + reference
    held = [
        max(stage.held for stage in update_stages(run.setup.roles)) for run in (staying, rested)
    ]
    assert held[0] > held[1]


def settled(asked: Any, room: Callable[[Rest], float], *, learns: bool = True) -> tuple[Rest, str]:
    return settled_rest(asked, jax.devices(), room, sequences=128, learns=learns)


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [(128, 300, "device"), (50, 300, "host"), (50, 100, "host"), (50, 50, "device")],
)
def test_models_rest_where_the_rollout_has_no_room_beside_them(device, host, expected):
    """Of 128 responses at full length."""
    room: dict[Rest, float] = {"device": float(device), "host": float(host)}
    found, words = settled("auto", lambda rest: room[rest])
    assert found == expected
    assert ("\n" not in words and "of 128 responses at full length" in words) == (words != "")
    assert (words != "") == (expected == "host")
    assert f"and for {device} beside" in words or not words


def test_nothing_is_decided_that_was_asked_for_or_cannot_be_known():
    def unasked(rest: Rest) -> float:
        raise AssertionError("the room is not needed")

    for rest in ("device", "host"):
        assert settled(rest, unasked) == (rest, "")
    assert settled("auto", unasked, learns=False) == ("device", "")
    assert settled("auto", lambda _: float("inf")) == ("device", "")


def test_devices_without_such_memory_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resting, "has_host_memory", lambda devices: False)
    output = r"roles\.rest is 'host': expected device or auto on devices of platform cpu"
    with pytest.raises(OptionError, match=output):
        settled("host", lambda _: 1.0)
    assert settled("auto", lambda _: 1.0)[0] == "device"
