"""A session of made-up parts: each is run, whatever comes of the others."""

import json
import time
from pathlib import Path

from benchmarks.speed.gpu_session import LINES, TOO_LONG, Part, parts, session

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
    assert session(made_up, tmp_path / "out.json", "python -m it") == 2
    assert time.perf_counter() - start < 30
    content = json.loads((tmp_path / "out.json").read_text())
    found = content["parts"]
    assert content["command"] == "python -m it" and list(found) == ["bad", "hangs", "good", "torn"]
    assert [one["exit_code"] for one in found.values()] == [1, TOO_LONG, 0, 0]
    assert [one["figures"] for one in found.values()] == [None, None, {"ms": 3}, None]
    assert found["bad"]["last_lines"] == ["no such device"]
    assert len(found["good"]["last_lines"]) == LINES and found["hangs"]["seconds"] < 10


def test_every_part_is_asked_for_its_own_file(tmp_path: Path):
    for is_small in (True, False):
        wanted = parts(tmp_path, is_small)
        assert [part.name for part in wanted] == ["doctor", "tests", "decode", "update"]
        assert len({part.figures for part in wanted}) == 4
        assert sum(part.limit_s for part in wanted) <= 2400
