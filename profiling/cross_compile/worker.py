"""The child process of `compile.py`: compiles an order's programs, and prints a JSON line for each.

The parent sets its environment, which decides the compiler. Reads the order from standard input;
what libraries print goes to standard error.
"""

import hashlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, TextIO

import jax
from jax.experimental import topologies

from pat_jax.common.devices import Device
from pat_jax.common.errors import UserError
from pat_jax.common.json_text import parse_json
from pat_jax.profiling.cross_compile import compiled as records
from pat_jax.profiling.cross_compile.compiled import IDENTITY, CompiledProgram, together
from pat_jax.profiling.cross_compile.jobs import CompileJob, jobs_of
from pat_jax.profiling.cross_compile.target_build import Order, TargetBuild
from pat_jax.profiling.predict.targets import Target

LONGEST_ERROR = 600  # characters


def devices_of(target: Target) -> Sequence[Device]:
    """Returns the devices of `target` as its compiler describes them. Raises UserError if the
    compiler knows no such machine."""
    chip = target.chip
    try:
        if chip.platform == "tpu":
            # The compiler assumes hosts of 2x2 chips; a smaller slice must be stated.
            sizes = zip((2, 2, 1), (*target.topology, 1), strict=False)
            on_host = [min(most, n) for most, n in sizes]
            return topologies.get_topology_desc(
                target.text, platform="tpu", chips_per_host_bounds=on_host
            ).devices
        return topologies.get_topology_desc(
            chip.name,
            platform="cuda",
            target_config=chip.description,
            # Partitions, hosts of one, devices of a host.
            topology=f"1x{target.num_hosts}x{target.devices_per_host}",
        ).devices
    except Exception as error:  # whatever a plug-in raises
        raise UserError(f"target {target}: the compiler refuses it: {sentence_of(error)}") from None


@dataclass(frozen=True)
class Compiler:
    """Compiles jobs, or looks up records of programs with the same text."""

    kept: Path  # folder of records, by content
    machine: str  # what a record depends on besides the program, as text
    texts: Path | None = None  # folder for compiled programs as text; with it nothing is looked up
    # Only the first of equal programs is compiled; the others take its record.
    locks: defaultdict[str, Lock] = field(default_factory=lambda: defaultdict(Lock))

    def run(self, job: CompileJob) -> CompiledProgram:
        try:
            parts = [self._part(job, i, lower()) for i, lower in enumerate(job.parts)]
        except Exception as error:  # of any kind: that it does not compile is a result
            return replace(job.record, error=sentence_of(error))
        return together(parts)

    def _part(self, job: CompileJob, number: int, lowered: jax.stages.Lowered) -> CompiledProgram:
        text = f"{self.machine}\n{job.record.name}\n{lowered.as_text()}"
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        with self.locks[name]:
            return self._found(job, number, self.kept / f"{name}.json", lowered)

    def _kept(self, path: Path) -> CompiledProgram | None:
        """Returns the record in a file; None if it is damaged: the program is then recompiled."""
        try:
            content: Any = parse_json(path.read_bytes())
            return CompiledProgram.from_json(content)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def _found(
        self, job: CompileJob, number: int, path: Path, lowered: jax.stages.Lowered
    ) -> CompiledProgram:
        found = self._kept(path) if path.is_file() and self.texts is None else None
        if found is not None:
            own = (*IDENTITY, "layers", "compiled_layers")
            return replace(found, **{name: getattr(job.record, name) for name in own})
        start = time.perf_counter()
        compiled = lowered.compile()
        record = _described(job.record, compiled)
        if self.texts is not None:
            # Equal parts of one program have a text each.
            name = f"{record}_{record.layers}_{number}_{path.stem[:6]}.txt".replace(" ", "_")
            (self.texts / name).write_text(compiled.as_text() or "", encoding="utf-8")
        record = replace(record, compile_s=round(time.perf_counter() - start, 2))
        partial = path.with_suffix(f".{os.getpid()}")  # another plan may write the same one
        partial.write_text(json.dumps(record.to_json()), encoding="utf-8")
        partial.replace(path)
        return record


def _described(record: CompiledProgram, program: jax.stages.Compiled) -> CompiledProgram:
    memory = program.memory_analysis()
    assert memory is not None  # both compilers report it
    return replace(
        record,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
    )


def sentence_of(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= LONGEST_ERROR else text[:LONGEST_ERROR] + " …"


def main() -> None:
    content = json.loads(sys.stdin.read())
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        os.dup2(2, 1)  # keeps what compilers print out of the answers
        try:
            _answer(content, lines)
        except UserError as error:
            _write_line(lines, refused=str(error))


def _answer(content: dict[str, Any], lines: TextIO) -> None:
    order = Order.from_json(content["order"])
    jobs = jobs_of(TargetBuild(order, devices_of(order.target)))
    chip = order.target.chip
    of_machine = chip.name, chip.description, order.target.topology
    machine = json.dumps([content["versions"], *of_machine, _reading()])
    texts = content["texts"] and Path(content["texts"])
    compiler = Compiler(Path(content["kept"]), machine, texts)
    with ThreadPoolExecutor(content["threads"]) as pool:
        for future in as_completed([pool.submit(compiler.run, job) for job in jobs]):
            _write_line(lines, program=future.result().to_json(), jobs=len(jobs))


def _reading() -> str:
    """Returns a hash of the code that describes programs: records by other code do not count."""
    files = (Path(name) for name in (__file__, records.__file__))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _write_line(lines: TextIO, **content: Any) -> None:
    lines.write(json.dumps(content) + "\n")
    lines.flush()


if __name__ == "__main__":
    main()
