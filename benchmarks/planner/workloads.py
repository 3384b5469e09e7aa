"""Real response lengths, split into a half to learn from and a half to replay."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pat_jax.planning.lengths.model import LengthModel
from pat_jax.profiling.predict.kernel_files import NoData
from pat_jax.profiling.simulate.machine import Workload


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

    def quantile(self, share: np.ndarray, half: int) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and response at which so large a share of a half's responses is shorter, tokens."""
        of_half = self._half(half)
        order = of_half[np.argsort(self.responses[of_half], kind="stable")]
        total = np.cumsum(self.weights[order])
        at = order[np.searchsorted(total / total[-1], share).clip(0, len(order) - 1)]
        return self.prompts[at], np.minimum(self.responses[at], self.cap)


def read(data: Path) -> dict[str, LengthData]:
    """The four sets by name.

    Raises:
      NoData: the folder is missing.
    """
    folder = data / "lengths"
    if not folder.is_dir():
        raise NoData.of("response lengths", data, "lengths/")
    math = _zeroeval("math", folder / "zeroeval_math-l5_Qwen2.5-7B-Instruct.csv")
    code = _columns(folder / "azure2023_code_lengths.csv", "context_tokens", "generated_tokens")
    r1 = _columns(
        folder / "servegen_deepseek_r1_client35_output_hist.csv", "output_tokens", "weight_requests"
    )
    prompts = np.random.default_rng(3).choice(math.prompts, len(r1[0]))  # the histogram has none
    return {
        "math": math,
        "gsm": _zeroeval("gsm", folder / "zeroeval_gsm_Qwen2-7B-Instruct.csv"),
        "r1": LengthData("r1", prompts, r1[0].astype(int), r1[1], cap=16_384),
        "code": _uniform("code", code[0], code[1], cap=2048),
    }


def _zeroeval(name: str, path: Path) -> LengthData:
    return _uniform(name, *_columns(path, "prompt_tokens", "output_tokens"), cap=4096)


def _uniform(name: str, prompts: np.ndarray, responses: np.ndarray, cap: int) -> LengthData:
    generated = responses >= 1
    return LengthData(
        name,
        prompts[generated].astype(int),
        responses[generated].astype(int),
        np.ones(generated.sum()),
        cap,
    )


def _columns(path: Path, *names: str) -> tuple[np.ndarray, ...]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    number: Callable[[str], float] = float
    return tuple(np.array([number(row[name]) for row in rows]) for name in names)
