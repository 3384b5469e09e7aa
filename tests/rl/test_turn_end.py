"""Responses end where the chat template ends an answer, whatever end tokens the checkpoint names."""

import json
from pathlib import Path

import pytest
from tokenizer_files import write_tokenizer

from pat_jax.batch_generation.config import GenerateConfig
from pat_jax.config.data import DataConfig
from pat_jax.config.run import RunConfig
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.models.presets import preset
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.rl.text.turn_end import stop_at_turn_end
from pat_jax.run.start.task import load_tokenizer, note_of

pytest.importorskip("jinja2", reason="chat templates are rendered by jinja2")
EOS, IM = 0, 2
CHAT = "{% for m in messages %}{{ m.role }}:{{ m.content }}END{% endfor %}"


def tokenizer(folder: Path, template: str | None, **files: object) -> HuggingFaceTokenizer:
    given = {} if template is None else {"chat_template": template}
    found = HuggingFaceTokenizer(write_tokenizer(folder, eos_token="<eos>", **given, **files))
    stop_at_turn_end(found)
    return found


@pytest.mark.parametrize("end", ["<im>", "<im>\n", "\n<im>", "<im>\n<eos>", "</p><im>"])
def test_another_token_behind_the_answer_ends_a_response_as_well(tmp_path: Path, end: str):
    found = tokenizer(tmp_path, CHAT.replace("END", end))
    assert found.eos_ids == (EOS, IM) and found.eos_texts == ("<eos>", "<im>")
    assert "'<im>'" in found.note and "<eos>" in found.note and "\n" not in found.note


@pytest.mark.parametrize(
    "template",
    [
        None,  # a base model
        CHAT.replace("END", "<eos>"),
        CHAT.replace("END", "<eos><im>"),
        CHAT.replace("END", ""),  # nothing behind the answer
        CHAT.replace("END", "\n"),
        CHAT.replace("END", "<bos>"),  # begins what follows
        "{{ raise_exception('no chat') }}",
        "{{ messages[0].content }}<im>",  # it shows no answer
    ],
)
def test_otherwise_nothing_is_added_and_nothing_said(tmp_path: Path, template: str | None):
    found = tokenizer(tmp_path, template)
    assert found.eos_ids == (EOS,) and found.note == ""


def test_an_added_token_that_is_not_special_ends_nothing(tmp_path: Path):
    write_tokenizer(tmp_path, eos_token="<eos>", chat_template=CHAT.replace("END", "</p>\n\n<eos>"))
    loaded = json.loads((tmp_path / "tokenizer.json").read_text())
    like = loaded["added_tokens"][0]
    for text in ("</p>", "\n\n"):
        number = len(loaded["model"]["vocab"])
        loaded["model"]["vocab"][text] = number
        loaded["added_tokens"].append(like | {"id": number, "content": text, "special": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(loaded))
    found = HuggingFaceTokenizer(tmp_path)
    stop_at_turn_end(found)
    assert len(found.encode("</p>\n\n")) == 2
    assert found.eos_ids == (EOS,) and found.note == ""


def test_a_token_that_the_generation_config_names_is_no_other(tmp_path: Path):
    found = tokenizer(tmp_path, CHAT.replace("END", "<im>"), generation={"eos_token_id": [IM]})
    assert found.eos_ids == (EOS, IM) and found.note == ""


def test_a_text_of_several_tokens_ends_nothing_and_is_said(tmp_path: Path):
    found = tokenizer(tmp_path, CHAT.replace("END", "\n### End"))
    assert found.eos_ids == (EOS,) and "'### End'" in found.note


def test_every_command_that_generates_ends_responses_there(tmp_path: Path):
    write_tokenizer(tmp_path, eos_token="<eos>", chat_template=CHAT.replace("END", "<im>"))
    (tmp_path / "config.json").write_text(json.dumps({}))
    model, data = str(tmp_path), DataConfig(files=("a.jsonl",))
    generate, shape = GenerateConfig(model=model), preset("tiny")
    evaluate = EvaluateConfig(model=model, data=data).run_config(shape, 1)
    runs = RunConfig(model=model, data=data), generate.model_options, evaluate
    for config in (*runs, generate.run_config(shape, 1)):
        found = load_tokenizer(config.task)
        assert found.eos_ids == (EOS, IM) and note_of(found)
