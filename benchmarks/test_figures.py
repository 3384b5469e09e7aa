"""The table of benchmarks/reports/README.md is what the results of the benchmarks say."""

import json
import shutil

import pytest

from benchmarks.figures import HERE, MOST_ROWS, PAGE, ROWS, replaced, table, typed


def test_the_page_has_the_table_that_the_results_give():
    page = PAGE.read_text(encoding="utf-8")
    assert replaced(page, table()) == page, "run `python -m benchmarks.figures --write`"
    assert len(ROWS) <= MOST_ROWS
    kept = {name for row in ROWS for name in row.results}
    assert kept == {path.stem for path in (HERE / "results").glob("*.json")}


def test_another_result_is_another_table_and_may_miss_its_goal(tmp_path):
    shutil.copytree(HERE / "results", tmp_path / "results")
    file = tmp_path / "results" / "simulate_speed.json"
    content = json.loads(file.read_text())
    content["median_seconds"]["adaptive"] = 1.25
    file.write_text(json.dumps(content))
    assert "| 1.25 s | ≤ 1 s: **missed** |" in table(tmp_path / "results")


def test_a_page_without_room_for_the_table_is_refused():
    with pytest.raises(ValueError, match=r"expected a table between"):
        replaced("no table", table())


def test_commands_are_as_they_are_typed_today():
    old = "python -m benchmarks.hard_regret --data ../data --grids small --out x.json"
    assert typed(old) == "planner.hard_regret --grids small"
