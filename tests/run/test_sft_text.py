"""Training from scratch on text: it learns, goes on bit for bit, and exports what others load."""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from arrays import assert_same_bits
from file_runs import made, whole_run
from metrics_table import untold
from runs import presets_of_one_layer, without_times

from pat_jax.config.role_table import POLICY
from pat_jax.models.checkpoints.hf_load import check_checkpoint
from pat_jax.rl.algorithm.supervised import cross_entropy
from pat_jax.rl.data.text_reader import TextRows
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.roles.role_params import initial_params
from pat_jax.run.sft.lessons import ExampleLessons
from pat_jax.run.sft.loop import Position, SftRun
from pat_jax.run.sft.setup import SftSetup

STEPS = 12
OPTIONS = [
    *("--model", "tiny-moe"),
    *("--devices", "2"),
    *("--max_length", "64"),
    *("--tokens_per_micro_batch", "512"),
    *("--batch_size", "16"),
    *("--steps", str(STEPS)),
    *("--eval.every", "6"),
    *("--eval.share", "0.2"),
    *("--checkpoint.every", "6"),
    *("--optimizer.learning_rate", "2e-2"),
]


class Whole(NamedTuple):
    folder: Path
    options: list[str]
    setup: SftSetup
    ended: Position


@pytest.fixture(autouse=True, scope="module")
def one_layer() -> Iterator[None]:
    with presets_of_one_layer("tiny-moe"):
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Whole:
    folder = tmp_path_factory.mktemp("text")
    corpus = folder / "corpus" / "deep"
    corpus.mkdir(parents=True)
    for i in range(40):
        (corpus / f"{i}.txt").write_text(f"text {i}: " + "over and over again, " * 20)
    (corpus.parent / "none.txt").touch()
    options = [*OPTIONS, "--data", str(corpus.parent)]
    export = ["--checkpoint.export_dir", str(folder / "policy")]
    setup = made(*options, "--run_dir", str(folder / "run"), *export)
    return Whole(folder, options, setup, whole_run(setup))


def test_it_learns(whole: Whole):
    rows = read_metrics(whole.folder / "run" / "metrics.jsonl")
    losses = [row["train/loss"] for row in rows[1:]]
    assert losses[0] > 5 and losses[-1] < 1
    evaluated = [row for row in rows if "eval/loss" in row]
    assert evaluated[0]["eval/loss"] > 5 and evaluated[-1]["eval/loss"] < 1
    lessons = whole.setup.lessons
    heldout = lessons.tokens_per_byte if isinstance(lessons, ExampleLessons) else None
    assert heldout is not None and 1 < heldout < 1.01
    for row in evaluated:
        bits = row["eval/loss"] / math.log(2) * heldout
        assert row["eval/bits_per_byte"] == pytest.approx(bits)
    assert {row["train/tokens_in_loss"] for row in rows[1:-1]} == {16 * 63}
    assert untold({name for row in rows for name in row} - {"step", "time"}) == set()


def test_what_is_read_is_told(whole: Whole):
    setup = whole.setup
    assert setup.note.startswith("texts: 40 with ") and setup.note.endswith("left out: 1 blank")
    assert isinstance(setup.examples._examples, TextRows)


def test_it_goes_on_bit_for_bit(whole: Whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(whole.folder / "run", folder)
    shutil.rmtree(folder / CHECKPOINTS / str(STEPS))
    monkeypatch.setattr(SftRun, "compile", lambda run: 0.0)
    setup = made("--resume", "--run_dir", str(folder))
    begin, begun = SftRun.begin, []
    monkeypatch.setattr(SftRun, "begin", lambda run: begun.append(begin(run)) or begun[0])
    ended = whole_run(replace(setup, roles=whole.setup.roles))
    assert begun[0].step == 6 and ended.drawn == whole.ended.drawn
    assert_same_bits(ended.state, whole.ended.state)
    ours, theirs = (read_metrics(x / "metrics.jsonl") for x in (folder, whole.folder / "run"))
    assert without_times(ours) == without_times(theirs)


def test_the_export_has_a_tokenizer_of_bytes(whole: Whole):
    """Training on the export goes on with the same tokens."""
    policy = whole.folder / "policy"
    assert check_checkpoint(policy).vocab_size == 257
    tokenizer, text = HuggingFaceTokenizer(policy), "é over\n"
    assert (
        tokenizer.encode(text) == list(text.encode()) and tokenizer.decode([*text.encode()]) == text
    )
    options = [*whole.options, "--model", str(policy), "--run_dir", str(whole.folder / "again")]
    setup = made(*options)
    assert setup.examples.checksum == whole.setup.examples.checksum
    trainer, heldout = whole.setup.trainer, whole.setup.heldout
    assert heldout is not None
    again = replace(whole.setup.roles.models[POLICY], role=setup.roles.models[POLICY].role)
    ours, theirs = (
        cross_entropy(
            trainer.predict(replace(whole.ended.state, params=params), heldout), trainer.old
        )
        for params in (initial_params(again, trainer, 0), whole.ended.state.params)
    )
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_a_directory_without_a_tokenizer_takes_bytes(whole: Whole):
    bare = whole.folder / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(whole.folder / "policy" / name, bare / name)
    setup = made(*whole.options, "--model", str(bare), "--run_dir", str(whole.folder / "third"))
    assert setup.examples.checksum == whole.setup.examples.checksum
