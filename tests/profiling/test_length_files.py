"""Files of lengths: every format says the same, and every mistake is told by file and line."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest, spearmanr

from pat_jax.common.errors import UserError
from pat_jax.profiling.simulate.draw import Draw
from pat_jax.profiling.simulate.length_files import find_lengths, read_lengths
from pat_jax.profiling.simulate.response_lengths import BUILT_IN, PROBABILITIES, ResponseLengths


@pytest.fixture
def write(tmp_path: Path):
    def written(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return written


FORMATS = [
    ("a.csv", "512\n1024\n512\n"),
    ("a.csv", "output_tokens\n512\n1024\n\n512\n"),
    ("a.csv", "anything\n512\n1024\n512\n"),
    ("a.csv", "id,output_tokens\nx,512\ny,1024\nz,512.0\n"),
    ("a.csv", "output_tokens,count\n1024,1\n512,2\n7,0\n"),
    ("a.json", "[512, 1024, 512]"),
    ("a.json", '[\n {"output_tokens": 512, "count": 2},\n {"length": 1024}\n]'),
    ("a.jsonl", '512\n1024\n\n{"response_tokens": 512}\n'),
    ("a.jsonl", '{"usage": {"completion_tokens": 512}}\n{"length": 512}\n1024\n0\n'),
]


@pytest.mark.parametrize(("name", "text"), FORMATS)
def test_every_format_says_the_same(write, name: str, text: str):
    lengths = read_lengths(write(name, text))
    probabilities = np.array([0.1, 0.6, 0.7, 0.99])
    assert lengths.quantile(probabilities).tolist() == [512, 512, 1024, 1024]
    assert lengths.mean(cap=600) == pytest.approx((512 + 512 + 600) / 3)
    assert lengths.source == f"{name}, 3 responses" and lengths.prompts is None


def test_prompts_are_read_where_all_rows_have_them(write):
    lengths = read_lengths(write("a.csv", "prompt_tokens,output_tokens\n9,30\n7,10\n"))
    assert lengths.tokens.tolist() == [10, 30]
    assert lengths.prompts is not None and lengths.prompts.tolist() == [7, 9]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "", "no rows"),
        ("a.csv", "output_tokens\n", "no rows"),
        ("a.json", "[]", "no rows"),
        ("a.csv", "0\n0\n", "none of its 2 rows"),
        ("a.csv", "5\n-3\n", "line 2: a response of '-3' tokens"),
        ("a.csv", "output_tokens\n5\n\n5.5\n", "line 4: a response of '5.5' tokens"),
        ("a.csv", "5\nmany\n", "line 2: a response of 'many' tokens"),
        ("a.csv", "nan\n", "line 1: a response of 'nan' tokens"),
        ("a.csv", "output_tokens,count\n5,-1\n", "line 2: '-1' responses"),
        ("a.csv", "output_tokens,count\n5\n", "line 2: 1 columns, expected the 2"),
        ("a.csv", "a,b\n1,2\n", "line 1: columns a, b, expected one column alone"),
        ("a.csv", "prompt_tokens,output_tokens\n-1,5\n", "line 2: a prompt of '-1' tokens"),
        ("a.json", "[1,\n2,\n-3]", "row 3: a response of -3 tokens"),
        ("a.json", "[1,\n2.5]", "row 2: a response of 2.5 tokens"),
        ("a.json", "[1,\n{}]", "row 2: fields none, expected one of output_tokens"),
        ("a.json", "[1\n2]", "broken JSON"),
        ("a.json", '{"a": 1}', "expected one array"),
        ("a.jsonl", "1\n{\n", "line 2, column 2: broken JSON"),
        ("a.jsonl", '1\n{"tokens": 3}\n', "line 2: fields tokens, expected one of"),
        ("a.txt", "1\n", "expected a file named .csv, .json or .jsonl"),
    ],
)
def test_every_mistake_is_told(write, name: str, text: str, words: str):
    path = write(name, text)
    with pytest.raises(UserError) as caught:
        read_lengths(path)
    message = str(caught.value)
    assert message.startswith(f"lengths {path}") and words in message
    assert message.endswith(".") and "\n" not in message


def test_bytes_that_are_no_text(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read as text"):
        read_lengths(path)


def test_neither_a_file_nor_built_in():
    with pytest.raises(UserError, match=r"'reasonable'.*reasoning, pat, math, short"):
        find_lengths("reasonable")


CAP = 32_768


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_one_has_its_quantiles(name: str):
    lengths = ResponseLengths.built_in(name)
    found = lengths.quantile(np.array(PROBABILITIES))
    np.testing.assert_allclose(found, BUILT_IN[name].tokens, rtol=0.02)
    assert (np.diff(lengths.tokens) >= 0).all() and BUILT_IN[name].source in lengths.source


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.3, 0.9]), st.sampled_from([1, 8]))
def test_every_length_has_the_distribution_whatever_siblings_have(seed, correlation, samples):
    """One response of each prompt: the others are not independent of it."""
    lengths = ResponseLengths.built_in("reasoning")
    draw = Draw(4096, CAP, samples, correlation, seed=seed)
    drawn = lengths.draw(draw).responses[::samples]
    assert kstest(drawn, lengths.tokens).pvalue > 1e-5


def test_siblings_are_as_alike_as_asked():
    lengths = ResponseLengths.built_in("reasoning")
    for correlation in (0.0, 0.3, 0.7):
        drawn = lengths.draw(Draw(20_000, CAP, 2, correlation)).responses.reshape(-1, 2)
        # Spearman's of a Gaussian copula: 6/π·arcsin(ρ/2).
        expected = 6 / np.pi * np.arcsin(correlation / 2)
        found = spearmanr(drawn[:, 0], drawn[:, 1])
        assert found.statistic == pytest.approx(expected, abs=0.03)  # pyright: ignore[reportAttributeAccessIssue]  # no stubs


def test_an_equal_draw_is_the_same_and_another_seed_has_other_prompts():
    lengths, draw = ResponseLengths.built_in("math"), Draw(64, 4096)
    one, again, other = (lengths.draw(d) for d in (draw, draw, replace(draw, seed=1)))
    np.testing.assert_array_equal(one.responses, again.responses)
    assert one.prompt_id is not None and other.prompt_id is not None
    assert not set(one.prompt_id) & set(other.prompt_id)
    assert (np.bincount(one.prompt_id - one.prompt_id.min()) == 8).all()


def test_lengths_are_scaled_and_cut():
    lengths, draw = ResponseLengths.built_in("reasoning"), Draw(4096, 16_384, 1)
    before, after = (lengths.draw(replace(draw, scale=scale)).responses for scale in (1.0, 1.6))
    np.testing.assert_allclose(after, np.minimum(1.6 * before, 16_384), atol=1.5)
    assert after.max() == 16_384


def test_samples_of_a_prompt_share_its_length():
    tokens, prompts = np.array([10, 20, 30, 40]), np.array([1, 2, 3, 4])
    lengths = ResponseLengths("mine", tokens, np.ones(4), prompts)
    drawn = lengths.draw(Draw(32, 100, 4)).prompts.reshape(-1, 4)
    assert (drawn == drawn[:, :1]).all() and set(drawn.flat) <= {1, 2, 3, 4}


def test_responses_that_pile_up_at_their_longest_were_cut_there():
    def cut_at(*tokens: int) -> int | None:
        found, counts = np.unique(np.array(tokens), return_counts=True)
        return ResponseLengths("mine", found, counts.astype(float)).cut_at

    assert cut_at(*range(1, 101), 100, 100) is None  # no more than thinning out
    assert cut_at(*range(1, 80), *[100] * 3) == 100
    assert cut_at(1, 2, 3) is None  # too few to say
    assert cut_at(*[5] * 1000, *range(1, 80), 100, 100) is None  # too few of all
    assert ResponseLengths.built_in("math").cut_at == 4096
    assert all(ResponseLengths.built_in(name).cut_at is None for name in ("reasoning", "short"))
