"""Reads a compiled program's text: its instructions, and the collectives among them."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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
    times: int = 1  # that one run of the module does it, where trips of loops are given
    hosts: int = 1  # that such a group is spread over, at most

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


def collectives(
    text: str, computation: str = "", *, trips: Mapping[str, int] | None = None, per_host: int = 0
) -> list[Collective]:
    """Collectives of an HLO module, in the order of a walk from its entry, or from another
    computation.

    Args:
      per_host: devices of each host, in the order of the program's partitions; 0: there is one
        host.
      trips: how often the bodies of loops run, by name (`hlo_loops.loop_trips`); once where not
        given.
    """
    entry, bodies = computations(text)
    every = []
    for line, depth, times in _walk(bodies, computation or entry, trips or {}, 0, 1):
        found = _COLLECTIVE.search(line)
        assert found
        # What starts one has its operands in its type, the results second; except for sums.
        is_second = found["started"] and found["name"] != "all-reduce"
        shape = _second(found["shape"]) if is_second else found["shape"]
        groups = _groups(line)
        # Devices that take part together; of a permutation, the pairs that talk.
        members = len(groups if found["name"] == "collective-permute" else groups[0])
        hosts = max(len({i // per_host for i in group}) for group in groups) if per_host else 1
        of = depth, members, times, hosts
        every.append(Collective(found["name"], shape_bytes(shape), *of))
    return every


def _walk(
    bodies: Bodies, name: str, trips: Mapping[str, int], depth: int, times: int
) -> Iterator[tuple[str, int, int]]:
    """Lines that are collectives, the loops around each, and how often it runs."""
    # A TPU's fusions that multiply while a collective goes on, and those that wait for it, have it inside
    # again.
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
            yield line, depth, times


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
    """Type and dimensions of each array in what HLO writes of a shape."""
    found = re.findall(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]", shape)
    return [(kind, tuple(int(n) for n in dims.split(",") if n)) for kind, dims in found]


def shape_bytes(shape: str) -> int:
    """Bytes of all arrays in `shape`, padding of tiles left out."""
    return sum(_ITEM_BITS[kind] * math.prod(dims) for kind, dims in arrays(shape)) // 8


def _groups(line: str) -> list[list[int]]:
    """The devices of each group of a collective, in any of the ways that HLO writes them; of a permutation,
    the pairs that talk."""
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
    """`[2,8]T(1,0)`: all devices in a row, in this shape, its axes in this order, in a row again."""
    shape, _, axes = text.partition("T")
    devices = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return (devices.transpose(_numbers(axes)) if axes else devices).reshape(-1)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
