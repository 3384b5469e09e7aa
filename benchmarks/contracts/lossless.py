"""Switching changes nothing: adaptive against static rollouts, token by token.

    python -m benchmarks.contracts.lossless --out benchmarks/results/lossless.json

Eight CPU devices; models whose KV heads are more and fewer than TP, and whose vocabulary no TP
divides. Static and adaptive runs share a seed. Wherever their tokens differ first, an independent
forward pass (`tests/near_ties.py`) says whether that token was a near-tie.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import jax.numpy as jnp

from benchmarks.report import machine, options, write
from pat_jax.common.devices import configure
from tests.lossless import CARRIES, KINDS, MODELS, PATHS, Settings, Subject, make_requests, tally
from tests.near_ties import Tally

THOROUGH = Settings(
    sequences=32, max_completion_length=116, min_rows=8, min_length=64, page_size=16
)
SEEDS = (0, 1)


def measure(
    models: Sequence[str], dtype: jnp.dtype, settings: Settings, seeds: Sequence[int]
) -> Iterator[dict]:
    """One record for each model, seed and path: what was compared and what came out."""
    for name in models:
        subject = Subject(MODELS[name], settings, dtype)
        for seed in seeds:
            requests = make_requests(settings, seed)
            static, _ = subject.run(requests, subject.static(1))
            for path in PATHS:
                for carry in CARRIES:
                    planner = subject.adaptive(path, carry, len(requests))
                    adaptive, report = subject.run(requests, planner)
                    yield {
                        "model": name,
                        "dtype": jnp.dtype(dtype).name,
                        "seed": seed,
                        "path": [s.source for s in report.switches[:1]]
                        + [s.target for s in report.switches],
                        "wanted_tp": path,
                        "carry": carry,
                        "counts": tally(subject, requests, static, [adaptive]),
                    }


def summary(records: Sequence[dict]) -> dict[str, dict]:
    """Totals and rates by data type and kind of sampling."""
    totals: dict[str, dict[str, Tally]] = {}
    for record in records:
        by_kind = totals.setdefault(record["dtype"], dict.fromkeys(("all", *KINDS), Tally()))
        for name, counts in record["counts"].items():
            by_kind[name] += counts
            by_kind["all"] += counts
    return {
        dtype: {
            name: asdict(total)
            | {
                "near_tie_rate": total.near_ties / total.tokens,
                "divergence_rate": total.divergences / total.compared,
            }
            for name, total in by_kind.items()
        }
        for dtype, by_kind in totals.items()
    }


def main() -> None:
    out = options(__doc__).parse_args().out
    devices = configure(8)
    start, records = time.perf_counter(), []
    for models, dtype in ((tuple(MODELS), jnp.float32), (("kv2",), jnp.bfloat16)):
        for record in measure(models, dtype, THOROUGH, SEEDS):
            records.append(record)
            what = {key: value for key, value in record.items() if key != "counts"}
            print(what, asdict(sum(record["counts"].values(), Tally())), flush=True)
    result = {
        "machine": machine(devices),
        "seconds": round(time.perf_counter() - start),
        "settings": asdict(THOROUGH),
        "seeds": SEEDS,
        "summary": summary(records),
        "runs": [
            record | {"counts": asdict(sum(record["counts"].values(), Tally()))}
            for record in records
        ],
    }
    write(out, result)
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
