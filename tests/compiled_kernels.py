"""A child process that compiles every kernel of a model for a machine that is not here.

    python compiled_kernels.py TARGET MODEL

Prints one JSON line: of each kernel at each shape the name and what is wrong, or "".
"""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.engine.warm_up.kernel_cases import Case, Part, cases_of, parts_of
from pat_jax.engine.warm_up.kernel_check import program_of
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh, padded_for
from pat_jax.models.presets import preset
from pat_jax.profiling.cross_compile.worker import devices_of
from pat_jax.profiling.predict.targets import Target

IN_PROGRAMS = ("triton", "tpu_custom_call")  # names of a kernel in a compiled program


def trouble_of(layout: Layout, part: Part, case: Case) -> str:
    types = [part.dtype if x.dtype == np.float32 else x.dtype for x in case.arrays]
    arrays = [
        jax.ShapeDtypeStruct(x.shape, dtype, sharding=layout.sharding())
        for x, dtype in zip(case.arrays, types, strict=True)
    ]
    try:
        program = jax.jit(program_of(layout, case, layout.kernels)).lower(*arrays).compile()
    except Exception as error:  # of any kind
        return f"{part} does not compile: {error}"
    text = program.as_text() or ""
    return "" if any(word in text for word in IN_PROGRAMS) else f"{part} is not in the program"


def main(target: str, name: str) -> None:
    devices = devices_of(Target.parse(target))
    model = padded_for(devices, preset(name))
    chain, _ = layout_chain(factored_mesh(devices, model), model)
    layout = next(iter(chain.values()))
    parts = parts_of(chain.values(), model, 16, jnp.dtype(jnp.bfloat16))
    cases = [(part, case) for part in parts for case in cases_of(part, layout.kernels)]
    print(json.dumps([(case.name, trouble_of(layout, part, case)) for part, case in cases]))


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)  # what compilers print is not ours
        sys.stdout = lines
        main(*sys.argv[1:])
