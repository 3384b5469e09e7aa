"""How much memory the machine has; freed memory goes back to the system."""

import subprocess
import sys
from pathlib import Path

import pytest

from pat_jax.common import memory

# Small pieces, every one of which is freed but the last: what is kept holds the heap's end.
FREED = """
import ctypes
from pathlib import Path
from pat_jax.common.memory import give_back

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def resident() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

pieces = [libc.malloc(65536) for _ in range(2000)]
for piece in pieces:
    ctypes.memset(piece, 1, 65536)
for piece in pieces[:-1]:
    libc.free(piece)
before = resident()
give_back()
print(before - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux keeps what was freed")
def test_what_was_freed_is_given_back():
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 1e8


@pytest.mark.skipif(sys.platform != "linux", reason="containers are Linux's")
def test_a_container_has_what_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CGROUP", limit)
    whole = memory.machine_memory()
    assert 1e8 < whole < float("inf")
    for text, expected in (("max\n", whole), ("1000000\n", 1e6), ("9" * 20, whole)):
        limit.write_text(text)
        assert memory.machine_memory() == expected
