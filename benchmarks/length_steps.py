"""How the length model follows lengths that stay, jump or grow: predicted one rollout ahead.

    python -m benchmarks.length_steps

Log-normal lengths whose level is known: rollouts of 512 responses, a cap of 8,192 tokens, ten rollouts
before a change. Of each prediction: by how much the median is off, and the share at the cap.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from scipy.special import ndtr

from pat_jax.planning.lengths.model import LengthModel

CAP, MEDIAN, SPREAD, SIZE = 8192, 900, 0.8, 512
BEFORE, AFTER, REPEATS = 10, 20, 8


def truths() -> dict[str, np.ndarray]:
    """Median lengths over rollouts, float[rollouts], times `MEDIAN`."""
    every = np.arange(BEFORE + AFTER)
    jumps = {
        f"x{times:g}": np.where(every < BEFORE, 1.0, times) for times in (1.3, 2, 4, 0.5, 0.25)
    }
    ramps = {f"{100 * rate:+g} % a rollout": np.exp(rate * every) for rate in (0.01, 0.03, -0.03)}
    return {"as before": np.ones(len(every)), **jumps, **ramps}


def followed(level: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Error of the predicted median, and the predicted share at the cap, float[rollouts] each."""
    rng, model = np.random.default_rng(seed), LengthModel.empty(CAP)
    error, share = np.zeros(len(level)), np.zeros(len(level))
    for i, median in enumerate(MEDIAN * level):
        alive = model.survival(np.zeros(1, int), np.array([CAP]), np.arange(CAP))[0]
        error[i] = (alive > 0.5).sum() / median - 1
        share[i] = alive[-1]
        lengths = np.clip(rng.lognormal(np.log(median), SPREAD, SIZE), 1, CAP).astype(int)
        model = model.updated(lengths, lengths >= CAP)
    return error, share


def summary(level: np.ndarray) -> dict[str, float]:
    """From the second rollout after the change on: the first could not be known."""
    errors, shares = zip(*(followed(level, seed) for seed in range(REPEATS)), strict=True)
    error, share = 100 * np.array(errors)[:, BEFORE + 1 :], 100 * np.array(shares)[:, BEFORE + 1 :]
    truth = 100 * ndtr((np.log(MEDIAN * level[BEFORE + 1 :]) - np.log(CAP)) / SPREAD)
    numbers = {
        "median_off_mean": error.mean(),
        "median_off_most_in_the_mean_of_runs": np.abs(error.mean(axis=0)).max(),
        "median_too_long_at_worst": error.max(),
        "median_too_short_at_worst": error.min(),
        "share_at_cap": share.mean(),
        "share_at_cap_in_truth": truth.mean(),
    }
    return {name: round(float(value), 2) for name, value in numbers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/length_steps.json"))
    args = parser.parse_args()
    found = {name: summary(level) for name, level in truths().items()}
    result = {"command": "python -m benchmarks.length_steps", "percent": found}
    text = json.dumps(result, indent=1)
    args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
