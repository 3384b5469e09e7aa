"""Counts what a compiled program multiplies and what it reads and writes, from its text.

For compilers that report neither, and where a report is of both sides of every choice. A loop whose
trips the compiler knows counts as often; one whose trips only the run knows counts once; of branches
the cheapest counts (a search for top-p, say, is only for those who ask for it). Left out: elementwise
arithmetic; what stays in a TPU's vector memory; and all that kernels do which are not XLA's own (paged
attention reads as much as the sequences are long, which no text says).
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pat_jax.profiling.absent import hlo
from pat_jax.profiling.absent.hlo import Bodies, arrays, called, computations

_INSTRUCTION = re.compile(
    r"\s*(?P<root>ROOT )?%(?P<name>[\w.-]+) = (?P<shape>.*?) (?P<opcode>[a-z][a-z0-9-]*)\((?P<rest>.*)$"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
KERNELS = re.compile(
    r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*|__gpu\$xla\.gpu\.triton|triton_kernel_call)'
)
# What moves nothing: names for what is there, and waiting.
_FREE = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|after-all|domain|partition-id|replica-id|"
    "opt-barrier|async-update|.*-done"
)


@dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    opcode: str
    operands: Sequence[str]
    line: str
    is_root: bool


@dataclass(frozen=True)
class Counts:
    """Of one device and one run."""

    flops: int  # of matrix products, two a multiplication
    num_bytes: int  # read and written

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.flops + other.flops, self.num_bytes + other.num_bytes)

    def times(self, n: int) -> "Counts":
        return Counts(self.flops * n, self.num_bytes * n)


NOTHING = Counts(0, 0)


def count(text: str, *, inside: int = 0) -> Counts:
    """What an HLO module does in one run.

    Args:
      inside: only what lies in as many loops or more, once for a trip of the innermost of them: of a
        decode burst, whose steps are in two, `inside=2` counts one step.
    """
    entry, bodies = computations(text)
    return _Module(bodies, inside).of(entry, 0)


@dataclass(frozen=True)
class _Module:
    bodies: Bodies
    inside: int
    _parsed: dict[str, Mapping[str, Instruction]] = field(default_factory=dict)

    def instructions(self, name: str) -> Mapping[str, Instruction]:
        if name not in self._parsed:
            found = (_parse(line) for line in self.bodies[name])
            self._parsed[name] = {x.name: x for x in found if x is not None}
        return self._parsed[name]

    def of(self, name: str, depth: int) -> Counts:
        instructions, total = self.instructions(name), NOTHING
        for x in instructions.values():
            if x.opcode == "while":
                trips = _TRIPS.search(x.line)
                n = int(trips[1]) if trips and depth >= self.inside else 1
                body = next(callee for role, callee in called(x.line) if role == "body")
                total += self.of(body, depth + 1).times(n)
            elif x.opcode == "conditional":
                branches = [self.of(callee, depth) for _, callee in called(x.line)]
                total += min(branches, key=lambda counts: (counts.num_bytes, counts.flops))
            elif x.opcode in ("call", "async-start"):
                for _, callee in called(x.line):
                    total += self.of(callee, depth)
            elif depth >= self.inside:
                total += self._own(x, instructions)
        return total

    def _own(self, x: Instruction, around: Mapping[str, Instruction]) -> Counts:
        if _FREE.fullmatch(x.opcode) or KERNELS.search(x.line):
            return NOTHING
        flops = _flops(x, around)
        if x.opcode != "fusion":
            return Counts(flops, _moved(x, around))
        body = self.instructions(next(callee for role, callee in called(x.line) if role == "calls"))
        flops += sum(_flops(y, body) for y in body.values())
        return Counts(flops, _fusion_bytes(body))


def _parse(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    depth, end = 1, 0
    for end, char in enumerate(found["rest"]):  # noqa: B007
        depth += (char == "(") - (char == ")")
        if not depth:
            break
    operands = re.findall(r"%([\w.-]+)", found["rest"][:end])
    is_root = found["root"] is not None
    return Instruction(found["name"], found["shape"], found["opcode"], operands, line, is_root)


def _flops(x: Instruction, around: Mapping[str, Instruction]) -> int:
    """Of a `dot`, or of a library's matrix product; 0 of anything else."""
    if x.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.line)
    elif x.opcode == "custom-call" and re.search(r'target="__cublas\S*(gemm|matmul)', x.line):
        contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', x.line)
    else:
        return 0
    if contracted is None:
        raise ValueError(f"a matrix product in a form not known here: {x.line}")
    left = arrays(around[x.operands[0]].shape)[0][1]
    axes = [int(axis) for axis in re.findall(r"\d+", contracted[1])]
    return 2 * math.prod(arrays(x.shape)[0][1]) * math.prod(left[axis] for axis in axes)


def _moved(x: Instruction, around: Mapping[str, Instruction]) -> int:
    """Bytes of an instruction that stands by itself: its operands and its result."""
    written = memory_bytes(x.shape)
    if x.opcode == "slice-start":  # its type has what it slices, the slice, and a flag
        kind, dims = arrays(x.shape)[1]
        return hlo.shape_bytes(f"{kind}[{','.join(map(str, dims))}]")
    if x.opcode.endswith("-start"):  # operands are part of its type
        return written
    if x.opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * written
    if x.opcode in ("dynamic-update-slice", "scatter"):
        return 2 * memory_bytes(around[x.operands[_UPDATE[x.opcode]]].shape)
    return written + sum(memory_bytes(around[y].shape) for y in x.operands if y in around)


def memory_bytes(shape: str) -> int:
    """Of the arrays that lie in a device's main memory."""
    return hlo.shape_bytes(_IN_VECTOR_MEMORY.sub("", shape))


_IN_VECTOR_MEMORY = re.compile(r"\b[a-z][a-z0-9]*\[[\d,]*\]\{[^}]*S\([1-9]\d*\)[^}]*\}")
_UPDATE = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is what they write


def _fusion_bytes(body: Mapping[str, Instruction]) -> int:
    """What a fusion reads of each parameter, and what it writes: of slices only as much as they hold."""
    source: dict[str, str] = {}  # what a name is another view of
    uses: defaultdict[str, list[tuple[Instruction, int]]] = defaultdict(list)
    for x in body.values():
        if x.opcode == "bitcast":
            source[x.name] = source.get(x.operands[0], x.operands[0])
            continue
        for place, operand in enumerate(x.operands):
            uses[source.get(operand, operand)].append((x, place))
    read = 0
    for x in body.values():
        if x.opcode == "parameter":
            parts = [_read(user, place) for user, place in uses[x.name]]
            whole = memory_bytes(x.shape)
            read += whole if None in parts else min(whole, sum(p for p in parts if p is not None))
    root = next(x for x in body.values() if x.is_root)
    roots = root.operands if root.opcode == "tuple" else [root.name]
    return read + sum(_written(body[source.get(name, name)], body) for name in roots)


def _read(user: Instruction, place: int) -> int | None:
    """Bytes that `user` reads of its operand at `place`; None: all."""
    if place:
        return None
    if user.opcode in ("dynamic-slice", "gather", "slice"):
        return memory_bytes(user.shape)
    return 0 if user.opcode in _UPDATE else None


def _written(x: Instruction, body: Mapping[str, Instruction]) -> int:
    if x.opcode in _UPDATE:
        return memory_bytes(body[x.operands[_UPDATE[x.opcode]]].shape)
    return memory_bytes(x.shape)
