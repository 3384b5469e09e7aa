"""The record of what a compiler made of a program for a machine that is not here; also as JSON.

Knows programs by name and numbers. Does not know how they were compiled.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pat_jax.planning.types import Split
from pat_jax.profiling.predict.update_work import Collective

OPERATIONS = ("flops", "bytes_accessed", "product_bytes")  # fields for what a program does


# Fields that are the same at every depth.
IDENTITY = ("name", "split", "target", "rows", "length", "num_draft_tokens", "role")


@dataclass(frozen=True)
class CompiledProgram:
    """One program, or the parts of a reshard together. Bytes are of one device.

    `flops` and `bytes_accessed` are of one run, or of one step of `decode`. Both are counted in the
    program's text, without kernels of attention; `flops` are of matrix products (see `hlo_costs`).
    """

    name: str  # decode, prefill, reshard, view, pack, exchange, exchange_one, unpack, grad, …
    split: Split
    target: Split | None = None  # of a switch
    rows: int = 0  # of a replica; pages if it moves pages; rows of all replicas in training
    length: int = 0  # tokens
    num_draft_tokens: int = 0  # draft tokens of a step, per row
    role: str = ""  # of a further model of the run; empty: the policy, or its reference
    layers: int = 0  # of the model with these numbers
    compiled_layers: tuple[int, ...] = ()  # of the models compiled; without `layers`: extrapolated
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0
    alias_bytes: int = 0  # of results that lie in the memory of arguments
    flops: float = 0.0
    bytes_accessed: float = 0.0
    product_bytes: float = 0.0  # of these, by matrix products and what is fused with them
    collectives: tuple[Collective, ...] = ()
    kernels: tuple[tuple[str, int], ...] = ()  # custom calls by target, with their number
    compile_s: float = 0.0
    error: str | None = None  # of the compiler, if it failed

    @property
    def is_extrapolated(self) -> bool:
        return self.layers not in self.compiled_layers

    @property
    def taken_bytes(self) -> int:
        """Bytes that a run needs beside its arguments."""
        return max(0, self.output_bytes - self.alias_bytes) + self.temp_bytes

    @property
    def identity(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in IDENTITY)

    def __str__(self) -> str:
        towards = f" to {self.target}" if self.target else ""
        whose = f" of the {self.role}" if self.role else ""
        return f"{self.name}{whose} {self.split}{towards}{' with drafts' * (self.num_draft_tokens > 0)}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "CompiledProgram":
        content = content | {
            "split": Split(*content["split"]),
            "target": content["target"] and Split(*content["target"]),
            "compiled_layers": tuple(content["compiled_layers"]),
            "collectives": tuple(Collective(*sent) for sent in content["collectives"]),
            "kernels": tuple((name, count) for name, count in content["kernels"]),
        }
        return cls(**content)


def merged(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Merges equal collectives into one each; returns them sorted."""
    counts: Counter[Collective] = Counter()
    for one in collectives:
        counts[one._replace(count=0)] += one.count
    return tuple(one._replace(count=count) for one, count in sorted(counts.items()))


def together(parts: Sequence[CompiledProgram]) -> CompiledProgram:
    """Returns one record for the parts of a reshard, which run one after the other."""
    kernels: Counter[str] = Counter()
    for part in parts:
        kernels.update(dict(part.kernels))
    summed = ("argument_bytes", "output_bytes", "alias_bytes", *OPERATIONS, "compile_s")
    return replace(
        parts[0],
        **{name: sum(getattr(part, name) for part in parts) for name in summed},
        temp_bytes=max(part.temp_bytes for part in parts),
        collectives=merged(one for part in parts for one in part.collectives),
        kernels=tuple(sorted(kernels.items())),
        error=next((part.error for part in parts if part.error), None),
    )


def at_depth(programs: Iterable[CompiledProgram], layers: int) -> CompiledProgram:
    """The record of a program of a model with `layers`, compiled so, or at two smaller depths.

    Every number is extrapolated as affine in the layers. This is right for arguments, results,
    products and sums. Temporaries are a maximum of sums, which need not be the same sum in a deep
    model: they may come out too small or too large.
    """
    found = sorted(programs, key=lambda program: program.layers)
    whole = [program for program in found if program.layers == layers]
    if whole:
        return whole[0]
    failed = [program for program in found if program.error]
    if failed:
        return replace(failed[0], layers=layers)
    if len(found) != 2:
        raise ValueError(f"{found[0]}: compiled at {len(found)} depths, expected two.")
    a, b = found

    def line(x: float, y: float) -> float:
        return x + (y - x) * (layers - a.layers) / (b.layers - a.layers)

    numbers = {
        name: max(0, type(getattr(a, name))(round(line(getattr(a, name), getattr(b, name)))))
        for name in ("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes")
    }
    kernels = {name: (dict(a.kernels).get(name, 0), count) for name, count in b.kernels}
    return replace(
        b,
        **numbers,
        layers=layers,
        compiled_layers=(a.layers, b.layers),
        **{name: line(getattr(a, name), getattr(b, name)) for name in OPERATIONS},
        collectives=tuple(_collectives(a.collectives, b.collectives, line)),
        kernels=tuple((name, round(line(*counts))) for name, counts in kernels.items()),
        compile_s=a.compile_s + b.compile_s,
    )


def _collectives(
    small: Sequence[Collective], large: Sequence[Collective], line: Callable[[float, float], float]
) -> list[Collective]:
    """Extrapolates the number of equal collectives. If a compiler combines some, sizes differ with
    depth: then all of a kind, group and depth become one entry of their mean size."""
    by_place: defaultdict[tuple[str, int, int, int], tuple[dict[float, int], dict[float, int]]]
    by_place = defaultdict(lambda: ({}, {}))  # counts by bytes
    for i, collectives in enumerate((small, large)):
        for x in collectives:
            by_place[x.kind, x.group, x.depth, x.hosts][i][x.num_bytes] = x.count
    found = []
    for (kind, group, depth, hosts), (before, after) in sorted(by_place.items()):
        if before.keys() == after.keys():
            sizes = {n: round(line(before[n], after[n])) for n in sorted(before)}
        else:
            count = max(1, round(line(sum(before.values()), sum(after.values()))))
            total = line(*(sum(n * times for n, times in x.items()) for x in (before, after)))
            sizes = {round(total / count): count}
        found += [Collective(kind, n, group, depth, c, hosts) for n, c in sizes.items() if c > 0]
    return found
