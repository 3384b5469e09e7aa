"""How large an engine has to be for a file of prompts."""

import json
from functools import partial
from pathlib import Path

import pytest

from pat_jax.batch_generation.config import Reach
from pat_jax.batch_generation.overrides import SamplingOverrides
from pat_jax.batch_generation.prompt_lines import parse_ask, reach

MOST = Reach(rows=8, length=64)


def asked(path: Path, *lines: dict, max_tokens: int | None = None, n: int | None = None) -> Reach:
    file = path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    defaults = SamplingOverrides(max_tokens=max_tokens, n=n)
    parse = partial(
        parse_ask,
        defaults=defaults,
        recommended=SamplingOverrides(),
        tokenizer=None,
        max_length=MOST.length,
    )
    return reach(file, parse, MOST)


def tokens(count: int, **own: object) -> dict:
    return {"token_ids": [5] * count, **own}


@pytest.mark.parametrize(
    ("lines", "options", "expected"),
    [
        ([tokens(3), tokens(7)], {"max_tokens": 10}, Reach(2, 17)),
        ([tokens(3, max_tokens=20), tokens(7)], {"max_tokens": 10}, Reach(2, 23)),
        ([tokens(3, n=2), tokens(7)], {"max_tokens": 10, "n": 3}, Reach(5, 17)),
        ([tokens(3)], {}, Reach(1, 64)),  # as much as fits
        ([tokens(3, n=8)], {"max_tokens": 1}, MOST),  # others would wait
        ([tokens(3), {"prompt": "no tokenizer"}], {"max_tokens": 1}, MOST),
        ([tokens(60)], {"max_tokens": 10}, Reach(1, 64)),  # refused when its turn comes
    ],
)
def test_as_many_rows_and_tokens_as_are_asked_for(tmp_path, lines, options, expected):
    assert asked(tmp_path, *lines, **options) == expected
