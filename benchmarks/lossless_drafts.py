"""Drafts change nothing: rollouts with drafts against static ones without, token by token.

    python -m benchmarks.lossless_drafts [--output benchmarks/results/lossless_drafts.json]

As `benchmarks.lossless`, with the same judge: eight CPU devices, switches along every path with pages that
migrate, are recomputed and both, every kind of sampling and of ending, float32. Drafts are copied from texts
(every request is made twice, so that the second finds its text), said by the policy's first layer, or by a
draft model of one layer whose cache is its own.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.lossless import machine
from pat_jax.common.devices import configure
from pat_jax.engine.device.draft_model import DraftSource
from pat_jax.engine.layout.buckets import Drafts
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.drafts import Acceptance
from tests.lossless import (
    CARRIES,
    MODELS,
    PATHS,
    Settings,
    Subject,
    lively_params,
    make_requests,
    tally,
)
from tests.near_ties import Tally

MODEL, BUDGET = "kv2", 3
SETTINGS = Settings(
    sequences=32, max_completion_length=116, min_rows=16, min_length=128, page_size=16
)
DRAFT = Policy.from_config(replace(MODELS[MODEL], num_layers=1))
SOURCES = {
    "texts": Drafts((BUDGET,), longest=5, most_tokens=512, texts=8),
    "first layers": Drafts((BUDGET,), longest=3, most_tokens=512, exit_layer=1),
    "draft model": Drafts((BUDGET,), longest=3, most_tokens=512, has_model=True),
}


def first_layer(shardings: Params, dtype: jnp.dtype) -> Params:
    """The policy without its last."""
    del dtype
    known = dict(jax.tree.leaves_with_path(lively_params(Policy.from_config(MODELS[MODEL]))))
    own = jax.tree_util.tree_map_with_path(lambda path, _: known[path], DRAFT.abstract_params)
    return jax.device_put(own, shardings)


def measure(source: str, seeds: int) -> Iterator[dict]:
    """One record for each seed and path."""
    drafts = SOURCES[source]
    draft = DraftSource(DRAFT, first_layer) if drafts.has_model else None
    subject = Subject(MODELS[MODEL], replace(SETTINGS, drafts=drafts, draft=draft))
    reach = None if drafts.is_said else Acceptance.unseen().reach
    for seed in range(seeds):
        requests = make_requests(SETTINGS, seed)
        # The second ones wait until rows are free: what they will say has been said by then.
        requests = requests if drafts.is_said else requests * 2
        static, _ = subject.run(requests, subject.static(1))
        for i, path in enumerate(PATHS):
            carry = CARRIES[(seed + i) % len(CARRIES)]
            planner = subject.adaptive(path, carry, SETTINGS.sequences)
            found, report = subject.run(requests, replace(planner, budget=BUDGET, reach=reach))
            yield {
                "source": source,
                "seed": seed,
                "path": path,
                "carry": carry,
                "switches": len(report.switches),
                "drafted": report.drafted,
                "accepted": report.accepted,
                "accepted on branches": sum(numbers[2] for numbers in report.by_source),
                "tokens_per_row_step": round(report.tokens_per_row_step, 3),
                "counts": sum(tally(subject, requests, static, [found]).values(), Tally()),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--sources", nargs="+", default=list(SOURCES))
    default = Path("benchmarks/results/lossless_drafts.json")
    parser.add_argument("--output", type=Path, default=default)
    args = parser.parse_args()
    configure(8)
    start, records = time.perf_counter(), []
    for source in args.sources:
        for record in measure(source, args.seeds):
            records.append(record)
            counts = record["counts"]
            print(
                f"{source} seed {record['seed']} {record['path']} {record['carry']}: {counts.tokens} tokens, "
                f"{record['tokens_per_row_step']} a step, {counts.divergences} divergences, "
                f"{counts.unexplained} unexplained, log-probabilities within "
                f"{counts.max_logprob_difference:.1e}",
                flush=True,
            )
    by_source = {
        source: asdict(sum((r["counts"] for r in records if r["source"] == source), Tally()))
        | {
            key: sum(r[key] for r in records if r["source"] == source)
            for key in ("drafted", "accepted", "accepted on branches")
        }
        for source in args.sources
    }
    result = {
        "command": "python -m benchmarks.lossless_drafts",
        "machine": machine(),
        "seconds": round(time.perf_counter() - start),
        "by source": by_source,
        "runs": [record | {"counts": asdict(record["counts"])} for record in records],
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(by_source, indent=1))


if __name__ == "__main__":
    main()
