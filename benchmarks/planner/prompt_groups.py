"""Rollouts with several samples of each prompt, whose lengths belong together.

Two sources. Real groups: recorded responses of a policy in RL (Llama-3.2-3B-Instruct, AMC23 and AIME24,
39 prompts, samples of two stages of its training). Drawn groups: real lengths put together by a normal
hierarchy in which a prompt's own level has a share of the variance (the correlation of two samples), as
measured in recorded groups: 0.28 and 0.34 for that policy, 0.68 for Qwen2.5-Math-Instruct, 0.84 to 0.94
for puzzles answered by four reasoning models. Each rollout is followed by a later epoch of its prompts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from scipy.special import ndtr

from benchmarks.planner.workloads import LengthData
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.profiling.predict.kernel_files import NoData
from pat_jax.profiling.simulate.machine import Workload

SAMPLES = 8  # of a prompt
PERSISTENCE = 0.8  # correlation of a prompt's level from one epoch to the next
TAUGHT_PROMPTS, TAUGHT_EPOCHS = 128, 4  # from which a length model is fitted
TAUGHT_IDS = 1_000_000_000  # prompts that no replay has
RECORDED_SET, RECORDED_CAP = "rl3b", 4_608  # tokens; none was longer


@dataclass(frozen=True)
class Hierarchy:
    """How alike the samples of a prompt are, and how unlike prompts are."""

    share: float  # of the variance that is the prompt's own, ρ
    # Prompts of unequal spread, and Student's t (4 degrees of freedom) within a prompt: not what the
    # length model assumes.
    is_heavy: bool = False

    def epochs(
        self, rng: np.random.Generator, num_prompts: int, samples: int = SAMPLES
    ) -> Iterator[np.ndarray]:
        """Yields, for each epoch, the quantile of each sample's length among all lengths, float[prompts, samples]."""
        level = rng.normal(0, 1, num_prompts)
        spread = rng.lognormal(0, 0.4, num_prompts) if self.is_heavy else np.ones(num_prompts)
        spread /= np.sqrt(np.mean(spread**2))
        while True:
            own = rng.normal(0, 1, (num_prompts, samples))
            if self.is_heavy:
                own = spread[:, None] * rng.standard_t(4, own.shape) / np.sqrt(2)
            yield ndtr(np.sqrt(self.share) * level[:, None] + np.sqrt(1 - self.share) * own)
            fresh = rng.normal(0, 1, num_prompts)
            level = PERSISTENCE * level + np.sqrt(1 - PERSISTENCE**2) * fresh


GROUPS = {
    "rho 0.3": Hierarchy(0.3),
    "rho 0.7": Hierarchy(0.7),
    "rho 0.9": Hierarchy(0.9),
    "unlike": Hierarchy(0.5, is_heavy=True),
}


def drawn_rollouts(
    data: LengthData, groups: Hierarchy, size: int, seed: int
) -> tuple[Workload, Workload]:
    """`size` sequences of the second half of the lengths, and the next epoch of the same prompts."""
    num_prompts = -(-size // SAMPLES)
    rng = np.random.default_rng((seed, size, 3))
    of, ids = np.repeat(np.arange(num_prompts), SAMPLES)[:size], seed * num_prompts
    prompts = data.quantile(rng.random(num_prompts), 1)[0][of]

    def workload(quantile: np.ndarray) -> Workload:
        return Workload(prompts, data.quantile(quantile, 1)[1].ravel()[:size], data.cap, ids + of)

    epochs = groups.epochs(rng, num_prompts)
    return workload(next(epochs)), workload(next(epochs))


def drawn_lengths(data: LengthData, groups: Hierarchy) -> LengthModel:
    """A length model that has seen other prompts with lengths of the first half, epoch by epoch."""
    of = TAUGHT_IDS + np.repeat(np.arange(TAUGHT_PROMPTS), SAMPLES)
    model = LengthModel.empty(data.cap)
    epochs = groups.epochs(np.random.default_rng(5), TAUGHT_PROMPTS)
    for _ in range(TAUGHT_EPOCHS):
        lengths = data.quantile(next(epochs), 0)[1].ravel()
        model = model.updated(lengths, lengths >= data.cap, of)
    return model


@dataclass(frozen=True)
class RecordedGroups:
    """Lengths of samples of the same prompts from a policy, and from the one that it came of."""

    prompts: np.ndarray  # int[prompts], tokens
    earlier: np.ndarray  # int[prompts, samples], tokens
    later: np.ndarray  # int[prompts, samples], tokens

    cap = RECORDED_CAP

    @property
    def max_prompt(self) -> int:
        return int(self.prompts.max())

    def rollouts(self, size: int, seed: int) -> tuple[Workload, Workload]:
        """`size` sequences of the later policy, and other samples of it to the same prompts.

        A recorded prompt that is drawn twice counts as two prompts.
        """
        num_prompts, rng = -(-size // SAMPLES), np.random.default_rng((seed, size, 4))
        drawn = rng.choice(len(self.prompts), num_prompts)
        samples = rng.permuted(self.later[drawn], axis=1)
        of = np.repeat(np.arange(num_prompts), SAMPLES)[:size]
        prompts, ids = self.prompts[drawn][of], seed * num_prompts + of

        def workload(first: int) -> Workload:
            lengths = samples[:, first : first + SAMPLES].ravel()[:size]
            return Workload(prompts, lengths, self.cap, ids)

        return workload(0), workload(SAMPLES)

    def fitted(self) -> LengthModel:
        """From the earlier policy, as other prompts."""
        of = np.repeat(np.arange(len(self.prompts)), self.earlier.shape[1])
        lengths = self.earlier.ravel()
        return LengthModel.empty(self.cap).updated(lengths, lengths >= self.cap, TAUGHT_IDS + of)


@cache
def recorded_groups(data: Path) -> RecordedGroups:
    """The recorded responses of the policy in RL.

    Raises:
      NoData: the file is missing.
    """
    import pyarrow.parquet

    path = data / "speculation" / "dev.parquet"
    if not path.is_file():
        raise NoData.of("recorded responses", data, "speculation/dev.parquet")
    columns = ["set", "prompt_id", "epoch", "sample", "token_ids"]
    rows = pyarrow.parquet.read_table(path, columns=columns).to_pylist()
    of: dict[int, dict[str, list[int]]] = {}  # by epoch and prompt; -1: the prompts themselves
    for row in sorted((r for r in rows if r["set"] == RECORDED_SET), key=lambda r: r["sample"]):
        found = of.setdefault(row["epoch"], {}).setdefault(row["prompt_id"], [])
        found.append(len(row["token_ids"]))
    prompts, earlier, later = (of[epoch] for epoch in sorted(of))
    ids = sorted(prompts)
    lengths = (np.array([some[i] for i in ids]) for some in (prompts, earlier, later))
    return RecordedGroups(next(lengths)[:, 0], *lengths)
