"""The same rollout under every static layout, adaptively, and without lockstep, alternating in one run.

    python -m benchmarks.speed.adaptive_vs_static --lengths r1 --data ../shared/data --repeats 12 \
        --out benchmarks/results/adaptive_vs_static_cpu2.json --plot rollout.svg

Same prompts, same forced response lengths, same engine and features everywhere. Lengths are those of
real responses, scaled so that their cap is --cap; half of them teach the length model, the other half
is what the rollouts have. The systems:

    dpNtpM        one layout from beginning to end, for each layout of the chain
    adaptive      the planner, with a length model fitted on other draws of the same distribution
    independent   one engine for each device, an equal share of the prompts each, in threads: no
                  device waits for another (the non-lockstep baseline)
    one device    one engine on one device with all prompts; the others idle, and leave it their
                  threads, which XLA's CPU devices share: see the cores that are busy

Prints medians with bootstrap intervals and the ratio to the best static layout, and writes JSON.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.planner.workloads import LengthData, read
from benchmarks.report import by_turns, machine, median_interval, options, write
from pat_jax.common.devices import Device, configure
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.record.plot import plot_rollout
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.sequences.responses import Request
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner, Planner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Load, Split

VOCAB_SIZE = 512
System = Callable[[Sequence[Request]], RolloutReport]


@dataclass(frozen=True)
class Lengths:
    """Real response lengths scaled to a cap: `draw` for the rollouts, `fitted` from others."""

    cap: int
    real: LengthData

    def draw(self, seed: int, count: int) -> np.ndarray:
        return self._scaled(self.real.sample(count, seed).responses)

    def fitted(self) -> LengthModel:
        lengths = self._scaled(self.real.learned())
        return LengthModel.empty(self.cap).updated(lengths, lengths >= self.cap)

    def _scaled(self, lengths: np.ndarray) -> np.ndarray:
        return np.clip(np.ceil(lengths * self.cap / self.real.cap).astype(int), 4, self.cap)


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

    def __init__(self, model: str, devices: Sequence[Device], config: RolloutConfig, capacity: int):
        self.policy = Policy.from_config(preset(model, vocab_size=VOCAB_SIZE))
        self.config = config
        self.weights = jax.device_get(self.policy.init(0))
        self.together = self._engine(devices, capacity)
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
        bursts = [burst for report in reports for burst in report.bursts]
        return RolloutReport(bursts=bursts, total_s=seconds)


def systems_of(rig: Rig, lengths: LengthModel) -> dict[str, System]:
    latency, splits = rig.profile(rig.together), tuple(rig.together.layouts)

    def planned(*splits: Split) -> System:
        """With no choice of a layout, the planner still keeps the groups even."""
        return lambda batch: rig.run(
            rig.together, CostModelPlanner(splits, latency, lengths), batch
        )

    first = FixedLayout(next(iter(rig.alone.layouts)))
    return {
        **{str(split): planned(split) for split in splits},
        "adaptive": planned(*splits),
        "independent": rig.run_independently,
        "one device": lambda batch: rig.run(rig.alone, first, batch),
    }


class Timed:
    """A system whose reports and busy cores are kept."""

    def __init__(self, run: System):
        self.run, self.reports, self.cores = run, list[RolloutReport](), list[float]()

    def __call__(self, batch: Sequence[Request]) -> float:
        start, cpu = time.perf_counter(), time.process_time()
        report = self.run(batch)
        self.cores.append((time.process_time() - cpu) / (time.perf_counter() - start))
        self.reports.append(report)
        return report.total_s


def main() -> None:
    parser = options(__doc__, has_data=True)
    parser.add_argument("--model", default="random-100m")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--cap", type=int, default=224, help="longest response in tokens")
    parser.add_argument("--lengths", choices=("math", "gsm", "r1"), default="r1")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--min_rows", type=int, default=1)
    parser.add_argument("--min_length", type=int, default=256)
    parser.add_argument("--plot", type=Path, help="picture of the last adaptive rollout")
    args = parser.parse_args()
    devices = configure(0)
    about = machine(devices)
    config = replace(
        RolloutConfig(),
        max_prompt_length=32,
        max_completion_length=args.cap,
        min_rows=args.min_rows,
        min_length=args.min_length,
    )
    rig = Rig(args.model, devices, config, args.sequences)
    lengths = Lengths(args.cap, read(args.data)[args.lengths])
    systems = {name: Timed(run) for name, run in systems_of(rig, lengths.fitted()).items()}
    for system in systems.values():  # each has run once before any is timed
        short = requests(0, args.sequences, lengths)
        system.run([replace(request, max_new_tokens=4) for request in short])
    batches = (requests(1 + n, args.sequences, lengths) for n in range(args.repeats))
    seconds = by_turns(systems, batches)
    adaptive = systems["adaptive"].reports
    rows = summarize(seconds, [str(split) for split in rig.together.layouts])
    for name, row in rows["systems"].items():
        row["cores"] = float(np.median(systems[name].cores))
        print(f"{name:14} {row['cores']:.2f} cores busy")
    write(
        args.out,
        {
            **rows,
            "machine": about | {"load_after": os.getloadavg()[0]},
            "settings": {key: str(value) for key, value in vars(args).items()},
            "planner_share_of_rollout": [r.seconds["plan"] / r.total_s for r in adaptive],
            "moves": [[asdict(move) for move in r.moves] for r in adaptive],
        },
    )
    if args.plot:
        plot_rollout(adaptive[-1].trace, args.plot)


def summarize(seconds: Mapping[str, Sequence[float]], static: Sequence[str]) -> dict[str, Any]:
    """Medians; ratios to the best static layout are taken within a repeat, which has its own lengths."""
    rng = np.random.default_rng(0)
    best = min(static, key=lambda name: float(np.median(seconds[name])))
    rows = {}
    for name, samples in seconds.items():
        median, low, high = median_interval(samples, rng)
        ratio = median_interval(np.divide(samples, seconds[best]).tolist(), rng)
        ci95 = [low, high]
        rows[name] = {"seconds": samples, "median_s": median, "ci95": ci95, "ratio": ratio}
        print(
            f"{name:14} {median:9.2f} s ({low:.2f} - {high:.2f}), {ratio[0]:.3f} times the best static "
            f"layout's ({ratio[1]:.3f} - {ratio[2]:.3f})"
        )
    return {"best_static": best, "systems": rows}


if __name__ == "__main__":
    main()
