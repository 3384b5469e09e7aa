"""Pages are few and short, and say what a user needs: no proofs, no diary, no file of tests."""

import re
from pathlib import Path

import pytest
import yaml
from runs import ROOT

DOCS = sorted((ROOT / "docs").glob("*.md"))
GENERATED = {"options.md"}
REFERENCE = {"metrics.md", *GENERATED}  # as long as there are names
FOR_DEVELOPERS = {"architecture.md", "CONTRIBUTING.md"}
COUNTED = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in DOCS if path.name not in GENERATED),
]
FOR_USERS = [path for path in COUNTED if path.name not in FOR_DEVELOPERS]
COMMIT = re.compile(r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7,40}\b")
NUMBER = re.compile(r"(?<![\w.-])\d[\d,.]*")


def prose(page: str) -> str:
    """The page without tables, blocks of code, code, and addresses."""
    page = re.sub(
        r"^```.*?^```$|<!--.*?-->|^\s*\|[^\n]*$", "", page, flags=re.DOTALL | re.MULTILINE
    )
    return re.sub(r"`[^`]*`|\]\([^)]*\)|arXiv [\d.]+", "", page)


def words(page: str) -> int:
    """Without the rules of tables and other marks."""
    return sum(bool(re.search(r"[^\W_]", one)) for one in page.split())


def test_pages_are_few_and_have_few_words():
    assert len(COUNTED) <= 27
    assert sum(words(path.read_text(encoding="utf-8")) for path in COUNTED) <= 26_000


def test_reports_have_few_words():
    reports = [*(ROOT / "benchmarks" / "reports").glob("*.md")]
    assert len(reports) > 5
    assert sum(words(path.read_text(encoding="utf-8")) for path in reports) <= 8_000


@pytest.mark.parametrize("path", COUNTED, ids=lambda path: path.name)
def test_a_page_is_short(path: Path):
    most = {"README.md": 110}.get(path.name, 150)
    assert path.name in REFERENCE or len(path.read_text(encoding="utf-8").splitlines()) <= most


@pytest.mark.parametrize("path", FOR_USERS, ids=lambda path: path.name)
def test_a_page_for_users_is_no_report(path: Path):
    page = path.read_text(encoding="utf-8")
    assert COMMIT.findall(page) == []
    assert "tests/" not in page
    assert len(NUMBER.findall(prose(page))) <= 25


def test_every_page_is_in_the_navigation():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    named = [page for section in nav for pages in section.values() for page in pages]
    files = [file for page in named for file in page.values()]
    assert sorted(files) == sorted(path.relative_to(ROOT).as_posix() for path in {*COUNTED, *DOCS})
