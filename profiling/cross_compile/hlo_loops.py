"""Reads the instructions of a compiled program's text, and how often its loops run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pat_jax.profiling.cross_compile.hlo import Bodies, called, computations

_INSTRUCTION = re.compile(
    r"\s*(?P<root>ROOT )?%(?P<name>[\w.-]+) = (?P<shape>.*?) (?P<opcode>[a-z][a-z0-9-]*)\((?P<rest>.*)$"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


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
        """Trips of a loop, as the compiler says; else as its counter shows; else 1."""
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
    """The whole number that `name` stands for; None where it is another thing."""
    found = re.search(r" constant\((-?\d+)\)", _copied(name, around).line)
    return int(found[1]) if found else None


def _copied(name: str, around: Mapping[str, Instruction]) -> Instruction:
    """The instruction that `name` copies, itself where it copies none."""
    x = around[name]
    while x.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        x = around[x.operands[0]]
    return x


def _step(x: Instruction, place: str, body: Mapping[str, Instruction]) -> int | None:
    """What a loop's body adds to its counter, which is at `place` in what it carries."""
    if x.opcode != "add":
        return None
    terms = [_copied(name, body) for name in x.operands]
    is_counter = [y.opcode == "get-tuple-element" and y.line.count(place) == 1 for y in terms]
    return _constant(x.operands[is_counter.index(False)], body) if sum(is_counter) == 1 else None
