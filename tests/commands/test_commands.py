"""What every command says of itself: --help, --version, the list of all."""

import errno
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import chain
from pathlib import Path

import pytest
from command_words import check_stands
from config_classes import CLASSES
from runs import ROOT

from pat_jax import __main__ as listing
from pat_jax import __version__
from pat_jax.common.run_command import run_command
from pat_jax.models.presets import PRESETS as SHAPES


@pytest.fixture
def printed(monkeypatch, capsys) -> Callable[..., str]:
    """What a command prints that ends at once, with code 0."""

    def call(name: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *words])
        with pytest.raises(SystemExit) as caught:
            run_command(import_module(f"pat_jax.{name}").main)
        assert caught.value.code == 0
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("name", CLASSES)
def test_help_says_what_the_command_does_with_an_example(printed, monkeypatch, capsys, name: str):
    text = printed(name, "--help", "all")
    before, _, after = text.partition("\nusage: ")
    assert re.match(r"[A-Z]\w+s [a-z].+\.", before, re.DOTALL)  # Measures …, Replays …
    assert f"\n    python -m pat_jax.{name} --" in before
    usage = " ".join(after.partition("\nLater wins")[0].split())
    assert usage.startswith(f"python -m pat_jax.{name} [")
    assert ("[--preset PRESET]" in usage) == ("\n  --preset " in text)
    assert ("SECTION" in usage) == bool(re.search(r"^  --\w+\.\w+ ", text, re.MULTILINE))
    assert max(map(len, text.splitlines())) <= 100
    # Each example runs as it stands.
    joined = text.replace("\\\n", " ")
    for example in re.findall(rf"^    python -m pat_jax\.{name} (.+)", joined, re.MULTILINE):
        check_stands(name, shlex.split(example))
    # Options without a section come first: after a heading they would be read as that section's.
    named = re.findall(r"^  --(\S+)(?:.*, or --(\S+))?", text, re.MULTILINE)
    dots = ["." in (full or short) for short, full in named]
    assert dots == sorted(dots)
    monkeypatch.setattr(sys, "argv", ["pat_jax", name, "--help", "all"])
    with pytest.raises(SystemExit):
        listing.script()
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("name", CLASSES)
def test_every_option_is_on_exactly_one_page_of_the_help(printed, name: str):
    """The first page fits in what somebody reads at once, and names the others."""

    def options(text: str) -> list[str]:
        return re.findall(r"^  --(\S+)", text, re.MULTILINE)

    first = printed(name, "--help")
    assert len(first.splitlines()) <= 190
    further = " ".join(first.split()).rpartition("--help PAGE, where PAGE is ")[2].partition(";")[0]
    pages = further.split(", ") if "--help PAGE, where PAGE is " in " ".join(first.split()) else []
    found = [options(first), *(options(printed(name, "--help", page)) for page in pages)]
    assert sorted(chain.from_iterable(found)) == sorted(options(printed(name, "--help", "all")))


def test_help_takes_a_second_at_most():
    code = "import time, atexit; atexit.register(lambda: print(time.process_time()))\n"
    code += "import sys; sys.argv = ['train', '--help']\nfrom pat_jax.train import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert float(done.stdout.split()[-1]) < 1.2


def test_help_has_the_names_of_others_where_they_mean_the_same(printed):
    assert (
        "num_generations an integer (default: 8) [TRL num_generations; verl rollout.n]"
        in printed("train", "--help")
    )
    assert "[TRL output_dir" in printed("sft", "--help")
    assert "output_dir" not in printed("evaluate", "--help", "all")  # its --run_dir is read


def test_the_built_in_shapes_are_a_page_of_the_help(printed):
    text = printed("train", "--help", "model")
    assert re.findall(r"^  (\S+)", text, re.MULTILINE) == list(SHAPES)


@pytest.mark.parametrize("name", CLASSES)
def test_version(printed, name: str):
    assert printed(name, "--steps", "nonsense", "--version") == f"pat_jax {__version__}\n"


def test_the_package_lists_its_commands():
    found = listing.COMMANDS
    assert set(found) == set(CLASSES)
    output = subprocess.run(
        [sys.executable, "-m", "pat_jax"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name, text in found.items():
        assert re.search(rf"^  pat_jax {name} +{re.escape(text)}$", output, re.MULTILINE)


def test_a_command_that_is_none_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pat_jax", "tarin"])
    with pytest.raises(SystemExit) as caught:
        run_command(listing.main)
    assert caught.value.code == 2
    assert "no command 'tarin': expected one of " in capsys.readouterr().err


def test_the_console_script_is_installed():
    script = Path(sys.executable).with_name("pat_jax")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"pat_jax {__version__}\n"


def test_a_reader_that_leaves_is_no_error():
    """As `| head -1`, where more is written than a pipe holds."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pat_jax.train", "--help"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr as errors:
        assert errors.read() == ""
    assert process.wait() == 141


def test_a_full_disk_is_one_sentence(capsys: pytest.CaptureFixture[str]):
    def main() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/here/config.yaml")

    with pytest.raises(SystemExit, match="2"):
        run_command(main)
    words = "error: No space left on device for runs/here/config.yaml: make room and start again.\n"
    assert capsys.readouterr().err == words


def test_a_line_is_written_at_once():
    """What is written at once is one packet of this socket."""
    program = (
        "from pat_jax.common.run_command import run_command\n"
        "run_command(lambda: [print(one) for one in ('first', 'second')])\n"
    )
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, ours:
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=theirs.fileno(),
            check=True,
        )
        theirs.close()
        assert [ours.recv(100) for _ in range(3)] == [b"first\n", b"second\n", b""]


def test_ctrl_c_leaves_no_traceback(capsys: pytest.CaptureFixture[str]):
    def main() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="130"):
        run_command(main)
    assert capsys.readouterr().err == ""
