"""The record of a program that was compiled for a machine that is not here; also as JSON.

Knows programs by name and numbers. Does not know how they were compiled.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pat_jax.planning.types import Split

# Fields that are the same at every depth.
IDENTITY = ("name", "split", "target", "rows", "length", "num_draft_tokens", "role")


@dataclass(frozen=True)
class CompiledProgram:
    """One program, or the parts of a reshard together. Bytes are of one device."""

    name: str  # decode, prefill, reshard, view, pack, exchange, exchange_one, unpack, grad, …
    split: Split
    target: Split | None = None  # the layout after a switch
    rows: int = 0  # rows of a replica, in training of all replicas; or pages that are moved
    length: int = 0  # tokens
    num_draft_tokens: int = 0  # draft tokens of a step, per row
    role: str = ""  # the model's role in the run; empty: the policy, or its reference
    layers: int = 0  # number of layers of the model that the numbers below are of
    compiled_layers: tuple[int, ...] = ()  # of the models compiled; without `layers`: extrapolated
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0
    alias_bytes: int = 0  # bytes of results that reuse memory of arguments
    compile_s: float = 0.0
    error: str | None = None  # the compiler's error, if it failed

    @property
    def is_extrapolated(self) -> bool:
        return self.layers not in self.compiled_layers

    @property
    def taken_bytes(self) -> int:
        """Bytes that an execution needs besides its arguments."""
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
        }
        return cls(**content)


def together(parts: Sequence[CompiledProgram]) -> CompiledProgram:
    """Returns one record for the parts of a reshard, which run one after the other."""
    summed = ("argument_bytes", "output_bytes", "alias_bytes", "compile_s")
    return replace(
        parts[0],
        **{name: sum(getattr(part, name) for part in parts) for name in summed},
        temp_bytes=max(part.temp_bytes for part in parts),
        error=next((part.error for part in parts if part.error), None),
    )


def at_depth(programs: Iterable[CompiledProgram], layers: int) -> CompiledProgram:
    """Returns the record of a program at `layers` layers: as compiled, or from two smaller depths.
    Bytes are extrapolated as affine in the layers. This is right for arguments and results.
    Temporaries are a maximum of several sums, and in a deep model another sum may be the largest:
    they may come out too small or too large."""
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

    def line(x: int, y: int) -> int:
        return max(0, round(x + (y - x) * (layers - a.layers) / (b.layers - a.layers)))

    numbers = {
        name: line(getattr(a, name), getattr(b, name))
        for name in ("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes")
    }
    return replace(
        b,
        **numbers,
        layers=layers,
        compiled_layers=(a.layers, b.layers),
        compile_s=a.compile_s + b.compile_s,
    )
