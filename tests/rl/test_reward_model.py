"""A model as a reward: what it reads, when it runs, and what a response that it cannot read costs."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judges import begin
from tokenizer_files import BOS, write_tokenizer
from transformers import AutoTokenizer

from pat_jax.common.errors import UserError
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout
from pat_jax.rl.rewards.model import RewardModel
from pat_jax.rl.rewards.outcome import Cause, Failure
from pat_jax.rl.rewards.responses import Response, response_reader
from pat_jax.rl.rewards.scorer import RewardScorer
from pat_jax.rl.rewards.shares import Alone
from pat_jax.rl.rewards.weighted_sum import Score
from pat_jax.rl.text.scored_text import check_template, scored_tokens
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer

SPEC = "model:rewards/judge@main"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<im>{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<im>assistant:{% endif %}"
)
EOS, PAD = 0, 1
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def make_tokenizer(folder: Path, **config: object) -> HuggingFaceTokenizer:
    names = {"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": "<pad>"}
    return HuggingFaceTokenizer(write_tokenizer(folder, **names, **config))


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> HuggingFaceTokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("chat"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> HuggingFaceTokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("plain"))


@dataclass
class Lengths:
    """A model that scores a text by its length, and remembers what it was given, and where."""

    batches: list[list[bytes]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def __call__(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        self.batches.append([one.tobytes() for one in texts])
        self.threads.add(threading.get_ident())
        return np.array([len(one) for one in texts], np.float32)


def scorer_of(
    tokenizer: HuggingFaceTokenizer,
    score: Lengths,
    *others: str,
    weights: Sequence[float] = (),
    max_length: int = 1000,
) -> RewardScorer:
    model = RewardModel(SPEC, tokenizer, score, max_length=max_length)
    specs = SPEC, *others
    return RewardScorer(*specs, weights=weights, timeout=30.0, models={SPEC: model})


# --- what it reads ---------------------------------------------------------------------------------


@settings(deadline=None)
@given(texts, st.lists(texts, min_size=1, max_size=3), st.booleans())
def test_a_chat_is_read_as_transformers_writes_it(chat, response, contents, is_begun):
    roles = ["system", "user", "assistant"] if is_begun else ["system", "user", "user"]
    own = roles[-len(contents) :]
    prompt = [{"role": r, "content": c} for r, c in zip(own, contents, strict=True)]
    whole = [*prompt, {"role": "assistant", "content": response}]
    if is_begun:  # the response goes on with the last message
        whole = [*prompt[:-1], {"role": "assistant", "content": contents[-1] + response}]
    reference = AutoTokenizer.from_pretrained(chat.directory)
    expected = reference.apply_chat_template(whole, return_dict=False)
    assert scored_tokens(chat, prompt, response) == expected
    assert expected[0] == BOS and BOS not in expected[1:]


def test_a_prompt_that_is_a_text_is_the_users(chat):
    asked = [{"role": "user", "content": "What is 2 + 2?"}]
    assert scored_tokens(chat, "What is 2 + 2?", "4") == scored_tokens(chat, asked, "4")


def test_without_a_template_the_response_follows_the_prompt(plain):
    tokens = [BOS, *plain.encode("2 + 2 = 4"), EOS]
    assert scored_tokens(plain, "2 + 2 =", " 4") == tokens
    assert scored_tokens(plain, "2 + 2 =", " 4<eos>") == tokens
    assert scored_tokens(plain, "", "") == [BOS, EOS]


def test_messages_of_a_prompt_reach_the_model(chat):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    prompt = Prompt(0, (5,), "Be brief.\n\nHi.", {}, messages)
    tokens = np.array([*chat.encode("Hello"), EOS], np.int32)
    rollout = Rollout(prompt, 0, tokens, np.zeros(len(tokens)), FinishReason.STOP)
    score = Lengths()
    with scorer_of(chat, score) as scorer:
        scoring = scorer.begin([prompt.text], response_reader([], chat))
        scoring.add(0, rollout)
        scoring.rewards()
    whole = np.array(scored_tokens(chat, messages, "Hello"), np.int32)
    assert score.batches == [[whole.tobytes()]]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{% for m in messages %}{{ m.role }}{% endfor %}",
            "leaves out what the assistant answers",
        ),
        ("{{ raise_exception('users only') }}", "users only"),
    ],
)
def test_a_template_without_a_place_for_the_response_is_refused(tmp_path, template, words):
    with pytest.raises(UserError, match=words):
        check_template(make_tokenizer(tmp_path, chat_template=template))


# --- when it runs ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.permutations(range(5)))
def test_it_runs_once_after_the_rollout_in_the_thread_that_asks(chat, order):
    prompts, answers = ["p", "p", "q", "q", "q"], ["a", "bb", "a", "bb", "bb"]
    score = Lengths()
    with scorer_of(chat, score) as scorer:
        scoring = begin(scorer, prompts, answers, order)
        scorer.thread.submit(int).result()
        assert score.batches == []
        rewards = scoring.rewards()
    pairs = zip(prompts, answers, strict=True)
    read = [np.array(scored_tokens(chat, *pair), np.int32) for pair in pairs]
    assert rewards.tolist() == [len(one) for one in read]
    assert score.threads == {threading.get_ident()}
    # Equal texts once, in an order of their own: whichever response ended first.
    assert score.batches == [sorted({one.tobytes() for one in read})]


@dataclass
class Kept:
    scores: Mapping[int, Mapping[str, Score]]
    written: dict[int, Score] = field(default_factory=dict)

    def keep(self, place: int, function: str, score: Score) -> None:
        assert function == "judge"
        self.written[place] = score


def test_scores_from_before_are_not_computed_again(chat):
    score, kept = Lengths(), Kept({1: {"judge": (7.5, {})}})
    with scorer_of(chat, score) as scorer:
        scoring = begin(scorer, ["p"] * 3, ["a", "bb", "ccc"], kept=kept)
        rewards = scoring.rewards()
        (scores,) = scoring.scores
    assert rewards[1] == 7.5 and [len(batch) for batch in score.batches] == [2]
    assert kept.written == {0: (rewards[0], {}), 2: (rewards[2], {})}
    assert scores.name == "judge"


# --- beside functions, and failures ----------------------------------------------------------------------


def test_its_score_counts_by_its_weight_beside_a_function(chat):
    columns = {"answer": ["1", "2"], "finish_reason": ["stop", "stop"]}
    with scorer_of(chat, Lengths(), "exact", weights=[0.5, 100.0]) as scorer:
        rewards = scorer.score(["p", "p"], ["#1", "#1"], columns)
    read = len(scored_tokens(chat, "p", "#1"))
    assert rewards.tolist() == [0.5 * read + 100, 0.5 * read]


def test_a_text_that_is_too_long_fails_alone(chat, caplog):
    most = len(scored_tokens(chat, "p", "four"))
    with scorer_of(chat, score := Lengths(), max_length=most) as scorer:
        scoring = begin(scorer, ["p"] * 3, ["four", "fives", "one"])
        rewards = scoring.rewards()
    np.testing.assert_array_equal(rewards, [most, np.nan, most - 1])
    assert scoring.failures[1].cause is Cause.TOO_LONG and len(scoring.failures) == 1
    assert len(score.batches[0]) == 2
    assert f"up to {most} tokens (--reward_model.max_length), and this one has {most + 1}" in (
        caplog.text
    )


def test_where_every_text_is_too_long_the_run_ends_with_what_to_do(chat):
    words = pytest.raises(UserError, match=r"2 too_long.*raise --reward_model.max_length")
    with scorer_of(chat, Lengths(), max_length=3) as scorer, words:
        scorer.score(["p", "p"], ["a", "b"], {})


def test_texts_that_fill_no_batch_wait_on_a_lane_until_they_are_asked_for(chat):
    score = Lengths()
    model = RewardModel(SPEC, chat, score, max_length=60, fills=lambda lengths: False)
    with ThreadPoolExecutor(1) as lane:
        model.score_on(lane)
        short, other = (model.submit([Response("p", text, {})], 1.0) for text in ("a", "b"))
        assert not short.done() and score.batches == []
        failed = model.submit([Response("p", "x" * 100, {})], 1.0)
        assert isinstance(failed.result(0).scores[0], Failure)
        model.ask()
        assert short.result(30).scores and other.result(30).scores
        last = model.submit([Response("p", "cc", {})], 1.0)
        model.score_waiting(Alone())
        assert last.done()
    assert [len(batch) for batch in score.batches] == [2, 1]


def test_a_score_that_is_no_number_fails_alone(chat):
    def score(texts: Sequence[np.ndarray]) -> np.ndarray:
        return np.where([len(one) % 2 for one in texts], np.nan, 1.0)

    model = RewardModel(SPEC, chat, score, max_length=100)
    with RewardScorer(SPEC, timeout=1.0, models={SPEC: model}) as scorer:
        scoring = begin(scorer, ["p", "p"], ["a", "bb"])
        assert np.isnan(scoring.rewards()).sum() == 1
    assert [one.cause for one in scoring.failures.values()] == [Cause.NOT_A_NUMBER]


def test_messages_that_the_template_refuses_fail_alone(tmp_path):
    picky = TEMPLATE.replace(
        "{% for",
        "{% if messages[0].content == 'no' %}{{ raise_exception('not that') }}{% endif %}{% for",
    )
    tokenizer = make_tokenizer(tmp_path, chat_template=picky)
    with scorer_of(tokenizer, Lengths()) as scorer:
        scoring = begin(scorer, ["yes", "no"], ["a", "a"])
        assert np.isnan(scoring.rewards()).tolist() == [False, True]
    assert "not that" in scoring.failures[1].text


def test_the_score_is_read_at_the_last_token_that_is_no_padding(plain):
    """As `…ForSequenceClassification` of transformers reads it."""
    for pad_id, expected in ((None, [EOS]), (PAD, [EOS]), (EOS, [])):
        score = Lengths()
        model = RewardModel(SPEC, plain, score, max_length=100, pad_id=pad_id)
        with RewardScorer(SPEC, timeout=1.0, models={SPEC: model}) as scorer:
            scorer.score(["p"], ["a"], {})
        whole = np.array([BOS, *plain.encode("pa"), *expected], np.int32)
        assert score.batches == [[whole.tobytes()]]


def test_trying_it_out_runs_nothing(chat):
    with scorer_of(chat, score := Lengths()) as scorer:
        assert scorer.try_out([Response("p", "a", {})], 4) == []
    with scorer_of(chat, score, max_length=3) as scorer:
        (note,) = scorer.try_out([Response("p", "a", {})], 4)
    assert "reads texts of up to 3 tokens" in note and "tried out on 1 made-up responses" in note
    assert score.batches == []
