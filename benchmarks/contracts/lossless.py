"""Switching changes nothing: adaptive against static rollouts, token by token.

    python -m benchmarks.contracts.lossless --out benchmarks/results/lossless.json
    python -m benchmarks.contracts.lossless --models moe mixtral \
        --out benchmarks/results/lossless_experts.json

Eight CPU devices; models whose KV heads are more and fewer than TP, and whose vocabulary no TP
divides; or models with experts, whose routes are compared as well. Static and adaptive runs share a
seed. Wherever their tokens or routes differ first, an independent forward pass
(`tests/near_ties.py`) says whether that decision was a near-tie.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import jax.numpy as jnp

from benchmarks.report import machine, options, write
from pat_jax.common.devices import configure
from tests.lossless import (
    CARRIES,
    EXPERTS,
    KINDS,
    MODELS,
    PATHS,
    Settings,
    Subject,
    make_requests,
    tally,
)
from tests.near_ties import Tally

THOROUGH = Settings(
    sequences=32, max_completion_length=116, min_rows=8, min_length=64, page_size=16
)
SEEDS = (0, 1)
IN_BFLOAT16 = ("kv2", "moe")  # models that run so as well


def measure(
    models: Sequence[str], dtype: jnp.dtype, settings: Settings, seeds: Sequence[int]
) -> Iterator[dict]:
    """One record for each model, seed and path: what was compared and what came out."""
    for name in models:
        subject = Subject((MODELS | EXPERTS)[name], settings, dtype, is_compiled=False)
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
                "near_tie_route_rate": total.near_tie_routes / total.tokens,
                "divergence_rate": total.divergences / total.compared,
            }
            for name, total in by_kind.items()
        }
        for dtype, by_kind in totals.items()
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        default=[*MODELS],
        choices=[*MODELS, *EXPERTS],
        help="of tests/lossless.py",
    )
    args = parser.parse_args()
    devices = configure(8)
    about, start = machine(devices), time.perf_counter()
    records: list[dict] = []
    runs: list[dict] = []
    in_bfloat16 = [name for name in args.models if name in IN_BFLOAT16]
    for models, dtype in ((args.models, jnp.float32), (in_bfloat16, jnp.bfloat16)):
        for record in measure(models, dtype, THOROUGH, SEEDS):
            records.append(record)
            counts = asdict(sum(record["counts"].values(), Tally()))
            runs.append(record | {"counts": counts})
            print(runs[-1], flush=True)
            result = {
                "machine": about,
                "seconds": round(time.perf_counter() - start),
                "settings": asdict(THOROUGH),
                "seeds": SEEDS,
                "summary": summary(records),
                "runs": runs,
            }
            write(args.out, result)  # each time: it runs for long
    print(json.dumps(summary(records), indent=1))


if __name__ == "__main__":
    main()
