"""What compilers of devices that are not there say, each in a process with the environment it wants.

A benchmark of this kind is a module whose `--child TARGET` prints one line of JSON.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pat_jax.common.files import replace_text
from pat_jax.profiling.cross_compile.compile import environment
from pat_jax.profiling.predict.targets import Target


def ask(module: str, target: str, *options: str) -> dict[str, Any]:
    """What `python -m module --child target options` says."""
    said = subprocess.run(
        [sys.executable, "-m", module, "--child", target, *options],
        env=environment(Target.parse(target)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    return json.loads(said.splitlines()[-1])


def add_target_options(parser: argparse.ArgumentParser, targets: Sequence[str]) -> None:
    parser.add_argument("--targets", nargs="+", default=targets)
    parser.add_argument("--out", type=Path, help="a JSON file; what else is in it is kept")
    parser.add_argument("--child", help=argparse.SUPPRESS)


def read_results(file: Path | None) -> dict[str, Any]:
    """What is there already, by target."""
    return json.loads(file.read_text(encoding="utf-8")) if file and file.is_file() else {}


def keep_results(file: Path | None, found: dict[str, Any]) -> None:
    if file:
        replace_text(file, json.dumps(found, indent=1) + "\n")
