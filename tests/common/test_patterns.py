"""Patterns of files: what `glob` finds, or one sentence within the time."""

import glob

import pytest

from pat_jax.common import patterns
from pat_jax.common.errors import UserError
from pat_jax.common.patterns import matches


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in ("a.json", "b.json", "in/c.json", "in/deep/d.json", ".hidden/e.json", "é [1].json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "pattern", ["*.json", "**/*.json", "in/**", "[ab].json", "?.json", "nothing*", "é*", "**", "["]
)
def test_they_are_those_of_glob(tree, pattern: str):
    assert matches(pattern, "data") == sorted(glob.glob(pattern, recursive=True))
    whole = f"{tree}/{pattern}"
    assert matches(whole, "data") == sorted(glob.glob(whole, recursive=True))


def test_a_pattern_that_no_path_fits_finds_nothing(tree):
    assert matches(f"{'x' * 300}*", "data") == []


def test_the_whole_machine_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 0.3)
    with pytest.raises(
        UserError, match=r"option --data is '/\*\*/no\*such': .* looking took 0.3 s"
    ):
        matches("/**/no*such", "data")


def test_more_files_than_a_run_reads(tree, monkeypatch):
    monkeypatch.setattr(patterns, "MOST_FILES", 2)
    with pytest.raises(UserError, match="more than 2 files"):
        matches("**", "eval.data")
