"""What a compiler makes of the policies of rematerialization: their order, and the numbers kept."""

import pytest

from benchmarks.layer_residuals import LENGTH, REMATS, ask


@pytest.mark.cross_compile
@pytest.mark.timeout(1500)
def test_an_h100_keeps_what_policies_name():
    found = ask("h100:1")
    each = [found[remat]["each further"] for remat in REMATS]
    kept = [said["temporaries_mib"] for said in each]
    # Llama-3.1-8B: 4,096 wide, 32 heads of 128; a sum of exponentials is a float32 of a head.
    values, sums = LENGTH * 4096 * 2 / 2**20, LENGTH * 32 * 4 / 2**20
    assert kept[:2] == pytest.approx([values, 2 * values + sums], abs=0.1)
    assert kept == sorted(kept)
    assert [said["kernels"] for said in each] == [4, 3, 3, 3]
    full, attention, dots, none = (said["products_tflop"] for said in each)
    assert full == attention > 1.2 * dots and dots == none
