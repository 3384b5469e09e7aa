"""What the policy says: every response in its file, samples that a person reads on the page, and special tokens
that texts leave out."""

import re
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import parsed
from rollouts import group_of, response
from runs import json_lines
from tokenizer_files import write_tokenizer

from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup
from pat_jax.rl.data.arithmetic import TOKENIZER
from pat_jax.rl.rewards.outcome import Cause, Failure
from pat_jax.rl.rewards.responses import response_reader
from pat_jax.rl.rewards.weighted_sum import FunctionScores
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.run.files.folder import SAMPLES_FILE
from pat_jax.run.logging.completions import (
    PROMPTS_SHOWN,
    RESPONSES_SHOWN,
    Completions,
    DroppedTokens,
)
from pat_jax.run.logging.metrics import MetricsWriter
from pat_jax.run.logging.page.run_page import run_page
from pat_jax.run.logging.samples import MOST_CHARACTERS, Sample, SamplesFile, read_samples, table
from pat_jax.run.start.task import load_tokenizer


def rollout(text: str, finish: FinishReason = FinishReason.LENGTH) -> Rollout:
    prompt = Prompt(3, tuple(TOKENIZER.encode("1+2=")), "1+2=", {})
    tokens = TOKENIZER.encode(text) + [*TOKENIZER.eos_ids] * (finish is FinishReason.STOP)
    return response(tokens, prompt, finish=finish)


def test_every_response_is_a_line_with_its_reward(tmp_path: Path):
    output = [rollout("3", FinishReason.STOP), rollout("12")]
    with Completions(TOKENIZER, tmp_path, is_asked=True) as completions:
        completions.write(1, "train", output, np.array([1.0, np.nan], np.float32))
        completions.write(2, "eval", output[:1], np.array([0.5], np.float32))
    lines = json_lines(tmp_path / "completions.jsonl")
    assert [line["reward"] for line in lines] == [1.0, None, 0.5]
    assert [(line["step"], line["kind"]) for line in lines] == [(1, "train")] * 2 + [(2, "eval")]
    assert [line["completion"] for line in lines] == ["3", "12", "3"]
    assert [(line["tokens"], line["finish"]) for line in lines[:2]] == [(2, "stop"), (2, "length")]
    assert {line["prompt"] for line in lines} == {"1+2="}


def test_what_each_of_several_functions_gave_is_written_beside_the_reward(tmp_path: Path):
    none = Failure(Cause.NONE, "returned None")
    one = FunctionScores("m:right", "right", 1.0, [1.0, none], [{}, {}])
    two = FunctionScores("m:short", "short", 0.5, [0.25, 2.0], [{}, {}])
    output, rewards = [rollout("3"), rollout("12")], np.array([1.125, 1.0], np.float32)
    with Completions(TOKENIZER, tmp_path, is_asked=True) as completions:
        completions.write(1, "train", output, rewards, [one, two])
        completions.write(1, "train", output, one.array, [one])
    lines = json_lines(tmp_path / "completions.jsonl")
    assert [line["reward"] for line in lines] == [1.125, 1.0, 1.0, None]
    by_function = [{"right": 1.0, "short": 0.25}, {"right": None, "short": 2.0}]
    assert [line["rewards"] for line in lines[:2]] == by_function
    assert "rewards" not in lines[2] | lines[3]


@pytest.mark.parametrize("is_asked", [True, False])
def test_responses_are_kept_where_their_rewards_end_the_run(tmp_path: Path, is_asked: bool):
    with Completions(TOKENIZER, tmp_path, is_asked=is_asked) as completions:
        with completions.kept(1, "train", [rollout("1")]):
            pass
        output = r"the judge is down\. The responses are kept in .*jsonl"
        two = [rollout("3"), rollout("12")]
        with pytest.raises(UserError, match=output), completions.kept(2, "train", two):
            raise UserError("the judge is down.")
    lines = json_lines(tmp_path / "completions.jsonl")
    kept = [(line["step"], line["completion"], line["reward"]) for line in lines]
    assert kept == [(2, "3", None), (2, "12", None)]


def test_nobody_asked_and_nothing_is_written(tmp_path: Path):
    completions = Completions(TOKENIZER, tmp_path, is_asked=False)
    completions.write(1, "train", [rollout("3")], np.zeros(1, np.float32))
    assert list(tmp_path.iterdir()) == []


def sample(prompt: str = "1+2=", output: str = "3", **changes) -> Sample:
    return Sample(
        **{"prompt": prompt, "completion": output, "reward": 1.0, "tokens": 2} | changes,
        finish="stop",
    )


def steps_on(folder: Path) -> list[int]:
    return [int(n) for n in re.findall(r'id="step-(\d+)"', run_page(folder))]


TEXTS = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Cn"]), min_size=1, max_size=40
) | st.sampled_from(
    ["</pre>", "</section>\n", '<section id="step-9">', "<script>alert(1)</script>", "&lt;"]
)


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4))
def test_texts_are_shown_as_they_are_whatever_they_look_like(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("run")
    for resume_step in (None, 2):  # written, and read back by a resumed run
        file = SamplesFile(folder, resume_step)
        file.add(resume_step or 1, [sample(prompt, output) for prompt, output in texts])
    shown = ["".join(each.itertext()) for each in parsed(run_page(folder)).iter("pre")]
    once = []
    for prompt, group in groupby(texts, key=lambda both: both[0]):
        once += [prompt, *dict.fromkeys(output for _, output in group)]
    assert shown == once * 2 and steps_on(folder) == [2, 1]


@given(
    st.lists(
        st.tuples(TEXTS | st.text(st.characters(exclude_categories=["Cs"])), TEXTS), min_size=1
    )
)
def test_programs_read_the_samples_as_they_were(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("run")
    shown = [sample(*both, reward=None, rewards={"a": 0.1, "b": None}) for both in texts]
    SamplesFile(folder, None).add(3, shown)
    SamplesFile(folder, 7).add(7, shown[:1])  # as a resumed run does
    assert list(read_samples(folder).items()) == [(7, shown[:1]), (3, shown)]
    assert read_samples(folder / "none") == {}


def test_a_resumed_run_shows_what_it_repeats_once(tmp_path: Path):
    file = SamplesFile(tmp_path, None)
    for step in (1, 20, 40):
        file.add(step, [sample(output=f"before {step}")])
    SamplesFile(tmp_path, 40).add(40, [sample(output="again 40")])
    assert steps_on(tmp_path) == [40, 20, 1]
    text = run_page(tmp_path)
    assert "again 40" in text and "before 40" not in text and "before 20" in text


def test_of_a_long_text_its_begin_and_its_end_are_shown(tmp_path: Path):
    output = "b" + "x" * 10 * MOST_CHARACTERS + "e"
    SamplesFile(tmp_path, None).add(1, [sample(output=output)])
    text = run_page(tmp_path)
    assert "<pre>bxxx" in text and "xxxe</pre>" in text and "characters …]" in text
    assert text.count("x") < 2 * (MOST_CHARACTERS + 200)


def groups(count: int, size: int) -> list[RolloutGroup]:
    prompts = [Prompt(p, (1,), f"{p}=", {}) for p in range(count)]
    texts = [[TOKENIZER.encode(str(10 * p + i)) for i in range(size)] for p in range(count)]
    return [group_of(*both, FinishReason.LENGTH) for both in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize(("count", "size"), [(1, 1), (5, 7), (3, 2)])
def test_samples_are_of_the_first_prompts_with_their_own_rewards(tmp_path: Path, count, size):
    rewards = np.arange(count * size, dtype=np.float32).reshape(count, size)
    rewards[0, 0] = np.nan
    none = Failure(Cause.NONE, "returned None")
    scores = [none, *map(float, range(1, count * size))]
    both = [FunctionScores(f"m:{n}", n, 1.0, scores, [{}] * len(scores)) for n in ("a", "b")]
    output = groups(count, size)
    found = Completions(TOKENIZER, tmp_path, is_asked=False).few(output, rewards, both)
    wanted = [
        (p, i) for p in range(min(count, PROMPTS_SHOWN)) for i in range(min(size, RESPONSES_SHOWN))
    ]
    assert [x.prompt for x in found] == [f"{p}=" for p, _ in wanted]
    assert [x.completion for x in found] == [str(10 * p + i) for p, i in wanted]
    own = [None if p == i == 0 else float(p * size + i) for p, i in wanted]
    assert [x.reward for x in found] == own == [x.rewards["b"] for x in found]
    assert found[0].facts == "reward none (a none, b none), 1 tokens, length"
    columns, rows = table(7, found)
    assert columns == ["step", "prompt", "response", "reward", "a", "b", "tokens", "finish"]
    assert all(len(row) == len(columns) and row[0] == 7 for row in rows)


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path: Path):
    with MetricsWriter(tmp_path) as metrics:
        (tmp_path / SAMPLES_FILE).mkdir()
        metrics.samples(1, [sample()])
        metrics.write(1, {"reward/mean": 0.5})
    (events,) = (tmp_path / "tensorboard").glob("events*")
    assert b"1+2=" in events.read_bytes()


EOS, PAD, IM, BOS = range(4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    return write_tokenizer(folder, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>")


def tokenizer_of(folder: Path, *options: str) -> HuggingFaceTokenizer:
    argv = ["--model", str(folder), "--data", "a.jsonl", *options]
    found = load_tokenizer(parse(argv).task)
    assert isinstance(found, HuggingFaceTokenizer)
    return found


def ended(*tokens: int, finish: FinishReason = FinishReason.STOP) -> Rollout:
    return response(tokens, finish=finish)


@pytest.mark.parametrize(
    ("options", "text"), [((), "thethe"), (("--reward_skip_special_tokens", "false"), "the<im>the")]
)
@pytest.mark.parametrize("finish", FinishReason)
def test_rewards_and_files_have_the_same_text(folder, tmp_path, options, text, finish):
    tokenizer = tokenizer_of(folder, *options)
    the, end = tokenizer.encode("the"), [EOS] * (finish is FinishReason.STOP)
    one, output = ended(*the, IM, *the, *end, finish=finish), list[str]()
    assert response_reader([], tokenizer)(one).completion == text
    with Completions(tokenizer, tmp_path, output.append, is_asked=True) as completions:
        completions.write(1, "train", [one, one], np.zeros(2, np.float32))
        completions.write(2, "eval", [one], np.zeros(1, np.float32))
    lines = json_lines(tmp_path / "completions.jsonl")
    assert [line["completion"] for line in lines] == [text] * 3
    left_out = (
        "2 of 2 responses have special tokens such as '<im>', which rewards and written responses "
        "leave out: --reward_skip_special_tokens false keeps them"
    )
    assert output == ([] if options else [left_out])


def test_beginning_end_and_padding_are_nothing_to_say(folder):
    output, tokenizer = list[str](), tokenizer_of(folder)
    dropped = DroppedTokens(tokenizer, output.append)
    dropped.look([])
    dropped.look([ended(BOS, *tokenizer.encode("the"), PAD, EOS), ended(EOS)])
    assert not output
    dropped.look([ended(EOS), ended(IM, EOS), ended(IM, IM, EOS)])
    dropped.look([ended(IM, EOS)])
    assert len(output) == 1 and output[0].startswith("2 of 3 responses")
    DroppedTokens(TOKENIZER, output.append).look([ended(1)])  # of the built-in task
    assert len(output) == 1
