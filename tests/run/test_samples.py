"""Sample responses: the file that keeps them, and what the page makes of any text."""

import re
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import parsed

from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup
from pat_jax.rl.data.arithmetic import TOKENIZER
from pat_jax.rl.rewards.outcome import Cause, Failure
from pat_jax.rl.rewards.weighted_sum import FunctionScores
from pat_jax.run.logging.completions import PROMPTS_SHOWN, RESPONSES_SHOWN, Completions
from pat_jax.run.logging.metrics import MetricsWriter
from pat_jax.run.logging.page.run_page import run_page
from pat_jax.run.logging.samples import Sample, table
from pat_jax.run.logging.samples_file import (
    MOST_CHARACTERS,
    MOST_STEPS,
    SAMPLES_FILE,
    SamplesFile,
    read_samples,
)


def sample(prompt: str = "1+2=", said: str = "3", **changes) -> Sample:
    return Sample(
        **{"prompt": prompt, "completion": said, "reward": 1.0, "tokens": 2} | changes,
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
        file.add(resume_step or 1, [sample(prompt, said) for prompt, said in texts])
    shown = ["".join(each.itertext()) for each in parsed(run_page(folder)).iter("pre")]
    once = []
    for prompt, group in groupby(texts, key=lambda both: both[0]):
        once += [prompt, *dict.fromkeys(said for _, said in group)]
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


def test_the_newest_comes_first_and_the_oldest_go(tmp_path: Path):
    file = SamplesFile(tmp_path, None)
    for step in range(1, MOST_STEPS + 4):
        file.add(step, [sample()])
    assert steps_on(tmp_path) == list(range(MOST_STEPS + 3, 3, -1))


def test_a_resumed_run_shows_what_it_repeats_once(tmp_path: Path):
    file = SamplesFile(tmp_path, None)
    for step in (1, 20, 40):
        file.add(step, [sample(said=f"before {step}")])
    SamplesFile(tmp_path, 40).add(40, [sample(said="again 40")])
    assert steps_on(tmp_path) == [40, 20, 1]
    text = run_page(tmp_path)
    assert "again 40" in text and "before 40" not in text and "before 20" in text


def test_of_a_long_text_its_begin_and_its_end_are_shown(tmp_path: Path):
    said = "b" + "x" * 10 * MOST_CHARACTERS + "e"
    SamplesFile(tmp_path, None).add(1, [sample(said=said)])
    text = run_page(tmp_path)
    assert "<pre>bxxx" in text and "xxxe</pre>" in text and "characters …]" in text
    assert text.count("x") < 2 * (MOST_CHARACTERS + 200)


def groups(count: int, size: int) -> list[RolloutGroup]:
    def rollout(prompt: Prompt, i: int) -> Rollout:
        tokens = np.array(TOKENIZER.encode(str(10 * prompt.id + i)), np.int32)
        return Rollout(prompt, i, tokens, np.zeros(len(tokens), np.float32), FinishReason.LENGTH)

    prompts = [Prompt(p, (1,), f"{p}=", {}) for p in range(count)]
    return [RolloutGroup(prompt, [rollout(prompt, i) for i in range(size)]) for prompt in prompts]


@pytest.mark.parametrize(("count", "size"), [(1, 1), (5, 7), (3, 2)])
def test_samples_are_of_the_first_prompts_with_their_own_rewards(tmp_path: Path, count, size):
    rewards = np.arange(count * size, dtype=np.float32).reshape(count, size)
    rewards[0, 0] = np.nan
    none = Failure(Cause.NONE, "returned None")
    scores = [none, *map(float, range(1, count * size))]
    both = [FunctionScores(f"m:{n}", n, 1.0, scores, [{}] * len(scores)) for n in ("a", "b")]
    said = groups(count, size)
    found = Completions(TOKENIZER, tmp_path, is_asked=False).few(said, rewards, both)
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
