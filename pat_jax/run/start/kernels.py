"""Which kernels a run uses on devices that it has not met before."""

from collections.abc import Sequence

from pat_jax.config.run import RunConfig
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.warm_up.kernel_check import usable_kernels
from pat_jax.models.kernels.kernel_choice import Kernels


def other_kernels(
    config: RunConfig, engine: RolloutEngine, also: Sequence[str] = ()
) -> Kernels | None:
    """What the engine's devices are to compute with; None where its own kernels are right.

    Args:
      also: kernels that are used beside generation's.
    """
    layouts, drafts = list(engine.layouts.values()), engine.specs.drafts.budgets
    kernels = usable_kernels(
        layouts,
        engine.policy.config,
        page_size=config.rollout.page_size,
        dtype=engine.dtype,
        names=("decode", "prefill", *["verify"] * bool(drafts), *also),
    )
    return None if kernels == layouts[0].kernels else kernels
