"""Compiles what each kernel is asked for a machine that is not there; a program of its own, for the environment
must be set before JAX starts. Prints a line for each: its name, and whether a kernel is in the program."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.engine.layout.layout import factored_mesh, layout_chain
from pat_jax.models.presets import preset
from pat_jax.profiling.cross_compile.worker import devices_of
from pat_jax.profiling.measure.kernel_cases import cases_of, parts_of
from pat_jax.profiling.measure.kernel_check import program_of
from pat_jax.profiling.predict.targets import Target


def main() -> None:
    model = preset("qwen3-8b")
    chain, _ = layout_chain(factored_mesh(devices_of(Target.parse(sys.argv[1]))), model)
    layout, *_ = layouts = list(chain.values())
    for part in parts_of(layouts, model, 16, jnp.dtype(jnp.bfloat16)):
        for case in cases_of(part, layout.kernels):
            types = [part.dtype if x.dtype == np.float32 else x.dtype for x in case.arrays]
            arrays = [
                jax.ShapeDtypeStruct(x.shape, dtype, sharding=layout.sharding())
                for x, dtype in zip(case.arrays, types, strict=True)
            ]
            program = jax.jit(program_of(layout, case, layout.kernels)).lower(*arrays).compile()
            text = program.as_text() or ""
            print(f"{case.name}: {'triton' in text or 'tpu_custom_call' in text}", flush=True)


if __name__ == "__main__":
    main()
