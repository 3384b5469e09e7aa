"""The arithmetic of `text_curves`."""

import pytest

from benchmarks.training.text_curves import compared, scaled


def test_a_preset_of_twice_the_size():
    model = scaled("demo-moe", 2)
    assert (model.embed_dim, model.num_layers, model.vocab_size) == (256, 4, 257)
    assert model.experts is not None and model.experts.expert_dim == 192
    assert (model.experts.num_experts, model.experts.num_experts_per_tok) == (16, 4)


def test_differences_are_of_the_same_seed():
    curves = {"a": {0: {10: 2.0, 20: 1.5}, 1: {10: 4.0}}, "b": {0: {10: 1.5}, 1: {10: 3.0}}}
    found = compared(curves)
    assert found["nats_per_byte"]["a"] == {10: {"mean": 3.0, "ci95": pytest.approx(12.706)}}
    assert found["differences"]["a - b"][10]["mean"] == pytest.approx(0.75)
    assert found["differences"]["a - b"][10]["ci95"] == pytest.approx(12.706 * 0.25)
    assert set(found["differences"]["a - b"]) == {10}
