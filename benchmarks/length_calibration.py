"""How well is the length model calibrated, and what does it cost? Real lengths, and simulations.

    python -m benchmarks.length_calibration --data ../shared/data

Half of a data set teaches the model; the other half is a rollout. At several moments of it, where
did the true remaining length of each running sequence fall in its predicted distribution? The 50 %
band should hold half of them, the 90 % band nine tenths. Ties of whole tokens and responses cut at
the cap are placed at random within their probability (Czado, Gneiting and Held 2009, eq. 2).

The data sets have one response a prompt. What siblings and earlier epochs are worth is therefore
shown on simulations, which draw from the real marginal distribution by a hierarchy of
scores: ρ of the variance a prompt's own, correlated φ from epoch to epoch. `matched` is the model's
own assumption; `heavy` has Student's t (4 degrees of freedom) within a prompt and prompts
of unequal spread. A rollout's end is one response's: twenty splits of a data set see the same few
longest ones (GSM8K's are 516, 1,285 and 4,096 tokens), so that its coverage has no more to say than
those.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.response_lengths import (
    FILES,
    at_quantiles,
    halves,
    hierarchy,
    real_lengths,
)
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.types import Siblings

BANDS = {"50": (0.25, 0.75), "90": (0.05, 0.95)}
MOMENTS = (0.25, 0.5, 0.75, 0.9, 0.97)  # of a rollout: the share that has ended; and its start
SPLITS = 20


class Places:
    """Where true remaining lengths fell in their predicted distributions: numbers in [0, 1]."""

    def __init__(self) -> None:
        self.each: list[np.ndarray] = []  # one array a rollout and moment
        self.last: list[float] = []  # of the moment at which the whole rollout ends
        self.widths: list[float] = []  # of the 90 % band, tokens, the mean of a look
        self.errors: list[float] = []  # of the median, tokens, the mean of a look

    def add(
        self, model: LengthModel, lengths: np.ndarray, prompt: np.ndarray, is_informed: bool = True
    ) -> None:
        """One rollout of true lengths and the prompt of each, looked at at every moment."""
        rng = np.random.default_rng(len(self.each))
        for now in sorted({0, *np.quantile(lengths, MOMENTS).astype(int).tolist()}):
            self._look(model, lengths, prompt, now, is_informed, rng)

    def _look(
        self,
        model: LengthModel,
        lengths: np.ndarray,
        prompt: np.ndarray,
        now: int,
        is_informed: bool,
        rng: np.random.Generator,
    ) -> None:
        is_live = lengths > now
        if not is_live.any():
            return
        ids, of = np.unique(prompt, return_inverse=True)
        done, left = lengths[~is_live], lengths[is_live] - now
        known = Siblings(ids, of[is_live], of[~is_live], done, done >= model.cap)

        def survival(moments: np.ndarray) -> np.ndarray:
            generated, budget = np.full(len(left), now), np.full(len(left), model.cap - now)
            return model.survival(generated, budget, moments, known if is_informed else None)

        moments = np.unique(np.concatenate([left - 1, left]))
        alive = survival(moments)
        # A response of the cap's length may have ended there or been cut: nothing is beyond.
        before = np.take_along_axis(alive, np.searchsorted(moments, left - 1)[:, None], 1)[:, 0]
        after = np.take_along_axis(alive, np.searchsorted(moments, left)[:, None], 1)[:, 0]
        self.each.append(1 - after - rng.random(len(left)) * (before - after))
        all_ended = np.prod(1 - alive, axis=0)[np.searchsorted(moments, left.max() - np.arange(2))]
        self.last.append(all_ended[1] + rng.random() * (all_ended[0] - all_ended[1]))
        grid = np.unique(np.geomspace(1, model.cap - now, 400).astype(int))
        curves = survival(grid)
        at = [(curves > 1 - edge).sum(axis=1) for edge in (*BANDS["90"], 0.5)]
        low, high, median = grid[np.minimum(at, len(grid) - 1)]
        self.widths.append(float(np.mean(high - low)))
        self.errors.append(float(np.mean(np.abs(median - left))))

    def summary(self) -> dict[str, float | int]:
        """Coverage in percent: of all sequences, of a look on average, of rollouts' ends."""
        result: dict[str, float | int] = {"looks": len(self.each)}
        for name, (low, high) in BANDS.items():
            per_look = [100 * np.mean((each > low) & (each < high)) for each in self.each]
            weights = [len(each) for each in self.each]
            result[f"covered_{name}"] = round(float(np.average(per_look, weights=weights)), 1)
            result[f"covered_{name}_mean_of_looks"] = round(float(np.mean(per_look)), 1)
            ends = 100 * np.mean([low < place < high for place in self.last])
            result[f"covered_{name}_rollout_end"] = round(float(ends), 1)
        result["width_90_tokens"] = round(float(np.mean(self.widths)), 1)
        result["median_error_tokens"] = round(float(np.mean(self.errors)), 1)
        return result


def fitted(lengths: np.ndarray, cap: int) -> LengthModel:
    return LengthModel.empty(cap).updated(lengths, lengths >= cap)


def on_real_lengths(folder: Path) -> dict[str, dict]:
    """Every data set by its own other half and by each other data set."""
    data = {name: real_lengths(folder, name) for name in FILES}
    results: dict[str, dict] = {}
    for name, (lengths, cap) in data.items():
        for source in data:
            for is_informed in (True, False):
                places = Places()
                for seed in range(SPLITS):
                    fit = halves(data[source][0], seed)[0]
                    rollout = halves(lengths, seed)[1]
                    model = fitted(np.minimum(fit, cap), cap)
                    places.add(model, rollout, np.arange(len(rollout)), is_informed)
                key = "itself" if source == name else source
                results.setdefault(name, {}).setdefault(f"fitted on {key}", {})[
                    "with the rollout so far" if is_informed else "baseline alone"
                ] = places.summary()
    return results


def on_simulated_groups(folder: Path) -> dict[str, dict]:
    """Four epochs of one half's lengths teach, a fifth of the other half's is looked at.

    `siblings` looks at it as if its prompts had never been seen.
    """
    results = {}
    for name in ("math-l5, Qwen2.5-7B", "ServeGen, DeepSeek-R1"):
        lengths, cap = real_lengths(folder, name)
        for kind, share in (("matched", 0.3), ("matched", 0.7), ("heavy", 0.5)):
            places = {how: Places() for how in ("baseline", "siblings", "siblings and epochs")}
            for seed in range(SPLITS):
                rng = np.random.default_rng(seed)
                taught, looked_at = halves(lengths, seed)
                epochs = hierarchy(rng, kind=kind, share=share, persistence=0.8)
                model = LengthModel.empty(cap)
                for quantile, prompt in itertools.islice(epochs, 4):
                    rollout = at_quantiles(taught, quantile)
                    model = model.updated(rollout, rollout >= cap, prompt)
                quantile, prompt = next(epochs)
                rollout = at_quantiles(looked_at, quantile)
                places["baseline"].add(model, rollout, prompt, is_informed=False)
                places["siblings"].add(model, rollout, prompt + 1000)
                places["siblings and epochs"].add(model, rollout, prompt)
            results[f"{name}; {kind}, ρ = {share}, φ = 0.8"] = {
                how: each.summary() for how, each in places.items()
            }
    return results


def median_ms(call: Callable[[], object], repeats: int = 200) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return round(1e3 * float(np.median(seconds)), 3)


def milliseconds() -> dict[str, float]:
    """Of `survival` for 4,096 sequences: 512 prompts of 16,384 known ones, 48 moments."""
    rng, cap, known = np.random.default_rng(0), 32_768, 16_384
    model = LengthModel.empty(cap)
    for start in range(0, known, 512):
        of = np.repeat(np.arange(start, start + 512), 8)
        lengths = np.minimum(rng.lognormal(7.4, 1.0, len(of)), cap).astype(int) + 1
        model = model.updated(lengths, lengths >= cap, of)
    of = np.repeat(np.arange(512), 8)
    moments = np.unique(np.round(cap * np.linspace(0, 1, 49) ** 2).astype(int))[:-1]
    results = {}
    for name, live, is_ragged, are_known in (
        ("4,096 running", 4096, False, True),
        ("3,000 running, 1,096 ended", 3000, False, True),
        ("512 running, 3,584 ended", 512, False, True),
        ("4,096 running, each with other tokens", 4096, True, True),
        ("4,096 running, siblings unknown", 4096, False, False),
    ):
        order, done = rng.permutation(4096), rng.integers(1, 1200, 4096 - live)
        now = rng.integers(0, 5000, live) if is_ragged else np.full(live, 1200)
        is_cut = np.zeros(len(done), bool)
        siblings = Siblings(np.arange(512), of[order[:live]], of[order[live:]], done, is_cut)
        given = siblings if are_known else None
        results[name] = median_ms(partial(model.survival, now, cap - now, moments, given))
    lengths, none = np.full(4096, 1000), np.zeros(4096, bool)
    results["once an iteration: updated, and its first survival"] = median_ms(
        lambda: model.updated(lengths, none, of).survival(lengths, cap - lengths, moments), 20
    )
    results["checkpoint_kB"] = round(len(json.dumps(model.to_json())) / 1e3)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/length_calibration.json")
    )
    args = parser.parse_args()
    folder = args.data / "lengths"
    if not folder.is_dir():
        sys.exit(f"error: no response lengths in {folder}: name their folder's parent by --data.")
    start = time.perf_counter()
    result = {
        "command": "python -m benchmarks.length_calibration --data ../shared/data",
        "milliseconds_a_replan": milliseconds(),
        "real_lengths": on_real_lengths(folder),
        "simulated_groups": on_simulated_groups(folder),
    }
    result["seconds"] = round(time.perf_counter() - start)
    args.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
