"""The same rollout under every static layout, adaptively, and without lockstep, alternating in one run.

    python -m benchmarks.adaptive_vs_static --lengths r1 --data ../shared/data --repeats 12 \
        --out benchmarks/results/adaptive_vs_static_cpu2.json --plot docs/rollout.png

Same prompts, same forced response lengths, same engine and features everywhere. Lengths are drawn
from a log-normal (`heavy`), or are those of real responses, scaled so that their cap is --cap; half of
them teach the length model, the other half is what the rollouts have. The systems:

    dpNtpM        one layout from beginning to end, for each layout of the chain
    adaptive      the planner, with a length model fitted on other draws of the same distribution
    independent   one engine for each device, an equal share of the prompts each, in threads: no
                  device waits for another (the non-lockstep baseline)
    one device    one engine on one device with all prompts; the others idle, and leave it their
                  threads, which XLA's CPU devices share: see the cores that are busy

Prints medians with bootstrap intervals and the ratio to the best static layout, and writes JSON.
"""

import argparse
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import numpy as np

from benchmarks.kernel_tables import add_data_option
from benchmarks.workloads import LengthData, read
from pat_jax.common.devices import Device, configure
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device.sampling import sequence_key
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.report import RolloutReport
from pat_jax.engine.sequences.responses import Request
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner, Planner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Load, Split
from pat_jax.run.plot import plot_rollout

VOCAB_SIZE = 512
System = Callable[[Sequence[Request]], RolloutReport]


@dataclass(frozen=True)
class Lengths:
    """Where response lengths come from: `draw` for the rollouts, `fitted` from others."""

    cap: int
    real: LengthData | None  # None: log-normal, median cap / 8, sigma 1

    def draw(self, seed: int, count: int) -> np.ndarray:
        if self.real is None:
            return self._log_normal(np.random.default_rng((1, seed)), count)
        return self._scaled(self.real.sample(count, seed).responses)

    def fitted(self, count: int) -> LengthModel:
        if self.real is None:
            lengths = self._log_normal(np.random.default_rng(987_654), 4 * count)
        else:
            lengths = self._scaled(self.real.learned())
        return LengthModel.empty(self.cap).updated(lengths, lengths >= self.cap)

    def _log_normal(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return self._cut(rng.lognormal(np.log(self.cap / 8), 1.0, count))

    def _scaled(self, lengths: np.ndarray) -> np.ndarray:
        assert self.real is not None
        return self._cut(np.ceil(lengths * self.cap / self.real.cap))

    def _cut(self, lengths: np.ndarray) -> np.ndarray:
        return np.clip(lengths.astype(int), 4, self.cap)


def requests(seed: int, count: int, lengths: Lengths) -> list[Request]:
    rng = np.random.default_rng((2, seed))
    return [
        Request(
            tokens=tuple(rng.integers(2, VOCAB_SIZE, rng.integers(8, 32)).tolist()),
            key=sequence_key(seed, i),
            max_new_tokens=int(length),
            ignore_eos=True,
        )
        for i, length in enumerate(lengths.draw(seed, count))
    ]


class Rig:
    """The engines of one comparison, all with the same weights."""

    def __init__(
        self,
        model: str,
        devices: Sequence[Device],
        config: RolloutConfig,
        capacity: int,
        *,
        is_alone: bool = True,  # also the engines of one device
    ):
        self.policy = Policy.from_config(preset(model, vocab_size=VOCAB_SIZE))
        self.config = config
        self.weights = jax.device_get(self.policy.init(0))
        self.together = self._engine(devices, capacity)
        if not is_alone:
            return
        self.alone = self._engine(devices[:1], capacity)
        self.shares = [self._engine([device], -(-capacity // len(devices))) for device in devices]

    def _engine(self, devices: Sequence[Device], capacity: int) -> RolloutEngine:
        engine = RolloutEngine(self.policy, devices, self.config, capacity=capacity, eos_ids=(1,))
        engine.compile(
            lambda done, total: print(f"\rcompiling {done}/{total} ", end="", file=sys.stderr)
        )
        return engine

    def place(self, engine: RolloutEngine, planner: Planner, count: int) -> None:
        zeros = np.zeros(count, int)
        load = Load(
            zeros, zeros, np.full(count, 32), np.full(count, self.config.max_completion_length)
        )
        layout = engine.layouts[planner.start(load)]
        engine.set_weights(self._on(layout), layout)

    def _on(self, layout) -> Params:
        return jax.device_put(self.weights, layout.param_shardings(self.policy))

    def profile(self, engine: RolloutEngine):
        return Warmup(engine).measure(self._on)

    def run(
        self, engine: RolloutEngine, planner: Planner, batch: Sequence[Request]
    ) -> RolloutReport:
        self.place(engine, planner, len(batch))
        _, report = engine.rollout(batch, planner)
        engine.release_weights()
        return report

    def run_independently(self, batch: Sequence[Request]) -> RolloutReport:
        """Each device its share, by turns, none waiting for another."""
        reports: list[RolloutReport] = []
        planners = [FixedLayout(next(iter(engine.layouts))) for engine in self.shares]
        for engine, planner in zip(self.shares, planners, strict=True):
            self.place(engine, planner, len(batch))

        def work(engine: RolloutEngine, planner: Planner, share: Sequence[Request]) -> None:
            reports.append(engine.rollout(share, planner)[1])

        threads = [
            threading.Thread(target=work, args=(engine, planner, batch[i :: len(self.shares)]))
            for i, (engine, planner) in enumerate(zip(self.shares, planners, strict=True))
        ]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        for engine in self.shares:
            engine.release_weights()
        return RolloutReport(tokens=sum(report.tokens for report in reports), total_s=seconds)


def median_interval(
    samples: Sequence[float], rng: np.random.Generator
) -> tuple[float, float, float]:
    draws = np.median(rng.choice(samples, (2000, len(samples))), axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(np.median(samples)), float(low), float(high)


def describe_machine(devices: Sequence[Device]) -> dict[str, object]:
    model = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": model[0].partition(":")[2].strip() if model else platform.processor(),
        "cores": os.cpu_count(),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "load_before": os.getloadavg()[0],
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="random-100m")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--cap", type=int, default=224, help="longest response in tokens")
    parser.add_argument("--lengths", choices=("heavy", "math", "gsm", "r1"), default="heavy")
    add_data_option(parser)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--min_rows", type=int, default=1)
    parser.add_argument("--min_length", type=int, default=256)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="picture of the last adaptive rollout")
    args = parser.parse_args()
    devices = configure(0)
    machine = describe_machine(devices)
    config = replace(
        RolloutConfig(),
        max_prompt_length=32,
        max_completion_length=args.cap,
        min_rows=args.min_rows,
        min_length=args.min_length,
    )
    rig = Rig(args.model, devices, config, args.sequences)
    latency = rig.profile(rig.together)
    drawn = Lengths(args.cap, None if args.lengths == "heavy" else read(args.data)[args.lengths])
    lengths = drawn.fitted(args.sequences)
    splits = tuple(rig.together.layouts)

    def planned(*splits: Split) -> System:
        """With no choice of a layout, the planner still keeps the groups even."""
        return lambda batch: rig.run(
            rig.together, CostModelPlanner(splits, latency, lengths), batch
        )

    systems = {str(split): planned(split) for split in splits}
    systems["adaptive"] = planned(*splits)
    systems["independent"] = rig.run_independently
    first = FixedLayout(next(iter(rig.alone.layouts)))
    systems["one device"] = lambda batch: rig.run(rig.alone, first, batch)

    for run in systems.values():  # each has run once before any is timed
        run([replace(request, max_new_tokens=4) for request in requests(0, args.sequences, drawn)])
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    cores: dict[str, list[float]] = {name: [] for name in systems}
    switches, balanced, planning = [], [], []
    for repeat in range(args.repeats):
        batch = requests(repeat + 1, args.sequences, drawn)
        for name, run in systems.items():
            start, cpu = time.perf_counter(), time.process_time()
            report = run(batch)
            seconds[name].append(report.total_s)
            cores[name].append((time.process_time() - cpu) / (time.perf_counter() - start))
            if name == "adaptive":
                switches.append([asdict(switch) for switch in report.switches])
                balanced.append([asdict(balance) for balance in report.balanced])
                planning.append(report.seconds["plan"] / report.total_s)
                shown = report
            print(f"repeat {repeat} {name}: {report.total_s:.2f} s", file=sys.stderr)
    result = summarize(seconds, splits, cores) | {
        "command": "python -m benchmarks.adaptive_vs_static " + " ".join(sys.argv[1:]),
        "machine": machine | {"load_after": os.getloadavg()[0]},
        "settings": {key: str(value) for key, value in vars(args).items()},
        "planner_share_of_rollout": planning,
        "switches": switches,
        "balanced": balanced,
        "decode_step_ms": {
            f"{split} rows {rows} length {length}": round(1e3 * s, 2)
            for (split, rows, length), s in latency.decode_table.items()
        },
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1))
    if args.plot:
        plot_rollout(shown.trace, args.plot)


def summarize(
    seconds: dict[str, list[float]], splits: Sequence, cores: dict[str, list[float]]
) -> dict[str, object]:
    rng = np.random.default_rng(0)
    best = min((str(split) for split in splits), key=lambda name: np.median(seconds[name]))
    rows = {}
    print(
        f"{'system':14} {'median s':>9} {'95 % interval':>17} {'time / best static':>24} {'cores busy':>10}"
    )
    for name, samples in seconds.items():
        median, low, high = median_interval(samples, rng)
        # Every repeat has its own lengths: ratios are taken within a repeat.
        ratio = median_interval((np.array(samples) / np.array(seconds[best])).tolist(), rng)
        rows[name] = {
            "seconds": samples,
            "median_s": median,
            "ci95": [low, high],
            "ratio": ratio,
            "cores": float(np.median(cores[name])),
        }
        print(
            f"{name:14} {median:9.2f} {f'{low:.2f} - {high:.2f}':>17} "
            f"{f'{ratio[0]:.3f} ({ratio[1]:.3f} - {ratio[2]:.3f})':>24} {rows[name]['cores']:10.2f}"
        )
    return {"best_static": best, "systems": rows}


if __name__ == "__main__":
    main()
