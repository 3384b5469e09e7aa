import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_files import BOS, write_tokenizer
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import processors
from transformers import GenerationConfig

from pat_jax.common.errors import UserError
from pat_jax.rl.data.arithmetic import CharTokenizer
from pat_jax.rl.text.special_tokens import named_eos_ids
from pat_jax.rl.text.tokenizer import Chat, HuggingFaceTokenizer, check_vocabulary

ALPHABET = "abc +="
IM = 2
TEMPLATE = (
    "{% for m in messages %}<im>{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<im>assistant:{% endif %}"
)


@given(st.text(ALPHABET))
def test_characters_come_back(text):
    tokenizer = CharTokenizer(ALPHABET)
    tokens = tokenizer.encode_prompt(text)
    assert tokenizer.decode([0, *tokens, *tokenizer.eos_ids]) == text
    assert len(tokens) == len(text)
    assert all(tokenizer.eos_ids[0] < token < tokenizer.vocab_size for token in tokens)


def test_a_checksum_tells_vocabularies_apart(tmp_path):
    alike = [HuggingFaceTokenizer(write_tokenizer(tmp_path, eos_token="<eos>")) for _ in range(2)]
    first, again = (tokenizer.checksum for tokenizer in alike)
    assert first == again
    others = {CharTokenizer(alphabet).checksum for alphabet in ("abc", "acb", "abcd")}
    assert len({first, *others}) == 4


def test_an_unknown_character_is_named():
    with pytest.raises(UserError, match="'z'"):
        CharTokenizer(ALPHABET).encode("abz")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> HuggingFaceTokenizer:
    directory = write_tokenizer(
        tmp_path_factory.mktemp("tokenizer"),
        generation={"eos_token_id": [2, 0]},
        eos_token="<eos>",
        pad_token="<pad>",
    )
    return HuggingFaceTokenizer(directory)


@given(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "<" not in text))
def test_a_checkpoints_tokenizer_gives_the_text_back(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokenizer.decode([*tokens, *tokenizer.eos_ids, tokenizer.pad_id]) == text
    assert max(tokens, default=0) < tokenizer.vocab_size


def test_spaces_before_punctuation_stay(tmp_path):
    key = "clean_up_tokenization_spaces"
    dirty = {key: True, f"{key}_for_bpe_even_though_it_will_corrupt_output": True}
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, eos_token="<eos>", **dirty))
    assert tokenizer.decode(tokenizer.encode("is it ? no .")) == "is it ? no ."


def test_a_base_models_prompt_is_the_text_after_its_beginning(tokenizer):
    assert tokenizer.encode_prompt("the the") == [BOS, *tokenizer.encode("the the")]
    assert BOS not in tokenizer.encode("the the")
    messages = [{"role": "system", "content": "the"}, {"role": "user", "content": "end"}]
    assert tokenizer.encode_prompt(messages) == [BOS, *tokenizer.encode("the\n\nend")]


CONTENTS = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("template", [None, CONTENTS, f"<bos>{CONTENTS}"])
@pytest.mark.parametrize("adds_it", [True, False])
def test_a_sequence_has_one_beginning_token(tmp_path, template, adds_it: bool):
    """The tokenizer, the template or the text itself."""
    chat = {"chat_template": template} if template else {}
    directory = write_tokenizer(tmp_path, eos_token="<eos>", bos_token="<bos>", **chat)
    if not adds_it:
        path = directory / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    tokenizer = HuggingFaceTokenizer(directory)
    for text in ("the", "<bos>the", "<bos>", "", " <bos>the", "<im><bos>the"):
        bare = tokenizer.encode(text)
        begun = bare if text.startswith("<bos>") else [BOS, *bare]
        of_text = begun if adds_it else bare
        expected = {None: of_text, CONTENTS: bare}.get(template, begun)
        assert tokenizer.encode_text(text) == of_text
        assert tokenizer.encode_prompt(text) == expected


def test_special_tokens_are_left_out_of_texts_or_kept(tmp_path):
    directory = write_tokenizer(
        tmp_path, eos_token="<eos>", pad_token="<pad>", generation={"eos_token_id": [0]}
    )
    dropping = HuggingFaceTokenizer(directory)
    keeping = HuggingFaceTokenizer(directory, skip_special_tokens=False)
    tokens = dropping.encode("the<im>the")
    assert (dropping.decode(tokens), keeping.decode(tokens)) == ("thethe", "the<im>the")
    assert dropping.dropped == {IM: "<im>"} and keeping.dropped == {}
    assert set(keeping.special.texts.values()) == {"<eos>", "<pad>", "<im>", "<bos>"}


def test_a_single_end_token_in_the_generation_config(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path, generation={"eos_token_id": 2}))
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.pad_id == 2  # none of its own


THINKING = (
    "{% for m in messages %}<im>{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<im>assistant:"
    "{% if enable_thinking is defined and enable_thinking is false %}<no think>{% endif %}{% endif %}"
)


def reads(tokenizer: HuggingFaceTokenizer, *prompt: tuple[str, str], **variables: object) -> str:
    messages = [{"role": role, "content": content} for role, content in prompt]
    tokens = tokenizer.encode_prompt(messages, variables)
    return tokenizer._tokenizer.decode(tokens, skip_special_tokens=False)


def test_every_chat_gets_a_system_prompt_and_variables(tmp_path):
    directory = write_tokenizer(tmp_path, eos_token="<eos>", chat_template=THINKING)
    plain, user = HuggingFaceTokenizer(directory), ("user", "the")
    told = HuggingFaceTokenizer(directory, Chat("be", {"enable_thinking": False}))
    assert reads(plain, user) == "<im>user:the<im>assistant:"
    assert reads(plain, user, enable_thinking=False) == "<im>user:the<im>assistant:<no think>"
    assert reads(told, user) == "<im>system:be<im>user:the<im>assistant:<no think>"
    assert reads(told, user, enable_thinking=True) == "<im>system:be<im>user:the<im>assistant:"
    assert reads(told, ("system", "x"), user).startswith("<im>system:x<im>user:the")
    assert told.encode_prompt("the") == told.encode_prompt([{"role": "user", "content": "the"}])
    with pytest.raises(ValueError, match="no variable 'thinking' to set"):
        reads(plain, user, thinking=False)


def test_what_every_chat_gets_is_refused_where_it_would_be_ignored(tmp_path):
    directory = write_tokenizer(tmp_path, eos_token="<eos>")
    for chat in (Chat("be"), Chat(variables={"enable_thinking": False})):
        with pytest.raises(UserError, match="has no chat template: expected neither"):
            HuggingFaceTokenizer(directory, chat)
    write_tokenizer(tmp_path, eos_token="<eos>", chat_template=THINKING)
    with pytest.raises(UserError, match=r"no variable 'enable_thought' to set"):
        HuggingFaceTokenizer(directory, Chat(variables={"enable_thought": False}))


def test_several_chat_templates_without_a_default(tmp_path):
    several = [{"name": name, "template": TEMPLATE} for name in ("rag", "tool_use")]
    directory = write_tokenizer(tmp_path, eos_token="<eos>", chat_template=several)
    with pytest.raises(UserError, match=r"multiple chat templates.* Expected one chat template\."):
        HuggingFaceTokenizer(directory)


def test_a_chat_template_without_jinja2_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    directory = write_tokenizer(tmp_path, eos_token="<eos>", chat_template=TEMPLATE)
    with pytest.raises(UserError, match="pip install jinja2"):
        HuggingFaceTokenizer(directory)


def without_vocabulary(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')


def replaced(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


GENERATION = "generation_config.json"
DAMAGES = [
    (lambda folder: folder.rename(folder.parent / "moved"), "tokens does not exist"),
    (without_vocabulary, r"no tokenizer files: expected .* tokenizer\.json"),
    (replaced("tokenizer.json", b"{ broken"), "no tokenizer could be read from"),
    (replaced("tokenizer.json", b'{"model": {"type": "BPE"}}'), "no tokenizer could be read from"),
    (replaced("tokenizer_config.json", b"{}"), "names no end-of-sequence token"),
    (replaced(GENERATION, b'{"eos_token_id": "<eos>"}'), r"generation_config\.json, field eos_"),
    (replaced(GENERATION, b"[0]"), r"generation_config\.json.* expected one JSON object"),
    (replaced(GENERATION, b"[" * 5000), r"generation_config\.json.* expected one JSON object"),
    (replaced(GENERATION, b"9" * 5000), r"generation_config\.json.* expected one JSON object"),
    (replaced(GENERATION, b"\xed\xa0\x80"), r"generation_config\.json.* expected one JSON object"),
    (
        lambda folder: (folder / GENERATION).mkdir(),
        r"generation_config\.json.* expected one JSON object",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=range(len(DAMAGES)))
def test_files_that_cannot_be_used_are_one_sentence(tmp_path, damage, message: str):
    (tmp_path / "tokens").mkdir()
    directory = write_tokenizer(tmp_path / "tokens", eos_token="<eos>")
    damage(directory)
    with pytest.raises(UserError, match=message):
        HuggingFaceTokenizer(directory)


@pytest.mark.parametrize("token", [263, -1, 10**30])
def test_a_token_that_ends_responses_has_to_be_one_of_the_models(tmp_path, token: int):
    directory = write_tokenizer(tmp_path, generation={"eos_token_id": [0, token]})
    with pytest.raises(UserError, match=rf"dir: the end-of-sequence token {token} has none of the"):
        check_vocabulary(HuggingFaceTokenizer(directory), 263, source="dir")


def test_the_vocabulary_has_to_fit_the_embedding():
    tokenizer = CharTokenizer(ALPHABET)
    check_vocabulary(tokenizer, tokenizer.vocab_size)
    with pytest.raises(
        UserError, match="largest token id is 7, but the model has 7 embedding rows"
    ):
        check_vocabulary(tokenizer, tokenizer.vocab_size - 1)


# --- tokens that end a response, as the files of a checkpoint name them -----------------------------

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
def test_they_are_those_of_transformers(tmp_path, generation, config, ids):
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


def test_several_tokens_that_begin_a_sequence_stand_there_once(tmp_path):
    directory = write_tokenizer(tmp_path, eos_token="<eos>")
    whole = RustTokenizer.from_file(str(directory / "tokenizer.json"))
    whole.post_processor = processors.TemplateProcessing(
        single="<im> <bos> $A", special_tokens=[("<im>", IM), ("<bos>", BOS)]
    )
    whole.save(str(directory / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(directory)
    for text in ("the", "<im><bos>the"):
        assert tokenizer.encode_text(text) == [IM, BOS, *tokenizer.encode("the")]
    assert tokenizer.encode_text("<bos>the") == [IM, BOS, BOS, *tokenizer.encode("the")]
