"""Reads a compiled program's text: what it sends, and the operations of its matrix products.

A loop runs as often as the compiler states or its counter shows, else once.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pat_jax.profiling.cross_compile.compiled import CompiledProgram

_COLLECTIVE = re.compile(
    r" = (?P<shape>.*?) (?P<name>all-reduce|all-gather|all-to-all|ragged-all-to-all|"
    r"reduce-scatter|collective-permute|collective-broadcast)(?P<started>-start)?\("
)
_CALLED = re.compile(r"(body|condition|calls|to_apply|\w+_computation)=%([\w.-]+)")
_INSTRUCTION = re.compile(
    r"\s*(?P<root>ROOT )?%(?P<name>[\w.-]+) = (?P<shape>.*?) (?P<opcode>[a-z][a-z0-9-]*)\((?P<rest>.*)$"
)
_WITHOUT_KERNEL = ("get-tuple-element", "tuple", "bitcast", "parameter", "constant", "partition-id")
Bodies = Mapping[str, Sequence[str]]  # the lines of each computation


class Sent(NamedTuple):
    """A collective, and how often it occurs."""

    kind: str
    num_bytes: int  # of its result
    group: int  # devices of a group; for a permutation, the number of pairs
    depth: int = 0  # number of loops around it; 2 inside a decode step
    count: int = 1
    hosts: int = 1  # over which a group is spread

    def leaving(self, per_host: int) -> float:
        """The least bytes that have to leave each host: what its devices share is sent once."""
        if self.kind == "collective-permute":  # it is not known how many pairs cross hosts
            return float(self.count * self.num_bytes * per_host * (self.hosts > 1))
        members = self.group / self.hosts  # of a group, on a host
        times = {"all-reduce": 2.0, "reduce-scatter": self.group, "all-to-all": members}
        sent = times.get(self.kind, 1.0) * self.num_bytes * (1 - 1 / self.hosts)
        return self.count * sent * per_host / members


def collectives(
    text: str, computation: str = "", *, per_host: int = 0, in_loops: bool = False
) -> list[Sent]:
    """The collectives of an HLO module, in the order of a walk from its entry or `computation`. A
    host has `per_host` devices, 0: all. With `in_loops` those of a loop count once per trip."""
    entry, bodies = computations(text)
    trips, every = loop_trips(_parsed(bodies)) if in_loops else {}, []
    for line, around, depth, times in _walk(bodies, computation or entry, trips, 0, 1):
        found = _COLLECTIVE.search(line)
        assert found
        groups, kind, shape = _groups(line), found["name"], found["shape"]
        # The type of a "-start" has operands first and results second, except for all-reduces.
        is_second = found["started"] and kind != "all-reduce"
        num_bytes = shape_bytes(_second(shape) if is_second else shape)
        members = len(groups if kind == "collective-permute" else groups[0])
        hosts = max(len({i // per_host for i in group}) for group in groups) if per_host else 1
        if around.startswith("all-reduce-scatter"):  # a TPU's fusion that keeps a part of the sum
            kind, num_bytes = "reduce-scatter", num_bytes // members
        every.append(Sent(kind, num_bytes, members, depth, times, hosts))
    return every


def sent_by(texts: Path, program: CompiledProgram) -> list[Sent]:
    """What a program sends over links, at the largest depth whose text `compile_for` has written."""
    name = f"{program}_{program.compiled_layers[-1]}_*.txt".replace(" ", "_")
    every = [one for path in texts.glob(name) for one in collectives(path.read_text())]
    return [one for one in every if one.group > 1 or one.kind == "collective-permute"]


def flops(text: str) -> int:
    """Operations of a module's products, without kernels; of several branches the cheapest."""
    entry, bodies = computations(text)
    code = _parsed(bodies)
    return _products(code, entry, loop_trips(code))


def step_kernels(text: str) -> int:
    """The number of kernels that a GPU runs in one step of a decode burst. The step is the loop
    with the most calls of Pallas kernels; a conditional counts as one kernel."""
    _, bodies = computations(text)
    calls = {name: sum("xla.gpu.triton" in x for x in body) for name, body in bodies.items()}
    step = bodies[max(calls, key=lambda name: calls[name])]
    opcodes = [found["opcode"] for line in step if (found := _INSTRUCTION.match(line))]
    return sum(opcode not in _WITHOUT_KERNEL for opcode in opcodes)


def largest_copy(text: str) -> int:
    """Bytes of the largest array that a program copies."""
    _, bodies = computations(text)
    found = (_INSTRUCTION.match(line) for body in bodies.values() for line in body)
    return max((shape_bytes(x["shape"]) for x in found if x and x["opcode"] == "copy"), default=0)


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
    branches = re.findall(r"branch_computations=\{([^}]*)\}", line)
    every = [("branch", name) for names in branches for name in re.findall(r"%([\w.-]+)", names)]
    return [*_CALLED.findall(line), *every]


def _walk(
    bodies: Bodies, name: str, trips: Mapping[str, int], depth: int, times: int
) -> Iterator[tuple[str, str, int, int]]:
    """Lines with a collective, each with its computation, the loops around it, and its runs."""
    # Fusions of a TPU that multiply during a collective, or wait for it, have it inside again.
    goes_on = name.startswith("async_collective_fusion") or any(
        '"AsyncCollectiveDone' in line for line in bodies[name]
    )
    for line in bodies[name]:
        if _COLLECTIVE.search(line) is None:
            for role, callee in called(line):
                inside = depth + (role in ("body", "condition"))
                yield from _walk(bodies, callee, trips, inside, times * trips.get(callee, 1))
        elif not goes_on:
            yield line, name, depth, times


def _second(shape: str) -> str:
    """The second part of a tuple's shape."""
    steps = [(char in "([{") - (char in ")]}") for char in shape]
    commas = [i for i, depth in enumerate(np.cumsum(steps)) if depth == 1 and shape[i] == ","]
    return shape[commas[0] + 1 : commas[1] if len(commas) > 1 else -1]


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Type and dimensions of each array in a shape as HLO writes it."""
    found = re.findall(r"\b([a-z][a-z0-9]*)\[([\d,]*)\]", shape)
    return [(kind, tuple(_numbers(dims))) for kind, dims in found]


def shape_bytes(shape: str) -> int:
    """Bytes of all arrays in `shape`, without the padding of tiles."""
    return sum(_bits(kind) * math.prod(dims) for kind, dims in arrays(shape)) // 8


def _bits(kind: str) -> int:
    """Of a type such as bf16 or f8e4m3fn; a token has none."""
    found = re.search(r"\d+", kind)
    return int(found[0]) if found else 8 * (kind == "pred")


def _groups(line: str) -> list[list[int]]:
    """The devices of each group of a collective; for a permutation, its pairs."""
    if named := re.search(r"(?:source_target_pairs|replica_groups)=\{\{(.*?)\}\}", line):
        return [_numbers(group) for group in named[1].split("},{")]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=(\S+?),? ", line + " "):
        return _in_order(iota[2]).reshape(_numbers(iota[1])).tolist()
    mesh = re.search(r"mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? \{(.*?)\}", line)
    assert mesh, f"replica groups in a form not known here: {line}"
    sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
    order = _in_order(mesh[2]) if mesh[2] else np.arange(math.prod(sizes.values()))
    along = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", mesh[3])]
    devices = np.moveaxis(order.reshape(*sizes.values()), along, range(-len(along), 0))
    return devices.reshape(-1, math.prod(devices.shape[-len(along) :])).tolist()


def _in_order(text: str) -> np.ndarray:
    """Devices in the order of a text such as `[2,8]T(1,0)`: a shape, and how axes are turned."""
    shape, axes = _numbers(text.partition("T")[0]), text.partition("T")[2]
    devices = np.arange(math.prod(shape)).reshape(shape)
    return (devices.transpose(_numbers(axes)) if axes else devices).reshape(-1)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


class Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: Sequence[str]
    line: str
    is_root: bool


Around = Mapping[str, Instruction]  # the instructions of a computation, by name


def _parsed(bodies: Bodies) -> Mapping[str, Around]:
    """The instructions of every computation."""
    every = {name: filter(None, map(_parse, lines)) for name, lines in bodies.items()}
    return {name: {x.name: x for x in found} for name, found in every.items()}


def loop_trips(code: Mapping[str, Around]) -> dict[str, int]:
    """How often the body of each loop runs, by its name."""
    found = {}
    for around in code.values():
        for x in around.values():
            if x.opcode == "while":
                parts = dict(called(x.line))
                found[parts["body"]] = _trips(
                    x, code[parts["condition"]], code[parts["body"]], around
                )
    return found


def _trips(loop: Instruction, condition: Around, body: Around, around: Around) -> int:
    if stated := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
        return int(stated[1])
    test, after = (next(x for x in found.values() if x.is_root) for found in (condition, body))
    if test.opcode != "compare" or "direction=LT" not in test.line or after.opcode != "tuple":
        return 1
    counter, limit = (_copied(name, condition) for name in test.operands)
    place, before = re.search(r"index=(\d+)", counter.line), around[loop.operands[0]]
    if place is None or counter.opcode != "get-tuple-element" or before.opcode != "tuple":
        return 1
    first = _constant(before.operands[int(place[1])], around)
    last = _constant(limit.name, condition)
    step = _step(body[after.operands[int(place[1])]], place[0], body)
    return 1 if first is None or last is None or step is None else -(-(last - first) // step)


class Loop(NamedTuple):
    """A loop, and what a round of it reads and writes."""

    count: int  # of rounds
    carried: Sequence[tuple[str, tuple[int, ...]]]  # type and dimensions of each array that it has
    moved: int  # bytes of all operands and results of its instructions


def loops(text: str) -> list[Loop]:
    """The loops of a module, in the order of their computations."""
    code, found = _parsed(computations(text)[1]), []
    for body, count in loop_trips(code).items():
        around = code[body]
        shapes = []
        for x in around.values():
            if x.opcode not in ("get-tuple-element", "tuple", "bitcast", "parameter", "constant"):
                shapes += [x.shape, *(around[name].shape for name in x.operands)]
        (carried,) = (arrays(x.shape) for x in around.values() if x.opcode == "parameter")
        found.append(Loop(count, carried, sum(map(shape_bytes, shapes))))
    return found


def _parse(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if found is None:
        return None
    depths = np.cumsum([(char == "(") - (char == ")") for char in found["rest"]])
    rest = found["rest"][: int(np.argmax(depths < 0))]
    operands = re.findall(r"%([\w.-]+)", rest)
    name, shape, opcode = found["name"], found["shape"], found["opcode"]
    return Instruction(name, shape, opcode, operands, line, found["root"] is not None)


def _constant(name: str, around: Around) -> int | None:
    """The whole number that `name` stands for; None if it is not a constant."""
    found = re.search(r" constant\((-?\d+)\)", _copied(name, around).line)
    return int(found[1]) if found else None


def _copied(name: str, around: Around) -> Instruction:
    """The instruction that `name` copies, or itself if it copies none."""
    x = around[name]
    while x.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        x = around[x.operands[0]]
    return x


def _step(x: Instruction, place: str, body: Around) -> int | None:
    """What a loop's body adds to its counter, at `place` of the carried tuple; None if unknown."""
    if x.opcode != "add":
        return None
    terms = [_copied(name, body) for name in x.operands]
    is_counter = [y.opcode == "get-tuple-element" and y.line.count(place) == 1 for y in terms]
    return _constant(x.operands[is_counter.index(False)], body) if sum(is_counter) == 1 else None


def _products(code: Mapping[str, Around], name: str, trips: Mapping[str, int]) -> int:
    around, total = code[name], 0
    for x in around.values():
        inside = [y for role, y in called(x.line) if role != "condition"]
        each = [trips.get(y, 1) * _products(code, y, trips) for y in inside]
        total += min(each) if x.opcode == "conditional" else sum(each)
        total += 2 * _multiplications(x, around)
    return total


def _multiplications(x: Instruction, around: Around) -> int:
    """Of a `dot`, a convolution, or a library's matrix product; 0 for anything else."""
    if x.opcode == "convolution":
        return _convolved(x, around)
    if x.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.line)
    elif x.opcode == "custom-call" and re.search(r'target="__cublas\S*(gemm|matmul)', x.line):
        contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', x.line)
    else:
        return 0
    assert contracted, f"a matrix product in a form not known here: {x.line}"
    left = arrays(around[x.operands[0]].shape)[0][1]
    return math.prod(arrays(x.shape)[0][1]) * math.prod(left[i] for i in _numbers(contracted[1]))


def _convolved(x: Instruction, around: Around) -> int:
    """Multiplications with values, not with the holes of dilated ones: a TPU's compiler makes one
    convolution of a batch of products, whose window lies mostly in holes."""
    names = re.search(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)", x.line)
    assert names, f"a convolution in a form not known here: {x.line}"
    image, kernel, out = (
        dict(zip(labels, arrays(y.shape)[0][1], strict=True))
        for labels, y in zip(names.groups(), (*(around[y] for y in x.operands), x), strict=True)
    )
    found = out["b"] * out["f"] * kernel["i"]
    window = re.search(r"window=\{([^}]*)\}", x.line)
    parts = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
    for place, name in enumerate(sorted(names[1].replace("b", "").replace("f", ""))):
        stride, pad, dilated, apart = (
            parts[of].split("x")[place].partition("_")[0] if of in parts else default
            for of, default in (("stride", 1), ("pad", 0), ("rhs_dilate", 1), ("lhs_dilate", 1))
        )
        starts = np.arange(out[name])[:, None] * int(stride) - int(pad)
        at = starts + np.arange(kernel[name]) * int(dilated)
        is_inside = (at >= 0) & (at < image[name] * int(apart))
        found *= int((is_inside & (at % int(apart) == 0)).sum())
    return found
