"""Pins the world: eight CPU devices, no rank promotion, compiled programs kept between runs.

Runs before any test module is imported, and so before any backend starts.
"""

import faulthandler
import gc
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxlib.version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name that is nothing here is asked of nobody
# LLVM's optimizations, and the emitters that write a program in MLIR first, take three quarters of what
# compiling does here; XLA's own optimizations, which tests look at, stay. The slow tests run what users
# run: `XLA_FLAGS= python -m pytest -m slow`.
if os.environ["JAX_PLATFORMS"] == "cpu":  # tests/gpu are compiled as users compile
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
        # Later ones have no other emitters; a flag that XLA does not know ends the process.
        + " --xla_cpu_use_fusion_emitters=false" * (jaxlib.version.__version_info__ < (0, 11)),
    )

import jax
import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

# All processes of a run use it: what one is still writing another compiles (see `filterwarnings`).
# JAX's own variable names another, which several checkouts can share.
OWN_CACHE = Path(__file__).parent.parent / ".cache" / "jax"
CACHE = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or OWN_CACHE)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# Where each operation stands in the source is written into every program: a tenth of a cold run.
jax.config.update("jax_traceback_in_locations_limit", 0)

settings.register_profile("pat_jax", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("pat_jax")


SHARED = r"^from (fakes import .*\bsubject|two_devices import .*\bengine)\b"


class FilesAndEngines(LoadFileScheduling):
    """`--dist loadfile`, but files which share engines go to one process.

    These are `fakes.subject` and `two_devices.engine`.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        source = (self.config.rootpath / file).read_text(encoding="utf-8")
        return "engines" if re.search(SHARED, source, re.M) else file


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesAndEngines | None:
    return FilesAndEngines(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True, scope="session")
def profiles_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test plans by what another has measured, on a made-up clock perhaps."""
    from pat_jax.run.start import prepare, profiles

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "KEPT_DIR", tmp_path_factory.mktemp("kept"))
        patch.setattr(profiles, "KEPT_DIR", tmp_path_factory.mktemp("empty"))
        yield


@pytest.fixture(autouse=True, scope="session")
def one_text_process() -> Iterator[None]:
    """All chat templates share a process, which takes a second or two of a processor to start."""
    from pat_jax.rl.text import chat_template
    from pat_jax.rl.text.text_worker import TextWorker

    shared: list[TextWorker] = []

    def take() -> TextWorker:
        if not shared or shared[0].process.poll() is not None:
            shared[:] = [TextWorker()]
        return shared[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "take", take)
        yield


@pytest.fixture
def own_text_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a chat template that may end its process."""
    from pat_jax.rl.text import chat_template
    from pat_jax.rl.text.text_worker import TextWorker

    monkeypatch.setattr(chat_template, "take", TextWorker)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that ran in this process, for a module's tests too, keeps its log from nobody else."""
    package = logging.getLogger("pat_jax")
    package.propagate = True
    before = package.handlers[:], package.level, package.propagate, logging.raiseExceptions
    yield
    for handler in package.handlers:
        if handler not in before[0]:
            handler.close()
    package.handlers[:], level, package.propagate, logging.raiseExceptions = before
    package.setLevel(level)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """After the time that `PAT_JAX_SLOW_UNTIL` names, in seconds since 1970, no slow test begins."""
    until = float(os.environ.get("PAT_JAX_SLOW_UNTIL", "inf"))
    if item.get_closest_marker("slow") and time.time() > until:
        pytest.skip("left out: the hour of CI is nearly over")


NOT_CAPTURED = pytest.StashKey[int]()  # a copy of stderr


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NOT_CAPTURED] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that its timeout does not end, ends this process after another minute, and says where
    all threads are: the signal of a timeout reaches neither native code nor what cleans up after it."""
    marker, asked = item.get_closest_marker("timeout"), item.config.getoption("timeout")
    everywhere = item.config.getini("timeout") if asked is None else asked
    if seconds := marker.args[0] if marker else float(everywhere):  # 0: no timeout
        stderr = item.config.stash[NOT_CAPTURED]
        faulthandler.dump_traceback_later(seconds + 60, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_finish() -> None:
    """What has been imported stays: without it, each collection of garbage looks through it all."""
    gc.freeze()


MOST_MAPS = 20_000


def pytest_runtest_teardown(item: pytest.Function, nextitem: pytest.Function | None) -> None:
    """Frees what a file has compiled for itself; what all files compile stays while there is room.

    XLA:CPU maps a program into memory in some twenty pieces; Linux allows a process 65,530 of them, and
    the one too many is a segmentation fault.
    """
    if nextitem is not None and nextitem.path == item.path:
        return
    _forget(item.module)
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


def _forget(module: Any) -> None:
    """What its cached functions hold."""
    for value in vars(module).values():
        if hasattr(value, "cache_clear") and value.__module__ == module.__name__:
            value.cache_clear()
