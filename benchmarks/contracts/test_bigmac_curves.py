"""The two forms that are compared are as large as each other."""

import pytest

from benchmarks.contracts.bigmac_curves import FORMS
from pat_jax.models.checkpoints.hf_tensors import num_parameters
from pat_jax.models.policy import Policy


def test_both_forms_have_as_many_parameters():
    fine, latent = (num_parameters(Policy.from_config(model)) for model in FORMS.values())
    assert latent == pytest.approx(fine, rel=0.001)
