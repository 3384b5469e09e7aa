"""What a line of a prompts file may say, text that grows token by token, and how large an engine has to be."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from runs import CHAT_TEMPLATE, write_checkpoint
from tokenizer_files import BOS, write_tokenizer

from pat_jax.batch_generation.answers import StopFinder, TextStream, describe
from pat_jax.batch_generation.config import Reach
from pat_jax.batch_generation.overrides import SamplingOverrides
from pat_jax.batch_generation.prompt_lines import parse_ask, reach
from pat_jax.batch_generation.prompts import PromptFile, parse_object
from pat_jax.engine.sequences.responses import Completion
from pat_jax.engine.sequences.sampling import MAX_STOP_IDS, Sampling
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(write_checkpoint(tmp_path_factory.mktemp("checkpoint")))


NOTHING = SamplingOverrides()


def ask(
    line: dict,
    tokenizer: HuggingFaceTokenizer | None,
    defaults: SamplingOverrides = NOTHING,
    recommended: SamplingOverrides = NOTHING,
):
    given = parse_object(json.dumps(line).encode())
    return parse_ask(given, defaults, recommended, tokenizer, max_length=100)


def test_a_prompt_is_text_a_chat_or_token_ids(tokenizer: HuggingFaceTokenizer):
    messages = [{"role": "user", "content": "the"}]
    assert ask({"prompt": "the"}, tokenizer).tokens == tuple(tokenizer.encode("the"))
    assert ask({"messages": messages}, tokenizer).tokens == tuple(tokenizer.encode_prompt(messages))
    assert ask({"token_ids": [5, 6]}, None).tokens == (5, 6)


def test_a_chat_is_shown_the_tools_of_its_line(tmp_path):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
    knowing = HuggingFaceTokenizer(
        write_tokenizer(tmp_path, eos_token="<eos>", chat_template=template)
    )
    line = {"messages": [{"role": "user", "content": "the"}]}
    tools = [{"type": "function", "function": {"name": "clock"}}]
    shown = tuple(knowing.encode_prompt(line["messages"], {"tools": tools}))
    assert ask(line | {"tools": tools}, knowing).tokens == shown
    assert ask(line | {"tools": json.dumps(tools)}, knowing).tokens == shown
    assert ask(line | {"tools": []}, knowing).tokens == ask(line, knowing).tokens != shown
    for tools, words in (
        (["clock"], r"^tools is \['clock'\]: expected a list of objects .*\.$"),
        ("clock", r"^tools is 'clock': expected JSON, but it is broken JSON .*\.$"),
    ):
        with pytest.raises(ValueError, match=words):
            ask(line | {"tools": tools}, knowing)
    with pytest.raises(ValueError, match="tools belongs to a chat template: expected messages"):
        ask({"prompt": "the", "tools": tools}, knowing)


def test_a_prompt_that_has_begun_begins_once(tmp_path):
    begins = HuggingFaceTokenizer(write_tokenizer(tmp_path, eos_token="<eos>"))
    for text in ("the", "<bos>the"):
        assert ask({"prompt": text}, begins).tokens == (BOS, *begins.encode("the"))
    assert ask({"token_ids": [BOS, BOS]}, begins).tokens == (BOS, BOS)


@pytest.mark.parametrize("where", ["line", "command"])
def test_a_stop_string_that_is_a_special_token_is_one(tokenizer, where: str):
    def of(stop: str | list[str], **line: object):
        if where == "line":
            return ask({"prompt": "the", "stop": stop, **line}, tokenizer)
        return ask({"prompt": "the", **line}, tokenizer, SamplingOverrides(stop=stop))

    assert of("<im>").sampling.stop_token_ids == (2,)
    found = of(["<im>", "end", "<pad>", "<eos>"], stop_token_ids=[7, 2])
    assert found.sampling.stop_token_ids == (7, 2, 1)  # the model's own end needs no other
    assert found.stops == ("<im>", "end", "<pad>", "<eos>")  # spelt in letters they are texts
    assert of("end").sampling.stop_token_ids == ()
    assert of(["<eos>"], stop_token_ids=[9], min_tokens=3).sampling == Sampling(
        min_tokens=3, stop_token_ids=(9,)
    )


def test_a_line_wins_over_the_defaults():
    defaults = SamplingOverrides(temperature=0.5, top_p=0.9, n=2, max_tokens=7, logprobs=0)
    line = {"token_ids": [5], "temperature": 0, "stop_token_ids": [8], "seed": 3, "min_p": None}
    found = ask(line, None, defaults)
    assert found.sampling == Sampling(temperature=0, top_p=0.9, stop_token_ids=(8,))
    assert (found.num_samples, found.max_tokens, found.seed) == (2, 7, 3)
    assert found.wants_logprobs and not ask({"token_ids": [5]}, None).wants_logprobs
    assert ask({"token_ids": [5] * 30}, None).max_tokens == 70  # what is left


@pytest.mark.parametrize("tokens", [71, 70])
def test_a_recommended_length_is_cut_to_what_fits_and_an_asked_one_is_not(tokens: int):
    line, output = {"token_ids": [5] * 30}, SamplingOverrides(max_tokens=tokens, top_k=4)
    recommended = ask(line, None, NOTHING, output)
    assert recommended.max_tokens == min(tokens, 70) and recommended.sampling.top_k == 4
    assert ask(line, None, output).max_tokens == tokens
    assert ask(line, None, SamplingOverrides(max_tokens=3), output).max_tokens == 3
    asked = {**line, "max_tokens": tokens}
    assert ask(asked, None, NOTHING, SamplingOverrides(max_tokens=5)).max_tokens == tokens


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({}, "expected one of prompt, messages, token_ids in each line, found none"),
        ({"prompt": "a", "token_ids": [3]}, "found prompt and token_ids"),
        ({"prompt": 3}, "prompt is a JSON int: expected text"),
        ({"token_ids": [1.5]}, "token_ids is no list of integers"),
        ({"messages": "hello"}, "expected a list of chat messages"),
        ({"messages": [{"role": "user"}]}, "each with role and content"),
        ({"prompt": "a", "temprature": 1}, "'temprature': did you mean 'temperature'?"),
        ({"prompt": "a", "max_new_tokens": 1}, "did you mean 'max_tokens'?"),
        (
            {"prompt": "a", "logit_bias": 1},
            "logit_bias is not offered: leave it out, or put a field of",
        ),
        ({"prompt": "a", "stop": "x<im>"}, "in which '<im>' is a special token, which no text has"),
        ({"prompt": "a", "stop": ["<pad>", "<im>"], "stop_token_ids": [*range(3, 10)]}, "9 tokens"),
        ({"prompt": "a", "xyzzy": 1}, "put fields of your own in 'metadata'"),
        ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot': expected 0 (greedy)"),
        ({"prompt": "a", "top_p": 0}, "top_p is 0: expected a number above 0"),
        ({"prompt": "a", "n": 0}, "n is 0: expected an integer from 1 to 65,536"),
        ({"prompt": "a", "max_tokens": 2.5}, "max_tokens is 2.5: expected"),
        ({"prompt": "a", "seed": -1}, "seed is -1: expected"),
        ({"prompt": "a", "stop": [""]}, "stop is ['']: expected text"),
        ({"prompt": "a", "stop_token_ids": 3}, "stop_token_ids is 3: expected"),
        ({"prompt": "a", "stop_token_ids": ["a"]}, "stop_token_ids is ('a',): expected"),
        (
            {"prompt": "a", "stop_token_ids": list(range(MAX_STOP_IDS + 1))},
            "stop_token_ids has 9 entries: expected up to 8",
        ),
    ],
    ids=str,
)
def test_a_wrong_line_is_refused_in_one_sentence(tokenizer, line: dict, words: str):
    with pytest.raises(ValueError) as caught:
        ask(line, tokenizer)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).endswith((".", "?"))


@pytest.mark.parametrize("line", ["", "[1]", "3", '{"prompt": ', "null"])
def test_a_line_that_is_no_object_is_refused(line: str):
    with pytest.raises(ValueError, match="expected one object a line"):
        parse_object(line.encode())


def test_text_needs_a_tokenizer():
    for line in ({"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
        with pytest.raises(ValueError, match="no tokenizer: expected token_ids"):
            ask(line, None)
    with pytest.raises(ValueError, match="expected stop_token_ids"):
        ask({"token_ids": [3], "stop": "x"}, None)


@given(text=st.text(max_size=30), stops=st.lists(st.text(min_size=1, max_size=3), min_size=1))
def test_text_grows_to_what_is_decoded_at_once(tokenizer, text: str, stops: list[str]):
    """Characters of several tokens included: the tokenizer has one token a byte."""
    tokens = tokenizer.encode(text)
    stream, finder = TextStream(tokenizer), StopFinder(tokenizer, stops)
    for i, token in enumerate(tokens):
        stream.add(token)
        assert text.startswith(stream.text)
        assert finder.has_stopped(tokens[: i + 1]) == any(stop in stream.text for stop in stops)
        assert StopFinder(tokenizer, stops).has_stopped(tokens[: i + 1]) == finder.has_stopped(
            tokens[: i + 1]
        )
    assert stream.text == text == tokenizer.decode(tokens)
    first = min((text.find(stop) for stop in stops if stop in text), default=None)
    if first is not None:
        assert text.startswith(finder.text) and len(finder.text) >= first
        assert tokenizer.decode(tokens[: finder.num_tokens])[len(finder.text) :] in stops


@given(
    text=st.text("ab é", max_size=20),
    stops=st.lists(st.text("ab é", min_size=1, max_size=3), min_size=1, max_size=3),
    least=st.integers(0, 20),
    burst=st.integers(1, 7),
)
@example(text="abb", stops=["a", "é a"], least=1, burst=1)  # the longer looks further back
def test_stop_strings_end_after_the_least_tokens(tokenizer, text, stops, least, burst):
    tokens = tokenizer.encode(text)

    def count(stop: str) -> int:
        """Characters that a stop string which may count ends after, of the first of them."""
        ends = [i + len(stop) for i in range(len(text)) if text.startswith(stop, i)]
        return min((end for end in ends if len(text[:end].encode()) > least), default=len(text) + 1)

    finder = StopFinder(tokenizer, stops, min_tokens=least)
    for end in range(burst, len(tokens) + burst, burst):
        finder.has_stopped(tokens[:end])
    first = min(map(count, stops))  # the tokenizer has one token a byte
    assert finder.has_stopped(tokens) == (first <= len(text))
    assert finder.num_tokens == len(text[:first].encode())
    if finder.found_at is not None:
        assert text[finder.found_at : first] in stops


def test_what_fails_behind_a_stop_string_is_no_error(tokenizer):
    tokens = np.array(tokenizer.encode("a cat"))
    done = Completion(tokens, np.zeros(len(tokens), np.float32), True, error="NaN.")
    stopped = describe(done, tokenizer, StopFinder(tokenizer, ["at"]), wants_logprobs=False)
    ids = tokens.tolist()
    assert stopped == {"text": "a c", "token_ids": ids, "finish_reason": "stop"}
    for finder in (None, StopFinder(tokenizer, ["x"])):
        failed = describe(done, tokenizer, finder, wants_logprobs=False)
        assert (failed["finish_reason"], failed["error"]) == ("error", "NaN.")


def test_the_file_of_a_checkpoint_is_the_last_to_be_asked(tmp_path: Path):
    from pat_jax.commands.generate import recommended_overrides
    from pat_jax.common.errors import UserError

    assert recommended_overrides(tmp_path) == SamplingOverrides()
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "x": 1}))
    assert recommended_overrides(tmp_path) == SamplingOverrides(
        temperature=0.6, top_k=20, max_tokens=9
    )
    file.write_text(json.dumps({"temperature": 0.6, "do_sample": False, "top_p": None}))
    assert recommended_overrides(tmp_path) == SamplingOverrides(temperature=0.0)
    for bad, words in (('{"top_p": 7}', "top_p is 7"), ("[]", "expected one JSON object")):
        file.write_text(bad)
        with pytest.raises(UserError) as caught:
            recommended_overrides(tmp_path)
        assert str(file) in str(caught.value) and words in str(caught.value)


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
    return reach(PromptFile(file), parse, MOST)


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
