"""Every file that a run, an evaluation or a job has written, with one value gone wild or bytes of anything:
it is read, left out, or refused in one sentence."""

import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wild_json import ANYWHERE, WILD, with_wild

from pat_jax.batch_generation.result_file import ResultFile
from pat_jax.common.errors import UserError
from pat_jax.common.hosts.wire import to_bytes
from pat_jax.common.json_text import parse_json
from pat_jax.config.command_line import dump, parse
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.config.role_table import role_table
from pat_jax.engine.record.trace import Move, MovedBytes, RolloutTrace
from pat_jax.engine.sequences.responses import Completion
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.rl.data.arithmetic import ArithmeticProblems
from pat_jax.rl.data.splits import Subset
from pat_jax.run.checkpoints.files import MANIFEST, damage
from pat_jax.run.checkpoints.journal import RolloutJournal
from pat_jax.run.checkpoints.meta import as_written, newest_meta, read_meta
from pat_jax.run.files.folder import CONFIG_FILE, SAMPLES_FILE, options_of_run
from pat_jax.run.logging.page.run_page import run_page
from pat_jax.run.logging.rollout_files import KeptRollouts
from pat_jax.run.logging.samples import Sample, SamplesFile, read_samples
from pat_jax.run.results.saved_run import SavedRun
from pat_jax.run.roles.export import _written
from pat_jax.run.roles.saved_policy import SavedPolicy
from pat_jax.run.sft.loop import Drawn
from pat_jax.run.start.init_state import _resumed
from pat_jax.run.start.shaping import Shaping
from pat_jax.run.start.totals import Totals


def bound(path: Path) -> None:
    """A socket; its name may be too long for the system from here."""
    with pytest.MonkeyPatch.context() as patch, socket.socket(socket.AF_UNIX) as one:
        patch.chdir(path.parent)
        one.bind(path.name)


SOME = settings(max_examples=25, deadline=None)
DEEP = "[" * 100_000
JUNK = st.binary(max_size=200)


def read_result(path: Path) -> None:
    with ResultFile(path, resume=True):
        pass


def read_unfinished(path: Path) -> None:
    kept = RolloutJournal(path.parent, path.parent / "checkpoints", is_on=True)
    folder = path.parent / "unfinished"
    folder.mkdir()
    path.rename(folder / "iteration-3.jsonl")
    with kept.iteration(3, 7):
        pass


def read_run(path: Path) -> None:
    path.with_name(CONFIG_FILE).touch()
    run = SavedRun(path.parent)
    repr(run)
    run.plot()
    run_page(path.parent)


def read_trace(path: Path) -> None:
    path.with_name(CONFIG_FILE).touch()
    SavedRun(path.parent).plot_rollout()


def read_kept_rollouts(path: Path) -> None:
    KeptRollouts(path.parent).resume(9)
    run_page(path.parent)


def read_policy(path: Path) -> None:
    (checkpoint := path.parent / "4").mkdir()
    (checkpoint / "meta").mkdir()
    path.rename(checkpoint / "meta" / "metadata")
    newest_meta(path.parent)
    try:
        meta = read_meta(checkpoint)
    except ValueError:
        return
    policy = SavedPolicy(checkpoint, meta["fingerprint"], meta["meta"], [])
    if "config" in meta["meta"]:
        assert isinstance(policy.model + policy.compute_dtype, str)


def read_seal(path: Path) -> None:
    path.rename(path.with_name(MANIFEST))
    (path.parent / "meta").mkdir()
    (path.parent / "meta" / "metadata").write_text("{}")
    output = damage(path.parent)
    assert output is None or "\n" not in output


def read_note(path: Path) -> None:
    path.rename(path.with_name("exported.json"))
    _written(path.parent, path.parent)


TRACE = RolloutTrace(
    (0.0, 1.0), (0, 4), (8, 2), ("dp2tp1", "dp1tp2"), 2.0, 9, (Move(4, 2, "dp2tp1", "dp1tp2", 0.1, 1, 0.1, "migrate", "x", 2, (2, 2), MovedBytes(9)),)
)  # fmt: skip
DONE = Completion(np.array([1, 2], np.int32), np.zeros(2, np.float32), is_truncated=False)
UNFINISHED = {
    "batch": 0,
    "place": 0,
    "policy": 7,
    "request": 5,
    "completion": to_bytes(DONE).decode(),
}
META = {
    "fingerprint": {"a": 1},
    "meta": {"config": "model: tiny\ncompute_dtype: float32\n", "step": 4},
}
FILES: dict[str, tuple[Callable[[Path], None], Any, str]] = {
    "results": (read_result, {"line": 1, "sample": 0, "text": "a"}, "\n"),
    "unfinished": (read_unfinished, UNFINISHED, "\n"),
    "scores": (read_unfinished, {"batch": 0, "place": 1, "function": "f", "score": 1.0, "numbers": {"a": 1}}, "\n"),
    "metrics": (read_run, {"step": 1, "time": 3.0, "reward/mean": 0.5, "timing/rollout": 1.0}, "\n"),
    "resumed": (read_run, {"event": "resume", "step": 1}, "\n"),
    "rollout": (read_trace, asdict(TRACE), ""),
    "rollouts": (read_kept_rollouts, {"first": {"step": 1, "trace": asdict(TRACE)}}, ""),
    "metadata": (read_policy, META, ""),
    "seal": (read_seal, {"meta/metadata": [2, 2745614147]}, ""),
    "export": (read_note, {"path": "a", "step": 3}, ""),
}  # fmt: skip
NAMES: dict[Callable[[Path], None], str] = {
    read_run: "metrics.jsonl",
    read_trace: "rollout.json",
    read_kept_rollouts: "rollouts.json",
}


def check(name: str, folder: Path, content: bytes) -> None:
    read = FILES[name][0]
    path = folder / NAMES.get(read, "file.json")
    path.write_bytes(content)
    try:
        read(path)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 1300 and str(folder) in str(error)


@pytest.mark.parametrize("name", FILES)
def test_sound_files_are_read(name: str, tmp_path: Path):
    read, value, end = FILES[name]
    (path := tmp_path / NAMES.get(read, "file.json")).write_text(json.dumps(value) + end)
    read(path)


@SOME
@pytest.mark.parametrize("name", FILES)
@given(where=ANYWHERE, wild=WILD)
@example(where=0, wild=DEEP)
@example(where=1, wild="-1")
@example(where=2, wild="null")
@example(where=3, wild='"x"')
def test_a_wild_value(name: str, tmp_path_factory, where: int, wild: str):
    _, value, end = FILES[name]
    check(name, tmp_path_factory.mktemp("wild"), (with_wild(value, where, wild) + end).encode())


@settings(max_examples=10, deadline=None)
@pytest.mark.parametrize("name", FILES)
@given(junk=JUNK)
@example(junk=b"\xff\xfe\n")
@example(junk=b"{}\n[]\n3\n")
def test_any_bytes(name: str, tmp_path_factory, junk: bytes):
    check(name, tmp_path_factory.mktemp("junk"), junk)


HISTORY = {
    "lengths": LengthModel.empty(64).to_json(),
    "problems": {"train": 1, "heldout": 2},
    **Totals(3, 4).to_json(),
    **Shaping.of(AlgorithmConfig(), {}).to_meta(),
    "config": "model: tiny\n",
}


def resume_from(meta: Any) -> None:
    """As a run does, and as fine-tuning."""
    steered = ["--algorithm.kl_in", "reward", "--algorithm.kl_target", "0.1"]
    config = parse(["--preset", "demo", "--algorithm.beta", "0.1", *steered])
    where = partial(as_written, Path("/run/checkpoints/4"))
    run: Any = SimpleNamespace(
        checkpoints=SimpleNamespace(as_written=lambda step: where()),
        progress=SimpleNamespace(print=lambda line: None),
    )
    train = ArithmeticProblems(0, Subset.TRAIN)
    task = SimpleNamespace(checksums={"train": 1, "heldout": 2}, train=train)
    models = {role.name: SimpleNamespace(role=role) for role in role_table(config, "cpu")}
    roles = SimpleNamespace(models=models)
    setup: Any = SimpleNamespace(task=task, config=config, roles=roles)
    found: Any = _resumed(setup, run, (4, {}, meta), {"base_checksum": None})
    assert found.totals.metrics(0.5)["progress/tokens"] >= 0 and found.totals.cursor >= (0, 0)
    found.lengths.updated(np.array([3]), np.array([False]), np.array([1]))
    found.lengths.expected(np.array([1, 2]))
    assert found.shaping.moments.after(np.ones(2)).deviation >= 0


def test_a_sound_history_is_read():
    resume_from(HISTORY)


@settings(max_examples=150, deadline=None)
@given(where=ANYWHERE, wild=WILD, gone=st.booleans())
@example(where=1, wild="{}", gone=False)
@example(where=1, wild="null", gone=True)
def test_a_wild_history(where: int, wild: str, gone: bool):
    try:
        text = with_wild(HISTORY, where, wild)
        meta: Any = parse_json(text)
    except ValueError:
        return
    if gone and isinstance(meta, dict):
        del meta[[*meta][where % len(meta)]]
    if not isinstance(meta, dict):
        return
    try:
        resume_from(meta)
    except UserError as error:
        assert "\n" not in str(error) and ("metadata" in str(error) or "length model" in str(error))


@pytest.mark.parametrize(
    "drawn",
    [None, {}, {"examples": "1"}, {"examples": -1}, {"examples": 1, "x": 2}, [1], {"tokens": 1.5}],
)
def test_a_wild_history_of_fine_tuning(drawn: object):
    with pytest.raises(UserError, match=r"/run/4/meta/metadata is not"), as_written(Path("/run/4")):
        Drawn.from_json({"drawn": drawn} if drawn != {} else {})


@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", ".config.yaml.partial", "checkpoints/2/x", "rows/a"]
)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), bound])
def test_what_would_never_end_is_refused(tmp_path: Path, name: str, make: Callable[[Path], None]):
    config = parse(["--preset", "demo", "--run_dir", str(tmp_path)])
    if name != CONFIG_FILE:
        (tmp_path / CONFIG_FILE).write_text(dump(config))
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    make(tmp_path / name)
    for words in (["--resume"], ["--resume", "auto"]):
        with pytest.raises(UserError, match=f"but {re.escape(name)} is neither"):
            options_of_run([*words, "--run_dir", str(tmp_path)], parse)


@SOME
@given(where=ANYWHERE, wild=WILD)
@example(where=0, wild=DEEP)
def test_samples(tmp_path_factory, where: int, wild: str):
    folder = tmp_path_factory.mktemp("samples")
    sample = Sample("p", "c", 1.0, 3, "stop", {"f": 0.5})
    SamplesFile(folder, None).add(3, [sample])
    assert read_samples(folder) == {3: [sample]}
    path = folder / SAMPLES_FILE
    path.write_text(with_wild({"3": [asdict(sample)]}, where, wild))
    SamplesFile(folder, 5)  # as a resumed run does
    run_page(folder).encode()
    try:
        read_samples(folder)
    except UserError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/full")])
def test_sums_of_a_checkpoint_that_are_no_file(make, tmp_path: Path):
    make(tmp_path / MANIFEST)
    assert damage(tmp_path) == (
        f"it has no {MANIFEST}, so that nobody can tell whether its files are as they were written"
    )
