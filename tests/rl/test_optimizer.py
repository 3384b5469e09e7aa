"""The parts of the optimizer that need no gradient: its schedule and what it decays."""

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.rl.algorithm.optimizer import decay_mask, make_schedule


def test_norms_and_biases_are_not_decayed_whatever_their_shape():
    matrix, vector = jnp.ones((2, 2)), jnp.ones(2)
    params = {
        "layers": [{"query": matrix, "query_bias": matrix, "key_norm": matrix, "scale": vector}],
        "embedding": matrix,
    }
    assert decay_mask(params) == {
        "layers": [{"query": True, "query_bias": False, "key_norm": False, "scale": False}],
        "embedding": True,
    }


def test_the_schedule_warms_up_and_decays():
    options = {"learning_rate": 2.0, "warmup_steps": 4, "total_steps": 12}
    constant = make_schedule(schedule="constant", **options)
    assert [float(constant(i)) for i in (0, 1, 3, 4, 100)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    cosine = make_schedule(schedule="cosine", **options)
    rates = [float(cosine(i)) for i in (0, 3, 4, 6, 8, 12, 100)]
    quarter = 1 + np.cos(np.pi / 4)
    np.testing.assert_allclose(rates, [0.5, 2.0, 2.0, quarter, 1.0, 0.0, 0.0], atol=1e-6)


def test_the_rate_on_the_host_is_that_of_the_program():
    options = {"learning_rate": 3e-4, "warmup_steps": 7, "total_steps": 90}
    for name in ("constant", "cosine"):
        rate = make_schedule(schedule=name, **options)
        there = jax.jit(rate)(jnp.arange(100))
        here = [rate(i) for i in range(100)]
        assert not any(isinstance(x, jax.Array) for x in here)
        np.testing.assert_allclose(np.array(here), there, rtol=1e-5, atol=1e-10)


def test_no_warm_up_starts_at_the_full_rate():
    rate = make_schedule(learning_rate=2.0, schedule="constant", warmup_steps=0, total_steps=5)
    assert float(rate(0)) == 2.0
