"""From lines to results beside a made-up session: when stop strings are looked for does not show."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from runs import write_checkpoint

from pat_jax.batch_generation.answers import StopFinder
from pat_jax.batch_generation.job import BatchJob
from pat_jax.batch_generation.overrides import SamplingOverrides
from pat_jax.batch_generation.result_file import ResultFile
from pat_jax.batch_generation.text_session import TextSession
from pat_jax.common.errors import UserError
from pat_jax.engine.sequences.responses import Completion
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
        parts: Any = prompts, 3, cast(Any, session), session.tokenizer
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
