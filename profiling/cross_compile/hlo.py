"""Reads a compiled program's text: its instructions, and the collectives among them."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_ITEM_BITS = {
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2", "f8e4m3", "f8e8m0fnu"), 8),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    **dict.fromkeys(("token", "opaque"), 0),
}
_COLLECTIVE = re.compile(
    r" = (?P<shape>.*?) (?P<name>all-reduce|all-gather|all-to-all|ragged-all-to-all|"
    r"reduce-scatter|collective-permute|collective-broadcast)(?P<started>-start)?\("
)
_CALLED = re.compile(
    r"(body|condition|calls|to_apply|true_computation|false_computation)=%([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Collective:
    name: str
    num_bytes: int  # of its result, on one device
    depth: int  # of the loops around it
    group: int  # devices that take part together; of a permutation, the pairs that talk

    @property
    def received(self) -> float:
        """Bytes that come from other devices, of an all-to-all or all-gather."""
        return self.num_bytes * (self.group - 1) / self.group


Bodies = Mapping[str, Sequence[str]]  # the lines of each computation


def computations(text: str) -> tuple[str, Bodies]:
    """The name of the entry of an HLO module, and the lines of every computation by its name."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if header:
            name = header[2]
            bodies[name] = []
            entry = name if header[1] else entry
        elif name:
            bodies[name].append(line)
    return entry, bodies


def called(line: str) -> list[tuple[str, str]]:
    """The computations that a line calls, each with its role: body, condition, calls, branch …"""
    branches = [
        ("branch", callee)
        for names in _BRANCHES.findall(line)
        for callee in re.findall(r"%([\w.-]+)", names)
    ]
    return [*_CALLED.findall(line), *branches]


def collectives(text: str, computation: str = "") -> list[Collective]:
    """Collectives of an HLO module, in the order of a walk from its entry, or from another computation."""
    entry, bodies = computations(text)
    return list(_walk(bodies, computation or entry, 0))


def _walk(bodies: Bodies, name: str, depth: int) -> Iterator[Collective]:
    for line in bodies[name]:
        found = _COLLECTIVE.search(line)
        if found:
            size = shape_bytes(found["shape"])
            if found["started"] and found["name"] == "all-gather":
                size -= size // (_group(line) + 1)  # its operand is part of the result's type
            yield Collective(found["name"], size, depth, _group(line))
            continue
        for role, callee in called(line):
            yield from _walk(bodies, callee, depth + (role in ("body", "condition")))


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Type and dimensions of each array in what HLO writes of a shape."""
    found = re.findall(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]", shape)
    return [(kind, tuple(int(n) for n in dims.split(",") if n)) for kind, dims in found]


def shape_bytes(shape: str) -> int:
    """Bytes of all arrays in `shape`, padding of tiles left out."""
    return sum(_ITEM_BITS[kind] * math.prod(dims) for kind, dims in arrays(shape)) // 8


def _group(line: str) -> int:
    """Devices in one replica group, in any of the three ways that HLO writes them; pairs of a permutation."""
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
    if pairs:
        return pairs[1].count("{")
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return listed[1].count(",") + 1
    by_shape = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if by_shape:
        return int(by_shape[1])
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", line))
    named = re.search(r"\) \{([^}]*)\}|\] \{([^}]*)\}", line)
    assert sizes and named, f"replica groups in a form not known here: {line}"
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[0]))
