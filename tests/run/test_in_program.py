"""A run inside of a program leaves signals and logging as it found them."""

import logging
import signal
import subprocess
import sys
import threading

import pytest

from pat_jax.run.files.folder import log_to
from pat_jax.run.process.in_process import in_program
from pat_jax.run.process.stop_signals import Stopped

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
TERMINATED = """
import signal
from pat_jax.run.process.in_process import in_program
with in_program():
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        print("kept", flush=True)
print("not reached")
"""


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in STOP_SIGNALS]


def test_an_interrupt_stops_the_run_and_not_the_program(capfd):
    before, kept = handlers(), []
    with pytest.raises(KeyboardInterrupt, match="is saved"), in_program():
        assert handlers() != before
        try:
            signal.raise_signal(signal.SIGINT)
        except Stopped as stop:
            kept.append(stop.name)
            raise
    assert (kept, handlers()) == (["SIGINT"], before)


def test_the_second_interrupt_ends_what_is_held_and_not_the_process(capfd):
    before, whole = handlers(), []
    with pytest.raises(KeyboardInterrupt), in_program() as signals, signals.held():
        signal.raise_signal(signal.SIGINT)
        whole.append("carried on")
        signal.raise_signal(signal.SIGINT)
        whole.append("not reached")
    assert (whole, handlers()) == (["carried on"], before)


def test_a_program_that_is_terminated_ends_after_the_run_has_kept_its_work():
    done = subprocess.run([sys.executable, "-c", TERMINATED], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "kept\n")


def test_outside_of_the_main_thread_it_takes_no_signal():
    found: list[object] = []

    def work() -> None:
        with in_program() as signals, signals.held():
            found.extend(handlers())

    thread = threading.Thread(target=work)
    before = handlers()
    thread.start()
    thread.join()
    assert found == before


def test_each_run_has_its_own_log_and_the_program_gets_its_own_back(tmp_path):
    package = logging.getLogger("pat_jax")
    before = package.handlers[:], package.level, package.propagate, logging.raiseExceptions
    for name in ("one", "two"):
        with in_program():
            log_to(tmp_path / name)
            logging.getLogger("pat_jax.run").info("this is %s", name)
    after = package.handlers, package.level, package.propagate, logging.raiseExceptions
    assert after == before
    assert [(tmp_path / n).read_text().count("this is") for n in ("one", "two")] == [1, 1]
    assert "this is two" in (tmp_path / "two").read_text()
