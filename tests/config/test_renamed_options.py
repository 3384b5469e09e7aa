"""Options that had another name before 0.1.0: accepted for one version, with a hint."""

import pytest

from pat_jax.common.options.names import RENAMED, hint_once
from pat_jax.config.command_line import parse
from pat_jax.config.run import RunConfig

OLD, NEW = next(iter(RENAMED.items()))
HINT = f"option --{OLD} is now --{NEW}"


@pytest.fixture(autouse=True)
def nothing_hinted():
    hint_once.cache_clear()


def test_an_old_name_on_the_command_line_is_the_new_one(caplog):
    assert parse([f"--{OLD}", "2", "5"]) == parse([f"--{NEW}", "2", "5"])
    assert parse([f"--{OLD}=3"]).speculation.num_draft_tokens == (3,)
    assert [record.getMessage() for record in caplog.records] == [f"{HINT}."]


def test_an_old_name_in_the_file_of_a_saved_run_is_the_new_one(tmp_path, caplog):
    path = tmp_path / "config.yaml"
    section, _, name = OLD.rpartition(".")
    path.write_text(f"{section}:\n  {name}: [2, 5]\n")
    assert parse(["--config", str(path)]).speculation.num_draft_tokens == (2, 5)
    assert HINT in caplog.text


@pytest.mark.parametrize("name", RENAMED.values())
def test_every_new_name_is_an_option(name: str):
    value = RunConfig()
    for part in name.split("."):
        value = getattr(value, part)
