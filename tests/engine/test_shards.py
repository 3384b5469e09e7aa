"""Tokens drawn on shards of the vocabulary: the same as from whole logits, and little is sent."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_cases import SEQUENCES, keys_of, rows_of

from pat_jax.engine.device.decode.gumbel import WHOLE
from pat_jax.engine.device.decode.sampling import NEG_INF, likeliest, sample
from pat_jax.engine.device.draft.text_drafter import TextDrafter
from pat_jax.engine.sequences.sampling import PLAIN, Sampling
from pat_jax.engine.sequences.types import RowSampling
from pat_jax.layout.buckets import Drafts
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh, padded_for
from pat_jax.layout.partitions import ManualPartition, by_shard
from pat_jax.models.config import ModelConfig
from pat_jax.models.partition import Partition
from pat_jax.models.presets import preset
from pat_jax.planning.planner.scripts import FixedLayout
from tests.hlo_text import called, collectives, computations
from tests.lossless import MODELS, Settings, Subject, make_requests
from tests.near_ties import check_lossless

ROWS, TOP, VOCAB = 64, 5, 1000
PADDED = {1024: "blocks of 128", 1016: "of 127", 2048: "half of the shards are padding"}
DEGREES = (2, 4, 8)


@cache
def layouts() -> dict[int, Layout]:
    chain, _ = layout_chain(factored_mesh(jax.devices()), MODELS["kv8"])
    return {split.tp: layout for split, layout in chain.items()}


@cache
def sampled(tp: int) -> Callable:
    """Compiled for one device, or for replicas of `tp` that all have the same rows."""

    def run(logits, keys, options: RowSampling, wanted, *, partition: Partition = WHOLE):
        how: Any = {"vocab_size": VOCAB, "partition": partition}
        seen = jnp.zeros((len(keys), 2, -(-2048 // 32)), jnp.uint32)
        forbidden = jnp.full((len(keys), 1), -1, jnp.int32)
        drawn = sample(logits, keys, options, seen, forbidden, **how)
        return *drawn, *likeliest(logits, wanted, count=TOP, **how)

    if tp == 1:
        return jax.jit(run)
    layout = layouts()[tp]

    def on_shards(*args):
        return run(*args, partition=ManualPartition(layout))

    whole = layout.spec()
    taken = layout.spec(None, "vocab"), whole, whole, whole
    return jax.jit(by_shard(layout, on_shards, taken, whole))


def check_same(logits: np.ndarray, options: list[Sampling], *, wants_top: bool = False) -> None:
    """Tokens, bit for bit, and log-probabilities, on any number of shards and on one."""
    keys, rows = np.asarray(keys_of(SEQUENCES[: len(logits)])), rows_of(options)
    wanted = np.full(len(logits), wants_top)
    expected = sampled(1)(logits, keys, rows, wanted)
    failed = np.isnan(expected[1])
    for tp in DEGREES:
        tokens, logprobs, unfiltered, *top = sampled(tp)(logits, keys, rows, wanted)
        np.testing.assert_array_equal(
            np.where(failed, -1, tokens), np.where(failed, -1, expected[0])
        )
        np.testing.assert_allclose(logprobs, expected[1], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(unfiltered, expected[2], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(top[0], expected[3])
        np.testing.assert_array_equal(top[1], expected[4])


def logits_of(padded: int, spread: float = 3.0) -> np.ndarray:
    """Padding would win, were it not masked."""
    logits = np.random.default_rng(padded).normal(0, spread, (ROWS, padded)).astype(np.float32)
    logits[:, VOCAB:] = 50.0
    return logits


HALF_GREEDY = [PLAIN, Sampling(temperature=0.0), Sampling(temperature=0.4), PLAIN] * (ROWS // 4)


@pytest.mark.parametrize("padded", PADDED)
@pytest.mark.parametrize("spread", [0.01, 3.0, 60.0])
def test_shards_draw_what_whole_logits_draw(padded: int, spread: float):
    check_same(logits_of(padded, spread), HALF_GREEDY)


@pytest.mark.parametrize("padded", PADDED)
def test_of_equal_logits_the_first_wins_on_whichever_shard(padded: int):
    logits = np.round(logits_of(padded))  # most of a row's numbers occur on every shard
    check_same(logits, HALF_GREEDY)
    check_same(np.zeros_like(logits), HALF_GREEDY)
    tokens = sampled(8)(
        logits, keys_of(SEQUENCES[:ROWS]), rows_of([HALF_GREEDY[1]] * ROWS), np.zeros(ROWS, bool)
    )[0]
    np.testing.assert_array_equal(tokens, logits[:, :VOCAB].argmax(axis=1))


@pytest.mark.parametrize("nothing", [-np.inf, NEG_INF])
def test_whole_shards_may_have_no_mass(nothing: float):
    logits = logits_of(1024)
    for row in range(ROWS):
        logits[row, np.arange(1024) // 128 != row % 7] = nothing
    check_same(logits, HALF_GREEDY)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_logit_that_is_no_number_fails_its_row_alone(bad: float):
    logits = logits_of(1024)
    at = np.random.default_rng(1).integers(0, VOCAB, ROWS // 2)
    logits[np.arange(0, ROWS, 2), at] = bad
    check_same(logits, HALF_GREEDY)
    keys, rows = keys_of(SEQUENCES[:ROWS]), rows_of(HALF_GREEDY)
    for tp in DEGREES:
        tokens, logprobs, *_ = sampled(tp)(logits, keys, rows, np.zeros(ROWS, bool))
        np.testing.assert_array_equal(np.isnan(logprobs), np.arange(ROWS) % 2 == 0)
        assert np.max(tokens) < VOCAB


@pytest.mark.parametrize(
    "options", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"presence_penalty": 2.0}], ids=str
)
def test_options_and_the_likeliest_tokens_are_those_of_whole_logits(options):
    check_same(logits_of(1016), [Sampling(**options), PLAIN] * (ROWS // 2), wants_top=True)


# --- the engine -----------------------------------------------------------------------------------

DRAFTS = Drafts(num_draft_tokens=(3,), longest=3, most_tokens=256, texts=8)


@cache
def subject() -> Subject:
    """Two shards of four blocks each: 67 is the largest divisor of 536 up to 128."""
    settings = Settings(
        min_rows=16,
        min_length=64,
        max_logprobs=2,
        degrees=(1, 2),
        drafter=TextDrafter(DRAFTS),
    )
    model = replace(MODELS["kv2"], num_layers=1, vocab_size=500, vocab_multiple=536)
    return Subject(model, settings, is_compiled=False)


def test_the_engine_generates_the_same_on_shards_and_on_whole_logits():
    """The replica of the request with a filter gathers logits while the others do not."""
    one = subject()
    kinds = PLAIN, Sampling(temperature=0.0), Sampling(temperature=0.7)
    asked = make_requests(one.settings, seed=0)
    requests = [replace(x, sampling=kinds[i % 3]) for i, x in enumerate(asked)]
    requests[-1] = replace(requests[-1], sampling=Sampling(top_k=12))
    static, *others = (one.run(requests, FixedLayout(x))[0] for x in one.engine.layouts)
    assert {token > 4 * 67 for done in static for token in done.tokens} == {False, True}
    check_lossless(one.compared(requests, static, *others))


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_no_decode_step_gathers_logits_unless_a_row_has_an_option(num_draft_tokens: int):
    """Or asks for the likeliest tokens. The same where drafts are verified."""
    programs = subject().engine.programs
    key = next(
        key
        for key in (*programs, *programs.missing())
        if (key.name, key.split.tp, key.num_draft_tokens) == ("decode", 2, num_draft_tokens)
    )
    text = programs[key].as_text() or ""
    tokens = key.rows * (1 + num_draft_tokens)
    whole = 4 * tokens * subject().policy.config.padded_vocab_size
    sent = [c.num_bytes for c in collectives(text)]
    assert sent.count(whole) == 2 and max(sent) == whole
    found = {4 * tokens * 2, 4 * tokens * 4 * 2}  # the largest logits; four numbers of a token
    assert found <= {*sent}
    of_branches = []
    for line in (line for body in computations(text)[1].values() for line in body):
        if " conditional(" in line:
            names = [name for role, name in called(line) if role != "calls"]
            of_branches.append([[c.num_bytes for c in collectives(text, x)] for x in names])
    gathering = [sorted(x, key=sum) for x in of_branches if any(whole in sent for sent in x)]
    # Where nothing is asked for, the first small gathers or nothing at all.
    assert sorted(gathering) == [[[], [whole]], [sorted(found), [whole]]]


# --- the padding that gives shards whole blocks ---------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b"])
@pytest.mark.parametrize("count", [1, 2, 6, 8])
def test_shards_of_real_vocabularies_have_whole_blocks(name: str, count: int):
    plain: ModelConfig = preset(name)
    padded = padded_for(jax.devices()[:count], plain).padded_vocab_size
    assert padded % (128 * count) == 0
    assert padded - plain.vocab_size < 128 * count
