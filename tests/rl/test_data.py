import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.errors import UserError
from pat_jax.rl.arithmetic import problems
from pat_jax.rl.data import Problems, ProblemSplits, PromptSource, load_problems
from pat_jax.rl.problem_files import INSTRUCTION, read_problem_file
from pat_jax.rl.split import Split, split_of
from pat_jax.rl.types import Prompt

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "math"
DEEPSCALER = DATA / "deepscaler" / "math_train_first1000.json"
GSM8K = DATA / "gsm8k" / "train_first1000.jsonl"
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"the DeepScaleR and GSM8K samples are not at {DATA}"
)


class WordTokenizer:
    """One token a word."""

    vocab_size, pad_id, eos_ids = 1000, 0, (1,)

    def encode(self, text: str) -> list[int]:
        return [2 + len(word) for word in text.split()]

    def decode(self, tokens) -> str:
        return " ".join("x" * (token - 2) for token in tokens)

    def encode_prompt(self, prompt) -> list[int]:
        parts = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt]
        return [token for part in parts for token in self.encode(part)]


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def write_lines(path: Path, *rows: object) -> Path:
    return write(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def load(path: Path, *, seed: int = 0, max_prompt_length: int = 10_000, **options) -> ProblemSplits:
    return load_problems(
        path, WordTokenizer(), seed=seed, max_prompt_length=max_prompt_length, **options
    )


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(id=index, tokens=(index,), text=str(index), columns={}) for index in range(count)
    ]


def ids(batch: list[Prompt]) -> list[int]:
    return [prompt.id for prompt in batch]


# --- order -----------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 3), st.integers(0, 5))
def test_whole_batches_of_an_epoch_hold_every_problem_once(size, num_batches, seed, epoch):
    source = Problems(prompts(size * num_batches), seed=seed, name="some")
    steps = range(epoch * num_batches, (epoch + 1) * num_batches)
    seen = [prompt.id for step in steps for prompt in source.batch(step, size)]
    assert sorted(seen) == list(range(size * num_batches))


@given(st.data(), st.integers(1, 40), st.integers(0, 2**32 - 1), st.integers(0, 500))
def test_a_batch_is_a_pure_function_and_holds_no_problem_twice(data, count, seed, step):
    size = data.draw(st.integers(1, count))
    source = Problems(prompts(count), seed=seed, name="some")
    batch = source.batch(step, size)
    source.batch(step + 1, size)
    assert (
        batch
        == source.batch(step, size)
        == Problems(prompts(count), seed=seed, name="").batch(step, size)
    )
    assert len(set(ids(batch))) == size


def test_epochs_and_seeds_differ_in_order():
    def order(seed, epoch):
        return tuple(ids(Problems(prompts(20), seed=seed, name="some").batch(epoch, 20)))

    assert len({order(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


def test_problems_left_over_in_one_epoch_come_in_another():
    source = Problems(prompts(10), seed=0, name="some")
    seen = [
        set(ids(source.batch(2 * epoch, 4) + source.batch(2 * epoch + 1, 4))) for epoch in range(9)
    ]
    assert all(len(epoch) == 8 for epoch in seen)
    assert set.union(*seen) == set(range(10))


def test_a_batch_larger_than_the_set_is_refused():
    with pytest.raises(UserError, match=r"train.json has 3 prompts, fewer than one batch of 4"):
        Problems(prompts(3), seed=0, name="train.json").batch(0, 4)


def test_first_gives_what_there_is():
    source = Problems(prompts(5), seed=0, name="some")
    assert sorted(ids(source.first(9))) == [0, 1, 2, 3, 4]
    assert source.first(3) == source.first(9)[:3]


def test_the_built_in_task_and_files_are_used_alike():
    assert isinstance(problems(0, "train"), PromptSource)
    assert isinstance(Problems(prompts(1), seed=0, name="some"), PromptSource)


# --- splits ----------------------------------------------------------------------------------


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_held_out_share_only_adds_problems(text, one, other):
    low, high = sorted([one, other])
    if split_of(text, low) is Split.HELDOUT:
        assert split_of(text, high) is Split.HELDOUT
    assert split_of(text, 0.0) is Split.TRAIN and split_of(text, 1.0) is Split.HELDOUT


def test_the_split_is_a_property_of_the_text(tmp_path):
    rows = [{"prompt": f"problem {number}"} for number in range(400)]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    backwards = write_lines(tmp_path / "b.jsonl", *reversed(rows))
    first, second, reordered = load(path), load(path, seed=7), load(backwards)
    texts = [{p.text for p in split.heldout} for split in (first, second, reordered)]
    assert texts[0] == texts[1] == texts[2]
    assert not texts[0] & {p.text for p in first.train}
    assert len(first.train) + len(first.heldout) == 400
    assert 20 <= len(first.heldout) <= 60
    assert first.heldout.first(8) == second.heldout.first(8)
    assert first.train.batch(0, 8) != second.train.batch(0, 8)


# --- formats ---------------------------------------------------------------------------------

PROBLEM = {"problem": "1 + 1?", "answer": "2", "difficulty": 1.0}
QUESTION = {"question": "Half of 4000?", "answer": "#### of 4000 / 2 = 2000\n#### 2,000"}


def test_a_problem_of_deepscaler(tmp_path):
    [row] = read_problem_file(write(tmp_path / "a.json", [PROBLEM])).rows
    assert row.text == "1 + 1?" and row.prompt == f"1 + 1?\n{INSTRUCTION}"
    assert row.columns == {"answer": "2", "difficulty": 1.0}


def test_a_number_as_answer(tmp_path):
    [row] = read_problem_file(write(tmp_path / "a.json", [{**PROBLEM, "answer": 2}])).rows
    assert row.columns["answer"] == "2"


def test_a_question_of_gsm8k(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", QUESTION)
    [row] = read_problem_file(path, instruction="").rows
    assert row.prompt == row.text == "Half of 4000?"
    assert row.columns == {"answer": "2000", "solution": QUESTION["answer"]}


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_prompts_with_columns_in_every_kind_of_file(tmp_path, suffix):
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "be"},
                {"role": "user", "content": str(number)},
            ],
            "level": number,
        }
        for number in range(3)
    ]
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix == ".json":
        write(path, rows)
    else:
        write_lines(path, *rows)
    read = read_problem_file(path).rows
    assert [row.prompt for row in read] == [row["prompt"] for row in rows]
    assert [row.text for row in read] == ["be\n\n0", "be\n\n1", "be\n\n2"]
    assert [row.columns for row in read] == [{"level": 0}, {"level": 1}, {"level": 2}]


def test_ids_are_line_numbers_whatever_is_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    write(
        path, '\ufeff{"prompt": "one"}\n\n{"prompt": "a far too long one"}\n{"prompt": "two\u2028"}'
    )
    splits = load(path, max_prompt_length=2, heldout_share=0.0)
    assert {prompt.id: prompt.text for prompt in splits.train} == {1: "one", 4: "two\u2028"}
    assert splits.num_too_long == 1
    assert "1 longer than 2 tokens" in str(splits)


def test_a_null_answer_is_left_out_and_counted(tmp_path):
    path = write(tmp_path / "a.json", [PROBLEM, {**PROBLEM, "answer": None}, PROBLEM])
    file = read_problem_file(path)
    assert [row.number for row in file.rows] == [1, 3]
    assert file.num_without_answer == 1


@needs_data
def test_the_deepscaler_sample():
    splits = load(DEEPSCALER)
    assert len(splits.train) + len(splits.heldout) == 999
    assert splits.num_without_answer == 1  # row 887
    everything = [*splits.train, *splits.heldout]
    assert {prompt.id for prompt in everything} == set(range(1, 1001)) - {887}
    first = next(prompt for prompt in everything if prompt.id == 1)
    assert first.columns["answer"] == "0" and first.text.startswith("Let \\[f(x) = \\left")


@needs_data
def test_the_gsm8k_sample():
    splits = load(GSM8K)
    everything = {prompt.id: prompt for prompt in [*splits.train, *splits.heldout]}
    assert set(everything) == set(range(1, 1001))
    assert everything[1].columns["answer"] == "72"  # clips sold in April and May
    assert all(
        str(prompt.columns["answer"]).lstrip("-").isdigit() for prompt in everything.values()
    )


# --- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[\n{"prompt": "a"},\n{"prompt": }\n]', r"a\.json, line 3, column 12, is broken JSON"),
        ('{"prompt": "a"}\n{"prompt": "b"}', r"line 2, .* name it \.jsonl"),
        ({"prompt": "a"}, "expected an array of objects at the top"),
        ([], "holds no problems"),
        ("", "holds no problems"),
        (" \n", "holds no problems"),
        (["a"], "row 1, is 'a': expected an object"),
        ([{"text": "a"}], "row 1, has the fields text: expected prompt, or problem and answer"),
        ([PROBLEM, {"problem": "a"}], r"row 2, has no field 'answer', which the first row has"),
        ([PROBLEM, {"prompt": "a"}], "row 2, has no field 'problem'"),
        ([{**PROBLEM, "answer": ["2"]}], r"row 1, field 'answer', is \['2'\]: expected text or a"),
        ([{**PROBLEM, "answer": " "}], "row 1, field 'answer', is ' '"),
        ([{**PROBLEM, "answer": True}], "row 1, field 'answer', is True"),
        ([{**PROBLEM, "problem": 3}], "row 1, field 'problem', is 3: expected text"),
        ([{"prompt": ""}], "row 1, field 'prompt', is '': expected text that is not empty"),
        ([{"prompt": []}], "row 1, field 'prompt', .* expected chat messages"),
        ([{"prompt": [{"role": "user"}]}], "row 1, field 'prompt', .* role and content"),
        ([{"prompt": "a", "completions": 1}], "row 1, has a field 'completions'"),
        ([QUESTION, {**QUESTION, "answer": "18"}], "row 2, field 'answer', is '18': .* '#### '"),
        ([{**QUESTION, "answer": "so ####  "}], "row 1, field 'answer', .* '#### '"),
    ],
)
def test_bad_json_says_what_and_where(tmp_path, content, message):
    path = write(tmp_path / "a.json", content)
    with pytest.raises(UserError, match=message) as error:
        read_problem_file(path)
    assert str(path) in str(error.value)


def test_bad_json_lines_name_the_line(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, '{"prompt": "a"}\n\n{"prompt": "b"\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 3, column \d+, is broken JSON"):
        read_problem_file(path)
    write(path, '{"prompt": "a"}\n\n{"promt": "b"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 3, has no field 'prompt'.*found: promt"):
        read_problem_file(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"a\.csv ends in '\.csv': expected one of \.json"):
        read_problem_file(write(tmp_path / "a.csv", "prompt"))
    with pytest.raises(UserError, match=r"data file maths ends in 'no extension'.* built-in task"):
        read_problem_file("maths")
    with pytest.raises(UserError, match=r"absent\.json does not exist"):
        read_problem_file(tmp_path / "absent.json")
    with pytest.raises(UserError, match=r"b\.parquet is not a readable Parquet file"):
        read_problem_file(write(tmp_path / "b.parquet", "PAR1 no"))
    (tmp_path / "c.json").write_bytes(b'[{"prompt": "\xff"}]')
    with pytest.raises(UserError, match=r"c\.json is not UTF-8 text \(byte 13\)"):
        read_problem_file(tmp_path / "c.json")


def test_nothing_left_to_train_on(tmp_path):
    path = write(tmp_path / "a.json", [{"prompt": "a far too long prompt"}])
    with pytest.raises(UserError, match=r"nothing to train on .*1 longer than 3 tokens"):
        load(path, max_prompt_length=3)
