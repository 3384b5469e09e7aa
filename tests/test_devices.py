"""What `configure` sets up, seen from a fresh process: it acts on the whole one."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import numpy as np
from pat_jax.devices import configure

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

    assert faults(True) <= 4 < faults(False)
