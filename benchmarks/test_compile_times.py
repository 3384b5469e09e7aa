"""What compiling layers as a loop changes of a training step, and what it does not."""

import pytest

from benchmarks.compile_times import FORMS, ask


@pytest.mark.cross_compile
@pytest.mark.timeout(900)
def test_an_h100_multiplies_and_sends_as_much_in_a_loop():
    unrolled, loop = (ask("h100:8", form, 12) for form in FORMS)
    assert loop["products_tflop"] == unrolled["products_tflop"]
    assert loop["sent_mib"] == unrolled["sent_mib"]
    assert loop["compile_s"] < unrolled["compile_s"]
    assert loop["moved_gb"] < 1.05 * unrolled["moved_gb"]
