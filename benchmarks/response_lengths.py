"""Response lengths to test with: real ones from files, and hierarchies of prompts made of them.

Knows files and random numbers. Does not know the length model.
"""

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy.special import ndtr

FILES = {  # file, column of the length, column of a weight, cap in tokens
    "math-l5, Qwen2.5-7B": ("zeroeval_math-l5_Qwen2.5-7B-Instruct.csv", "output_tokens", "", 4096),
    "gsm8k, Qwen2-7B": ("zeroeval_gsm_Qwen2-7B-Instruct.csv", "output_tokens", "", 4096),
    "ServeGen, DeepSeek-R1": (
        "servegen_deepseek_r1_client35_output_hist.csv",
        "output_tokens",
        "weight_requests",
        32_768,
    ),
    "Azure 2023, code": ("azure2023_code_lengths.csv", "generated_tokens", "", 4096),
}
LARGEST_HALF = 1024


def columns(path: Path) -> dict[str, list[str]]:
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {name: [row[name] for row in rows] for name in rows[0]}


def real_lengths(folder: Path, name: str) -> tuple[np.ndarray, int]:
    """Response lengths, int[responses] tokens, and the cap they were cut at."""
    file, column, weight, cap = FILES[name]
    table = columns(folder / file)
    lengths = np.array(table[column], float).astype(int)
    if weight:
        lengths = np.repeat(lengths, np.rint(np.array(table[weight], float)).astype(int))
    return np.clip(lengths, 1, cap), cap


def halves(lengths: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """For fitting and for evaluation: no response is in both."""
    shuffled = np.random.default_rng(seed).permutation(lengths)
    half = min(len(lengths) // 2, LARGEST_HALF)
    return shuffled[:half], shuffled[half : 2 * half]


def hierarchy(
    rng: np.random.Generator, *, kind: str, share: float, persistence: float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Epochs of 128 prompts with 8 samples: the quantile of each response, and its prompt."""
    num_prompts, samples = 128, 8
    of = np.repeat(np.arange(num_prompts), samples)
    theta = rng.normal(0, 1, num_prompts)
    spread = rng.lognormal(0, 0.4, num_prompts) if kind == "heavy" else np.ones(num_prompts)
    spread /= np.sqrt(np.mean(spread**2))
    while True:
        fresh = rng.normal(0, 1, num_prompts)
        theta = persistence * theta + np.sqrt(1 - persistence**2) * fresh
        noise = rng.normal(0, 1, len(of))
        if kind == "heavy":
            noise = spread[of] * rng.standard_t(4, len(of)) / np.sqrt(2)
        score = np.sqrt(share) * theta[of] + np.sqrt(1 - share) * noise
        yield ndtr(score), of


def at_quantiles(lengths: np.ndarray, quantile: np.ndarray) -> np.ndarray:
    place = (quantile * len(lengths)).astype(int).clip(0, len(lengths) - 1)
    return np.sort(lengths)[place]
