"""A process that ends before all have met: the others end with one sentence, and not in C++."""

import socket
from pathlib import Path

import pytest
from runs import finish, start
from several import free_port

WORKER = str(Path(__file__).with_name("joining_worker.py"))


def begin(address: str, count: int, index: int, *point: str):
    return start(address, str(count), str(index), *point, program=(WORKER,))


@pytest.mark.parametrize("point", ["JAX's join", "the meeting"])
@pytest.mark.parametrize("gone", [0, 1])
def test_who_dies_while_joining_ends_the_others_in_a_sentence(gone: int, point: str):
    address = f"localhost:{free_port()}"
    dies = begin(address, 2, gone, point)
    other = begin(address, 2, 1 - gone)
    said = finish(other, code=1, timeout=180)
    finish(dies, code=-9)
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert (
        line.startswith(f"error: process {gone} on ")
        and "has ended" in line
        and "Traceback" not in said
    )


def test_all_join_while_outsiders_come():
    port = free_port()
    all_of = [begin(f"localhost:{port}", 2, index) for index in (0, 1)]
    outsiders = []
    for _ in range(200):
        try:
            outsiders.append(one := socket.create_connection(("localhost", port), timeout=1))
            one.sendall(b'{"hello": "pat_jax roll call 1", "index": 1, "count": 3}\n')
        except OSError:
            pass
        if all_of[0].poll() is not None:
            break
    for one in all_of:
        assert "error" not in finish(one, timeout=180)
    for one in outsiders:
        one.close()
