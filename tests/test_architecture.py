"""The import arrows between the rooms, held by reading the imports of every file."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("models", "rl", "profiling")
COMMANDS = ("train", "generate", "profile", "plan", "simulate")  # thin; may import every room
LEAVES = (
    "pat_jax.common.errors",
    "pat_jax.common.json_text",
    "pat_jax.common.pytree",
)  # import nothing of pat_jax themselves
ENGINE_TYPES = (
    "pat_jax.engine.sequences.types",
    "pat_jax.engine.sequences.state",
    "pat_jax.engine.trace",
)
HOST_SIDE = (
    "accounts",
    "paging",
    "stock",
    "due",
    "rounds",
    "places",
    "scheduler",
    "holdings",
    "balance",
    "admission",
)  # of the engine; each knows the former
BASIC = ("jax", "numpy", "jaxtyping", "transformers")
EXTERNAL = {
    "models": (*BASIC, "flax", "ml_dtypes", "safetensors"),
    "rl": (*BASIC, "optax", "math_verify", "pyarrow"),
}
FILES = [
    path.relative_to(ROOT)
    for room in (*ROOMS, "pat_jax")
    for path in sorted((ROOT / room).rglob("*.py"))
    if path.relative_to(ROOT).parts[:2] not in {("pat_jax", link) for link in ROOMS}
]


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))


def imports(path: Path) -> set[str]:
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides the room it reaches"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}


def outside(names: set[str], *allowed: str) -> set[str]:
    return {name for name in names if not f"{name}.".startswith(tuple(f"{a}." for a in allowed))}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_imports_only_what_its_room_may(path: Path):
    found, (room, *_), folder = imports(path), path.parts, path.parts[-2]
    if room in EXTERNAL:
        assert outside(found, f"pat_jax.{room}", *LEAVES, *EXTERNAL[room]) == set()
    elif room == "pat_jax" and not (folder == "pat_jax" and path.stem in COMMANDS):
        assert outside(found, "pat_jax.profiling") == found
    in_engine = found - outside(found, "pat_jax.engine")
    if folder == "planning" or (folder == "engine" and path.stem == "sampling"):
        assert outside(in_engine, *ENGINE_TYPES) == set()
    if folder == "engine" and path.stem in HOST_SIDE:
        former = HOST_SIDE[: HOST_SIDE.index(path.stem)]
        assert outside(in_engine, *ENGINE_TYPES, *(f"pat_jax.engine.{f}" for f in former)) == set()
    if f"pat_jax.{path.stem}" in LEAVES and folder == "pat_jax":
        assert outside(found, "pat_jax") == found


@pytest.mark.parametrize("path", FILES, ids=str)
def test_partition_specs_are_written_in_the_layout_only(path: Path):
    used = {getattr(node, key, "") for node in nodes(path) for key in ("id", "attr", "name")}
    assert path == Path("pat_jax/engine/layout/layout.py") or not used & {"P", "PartitionSpec"}


@pytest.mark.parametrize("room", ROOMS)
def test_the_rooms_are_reached_through_links(room: str):
    link = ROOT / "pat_jax" / room
    assert link.is_symlink() and link.readlink() == Path("..") / room


def test_eight_cpu_devices_are_there():
    assert len(jax.devices("cpu")) == 8
