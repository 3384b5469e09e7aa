"""What SIGTERM, Ctrl-C and a closed terminal do to a process and to a run inside of a program, which leaves
signals and logging as it found them."""

import logging
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from runs import ROOT

from pat_jax.run.files.folder import log_to
from pat_jax.run.process.in_process import in_program
from pat_jax.run.process.stop_signals import Stopped

PROGRAM = """
import sys, time
from pat_jax.run.process.stop_signals import Stopped, StopSignals, leave

def tell(text):
    print(text, flush=True)
    for _ in range(3000):
        time.sleep(0.02)

try:
    with StopSignals() as signals:
        signals.last_words = lambda: "step 4 stays; go on with: this"
        try:
            if sys.argv[1] == "open":
                tell("ready")
            with signals.held():
                if sys.argv[1] == "held":
                    print("ready", flush=True)
                    while signals._received is None:
                        time.sleep(0.02)
                    time.sleep(60 if "slow" in sys.argv else 0.1)
                    print("whole", flush=True)
            tell("not reached")
        except Stopped as stop:
            print(f"kept {stop.name}", flush=True)
            if "slow" in sys.argv:
                tell("saving")
            raise
except Stopped as stop:
    leave(stop.exit_code)
"""


@pytest.fixture(autouse=True)
def hears_hangups():
    """Also where these tests run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def start(*arguments: str, ignored: signal.Signals | None = None) -> subprocess.Popen:
    """
    Args:
      ignored: a signal that the starting process has set to be ignored.
    """
    before = signal.signal(ignored, signal.SIG_IGN) if ignored else None
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if ignored:
        signal.signal(ignored, before)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_interrupts_what_is_not_held(sent: signal.Signals, code: int):
    process = start("open")
    process.send_signal(sent)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (code, f"kept {sent.name}\n")
    assert f"{sent.name}: stopping" in errors and "Traceback" not in errors


@pytest.mark.parametrize("where", [("held", "slow"), ("open", "slow")])
def test_a_second_signal_ends_at_once(where: tuple[str, ...]):
    process = start(*where)
    assert process.stderr is not None
    process.send_signal(signal.SIGTERM)
    while "stopping" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "whole" not in output and "not reached" not in output
    assert errors.splitlines()[-1] == "ended at once: step 4 stays; go on with: this"


def test_a_terminal_that_closes_says_so_several_times(tmp_path: Path):
    """Which ends nothing at once, nor does the first signal that somebody sends meanwhile."""
    process = start("held")
    for sent in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(sent)
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (129, "whole\nkept SIGHUP\n")


def test_under_nohup_a_closed_terminal_is_not_heard():
    process = start("held", ignored=signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (143, "whole\nkept SIGTERM\n")
    assert "SIGHUP" not in errors


def test_a_run_whose_terminal_has_gone_saves_and_ends(tmp_path: Path):
    """Writing to it would be an error."""
    kept = tmp_path / "kept"
    program = PROGRAM.replace(
        'print(f"kept {stop.name}", flush=True)',
        'print("unheard", flush=True); print("so", file=sys.stderr, flush=True); '
        f'open({str(kept)!r}, "w").write(stop.name)',
    )
    ours, theirs = pty.openpty()
    take = "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", take + program, "open"],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    printed = b""
    while b"ready" not in printed:
        printed += os.read(ours, 1000)
    os.close(ours)
    assert process.wait(timeout=20) == 129
    assert kept.read_text() == "SIGHUP"


def test_leaving_waits_for_no_thread_though_nobody_reads_what_was_said():
    program = (
        "import threading, time\n"
        "from pat_jax.run.process.stop_signals import leave\n"
        "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "input()\n"
        "print('unheard')\n"
        "leave(143)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": ""},  # else `print` raises already
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdout.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    try:
        assert process.wait(timeout=30) == 143
    finally:
        process.kill()
        process.wait()


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
    with pytest.raises(KeyboardInterrupt, match="stopped by"), in_program():
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


def test_a_program_that_goes_on_after_the_signal_is_told_that_the_run_was_stopped(capfd):
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with pytest.raises(KeyboardInterrupt, match="stopped"), in_program():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def test_a_program_gets_the_signal_that_came_while_its_run_failed(capfd):
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with pytest.raises(ValueError, match="disk"), in_program() as signals, signals.held():
            signal.raise_signal(signal.SIGTERM)
            raise ValueError("disk")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


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
