"""KV memory that is held and not used, on real response lengths; host accounts alone, no device.

    python -m benchmarks.kv_waste --data ../shared/data --out benchmarks/results/kv_waste.json

A rollout of `--sequences` responses, eight to a prompt, in eight data-parallel groups. Who holds which
page is decided by the engine's own admission; what the devices would do is counted. A page is held
for the tokens of the next burst as well: before a burst these have no tokens yet, after it only the end
of each sequence's last page and what sequences that ended early left over are unused. Both are
reported, averaged over the bursts, as parts of all pages held; a page of several samples counts once.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from benchmarks.workloads import read
from pat_jax.config import RolloutConfig
from pat_jax.engine.admission import Admission
from pat_jax.engine.scheduler import Request, Scheduler

SAMPLES, GROUPS = 8, 8


def requests(prompts: np.ndarray, cap: int) -> list[Request]:
    rng = np.random.default_rng(0)
    texts = [tuple(rng.integers(0, 10**6, n).tolist()) for n in prompts.tolist()]
    none = np.zeros(2, np.uint32)
    return [Request(text, none, cap) for text in texts for _ in range(SAMPLES)]


def waste(prompts: np.ndarray, responses: np.ndarray, cap: int, config: RolloutConfig) -> dict:
    """Parts of what is held: before bursts and after them."""
    scheduler = Scheduler(requests(prompts, cap), num_groups=GROUPS, rows_per_group=1)
    most = len(responses) // GROUPS
    longest = -(-int(prompts.max() + cap) // config.page_size)
    pages = most * longest + 1
    admission = Admission(scheduler, num_pages=pages, page_size=config.page_size)
    steps, before, after, held_before, held_after = config.burst_steps, 0, 0, 0, 0
    admission.admit(most, steps)
    while scheduler.has_work:
        admission.grow(steps)
        before, held_before = before + admission.unused, held_before + admission.pages_held
        live = scheduler.live
        left = responses[live] - (scheduler.length - scheduler.prompt_length)[live]
        scheduler.advance(np.minimum(left, steps), left > steps, steps)
        admission.release_ended()
        after, held_after = after + admission.unused, held_after + admission.pages_held
    return {
        "before_bursts": before / (held_before * config.page_size),
        "after_bursts": after / (held_after * config.page_size),
        "mean": (before + after) / ((held_before + held_after) * config.page_size),
        "mean_response": float(responses.mean()),
        "longest_response": int(responses.max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config, found = RolloutConfig(), {}
    for name, lengths in read(args.data).items():
        rng = np.random.default_rng(0)
        prompts = rng.choice(lengths.prompts, args.sequences // SAMPLES)
        chance = lengths.weights / lengths.weights.sum()
        responses = rng.choice(lengths.responses, args.sequences, p=chance)
        responses = np.clip(responses, 1, lengths.cap).astype(int)
        found[name] = waste(prompts, responses, lengths.cap, config)
        print(name, {key: round(value, 4) for key, value in found[name].items()})
    if args.out:
        command = "python -m benchmarks.kv_waste " + " ".join(sys.argv[1:])
        shapes = {"burst_steps": config.burst_steps, "page_size": config.page_size}
        args.out.write_text(json.dumps({"command": command, **shapes, "lengths": found}, indent=1))


if __name__ == "__main__":
    main()
