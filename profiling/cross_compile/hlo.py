"""Reads a compiled program's text: its instructions, its collectives, the trips of its loops."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pat_jax.profiling.predict.update_work import Collective

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
_INSTRUCTION = re.compile(
    r"\s*(?P<root>ROOT )?%(?P<name>[\w.-]+) = (?P<shape>.*?) (?P<opcode>[a-z][a-z0-9-]*)\((?P<rest>.*)$"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


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


def collectives(
    text: str, computation: str = "", *, trips: Mapping[str, int] | None = None, per_host: int = 0
) -> list[Collective]:
    """The collectives of an HLO module, in the order of a walk from its entry, or from
    `computation`.

    Args:
      per_host: devices of each host, in the order of the program's partitions; 0: one host.
      trips: how often the bodies of loops run, by name (`loop_trips`); by default once.
    """
    entry, bodies = computations(text)
    every = []
    for line, around, depth, times in _walk(bodies, computation or entry, trips or {}, 0, 1):
        found = _COLLECTIVE.search(line)
        assert found
        # The type of a "-start" has operands first and results second, except for all-reduces.
        is_second = found["started"] and found["name"] != "all-reduce"
        shape = _second(found["shape"]) if is_second else found["shape"]
        groups = _groups(line)
        # Devices of a group; for a permutation, the number of its pairs.
        members = len(groups if found["name"] == "collective-permute" else groups[0])
        hosts = max(len({i // per_host for i in group}) for group in groups) if per_host else 1
        kind, num_bytes = found["name"], shape_bytes(shape)
        if around.startswith("all-reduce-scatter"):  # a TPU's fusion that keeps a part of the sum
            kind, num_bytes = "reduce-scatter", num_bytes // members
        every.append(Collective(kind, num_bytes, members, depth, times, hosts))
    return every


def _walk(
    bodies: Bodies, name: str, trips: Mapping[str, int], depth: int, times: int
) -> Iterator[tuple[str, str, int, int]]:
    """Lines with a collective, each with its computation, the number of loops around it, and how
    often it runs."""
    # Fusions of a TPU that multiply during a collective, or wait for it, have that collective
    # inside again.
    goes_on = name.startswith("async_collective_fusion") or any(
        '"AsyncCollectiveDone' in line for line in bodies[name]
    )
    for line in bodies[name]:
        found = _COLLECTIVE.search(line)
        if found is None:
            for role, callee in called(line):
                inside = depth + (role in ("body", "condition"))
                yield from _walk(bodies, callee, trips, inside, times * trips.get(callee, 1))
        elif not goes_on:
            yield line, name, depth, times


def _second(shape: str) -> str:
    """The second part of a tuple's shape."""
    parts, depth = [""], 0
    for char in shape[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return parts[1]


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Type and dimensions of each array in a shape as HLO writes it."""
    found = re.findall(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]", shape)
    return [(kind, tuple(int(n) for n in dims.split(",") if n)) for kind, dims in found]


def shape_bytes(shape: str) -> int:
    """Bytes of all arrays in `shape`, without the padding of tiles."""
    return sum(_ITEM_BITS[kind] * math.prod(dims) for kind, dims in arrays(shape)) // 8


def _groups(line: str) -> list[list[int]]:
    """The devices of each group of a collective, in any of the forms of HLO; for a permutation,
    its pairs."""
    if named := re.search(r"(?:source_target_pairs|replica_groups)=\{\{(.*?)\}\}", line):
        return [_numbers(group) for group in named[1].split("},{")]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=(\S+?),? ", line + " "):
        return _in_order(iota[2]).reshape(_numbers(iota[1])).tolist()
    mesh = re.search(r"mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? \{(.*?)\}", line)
    assert mesh, f"replica groups in a form not known here: {line}"
    names = re.findall(r"'(\w+)'", mesh[1])
    sizes = [int(n) for n in re.findall(r"=(\d+)", mesh[1])]
    order = _in_order(mesh[2]) if mesh[2] else np.arange(math.prod(sizes))
    along = [names.index(name) for name in re.findall(r"'(\w+)'", mesh[3])]
    others = [axis for axis in range(len(sizes)) if axis not in along]
    devices = order.reshape(sizes).transpose([*others, *along])
    members = math.prod(sizes[axis] for axis in along)
    return devices.reshape(-1, members).tolist()


def _in_order(text: str) -> np.ndarray:
    """The order that `[2,8]T(1,0)` stands for: devices in this shape, its axes transposed so."""
    shape, _, axes = text.partition("T")
    devices = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return (devices.transpose(_numbers(axes)) if axes else devices).reshape(-1)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


@dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    opcode: str
    operands: Sequence[str]
    line: str
    is_root: bool


@dataclass(frozen=True)
class Code:
    """The computations of a module."""

    bodies: Bodies
    _parsed: dict[str, Mapping[str, Instruction]] = field(default_factory=dict)

    def instructions(self, name: str) -> Mapping[str, Instruction]:
        if name not in self._parsed:
            found = (_parse(line) for line in self.bodies[name])
            self._parsed[name] = {x.name: x for x in found if x is not None}
        return self._parsed[name]

    def trips(
        self, loop: Instruction, parts: Mapping[str, str], around: Mapping[str, Instruction]
    ) -> int:
        """Trips of a loop: as the compiler states, else as its counter shows, else 1."""
        stated = _TRIPS.search(loop.line)
        if stated:
            return int(stated[1])
        condition, body = (self.instructions(parts[name]) for name in ("condition", "body"))
        test, after = (next(x for x in found.values() if x.is_root) for found in (condition, body))
        if test.opcode != "compare" or "direction=LT" not in test.line or after.opcode != "tuple":
            return 1
        counter, limit = (_copied(name, condition) for name in test.operands)
        place = re.search(r"index=(\d+)", counter.line)
        before = around[loop.operands[0]]
        if place is None or counter.opcode != "get-tuple-element" or before.opcode != "tuple":
            return 1
        first = _constant(before.operands[int(place[1])], around)
        last = _constant(limit.name, condition)
        step = _step(body[after.operands[int(place[1])]], place[0], body)
        if first is None or last is None or step is None:
            return 1
        return -(-(last - first) // step)


def loop_trips(text: str) -> dict[str, int]:
    """How often the body of each loop runs, by its name."""
    _, bodies = computations(text)
    code, found = Code(bodies), {}
    for name in bodies:
        around = code.instructions(name)
        for x in around.values():
            if x.opcode == "while":
                parts = dict(called(x.line))
                found[parts["body"]] = code.trips(x, parts, around)
    return found


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


def _constant(name: str, around: Mapping[str, Instruction]) -> int | None:
    """The whole number that `name` stands for; None if it is not a constant."""
    found = re.search(r" constant\((-?\d+)\)", _copied(name, around).line)
    return int(found[1]) if found else None


def _copied(name: str, around: Mapping[str, Instruction]) -> Instruction:
    """The instruction that `name` copies, or itself if it copies none."""
    x = around[name]
    while x.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        x = around[x.operands[0]]
    return x


def _step(x: Instruction, place: str, body: Mapping[str, Instruction]) -> int | None:
    """What a loop's body adds to its counter, at `place` of the carried tuple; None if unknown."""
    if x.opcode != "add":
        return None
    terms = [_copied(name, body) for name in x.operands]
    is_counter = [y.opcode == "get-tuple-element" and y.line.count(place) == 1 for y in terms]
    return _constant(x.operands[is_counter.index(False)], body) if sum(is_counter) == 1 else None
