"""Metrics: what is written is read back, through kills and resumptions; the lines people see."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] generated

from pat_jax.models.hf_tensors import num_parameters
from pat_jax.models.policy import Policy
from pat_jax.models.presets import PRESETS, preset
from pat_jax.run.files.folder import METRICS_FILE
from pat_jax.run.logging.banner import closing
from pat_jax.run.logging.metrics import MetricsWriter, read_metrics
from pat_jax.run.logging.progress import summarize

STEP = {
    "reward/mean": 0.4125,
    "rollout/length_p50": 57,
    "rollout/length_max": 160,
    "rollout/tokens": 12000,
    "rollout/tokens_per_s": 12345.6,
    "rollout/layouts": "dp2tp1>dp1tp2",
    "rollout/switches": 1,
    "rollout/switch_seconds": 0.02,
    "rollout/predicted_saving_s": 0.5,
    "timing/rollout": 3.0,
    "timing/rollout/switch": 0.02,
    "timing/update": 1.0,
}


def values(rows: list[dict], name: str) -> dict[int, object]:
    return {row["step"]: row[name] for row in rows if name in row}


def test_a_second_write_of_a_step_adds_to_it_and_supersedes(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(2, {"reward/mean": 0.5, "train/loss": np.int32(1)})
        metrics.write(1, {"reward/mean": jnp.float32(0.5), "rollout/layouts": "dp1tp2"})
        metrics.write(2, {"reward/mean": np.float64(0.75), "eval/reward": 0.3})
        rows = read_metrics(tmp_path / METRICS_FILE)  # while the run goes on
    assert values(rows, "reward/mean") == {1: 0.5, 2: 0.75}
    assert rows[0]["rollout/layouts"] == "dp1tp2"
    assert (rows[1]["train/loss"], rows[1]["eval/reward"]) == (1.0, 0.3)


def test_a_resumed_run_supersedes_what_it_repeats_and_cuts_nothing_off(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:
        for step in (1, 2, 3, 4):
            metrics.write(step, {"reward/mean": step})
    with open(tmp_path / METRICS_FILE, "a", encoding="utf-8") as file:
        file.write('{"step": 5, "rew')  # killed while writing
    before = (tmp_path / METRICS_FILE).read_text()
    with MetricsWriter(tmp_path, resume_step=3) as metrics:
        metrics.write(3, {"reward/mean": 30})
    text = (tmp_path / METRICS_FILE).read_text()
    assert text.startswith(before + "\n")
    assert json.loads(text.splitlines()[5])["event"] == "resume"
    assert values(read_metrics(tmp_path / METRICS_FILE), "reward/mean") == {1: 1, 2: 2, 3: 30}


def test_what_is_not_finite_is_valid_json_and_comes_back_as_nan(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(1, {"train/loss": math.nan, "train/kl": -math.inf})
    line = (tmp_path / METRICS_FILE).read_text()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row["train/loss"] is None
    assert math.isnan(read_metrics(tmp_path / METRICS_FILE)[0]["train/kl"])


@pytest.mark.parametrize(
    ("metrics", "error"),
    [
        ({"loss": 1.0}, "metric 'loss' has no namespace"),
        ({"train/loss": None}, "is a NoneType: expected one number"),
    ],
)
def test_metrics_without_a_namespace_or_a_number_are_refused(tmp_path: Path, metrics, error: str):
    with MetricsWriter(tmp_path) as writer, pytest.raises((ValueError, TypeError), match=error):
        writer.write(1, metrics)


def test_tensorboard_gets_the_numbers(tmp_path: Path, capsys, caplog):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(3, {"a/x": math.nan, "a/y": -math.inf, "reward/mean": 0.5, "a/text": "no"})
    (path,) = (tmp_path / "tensorboard").glob("events*")
    found = {
        value.tag: (event.step, value.simple_value)
        for event in map(Event.FromString, records(path))
        for value in event.summary.value
    }
    assert found == {"reward/mean": (3, 0.5)}
    assert "NaN" not in "".join(capsys.readouterr()) and caplog.records == []


def records(path: Path):
    """The records of a TensorBoard file: length (8 bytes), checksum (4), data, checksum (4)."""
    data = path.read_bytes()
    while data:
        length = int.from_bytes(data[:8], "little")
        yield data[12 : 12 + length]
        data = data[16 + length :]


def test_the_summary_says_where_the_time_went_and_what_came_of_it():
    rows = [
        STEP | {"step": step, "reward/mean": step / 10, "eval/reward": step / 20} for step in (1, 2)
    ]
    assert summarize(rows).splitlines() == [
        "2 steps in 8.0 s: rollout 75%, update 25%",
        "reward 0.100 -> 0.200 (first and last step)",
        "held-out reward 0.050 -> 0.100",
        "24,000 tokens, 4,000 tok/s",
        "2 switches: cost 0.04 s, predicted saving 1.00 s",
    ]
    assert summarize([{"step": 1}]) == "1 step in 0.0 s"
    assert summarize([]) == "no step was finished"
    nothing = [{"step": 0, "eval/reward": 0.25}]
    assert summarize(nothing).splitlines() == ["no step was finished", "held-out reward 0.250"]
    rows = [{"step": 1, "reward/mean": math.nan}, {"step": 2, "reward/mean": 0.5}]
    assert "reward 0.500 -> 0.500 (first and last step)" in summarize(rows)


def test_damaged_lines_are_left_out(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    rows = [b'{"step": 1, "a/b": 1.0}', b"\xff\xfe\x00", b"[1]", b'{"step": "x"}', b"7", b"{}"]
    rows += [b"[" * 100_000, b'{"step": 2, "a/b": [1]}', b'{"step": 2, "a/b": 2.0}', b""]
    path.write_bytes(b"\n".join(rows))
    assert [row["a/b"] for row in read_metrics(path)] == [1.0, 2.0]


PUBLISHED = {  # as their model cards say
    "qwen3-8b": 8_190_735_360,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_model_card(name: str):
    assert num_parameters(Policy.from_config(preset(name))) == PUBLISHED[name]


def test_rows_that_pad_the_vocabulary_are_no_parameters():
    for tie in (True, False):
        models = [
            replace(PRESETS["tiny"], vocab_size=101, vocab_multiple=n, tie_embeddings=tie)
            for n in (1, 64)
        ]
        assert len({num_parameters(Policy.from_config(model)) for model in models}) == 1


def test_the_closing_claims_nothing_that_is_not_there(tmp_path: Path):
    def output(export_dir: str = "") -> list[str]:
        seconds = {"compile_s": 61.23, "total_s": 3 * 3600 + 120}
        return closing(tmp_path, export_dir, "the critic", **seconds).splitlines()

    (tmp_path / "config.yaml").touch()
    assert output() == [
        "whole run 3 h 2 min, 61.2 s of them compiling",
        f"in {tmp_path}: the configuration",
    ]
    for name in ("metrics.jsonl", "rollout.svg", "completions.jsonl"):
        (tmp_path / name).touch()
    for step in ("9", "10", "11.partial"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
    export = tmp_path / "export"
    assert output(str(export))[1:] == [
        f"in {tmp_path}: the configuration, metrics.jsonl, completions.jsonl, rollout.svg, the "
        "checkpoints of step 9 and 10"
    ]
    export.mkdir()
    assert output(str(export))[2:] == [f"in {export}: the critic"]
