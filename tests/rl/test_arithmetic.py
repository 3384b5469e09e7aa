import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.config.by_model import OF_BUILT_IN_SHAPES
from pat_jax.rl.batches.types import FinishReason, Prompt
from pat_jax.rl.data.arithmetic import (
    LETTERS,
    TOKENIZER,
    DemonstrationMix,
    TermCounts,
    demonstration,
    problems,
    solve,
)
from pat_jax.rl.rewards.built_in import exact_reward

LONGEST = TermCounts(minimum=TermCounts().maximum)
CAREFUL = DemonstrationMix(guess_share=0.0, slip_share=0.0)
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


def answered_right(prompts: list[Prompt], mix: DemonstrationMix, seed: int = 0) -> float:
    rng = np.random.default_rng(seed)
    texts = [TOKENIZER.decode(demonstration(prompt, rng, mix)) for prompt in prompts]
    return float(np.mean([reward(p, text) for p, text in zip(prompts, texts, strict=True)]))


def careful(prompt: Prompt) -> str:
    """The response that works without a mistake; its last token, the end of sequence, has no text."""
    return TOKENIZER.decode(demonstration(prompt, np.random.default_rng(0), CAREFUL))


def test_the_example_of_the_module():
    assert solve("a3b+8c*5d+9=") == "4"
    assert careful(Prompt(0, (), "a3b+8c*5d+9=", {})) == "b3+8=1;c1*5=5;d5+9=4;#4"


@given(seeds, splits, indices)
def test_the_answer_is_the_left_to_right_value_modulo_ten(seed, split, index):
    prompt = problems(seed, split)[index]
    expression = "0"
    for sign, digit in re.findall(r"[a-z]([+*]?)(\d)", prompt.text):
        expression = f"({expression}{sign or '+'}{digit})"
    assert prompt.columns["answer"] == str(eval(expression) % 10)


@given(seeds, splits, indices)
def test_a_careful_demonstration_scores_one_and_no_other_answer_does(seed, split, index):
    prompt = problems(seed, split)[index]
    *tokens, last = demonstration(prompt, np.random.default_rng(seed), CAREFUL)
    text = TOKENIZER.decode(tokens)
    assert last in TOKENIZER.eos_ids and not set(tokens) & set(TOKENIZER.eos_ids)
    assert reward(prompt, text) == 1
    assert sum(reward(prompt, f"{text[:-1]}{digit}") for digit in range(10)) == 1


@given(seeds, splits, indices)
def test_every_step_of_a_careful_response_is_true_and_follows_the_one_before(seed, split, index):
    prompt = problems(seed, split)[index]
    *steps, answer = careful(prompt).split(";")
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
    texts = [
        [prompt.text for prompt in problems(seed, "train").batch(index // 8, 8)] for seed in pair
    ]
    assert texts[0] != texts[1]


def test_no_held_out_problem_is_ever_trained_on():
    heldout, train = problems(0, "heldout").first(400), problems(0, "train").first(500)
    assert not {prompt.text for prompt in heldout} & {prompt.text for prompt in train}
    assert len({prompt.id for prompt in heldout + train}) == 900
    # Short problems are few enough that without the split most would be in both.
    short = TermCounts(minimum=2, maximum=2)
    heldout = {p.text for p in problems(0, "heldout", term_counts=short).first(300)}
    train = {p.text for p in problems(0, "train", term_counts=short).first(500)}
    assert not heldout & train and len(heldout | train) > 50  # of 10 · 6


def test_the_number_of_terms_has_the_documented_tail():
    counts = [num_terms(prompt) for prompt in problems(0, "train").first(2000)]
    assert np.median(counts) == 4
    assert 14 <= np.percentile(counts, 99) <= 18
    assert (min(counts), max(counts)) == (3, TermCounts().maximum)
    heavier = [
        num_terms(p) for p in problems(0, "train", term_counts=TermCounts(tail=1.0)).first(1000)
    ]
    assert np.mean(heavier) > 1.3 * np.mean(counts)


def test_the_longest_problem_fits_the_default_limits_of_a_rollout():
    prompt = problems(0, "train", term_counts=LONGEST)[0]
    response = demonstration(prompt, np.random.default_rng(0), CAREFUL)
    assert len(prompt.tokens) == TermCounts().max_prompt_length <= OF_BUILT_IN_SHAPES.prompt
    assert len(response) == 129 <= OF_BUILT_IN_SHAPES.response  # as TermCounts says


def test_demonstrations_are_of_mixed_quality():
    prompts = problems(0, "train").first(1500)
    guesses = DemonstrationMix(guess_share=1.0, slip_share=0.0)
    slips = DemonstrationMix(guess_share=0.0, slip_share=1.0)
    assert answered_right(prompts, guesses) == pytest.approx(0.1, abs=0.03)
    assert 0.2 < answered_right(prompts, slips) < 0.6
    # Imitation learns this; reinforcement has the rest to gain.
    assert 0.4 < answered_right(prompts, DemonstrationMix()) < 0.7
    assert answered_right(prompts, CAREFUL) == 1


def test_a_slip_is_carried_on():
    prompt = problems(0, "train", term_counts=LONGEST)[0]
    mix = DemonstrationMix(guess_share=0.0, slip_share=1.0, slip_rate=1.0)
    text = TOKENIZER.decode(demonstration(prompt, np.random.default_rng(0), mix))
    *steps, answer = text.split(";")
    values = [step[-1] for step in steps]
    assert [step[1] for step in steps] == [prompt.text[1], *values[:-1]]
    assert answer == f"#{values[-1]}" and text != careful(prompt)


@pytest.mark.parametrize(
    "change", [{"minimum": 1}, {"maximum": 27}, {"minimum": 9, "maximum": 8}, {"tail": 0.0}]
)
def test_impossible_term_counts_are_refused(change):
    with pytest.raises(ValueError, match="minimum"):
        dataclasses.replace(TermCounts(), **change)


def test_there_is_no_problem_before_the_first():
    with pytest.raises(IndexError, match="-1"):
        problems(0, "train")[-1]
