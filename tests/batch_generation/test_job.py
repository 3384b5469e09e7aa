"""From lines to results beside a made-up session: when stop strings are looked for does not show."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from runs import write_checkpoint

from pat_jax.batch_generation.answers import StopFinder
from pat_jax.batch_generation.job import BatchJob
from pat_jax.batch_generation.overrides import SamplingOverrides
from pat_jax.batch_generation.prompts import GivenPrompts, PromptFile
from pat_jax.batch_generation.result_file import ResultFile
from pat_jax.batch_generation.text_session import TextSession
from pat_jax.common.errors import UserError
from pat_jax.engine.sequences.responses import Completion
from pat_jax.rl.text.chat_template import ChatTemplate
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer

BURST, MOST, LINES = 7, 60, 40
STOPS = ["2", "5", "no such", "é0"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(write_checkpoint(tmp_path_factory.mktemp("checkpoint")))


class MadeUpSession:
    """Says random digits in bursts, and of some requests that they ended by themselves."""

    max_length = 100

    def __init__(self, tokenizer: HuggingFaceTokenizer, *, asks: bool):
        self.tokenizer, self.asks = tokenizer, asks
        self.num_generated: dict[int, int] = {}

    def stream(self, requests, *, watch, name) -> Iterator[tuple[int, Completion]]:
        running = {i: self.response(request.key) for i, request in enumerate(requests)}
        for length in range(BURST, MOST + BURST, BURST):
            for i, tokens in list(running.items()):
                is_over = length >= len(tokens)
                if is_over or (self.asks and watch(i, tokens[:length])):
                    output = running.pop(i)[:length]
                    self.num_generated[i] = len(output)
                    yield i, Completion(output, np.zeros(len(output), np.float32), not is_over)

    def complaint(self, request) -> str:
        return "too much." if request.max_new_tokens >= self.max_length else ""

    def response(self, key: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng(key)
        text = "".join(rng.choice(list("0123456789 é"), rng.integers(1, MOST - 10)))
        return np.array(self.tokenizer.encode(text), np.int32)


def generate(folder: Path, session: MadeUpSession, *, resume: bool = False) -> bytes:
    prompts, out = folder / "prompts.jsonl", folder / f"asks_{session.asks}.jsonl"
    lines = [{"prompt": "a", "stop": STOPS[i % 4]} for i in range(LINES)]
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with ResultFile(out, resume=resume) as results:
        parts: Any = PromptFile(prompts), 3, cast(Any, session), session.tokenizer
        BatchJob(
            *parts, overrides=SamplingOverrides(), recommended=SamplingOverrides(), results=results
        ).run()
    return out.read_bytes()


def test_a_response_runs_a_burst_on_and_its_result_does_not_show_it(tokenizer, tmp_path: Path):
    eager, never = (MadeUpSession(tokenizer, asks=asks) for asks in (True, False))
    results = generate(tmp_path, eager)
    assert results == generate(tmp_path, never)
    lines = [json.loads(line) for line in results.splitlines()]
    assert [line["line"] for line in lines] == list(range(1, LINES + 1))
    num_cut = 0
    for i, line in enumerate(lines):
        whole = tokenizer.decode(line["token_ids"])
        assert STOPS[i % 4] not in line["text"]
        if line["text"] != whole:
            num_cut += 1
            assert whole.startswith(line["text"] + STOPS[i % 4]) and line["finish_reason"] == "stop"
            finder = StopFinder(tokenizer, [STOPS[i % 4]])
            assert finder.has_stopped(np.array(line["token_ids"]))
            # Found in the burst that it came in, or said with the one after.
            burst_of_stop = -(-len(line["token_ids"]) // BURST)
            assert eager.num_generated[i] <= (burst_of_stop + 1) * BURST
    assert 10 < num_cut < LINES
    assert sum(eager.num_generated.values()) < sum(never.num_generated.values())


def test_a_file_cut_anywhere_is_completed_to_the_same(tokenizer, tmp_path: Path):
    session = MadeUpSession(tokenizer, asks=True)
    whole, out = generate(tmp_path, session), tmp_path / "asks_True.jsonl"
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for size in (0, 5, ends[0], ends[3] + 20, ends[9] - 1, ends[-2] + 1, len(whole)):
        out.write_bytes(whole[:size])
        session.num_generated.clear()
        assert generate(tmp_path, session, resume=True) == whole
        assert len(session.num_generated) == LINES - sum(end <= size for end in ends)


def test_texts_from_python_are_those_of_lines(tokenizer, tmp_path: Path):
    session = MadeUpSession(tokenizer, asks=True)
    lines = [json.loads(line) for line in generate(tmp_path, session).splitlines()]
    output = sum(session.num_generated.values())
    ours = TextSession(
        cast(Any, session), tokenizer, SamplingOverrides(stop="9"), SamplingOverrides(n=1), seed=3
    )
    found = ours.generate([{"prompt": "a", "stop": STOPS[i % 4]} for i in range(LINES)])
    names = ("text", "token_ids", "finish_reason")
    assert [[getattr(x, name) for name in names] for (x,) in found] == [
        [line[name] for name in names] for line in lines
    ]
    assert sum(session.num_generated.values()) <= output  # ended at their stop strings, at once
    (two,) = ours.generate("a", n=2, stop=None)
    assert len(two) == 2 and two[0].text == ours.generate(["a"])[0][0].text != two[1].text
    ids = np.array(tokenizer.encode("a"))
    assert ours.generate([ids]) == ours.generate(["a"]) == ours.generate([ids.tolist()])


@pytest.mark.parametrize(
    ("prompt", "sampling", "sentence"),
    [
        ("a", {"tempratur": 1}, "prompt 2: unknown field 'tempratur': did you mean 'temperature'?"),
        ("a", {"temperature": -1}, "prompt 2: temperature is -1: expected"),
        ("a", {"max_tokens": 100}, "prompt 2: too much."),
        ([1, "b"], {}, "prompt 2: token_ids is no list of integers"),
        ([{"role": "user"}], {}, "prompt 2: messages: expected a list of chat messages"),
    ],
)
def test_what_is_wrong_with_a_prompt_is_one_sentence(tokenizer, prompt, sampling, sentence):
    session: Any = MadeUpSession(tokenizer, asks=True)
    ours = TextSession(session, tokenizer, SamplingOverrides(), SamplingOverrides(), seed=0)
    with pytest.raises(UserError) as caught:
        ours.generate([[1], {"prompt": "a", **sampling} if prompt == "a" else prompt])
    assert str(caught.value).startswith(sentence) and not session.num_generated


# --- prompts gone wild: each line has one result, and the others theirs ---------------------------

SOUND = b'{"prompt": "the"}'


class Echo:
    """Says what it was told."""

    max_length = 100

    def stream(self, requests, *, watch, name) -> Iterator[tuple[int, Completion]]:
        for i, request in enumerate(requests):
            assert request.tokens is not None and request.max_new_tokens >= 1
            tokens = np.array(request.tokens, np.int32)
            yield i, Completion(tokens, np.zeros(len(tokens), np.float32), False)


def results_of(folder: Path, tokenizer: HuggingFaceTokenizer, *lines: bytes) -> list[dict]:
    """Those of `lines` between two sound ones."""
    prompts, out = folder / "prompts.jsonl", folder / "results.jsonl"
    prompts.write_bytes(b"\n".join([SOUND, *lines, SOUND]))
    out.unlink(missing_ok=True)
    with ResultFile(out, resume=False) as file:
        parts: Any = PromptFile(prompts), 3, cast(Any, Echo()), tokenizer
        BatchJob(
            *parts, overrides=SamplingOverrides(), recommended=SamplingOverrides(), results=file
        ).run()
    first, *results, last = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert first["text"] == last["text"] == "the"
    return results


def test_numbers_of_arrays_are_written_as_those_of_json(tokenizer, tmp_path: Path):
    prompt = {"prompt": "a", "id": np.int64(7), "metadata": {"at": (np.arange(2), "é")}}
    given, options, echo = GivenPrompts([prompt]), SamplingOverrides(), cast(Any, Echo())
    with ResultFile(tmp_path / "out.jsonl", resume=False) as results:
        BatchJob(given, 3, echo, tokenizer, options, options, results).run()
    (line,) = results.read()
    assert (line["id"], line["metadata"]) == (7, {"at": [[0, 1], "é"]})


def test_an_exception_ends_the_stream_whose_cache_it_would_keep(tokenizer, monkeypatch):
    ended, options = [], SamplingOverrides()

    class Ending(Echo):
        def stream(self, requests, **given) -> Iterator[tuple[int, Completion]]:
            with ExitStack() as stack:
                stack.callback(ended.append, True)
                yield from super().stream(requests, **given)

    results = ResultFile(None, resume=False)
    monkeypatch.setattr(results, "write", Mock(side_effect=KeyboardInterrupt))
    ours: Any = GivenPrompts(["a"] * 9), 3, cast(Any, Ending()), tokenizer, options, options
    with pytest.raises(KeyboardInterrupt) as caught:
        BatchJob(*ours, results=results).run()
    assert ended and caught.tb  # the traceback has the frames, and they the stream


def refusal(result: dict, words: str = "") -> None:
    message = result["error"]
    assert words in message and message.endswith((".", "?")) and "\n" not in message
    assert len(message) < 500 and result["finish_reason"] == "error"


DEEP = b"[" * 150 + b"]" * 150
WILD = {
    '{"messages":[{"role":"user","content":"a","x":["\\udfff"]}]}': "messages has half of a char",
    '{"messages":[{"role":"user","content":"a","\\udfff":1}]}': "messages has half of a character",
    '{"prompt":"\\ud800"}': "prompt has half of a character",
    '{"prompt":"a","stop":"\\ud800"}': "stop is '\\ud800': expected whole characters",
    '{"prompt":"a","\\ud800":1}': "unknown field '\\ud800'",
    f'{{"prompt":"a","n":{"9" * 4000}}}': "expected an integer from 1 to",
    f'{{"prompt":"a","seed":{"9" * 4301}}}': "an integer of more than 4,300 digits",
    '{"prompt":"a","temperature":1e999}': "temperature is inf: expected 0 (greedy)",
    '{"prompt":"a","top_p":NaN}': "top_p is nan: expected",
    '{"token_ids":[99999999999999999999]}': "token_ids is no list of integers",
    f'{{"prompt":"a","metadata":{DEEP.decode()}}}': "nested more than 100 deep",
    f'{{"prompt":"{"a" * 10**6}"}}': "the prompt has 1,000,000 characters: expected less than the 100",
    f'{{"messages":[{{"role":"user","content":"{"a" * 10**6}"}}]}}': "has 1,000,000 characters",
    '{"prompt":"a","chat_template_kwargs":{"b":1}}': "expected messages beside it",
    '{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":3}': "3: expected an object",
}


@pytest.mark.parametrize(("line", "words"), WILD.items(), ids=range(len(WILD)))
def test_a_line_that_cannot_be_is_refused_and_the_others_go_on(tokenizer, tmp_path, line, words):
    (result,) = results_of(tmp_path, tokenizer, line.encode())
    refusal(result, words)
    assert f"line 2: {words.partition(' ')[0]}" in result["error"] or words in result["error"]


@pytest.mark.parametrize("junk", [b"\xff", b"\xed\xa0\x80"])
def test_bytes_that_are_no_text_are_refused_and_not_replaced(tokenizer, tmp_path, junk: bytes):
    (result,) = results_of(tmp_path, tokenizer, b'{"prompt": "' + junk + b'"}')
    refusal(result, "line 2: not UTF-8 text at byte 13")


def test_a_byte_order_mark_and_copied_fields(tokenizer, tmp_path: Path):
    line = '{"prompt": "é", "id": "\\ud800", "metadata": {"a": [1e999, "\\udfff"]}}'
    (result,) = results_of(tmp_path, tokenizer, line.encode())
    assert (result["text"], result["id"]) == ("é", "\ud800")
    assert result["metadata"] == {"a": [float("inf"), "\udfff"]}
    path = tmp_path / "b.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{}\n\n[]")
    assert list(PromptFile(path)) == [(1, b"{}\n"), (3, b"[]")]


@pytest.mark.slow  # `test_chat_template.py` ends it
@pytest.mark.usefixtures("own_text_process")
def test_a_template_that_fails_or_does_not_end_costs_its_line(tokenizer, tmp_path, monkeypatch):
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    branches = (
        f"{{% if mode == 'loop' %}}{loop}{{% elif mode == 'raise' %}}{{{{ 1 / 0 }}}}{{% endif %}}"
    )
    template = ChatTemplate(branches + "{{ messages[0].content }}", {}, seconds=0.3)
    monkeypatch.setattr(tokenizer, "_template", template)
    chat = {"messages": [{"role": "user", "content": "the"}]}
    modes = ("loop", "none", "raise", "none")
    lines = [json.dumps(chat | {"chat_template_kwargs": {"mode": x}}).encode() for x in modes]
    endless, sound, failing, also_sound = results_of(tmp_path, tokenizer, *lines)
    refusal(endless, "line 2: the chat template works for more than 0.3 s")
    refusal(failing, "line 4: the chat template fails (ZeroDivisionError")
    assert sound["text"] == also_sound["text"] == "the"


texts = st.text() | st.sampled_from(["\ud800", "user", "assistant", "the " * 300])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
scalars |= st.integers(-(10**30), 10**30) | st.integers(1, 3)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)
chats = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "x"]), texts | values), max_size=3
)
NAMES = ["prompt", "messages", "token_ids", "id", "metadata", "chat_template_kwargs", "n", "stop"]
NAMES += ["temperature", "top_p", "top_k", "seed", "max_tokens", "min_tokens", "stop_token_ids"]
lines = st.dictionaries(st.sampled_from(NAMES) | texts, values | chats, max_size=4) | values


@settings(max_examples=150, deadline=None)
@given(st.lists(lines.map(json.dumps).map(str.encode) | st.binary(max_size=30), max_size=5))
@example([b'{"prompt": "a", "n": 2, "stop": ["\\ud800"]}'])
def test_any_line_has_its_results(tokenizer, tmp_path_factory, lines: list[bytes]):
    whole = [line for line in lines if line.strip() and b"\n" not in line]
    results = results_of(tmp_path_factory.mktemp("wild"), tokenizer, *whole)
    assert {result["line"] for result in results} == set(range(2, len(whole) + 2))
    for result in results:
        if "error" in result:
            refusal(result)
