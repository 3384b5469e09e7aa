"""The head of a policy's first layers in a run. Knows options. Does not know how a head learns."""

from collections.abc import Sequence

from pat_jax.config.run import RunConfig
from pat_jax.run.setup import Setup
from pat_jax.training.build import DTYPES, logit_tokens
from pat_jax.training.exit_head import ExitHeadTrainer


def exit_head_trainer(
    config: RunConfig, setup: Setup, micro_shapes: Sequence[tuple[int, int]]
) -> ExitHeadTrainer | None:
    """Compiled; None where the first layers do not draft, or nothing is learned."""
    depth, trainer = setup.engine.specs.drafts.exit_layer, setup.trainer
    if not depth or not config.train:
        return None
    built = ExitHeadTrainer(
        trainer,
        depth=depth,
        micro_shapes=micro_shapes,
        dtype=DTYPES[config.compute_dtype],
        temperature=config.rollout.temperature,
        logit_tokens=logit_tokens(setup.policy, trainer.layout),
    )
    built.compile()
    return built
