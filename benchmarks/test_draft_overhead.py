"""What drafting adds to a step on a GPU that is not there."""

import pytest

from benchmarks.draft_overhead import LENGTHS, MODEL, ask
from pat_jax.models.presets import preset

VOCAB = preset(MODEL).padded_vocab_size


@pytest.mark.cross_compile
@pytest.mark.timeout(900)
def test_it_reads_and_writes_for_less_than_a_tenth_of_a_millisecond():
    cells = ask("h100:8", rows=[32])
    assert [one["tokens of a row"] for one in cells] == list(LENGTHS)
    # The texts are read at least: four lengths of others' beside the row's own.
    least = [4 * 32 * 5 * length for length in LENGTHS]
    assert all(one["draft: bytes"] > n for one, n in zip(cells, least, strict=True))
    assert all(0 < one["microseconds"] < 100 and one["draft: kernels"] > 0 for one in cells)
    # Read, laid out as rows, and read twice.
    logits = [4 * 32 * (1 + one["budget"]) * VOCAB for one in cells]
    assert all(2 * n < one["sample: bytes"] < 4.2 * n for one, n in zip(cells, logits, strict=True))
