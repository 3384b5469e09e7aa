"""Options of preference pairs: the columns that hold them."""

from dataclasses import dataclass

from pat_jax.common.options.declared import SHORT_FORM, option
from pat_jax.common.rules import NAMES
from pat_jax.config.fine_tuning import LearnedFiles


@dataclass(frozen=True)
class PairColumnOptions(LearnedFiles):
    """Columns of preference pairs."""

    chosen_key: str = ""
    """Column of the preferred response, text or chat messages; `a.b` is field b of column a. Empty:
    chosen."""
    rejected_key: str = ""
    """Column of the response that is not preferred. Empty: rejected."""


@dataclass(frozen=True)
class PairDataConfig(PairColumnOptions):
    """Preference pairs to learn from."""

    files: tuple[str, ...] = option((), NAMES, **SHORT_FORM)
    """JSON, JSON-lines or Parquet files of pairs, patterns of their names ('data/*.parquet'), or
    datasets of the Hugging Face Hub (owner/name:config/split, as `train --help` says), with the
    columns chosen and rejected, and prompt unless both responses begin with it."""
    prompt_key: str = ""
    """Column of the prompt, text or chat messages. Empty takes prompt, problem, question,
    instruction, query or input, the first that is there."""
    margin_key: str = ""
    """Column of a number: by how much the reward of the chosen response is to exceed the other.
    Empty: margin, if it is there."""
