"""Compiles bursts that verify drafts for a machine that is not there; a program of its own, for the
environment must be set before JAX starts. Prints a line for each: layout, budget, kernels."""

import sys
from dataclasses import replace

import jax.numpy as jnp

from pat_jax.engine.device.decode.decode import DecodeFunctions
from pat_jax.engine.device.draft.draft_specs import DraftSpecs
from pat_jax.engine.device.programs.program_specs import ProgramSpecs, pages_per_group
from pat_jax.layout.buckets import Buckets, Drafts
from pat_jax.layout.layout import factored_mesh, layout_chain
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.profiling.cross_compile.worker import devices_of
from pat_jax.profiling.predict.targets import Target
from pat_jax.programs.programs import Key, ProgramTable

LENGTH = 1024  # tokens; of a line 32 rows of 8, with which XLA once ran out of a TPU's vmem


TYPE = jnp.dtype(jnp.bfloat16)
COPIED = Drafts(budgets=(7,), longest=7, most_tokens=256, texts=4)
FIRST_LAYER = Drafts(budgets=(3,), longest=3, most_tokens=256, exit_layer=1)
DRAFT_MODEL = Drafts(budgets=(3,), longest=3, most_tokens=256, has_model=True)


def main() -> None:
    model = replace(preset("qwen3-0.6b"), num_layers=2)
    layouts, _ = layout_chain(factored_mesh(devices_of(Target.parse(sys.argv[1]))), model)
    buckets = Buckets.build(
        tuple(layouts), capacity=128, min_rows=32, min_length=LENGTH, max_length=LENGTH
    )
    small = Policy.from_config(replace(model, num_layers=1))
    widest = [list(layouts)[-1]]
    for drafts, draft, splits in (
        (COPIED, None, layouts),
        (FIRST_LAYER, None, widest),
        (DRAFT_MODEL, small, widest),
    ):
        policy = Policy.from_config(model)
        functions = DecodeFunctions(policy, TYPE, (0,), 8, 64, 2, drafts, draft)
        draft_specs = draft and DraftSpecs(draft, TYPE, buckets, drafts, 16, 64)
        pages = pages_per_group(layouts, buckets, 16)
        specs = ProgramSpecs(functions, layouts, buckets, 16, pages, 64, draft_specs=draft_specs)
        table = ProgramTable()
        specs.declare(table)
        for split in splits:
            (budget,) = drafts.budgets
            key = Key("decode", split, buckets.rows[split][0], LENGTH, budget=budget)
            table.compile(key)
            text = table[key].as_text()  # pyright: ignore[reportFunctionMemberAccess]
            print(split, budget, "attend_blocks" in text, flush=True)
            if draft_specs:
                table.compile(Key("draft_prefill", split, 64, LENGTH))


if __name__ == "__main__":
    main()
