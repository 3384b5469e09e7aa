"""What a terminal shows of a run."""

import io

import pytest

from pat_jax.run.logging.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_time_left_counts_from_the_first_step(monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    terminal = Terminal()
    progress = Progress(3, stream=terminal)
    now += 600  # of compiling
    progress.start()
    now += 20
    progress.step(1, {"reward/mean": 0.5})
    assert "1/3 |" in terminal.getvalue() and "00:20<00:40" in terminal.getvalue()


def test_steps_of_an_earlier_start_take_none_of_it(monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    terminal = Terminal()
    progress = Progress(1000, stream=terminal)
    progress.start(900)
    now += 2
    progress.step(901, {"reward/mean": 0.5})
    assert "901/1000 |" in terminal.getvalue() and "00:02<03:18" in terminal.getvalue()
