"""Compiles the engine's programs for accelerators that are not there, and says what came out.

    python -m benchmarks.absent_devices --target h100 --model llama-3.1-8b --out FILE.json

Needs the compiler of the target, in an environment of its own (see `docs/targets.md`), and no device.
The model keeps its widths and has `--layers` layers. For each layout: a decode burst, a prefill call
and the page programs; a switch up and one down between neighbours. Printed and written for each: what
it sends (collectives by depth of loop: a decode step is depth 2), its temporary memory and the kernels
it calls. The HLO is kept in `--hlo`.
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from pat_jax.config import RolloutConfig
from pat_jax.devices import Device
from pat_jax.engine.programs import Key
from pat_jax.engine.rollout import RolloutEngine
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.planning.types import Split
from pat_jax.profiling.hlo import collectives

SPLITS = (Split(8, 1), Split(2, 4), Split(1, 8))
SWITCHES = {(SPLITS[0], SPLITS[1]), (SPLITS[1], SPLITS[2]), (SPLITS[2], SPLITS[1])}
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352000000000 l2_cache_size: 52428800 device_memory_size: 84986691584
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def devices_of(target: str) -> Sequence[Device]:
    """Eight devices of `h100`, or those of a TPU topology such as `v5e:2x4`."""
    if target == "h100":
        return topologies.get_topology_desc(
            "h100", platform="cuda", target_config=H100, topology="1x1x8"
        ).devices
    return topologies.get_topology_desc(target, platform="tpu").devices


def engine_of(args: argparse.Namespace) -> RolloutEngine:
    policy = Policy.from_config(replace(preset(args.model), num_layers=args.layers))
    config = replace(
        RolloutConfig(),
        max_prompt_length=args.length // 2,
        max_completion_length=args.length // 2,
        min_length=args.length,
        min_rows=args.rows // 8,
        page_size=args.page_size,
    )
    engine = RolloutEngine(
        policy,
        devices_of(args.target),
        config,
        capacity=args.rows,
        eos_ids=(1,),
        dtype=jnp.bfloat16,
    )
    return engine


def is_wanted(key: Key, engine: RolloutEngine) -> bool:
    """The largest bucket of each kind, and of switches the pairs and one group that stand for all."""
    if not key.splits <= set(SPLITS) or key.part > 1:
        return False
    if key.target is not None and (key.split, key.target) not in SWITCHES:
        return False
    return key.name != "decode" or key.rows == engine.catalogue.buckets.rows[key.split][-1]


def describe(
    engine: RolloutEngine, key: Key, program: jax.stages.Compiled, seconds: float
) -> dict[str, object]:
    text, memory = program.as_text() or "", program.memory_analysis()
    pool = jax.tree.leaves(engine.catalogue.pool(engine.layouts[key.split]))[0]
    shard = ",".join(map(str, pool.sharding.shard_shape(pool.shape)))
    sent = Counter(
        (c.name, c.num_bytes, c.group, c.depth)
        for c in collectives(text)
        if c.group > 1 or c.name == "collective-permute"  # whose group is its pairs
    )
    called = re.findall(r'custom_call_target="([^"]+)"', text)
    return {
        "program": f"{key.name} {key.split}" + (f" to {key.target}" if key.target else ""),
        "rows": key.rows,
        "part": key.part,
        "compile_s": round(seconds, 1),
        "temp_mib": round(memory.temp_size_in_bytes / 2**20, 2) if memory else None,
        "argument_mib": round(memory.argument_size_in_bytes / 2**20, 1) if memory else None,
        "collectives": [
            {"kind": kind, "bytes": size, "devices": group, "depth": depth, "count": count}
            for (kind, size, group, depth), count in sorted(sent.items())
        ],
        # How XLA:GPU will sum; a copy of a whole pool is one too many.
        "strategies": dict(Counter(re.findall(r'-start\(.*"kernel_strategy":"(\w+)"', text))),
        "pool_copies": len(re.findall(rf"= bf16\[{shard}\]\S* copy\(", text)),
        "calls": dict(Counter(called)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="h100", help="h100, or a TPU topology: v5e:2x4")
    parser.add_argument("--model", default="llama-3.1-8b", help="a preset")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=64, help="sequences on all devices together")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence, at most")
    parser.add_argument("--page_size", type=int, default=16)
    parser.add_argument("--programs", default="", help="part of the names of those to compile")
    parser.add_argument("--hlo", type=Path, help="folder for the text of each program")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    engine, found = engine_of(args), []
    for key in [key for key in engine.programs.missing() if is_wanted(key, engine)]:
        if args.programs not in key.name:
            continue
        start = time.perf_counter()
        try:
            engine.programs.compile(key)
        except Exception as error:  # of any kind: this is what the command is for
            found.append({"program": str(key), "error": f"{type(error).__name__}: {error}"[:2000]})
            print(found[-1], flush=True)
            continue
        program: jax.stages.Compiled = engine.programs[key]  # pyright: ignore[reportAssignmentType]
        found.append(describe(engine, key, program, time.perf_counter() - start))
        print(json.dumps(found[-1]), flush=True)
        if args.hlo:
            args.hlo.mkdir(parents=True, exist_ok=True)
            name = f"{key.name}_{key.split}_{key.target or ''}_{key.rows}_{key.part}.txt"
            (args.hlo / name).write_text(program.as_text() or "")
    if args.out:
        command = "python -m benchmarks.absent_devices " + " ".join(sys.argv[1:])
        content = {"command": command, "jax": jax.__version__, "programs": found}
        args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
