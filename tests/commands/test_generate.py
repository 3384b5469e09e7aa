"""The generate command: end to end, resumed, with bad input, and against transformers."""

import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import QWEN3, finish, json_lines, start, write_checkpoint

from pat_jax import generate
from pat_jax.batch_generation.config import GenerateConfig
from pat_jax.commands import generate as body
from pat_jax.common.run_command import run_command
from pat_jax.config.generating import SHORTEST_CACHE
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.run.start.setup import model_config
from pat_jax.run.start.task import load_tokenizer

COMMAND = ("-m", "pat_jax.generate")
SMALL = ("--batch", "4", "--max_length", "128", "--layout", "dp2tp1", "--devices", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("generate") / "model")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: dict | str, name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        path.write_text("".join(f"{text}\n" for text in texts))
        return path

    return write


@pytest.fixture
def run(model: Path, tmp_path: Path, monkeypatch) -> Callable[..., list[dict[str, Any]]]:
    """Runs the command in this process; returns its results.

    Its engine is as large as the options allow, so that all share their programs, or fitted to the
    prompts.
    """

    def run(
        prompts: Path, *options: str, out: str = "out.jsonl", fitted: bool = False
    ) -> list[dict[str, Any]]:
        if not fitted:
            monkeypatch.setattr(body, "reach", lambda prompts, parse, most: most)
        names = ["--model", str(model), "--prompts", str(prompts), "--out", str(tmp_path / out)]
        monkeypatch.setattr(sys, "argv", ["generate", *names, *SMALL, *options])
        monkeypatch.setattr(body, "configure", lambda count: jax.devices()[:count])
        run_command(generate.main)
        return json_lines(tmp_path / out)

    return run


def test_lines_become_results_in_their_order(model: Path, write, run):
    tokenizer = HuggingFaceTokenizer(model)
    prompts = write(
        {"prompt": "the cat", "id": "first", "max_tokens": 30, "metadata": {"a": [1]}},
        {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "logprobs": 2},
        {"token_ids": [5, 6, 7], "n": 3, "seed": 9, "max_tokens": 3},
        {"token_ids": [5, 6, 7], "n": 2, "seed": 9, "max_tokens": 3, "logprobs": 0},
        {"token_ids": [5, 6, 7], "temperature": 0, "min_tokens": 6, "max_tokens": 6},
        {"prompt": "x", "temperature": 50, "max_tokens": 100, "stop_token_ids": [*range(10, 18)]},
    )
    results = run(prompts, "--max_completion_length", "8", fitted=True)
    places = [(result["line"], result["sample"]) for result in results]
    assert places == [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (4, 0), (4, 1), (5, 0), (6, 0)]
    assert (results[0]["id"], results[0]["metadata"]) == ("first", {"a": [1]})
    for result in results:
        tokens = result["token_ids"]
        assert result["text"] == tokenizer.decode(tokens)
        assert result["usage"]["completion_tokens"] == len(tokens) > 0
        assert result["finish_reason"] in ("stop", "length") and "error" not in result
    assert results[0]["usage"]["prompt_tokens"] == len(tokenizer.encode("the cat"))
    # A seed makes samples their own, wherever they stand.
    assert [r["token_ids"] for r in results[2:4]] == [r["token_ids"] for r in results[5:7]]
    assert len({tuple(r["token_ids"]) for r in results[2:5]}) == 3
    assert len(results[7]["token_ids"]) == 6
    ends = [token in {*tokenizer.eos_ids, *range(10, 18)} for token in results[8]["token_ids"]]
    assert not any(ends[:-1]) and ends[-1] == (results[8]["finish_reason"] == "stop")
    for i, top in ((1, 2), (5, 0), (6, 0)):
        entries = results[i]["logprobs"]
        assert [entry["token_id"] for entry in entries] == results[i]["token_ids"]
        assert all(entry["logprob"] <= 0 and len(entry.get("top", ())) == top for entry in entries)
    assert all(entry["top"][0][0] == entry["token_id"] for entry in results[1]["logprobs"])
    assert all("logprobs" not in results[i] for i in (0, 2, 3, 4, 7))


@pytest.mark.slow
def test_weights_in_eight_bits_are_a_model_nearby(write, run):
    prompts = write({"token_ids": [5, 6, 7], "max_tokens": 1, "logprobs": 5}, {"token_ids": []})
    kept = [run(prompts, "--weights", w, out=f"{w}.jsonl")[0] for w in ("auto", "int8")]
    one, other = (dict(result["logprobs"][0]["top"]) for result in kept)
    gaps = [abs(one[token] - other[token]) for token in one.keys() & other.keys()]
    assert gaps and 0 < max(gaps) < 0.1


def test_a_stop_string_cuts_text_and_tokens(model: Path, write, run):
    tokenizer = HuggingFaceTokenizer(model)
    line = {"prompt": "more", "seed": 2, "max_tokens": 60, "min_tokens": 20}
    (whole,) = run(write(line))
    text = whole["text"]
    # Each is there once, in whole characters; nothing ends a response before min_tokens.
    pairs = [(i, text[i : i + 2]) for i in range(2, len(text) - 1)]
    once = [(i, pair) for i, pair in pairs if pair.isascii() and text.count(pair) == 1]
    early, stop = once[0][1], next(pair for i, pair in once if i > 20)
    assert once[0][0] < 16
    lines = {**line, "stop": ["never such", stop]}, line, {**line, "stop": early}
    cut, *others = run(write(*lines), out="cut.jsonl")
    for other in others:
        assert other["token_ids"] == whole["token_ids"] and other["finish_reason"] == "length"
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    tokens = cut["token_ids"]
    assert tokens == whole["token_ids"][: len(tokens)] and len(tokens) < 60
    assert stop in tokenizer.decode(tokens) and stop not in tokenizer.decode(tokens[:-1])


def test_what_the_checkpoint_recommends_holds_where_nobody_says_otherwise(model: Path, write, run):
    file = model / "generation_config.json"
    prompts = write({"token_ids": [5, 6]}, {"token_ids": [5, 6], "temperature": 3, "seed": 1})
    file.write_text(json.dumps({"do_sample": False, "max_new_tokens": 11, "eos_token_id": 0}))
    try:
        greedy, hot = run(prompts)
    finally:
        file.unlink()
    asked = "--temperature", "0", "--max_completion_length", "11"
    other, _ = run(prompts, *asked, out="other.jsonl")
    assert greedy["token_ids"] == other["token_ids"] != hot["token_ids"]
    assert max(len(result["token_ids"]) for result in (greedy, hot)) <= 11


@given(max_length=st.integers(2, 5000), context=st.integers(2, 5000))
def test_every_length_has_an_engine(max_length: int, context: int):
    model = replace(QWEN3, max_position=context)
    rollout = GenerateConfig(max_length=max_length).run_config(model, 2).rollout
    longest = rollout.max_prompt_length + rollout.max_completion_length
    assert longest == min(max_length, context)
    assert rollout.min_length <= max(longest + rollout.page_size - 1, SHORTEST_CACHE)


def test_a_response_ends_at_the_longest_that_was_asked_for(write, run):
    """In a bucket of 112 tokens, whole pages."""
    lines = {"token_ids": [5] * 30, "min_tokens": 70}, {"token_ids": [5] * 30, "max_tokens": 71}
    fits, is_more = run(write(*lines), "--max_length", "100")
    assert len(fits["token_ids"]) == 70 and fits["finish_reason"] == "length"
    assert "30 tokens of prompt and up to 71 of response are more than the 100" in is_more["error"]


def test_a_file_that_is_called_as_a_task_brings_no_vocabulary(model: Path):
    for name in ("tiny", str(model)):
        devices = jax.devices()[:2]
        task, other = (
            GenerateConfig(model=name, prompts=prompts).model_options
            for prompts in ("arithmetic", "prompts.jsonl")
        )
        assert model_config(task.task, task.layout_choice, devices) == model_config(
            other.task, other.layout_choice, devices
        )
    assert isinstance(load_tokenizer(task.task), HuggingFaceTokenizer)


BAD_LINES = [
    ("[5]", "a JSON list: expected one object a line."),
    ({"token_ids": [300]}, "token id 300: expected ids from 0 to 299."),
    ({"token_ids": [5] * 600}, "600 tokens, but the model's context is 512"),
    ({"token_ids": [5] * 100, "max_tokens": 29}, "100 tokens of prompt and up to 29 of response"),
    ({"token_ids": [5], "logprobs": 9}, "logprobs is 9: expected at most 5"),
]


def test_a_bad_line_gets_one_sentence_and_the_others_go_on(write, run):
    good = {"token_ids": [5, 6], "seed": 1, "max_tokens": 4}
    lines = [line for wrong, _ in BAD_LINES for line in (wrong, good)]
    path = write(*lines, "", "  ")
    results = run(path)
    assert [result["line"] for result in results] == list(range(1, 2 * len(BAD_LINES) + 1))
    assert len({tuple(result["token_ids"]) for result in results[1::2]}) == 1
    for i, (_, words) in enumerate(BAD_LINES):
        failed = results[2 * i]
        assert failed["error"].startswith(f"{path}, line {2 * i + 1}: ")
        assert words in failed["error"] and "\n" not in failed["error"]
        assert failed["finish_reason"] == "error" and failed["token_ids"] == []
        assert "error" not in results[2 * i + 1]


@pytest.mark.parametrize(
    ("lines", "words"),
    [((1, 2, 3), "has 3 results, but"), ((2,), "line 1, is the result of line 2, sample 0")],
)
def test_results_of_other_prompts_are_left_alone(write, run, capsys, lines, words: str):
    prompts = write({"token_ids": [5]}, {"token_ids": [6]})
    out = write(*({"line": line, "sample": 0} for line in lines), name="others.jsonl")
    before = out.read_bytes()
    with pytest.raises(SystemExit):
        run(prompts, "--resume", out=out.name)
    assert words in capsys.readouterr().err and out.read_bytes() == before


@pytest.mark.slow  # two runs
def test_a_killed_run_goes_on_where_it_was(model: Path, write, tmp_path: Path):
    prompts = write(*({"token_ids": [5 + i % 9], "max_tokens": 100} for i in range(120)))
    names = ["--model", str(model), "--prompts", str(prompts)]

    def begin(out: Path, *options: str):
        asked = *SMALL, "--min_completion_length", "80", *options
        return start(*names, "--out", str(out), *asked, program=COMMAND)

    killed, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    finish(begin(whole))
    process = begin(killed)
    deadline = time.monotonic() + 200
    while not (killed.exists() and killed.read_bytes().count(b"\n") >= 10):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = killed.read_bytes()
    assert 10 <= before.count(b"\n") < 120
    finish(begin(killed, "--resume"))
    after = killed.read_bytes()
    assert after.startswith(before[: before.rfind(b"\n") + 1])
    assert after == whole.read_bytes()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prompts", "{folder}/none.jsonl"), ["--prompts", "none.jsonl", "cannot be read"]),
        (("--out", "{folder}/prompts.jsonl/x"), ["--out", "prompts.jsonl/x", "cannot be written"]),
        (
            ("--prompts", "{folder}"),
            ["--prompts is '{folder}'", "(it is a folder, a device or a pipe)"],
        ),
        (("--prompts", "{folder}/empty.jsonl"), ["empty.jsonl'", "the file has no line, expected"]),
        (("--chat_template_kwargs", "[]"), ["is '[]': expected a JSON object"]),
        (("--chat_template_kwargs", '{{"b": 1}}'), ["the chat template has no variable 'b'"]),
        (("--model", "tiny", "--system_prompt", "be"), ["'tiny' has no tokenizer", "leave them"]),
        (("--out", "{folder}/prompts.jsonl"), ["has 2 results", "--resume, or choose another"]),
        (("--out", "{folder}/prompts.jsonl", "--resume"), ["line 1, is no result of this command"]),
        (("--model", "{folder}/none"), ["--model", "there is no such directory"]),
        (("--logprobs", "301"), ["--logprobs is 301: expected at most the 300 tokens"]),
    ],
    ids=str,
)
def test_mistakes_in_the_options(write, run, refused, tmp_path: Path, options, words):
    prompts = write({"token_ids": [5]}, {"token_ids": [6]})
    (tmp_path / "empty.jsonl").write_text("\n\n")
    message = refused(lambda: run(prompts, *(option.format(folder=tmp_path) for option in options)))
    assert all(word.format(folder=tmp_path) in message for word in words), message


@pytest.mark.slow  # an engine of its own
def test_a_built_in_shape_takes_token_ids(write, run):
    prompts = write({"token_ids": [5, 6], "max_tokens": 4}, {"prompt": "a"})
    bare, text = run(prompts, "--model", "tiny", "--logprobs", "7")
    assert len(bare["token_ids"]) in range(1, 5) and bare["text"] is None
    assert {len(entry["top"]) for entry in bare["logprobs"]} == {7}
    assert "the model has no tokenizer: expected token_ids" in text["error"]


@pytest.mark.parametrize(
    "options", [{}, {"repetition_penalty": 1.5}, {"min_tokens": 12}, {"stop_token_ids": [5, 100]}]
)
def test_greedy_agrees_with_transformers(model: Path, write, run, options: dict[str, Any]):
    torch = pytest.importorskip("torch", reason="needs the `parity` extra")
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompts = [[5, 6, 7], [100, 3], [200, 201, 202, 203, 204, 9, 9]]
    lines = [{"token_ids": tokens, "temperature": 0, **options} for tokens in prompts]
    results = run(write(*lines), "--max_completion_length", "40")
    names = {"repetition_penalty": "repetition_penalty", "min_tokens": "min_new_tokens"}
    asked = {names[name]: value for name, value in options.items() if name in names}
    ends = [*HuggingFaceTokenizer(model).eos_ids, *options.get("stop_token_ids", ())]
    for tokens, result in zip(prompts, results, strict=True):
        output = theirs.generate(
            torch.tensor([tokens]), do_sample=False, max_new_tokens=40, eos_token_id=ends, **asked
        )
        assert result["token_ids"] == output[0, len(tokens) :].tolist()
