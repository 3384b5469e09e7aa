"""Counts what a compiled program multiplies and what it reads and writes, from its text.

A GPU's compiler reports neither; a TPU's counts every loop's body once, and both sides of every
choice. Here the body of a loop counts once per trip, if the compiler knows the trips or the counter
goes from one constant to another; otherwise it counts once. The cheapest of several branches
counts: a search for top-p, for example, runs only if a request has top-p. Left out are elementwise
arithmetic, data that stay in a TPU's vector memory, and kernels that are not XLA's own (the text
does not show how much paged attention reads).
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import add

import numpy as np

from pat_jax.profiling.cross_compile import hlo
from pat_jax.profiling.cross_compile.hlo import Code, Instruction, arrays, called, computations

KERNELS = re.compile(
    r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*|__gpu\$xla\.gpu\.triton|triton_kernel_call)'
)
# Instructions that move nothing: they name or allocate memory, or wait.
_FREE = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|after-all|domain|partition-id|replica-id|"
    "opt-barrier|async-update|.*-done"
)
_FREE_CALLS = re.compile(
    'custom_call_target="(AllocateBuffer|ConcatBitcast|AssumeGatherIndicesInBound|AsyncCollective)'
)


@dataclass(frozen=True)
class Counts:
    """The counts of one run of a program on one device."""

    flops: int  # of matrix products, two a multiplication
    num_bytes: int  # read and written
    product_bytes: int = 0  # of these, by matrix products and what is fused with them

    @classmethod
    def of(cls, flops: int, num_bytes: int) -> "Counts":
        """The counts of one instruction."""
        return cls(flops, num_bytes, num_bytes if flops else 0)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*map(add, astuple(self), astuple(other)))

    def times(self, n: int) -> "Counts":
        return Counts(*(n * x for x in astuple(self)))


NOTHING = Counts(0, 0)
Use = tuple[Instruction, int]  # an instruction that uses an array, and as which operand


def count(text: str, *, inside: int = 0) -> Counts:
    """The counts of one run of an HLO module.

    Args:
      inside: counts only instructions in at least this many loops, for one trip of each of these.
        The steps of a decode burst are in two loops: `inside=2` counts one step.
    """
    entry, bodies = computations(text)
    return _Module(Code(bodies), inside).of(entry, 0)


@dataclass(frozen=True)
class _Module:
    code: Code
    inside: int

    def of(self, name: str, depth: int) -> Counts:
        instructions, total = self.code.instructions(name), NOTHING
        for x in instructions.values():
            if x.opcode == "while":
                parts = dict(called(x.line))
                n = self.code.trips(x, parts, instructions) if depth >= self.inside else 1
                total += self.of(parts["body"], depth + 1).times(n)
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
        if _FREE.fullmatch(x.opcode) or KERNELS.search(x.line) or _FREE_CALLS.search(x.line):
            return NOTHING
        if x.opcode != "fusion":
            return Counts.of(_flops(x, around), _moved(x, around))
        return Counts.of(self._fused_flops(x), self._fused_bytes(x))

    def _fused(self, x: Instruction) -> Mapping[str, Instruction]:
        return self.code.instructions(dict(called(x.line))["calls"])

    def _fused_bytes(self, x: Instruction) -> int:
        """Bytes that a fusion reads of its parameters and writes; of slices only their own."""
        body = self._fused(x)
        views, uses = _views(body), _uses(body)
        read = 0
        for y in body.values():
            if y.opcode == "parameter":
                part, whole = self._read(uses[y.name]), memory_bytes(y.shape)
                read += whole if part is None else min(whole, part)
        root = next(y for y in body.values() if y.is_root)
        roots = root.operands if root.opcode == "tuple" else [root.name]
        return read + sum(_written(body[views.get(name, name)], body) for name in roots)

    def _read(self, uses: Sequence[Use]) -> int | None:
        """Bytes that `uses` read of one array together; None: all of it."""
        parts = [self._read_by(*use) for use in uses]
        return None if None in parts else sum(part for part in parts if part is not None)

    def _read_by(self, user: Instruction, place: int) -> int | None:
        """Bytes that `user` reads of its operand at `place`; None: all of it."""
        # A fusion inside another one, such as a TPU's slice of what it multiplies.
        if user.opcode == "fusion":
            body = self._fused(user)
            parameter = next(y for y in body.values() if f" parameter({place})" in y.line)
            root = next(y for y in body.values() if y.is_root)
            if _views(body).get(root.name) == parameter.name:
                return None
            return self._read(_uses(body)[parameter.name])
        if place:
            return None
        if user.opcode in ("dynamic-slice", "gather", "slice"):
            return memory_bytes(user.shape)
        return 0 if user.opcode in _UPDATE else None

    def _fused_flops(self, x: Instruction) -> int:
        body = self._fused(x)
        return sum(
            self._fused_flops(y) if y.opcode == "fusion" else _flops(y, body) for y in body.values()
        )


def _flops(x: Instruction, around: Mapping[str, Instruction]) -> int:
    """Operations of a `dot`, a convolution, or a library's matrix product; 0 for anything else."""
    if x.opcode == "convolution":
        return 2 * _convolved(x, around)
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


def _convolved(x: Instruction, around: Mapping[str, Instruction]) -> int:
    """Multiplications of a convolution, which a TPU's compiler makes of matrix products.

    Of a batch of products it makes one too: the batch is a spatial dimension, whose window is as
    large as its input and lies mostly in holes between dilated values. Only values count.
    """
    names = re.search(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)", x.line)
    if names is None:
        raise ValueError(f"a convolution in a form not known here: {x.line}")
    image, kernel, out = (
        dict(zip(labels, arrays(y.shape)[0][1], strict=True))
        for labels, y in zip(names.groups(), (*(around[y] for y in x.operands), x), strict=True)
    )
    found = out["b"] * out["f"] * kernel["i"]
    window = re.search(r"window=\{([^}]*)\}", x.line)
    parts = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
    for place, name in enumerate(sorted(names[1].replace("b", "").replace("f", ""))):

        def part(of: str, default: str, place: int = place) -> str:
            return parts[of].split("x")[place] if of in parts else default

        at = (
            np.arange(out[name])[:, None] * int(part("stride", "1"))
            - int(part("pad", "0_0").partition("_")[0])
            + np.arange(kernel[name])[None, :] * int(part("rhs_dilate", "1"))
        )
        apart = int(part("lhs_dilate", "1"))
        found *= int(((at >= 0) & (at < image[name] * apart) & (at % apart == 0)).sum())
    return found


def _moved(x: Instruction, around: Mapping[str, Instruction]) -> int:
    """Bytes of an instruction outside of fusions: its operands and its result."""
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
    """Bytes of the arrays of `shape` that are in a device's main memory."""
    return hlo.shape_bytes(_IN_VECTOR_MEMORY.sub("", shape))


_IN_VECTOR_MEMORY = re.compile(r"\b[a-z][a-z0-9]*\[[\d,]*\]\{[^}]*S\([1-9]\d*\)[^}]*\}")
_UPDATE = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is what they write


def _views(body: Mapping[str, Instruction]) -> dict[str, str]:
    """The array that each bitcast is a view of."""
    found: dict[str, str] = {}
    for x in body.values():
        if x.opcode == "bitcast":
            found[x.name] = found.get(x.operands[0], x.operands[0])
    return found


def _uses(body: Mapping[str, Instruction]) -> Mapping[str, Sequence[Use]]:
    """The uses of each array, directly or through a view."""
    views, found = _views(body), defaultdict[str, list[Use]](list)
    for x in body.values():
        if x.opcode != "bitcast":
            for place, operand in enumerate(x.operands):
                found[views.get(operand, operand)].append((x, place))
    return found


def _written(x: Instruction, body: Mapping[str, Instruction]) -> int:
    if x.opcode in _UPDATE:
        return memory_bytes(body[x.operands[_UPDATE[x.opcode]]].shape)
    return memory_bytes(x.shape)
