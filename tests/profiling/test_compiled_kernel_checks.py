"""The questions to kernels compile for GPUs and TPUs that are not there."""

import pytest

from pat_jax.models.presets import preset
from pat_jax.profiling.cross_compile.kernels import kernels_for
from pat_jax.profiling.predict.targets import Target

CASES = ("decode", "prefill", "verify", "rows forward", "rows backward")


@pytest.mark.cross_compile
@pytest.mark.parametrize("text", ["v5e:2x4", "h100:8"])
def test_every_kernel_is_asked_in_programs_that_compile(text):
    """At the shapes of the narrowest layout and of the widest."""
    found = kernels_for(Target.parse(text), preset("qwen3-8b"))
    assert [(x.name, x.trouble) for x in found] == [(name, "") for name in CASES] * 2
