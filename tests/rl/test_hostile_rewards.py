"""Reward functions that write where they should not, fork, close files or are killed: right values or one
sentence, in time, and no other response pays for it."""

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pat_jax.common.errors import UserError
from pat_jax.rl.rewards.channel import Calls
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.scorer import RewardScorer

TIMEOUT = 2.0
# The reward of a response is its length; what its function does besides is its first word.
FUNCTIONS = """
import ctypes, json, multiprocessing, os, pickle, signal, subprocess, sys, threading, time
from pathlib import Path

HERE = Path(__file__).parent
FILES = range(3, 64)

class Code:
    def __reduce__(self):
        return Path.touch, (HERE / "ran",)

def write_everywhere(content):
    for file in FILES:
        try:
            os.write(file, content)
        except OSError:
            pass

def our_socket():
    return next(f for f in FILES if is_socket(f))

def is_socket(file):
    try:
        return os.readlink(f"/proc/self/fd/{file}").startswith("socket")
    except OSError:
        return False

def pickle_(): write_everywhere(pickle.dumps(Code()))
def garbage(): write_everywhere(bytes(range(256)) * 8)
def deep(): write_everywhere(b"[" * 50_000 + b"\\n")
def digits(): write_everywhere(b'{"call": ' + b"9" * 10_000 + b"}\\n")
def another_call():
    write_everywhere(b'{"call": 999, "seconds": 0, "mistake": "", "failure": null, "scores": [7], "numbers": []}\\n')
def flood():
    while True:
        write_everywhere(b"x" * 1_000_000)
def trickle():
    while True:
        write_everywhere(b"x")
        time.sleep(0.001)
def fork(): os.fork()
def fork_and_raise():
    if not os.fork():
        raise RuntimeError
def leave_a_child_and_die():
    if os.fork():
        os._exit(7)
    time.sleep(1000)
def fork_in_c(): ctypes.CDLL(None).fork()
def fork_and_stay():
    if not os.fork():
        time.sleep(1000)
def keep_files_and_die():
    subprocess.Popen(["sleep", "1000"], close_fds=False)
    os._exit(5)
def close_everything(): os.closerange(3, 64)
def put_a_file_there():
    file = our_socket()
    mine = os.open(HERE / "mine", os.O_CREAT | os.O_RDWR)
    os.dup2(mine, file)
def read_everything():
    for file in FILES:
        try:
            os.read(file, 1)
        except OSError:
            pass
def print_much(): print("x" * 3_000_000); print("y" * 3_000_000, file=sys.stderr)
def pool():
    with multiprocessing.get_context("fork").Pool(2) as workers:
        assert workers.map(abs, [-1, -2]) == [1, 2]
def raise_escapes(): raise ValueError("\\x1b[2J\\x9b31m\\r" + "x" * 10_000)
def stop_itself(): os.kill(os.getpid(), signal.SIGSTOP)
def later():
    threading.Timer(0.3, write_everywhere, (b"late\\n",)).start()
def die_with_a_signal_of_no_name(): os.kill(os.getpid(), signal.SIGRTMIN + 3)

def obey(completions, **columns):
    for text in completions:
        name = text.split()[0]
        if name in globals():
            globals()[name]()
    return [float(len(text)) for text in completions]

def killed(completions, **columns):
    flag = HERE / completions[0]
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if completions[0] == "always":
        os.kill(os.getpid(), signal.SIGTERM)
    return [1.0] * len(completions)
"""
# Counts its imports, and is killed in those that `kills` names.
IMPORTED = """
import os, signal
from pathlib import Path
HERE = Path(__file__).parent
count = len(list(HERE.glob("import-*")))
(HERE / f"import-{count}").touch()
if str(count) in (HERE / "kills").read_text().split():
    os.kill(os.getpid(), signal.SIGKILL)

def f(completions, **columns):
    if completions[0] == "die":
        os._exit(3)
    return [1.0]
"""

MANY_NUMBERS = """
from pat_jax.rl.rewards import channel as reward_channel
reward_channel.LARGEST_ANSWER = 20_000

def compute_score(data_source, solution_str, ground_truth):
    return {"score": 1.0, **{str(i): float(i) for i in range(int(solution_str))}}
"""

NOT_ITS_OWN = "wrote to open files that are not its own, so that its process was ended"
CLOSED = "closed open files that are not its own, so that its process was ended"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "functions.py").write_text(FUNCTIONS)
    return folder


@pytest.fixture(scope="module")
def scorer(folder: Path) -> Iterator[RewardScorer]:
    with RewardScorer(f"{folder}/functions.py:obey", timeout=TIMEOUT) as scorer:
        scorer.score(["p"], ["fine"], {})
        yield scorer


DEEDS = {
    **dict.fromkeys(("pickle_", "garbage", "deep", "digits", "another_call", "flood"), NOT_ITS_OWN),
    **dict.fromkeys(("fork", "fork_and_raise", "fork_in_c", "fork_and_stay"), None),
    **dict.fromkeys(("print_much", "pool"), None),
    **dict.fromkeys(("close_everything", "put_a_file_there"), CLOSED),
    **dict.fromkeys(("trickle", "read_everything", "stop_itself"), "took longer than 2 s and was"),
    "leave_a_child_and_die": "ended its process with code 7",
    "keep_files_and_die": "ended its process with code 5",
    "raise_escapes": r"raised ValueError: \\x1b\[2J\\x9b31m x{200,300}",
    "die_with_a_signal_of_no_name": "ended its process with signal [0-9]+",
}
SLOW = ("read_everything", "stop_itself")


@pytest.mark.parametrize(
    ("name", "expected"),
    [pytest.param(*one, marks=[pytest.mark.slow] * (one[0] in SLOW)) for one in DEEDS.items()],
)
def test_what_a_function_does_costs_nobody_else(scorer, folder, caplog, name, expected):
    start = time.monotonic()
    scores = scorer.score(["p", "q", "q"], [f"{name} first", "1234", "12345"], {})
    assert time.monotonic() - start < TIMEOUT + 8
    mine = np.nan if expected else len(f"{name} first")
    np.testing.assert_array_equal(scores, [mine, 4, 5])
    output = [record.getMessage() for record in caplog.records]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", "".join(output))
    output = [one for one in output if "Traceback" not in one]
    assert len(output) == bool(expected)
    if expected:
        assert re.search(f"obey' {expected}.*; this response is left out", output[0])
    assert scorer.score(["p", "q"], ["1", "12"], {}).tolist() == [1, 2]
    assert not (folder / "ran").exists()
    if name == "put_a_file_there":
        assert (folder / "mine").read_bytes() == b""


@pytest.mark.timeout(60)
def test_what_is_written_after_the_answer_is_no_answer_to_the_next_call(scorer):
    assert scorer.score(["p"], ["later"], {}).tolist() == [5]
    time.sleep(0.5)
    scores = scorer.score(["p", "q", "r"], ["1", "12", "123"], {})
    assert np.isnan(scores).sum() == 1 and np.nansum(scores) in (3, 4, 5)


@pytest.mark.parametrize("seconds", [1e12, 1e308])
def test_the_longest_times_are_no_trouble(folder, serve, seconds):
    judge = serve(lambda question: (200, {"scores": [1] * len(question["prompts"])}))
    with RewardScorer(f"{folder}/functions.py:obey", judge.url, timeout=seconds) as scorer:
        assert scorer.score(["p"] * 512, ["a"] * 512, {}).tolist() == [2] * 512


def test_more_measurements_than_an_answer_may_have_are_one_sentence(tmp_path, caplog):
    (tmp_path / "numbers.py").write_text(MANY_NUMBERS)
    with RewardScorer(f"{tmp_path}/numbers.py:compute_score", timeout=60.0) as scorer:
        scores = scorer.score(["p", "q"], ["4000", "2"], {"answer": ["", ""]})
    np.testing.assert_array_equal(scores, [np.nan, 1])
    assert re.search(r"compute_score' returned [\d,]+ bytes of measurements", caplog.text)


def test_a_process_that_is_killed_once_is_asked_again(folder, caplog):
    with RewardScorer(f"{folder}/functions.py:killed", timeout=30.0) as scorer:
        assert scorer.score(["p"], ["once"], {}).tolist() == [1]
        assert not caplog.records
        np.testing.assert_array_equal(scorer.score(["p"], ["always"], {}), [np.nan])
    assert "killed' ended its process with SIGTERM, twice; this response" in caplog.text


@pytest.mark.parametrize(
    ("kills", "message"),
    [
        ("0", ""),
        ("1 2", "ended its process with SIGKILL .out of memory.., twice while it was imported"),
    ],
)
def test_a_process_that_is_killed_while_it_is_imported_is_started_again(tmp_path, kills, message):
    (tmp_path / "imported.py").write_text(IMPORTED)
    (tmp_path / "kills").write_text(kills)
    expected = pytest.raises(UserError, match=message) if message else contextlib.nullcontext()
    with expected as error, RewardScorer(f"{tmp_path}/imported.py:f", timeout=30.0) as scorer:
        scores = scorer.score(["p", "q"], ["die", "fine"], {})
        np.testing.assert_array_equal(scores, [np.nan, 1])
    if error is not None:
        assert "correct it" not in str(error.value) and "--reward_workers" in str(error.value)


# --- what is said ------------------------------------------------------------------------------


def test_a_call_that_nobody_reads_has_its_time_too():
    ours, theirs = socket.socketpair()
    with contextlib.closing(Calls(ours)) as calls, theirs:
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            calls.ask(1, [Response("p", "x" * 10_000_000, {})], start + 0.1)
        assert time.monotonic() - start < 5
