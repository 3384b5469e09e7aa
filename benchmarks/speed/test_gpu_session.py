"""A session of made-up parts: each is run, whatever comes of the others."""

import json
import time
from pathlib import Path

import pytest

from benchmarks.speed import gpu_session
from benchmarks.speed.gpu_session import LINES, TOO_LONG, Part, parts, run, session

HANGS = (
    "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
)


def test_a_part_that_fails_or_hangs_keeps_no_other_from_running(tmp_path: Path):
    written = tmp_path / "good.json"
    good = f"import os; open({str(written)!r}, 'w').write(os.environ['WORDS']); print('x\\n' * 99)"
    made_up = [
        Part("bad", ["-c", "raise SystemExit('no such device')"], 20, tmp_path / "none.json"),
        Part("hangs", ["-c", HANGS], 0.5, tmp_path / "none.json"),
        Part("good", ["-c", good], 20, written, {"WORDS": '{"ms": 3}'}),
        Part("torn", ["-c", f"open({str(written)!r}, 'w').write('[1, ')"], 20, written),
    ]
    start = time.perf_counter()
    assert session(made_up, tmp_path / "out.json", "python -m it", 200) == 2
    assert time.perf_counter() - start < 30
    content = json.loads((tmp_path / "out.json").read_text())
    found = content["parts"]
    assert content["command"] == "python -m it" and list(found) == ["bad", "hangs", "good", "torn"]
    assert [one["exit_code"] for one in found.values()] == [1, TOO_LONG, 0, 0]
    assert [one["figures"] for one in found.values()] == [None, None, {"ms": 3}, None]
    assert found["bad"]["last_lines"] == ["no such device"]
    assert len(found["good"]["last_lines"]) == LINES and found["hangs"]["seconds"] < 10


def test_what_a_part_had_written_before_its_time_was_over_is_kept(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(gpu_session, "LEAST_S", 1)
    lines = tmp_path / "lines.jsonl"
    slow = f"import time; f = open({str(lines)!r}, 'w', 1); f.write('[1]\\n[2'); time.sleep(60)"
    late = Part("late", ["-c", "raise SystemExit(3)"], 20, tmp_path / "none.json")
    out = tmp_path / "out.json"
    part = Part("slow", ["-c", slow], 50, lines)
    assert session([part, late], out, "", 2) == 1
    found = json.loads(out.read_text())["parts"]
    assert list(found) == ["slow"]  # no time is left for the other
    assert found["slow"]["exit_code"] == TOO_LONG and found["slow"]["figures"] == [[1]]


def test_every_part_is_asked_for_its_own_file(tmp_path: Path):
    for is_small in (True, False):
        wanted = parts(tmp_path, is_small)
        names = ["update", "decode", "loss", "attention", "compile", "doctor", "tests"]
        assert [part.name for part in wanted] == names
        assert len({part.figures for part in wanted}) == len(names)
        assert sum(part.limit_s for part in wanted) <= 800


SLOW = pytest.param("compile", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["loss", "attention", SLOW])
def test_the_parts_of_kernels_run_on_a_cpu(name: str, tmp_path: Path):
    (part,) = (one for one in parts(tmp_path, is_small=True) if one.name == name)
    found = run(part)
    assert found["exit_code"] == 0
    failed = [one for one in found["figures"] if "error" in one]
    assert len(found["figures"]) > len(failed) == (name == "attention")  # a CPU has no cuDNN
