"""Kinds of examples to learn from: how each is packed, its loss, and its held-out metrics.

Knows tokens, losses and names of metrics. Does not know files, models or steps.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal

import numpy as np
from jaxtyping import Float, Int

from pat_jax.rl.algorithm.losses import Loss
from pat_jax.rl.algorithm.pair_loss import DPOLoss, PairLoss
from pat_jax.rl.algorithm.preferences import MARGIN, agreement, sums_by_text, to_pair_batch
from pat_jax.rl.algorithm.supervised import (
    CrossEntropy,
    cross_entropy,
    num_learned,
    to_example_batch,
)
from pat_jax.rl.batches.packing import Shape
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.rl.data.examples import Each, Example, Examples, Pair

REFERENCE = "reference_logprobs"  # the column of the frozen reference


@dataclass(frozen=True)
class Lessons(ABC, Generic[Each]):
    """Examples or pairs to learn from, and to evaluate on."""

    train: Examples[Each]
    heldout: Sequence[Each]
    note: str  # for the user: how many there are, how many were left out

    KIND: ClassVar[str]  # a checkpoint is resumed by the same kind of run
    TITLE: ClassVar[str]  # name of the kind of training, for the user
    FILES: ClassVar[str]  # the files that examples are read from, for the user
    HEAD: ClassVar[Literal["vocab", "scalar"]] = "vocab"  # of the trained model
    TEXTS: ClassVar[int] = 1  # number of texts of up to `max_length` tokens in a row

    @property
    @abstractmethod
    def loss(self) -> Loss: ...

    @abstractmethod
    def batch(self, drawn: Sequence[Each], shapes: Sequence[Shape]) -> TrainBatch:
        """Packs what was drawn into one mini-batch of micro-batches of these shapes."""

    @abstractmethod
    def lengths(self, drawn: Sequence[Each]) -> Int[np.ndarray, " texts"]:
        """Returns the tokens of each text."""

    @abstractmethod
    def num_in_loss(self, drawn: Sequence[Each]) -> int:
        """Returns the number of tokens that the loss reads."""

    @abstractmethod
    def measure(self, predicted: TrainBatch, column: str) -> dict[str, float]:
        """Returns `eval/*` of a held-out batch.

        Args:
          predicted: the batch with the model's predictions in `column`, and with those of the
            reference if there is one.
        """

    @abstractmethod
    def words(self, measured: Mapping[str, Any], many: int) -> str:
        """Returns a line for the user with the metrics of `measure`, which were measured on `many`
        examples or pairs."""


@dataclass(frozen=True)
class ExampleLessons(Lessons[Example]):
    """The cross-entropy of examples, or of rows of text."""

    tokens_per_byte: float | None = None  # of held-out text; None: examples, or none held out

    KIND = "examples"
    TITLE = "supervised fine-tuning"
    FILES = ".json, .jsonl or .parquet files of examples, text files or folders"

    @property
    def loss(self) -> Loss:
        return CrossEntropy()

    def batch(self, drawn: Sequence[Example], shapes: Sequence[Shape]) -> TrainBatch:
        return to_example_batch(drawn, shapes)

    def lengths(self, drawn: Sequence[Example]) -> Int[np.ndarray, " texts"]:
        return np.array([len(example) for example in drawn])

    def num_in_loss(self, drawn: Sequence[Example]) -> int:
        return num_learned(drawn)

    def measure(self, predicted: TrainBatch, column: str) -> dict[str, float]:
        measured = {"eval/loss": (loss := cross_entropy(predicted, column))}
        if self.tokens_per_byte is not None:
            measured["eval/bits_per_byte"] = loss / math.log(2) * self.tokens_per_byte
        return measured

    def words(self, measured: Mapping[str, Any], many: int) -> str:
        bits = measured.get("eval/bits_per_byte")
        what = "examples"
        if bits is not None:
            what = f"rows, {bits:.3f} bits per byte"
        return f"held-out loss {measured['eval/loss']:.4f} ({many} {what})"


@dataclass(frozen=True)
class _PairLessons(Lessons[Pair]):
    TEXTS = 2
    FILES = ".json, .jsonl or .parquet files of preference pairs"

    def lengths(self, drawn: Sequence[Pair]) -> Int[np.ndarray, " texts"]:
        return np.array([len(text) for pair in drawn for text in (pair.chosen, pair.rejected)])

    def num_in_loss(self, drawn: Sequence[Pair]) -> int:
        return num_learned([text for pair in drawn for text in (pair.chosen, pair.rejected)])

    @abstractmethod
    def rewards(self, predicted: TrainBatch, column: str) -> Float[np.ndarray, "pairs 2"]:
        """Returns the reward of the chosen and the rejected text of each pair."""

    def words(self, measured: Mapping[str, Any], many: int) -> str:
        loss, accuracy = measured["eval/loss"], measured["eval/accuracy"]
        return f"held-out loss {loss:.4f}, accuracy {accuracy:.1%} ({many} pairs)"


@dataclass(frozen=True)
class RewardLessons(_PairLessons):
    """The loss of a reward model, which gives the last token of each text a reward."""

    center_coef: float = 0.0
    has_margin: bool = False

    KIND = "pairs"
    TITLE = "reward model"
    HEAD = "scalar"

    @property
    def loss(self) -> Loss:
        return PairLoss(self.center_coef, self.has_margin)

    def batch(self, drawn: Sequence[Pair], shapes: Sequence[Shape]) -> TrainBatch:
        return to_pair_batch(drawn, shapes, at="token")

    def rewards(self, predicted: TrainBatch, column: str) -> Float[np.ndarray, "pairs 2"]:
        return sums_by_text(predicted, column)

    def measure(self, predicted: TrainBatch, column: str) -> dict[str, float]:
        rewards = self.rewards(predicted, column)
        measured = agreement(rewards, margins=sums_by_text(predicted, MARGIN)[:, 0])
        measured["loss"] += self.center_coef * float(np.mean(rewards.sum(axis=1) ** 2))
        measured["reward_mean"] = float(rewards.mean())
        return {f"eval/{name}": value for name, value in measured.items()}


@dataclass(frozen=True)
class PreferenceLessons(_PairLessons):
    """Direct preference optimization: the policy itself is the reward, relative to a reference."""

    beta: float = 0.1
    label_smoothing: float = 0.0

    KIND = "pairs of a policy"
    TITLE = "direct preference optimization"

    @property
    def loss(self) -> Loss:
        return DPOLoss(self.beta, self.label_smoothing)

    def batch(self, drawn: Sequence[Pair], shapes: Sequence[Shape]) -> TrainBatch:
        return to_pair_batch(drawn, shapes, at="target")

    def rewards(self, predicted: TrainBatch, column: str) -> Float[np.ndarray, "pairs 2"]:
        return self.beta * (sums_by_text(predicted, column) - sums_by_text(predicted, REFERENCE))

    def measure(self, predicted: TrainBatch, column: str) -> dict[str, float]:
        rewards = self.rewards(predicted, column)
        measured = agreement(rewards, label_smoothing=self.label_smoothing)
        return {f"eval/{name}": value for name, value in measured.items()}
