"""Chat templates: what transformers renders, and one sentence for what a template may do instead."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from pat_jax.rl.text import chat_template
from pat_jax.rl.text.chat_template import ChatTemplate, ChatTemplateError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "Hi."}
SMALL = {"seconds": 1.0, "num_bytes": 2**28}  # of the processor; a usual text takes a thousandth
own = pytest.mark.usefixtures("own_text_process")


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE, {"bos_token": "^"})


messages = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "user", "assistant"]),
        st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: text.strip()),
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(messages)
def test_chats_are_those_of_transformers(template, chat):
    is_begun = chat[-1]["role"] == "assistant"
    (expected,), _ = render_jinja_template(
        [chat],
        chat_template=TEMPLATE,
        add_generation_prompt=not is_begun,
        continue_final_message=is_begun,
        bos_token="^",
    )
    assert template.render(chat) == expected


def test_what_a_template_may_not_be_told_is_left_out(template):
    assert template.render([{**USER, "tool_calls": None, "name": "x"}]).startswith("^<user>Hi.")


WAYS_TO_RAISE = {
    "{{ raise_exception('roles must alternate') }}": "TemplateError: roles must alternate",
    "{{ messages[0].role.nothing.more }}": "UndefinedError",
    "{{ messages[7].content + 'x' }}": "UndefinedError",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ 'a' + 1 }}": "TypeError",
    "{{ 'a'.__class__.__mro__ }}": "SecurityError",
    "{% for i in range(10 ** 9) %}x{% endfor %}": "OverflowError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{% include 'other' %}": "TypeError",
    "{{ 'x' * 2 ** 33 }}": "MemoryError",
    "{% set n = namespace(s='x') %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}": "MemoryError",
    '{{ "\\ud800" }}': "UnicodeEncodeError: 'utf-8' codec",
    "{{ 'x' * 2 ** 25 }}": "a text of 33,554,43",
}


def refusal(template: ChatTemplate, content: str) -> str:
    with pytest.raises(ChatTemplateError) as caught:
        template.render([{"role": "user", "content": content}])
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and len(message) < 400
    return message


def test_what_a_template_raises_is_one_sentence_and_its_process_goes_on():
    branches = (
        f"{{% if messages[0].content == '{i}' %}}{way}{{% endif %}}"
        for i, way in enumerate(WAYS_TO_RAISE)
    )
    template = ChatTemplate("".join(branches) + "{{ messages[0].content }}", {}, seconds=20.0)
    assert template.render([USER]) == "Hi."
    assert template._worker is not None
    process = template._worker.process
    for i, words in enumerate(WAYS_TO_RAISE.values()):
        message = refusal(template, str(i))
        assert message.startswith("the chat template fails (") and words in message
    assert template.render([USER]) == "Hi." and template._worker.process is process


@pytest.mark.parametrize("text", ["{{ messages | nofilter }}", "{% for m in messages %}", "{{"])
def test_a_template_that_is_none_is_one_sentence(text: str):
    assert "(Template" in refusal(ChatTemplate(text, {}, **SMALL), "Hi.")


@own
def test_a_template_that_does_not_end_is_ended_and_the_next_chat_is_rendered():
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    text = (
        f"{{% if messages[0].content == 'loop' %}}{loop}{{% endif %}}"
        "{% if messages[0].content == 'power' %}{% set n = 10 %}{{ n ** (n ** n) }}{% endif %}"
        "{{ messages[0].content }}"
    )
    template = ChatTemplate(text, {}, **SMALL)
    for content in ("loop", "power"):  # in Python, and in C
        assert template.render([USER]) == "Hi."
        assert "works for more than 1 s" in refusal(template, content)
    assert template.render([USER]) == "Hi."


@own
def test_the_process_ends_with_the_template():
    template = ChatTemplate(TEMPLATE, {"bos_token": ""})
    template.render([USER])
    assert template._worker is not None
    process = template._worker.process
    assert process is not None and process.poll() is None
    del template
    assert process.poll() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_ctrl_c_is_not_for_the_process_of_a_template(template):
    template.render([USER])
    assert os.getpgid(template._worker.process.pid) != os.getpgid(0)


def test_texts_that_each_take_nearly_their_limit_have_a_budget(monkeypatch):
    monkeypatch.setattr(chat_template, "BUDGET_S", 0.2)
    monkeypatch.setattr(chat_template, "EACH_S", 0.001)
    slow = "{% for i in range(99999) %}{% for j in range(9) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(f"{slow}{{{{ messages[0].content }}}}", {})
    rendered = 0
    with pytest.raises(
        ChatTemplateError, match=r"has worked for .* expected less than 0.001 s for"
    ):
        for _ in range(60):
            template.render([USER])
            rendered += 1
    assert 0 < rendered < 30


def test_many_texts_of_a_usual_template_have_no_end_of_it(template, monkeypatch):
    monkeypatch.setattr(chat_template, "BUDGET_S", 0.0)
    assert {template.render([USER]) for _ in range(300)} == {"^<user>Hi.</><assistant>"}
