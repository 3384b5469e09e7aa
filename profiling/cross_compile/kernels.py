"""Whether the kernels of a model compile for a machine that is not there. Nothing is run."""

from dataclasses import asdict, dataclass
from typing import Literal

from pat_jax.common.errors import UserError
from pat_jax.models.config import ModelConfig
from pat_jax.profiling.cross_compile.compile import answers, installed
from pat_jax.profiling.predict.targets import Target


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel at one shape."""

    name: str
    part: str  # the shape, in words
    trouble: str  # why it cannot be used; empty where it can


def kernels_for(
    target: Target,
    model: ModelConfig,
    *,
    page_size: int = 16,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
) -> list[CompiledKernel]:
    """What each kernel is asked where it is held against plain operations, compiled for `target`.

    Raises:
      UserError: the compiler is not installed, refuses the target, or died.
    """
    installed(target)
    content = {
        "target": target.text,
        "model": asdict(model),
        "page_size": page_size,
        "dtype": dtype,
    }
    found = []
    for line in answers(target, content, "kernel_worker"):
        if "refused" in line:
            raise UserError(line["refused"])
        found.append(CompiledKernel(**line))
    return found
