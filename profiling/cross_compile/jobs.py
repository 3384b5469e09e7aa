"""Chooses the programs that a plan compiles for a target.

Knows which programs stand for others. Does not know processes, threads or files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import jax

from pat_jax.engine.relocation.rounds import SIZES
from pat_jax.layout.buckets import Drafts
from pat_jax.models.config import ModelConfig
from pat_jax.planning.types import Split
from pat_jax.profiling.cross_compile.compiled import IDENTITY, CompiledProgram
from pat_jax.profiling.cross_compile.target_build import TargetBuild
from pat_jax.programs.programs import Key, ProgramTable
from pat_jax.training.roles import Roles
from pat_jax.training.trainer import CRITIC, Trainer

# Programs that are compiled at the whole depth alone. XLA reuses other buffers in a deep model than in
# shallow ones: extrapolated temporaries of a critic's gradients were 2.3 times as large as compiled.
PASSES = ("predict", "grad")


@dataclass(frozen=True)
class CompileJob:
    """One record to make: of a program, or of the parts of a reshard."""

    record: CompiledProgram  # names the program, without numbers so far
    parts: tuple[Callable[[], jax.stages.Lowered], ...]


def jobs_of(build: TargetBuild) -> list[CompileJob]:
    """Returns all programs to compile, at every depth. `PASSES` of training are compiled whole."""
    order = build.order
    found = []
    for layers in order.depths:
        found += _rollout_jobs(build, replace(order.model, num_layers=layers))
    if order.run.trains:
        whole = _training_jobs(build, order.model.num_layers)
        found += [job for job in whole if job.record.name in PASSES]
        for layers in order.depths:
            jobs = _training_jobs(build, layers)
            found += [job for job in jobs if job.record.name not in PASSES]
    return found


def _rollout_jobs(build: TargetBuild, model: ModelConfig) -> list[CompileJob]:
    """Returns each program in its largest bucket; switches between neighbouring layouts only."""
    drafts = _within(build.drafter.drafts, build.order.depths)
    drafter = replace(build.drafter, drafts=drafts)
    functions = replace(build.specs.functions, policy=build.policy_of(model), drafter=drafter)
    specs = replace(build.specs, functions=functions)
    table = ProgramTable()
    specs.declare(table)
    layouts = build.layouts
    buckets = build.buckets
    length = buckets.lengths[-1]
    blocks = specs.prefill_sizes[0]
    size = SIZES[0]
    found = []
    for split in layouts:
        found.append([Key("decode", split, buckets.rows[split][-1], length)])
        found.append([Key("prefill", split, blocks, length)])
        if len(layouts) > 1:
            found.append([Key("unpack", split, size)])
    # Two layouts stand for all: a burst with drafts takes as long to compile as one without, or
    # longer.
    ends = dict.fromkeys((next(iter(layouts)), list(layouts)[-1]))
    found += [_verifying(build, split, length) for split in ends]
    for pair in [p for up in pairwise(layouts) for p in (up, up[::-1])]:
        source, target = pair
        moving = ("pack", "exchange", "exchange_one")
        found += [[Key(name, source, size, target=target)] for name in moving]
        found.append([Key("view", source, target=target)])
        parts = specs.reshard(layouts[source], layouts[target]).parts
        found.append([Key("reshard", source, target=target, part=part) for part in parts])
    return [_job(table, keys, model.num_layers) for keys in found if keys]


def _within(drafts: Drafts, depths: Sequence[int]) -> Drafts:
    """Returns `drafts` with an early exit before the last layer of the shallowest model. The exit
    is the same at every depth, so that numbers are affine in the layers."""
    return replace(drafts, exit_layer=min(drafts.exit_layer, max(1, depths[0] - 1)))


def _verifying(build: TargetBuild, split: Split, length: int) -> list[Key]:
    """Returns the burst with drafts that verifies most tokens; of such, that of most rows."""
    shapes = [
        (n, num_draft_tokens)
        for n in build.buckets.rows[split]
        for num_draft_tokens in build.drafter.drafts.of(n)
    ]
    if not shapes:
        return []
    rows, num_draft_tokens = max(shapes, key=lambda shape: (shape[0] * (1 + shape[1]), shape[0]))
    return [Key("decode", split, rows, length, num_draft_tokens=num_draft_tokens)]


def _training_jobs(build: TargetBuild, layers: int) -> list[CompileJob]:
    """Returns the passes without and with gradients over the largest micro-batch, the optimizer's
    step, and the transfers to the layouts with the least and the most TP."""
    model = replace(build.order.model, num_layers=layers)
    roles = build.whole if model == build.order.model else build.roles(model)
    return [*_policy_jobs(build, roles, layers), *_other_jobs(build, roles)]


def _policy_jobs(build: TargetBuild, roles: Roles, layers: int) -> list[CompileJob]:
    trainer = roles.policy
    split = trainer.layout.split
    longest = build.micro_shapes[-1]
    # The reference's takes as much as the policy's, and stands for it.
    read = [x.programs for name, x in roles.readers.items() if name not in build.order.others]
    passes = [Key(name, split, *longest) for name in ("predict", "grad")]
    ends = dict.fromkeys((split, list(build.layouts)[-1]))
    transfers = [Key("transfer", split, target=target) for target in ends]
    keys = [*passes, Key("apply", split), *transfers]
    tables = [trainer.programs, *read]
    owners = [(key, table) for key in keys for table in tables if key in table.missing()]
    first = dict(reversed(owners))  # not every algorithm reads predictions
    return [_job(first[key], [key], layers) for key in keys if key in first]


def _other_jobs(build: TargetBuild, roles: Roles) -> list[CompileJob]:
    """Returns other roles' passes over the largest micro-batch, and the critic's update."""
    longest = build.micro_shapes[-1]
    jobs = []
    for name in build.order.others:
        role = roles.critic if name == CRITIC else roles.readers[name]
        assert role is not None
        held = role.trained if isinstance(role, Trainer) else role.held
        split = held.layout.split
        layers = held.policy.config.num_layers
        keys = [Key("predict", split, *longest), Key("grad", split, *longest), Key("apply", split)]
        known = role.programs.missing()
        jobs += [_job(role.programs, [key], layers, name) for key in keys if key in known]
    return jobs


def _job(table: ProgramTable, keys: Sequence[Key], layers: int, role: str = "") -> CompileJob:
    identity = {name: getattr(keys[0], name) for name in IDENTITY if name != "role"}
    record = CompiledProgram(**identity, role=role, layers=layers, compiled_layers=(layers,))
    return CompileJob(record, tuple(partial(table.lower, key) for key in keys))
