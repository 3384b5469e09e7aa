"""Reads collectives out of a compiled program: which, how many bytes, how deep in loops."""

import math
import re
from dataclasses import dataclass

_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
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


def collectives(text: str) -> list[Collective]:
    """Those of an HLO module, in the order of a walk from its entry."""
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
    return list(_walk(bodies, entry, 0))


def _walk(bodies, name, depth):
    for line in bodies[name]:
        found = _COLLECTIVE.search(line)
        if found:
            size = _num_bytes(found["shape"])
            if found["started"] and found["name"] == "all-gather":
                size -= size // (_group(line) + 1)  # its operand is part of the result's type
            yield Collective(found["name"], size, depth, _group(line))
            continue
        for role, callee in _CALLED.findall(line):
            yield from _walk(bodies, callee, depth + (role in ("body", "condition")))
        for branches in _BRANCHES.findall(line):
            for callee in re.findall(r"%([\w.-]+)", branches):
                yield from _walk(bodies, callee, depth)


def _num_bytes(shape: str) -> int:
    arrays = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", shape)
    return sum(
        _ITEM_BYTES[t] * math.prod(int(n) for n in dims.split(",") if n) for t, dims in arrays
    )


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
