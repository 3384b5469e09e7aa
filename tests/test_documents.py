"""What README.md and docs/ tell a newcomer to type is there: options, extras, files."""

import ast
import re
import shlex
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
from command_words import check_stands
from config_classes import CLASSES
from metrics_table import STAND_INS, told_metrics, untold
from runs import ROOT

from pat_jax.common.options.declared import options_of
from pat_jax.common.options.names import meant
from pat_jax.config.command_line import PRESETS, parse
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.algorithm.value_loss import ValueLoss
from pat_jax.rl.rewards.outcome import Cause

PAGES = sorted((ROOT / "docs").glob("*.md"))
REPORTS = sorted((ROOT / "benchmarks" / "reports").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, *REPORTS]


COMMAND = re.compile(r"(?:-m pat_jax\.|^ *pat_jax )(\w+)(.*)")
COMMAND_IN_TEXT = re.compile(r"`(?:python -m pat_jax\.|pat_jax )(\w+)([^`]*)`")


def told() -> list[tuple[str, str, list[str]]]:
    """(document, command, words) of every command of the project, in a block of shell or a text."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for command, words in re.findall(COMMAND_IN_TEXT, text):
            found.append((str(path.relative_to(ROOT)), command, words.split()))
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if match := COMMAND.search(line):
                    words = shlex.split(match[2], comments=True)
                    found.append((str(path.relative_to(ROOT)), match[1], words))
    return found


@pytest.mark.parametrize(("document", "command", "words"), told())
def test_a_command_has_options_that_are_there(document: str, command: str, words: list[str]):
    options = list(options_of(CLASSES[command]()))
    known = {name for option in options for name in (option.name, option.short)}
    known |= {"config", "help", *(["preset"] if command in ("train", "profile") else [])}
    asked = {word[2:].partition("=")[0].replace("-", "_") for word in words if word[:2] == "--"}
    assert all(meant(name, known) for name in asked)
    if "--preset" in words:
        assert (PRESETS / f"{words[words.index('--preset') + 1]}.yaml").is_file()


PARSED = [
    (command, words)
    for document, command, words in told()
    if document.startswith("docs/")
    and not any(word[0] in "$&" for word in words if word)
    and command != "compare"  # takes folders
]


@pytest.mark.parametrize(("command", "words"), PARSED)
def test_a_command_of_a_page_parses(command: str, words: list[str]):
    words = [
        "true" if word == "auto" and "resume" in before else word
        for before, word in pairwise(["", *words])
    ]
    words = ["--runs", *words] if command == "compare" else words
    presets = PRESETS if command in ("train", "profile") else None
    if "--help" not in words:
        parse(words, CLASSES[command], presets=presets)


def test_every_option_of_train_is_on_a_page():
    """By its name, or by its last part where a page tells of its section."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in [DOCUMENTS[0], *PAGES])
    options = list(options_of(CLASSES["train"]()))
    assert len(options) <= 140
    for option in options:
        names = [f"--{name}" for name in (option.name, option.short) if name]
        names.append(f"`{option.name.rpartition('.')[2]}")
        assert any(re.search(rf"{re.escape(name)}\b", pages) for name in names), option.name


@pytest.mark.parametrize(("command", "words"), [(c, w) for d, c, w in told() if d == "README.md"])
def test_a_command_of_the_readme_runs_as_it_stands(command: str, words: list[str]):
    check_stands(command, words)


def test_extras_are_installed_from_the_clone_and_are_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"pip install[^\n]*pat_jax\[", text), f"{path.name}: is not on PyPI"
        for names in re.findall(r"pip install[^\n`]*'\.\[([\w,]+)\]'", text):
            assert set(names.split(",")) <= set(extras["optional-dependencies"])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path: Path):
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / link).exists(), link


def test_pages_that_the_code_names_are_there():
    """In help texts, comments, messages, examples and notebooks."""
    folders = ("pat_jax", "models", "rl", "profiling", "examples", "notebooks")
    suffixes = {".py", ".yaml", ".jinja", ".ipynb"}
    files = [path for one in folders for path in (ROOT / one).rglob("*") if path.suffix in suffixes]
    named = {
        found
        for path in files
        for found in re.findall(
            r"\b(?:docs|benchmarks/reports)/[\w-]+\.md", path.read_text("utf-8")
        )
    }
    assert len(named) > 10
    assert {page for page in named if not (ROOT / page).is_file()} == set()


def test_readme_commands_are_all_looked_at():
    commands = {command for document, command, _ in told() if document == "README.md"}
    assert commands >= {"train", "plan"}


@pytest.mark.parametrize("name", ["architecture.md"])
def test_a_page_names_files_that_are_there(name: str):
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)`", page)
    here = [n for n in named if any((ROOT / top / n).is_file() for top in ("", "pat_jax"))]
    assert here == named and len(named) > 12


NAMESPACES = "reward|rollout|train|critic|eval|progress|memory|timing|placement"
ROLES = ("train", "critic")  # whose name is before what any loss measures


@cache
def literals() -> frozenset[str]:
    """Every text in the code that writes metrics, parts of f-strings too."""
    found = set()
    folders = [
        ROOT / "rl",
        *(ROOT / "pat_jax" / name for name in ("run", "common", "engine", "training")),
    ]
    for folder in folders:
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return frozenset(found)


def is_written(name: str) -> bool:
    """Whole, or in two parts that are put together, or around what stand-ins stand for."""
    if any(word in name for word in STAND_INS):
        parts = [part.strip("/") for part in re.split("|".join(STAND_INS), name)]
        return all(is_part(part) for part in parts if part)
    if name.partition("/")[0] in ROLES and is_part(name):
        return True
    heads = [text for text in literals() if re.match(rf"({NAMESPACES})/", text)]
    tails = (name.removeprefix(head) for head in heads if name.startswith(head))
    return any(not tail or tail in literals() for tail in tails)


def is_part(part: str) -> bool:
    """A text by itself, or a namespace and one."""
    namespace, _, rest = part.partition("/")
    alone = {text.strip("/") for text in literals()}
    return part in alone or {namespace, rest} <= alone


def test_the_table_has_each_name_once_and_all_columns():
    rows = told_metrics()
    names = [row[0] for row in rows]
    assert len(names) == len(set(names)) > 60
    assert all(len(row) == 5 and row[2] and row[3] and row[4] for row in rows)


def test_what_the_code_names_is_told():
    whole = {text for text in literals() if re.fullmatch(rf"({NAMESPACES})/[a-z]\w*[a-z0-9]", text)}
    assert "train/learning_rate" in whole and untold(whole) == set()


@pytest.mark.parametrize("correction", get_args(get_type_hints(PolicyLoss)["correction"]))
def test_what_a_loss_measures_is_told(correction: str):
    assert untold({f"train/{name}" for name in PolicyLoss(correction=correction).metrics}) == set()  # pyright: ignore[reportArgumentType]


def test_what_a_critic_measures_is_told():
    loss = ValueLoss()
    reported = loss.summary([{name: np.ones((), np.float32) for name in ("weight", *loss.metrics)}])
    assert "explained_variance" in reported
    assert untold({f"critic/{name}" for name in reported}) == set()


@pytest.mark.parametrize("name", [row[0] for row in told_metrics()])
def test_what_is_told_is_written(name: str):
    assert is_written(name)


def test_causes_are_told():
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert all(f"`{cause}`" in text for cause in Cause)
