"""A run's policy as a Hugging Face directory: what it wrote before is kept, what fails is a sentence."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from pat_jax.common.errors import UserError
from pat_jax.config.any_run import CheckpointConfig
from pat_jax.config.run import RunConfig
from pat_jax.run.roles import export as exported
from pat_jax.run.roles.export import check_export_dir, export_policy
from pat_jax.training.trainable_params import TrainableParams

TRAINED = TrainableParams(
    cast(Any, None), cast(Any, SimpleNamespace(devices=frozenset(jax.devices())))
)


@pytest.fixture(autouse=True)
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where to, of an export that writes the parameters as text."""
    paths: list[Path] = []

    def export(directory: str | Path, policy: object, params: Any, *_: object, **__: object):
        if isinstance(params, OSError):
            raise params
        Path(directory).mkdir()
        (Path(directory) / "params").write_text(params)
        paths.append(Path(directory))

    monkeypatch.setattr(exported, "export", export)
    return paths


def config(folder: Path, export_dir: str) -> RunConfig:
    (folder / "run").mkdir(exist_ok=True)
    return replace(
        RunConfig(),
        run_dir=str(folder / "run"),
        resume=True,
        compute_dtype="float32",
        checkpoint=CheckpointConfig(export_dir=export_dir),
    )


@pytest.mark.parametrize("end", ["", "/", "//"])
def test_an_earlier_export_of_the_run_is_kept_beside_the_new_one(tmp_path: Path, end: str):
    run = config(tmp_path, f"{tmp_path / 'policy'}{end}")
    for step, params in ((2, "two"), (2, "two again"), (4, "four")):
        check_export_dir(run)
        export_policy(run, TRAINED, cast(Any, params), step)
    assert (tmp_path / "policy" / "params").read_text() == "four"
    assert (tmp_path / "policy.step-2" / "params").read_text() == "two"


def test_a_full_disk_is_one_sentence_and_the_next_attempt_writes(tmp_path: Path):
    run = config(tmp_path, str(tmp_path / "policy"))
    full = cast(Any, OSError(28, "No space left on device"))
    with pytest.raises(UserError, match=r"step 2 was not written .*No space left.*--resume"):
        export_policy(run, TRAINED, full, 2)
    export_policy(run, TRAINED, cast(Any, "two"), 2)
    assert json.loads((tmp_path / "run" / "exported.json").read_text())["step"] == 2
