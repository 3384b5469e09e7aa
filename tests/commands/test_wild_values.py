"""Files that others wrote, with one value gone wild: each is read, or refused in one sentence."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

import jax
import jax.numpy as jnp
import pytest
from fakes import SPLITS, made_up_latency
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wild_json import ANYWHERE, WILD, with_wild

from pat_jax.common.errors import UserError
from pat_jax.config import command_line as cli
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import check_checkpoint
from pat_jax.models.checkpoints.safetensors_file import read_header
from pat_jax.models.policy import Policy
from pat_jax.models.presets import PRESETS
from pat_jax.planning.latency.profile import Profile, Subject, read_profile
from pat_jax.profiling.predict.targets import MOST_DEVICES, Target
from pat_jax.profiling.simulate.length_files import read_lengths

FEW = settings(max_examples=40, deadline=None)


def read_or_refused(read: Callable[[Path], object], path: Path) -> str:
    """What it is refused with; empty where it is read."""
    try:
        read(path)
    except UserError as error:
        message = str(error)
        assert str(path.name) in message and "\n" not in message and len(message) < 1500
        return message
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A sound checkpoint, and a sound profile."""
    folder = tmp_path_factory.mktemp("sound")
    policy = Policy.from_config(PRESETS["tiny"])
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), policy.abstract_params)
    export(folder / "model", policy, params, jnp.float32)
    steps = dict.fromkeys(SPLITS[:2], 0.1)
    latency = made_up_latency(steps, steps, reshard=1, migrate_per_token=1, max_rows=1)
    subject = Subject("gpu", "NVIDIA H100", 8, {"embed_dim": 64}, "bfloat16", "0.10.2")
    Profile(subject, latency).save(folder / "profile.json")
    return folder


@FEW
@given(where=ANYWHERE, wild=WILD)
@example(where=0, wild="[" * 100_000)
def test_config_json(folder: Path, where: int, wild: str):
    path = folder / "model" / "config.json"
    sound = path.read_text()
    more = json.dumps(json.loads(sound) | {"num_hidden_layers": 1001})  # than any model has
    try:
        path.write_text(with_wild(json.loads(sound), where, wild))
        read_or_refused(lambda path: check_checkpoint(path.parent), path)
        path.write_text(more)
        assert "up to 1,000;" in read_or_refused(lambda path: check_checkpoint(path.parent), path)
    finally:
        path.write_text(sound)


@FEW
@given(where=ANYWHERE, wild=WILD)
@example(where=0, wild="[" * 100_000)
def test_a_safetensors_header(tmp_path_factory, where: int, wild: str):
    header = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": [8 * i, 8 * i + 8]}
        for i, name in enumerate(("a", "b"))
    }
    text = with_wild(header | {"__metadata__": {"format": "pt"}}, where, wild).encode()
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    read_or_refused(read_header, path)


@given(
    tensors=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
)
@example(tensors=[(0, 2), (1, 0)], order=Random(0))
def test_tensors_lie_back_to_back_or_are_refused(tmp_path_factory, tensors, order):
    """By an account of its own: every byte of the data belongs to just one tensor."""
    entries = [
        (f"t{i}", {"dtype": "F32", "shape": [size], "data_offsets": [4 * at, 4 * (at + size)]})
        for i, (at, size) in enumerate(tensors)
    ]
    order.shuffle(entries)
    text = json.dumps(dict(entries)).encode()
    size = max(entry["data_offsets"][1] for _, entry in entries)
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    owners = [sum(b <= byte < b + s for b, s in tensors) for byte in range(size // 4)]
    ends = {0, *(b + s for b, s in tensors if s)}
    is_sound = owners == [1] * len(owners) and all(b in ends for b, s in tensors if not s)
    assert is_sound == (not read_or_refused(read_header, path))


@FEW
@given(where=ANYWHERE, wild=WILD)
@example(where=0, wild="[" * 100_000)
@example(where=23, wild="-" + "9" * 4299)
def test_a_profile(folder: Path, tmp_path_factory, where: int, wild: str):
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    path.write_text(with_wild(json.loads((folder / "profile.json").read_text()), where, wild))
    read_or_refused(read_profile, path)


@FEW
@given(where=ANYWHERE, wild=WILD, suffix=st.sampled_from([".json", ".jsonl", ".csv"]))
@example(where=0, wild="[" * 100_000, suffix=".json")
@example(where=0, wild="1" * 200_000, suffix=".csv")
def test_a_file_of_lengths(tmp_path_factory, where: int, wild: str, suffix: str):
    sound = [12, {"length": 5, "count": 2, "prompt_tokens": 7}, {"usage": {"completion_tokens": 3}}]
    text = with_wild(sound, where, wild)
    if suffix == ".jsonl":
        text = "3\n" + with_wild(sound[1], where, wild)
    elif suffix == ".csv":
        text = f"length,count\n4,{wild}\n{wild},1\n"
    path = tmp_path_factory.mktemp("lengths") / f"lengths{suffix}"
    path.write_text(text)
    read_or_refused(read_lengths, path)


@FEW
@given(wild=WILD, option=st.sampled_from(["seed", "steps", "rollout", "rollout.top_p", "model"]))
@example(wild="[" * 5000, option="seed")
@example(wild="{a: " * 5000, option="rollout")
@example(wild="- " * 5000, option="rollout")
def test_a_file_of_options(tmp_path_factory, wild: str, option: str):
    """JSON is YAML."""
    path = tmp_path_factory.mktemp("options") / "mine.yaml"
    path.write_text(f"{option}: {wild}\n")
    read_or_refused(lambda path: cli.parse(["--config", str(path)]), path)


@pytest.mark.parametrize("text", ["r\udcc3\udca9", "a\0b"])
@pytest.mark.parametrize("option", ["run_dir", "model", "data.files", "checkpoint.export_dir"])
def test_text_that_no_file_is_called(option: str, text: str):
    """Such as a folder's name in UTF-8 where Python was told that the terminal's is ASCII."""
    with pytest.raises(UserError) as caught:
        cli.parse([f"--{option}", text])
    message = str(caught.value)
    assert message.startswith(f"option --{option} is {text!r}: expected ")
    assert message.isprintable()


@given(
    chip=st.sampled_from(["h100", "v5e", "v5p"]),
    sizes=st.lists(st.integers(0, 10) | st.integers(100, 10**90), min_size=1, max_size=5),
)
@example(chip="h100", sizes=[8, 99_999_999])
def test_a_target_is_of_devices_that_can_be_counted(chip: str, sizes: list[int]):
    try:
        assert Target.parse(f"{chip}:{'x'.join(map(str, sizes))}").num_devices <= MOST_DEVICES
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 1500
