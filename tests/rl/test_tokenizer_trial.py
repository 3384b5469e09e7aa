"""Tokenizers that panic, explode, never end or bring code: one sentence, and this process goes on."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizer_files import write_tokenizer

from pat_jax.common.errors import UserError
from pat_jax.rl.text import tokenizer_trial
from pat_jax.rl.text.text_worker import Limits, TextWorker
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer

REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
NEG_INF = {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": ""}


def damaged(folder: Path, damage: Callable[[dict[str, Any]], object]) -> Path:
    write_tokenizer(folder, eos_token="<eos>")
    content = json.loads((folder / "tokenizer.json").read_text())
    damage(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        HuggingFaceTokenizer(folder)
    sentence = str(caught.value)
    assert str(folder) in sentence and "\n" not in sentence and len(sentence) < 1000
    return sentence


def set_normalizer(*steps: object) -> Callable[[dict[str, Any]], object]:
    return lambda x: x.update(normalizer={"type": "Sequence", "normalizers": list(steps)})


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a text that doubles 40 times": set_normalizer(*[REPLACE] * 40),
    "a text that grows much": set_normalizer(REPLACE | {"content": "b" * 5000}),
    "a vocabulary without a model": lambda x: x.update(model={}),
    "ids that are no numbers": lambda x: x["model"]["vocab"].update(the="x"),
    "ids below zero": lambda x: x["model"]["vocab"].update(the=-1),
    "merges of nothing": lambda x: x["model"].update(merges=[["zzz", "yyy"]]),
    "an unknown normalizer": lambda x: x.update(normalizer={"type": "None"}),
    "a regular expression that is none": set_normalizer(
        {"type": "Replace", "pattern": {"Regex": "(("}, "content": ""}
    ),
    "no version": lambda x: x.clear(),
    "a deep one": lambda x: x.update(normalizer=json.loads("[" * 900 + "]" * 900)),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[pytest.mark.slow] * (x == "a text that doubles 40 times"))
        for x in DAMAGES
    ],
)
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, monkeypatch, capfd, name: str):
    monkeypatch.setattr(tokenizer_trial, "LIMITS", Limits(4.0, 2**30))
    began = time.monotonic()
    refused(damaged(tmp_path, DAMAGES[name]))
    assert time.monotonic() - began < 120
    assert "panicked" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"null", b"[" * 100_000, b"{}" * 9])
def test_a_tokenizer_file_of_any_bytes(tmp_path: Path, content: bytes):
    write_tokenizer(tmp_path, eos_token="<eos>")
    (tmp_path / "tokenizer.json").write_bytes(content)
    refused(tmp_path)


def test_one_that_ends_its_process_or_never_ends(tmp_path: Path, monkeypatch):
    """Whatever the library does today with a file, by what the process does."""
    monkeypatch.setattr(tokenizer_trial, "LIMITS", Limits(0.001, 2**30))
    write_tokenizer(tmp_path, eos_token="<eos>", model_max_length=77)
    assert "it works for more than 0.001 s" in refused(tmp_path)
    monkeypatch.setattr(tokenizer_trial, "LIMITS", Limits(20.0, 2**12))
    assert "no tokenizer could be read" in refused(tmp_path)
    monkeypatch.undo()
    assert HuggingFaceTokenizer(tmp_path).encode("the")  # the next one has another process


def test_a_request_is_read_without_the_limit_of_the_one_before():
    worker, text = TextWorker(), "a" * 2**23
    rendered = "render", "{{ messages[0].content }}", {}, [{"content": text}]
    worker.begin(Limits(20.0, 2**12), *rendered)
    assert worker.answer().error.startswith("MemoryError")
    worker.begin(Limits(20.0, 2**30), *rendered)
    assert worker.answer().text == text


def test_a_sound_one_is_tried_once(tmp_path: Path, monkeypatch):
    write_tokenizer(tmp_path, eos_token="<eos>")
    first = HuggingFaceTokenizer(tmp_path)
    monkeypatch.setattr(tokenizer_trial, "take", lambda: pytest.fail("it was tried again"))
    assert HuggingFaceTokenizer(tmp_path).checksum == first.checksum


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("tokenizer_class", ["MineTokenizer", "PreTrainedTokenizerFast"])
def test_the_code_of_a_checkpoint_is_not_run(tmp_path, monkeypatch, where, tokenizer_class):
    """Nor is anybody asked whether it may: there is nobody to answer."""
    write_tokenizer(tmp_path, eos_token="<eos>")
    ran = tmp_path / "it_ran"
    code = f"open({str(ran)!r}, 'w')\nclass MineTokenizer: pass\nclass MineConfig: pass\n"
    (tmp_path / "mine.py").write_text(code)
    own = {
        "AutoTokenizer": ["mine.MineTokenizer", "mine.MineTokenizer"],
        "AutoConfig": "mine.MineConfig",
    }
    if where == "tokenizer_config.json":
        path = tmp_path / where
        fields = json.loads(path.read_text()) | {"tokenizer_class": tokenizer_class}
        path.write_text(json.dumps(fields | {"auto_map": own}))
    else:
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
        (tmp_path / where).write_text(json.dumps({"model_type": "mine", "auto_map": own}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    before = set(sys.modules)
    try:
        HuggingFaceTokenizer(tmp_path)
    except UserError as error:
        assert "\n" not in str(error) and "no code to be run" in str(error)
    assert not ran.exists() and not any("mine" in name for name in sys.modules.keys() - before)
