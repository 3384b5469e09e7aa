"""Fixtures of several files here."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from compilations import counted_compilations

from pat_jax.commands import plan as plan_body
from pat_jax.commands import simulate as simulate_body
from pat_jax.common.run_command import run_command


@pytest.fixture
def refused(capsys, tmp_path: Path) -> Callable[..., str]:
    """The sentence with which a command refuses: one line and code 2, nothing compiled, nothing written."""

    def refuse(call: Callable[[], object], kept: Path = tmp_path) -> str:
        """
        Args:
          call: runs the command in this process.
          kept: a folder that stays as it is, or does not come to be.
        """
        before = contents(kept)
        with counted_compilations() as compiled, pytest.raises(SystemExit) as caught:
            call()
        assert (caught.value.code, compiled, contents(kept)) == (2, [], before)
        text = capsys.readouterr().err
        assert text.startswith("error: ") and text.endswith((".\n", "?\n")), text
        assert text.count("\n") == 1, text
        return text.removeprefix("error: ").strip()

    return refuse


@pytest.fixture
def in_process(monkeypatch, capsys) -> Callable[..., str]:
    """What `plan` or `simulate` prints, on the devices that the tests have already."""
    for body in (plan_body, simulate_body):
        monkeypatch.setattr(body, "configure", lambda count: None)

    def run(main: Callable[[], None], *options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["it", *options])
        run_command(main)
        return capsys.readouterr().out

    return run


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
