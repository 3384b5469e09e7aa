"""What the compilers of absent devices make of training attention: the bars of its temporaries."""

import pytest

from benchmarks.attention_temporaries import LENGTH, ask, looked_at


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_kernels_look_at_little_more_than_is_seen(platform: str):
    whole, packed = (looked_at(platform, [LENGTH // n] * n, 128) for n in (1, 8))
    assert whole["seen"] == pytest.approx(1 / 2, abs=1e-4)
    assert whole["blocks"] < 0.52  # nothing of the upper triangle but blocks on the diagonal
    assert packed["seen"] == pytest.approx(1 / 16, abs=1e-4)
    assert packed["blocks"] < 0.08


@pytest.mark.cross_compile
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("target", "most_gib"), [("v5e:1x1", 0.7), ("v6e:1x1", 0.7), ("a100:1", 0.3), ("h100:1", 0.3)]
)
def test_attention_takes_little_memory_and_xla_compiles_none_of_its_products(target, most_gib):
    found = ask(target, ways=("kernel",), programs=("attention",))["kernel"]["attention"]
    assert 0 < found["temporaries_mib"] / 1024 <= most_gib
    assert found["products_tflop"] == 0
