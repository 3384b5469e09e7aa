"""Whole models compiled for machines that are not there: does everything compile, and as designed?

    python -m benchmarks.targets.plan_targets --out benchmarks/results/plan_targets.json

Needs the extra `plan` and no accelerator. For each model and target: what did not compile; the memory
of a decode step against weights and KV cache by arithmetic; what a decode step sends against what the
design says (two sums a layer, one for the embedding, two small gathers that choose tokens, a gather of
the logits in the branch for options of sampling, and nothing else; around experts a gather of rows and
a scatter over the replicas); what switches to the next layout and back send; and what it took to find
out. `--hlo FOLDER` keeps what the programs were compiled to. A file that is there is added to, a case
at a time.
"""

import argparse
import json
import math
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import options, write
from pat_jax.config.programs import program_choice
from pat_jax.config.run import AlgorithmConfig, RolloutConfig, RunConfig
from pat_jax.layout.chain import expert_ways
from pat_jax.models.config import ModelConfig
from pat_jax.models.presets import preset
from pat_jax.planning.types import Split
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic
from pat_jax.profiling.cross_compile.compile import DEPTHS, compile_for
from pat_jax.profiling.cross_compile.compiled import CompiledProgram
from pat_jax.profiling.cross_compile.target_build import Order, TargetBuild
from pat_jax.profiling.predict.targets import Target
from tests.hlo_text import sent_by

CASES = [
    (model, target)
    for model in ("llama-3.1-8b", "qwen3-14b")
    for target in ("h100:8", "v5e:2x4", "v5p:2x2x2", "v6e:2x4")
] + [
    ("llama-3.1-70b", "v5p:4x4x4"),
    ("llama-3.1-70b", "h100:8x8"),
    ("qwen3-30b-a3b", "h100:8"),
]


def run_config(sequences: int, length: int) -> RunConfig:
    """The options of a run that decide its programs, as in the preset llama-3.1-8b."""
    return RunConfig(
        rollout=RolloutConfig(
            prompts_per_step=sequences // 8,
            num_generations=8,
            max_prompt_length=1024,
            max_completion_length=length - 1024,
            check_every=16,
            burst_steps=256,
            prefill_blocks=128,
            min_length=1024,
        ),
        algorithm=AlgorithmConfig(
            mini_batch_size=sequences // 8, tokens_per_micro_batch=length * 8
        ),
        compute_dtype="bfloat16",
    )


def weight_bytes(model: ModelConfig, tp: int, ways: int) -> float:
    """Of one device, in bfloat16. KV heads are held twice where there are fewer than devices.

    Args:
      ways: in which experts are divided.
    """
    attention = 2 * model.num_heads / tp + 2 * max(1.0, model.num_kv_heads / tp)
    norms = 2 * model.embed_dim + 2 * model.head_dim * model.qk_norm
    units = 3 * model.mlp_dim / tp
    if experts := model.experts:
        units = experts.num_experts * (1 + 3 * experts.expert_dim / ways)  # and the router
    layer = model.embed_dim * (model.head_dim * attention + units) + norms
    tables = (2 - model.tie_embeddings) * model.padded_vocab_size * model.embed_dim / tp
    return 2 * (tables + model.num_layers * layer + model.embed_dim)


def kv_bytes(model: ModelConfig, split: Split, pages: int, page_size: int) -> float:
    heads = max(1.0, model.num_kv_heads / split.tp)
    return 2 * 2 * model.num_layers * pages * page_size * heads * model.head_dim


Sent = Counter[tuple[str, int]]  # how often what sends how many bytes


def designed(model: ModelConfig, program: CompiledProgram, *, is_together: bool) -> Sent:
    """What a decode step sends in all, with experts on all devices.

    Args:
      is_together: the numbers and weights of a row's experts are gathered with the row.
    """
    (dp, tp), rows, layers = program.split, program.rows, model.num_layers
    hidden, sent = 2 * rows * model.embed_dim, Counter[tuple[str, int]]()
    if tp > 1:
        # Numbers of each shard, by which tokens are chosen; logits, in the branch for options.
        for size in (4 * tp, 4 * 4 * tp, 4 * model.padded_vocab_size):
            sent["all-gather", size * rows] += 1
        sent["all-reduce", hidden] += 2 * layers + 1
    if model.experts and dp > 1:
        choices = rows * model.experts.num_experts_per_tok
        if is_together:
            sent["all-gather", dp * (hidden + (4 + 2) * choices)] += layers
        else:
            for size in (hidden, 4 * choices, 2 * choices):
                sent["all-gather", dp * size] += layers
        sent["reduce-scatter", hidden] += layers
    return sent


def switches(
    shallow: TargetBuild, programs: Sequence[CompiledProgram], texts: Path
) -> dict[str, Any]:
    """Bytes that a device receives in each switch to a neighbour; by arithmetic what it lacks of
    the weights there, none of them an expert's. Of a model as deep as was compiled."""
    found, weights = {}, shallow.memory.weights
    for one in programs:
        if one.name == "reshard" and one.target is not None:
            received = sum(s.num_bytes * (1 - 1 / s.group) for s in sent_by(texts, one))
            lacking = max(0, weights[one.target] - weights[one.split])
            found[f"{one.split} to {one.target}"] = {
                "received_bytes": round(received),
                "by_arithmetic": lacking,
            }
    return found


def check(
    here: TargetBuild, shallow: ModelConfig, programs: Sequence[CompiledProgram], texts: Path
) -> dict[str, Any]:
    """What was asked of each layout, and what came out; a step of a model as deep as was compiled."""
    layouts, model, memory = {}, here.order.model, here.memory
    decoding = {x.split: x for x in programs if x.name == "decode" and not x.num_draft_tokens}
    ways = math.prod(expert_ways(here.layouts))
    for split in here.layouts:
        decode = decoding[split]
        weights = weight_bytes(model, split.tp, ways)
        kv = kv_bytes(model, split, memory.pages[split], memory.page_size)
        step = [one for one in sent_by(texts, decode) if one.depth == 2]
        sent = Counter((one.kind, one.num_bytes) for one in step)
        designs = [designed(shallow, decode, is_together=x) for x in (True, False)]
        layouts[str(split)] = {
            "weights_gib": round(weights / 2**30, 3),
            "kv_gib": round(kv / 2**30, 3),
            "arguments_over_arithmetic": round(decode.argument_bytes / (weights + kv), 4),
            "temporaries_gib": round(decode.temp_bytes / 2**30, 3),
            "fits": memory.held(split) <= memory.usable,
            "step_sends_as_designed": sent in designs,
            "step_sends": sorted((kind, size, count) for (kind, size), count in sent.items()),
        }
    return layouts


def say(done: int, of: int, last: str) -> None:
    print(f"{done}/{of} {last}", file=sys.stderr, flush=True)


def processor_seconds() -> float:
    """Of every child so far: what other work on the machine does not change."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def case(model_name: str, target_name: str, args: argparse.Namespace) -> dict[str, Any]:
    target, config = Target.parse(target_name), run_config(args.sequences, args.length)
    model, platform = preset(model_name), target.chip.platform
    run = program_choice(config, num_layers=model.num_layers, platform=platform)
    here = by_arithmetic(Order.of(target, run, model, DEPTHS[args.layers]))
    model = replace(here.order.model, num_layers=here.order.depths[-1])
    shallow = by_arithmetic(Order.of(target, run, model, DEPTHS["all"]))
    start, before = time.perf_counter(), processor_seconds()
    with tempfile.TemporaryDirectory() as folder:
        texts = args.hlo or Path(folder)
        found = compile_for(here.order, progress=say, folder=Path(folder), texts=texts)
        seconds = time.perf_counter() - start
        layouts = check(here, model, found.programs, texts)
        moved = switches(shallow, found.programs, texts)
    return {
        "model": model_name,
        "target": target_name,
        "layers": args.layers,
        "versions": dict(found.versions),
        "seconds": round(seconds, 1),
        "processor_seconds": round(processor_seconds() - before),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2),
        "programs": len(found.programs),
        "failed": {str(program): program.error for program in found.failed},
        "dropped": here.chain[1],
        "training_state_gib": round(here.memory.resident / 2**30, 3),
        "layouts": layouts,
        "switches": moved,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", default="", help="cases whose model and target contain this")
    parser.add_argument("--sequences", type=int, default=256, help="on all devices together")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence, at most")
    parser.add_argument("--layers", choices=("few", "all"), default="few")
    parser.add_argument("--hlo", type=Path, help="folder for the text of each program")
    args = parser.parse_args()
    if args.hlo:
        args.hlo.mkdir(parents=True, exist_ok=True)
    there = json.loads(args.out.read_text()) if args.out and args.out.is_file() else {"cases": []}
    for names in CASES:
        if args.only not in " ".join(names):
            continue
        found = case(*names, args)
        print(json.dumps(found), flush=True)
        same = {name: found[name] for name in ("model", "target", "layers")}
        rest = [x for x in there["cases"] if {name: x[name] for name in same} != same]
        there = {"cases": [*rest, found]}
        write(args.out, there)


if __name__ == "__main__":
    main()
