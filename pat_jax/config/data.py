"""Options of the data to learn from: files, columns, and how a prompt becomes a chat."""

from dataclasses import dataclass, field, fields

from pat_jax.common.options.declared import SHORT_FORM
from pat_jax.config.shared import RowOptions

ARITHMETIC = "arithmetic"  # the built-in task


@dataclass(frozen=True)
class DataConfig(RowOptions):
    """Problems to learn from, or to evaluate on."""

    SECTION = "data."

    files: tuple[str, ...] = field(default=(ARITHMETIC,), metadata=SHORT_FORM)
    """Problems: JSON, JSON-lines or Parquet files, patterns of file names ('data/*.parquet'),
    datasets of the Hugging Face Hub, or the built-in task arithmetic. A dataset is owner/name,
    owner/name:config, owner/name:split or owner/name:config/split (openai/gsm8k:main/test). Unless
    named, the configuration is default or main, and the split is train (test for evaluation)."""
    prompt_key: str = ""
    """Column of the prompt (text or chat messages); `a.b` is field b of column a. Default: the
    first that exists of prompt, problem, question, messages, instruction, query and input."""
    answer_key: str = ""
    """Column of the reference answer, which reward functions get as `answer`. Default: the first
    that exists of answer, reward_model.ground_truth, ground_truth and solution."""

    @property
    def is_arithmetic(self) -> bool:
        return self.files == (ARITHMETIC,)

    def check_unused(self) -> None:
        """Raises OptionError if an option is set that the built-in task would ignore."""
        names = (each.name for each in fields(self) if each.name != "files")
        self.need_defaults(names, f"with the built-in task {ARITHMETIC!r}, which has no files")
