"""A mistake in a program is told in the words of a program, whatever object it is about."""

import re

import pytest

import pat_jax
from pat_jax.common.errors import UserError


def by_length(completions, **columns):
    return [-len(text) for text in completions]


class Rows:
    """As `datasets.Dataset`."""

    column_names = ("prompt",)


class Splits(dict):
    """As `datasets.DatasetDict`."""

    column_names = ("train",)


def refused(**options: object) -> str:
    with pytest.raises(UserError) as caught:
        pat_jax.train(**options)  # pyright: ignore[reportArgumentType]
    assert not re.search(r"--(?!help)\w", str(caught.value))
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reward_funcs": by_length, "num_generation": 4}, "did you mean reward=by_length?"),
        ({"num_generation": 4}, "num_generation=4: did you mean num_generations=4?"),
        ({"reward_funcs": [by_length, by_length]}, "did you mean reward=...?"),
        ({"train_dataset": Rows()}, "did you mean data=...?"),
        ({"eval_dataset": [{"prompt": "a"}]}, "did you mean eval={'data': ...}?"),
        ({"model_name_or_path": "mine"}, "did you mean model='mine'?"),
        ({"eval_steps": 5}, "did you mean eval={'every': 5}?"),
        (
            {"rollout": {"tempature": 1}},
            "rollout={'tempature': 1}: did you mean rollout={'temperature': 1}",
        ),
        ({"critic": {"lora": {"rnk": 1}}}, "did you mean critic={'lora': {'rank': 1}}"),
        ({"max_length": 512}, "as long as max_prompt_length and max_completion_length together"),
        ({"mask_truncated_completions": True}, "truncated='mask' leaves cut responses out"),
        ({"resume_from_checkpoint": "x"}, "resume=True continues the run in run_dir"),
        ({"use_vllm": True}, "option use_vllm=True is not needed: responses are generated"),
        ({"processing_class": Rows()}, "option processing_class=... is not needed"),
        ({"peft_config": Rows()}, "lora={'rank': ...} above 0 trains adapters"),
        (
            {"qqqq": object()},
            "unknown option qqqq=...: --help all of a command lists every option.",
        ),
        ({"optimizer": 3}, "optimizer=3 is a section: write optimizer={'OPTION': ...}."),
    ],
)
def test_a_name_that_is_none_is_answered_with_arguments(options: dict, words: str):
    assert words in refused(**options)
