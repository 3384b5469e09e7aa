"""Real response lengths, split into a half to learn from and a half to replay."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pat_jax.planning.lengths.model import LengthModel
from pat_jax.profiling.simulate.machine import Workload

NAMES = {  # of sets that several benchmarks replay
    "zeroeval_math-l5_Qwen2.5-7B-Instruct": "math",
    "zeroeval_gsm_Qwen2-7B-Instruct": "gsm",
    "servegen_deepseek_r1_client35_output_hist": "r1",
    "azure2023_code_lengths": "code",
}
LONGEST = 16_384  # tokens; a set's cap is the power of two nearest to its longest response


@dataclass(frozen=True)
class LengthData:
    """Responses with their prompts; the two halves have no response in common."""

    name: str
    prompts: np.ndarray  # int[responses], tokens
    responses: np.ndarray  # int[responses], tokens
    weights: np.ndarray  # float[responses], how often each occurred
    cap: int  # longer responses are cut there

    @property
    def max_prompt(self) -> int:
        return int(self.prompts.max())

    def _half(self, number: int) -> np.ndarray:
        return np.random.default_rng(17).permutation(len(self.responses))[number::2]

    def learned(self) -> np.ndarray:
        """The lengths of the first half's responses, repeated as often as they occurred, int[responses]."""
        half = self._half(0)
        return np.repeat(self.responses[half], np.round(self.weights[half]).astype(int))

    def fitted(self, cap: int | None = None) -> LengthModel:
        """A length model of the first half."""
        cap = cap or self.cap
        lengths = np.minimum(self.learned(), cap)
        return LengthModel.empty(cap).updated(lengths, lengths >= cap)

    def sample(self, size: int, seed: int) -> Workload:
        """`size` sequences drawn from the second half, each on its own, with replacement."""
        rng, half = np.random.default_rng((seed, size)), self._half(1)
        share = self.weights[half] / self.weights[half].sum()
        drawn = rng.choice(half, size, p=share)
        return Workload(self.prompts[drawn], np.minimum(self.responses[drawn], self.cap), self.cap)


def read(data: Path) -> dict[str, LengthData]:
    """Every set of the folder that has a length for each response: some have names, the others are
    called as their file."""
    files = (data / "lengths").glob("*.csv")
    tables = {NAMES.get(path.stem, path.stem): _columns(path) for path in files}
    others = tables["math"]["prompt_tokens"]  # for histograms, which have no prompts
    found = (_set(name, tables[name], others) for name in sorted(tables))
    return {one.name: one for one in found if one is not None}


def _set(name: str, columns: dict[str, list[str]], others: list[str]) -> LengthData | None:
    """None: the file has means of many responses."""
    known = next((columns[x] for x in ("output_tokens", "generated_tokens") if x in columns), None)
    if known is None:
        return None
    responses = np.array(known, float).astype(int)
    asked = next((columns[x] for x in ("prompt_tokens", "context_tokens") if x in columns), None)
    rng = np.random.default_rng(3)
    prompts = rng.choice(np.array(others, int), len(responses)) if asked is None else asked
    weights = columns.get("weight_requests", np.ones(len(responses)))
    generated = responses >= 1
    cap = min(LONGEST, 2 ** round(math.log2(responses.max())))
    asked, weights = np.array(prompts, int), np.array(weights, float)
    return LengthData(name, asked[generated], responses[generated], weights[generated], cap)


def _columns(path: Path) -> dict[str, list[str]]:
    with path.open() as file:
        names, *rows = csv.reader(file)
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
