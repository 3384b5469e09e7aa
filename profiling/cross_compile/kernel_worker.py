"""The child process that compiles every kernel for a machine that is not here.

The parent sets its environment, which decides the compiler. Reads a target and a model from
standard input, and prints one JSON line for each kernel at each shape.
"""

from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.common.json_text import of_json
from pat_jax.engine.warm_up.kernel_cases import Case, Part, cases_of, parts_of
from pat_jax.engine.warm_up.kernel_check import program_of
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh, padded_for
from pat_jax.models.config import ModelConfig
from pat_jax.profiling.cross_compile.worker import devices_of, sentence_of, serve, write_line
from pat_jax.profiling.predict.targets import Target

IN_PROGRAMS = ("triton", "tpu_custom_call")  # names of a kernel in a compiled program


def _answer(content: dict[str, Any], lines: TextIO) -> None:
    devices = devices_of(Target.parse(content["target"]))
    model = padded_for(devices, of_json(ModelConfig, content["model"]))
    chain, _ = layout_chain(factored_mesh(devices, model), model)
    layout = next(iter(chain.values()))
    dtype = jnp.dtype(content["dtype"])
    for part in parts_of(chain.values(), model, content["page_size"], dtype):
        for case in cases_of(part, layout.kernels):
            write_line(lines, name=case.name, part=str(part), trouble=_trouble(layout, part, case))


def _trouble(layout: Layout, part: Part, case: Case) -> str:
    """Returns why the kernel cannot be used, or "" if it can."""
    types = [part.dtype if x.dtype == np.float32 else x.dtype for x in case.arrays]
    arrays = [
        jax.ShapeDtypeStruct(x.shape, dtype, sharding=layout.sharding())
        for x, dtype in zip(case.arrays, types, strict=True)
    ]
    try:
        program = jax.jit(program_of(layout, case, layout.kernels)).lower(*arrays).compile()
    except Exception as error:  # of any kind: that it does not compile is a result
        return f"does not compile ({sentence_of(error)})"
    text = program.as_text() or ""
    return "" if any(word in text for word in IN_PROGRAMS) else "is not in the compiled program"


if __name__ == "__main__":
    serve(_answer)
