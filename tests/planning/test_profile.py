"""A profile reads back as it was, and one that does not fit is refused with its reason."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import SPLITS, made_up_latency

from pat_jax.planning.latency.profile import (
    Profile,
    ProfileError,
    Subject,
    read_profile,
)

SUBJECT = Subject(
    "gpu", "NVIDIA H100", 8, {"embed_dim": 64, "rope": (1.0, 2)}, "bfloat16", "0.10.2"
)
PROFILE = Profile(
    SUBJECT,
    made_up_latency(
        {split: 1 / 3 / split.tp for split in SPLITS},
        dict.fromkeys(SPLITS, 1e-3),
        reshard=0.1,
        migrate_per_token=0.01,
    ),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    PROFILE.save(tmp_path / "deep" / "profile.json")
    return tmp_path / "deep" / "profile.json"


def edited(path: Path, edit: Callable[[dict], object]) -> Path:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    return path


def refusal(path: Path, subject: Subject = SUBJECT) -> str:
    with pytest.raises(ProfileError) as caught:
        read_profile(path, subject)
    message = str(caught.value)
    assert str(path) in message and "python -m pat_jax.profile --remeasure" in message
    assert message.count("\n") == 0
    return message


def test_a_profile_reads_back_as_it_was(path: Path):
    read = read_profile(path, SUBJECT)
    assert read.latency == PROFILE.latency
    assert not SUBJECT.differences(read.subject)


def test_a_profile_without_a_subject_asked_for_is_any(path: Path):
    assert read_profile(path).latency == PROFILE.latency
    damaged = edited(path, lambda content: content["latency"]["decode_table"][0].__setitem__(1, -1))
    with pytest.raises(ProfileError, match="positive number of seconds"):
        read_profile(damaged)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            replace(SUBJECT, device_kind="NVIDIA H200"),
            "device_kind (NVIDIA H100 there, NVIDIA H200",
        ),
        (replace(SUBJECT, jax="0.11.0"), "jax (0.10.2 there, 0.11.0 here)"),
        (replace(SUBJECT, weights="int8"), "weights (auto there, int8 here)"),
        (replace(SUBJECT, num_devices=4), "num_devices (8 there, 4 here)"),
        (
            replace(SUBJECT, model={"embed_dim": 32}),
            "model.embed_dim (64 there, 32 here), model.rope",
        ),
    ],
)
def test_a_profile_of_something_else_is_refused(path: Path, other: Subject, words: str):
    assert words in refusal(path, other)
    assert other.file_name != SUBJECT.file_name


def test_a_truncated_file_is_refused(path: Path):
    path.write_text(path.read_text()[:-40])
    assert "truncated or no JSON" in refusal(path)


def last_times(table: str, factor: float) -> Callable[[dict], object]:
    def edit(content: dict) -> None:
        content["latency"][table][-1][1] *= factor

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c.update(version=0), "field version is 0, expected 3"),
        (lambda c: c["latency"].pop("reshard_table"), "reshard_table"),
        (lambda c: c["subject"].update(model=None), "not as this version writes it"),
        (
            lambda c: c["latency"].update(reads="pages"),
            "field reads is 'pages', expected one of bucket, held",
        ),
        (lambda c: c["latency"].update(drafts_from=3), "drafts_from is 3, expected a text"),
        # Beyond noise.
        (last_times("decode_table", 0.2), "of a smaller one"),
        (last_times("prefill_table", 0.1), "of a smaller one"),
    ],
)
def test_what_is_damaged_is_refused(path: Path, edit: Callable[[dict], object], words: str):
    assert words in refusal(edited(path, edit))


def test_a_grid_that_falls_as_noise_does_is_read(path: Path):
    read_profile(edited(path, last_times("decode_table", 0.8)), SUBJECT)


@pytest.mark.parametrize("seconds", [-0.1, 0, math.nan, math.inf, "soon", None])
@pytest.mark.parametrize("table", ["decode_table", "migrate_table", "prefill_table"])
def test_times_that_no_machine_takes_are_refused(path: Path, table: str, seconds: object):
    def spoil(content: dict) -> None:
        content["latency"][table][0][1] = seconds

    message = refusal(edited(path, spoil))
    assert f"field {table}, entry dp" in message and "expected a positive number" in message


@pytest.mark.parametrize(
    ("table", "entry"),
    [
        ("decode_table", [[8, 1], 4]),
        ("decode_table", [[8, 1], 4, "long"]),
        ("decode_table", [[8, 1], -4, 64]),
        ("decode_table", [[8, 0.5], 4, 64]),
        ("decode_table", [4, 4, 64]),
        ("prefill_table", [[8, 1], 64.5]),
        ("reshard_table", [[8, 1], [4, 2], 3]),
        ("migrate_table", [[8, 1], [4, 2], 4]),
    ],
)
def test_an_entry_of_no_bucket_is_refused(path: Path, table: str, entry: list):
    def add(content: dict) -> None:
        content["latency"][table].append([entry, 1.0])

    assert f"field {table} has an entry " in refusal(edited(path, add))


@pytest.mark.parametrize("size", [0, 2.5, "4", None])
@pytest.mark.parametrize("name", ["prefill_blocks", "page_size"])
def test_prefill_calls_of_no_size_are_refused(path: Path, name: str, size: object):
    edited(path, lambda content: content["latency"].update({name: size}))
    assert f"field {name} is {size!r}, expected an integer" in refusal(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    assert "No such file" in refusal(tmp_path / "none.json")
