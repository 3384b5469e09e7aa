"""The first fifteen minutes on a machine with a GPU: what is not known yet comes first, in one file.

    python -m benchmarks.speed.gpu_session --seconds 400 --only update decode --out gpu_session.json
    python -m benchmarks.speed.gpu_session --small --out gpu_session.json   # the same on a CPU

Runs, each in a process of its own and within a time limit:

    update     two iterations of training, whose metrics have what an update takes
    decode     python -m benchmarks.speed.gpu_decode: steps of the engine against the bytes that must move
    loss, attention, compile     python -m benchmarks.speed.gpu_parts
    doctor     python -m pat_jax.doctor
    tests      the tests for one GPU

A part that fails or takes too long keeps no other from running. Without time left, a part is skipped. The
file has each part's command, exit code, seconds, last lines and figures, and is written anew after each
part. Figures of a part that took too long are those that it had written. Exits with 1 where a part failed.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

LINES = 30  # of a part's output that are kept
TOO_LONG = 124  # the exit code of what was ended by its limit, as `timeout` has it
LEAST_S = 20  # a part with less time is not begun


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
    """None where there is no such file, or it is not whole. Of lines, those that are whole."""
    try:
        text = path.read_text()
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]
        return json.loads(text)
    except (OSError, ValueError):
        return None


DECODE = {
    True: "--small --bursts 2 --rounds 1",
    False: "--models llama-3.1-8b --cells 64x1024 256x1024 8x8192 --rounds 1 --bursts 2",
}
# Of 16 and of 32 responses.
TRAIN = {
    True: "--model tiny --rollout.prompts_per_step 2 --algorithm.mini_batch_size 2",
    False: "--model qwen3-0.6b --rollout.prompts_per_step 4 --algorithm.mini_batch_size 4",
}
TRAIN_ALSO = "--steps 2 --devices 1 --compute_dtype bfloat16 --warm_start.steps 0 --profile none"


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

    def by_itself(name: str) -> Part:
        out = folder / f"{name}.jsonl"
        command = ["-m", "benchmarks.speed.gpu_parts", name, "--out", str(out)]
        return Part(name, [*command, *["--small"] * is_small], 60, out, env)

    return [
        Part("update", [*train.split(), str(run)], 200, run / "metrics.jsonl", env),
        Part("decode", [*decoding.split(), str(decode)], 150, decode, env),
        *map(by_itself, ("loss", "attention", "compile")),
        Part("doctor", ["-m", "pat_jax.doctor", "--out", str(doctor)], 60, doctor, env),
        Part("tests", ["-m", "pytest", "-q", "-m", "gpu", "tests/gpu"], 120, tests, env | of_tests),
    ]


def session(wanted: Sequence[Part], out: Path, command: str, limit_s: float) -> int:
    """Runs them one after the other within `limit_s` seconds; returns how many failed."""
    found: dict[str, dict[str, Any]] = {}
    start = time.perf_counter()
    for part in wanted:
        left_s = limit_s - (time.perf_counter() - start)
        if left_s < LEAST_S:
            print(f"{part.name}: skipped, {left_s:.0f} s are left", flush=True)
            continue
        print(f"{part.name}: python {' '.join(part.command)}", flush=True)
        part = replace(part, limit_s=min(part.limit_s, left_s))
        found[part.name] = run(part)
        code, seconds = found[part.name]["exit_code"], found[part.name]["seconds"]
        words = f"took longer than {part.limit_s:g} s" if code == TOO_LONG else f"ended with {code}"
        print(f"{part.name}: {words}, {seconds:.1f} s", flush=True)
        out.write_text(json.dumps({"command": command, "parts": found}, indent=1) + "\n")
    return sum(one["exit_code"] != 0 for one in found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="names of the parts to run")
    parser.add_argument("--seconds", type=float, default=800, help="for all parts together")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on a CPU")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wanted = parts(Path(folder), args.small)
        if args.only:
            wanted = [part for part in wanted if part.name in args.only]
        command = f"python -m benchmarks.speed.gpu_session {' '.join(sys.argv[1:])}"
        failed = session(wanted, args.out, command, args.seconds)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
