"""The parts of the pages that are made from code and results are what these say."""

import pytest

from benchmarks import pictures
from benchmarks.pages import COMMANDS, DOCS, PART, PARTS, remade
from pat_jax import __main__ as listing

PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_has_the_parts_that_the_code_makes(path):
    page = path.read_text(encoding="utf-8")
    assert remade(page) == page, "run `python -m benchmarks.pages --write`"


def test_every_part_is_on_a_page():
    pages = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert {found[1] for found in PART.findall(pages)} == {*PARTS}


def test_every_command_has_its_options_on_the_page():
    assert {*COMMANDS} == {*listing.COMMANDS}


def test_another_text_in_a_part_is_replaced():
    page = DOCS.joinpath("results.md").read_text(encoding="utf-8")
    assert remade(page.replace("0 of 173,574", "1 of 173,574")) == page


@pytest.mark.slow
def test_the_pictures_are_those_that_are_drawn_today(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "DOCS", tmp_path)
    pictures.draw()
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.svg")}
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*.svg")}
