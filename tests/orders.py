"""Orders of what a run's options ask for, as `plan` makes them."""

from collections.abc import Mapping, Sequence

from pat_jax.config.programs import program_choice
from pat_jax.config.run import RunConfig
from pat_jax.models.config import ModelConfig
from pat_jax.profiling.cross_compile.target_build import Order
from pat_jax.profiling.predict.targets import Target


def order_of(
    target: Target,
    run: RunConfig,
    model: ModelConfig,
    depths: Sequence[int],
    draft_model: ModelConfig | None = None,
    others: Mapping[str, ModelConfig] | None = None,
) -> Order:
    layers, platform = model.num_layers, target.chip.platform
    asked = program_choice(run, [*(others or {})], num_layers=layers, platform=platform)
    return Order.of(target, asked, model, depths, draft_model, others)
