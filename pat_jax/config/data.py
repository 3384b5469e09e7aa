"""Options of what is learned from: files, columns, and how a prompt becomes a chat."""

import json
from dataclasses import dataclass, field, fields

from pat_jax.common.json_text import JsonError, parse_json
from pat_jax.common.options.declared import SHORT_FORM
from pat_jax.common.rules import GIVEN, Rule, check, require
from pat_jax.rl.plain_text import has_lone_surrogate
from pat_jax.rl.tokenizer import Chat

ARITHMETIC = "arithmetic"  # the built-in task


def _is_object(text: str) -> bool:
    try:
        return isinstance(parse_json(text or "{}"), dict)
    except JsonError:
        return False


WHOLE_TEXT: Rule = (lambda text: not has_lone_surrogate(text), "text in UTF-8")
JSON_OBJECT: Rule = (_is_object, """a JSON object such as '{"enable_thinking": false}'""")


@dataclass(frozen=True)
class DataConfig:
    """Problems to learn from."""

    files: tuple[str, ...] = field(default=(ARITHMETIC,), metadata=SHORT_FORM)
    """JSON, JSON-lines or Parquet files of problems, patterns of their names ('data/*.parquet'),
    datasets of the Hugging Face Hub, or the name of the built-in task. A dataset is owner/name,
    owner/name:config, owner/name:split or owner/name:config/split (openai/gsm8k:main/test); unless
    named, the configuration is default or main, the split train, to evaluate on test."""
    prompt_key: str = ""
    """Column of the prompt, text or chat messages; `a.b` is field b of column a. Empty takes prompt,
    problem, question or messages, the first that is there."""
    answer_key: str = ""
    """Column of the answer, which rewards get as `answer`. Empty takes answer,
    reward_model.ground_truth, ground_truth or solution, the first that is there."""
    system_prompt: str = ""
    """System message of chats that have none."""
    chat_template_kwargs: str = ""
    """Variables of the chat template, a JSON object such as '{"enable_thinking": false}'."""

    def __post_init__(self):
        check(self, "chat_template_kwargs", JSON_OBJECT, "data.")
        check(self, "system_prompt", WHOLE_TEXT, "data.")

    @property
    def is_arithmetic(self) -> bool:
        return self.files == (ARITHMETIC,)

    @property
    def chat(self) -> Chat:
        return Chat(self.system_prompt, json.loads(self.chat_template_kwargs or "{}"))

    def check_given(self) -> None:
        is_given = self.files != () and all(self.files)
        require(is_given, "data.files", " ".join(self.files), GIVEN[1])

    def check_unused(self) -> None:
        """Refuses what the built-in task would ignore."""
        for each in fields(self):
            if each.name != "files":
                value = getattr(self, each.name)
                expected = f"nothing with the built-in task {ARITHMETIC!r}, which has no files"
                require(value == each.default, f"data.{each.name}", value, expected)
