"""What SIGTERM and Ctrl-C do, in a process of its own that does nothing else."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, time
from pat_jax.run.stop_signals import Stopped, StopSignals, leave

def tell(text):
    print(text, flush=True)
    for _ in range(3000):
        time.sleep(0.02)

try:
    with StopSignals() as signals:
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


def start(*arguments: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_interrupts_what_is_not_held(sent: signal.Signals, code: int):
    process = start("open")
    process.send_signal(sent)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (code, f"kept {sent.name}\n")
    assert f"{sent.name}: stopping" in errors and "Traceback" not in errors


def test_what_is_held_is_carried_through():
    process = start("held")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (143, "whole\nkept SIGTERM\n")


@pytest.mark.parametrize("where", [("held", "slow"), ("open", "slow")])
def test_a_second_signal_ends_at_once(where: tuple[str, ...]):
    process = start(*where)
    assert process.stderr is not None
    process.send_signal(signal.SIGTERM)
    while "stopping" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "whole" not in output and "not reached" not in output


def test_leaving_waits_for_no_thread_though_nobody_reads_what_was_said():
    program = (
        "import threading, time\n"
        "from pat_jax.run.stop_signals import leave\n"
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
