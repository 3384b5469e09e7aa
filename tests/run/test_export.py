"""A run's policy as a Hugging Face directory: what it wrote before is kept, what fails is a sentence."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from pat_jax.common.errors import UserError
from pat_jax.config.any_run import CheckpointConfig
from pat_jax.config.role_table import POLICY, role_table
from pat_jax.config.run import RunConfig
from pat_jax.run.roles import export as exported
from pat_jax.run.roles.export import check_export_dirs, export_role
from pat_jax.training.role_model import RoleModel
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


def write(folder: Path, export_dir: str, params: Any, step: int) -> None:
    (folder / "run").mkdir(exist_ok=True)
    config = RunConfig(compute_dtype="float32", checkpoint=CheckpointConfig(export_dir=export_dir))
    check_export_dirs({POLICY: export_dir}, str(folder / "run"), resume=True)
    model = RoleModel(role_table(config, "cpu")[0], TRAINED.policy, TRAINED.layout)
    export_role(model, TRAINED, params, step, str(folder / "run"), base="demo")


@pytest.mark.parametrize("end", ["", "/", "//"])
def test_an_earlier_export_of_the_run_is_kept_beside_the_new_one(tmp_path: Path, end: str):
    for step, params in ((2, "two"), (2, "two again"), (4, "four")):
        write(tmp_path, f"{tmp_path / 'policy'}{end}", params, step)
    assert (tmp_path / "policy" / "params").read_text() == "four"
    assert (tmp_path / "policy.step-2" / "params").read_text() == "two"


def test_a_full_disk_is_one_sentence_and_the_next_attempt_writes(tmp_path: Path):
    full, policy = OSError(28, "No space left on device"), str(tmp_path / "policy")
    with pytest.raises(UserError, match=r"step 2 was not written .*No space left.*--resume"):
        write(tmp_path, policy, full, 2)
    write(tmp_path, policy, "two", 2)
    assert json.loads((tmp_path / "run" / "exported.json").read_text())["step"] == 2
