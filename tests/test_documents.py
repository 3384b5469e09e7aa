"""What README.md and docs/ tell a newcomer to type is there: options, extras, files."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from command_words import check_stands
from config_classes import CLASSES
from runs import ROOT

from pat_jax.common.options.declared import options_of
from pat_jax.config.command_line import PRESETS

PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "figures").glob("*.md")])
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]


def told() -> list[tuple[str, str, list[str]]]:
    """(document, command, words) of every command of the project, in a block of shell or a text."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for command, words in re.findall(r"`python -m pat_jax\.(\w+)([^`]*)`", text):
            found.append((path.name, command, words.split()))
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if match := re.search(r"-m pat_jax\.(\w+)(.*)", line):
                    words = shlex.split(match[2], comments=True)
                    found.append((path.name, match[1], words))
    return found


@pytest.mark.parametrize(("document", "command", "words"), told())
def test_a_command_has_options_that_are_there(document: str, command: str, words: list[str]):
    options = list(options_of(CLASSES[command]()))
    known = {name for option in options for name in (option.name, option.short)}
    known |= {"config", "help", *(["preset"] if command in ("train", "profile") else [])}
    asked = {word[2:].partition("=")[0].replace("-", "_") for word in words if word[:2] == "--"}
    assert asked <= known
    if "--preset" in words:
        assert (PRESETS / f"{words[words.index('--preset') + 1]}.yaml").is_file()


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


def test_readme_commands_are_all_looked_at():
    commands = {command for document, command, _ in told() if document == "README.md"}
    assert commands >= {"train", "generate", "plan"}


@pytest.mark.parametrize("name", ["change-something.md", "how-it-works.md"])
def test_a_page_names_files_that_are_there(name: str):
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)`", page)
    here = [n for n in named if any((ROOT / top / n).is_file() for top in ("", "pat_jax"))]
    assert here == named and len(named) > 12


def test_the_loop_of_the_readme_is_that_of_the_code():
    """Whatever the indentation."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = (ROOT / "pat_jax/engine/rollout.py").read_text(encoding="utf-8")
    lines = [line.strip() for line in code.splitlines()]
    shown = re.findall(r"```python\n(.*?)```", readme.partition("## How a rollout moves")[2], re.S)
    assert shown
    for snippet in shown:
        wanted = [line.strip() for line in snippet.splitlines()]
        starts = [i for i, line in enumerate(lines) if line == wanted[0]]
        assert any(lines[i : i + len(wanted)] == wanted for i in starts), snippet
