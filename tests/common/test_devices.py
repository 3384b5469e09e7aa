"""What `configure` sets up, seen from a fresh process: it acts on the whole one; and how much memory the
machine has, to which freed memory goes back."""

import os
import platform
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from pat_jax.common import devices, memory

FAULTS = """
import resource
import numpy as np
from pat_jax.common.devices import configure

if {configured}:
    configure(1)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(2**25, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(max(faults() for _ in range(3)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these knobs")
def test_freed_memory_is_kept():
    """Memory that was used before is not faulted in again; without `configure` it is."""

    def faults(configured: bool) -> int:
        code = FAULTS.format(configured=configured)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        return int(done.stdout)

    assert 10 * faults(True) < faults(False)


def test_flags_of_the_user_reach_xla():
    code = "from pat_jax.common.devices import configure; configure(1)"
    flags = {"XLA_FLAGS": "--xla_no_such_flag=1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | flags
    )
    assert done.returncode and "Unknown flag in XLA_FLAGS: --xla_no_such_flag" in done.stderr


@pytest.mark.parametrize(
    ("installed", "files", "platforms"),
    [
        ((), (), None),
        (("libtpu", "jax_cuda12_plugin"), (), "cpu"),
        (("libtpu", "jax_cuda12_plugin"), ("/dev/nvidia0",), "cuda,cpu"),
        (("libtpu", "jax_cuda13_plugin"), ("/dev/vfio/0",), "tpu,cpu"),
        (("jax_cuda12_plugin",), ("/dev/nvidia0",), None),
        (("libtpu", "jax_rocm7_plugin"), ("/dev/kfd",), "rocm,cpu"),
    ],
)
def test_compilers_of_absent_accelerators_are_not_looked_for(
    monkeypatch, installed, files, platforms
):
    monkeypatch.setattr(devices, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(devices, "glob", lambda sign: [f for f in files if fnmatch(f, sign)])
    assert devices.platforms_here() == platforms


def test_what_the_user_says_of_platforms_wins(monkeypatch):
    code = (
        "from pat_jax.common import devices; devices.platforms_here = lambda: 'tpu,cpu'\n"
        "devices.configure(1); import jax; print(jax.config.jax_platforms)"
    )
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.split() == ["cpu"]


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
