"""Compiles a run's real programs for GPUs and TPUs that are not there.

Each compiler has one child process, whose environment is set before JAX starts. Programs are
compiled in parallel threads inside it (libtpu allows one process at a time). Records are kept
twice. One file has the record of one program, named by a hash of its text: an interrupted plan goes
on, and an edit recompiles only what it changed. Another has all records of an order, so that the
same plan takes no time. GPU autotuning is off: it needs the GPU.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from pat_jax.common.devices import PLAN_DIR
from pat_jax.common.errors import UserError
from pat_jax.common.files import replace_text
from pat_jax.common.json_text import parse_json
from pat_jax.profiling.cross_compile.compiled import CompiledProgram, at_depth
from pat_jax.profiling.cross_compile.target_build import Order
from pat_jax.profiling.predict.targets import Target

PACKAGE = Path(__file__).parents[2]  # the folder pat_jax, through its link to this room
# Layers of the models that are compiled, by `--layers`; 0 is the whole model. The numbers of a
# whole model are extrapolated from two shallow ones: they are affine in the layers. Passes of training
# are always compiled whole (`jobs.PASSES`).
DEPTHS = {"few": (2, 4), "all": (0,)}
PLUGINS = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin")}
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
Progress = Callable[[int, int, str], None]  # records done, number of records, and the last one


class CompilerCrash(UserError):
    """A compiler's process was ended by a signal."""


@dataclass(frozen=True)
class Compilation:
    """The compiled programs of one model for a target, at the model's whole depth."""

    programs: tuple[CompiledProgram, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # of the packages that compiled

    @property
    def failed(self) -> list[CompiledProgram]:
        return [program for program in self.programs if program.error]


def compile_for(
    order: Order,
    *,
    progress: Progress | None = None,
    folder: Path = PLAN_DIR,
    texts: Path | None = None,
) -> Compilation:
    """Returns every layout's programs, compiled as the target would run them, or their kept
    records. Raises UserError if the compiler is not installed, refuses the target, or died; or no
    layout divides the model.

    Args:
      progress: called after each program.
      folder: where records are kept.
      texts: an existing folder for the compiled programs as text; all are then compiled anew.
    """
    versions = installed(order.target)
    content = {"order": order.to_json(), "versions": versions}
    name = hashlib.sha256(json.dumps([content, _sources()], sort_keys=True).encode()).hexdigest()
    path = folder / "orders" / f"{name[:32]}.json"
    if path.is_file() and texts is None:
        # If the file is damaged, all is compiled again.
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            return _read(order, versions, path)
    kept = folder / "programs"
    for each in (path.parent, kept):
        each.mkdir(parents=True, exist_ok=True)
    content |= {"kept": str(kept.absolute()), "threads": os.cpu_count() or 1}
    content["texts"] = None if texts is None else str(texts.absolute())
    replace_text(path, json.dumps(_compiled(order.target, content, progress)))
    return _read(order, versions, path)


def installed(target: Target) -> dict[str, str]:
    """Returns the versions of the packages that compile for `target`. Raises UserError if the
    compiler is not installed."""
    platform = target.chip.platform
    names = [name for name in PLUGINS[platform] if importlib.util.find_spec(name)]
    if not names or (platform == "cuda" and _ptxas() is None):
        missing = "ptxas" if names else " or ".join(PLUGINS[platform])
        raise UserError(
            f"target {target}: XLA's compiler for it needs {missing}, which is not installed; "
            "pip install -e '.[plan]'."
        )
    other = "libtpu" if platform == "cuda" else "cuda"
    return versions_of(name for name in PACKAGES if other not in name)


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Returns the version of each of `packages` that is installed."""
    found = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _ptxas() -> Path | None:
    """Returns the folder of NVIDIA's assembler, in a package or on the system, or None."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        for found in Path(root).glob("*/bin/ptxas"):
            return found.parent
    found = shutil.which("ptxas")
    return Path(found).parent if found else None


def environment(target: Target) -> dict[str, str]:
    """Returns the environment variables of the compiling process. It finds one compiler, and
    searches for no device."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    roots = [str(PACKAGE.parent), *filter(None, [env.get("PYTHONPATH")])]
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(roots)}
    if target.chip.platform == "tpu":
        # Any slice will do: the topology is named later.
        env |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}
        env |= {"TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    else:
        env["PATH"] = os.pathsep.join([str(_ptxas()), env.get("PATH", "")])
    return env


def _compiled(
    target: Target, content: Mapping[str, Any], progress: Progress | None
) -> list[dict[str, Any]]:
    """Returns the records of an order's programs, in the order in which they were compiled."""
    try:
        return _compiled_once(target, content, progress)
    except CompilerCrash:
        if content["threads"] == 1:
            raise
    # libtpu 0.0.42 can crash while it compiles two large programs, and compiles each by itself.
    # Less memory is needed, too. Programs that are done are kept.
    return _compiled_once(target, {**content, "threads": 1}, progress)


def _compiled_once(
    target: Target, content: Mapping[str, Any], progress: Progress | None
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in _answers(target, content):
        found.append(line["program"])
        if progress:
            last = CompiledProgram.from_json(line["program"])
            depth = f"{last}, {last.layers} layers, {last.compile_s:.1f} s"
            progress(len(found), line["jobs"], depth)
    return found


def _answers(target: Target, content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the answers of a child process, which runs `worker.py`, to `content`, line by line.
    Raises UserError if it refuses, or ends before it has answered everything, and CompilerCrash if
    a signal has ended it."""
    command = [sys.executable, "-m", "pat_jax.profiling.cross_compile.worker"]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment(target)
        ) as child,
    ):
        assert child.stdin and child.stdout
        try:
            with suppress(BrokenPipeError), child.stdin as order:  # the child has died: see below
                order.write(json.dumps(content))
            for line in child.stdout:
                answer = json.loads(line)
                if "refused" in answer:
                    raise UserError(answer["refused"])
                yield answer
            status = child.wait()
        except BaseException:
            child.kill()  # its remaining results are not wanted
            raise
        if status:
            log.seek(0)
            tail = " ".join(log.read()[-800:].split())
            raise (CompilerCrash if status < 0 else UserError)(
                f"target {target}: the compiler's process ended with {status} (too little memory is "
                f"a usual cause of -9); it said: {tail or 'nothing'}."
            )


def _read(order: Order, versions: Mapping[str, str], path: Path) -> Compilation:
    by_identity: defaultdict[Any, list[CompiledProgram]] = defaultdict(list)
    content: Any = parse_json(path.read_bytes())
    for program in map(CompiledProgram.from_json, content):
        by_identity[program.identity].append(program)
    whole = [at_depth(found, order.num_layers(found[0].role)) for found in by_identity.values()]
    return Compilation(tuple(whole), versions)


def _sources() -> str:
    """Returns a hash of every source file on which a program may depend."""
    digest = hashlib.sha256()
    rooms = [PACKAGE, *(PACKAGE / room for room in ("models", "rl", "profiling"))]
    for path in sorted(path for room in rooms for path in room.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
