"""Batches whose gradient is not finite are kept, and too many of them in a row end a run."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.common.errors import UserError
from pat_jax.rl.batches.batches import MicroBatch
from pat_jax.run.checkpoints.skipped_steps import FOLDER, Skipped


def micro(value: int) -> MicroBatch:
    rows = np.full((2, 3), value, np.int32)
    return MicroBatch(rows, rows, rows, rows / 2, {"advantages": np.full((2, 3), np.nan)})


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=4), max_size=8), st.integers(0, 4))
def test_it_ends_with_the_first_row_that_is_too_long(tmp_path_factory, steps, most):
    skipped = Skipped(tmp_path_factory.mktemp("run"), most, lambda _: None)
    before = ""
    for number, applied in enumerate(steps):
        before += "".join(" " if one else "x" for one in applied)
        longest = max(map(len, before.split()), default=0)
        if longest > most:
            with pytest.raises(UserError, match=f"{longest} optimizer steps in a row"):
                skipped.note(number, [[micro(0)]], applied)
            return
        skipped.note(number, [[micro(0)]], applied)


def test_what_was_to_be_learned_is_there_to_be_looked_into(tmp_path: Path):
    said: list[str] = []
    skipped = Skipped(tmp_path, 3, said.append)
    # Two optimizer steps, gone through twice.
    skipped.note(1, [[micro(1), micro(2)], [micro(3)]], [True] * 4)
    assert not said and not (tmp_path / FOLDER).exists()
    skipped.note(2, [[micro(1), micro(2)], [micro(3)]], [True, True, False, True])
    path = tmp_path / FOLDER / "step-2.npz"
    assert said == [
        "step 2: 1 of 4 optimizer steps left out, their gradient not finite (NaN or infinite); what they "
        f"were to learn is in {path}"
    ]
    found = np.load(path)
    names = ("tokens", "positions", "weights", "responses", "advantages")
    assert set(found) == {f"0.{j}.{name}" for j in range(2) for name in names}
    np.testing.assert_array_equal(found["0.1.tokens"], micro(2).tokens)
    np.testing.assert_array_equal(found["0.0.weights"], micro(1).weights)
    assert np.isnan(found["0.0.advantages"]).all()


def test_the_newest_few_are_kept_and_a_disk_that_takes_none_ends_nothing(tmp_path: Path):
    said: list[str] = []
    skipped = Skipped(tmp_path, 2, said.append)
    for step in range(9, 14):
        skipped.note(step, [[micro(step)]], [False])
        skipped.note(step, [[micro(step)]], [True])
    kept = {path.name for path in (tmp_path / FOLDER).iterdir()}
    assert kept == {"step-12.npz", "step-13.npz"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / FOLDER).write_text("in the way")
    Skipped(tmp_path / "other", 2, said.append).note(1, [[micro(1)]], [False])
    assert said[-1].endswith("not finite (NaN or infinite)")


def test_the_sentence_that_ends_a_run(tmp_path: Path):
    with pytest.raises(UserError) as error:
        Skipped(tmp_path, 0, lambda _: None).note(7, [[micro(0)]], [False])
    said = str(error.value)
    assert "\n" not in said and "the last in step 7; what they were to learn is in " in said
    assert "--optimizer.max_skipped (0); lower --optimizer.learning_rate, or resume" in said
