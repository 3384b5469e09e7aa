"""Options of adapters that exclude each other, or what they name: one sentence each."""

import pytest

from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--lora.alpha", "16"], "--lora.alpha is 16.0"),
        (["--lora.targets", "q_proj"], "--lora.targets is 'q_proj'"),
        (["--lora.export", "adapter"], "--lora.export is 'adapter'"),
        (["--lora.rank", "-1"], "an integer from 0 to 4,096"),
        (["--lora.rank", "8", "--lora.export", "adapter"], "--checkpoint.export_dir"),
        (["--lora.rank", "8", "--train", "false", "--warm_start.steps", "0"], "--train false"),
        (["--lora.rank", "8", "--lora.dropout", "0.1"], "lora.dropout"),
        (
            ["--lora.rank", "8", "--optimizer.weight_dtype", "bfloat16"],
            "--optimizer.weight_dtype is 'bfloat16': expected float32 with --lora.rank",
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: list[str], said: str):
    with pytest.raises(UserError) as error:
        parse(options)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_what_may_be_together():
    assert parse(["--lora.rank", "8", "--lora.targets", "q_proj", "v_proj"]).lora.targets == (
        "q_proj",
        "v_proj",
    )
    assert parse(["--lora.adapter", "somewhere", "--train", "false"]).lora.is_on
    assert not parse([]).lora.is_on
