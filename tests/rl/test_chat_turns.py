"""Which tokens of a chat the assistant says: those that transformers marks where a template tells it."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import write_tokenizer
from transformers import AutoTokenizer

from pat_jax.rl.data.chat_turns import Marked, Piece, join_pieces, mark_turns
from pat_jax.rl.text.chat_template import ChatTemplateError
from pat_jax.rl.text.tokenizer import Chat, HuggingFaceTokenizer

ASK = "{% if add_generation_prompt %}<im>assistant\n{% endif %}"
# Each tells transformers what the assistant says, by {% generation %}.
TEMPLATES = {
    "each turn of the assistant ends": "{% for m in messages %}<im>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<end>\n{% endif %}{% endfor %}" + ASK,
    "every turn ends": "{% for m in messages %}<im>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>{% endgeneration %}"
    "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}" + ASK,
    "the last turn has thoughts": "{% for m in messages %}<im>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{% if loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<eos>{% endgeneration %}\n{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
    + ASK,
    "an answer is asked for with thoughts": "{% for m in messages %}<im>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}" + ASK.replace("\n", "\n<think>"),
}
PLAIN = (
    "{% for m in messages %}<im>{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<im>assistant:{% endif %}"
)


def chat_of(asked: str, answered: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


words = st.text(st.sampled_from("the <a>\n<th"), min_size=1, max_size=12).filter(str.strip)
chats = st.builds(
    lambda system, turns: [
        *({"role": "system", "content": text} for text in system),
        *(message for turn in turns for message in chat_of(*turn)),
    ],
    st.lists(words, max_size=1),
    st.lists(st.tuples(words, words), min_size=1, max_size=4),
)


def output(marked: Marked) -> list[int]:
    return [token for token, is_one in zip(*marked, strict=True) if is_one]


def tokenizer_with(folder: Path, template: str, **chat: Any) -> HuggingFaceTokenizer:
    directory = write_tokenizer(folder, eos_token="<eos>", chat_template=template)
    return HuggingFaceTokenizer(directory, Chat(**chat))


@pytest.fixture(scope="module", params=TEMPLATES)
def both(request, tmp_path_factory) -> tuple[HuggingFaceTokenizer, Any]:
    folder = tmp_path_factory.mktemp("tokenizer")
    ours = tokenizer_with(folder, TEMPLATES[request.param])
    return ours, AutoTokenizer.from_pretrained(folder)


@settings(max_examples=25)
@given(chat=chats)
def test_turns_are_those_that_the_template_tells_transformers(both, chat):
    ours, theirs = both
    expected = theirs.apply_chat_template(
        chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, is_generated = mark_turns(ours, chat)
    # Ours ends with the last answer, theirs with what the template puts behind it.
    assert tokens == expected["input_ids"][: len(tokens)]
    assert is_generated == list(map(bool, expected["assistant_masks"][: len(tokens)]))
    assert not any(expected["assistant_masks"][len(tokens) :])
    assert tokens[-1] in ours.eos_ids and is_generated[-1]


@given(chat=chats)
def test_a_prompt_is_what_a_rollout_is_given(tmp_path_factory, both, chat):
    ours, _ = both
    if "<think>" in ours.chat_text(chat[:1]):
        return  # a chat has no thoughts where a rollout is asked for them
    marked = mark_turns(ours, chat, len(chat) - 1)
    assert marked.tokens == ours.encode_prompt(chat[:-1]) + output(marked)


def test_turns_before_the_first_are_context(both):
    ours, _ = both
    chat = [
        {"role": role, "content": role}
        for role in ("user", "assistant", "assistant", "user", "assistant")
    ]
    runs = [mark_turns(ours, chat, first) for first in range(5)]
    counts = [sum(one.is_generated) for one in runs]
    assert counts[0] == counts[1] > counts[2] > counts[3] == counts[4] > 0
    assert all(one.tokens == runs[0].tokens for one in runs)


def test_a_turn_goes_to_the_first_of_several_ends(tmp_path: Path):
    """As where the template ends turns with another token than the tokenizer's own."""
    template = PLAIN.replace("{% endfor", "<pad>\n<eos>{% endfor")
    directory = write_tokenizer(
        tmp_path, eos_token="<eos>", chat_template=template, generation={"eos_token_id": [0, 1]}
    )
    ours = HuggingFaceTokenizer(directory)
    marked = mark_turns(ours, chat_of("a", "a") * 2)
    assert output(marked) == [*ours.encode("a"), 1] * 2 and marked.tokens[-1] == 1


def test_where_no_turn_ends_the_last_one_gets_its_end(tmp_path: Path):
    ours = tokenizer_with(tmp_path, PLAIN, system_prompt="be")
    marked = mark_turns(ours, [*chat_of("a", "b"), *chat_of("c", "d")])
    assert ours.decode(marked.tokens) == "system:beuser:aassistant:buser:cassistant:d"
    assert output(marked) == [*ours.encode("bd"), ours.eos_ids[0]]
    assert marked.tokens[-1] == ours.eos_ids[0]


def test_a_template_that_does_not_tell_is_one_sentence(tmp_path: Path):
    ours = tokenizer_with(tmp_path, "{{ messages | length }}" + PLAIN)
    chat = chat_of("a", "a") * 2
    message = r"message 2 in another way .* completion"
    with pytest.raises(ChatTemplateError, match=message) as caught:
        mark_turns(ours, chat)
    assert "\n" not in str(caught.value)
    assert sum(mark_turns(ours, chat, 3).is_generated) == 2


USERS = "{% for m in messages %}{% if m.role == 'user' %}<im>user:{{ m.content }}{% endif %}{% endfor %}"
SILENT = {
    "what others say": USERS,
    "and asks": USERS + "{% if add_generation_prompt %}<im>assistant:{% endif %}",
    "empty turns": PLAIN.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}<eos>"),
    "the same to all": PLAIN.replace(
        "{{ m.content }}", "{{ m.content if m.role == 'user' else 'OK' }}"
    ),
    "the last answer alone": PLAIN.replace(
        "{{ m.content }}", "{{ m.content if m.role == 'user' or loop.last }}<eos>"
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_a_template_that_leaves_out_an_answer_is_refused(tmp_path: Path, name: str):
    ours = tokenizer_with(tmp_path, SILENT[name])
    for answer in ("four", "4", "user:", "a\n b"):
        chat = chat_of("2 + 2?", answer) * 2
        with pytest.raises(ChatTemplateError, match=r"leaves out what .* says in message 2"):
            mark_turns(ours, chat)


@pytest.mark.parametrize(
    "writes",
    [
        "{{ m.content | trim }}",
        "{{ m.content | tojson }}",
        "{{ m.content.split('</think>')[-1] }}",
        "{{ m.content | upper }}{{ m.content }}",
    ],
)
def test_a_template_may_change_what_it_writes(tmp_path: Path, writes: str):
    ours = tokenizer_with(tmp_path, PLAIN.replace("{{ m.content }}", f"{writes}<eos>"))
    content = '<think>2 and 2</think> it\'s "four" '
    assert sum(mark_turns(ours, chat_of("2 + 2?", content) * 2).is_generated) > 2 * len(" four ")


def test_a_call_of_a_tool_has_no_text_to_leave_out(tmp_path: Path):
    ours = tokenizer_with(
        tmp_path, PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m.calls }}<eos>")
    )
    asked, answered = chat_of("Late?", "")
    marked = mark_turns(ours, [asked, {**answered, "calls": "clock()"}])
    assert ours.decode(output(marked)) == "clock()"


def test_a_piece_is_read_in_its_context_where_that_leaves_the_prompt_as_it_is():
    """As tokenizers that put a space before a text; and those that join what meets at a border."""

    def with_space(text: str) -> list[int]:
        return [0, *map(ord, text)]

    def in_pairs(text: str) -> list[int]:
        return [hash(text[i : i + 2]) for i in range(0, len(text), 2)]

    pieces = [Piece("abc", False), Piece("de", True)]
    tokens, is_generated = join_pieces(pieces, with_space, with_space)
    assert tokens == with_space("abcde") and is_generated == [False] * 4 + [True] * 2
    tokens, is_generated = join_pieces(pieces, in_pairs, in_pairs)
    assert tokens == in_pairs("abc") + in_pairs("de") and is_generated == [False] * 2 + [True]
