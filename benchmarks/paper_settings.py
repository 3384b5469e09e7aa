"""The rollouts of the PAT paper as far as they are known, and what is assumed of the rest."""

from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import NormalDist

import numpy as np

from benchmarks.kernel_tables import SPLITS
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.layout.buckets import Buckets
from pat_jax.models.presets import preset
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.profiling.predict.composer import SWITCH_S, Composer, Unlisted
from pat_jax.profiling.predict.links import Sums
from pat_jax.profiling.predict.sources import kernels_for
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.simulate.machine import Machine, Workload

LONG, BEYOND_LONG, AT_CAP = 8192, 0.1085, 2.8 / 128
PROMPTS = (64, 256)  # tokens
SEEN = 16  # batches before the one that is replayed, for the planner's length model


@dataclass(frozen=True)
class Published:
    """What the paper reports against its static set-up."""

    throughput: float  # of iterations, a factor
    less_generation: float | None = None  # percent of its time

    @property
    def generation_share(self) -> float:
        """Of an iteration of the static set-up, by its own two figures; else as they mostly are."""
        if self.less_generation is None:
            return 0.75
        return (1 - 1 / self.throughput) / (self.less_generation / 100)


@dataclass(frozen=True)
class Setting:
    """One rollout of the paper, and what is assumed of the machine."""

    target: str
    model: str
    cap: int  # tokens of a response
    responses: int = 128
    sums: Sums = "one-shot"
    unlisted: Unlisted | None = None  # None: as composed
    switch_s: float = SWITCH_S

    def __str__(self) -> str:
        return f"{self.model}, {self.cap // 1024}K, on {self.target}"

    def composer(self, data: Path | None) -> Composer:
        kernels = kernels_for(Target.parse(self.target), data, sums=self.sums)
        return Composer(kernels, preset(self.model), self.switch_s, self.unlisted)

    def machine(self, data: Path | None) -> Machine:
        config = replace(
            RolloutConfig(),
            max_prompt_length=PROMPTS[1],
            max_completion_length=self.cap,
            min_rows=1,
            min_length=512,
        )
        buckets = Buckets.of(SPLITS, self.responses, config)
        truth = self.composer(data).latency_model(buckets)
        return Machine.of(truth, SPLITS, config, capacity=self.responses, runs_ahead=True)

    def lengths(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Log-normal through both quantiles, cut at the cap."""
        far, near = (-NormalDist().inv_cdf(share) for share in (AT_CAP, BEYOND_LONG))
        sigma = (log(self.cap) - log(LONG)) / (far - near)
        median = exp(log(LONG) - near * sigma)
        drawn = np.ceil(median * rng.lognormal(0.0, sigma, size))
        return np.clip(drawn, 1, self.cap).astype(int)

    def workload(self, seed: int) -> Workload:
        rng = np.random.default_rng((seed, self.cap))
        prompts = rng.integers(*PROMPTS, self.responses, endpoint=True)
        return Workload(prompts, self.lengths(rng, self.responses), self.cap)

    def seen(self) -> LengthModel:
        past = self.lengths(np.random.default_rng(7), SEEN * self.responses)
        return LengthModel.empty(self.cap).updated(past, past >= self.cap)


PAPER = {
    Setting("h100:8", "llama-3.1-8b", 24_576): Published(1.37, 34.6),
    Setting("h100:8", "qwen3-14b", 16_384): Published(1.29, 32.0),
    Setting("a40:8", "llama-3.1-8b", 24_576): Published(1.27),
    Setting("a40:8", "qwen3-14b", 16_384): Published(1.18),
}


def varied(setting: Setting) -> dict[str, Setting]:
    """The same with one assumption changed."""
    changed = {
        "no time outside kernels": replace(setting, unlisted=Unlisted()),
        "a switch takes 5.5 s more": replace(setting, switch_s=setting.switch_s + 5.5),
    }
    if setting.target.startswith("h100"):
        changed |= {
            "all-reduce: NCCL in a graph (7-20 us)": replace(setting, sums="nccl"),
            "all-reduce: NCCL, no graph (32-53 us)": replace(setting, sums="ungraphed"),
            "1024 responses": replace(setting, responses=1024),
        }
    return changed
