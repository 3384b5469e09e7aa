import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pat_jax.config.by_model import OF_BUILT_IN_SHAPES
from pat_jax.rl.batches.types import FinishReason, Prompt
from pat_jax.rl.data.arithmetic import (
    LETTERS,
    MAX_PROMPT_LENGTH,
    TOKENIZER,
    TOKENIZER_DIR,
    demonstration,
    problems,
    worked,
)
from pat_jax.rl.rewards.built_in import exact_reward
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer

indices = st.integers(0, 2**30 - 1)
splits = st.sampled_from(["train", "heldout"])
seeds = st.integers(0, 2**32 - 1)


def reward(prompt: Prompt, completion: str) -> float:
    [score] = exact_reward(
        [prompt.text],
        [completion],
        answer=[prompt.columns["answer"]],
        finish_reason=[FinishReason.STOP],
    )
    return score


def num_terms(prompt: Prompt) -> int:
    return sum(prompt.text.count(letter) for letter in LETTERS)


@given(seeds, splits, indices)
def test_the_answer_is_the_left_to_right_value_modulo_ten(seed, split, index):
    prompt = problems(seed, split)[index]
    expression = "0"
    for sign, digit in re.findall(r"[a-z]([+*]?)(\d)", prompt.text):
        expression = f"({expression}{sign or '+'}{digit})"
    assert prompt.columns["answer"] == str(eval(expression) % 10)


@given(seeds, splits, indices)
def test_what_is_worked_scores_one_and_no_other_answer_does(seed, split, index):
    prompt = problems(seed, split)[index]
    text = worked(prompt.text)
    assert reward(prompt, text) == 1
    assert sum(reward(prompt, f"{text[:-1]}{digit}") for digit in range(10)) == 1


@given(seeds, splits, indices)
def test_every_step_of_it_is_true_and_follows_the_one_before(seed, split, index):
    prompt = problems(seed, split)[index]
    *steps, answer = worked(prompt.text).split(";")
    value = prompt.text[1]
    for step, term in zip(steps, re.findall(r"[a-z][+*]\d", prompt.text), strict=True):
        letter, before, sign, operand, equals, after = step
        assert (letter + sign + operand, before, equals) == (term, value, "=")
        assert eval(f"{before}{sign}{operand}") % 10 == int(after)
        value = after
    assert answer == f"#{value}"


@given(st.sets(seeds, min_size=2, max_size=2), indices)
def test_held_out_problems_are_the_same_for_every_seed_and_training_problems_are_not(pair, index):
    one, other = pair
    assert problems(one, "heldout")[index] == problems(other, "heldout")[index]
    texts = [[problems(seed, "train")[index + i].text for i in range(8)] for seed in pair]
    assert texts[0] != texts[1]


def test_no_held_out_problem_is_ever_trained_on():
    heldout, train = problems(0, "heldout").first(400), problems(0, "train").first(500)
    assert not {prompt.text for prompt in heldout} & {prompt.text for prompt in train}
    assert len({prompt.id for prompt in heldout + train}) == 900


def test_the_number_of_terms_has_the_documented_tail_and_fits_a_rollout():
    prompts = problems(0, "train").first(2000)
    counts = [num_terms(prompt) for prompt in prompts]
    assert np.median(counts) == 4
    assert 14 <= np.percentile(counts, 99) <= 18
    longest = prompts[int(np.argmax(counts))]
    assert (min(counts), max(counts)) == (3, 19)
    assert len(longest.tokens) == MAX_PROMPT_LENGTH <= OF_BUILT_IN_SHAPES.prompt
    assert 1 + len(worked(longest.text)) == 129 <= OF_BUILT_IN_SHAPES.response


def test_half_of_the_demonstrations_guess_and_the_others_are_worked():
    rng, prompts = np.random.default_rng(0), problems(0, "train").first(1500)
    shown = [demonstration(prompt, rng) for prompt in prompts]
    assert {tokens[-1:] for tokens in shown} == {TOKENIZER.eos_ids}
    texts = [TOKENIZER.decode(tokens[:-1]) for tokens in shown]
    guesses = [text for p, text in zip(prompts, texts, strict=True) if text != worked(p.text)]
    assert set(guesses) == {f"#{digit}" for digit in range(10)}
    assert len(guesses) / 1500 == pytest.approx(0.5, abs=0.05)
    # Imitation learns this; reinforcement has the rest to gain.
    right = [reward(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    assert np.mean(right) == pytest.approx(0.55, abs=0.05)


# --- its tokenizer as files, which exports have ------------------------------------------------------


@pytest.fixture(scope="module")
def files() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(TOKENIZER_DIR)


@given(text=st.text(TOKENIZER.alphabet))
def test_the_files_have_the_same_tokens(files: HuggingFaceTokenizer, text: str):
    tokens = TOKENIZER.encode(text)
    assert files.encode(text) == files.encode_prompt(text) == tokens
    assert files.decode([*tokens, 1, 0]) == TOKENIZER.decode([*tokens, 1, 0]) == text


def test_transformers_reads_the_same_tokens(files: HuggingFaceTokenizer):
    loaded = AutoTokenizer.from_pretrained(TOKENIZER_DIR)
    assert loaded(TOKENIZER.alphabet)["input_ids"] == TOKENIZER.encode(TOKENIZER.alphabet)
    assert (loaded.eos_token_id, loaded.pad_token_id, len(loaded)) == (1, 0, TOKENIZER.vocab_size)
    assert (files.eos_ids, files.vocab_size) == (TOKENIZER.eos_ids, TOKENIZER.vocab_size)
