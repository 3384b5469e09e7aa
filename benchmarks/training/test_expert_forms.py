"""How the forms of `expert_forms` start."""

import numpy as np
import pytest

from benchmarks.training.expert_forms import FORMS, begun, name_of, shape
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset


def scales(form: str) -> tuple[dict[str, float], dict[str, float]]:
    """Of the first layer's matrices: root mean squares, and largest over least singular values."""
    policy = Policy.from_config(shape(FORMS[form]))
    layer = begun(FORMS[form], policy, 0)["layers"][0]["mlp"]
    matrices = {
        name: np.asarray(layer[name][...]) for name in ("descend", "gate", "down", "ascend")
    }
    singular = {name: np.linalg.svd(matrices[name])[1] for name in ("descend", "ascend")}
    return (
        {name: float(np.sqrt(np.mean(x**2))) for name, x in matrices.items()},
        {name: float(x.max() / x.min()) for name, x in singular.items()},
    )


def test_one_form_starts_as_the_product_does():
    layer = Policy.from_config(preset("demo-bigmac")).init(0)["layers"][0]["mlp"]
    now = {name: float(np.sqrt(np.mean(np.asarray(x[...]) ** 2))) for name, x in layer.items()}
    sizes, singular = scales("as-fine-grained-orthonormal")
    assert sizes == pytest.approx({name: now[name] for name in sizes}, rel=0.03)
    assert singular == pytest.approx(dict.fromkeys(singular, 1.0), rel=1e-4)


def test_the_others_differ_from_it_in_what_they_say():
    sizes, singular = scales("normal")
    of_half, _ = scales("as-fine-grained")
    factors = {name: of_half[name] / sizes[name] for name in sizes}
    assert factors == pytest.approx({"descend": 2, "gate": 0.5, "down": 0.5, "ascend": 2})
    assert all(x > 2 for x in singular.values())


def test_matrices_of_attention_are_none_of_experts():
    assert name_of(("layers", "attention", "out")) == ""
    assert name_of(("layers", "mlp", "ascend")) == "ascend"
