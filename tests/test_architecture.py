"""The import arrows between the rooms, held by reading the imports of every file."""

import ast
import re
import sys
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import jax
import pytest

from pat_jax.common.options.declared import Options
from pat_jax.config.shared import OnDevices

ROOT = Path(__file__).parent.parent
LINKED = ("models", "rl", "profiling")

# What the files of a room may import of other rooms, in the order in which they could be built. A room
# is a folder; one without a line of its own is part of the folder around it. A name stands for the
# room, or module, and all that is inside it.
BELOW_THE_ENGINE = "common config models planning layout programs"
MAY_IMPORT = {
    "common": "",
    "models": "common",
    "rl": "common",
    "config": "common models.presets",
    "planning": "",
    "planning.lengths": "common planning.types",
    "planning.latency": "common planning.types",
    "planning.planner": "planning.types planning.draft_counts planning.drafts planning.memory planning.held planning.lengths planning.latency",
    "layout": "common models planning.types",
    "programs": "common planning.types",
    "engine.sequences": "common models planning.types planning.draft_counts layout",
    "engine.relocation": "engine.sequences",
    "engine.device": "common models planning.types planning.draft_counts layout programs engine.sequences engine.relocation",
    "engine": f"{BELOW_THE_ENGINE} engine.sequences engine.relocation engine.device",
    "training": f"{BELOW_THE_ENGINE} engine rl",
    "profiling.simulate": f"{BELOW_THE_ENGINE} engine",
    "profiling.measure": f"{BELOW_THE_ENGINE} engine",
    "profiling.predict": f"{BELOW_THE_ENGINE} engine profiling.measure",
    "profiling.cross_compile": f"{BELOW_THE_ENGINE} engine training profiling.predict",
    "profiling.doctor": f"{BELOW_THE_ENGINE} engine profiling.cross_compile",
    "profiling.capacity": f"{BELOW_THE_ENGINE} engine rl.batches.packing training profiling.simulate profiling.predict profiling.cross_compile",
    "run": f"{BELOW_THE_ENGINE} engine rl training",
    "batch_generation": f"{BELOW_THE_ENGINE} engine rl",
    "evaluation": "common config engine.sequences models rl run",
}
TOP = "commands"  # the files right inside of pat_jax/, which may import every room
PURE = (
    "errors",
    "gathering",
    "json_text",
    "printable",
    "pytree",
)  # of common: what models and rl may know of it
BASIC = ("jax", "numpy", "jaxtyping", "transformers")
EXTERNAL = {
    "models": (*BASIC, "flax", "ml_dtypes", "safetensors"),
    "rl": (*BASIC, "optax", "math_verify", "pyarrow"),
}


def module(path: Path) -> str:
    """As it is imported: through the links of `pat_jax/`."""
    parts = path.with_suffix("").parts
    return ".".join(parts if parts[0] == "pat_jax" else ("pat_jax", *parts))


FILES = [
    path.relative_to(ROOT)
    for room in (*LINKED, "pat_jax")
    for path in sorted((ROOT / room).rglob("*.py"))
    if path.relative_to(ROOT).parts[:2] not in {("pat_jax", link) for link in LINKED}
]
# Those with folders in them. The files right in pat_jax/ are commands, which may import every room.
FOLDERS = sorted(
    {
        f"{module(path.parent.parent)}."
        for path in FILES
        if path.parts[:-2] not in ((), ("pat_jax",))
    }
)


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))]


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


def room_of(name: str) -> str:
    """The room of a module, or of a name in one."""
    rooms = [room for room in MAY_IMPORT if name.startswith(f"pat_jax.{room}.")]
    return max(rooms, key=len, default=TOP)


def forbidden(path: Path) -> set[str]:
    """What a file imports, and its room may not."""
    room, found = room_of(module(path)), imports(path)
    wrong = set()
    if room != TOP:
        foreign = {name for name in found - outside(found, "pat_jax") if room_of(name) != room}
        allowed = [f"pat_jax.{name}" for name in MAY_IMPORT[room].split()]
        wrong |= outside(foreign, *allowed) - {"pat_jax.version.__version__"}
    if room in EXTERNAL:
        pure = [f"pat_jax.common.{name}" for name in PURE]
        wrong |= outside(found, f"pat_jax.{room}", *pure, *EXTERNAL[room])
    return wrong


def test_files_import_only_what_their_rooms_may():
    found = {str(path): forbidden(path) for path in FILES}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


@cache
def import_graph() -> dict[str, set[str]]:
    """The modules of the package that each imports: for types alone or in a function, too."""
    found = {module(path).removesuffix(".__init__"): imports(path) for path in FILES}
    return {
        importer: {name if name in found else name.rpartition(".")[0] for name in names}
        for importer, names in found.items()
    }


def test_no_modules_import_one_another_in_a_circle():
    TopologicalSorter(import_graph()).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_folders_in_a_folder_do_not_import_one_another_in_a_circle(folder: str):
    """Each counts with all that is in it; a file beside them counts as itself."""

    def part(name: str) -> str:
        return name.removeprefix(folder).partition(".")[0] if name.startswith(folder) else ""

    graph = dict[str, set[str]]()
    for importer, names in import_graph().items():
        graph.setdefault(part(importer), set()).update(map(part, names))
    inside = {one: names - {one, ""} for one, names in graph.items() if one}
    TopologicalSorter(inside).prepare()


def test_files_and_functions_are_short():
    """What connects the parts of a run or of a command may have longer functions."""
    connecting = ("pat_jax/run/", "pat_jax/commands/", "pat_jax/training/build_roles.py")
    long = []
    for path in FILES:
        assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) <= 300, path
        most = 60 if str(path).startswith(connecting) or path.parent.name == "pat_jax" else 40
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                long += [f"{path}: {node.name}"] * (lines > most)
    assert long == []


# Files of a run that read or write its config.yaml, or settle its options. Others take a section of
# the options, or values.
TAKE_ALL_OPTIONS = {
    f"pat_jax/run/{name}.py"
    for name in (
        "files/asked_again",
        "files/folder",
        "opened",
        "process/distributed",
        "process/open_run",
        "results/saved_run",
        "sft/reading",
        "sft/setup",
        "start/setup",
    )
}


def below(kind: type) -> set[type]:
    return {kind}.union(*map(below, kind.__subclasses__()))


@cache
def wholes() -> dict[str, str]:
    """All options of a command, by the name of the class: it has a model and devices, or two
    sections, or only such classes inherit from it. Its module is the value."""
    for path in FILES:
        if path.parts[:2] == ("pat_jax", "config") or path.name.endswith("config.py"):
            import_module(module(path).removesuffix(".__init__"))
    found = set()
    for kind in below(Options):
        hints = get_type_hints(kind).values()
        sections = [one for one in hints if isinstance(one, type) and issubclass(one, Options)]
        if issubclass(kind, OnDevices) or len(sections) > 1:
            found.add(kind)
    for kind in below(Options) - {Options}:
        heirs = {one for one in below(kind) if not one.__subclasses__()} - {kind}
        found |= {kind} if heirs and heirs <= found else set()
    return {kind.__name__: kind.__module__ for kind in found}


def takes_all(path: Path) -> bool:
    """Whether a file imports all options of a command, other than those of its own room."""
    named = {name.rpartition(".")[2] for name in imports(path)}
    room = room_of(module(path))
    return any(name in named and room_of(where) != room for name, where in wholes().items())


def test_options_are_taken_whole_in_few_files():
    """What is imported for the checker of types alone included."""
    assert {"RunConfig", "AnyRun", "UpdateOptions", "SftConfig", "PlanConfig"} <= wholes().keys()
    assert not {"RolloutConfig", "EngineSizes", "AlgorithmConfig"} & wholes().keys()
    found = {
        str(path)
        for path in FILES
        if path.parts[:2] not in (("pat_jax", "config"), ("pat_jax", "commands"))
        and path.parent != Path("pat_jax")
        and not path.name.endswith("config.py")
        and takes_all(path)
    }
    assert found == TAKE_ALL_OPTIONS


def test_options_have_a_class_where_they_are_taken():
    """`Any`, `object` or a protocol would let all of them through."""
    every = {path: nodes(path) for path in FILES if path.parts[1] not in ("common", "config")}
    classes = [one for found in every.values() for one in found if isinstance(one, ast.ClassDef)]
    protocols = {
        one.name for one in classes for base in one.bases if "Protocol" in ast.unparse(base)
    }
    untold = protocols | {"Any", "object"}
    for path, found in every.items():
        for function in found:
            if not isinstance(function, ast.FunctionDef):
                continue
            for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
                kind = one.annotation and ast.unparse(one.annotation).strip('"')
                is_named_so = one.arg in ("config", "options", "run")
                assert not (is_named_so and kind in untold), f"{path}, line {one.lineno}"


def test_partition_specs_are_written_in_the_layout_only():
    for path in FILES:
        used = {getattr(node, key, "") for node in nodes(path) for key in ("id", "attr", "name")}
        is_layout = path == Path("pat_jax/layout/layout.py")
        assert is_layout or not used & {"P", "PartitionSpec"}, path


@pytest.mark.parametrize("room", LINKED)
def test_the_rooms_are_reached_through_links(room: str):
    link = ROOT / "pat_jax" / room
    assert link.is_symlink() and link.readlink() == Path("..") / room


def test_tests_import_neither_benchmarks_nor_one_another():
    """What several of them need is a helper's; a benchmark's own arithmetic is tested beside it.

    `conftest` is a different file for whoever asks first.
    """
    for path in (ROOT / "tests").rglob("*.py"):
        named = r"^benchmarks\b|(^|\.)test_|^conftest\b"
        wrong = [name for name in imports(path) if re.search(named, name)]
        assert wrong == [], f"{path.relative_to(ROOT)} imports {wrong}"


def test_eight_cpu_devices_are_there():
    assert len(jax.devices("cpu")) == 8


def test_no_two_files_of_tests_have_one_name():
    """pytest takes the second for the first, and runs none of its tests."""
    names = [
        path.name for room in ("tests", "benchmarks") for path in (ROOT / room).rglob("test_*.py")
    ]
    assert sorted(names) == sorted(set(names))
