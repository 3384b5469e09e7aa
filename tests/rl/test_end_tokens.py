"""Tokens that end a response: those that the files of a checkpoint name, whichever of them does."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_files import write_tokenizer
from transformers import GenerationConfig

from pat_jax.common.errors import UserError
from pat_jax.rl.text.end_tokens import named_eos_ids
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer

Fields = dict[str, Any] | None  # of a file; None: there is none


def write(directory: Path, generation: Fields, config: Fields) -> Path:
    for name, fields in (("generation_config.json", generation), ("config.json", config)):
        if fields is not None:
            (directory / name).write_text(json.dumps(fields))
    return directory


def those_of_transformers(directory: Path) -> tuple[int, ...]:
    """As a model takes them that is loaded from there."""
    try:
        config = GenerationConfig.from_pretrained(directory)
    except OSError:
        config = GenerationConfig.from_pretrained(
            directory, config_file_name="config.json", _from_model_config=True
        )
    eos = config.eos_token_id
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({}, {}, ()),
        (None, {}, ()),
        ({"eos_token_id": 7}, {"eos_token_id": [3, 7]}, (7,)),
        ({"eos_token_id": [7, 5]}, {}, (7, 5)),
        (None, {"eos_token_id": 3}, (3,)),
        (None, {"eos_token_id": [3, 4]}, (3, 4)),
        (None, {"text_config": {"eos_token_id": [4, 9]}}, (4, 9)),
        (None, {"eos_token_id": None, "text_config": {"eos_token_id": 9}}, (9,)),
        (None, {"eos_token_id": 3, "text_config": {"eos_token_id": 9}}, (3,)),
    ],
)
def test_they_are_those_of_transformers(
    tmp_path: Path, generation: Fields, config: Fields, ids: tuple[int, ...]
):
    write(tmp_path, generation, config)
    assert named_eos_ids(tmp_path) == those_of_transformers(tmp_path) == ids


@pytest.mark.parametrize(
    "generation", [{"temperature": 0.7}, {"eos_token_id": None}, {"eos_token_id": []}]
)
def test_config_json_is_asked_where_the_other_file_names_none(tmp_path: Path, generation: Fields):
    assert named_eos_ids(write(tmp_path, generation, {"eos_token_id": [3, 4, 3]})) == (3, 4)


def test_a_tokenizer_adds_them_to_its_own(tmp_path: Path):
    write(write_tokenizer(tmp_path, eos_token="<eos>"), None, {"eos_token_id": [2, 0]})
    assert HuggingFaceTokenizer(tmp_path).eos_ids == (0, 2)


@pytest.mark.parametrize("eos", ["<eos>", [0, "2"], True, 2.0, {"id": 2}])
def test_what_is_no_id_is_refused_with_its_place(tmp_path: Path, eos: object):
    fields = {"eos_token_id": eos}
    for where, config in (("", fields), ("text_config.", {"text_config": fields})):
        write(tmp_path, None, config)
        message = rf"config\.json, field {where}eos_token_id, is .*: expected an integer"
        with pytest.raises(UserError, match=message):
            named_eos_ids(tmp_path)
