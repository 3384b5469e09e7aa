"""The first hour on a machine with a GPU: everything that wants to be seen there, in one file.

    python -m benchmarks.speed.gpu_session --out gpu_session.json
    python -m benchmarks.speed.gpu_session --small --out gpu_session.json   # the same on a CPU

Runs, each in a process of its own and within a time limit:

    doctor   python -m pat_jax.doctor
    tests    the tests for one GPU
    decode   python -m benchmarks.speed.gpu_decode: steps of the engine against the bytes that must move
    update   three iterations of training, whose metrics have what an update takes

A part that fails or takes too long keeps no other from running. The file has each part's command, exit code,
seconds, last lines and figures, and is written anew after each part. Exits with 1 where a part failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LINES = 30  # of a part's output that are kept
TOO_LONG = 124  # the exit code of what was ended by its limit, as `timeout` has it


@dataclass(frozen=True)
class Part:
    name: str
    command: Sequence[str]  # behind the name of Python
    limit_s: float
    figures: Path  # a file that it writes, JSON or lines of JSON
    environment: Mapping[str, str] = field(default_factory=dict)


def run(part: Part) -> dict[str, Any]:
    """What came of one part, whatever came of it."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, *part.command],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **part.environment},
            start_new_session=True,  # its own children end with it
        )
        try:
            code = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            code = TOO_LONG
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        lines = log.read().splitlines()[-LINES:]
    return {
        "command": " ".join(["python", *part.command]),
        "exit_code": code,
        "seconds": round(time.perf_counter() - start, 1),
        "limit_s": part.limit_s,
        "last_lines": lines,
        "figures": figures(part.figures),
    }


def figures(path: Path) -> Any:
    """None where there is no such file, or it is not whole."""
    try:
        text = path.read_text()
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines()]
        return json.loads(text)
    except (OSError, ValueError):
        return None


DECODE = {
    True: "--small --bursts 2 --rounds 1",
    False: "--models qwen3-0.6b llama-3.1-8b --batches 1 64 --contexts 1024 --memory 80 --rounds 2",
}
# Of 16 and of 128 responses.
TRAIN = {
    True: "--model tiny --rollout.prompts_per_step 2 --algorithm.mini_batch_size 2",
    False: "--model qwen3-0.6b --rollout.prompts_per_step 16 --algorithm.mini_batch_size 16",
}
TRAIN_ALSO = "--steps 3 --devices 1 --compute_dtype bfloat16 --warm_start.steps 0 --profile none"


def parts(folder: Path, is_small: bool) -> list[Part]:
    """
    Args:
      folder: for what they write.
    """
    env = {"JAX_PLATFORMS": "cpu" if is_small else "cuda"}
    doctor, tests, decode = (folder / f"{name}.json" for name in ("doctor", "tests", "decode"))
    run = folder / "run"
    of_tests = {"PAT_JAX_GPU_TESTS_ON": "cpu" if is_small else "gpu"}
    of_tests |= {"PAT_JAX_GPU_FIGURES": str(tests)}
    train = f"-m pat_jax.train --preset demo {TRAIN[is_small]} {TRAIN_ALSO} --run_dir"
    decoding = f"-m benchmarks.speed.gpu_decode {DECODE[is_small]} --out"
    return [
        Part("doctor", ["-m", "pat_jax.doctor", "--out", str(doctor)], 300, doctor, env),
        Part("tests", ["-m", "pytest", "-q", "-m", "gpu", "tests/gpu"], 600, tests, env | of_tests),
        Part("decode", [*decoding.split(), str(decode)], 900, decode, env),
        Part("update", [*train.split(), str(run)], 600, run / "metrics.jsonl", env),
    ]


def session(wanted: Sequence[Part], out: Path, command: str) -> int:
    """Runs them one after the other; returns how many failed."""
    found: dict[str, dict[str, Any]] = {}
    for part in wanted:
        print(f"{part.name}: python {' '.join(part.command)}", flush=True)
        found[part.name] = run(part)
        code, seconds = found[part.name]["exit_code"], found[part.name]["seconds"]
        words = f"took longer than {part.limit_s:g} s" if code == TOO_LONG else f"ended with {code}"
        print(f"{part.name}: {words}, {seconds:.1f} s", flush=True)
        out.write_text(json.dumps({"command": command, "parts": found}, indent=1) + "\n")
    return sum(one["exit_code"] != 0 for one in found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="parts to run: doctor, tests, decode, update")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on a CPU")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wanted = parts(Path(folder), args.small)
        if args.only:
            wanted = [part for part in wanted if part.name in args.only]
        command = f"python -m benchmarks.speed.gpu_session {' '.join(sys.argv[1:])}"
        failed = session(wanted, args.out, command)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
