"""The table of programs, which are compiled in parallel ahead of time, or when looked up."""

import hashlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import jax

from pat_jax.common.devices import Device
from pat_jax.common.hosts.together import process_group
from pat_jax.common.owners import is_absent
from pat_jax.common.pytree import with_sharding, without_shards
from pat_jax.planning.types import Split

log = logging.getLogger(__name__)

Program = Callable[..., Any]

# XLA's options on GPUs. Programs without a length, such as those that move weights or pages, run a
# few times in an iteration: to tune their kernels takes longer than it saves.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_experimental_enable_fusion_autotuner": False}
# XLA's default and WHILE, which captures the loop of a burst: then the burst is one CUDA graph.
IN_A_GRAPH = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,"
    "DYNAMIC_SLICE_FUSION,WHILE"
}


class Key(NamedTuple):
    """Identifies a program: what it does, in which layout and for which sizes."""

    name: str
    split: Split
    rows: int = 0  # rows of a replica; in programs that move pages, pages of a replica
    length: int = 0  # tokens of a row
    target: Split | None = None  # the layout after a switch
    part: int = 0  # number of the first chunk of weights that it reshards
    num_draft_tokens: int = 0  # draft tokens per row for which a decode step has room

    @property
    def words(self) -> str:
        """The key as text for logs."""
        sizes = f", {self.rows} rows of {self.length} tokens" if self.length else ""
        to = "" if self.target in (None, self.split) else f" to {self.target}"
        return f"{self.name} {self.split}{to}{sizes}"


def compiler_options(key: Key, platform: str) -> Mapping[str, Any]:
    """Returns XLA's options for a program. On CPUs and TPUs there are none. Those that the user has
    set for all programs are left out."""
    if platform != "gpu":
        return {}
    chosen = {} if key.length else UNTUNED
    chosen = IN_A_GRAPH if key.name == "decode" else chosen
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in chosen.items() if name not in flags}


@dataclass(frozen=True)
class _Declared:
    """A function to jit, with the shapes and shardings of its arguments."""

    key: Key
    function: Callable
    args: Sequence[Any]
    jit_options: Mapping[str, Any]

    def lower(self, *, has_options: bool = True) -> jax.stages.Lowered:
        platform = next((device.platform for device in self.devices), "")
        options = compiler_options(self.key, platform) if has_options else {}
        made = jax.jit(self.function, compiler_options={**options}, **self.jit_options)
        return made.lower(*self.args)

    @property
    def devices(self) -> frozenset[Device]:
        of_args = (getattr(x, "sharding", None) for x in jax.tree.leaves(self.args))
        of_results = jax.tree.leaves(self.jit_options.get("out_shardings"))
        devices = frozenset[Device]()
        return devices.union(*(x.device_set for x in (*of_args, *of_results) if x))

    @property
    def is_absent(self) -> bool:
        """Whether this process owns none of the program's devices."""
        return is_absent(self.devices)

    def without_shards(self) -> Program:
        """Returns a stand-in for a program that only other processes run. It computes nothing, and
        returns arrays of which this process has no shard."""

        @cache
        def results() -> Any:
            shapes = jax.eval_shape(self.function, *self.args)
            return with_sharding(
                shapes, jax.tree.broadcast(self.jit_options["out_shardings"], shapes)
            )

        return lambda *args: without_shards(results())


@cache
def _log_refused(error: str) -> None:
    log.info("programs are compiled without XLA options that this version refuses: %s", error)


class ProgramTable:
    """Programs that are declared first, then compiled together, and looked up by key.

    One thread may compile programs while another looks up and runs others. Programs that run only
    on devices of other processes are not compiled; they return arrays without shards here.
    """

    def __init__(self) -> None:
        self._declared: dict[Key, _Declared] = {}
        self._compiled: dict[Key, Program] = {}
        self.compile_seconds: dict[Key, float] = {}
        self.waited_s = 0.0  # seconds spent compiling programs when they were looked up
        # Of equal programs the first is compiled and the others are read from JAX's cache on disk,
        # where an entry that is just being written must not be read.
        self._of_text: defaultdict[str, Lock] = defaultdict(Lock)
        self._of_key: defaultdict[Key, Lock] = defaultdict(Lock)

    def declare(self, key: Key, fun: Callable, *args: Any, **jit_options: Any) -> None:
        """Declares `jax.jit(fun, **jit_options)` for `args`, arrays' shapes; it is traced later."""
        if key not in self._compiled:
            self._declared[key] = _Declared(key, fun, args, jit_options)

    def compile_all(
        self,
        *,
        threads: int,
        progress: Callable[[int, int], None] | None = None,
        only: Callable[[Key], bool] = lambda key: True,
    ) -> None:
        """Compiles all programs that are declared, not compiled yet, and accepted by `only`.

        Returns when all processes have compiled theirs, because communication, once begun, fails
        if another process takes half a minute longer."""
        pool = ThreadPoolExecutor(threads)
        try:
            futures = [pool.submit(self.compile, key) for key in self.missing() if only(key)]
            for done, future in enumerate(as_completed(futures), start=1):
                future.result()
                # one host may have them all on its disk
                process_group().reach_point("compiled programs")
                if progress:
                    progress(done, len(futures))
        finally:  # who stops here does not wait for what is still being compiled
            pool.shutdown(wait=False, cancel_futures=True)
        process_group().gather("compiled programs", None)

    def missing(self) -> list[Key]:
        """Returns the keys of programs that are declared and not compiled yet."""
        return list(self._declared)

    def lower(self, key: Key) -> jax.stages.Lowered:
        """Returns a declared program, traced and lowered for the compiler."""
        return self._declared[key].lower()

    def compile(self, key: Key) -> None:
        """Compiles a declared program, unless another thread has done so. Notes the seconds that
        compiling took. Raises KeyError if no program of that key was declared."""
        with self._of_key[key]:
            if key in self._compiled:
                return
            if key not in self._declared:
                raise KeyError(f"program {key} was never declared.")
            start = time.perf_counter()
            self._compiled[key] = self._compile(self._declared[key])
            self.compile_seconds[key] = time.perf_counter() - start
            del self._declared[key]

    def _compile(self, declared: _Declared) -> Program:
        if declared.is_absent:
            return declared.without_shards()
        lowered = declared.lower()
        with self._of_text[hashlib.sha256(lowered.as_text().encode()).hexdigest()]:
            try:
                return lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                if not str(error).startswith("INVALID_ARGUMENT"):
                    raise
                compiled = declared.lower(has_options=False).compile()
                _log_refused(str(error))
                return compiled

    def __getitem__(self, key: Key) -> Program:
        """Returns a program; compiles it if it is not compiled yet. Raises KeyError if no program
        of that key was declared."""
        process_group().reach_point(key.name)  # who starts a program does not hang
        if key not in self._compiled:
            start = time.perf_counter()
            self.compile(key)
            waited_s = time.perf_counter() - start
            self.waited_s += waited_s
            log.info("compiled %s, which was needed now, in %.1f s", key.words, waited_s)
        return self._compiled[key]

    def __contains__(self, key: Key) -> bool:
        return key in self._compiled

    def __iter__(self) -> Iterator[Key]:
        # A copy of all keys, made in one step: another thread may add to them meanwhile.
        return iter(list(self._compiled))

    def keys(self, name: str) -> Iterable[Key]:
        return [key for key in self if key.name == name]

    def bytes_taken(self, key: Key) -> int | None:
        """Returns the bytes of a device that the program needs in addition to its arguments:
        temporaries, and results that do not reuse a donated argument. None if the backend does not
        report them."""
        if not isinstance(program := self[key], jax.stages.Compiled):
            return None  # it is of other processes
        if (stats := program.memory_analysis()) is None:
            return None
        results = stats.output_size_in_bytes - stats.alias_size_in_bytes
        return stats.temp_size_in_bytes + max(0, results)
