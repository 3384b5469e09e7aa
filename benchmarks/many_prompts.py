"""Ten thousand prompts through `python -m pat_jax.generate`, whose KV cache holds one in a hundred of them.

    python -m benchmarks.many_prompts --out benchmarks/results/many_prompts_cpu2.json

The command runs as a user would run it. Checked: every prompt has its result, once, in the order of
the file, with as many tokens as it asked for or an ending. Reported: the memory of the process as the
results come in, and results a second.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.adaptive_vs_static import describe_machine
from pat_jax.common.devices import configure

EVERY_S = 0.5
PARTS = (0.1, 0.25, 0.5, 0.75, 0.95)  # of the results: where memory is reported


def write_prompts(path: Path, count: int) -> list[int]:
    """Prompts of 4 to 24 tokens; returns the most tokens that each asks for, heavy-tailed up to 96."""
    rng = np.random.default_rng(0)
    most = np.clip(rng.lognormal(2.5, 1, count), 1, 96).astype(int).tolist()
    with path.open("w") as lines:
        for number, max_tokens in enumerate(most):
            tokens = rng.integers(3, 100, rng.integers(4, 25)).tolist()
            print(
                json.dumps({"id": number, "token_ids": tokens, "max_tokens": max_tokens}),
                file=lines,
            )
    return most


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def watch(command: list[str], results: Path) -> tuple[list[tuple[int, float]], float]:
    """Runs to the end; returns (results so far, MiB) at regular times, and seconds from the first."""
    seen, began = [], None
    process = subprocess.Popen(command)
    with process:
        while process.poll() is None:
            time.sleep(EVERY_S)
            count = results.read_bytes().count(b"\n") if results.exists() else 0
            if count and process.poll() is None:
                began = began or time.perf_counter()
                seen.append((count, resident_mib(process.pid)))
    if process.returncode or began is None:
        raise RuntimeError(f"{command} ended with status {process.returncode}.")
    return seen, time.perf_counter() - began


def check(results: Path, most: list[int]) -> None:
    done = [json.loads(line) for line in results.read_text().splitlines()]
    assert [one["id"] for one in done] == list(range(len(most))), "each once, in order"
    for one, max_tokens in zip(done, most, strict=True):
        count, reason = len(one["token_ids"]), one["finish_reason"]
        assert count == max_tokens if reason == "length" else count <= max_tokens
        assert reason in ("length", "stop")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="tiny", help="a built-in shape")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prompts, results = Path(folder) / "prompts.jsonl", Path(folder) / "results.jsonl"
        most = write_prompts(prompts, args.count)
        options = ["--batch", str(args.count // 100), "--max_length", "128"]
        command = ["-m", "pat_jax.generate", "--model", args.model, *options]
        files = ["--prompts", str(prompts), "--out", str(results)]
        seen, seconds = watch([sys.executable, *command, *files], results)
        check(results, most)
    mib = {part: next(m for n, m in seen if n >= part * args.count) for part in PARTS}
    print(f"{args.count} results in {seconds:.0f} s; MiB at parts of them: {mib}")
    if args.out:
        content = {
            "command": "python -m benchmarks.many_prompts " + " ".join(sys.argv[1:]),
            "generate": ["python", *command],
            "machine": describe_machine(configure(0)),
            "seconds_from_the_first_result": seconds,
            "mib_at_part": mib,
        }
        args.out.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
