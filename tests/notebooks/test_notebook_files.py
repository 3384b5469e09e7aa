"""The notebooks as files: valid, small, with what they print, and they name what is there."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT

import pat_jax
from pat_jax.common.options.declared import options_of
from pat_jax.config.run import RunConfig

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LARGEST = 300_000  # bytes
OUTPUT_TYPES = {"display_data", "execute_result"}


def content(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def text(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def code(path: Path) -> list[str]:
    return [text(cell) for cell in content(path)["cells"] if cell["cell_type"] == "code"]


def test_there_are_two():
    names = ["adaptive_tp_in_ten_minutes", "train_your_own"]
    assert [path.stem for path in NOTEBOOKS] == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_small(path: Path):
    found = content(path)
    assert (found["nbformat"], found["nbformat_minor"]) >= (4, 5)
    assert path.stat().st_size <= LARGEST
    ids = [cell["id"] for cell in found["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", one) for one in ids)
    for cell in found["cells"]:
        assert cell["cell_type"] in ("markdown", "code") and text(cell).strip()
        assert ("outputs" in cell) == (cell["cell_type"] == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_its_cells_print_and_draw_is_stored(path: Path):
    cells = [cell for cell in content(path)["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] is None for cell in cells)
    outputs = [output for cell in cells for output in cell["outputs"]]
    shown = [output for output in outputs if output["output_type"] != "stream"]
    assert all(output["output_type"] in OUTPUT_TYPES for output in shown)
    kinds = [kind for output in shown for kind in output["data"]]
    assert set(kinds) <= {"image/svg+xml", "text/html", "text/plain"}  # no widgets
    assert kinds.count("image/svg+xml") >= 2 and len(outputs) > len(cells) / 2
    printed = "".join(line for one in outputs if one not in shown for line in one["text"])
    assert "pat_jax" in printed and "Traceback" not in printed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_installs_before_jax_is_imported(path: Path):
    first, *rest = code(path)
    assert "pip" in first and "jax" not in "".join(
        re.findall(r"^\s*import (\w+)$", first, re.M)[:-1]
    )
    assert first.index("subprocess.run") < first.index("import pat_jax")
    assert not re.search(r"^(import|from) jax\b", "\n".join([first, *rest]), re.M)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_it_calls_or_names_is_there(path: Path):
    names = set(re.findall(r"\bpat_jax\.(\w+)", "\n".join(code(path))))
    assert names and names <= {*pat_jax.__all__, "__version__"}
    cells = content(path)["cells"]
    told = "\n".join(text(cell) for cell in cells if cell["cell_type"] == "markdown")
    named = [*re.findall(r"\]\(([\w.]+\.ipynb)\)", told), *re.findall(r"`(docs/[\w-]+\.md)`", told)]
    assert named and all((path.parent / x).exists() or (ROOT / x).exists() for x in named)


def test_sections_of_options_are_sections():
    sections = {one.section for one in options_of(RunConfig())}
    for source in (cell for path in NOTEBOOKS for cell in code(path)):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(value, ast.Dict) and isinstance(key, ast.Constant):
                        assert key.value in sections
