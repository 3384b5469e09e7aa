"""Whether an evaluation may write into its folder, asked again once the folder is held."""

from pathlib import Path

import pytest

from pat_jax.common.errors import UserError
from pat_jax.config.data import DataConfig
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.evaluation.folder import EvaluationFolder
from pat_jax.evaluation.options import RESULTS_FILE


def config(folder: Path, *, resume: bool = False) -> EvaluateConfig:
    return EvaluateConfig(
        model="m", data=DataConfig(files=("d.jsonl",)), out=str(folder), resume=resume
    )


@pytest.mark.parametrize("resume", [False, True])
def test_what_another_process_has_evaluated_meanwhile_is_kept(tmp_path: Path, resume: bool):
    with EvaluationFolder(config(tmp_path)) as first:
        first.finish("{}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(UserError, match="another process has evaluated there meanwhile"):
        EvaluationFolder(config(tmp_path, resume=resume))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before
    assert RESULTS_FILE in before


def test_one_that_was_begun_goes_on(tmp_path: Path):
    with EvaluationFolder(config(tmp_path)):
        pass
    with EvaluationFolder(config(tmp_path, resume=True)) as again:
        assert again.path == tmp_path
