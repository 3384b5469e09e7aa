"""Files of recorded responses: what they hold, and one sentence for every mistake in them."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pat_jax.common.errors import UserError
from pat_jax.profiling.capacity.recorded_responses import RecordedResponses, read_responses

VOCAB = 100


def encode(text: str) -> list[int]:
    return [ord(character) % VOCAB for character in text]


def written(folder: Path, *rows: object) -> Path:
    path = folder / "responses.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(folder: Path, *rows: object, encode=None) -> RecordedResponses:
    return read_responses(written(folder, *rows), VOCAB, encode)


def test_rows_are_grouped_by_their_prompt(tmp_path: Path):
    found = read(
        tmp_path,
        {"prompt_id": "a", "prompt_token_ids": [9, 8], "token_ids": [1, 2]},
        {"prompt_id": "b", "prompt_token_ids": [7], "tokens": [3]},
        {"prompt_id": "a", "prompt_token_ids": [9, 8], "token_ids": [4, 5, 6]},
        {"prompt_id": "a", "token_ids": []},
    )
    a, b = found.groups
    assert (a.prompt, a.responses) == ([9, 8], [[1, 2], [4, 5, 6]])
    assert (b.prompt, b.responses, b.earlier) == ([7], [[3]], [])
    assert found.lengths.tokens.tolist() == [1, 2, 3]
    prompts = found.lengths.prompts
    assert prompts is not None and prompts.tolist() == [1, 2, 2]
    assert found.lengths.source == "responses.jsonl, 3 responses"


def test_what_generate_writes_is_read_as_it_is(tmp_path: Path):
    """Its prompts are those of its lines; a line that went wrong has no response."""
    rows = [
        {
            "line": line,
            "sample": sample,
            "id": 7,
            "text": "",
            "token_ids": [line, sample, 5],
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 4, "completion_tokens": 3},
        }
        for line in (1, 2)
        for sample in (0, 1)
    ]
    wrong = {"line": 3, "sample": 0, "text": None, "token_ids": [], "finish_reason": "error"}
    found = read(tmp_path, *rows, {**wrong, "error": "too long"})
    assert [group.responses for group in found.groups] == [
        [[1, 0, 5], [1, 1, 5]],
        [[2, 0, 5], [2, 1, 5]],
    ]
    assert found.lengths.prompts is None


def test_texts_are_tokenized_and_epochs_told_apart(tmp_path: Path):
    rows = [
        {"prompt": "ab", "text": "cd", "epoch": 1},
        {"prompt": "ab", "response": "e", "epoch": 3},
        {"prompt": "ab", "text": "f", "epoch": 2},
    ]
    (group,) = read(tmp_path, *rows, encode=encode).groups
    assert group.prompt == encode("ab") and group.responses == [encode("e")]
    assert group.earlier == [encode("f"), encode("cd")]


def test_parquet_is_read(tmp_path: Path):
    table = pa.table({"prompt_id": ["x", "x"], "token_ids": [[1, 2], [3]]})
    pq.write_table(table, tmp_path / "responses.parquet")
    (group,) = read_responses(tmp_path / "responses.parquet", VOCAB, None).groups
    assert [list(response) for response in group.responses] == [[1, 2], [3]]
    assert np.size(group.prompt) == 0


WRONG = {
    "a": ({"prompt_id": 1, "token_ids": [1, VOCAB]}, "field 'token_ids', has the token 100: .* 99"),
    "b": ({"prompt_id": 1, "token_ids": [1, -1]}, "has the token -1"),
    "c": ({"prompt_id": 1, "token_ids": [1, True]}, "has the token True"),
    "d": (
        {"prompt_id": 1, "token_ids": "1 2"},
        "'token_ids', is '1 2': expected a list of token ids",
    ),
    "e": ({"token_ids": [1]}, "has the fields token_ids: expected one of prompt_id, line, id"),
    "f": ({"prompt_id": 1}, r"has the fields prompt_id: expected the response as token_ids or"),
    "g": ({"prompt_id": 1, "text": "ab"}, "no tokenizer for its text: .*--model DIR"),
    "h": (
        {"prompt_id": 1, "token_ids": [1], "epoch": "new"},
        "'epoch', is 'new': expected a whole",
    ),
    "i": ([1, 2], "is .* expected an object with fields"),
}


@pytest.mark.parametrize(("row", "words"), WRONG.values(), ids=WRONG)
def test_a_row_that_is_none_is_named_in_one_sentence(tmp_path: Path, row: object, words: str):
    good = {"prompt_id": 1, "token_ids": [1]}
    with pytest.raises(UserError, match=words) as caught:
        read(tmp_path, good, row)
    message = str(caught.value)
    assert "responses.jsonl, line 2, " in message and "\n" not in message


def test_a_file_without_responses_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="holds no responses: expected at least one row"):
        read(tmp_path)
    with pytest.raises(UserError, match="none of its 1 rows has a response with a token"):
        read(tmp_path, {"prompt_id": 1, "token_ids": []})
    for name in ("missing.jsonl", "responses.csv"):
        with pytest.raises(UserError, match=r"--responses_file is .*expected a file named \.jsonl"):
            read_responses(tmp_path / name, VOCAB, None)
