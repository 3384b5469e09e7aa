"""Runs whose rollouts end on half of the devices while models read on the others."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from placed_runs import MANY, Ended, differences, ended, slow_tails
from runs import QWEN3, TINY, run, write_checkpoint

from pat_jax.common.rules import OptionError
from pat_jax.config.command_line import parse
from pat_jax.rl.batches.batches import TrainBatch
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.setup import build
from pat_jax.training.copied_reader import CopiedReader

ON_FOUR = "--devices", "4", *MANY
TAIL = "--placement.tail", "40"


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scalar = replace(QWEN3, head="scalar", tie_embeddings=False)
    return write_checkpoint(tmp_path_factory.mktemp("judge") / "judge", scalar)


@pytest.fixture(scope="module")
def flat(judge: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return ended(tmp_path_factory.mktemp("flatten"), judge, *ON_FOUR)


@pytest.fixture
def a_slow_tail() -> Iterator[threading.Event]:
    with slow_tails() as goes_on:
        yield goes_on


@pytest.mark.parametrize("rest", ["device", pytest.param("host", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("a_slow_tail")
def test_three_iterations_of_ppo_are_the_same_with_a_tail(
    tmp_path: Path, judge: Path, flat: Ended, rest: str
):
    other = ended(tmp_path / "tail", judge, *ON_FOUR, *TAIL, "--roles.rest", rest)
    assert differences(other, flat) == [] and other.compiled == []
    assert len(other.rows) == 3
    for row in other.rows:
        assert row["rollout/layouts"].endswith("dp1tp2")
        assert row["reward/early_seconds"] > 0 and row["reward/early_waited_seconds"] > 0


def test_an_error_beside_a_tail_ends_the_run(
    tmp_path: Path, judge: Path, monkeypatch: pytest.MonkeyPatch, a_slow_tail: threading.Event
):
    def fails(self: CopiedReader, batch: TrainBatch) -> TrainBatch:
        a_slow_tail.set()
        raise RuntimeError("the copy has lost its device")

    monkeypatch.setattr(CopiedReader, "read", fails)
    with pytest.raises(RuntimeError, match="lost its device"):
        ended(tmp_path / "run", judge, *ON_FOUR, *TAIL)
    assert not [x for x in threading.enumerate() if x.name.startswith("tail")]


@pytest.mark.slow  # two runs
def test_a_second_batch_of_an_iteration_begins_on_all_devices_again(tmp_path: Path):
    grpo = """
        --devices 4 --rollout.prompts_per_step 32 --algorithm.mini_batch_size 32
        --algorithm.dynamic_sampling 1 --algorithm.beta 0.05 --eval.every 0
    """  # most groups of an untrained policy have no signal: another batch is drawn
    rows: list[list[dict[str, Any]]] = []
    for name, tail in (("flatten", ()), ("tail", TAIL)):
        folder = tmp_path / name
        run(*TINY, *grpo.split(), *tail, "--run_dir", str(folder))
        rows.append([x for x in read_metrics(folder / "metrics.jsonl") if x["step"] > 0])
    for flat, other in zip(*rows, strict=True):
        assert flat["rollout/batches"] == other["rollout/batches"] == 2
        assert other["rollout/layouts"].endswith("dp1tp2")
        for value in ("rollout/tokens", "reward/mean", "train/loss"):
            assert other[value] == pytest.approx(flat[value], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--speculation.source early_exit:1", "0 with drafts that a model generates"),
        ("", "0 where no model reads responses before an update"),
    ],
)
def test_a_run_that_can_have_no_tail_is_told(tmp_path: Path, options: str, expected: str):
    config = parse([*TINY, "--devices", "2", "--placement.tail", "4", *options.split()])
    with pytest.raises(OptionError) as error:
        build(replace(config, run_dir=str(tmp_path)), jax.devices()[:2])
    assert f"placement.tail is 4: expected {expected}" in str(error.value)


@pytest.mark.slow  # a run
def test_a_tail_in_which_only_a_reward_model_reads_says_how_long(tmp_path: Path, judge: Path):
    options = f"""
        --devices 4 --rollout.prompts_per_step 8 --rollout.num_generations 8 --steps 1
        --algorithm.mini_batch_size 8 --eval.every 0 --reward model:{judge}
    """
    run(*TINY, *options.split(), *TAIL, "--run_dir", str(tmp_path / "run"))
    (row,) = [x for x in read_metrics(tmp_path / "run" / "metrics.jsonl") if x["step"] == 1]
    assert row["rollout/layouts"].endswith("dp1tp2")
    assert {"reward/early_seconds", "reward/early_waited_seconds"} <= row.keys()
