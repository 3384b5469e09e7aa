"""Drafts change nothing: rollouts with drafts against static ones without, token by token.

    python -m benchmarks.contracts.lossless_drafts --out benchmarks/results/lossless_drafts.json
    python -m benchmarks.contracts.lossless_drafts --model moe --sources texts --seeds 7 \
        --out benchmarks/results/lossless_drafts_experts.json

As `benchmarks.contracts.lossless`, with the same judge: eight CPU devices, switches along every path
with pages that migrate, are recomputed and both, every kind of sampling, float32. Drafts are copied
from texts (every request is made twice, so that the second finds its text), or proposed by the
policy's first layer or by a draft model of one layer with its own cache. Responses end at their
length, at an end-of-sequence token, at stop tokens, or where two tokens first come one behind the
other, which ends them from outside as a stop string does. Every second rollout has so few pages that
sequences are preempted.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import numpy as np

from benchmarks.report import machine, options, write
from pat_jax.common.devices import configure
from pat_jax.engine.device.draft.drafters import drafter_for
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.layout.buckets import Drafts
from pat_jax.planning.drafts import Acceptance
from tests.generated_drafts import DRAFTER
from tests.lossless import CARRIES, EXPERTS, MODELS, PATHS, Settings, Subject, make_requests, tally
from tests.near_ties import Tally

BUDGET = 3
SETTINGS = Settings(
    sequences=32, max_completion_length=116, min_rows=16, min_length=128, page_size=16
)
SCARCE = 16  # pages of a group of all devices' layout, where sequences are to give way
STOP_TOKENS = (5, 9, 17)
SUMMED = ("drafted", "accepted", "accepted on branches", "preempted", "ended from outside")
SOURCES = {
    "texts": Drafts((BUDGET,), longest=5, most_tokens=512, texts=8),
    "first layers": Drafts((BUDGET,), longest=3, most_tokens=512, exit_layer=1),
    "draft model": Drafts((BUDGET,), longest=3, most_tokens=512, has_model=True),
}


Stop = tuple[int, int]  # tokens that end a response where they come one behind the other


def stop_of(done: Completion) -> Stop | None:
    """Two tokens from the last third of a response."""
    at = 2 * len(done.tokens) // 3
    return (int(done.tokens[at - 1]), int(done.tokens[at])) if at else None


def end_of(generated: np.ndarray, stop: Stop | None) -> int | None:
    """Tokens up to the end of the first `stop`, None where there is none."""
    if stop is None:
        return None
    places = np.flatnonzero((generated[:-1] == stop[0]) & (generated[1:] == stop[1]))
    return int(places[0]) + 2 if len(places) else None


def cut(completions: Sequence[Completion], stops: Sequence[Stop | None]) -> list[Completion]:
    """Each up to its stop: what a burst has said behind it is no part of the response."""
    kept = []
    for done, stop in zip(completions, stops, strict=True):
        end = end_of(done.tokens, stop) or len(done.tokens)
        routes = done.routed_experts
        if routes is not None:
            routes = routes[: len(routes) - len(done.tokens) + end]
        kept.append(
            replace(
                done,
                tokens=done.tokens[:end],
                logprobs=done.logprobs[:end],
                routed_experts=routes,
            )
        )
    return kept


def with_stop_tokens(requests: Sequence[Request]) -> list[Request]:
    """Those that do not run to a length of their own."""
    return [
        request
        if request.ignore_eos
        else replace(request, sampling=replace(request.sampling, stop_token_ids=STOP_TOKENS))
        for request in requests
    ]


def measure(model: str, source: str, seeds: int) -> Iterator[dict]:
    """One record for each seed and path."""
    drafts = SOURCES[source]
    drafter = drafter_for(drafts, DRAFTER.policy, DRAFTER.load_params)
    settings = replace(SETTINGS, drafter=drafter)
    config = (MODELS | EXPERTS)[model]
    pools = (replace(settings, kv_pages=pages) for pages in (0, SCARCE))
    subjects = [Subject(config, pool, is_compiled=False) for pool in pools]
    accept_prob = None if drafts.is_generated else Acceptance.unseen().accept_prob
    for seed in range(seeds):
        subject = subjects[seed % 2]
        requests = with_stop_tokens(make_requests(SETTINGS, seed))
        # The second ones wait until rows are free: what they will say has been said by then.
        requests = requests if drafts.is_generated else requests * 2
        whole, _ = subject.run(requests, subject.static(1))
        stops = [stop_of(done) if i % 3 == 1 else None for i, done in enumerate(whole)]
        static = cut(whole, stops)

        def should_stop(i: int, generated: np.ndarray, stops: list[Stop | None] = stops) -> bool:
            return end_of(generated, stops[i]) is not None

        for i, path in enumerate(PATHS):
            carry = CARRIES[(seed + i) % len(CARRIES)]
            planner = subject.adaptive(path, carry, SETTINGS.sequences)
            planner = replace(planner, num_draft_tokens=BUDGET, accept_prob=accept_prob)
            found, report = subject.run(requests, planner, should_stop=should_stop)
            found = cut(found, stops)
            yield {
                "source": source,
                "seed": seed,
                "path": path,
                "carry": carry,
                "preempted": report.preempted,
                "ended from outside": sum(
                    len(a.tokens) < len(b.tokens) for a, b in zip(found, whole, strict=True)
                ),
                "switches": len(report.switches),
                "drafted": report.drafted,
                "accepted": report.accepted,
                "accepted on branches": sum(numbers[2] for numbers in report.by_source),
                "tokens_per_row_step": round(report.tokens_per_row_step, 3),
                "counts": sum(tally(subject, requests, static, [found]).values(), Tally()),
            }


def by_source(records: Sequence[dict]) -> dict[str, dict]:
    """Totals of each source of drafts."""
    totals = {}
    for source in dict.fromkeys(record["source"] for record in records):
        of_it = [record for record in records if record["source"] == source]
        counts = asdict(sum((record["counts"] for record in of_it), Tally()))
        totals[source] = counts | {key: sum(r[key] for r in of_it) for key in SUMMED}
    return totals


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--model", default="kv2", choices=[*MODELS, *EXPERTS], help="of tests/lossless.py"
    )
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--sources", nargs="+", default=list(SOURCES))
    args = parser.parse_args()
    devices = configure(8)
    about, start = machine(devices), time.perf_counter()
    records: list[dict] = []
    runs: list[dict] = []
    for source in args.sources:
        for record in measure(args.model, source, args.seeds):
            records.append(record)
            runs.append(record | {"counts": asdict(record["counts"])})
            print(runs[-1], flush=True)
            result = {
                "machine": about,
                "seconds": round(time.perf_counter() - start),
                "by source": by_source(records),
                "runs": runs,
            }
            write(args.out, result)  # each time: it runs for long
    print(json.dumps(by_source(records), indent=1))


if __name__ == "__main__":
    main()
