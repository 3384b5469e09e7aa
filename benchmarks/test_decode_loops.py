"""What compilers make of a loop over stacked weights: the numbers kept."""

import pytest

from benchmarks.decode_loops import FORMS, ask

WEIGHTS_MB = 436  # of eight layers of Llama-3.1-8B, on each of eight devices


@pytest.mark.cross_compile
@pytest.mark.timeout(1500)
def test_a_loop_reads_weights_once_on_a_tpu_but_not_ahead_of_products():
    unrolled, loop = (ask("v5e:2x4", form, 8) for form in FORMS)
    assert loop["moved_mb"] == pytest.approx(WEIGHTS_MB, rel=0.1)
    assert loop["moved_by_products_mb"] > 0.9 * WEIGHTS_MB
    assert unrolled["moved_by_products_mb"] < 0.3 * WEIGHTS_MB


@pytest.mark.cross_compile
@pytest.mark.timeout(1500)
def test_a_loop_copies_its_weights_on_a_gpu():
    unrolled, loop = (ask("h100:8", form, 4) for form in FORMS)
    assert loop["moved_mb"] > 1.5 * unrolled["moved_mb"]
