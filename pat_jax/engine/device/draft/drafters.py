"""Chooses the drafter by the kind of drafts."""

from pat_jax.engine.device.draft.draft_model import Load, ModelDrafter
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.engine.device.draft.generated import EarlyExit
from pat_jax.engine.device.draft.text_drafter import TextDrafter
from pat_jax.layout.buckets import NO_DRAFTS, Drafts
from pat_jax.models.policy import Policy

NO_DRAFTER: Drafter = TextDrafter(NO_DRAFTS)


def drafter_for(drafts: Drafts, policy: Policy | None = None, load: Load | None = None) -> Drafter:
    """Returns the drafter for `drafts`.

    Args:
      policy: the draft model, if there is one.
      load: loads the draft model's weights; None if bursts are only compiled.
    """
    if drafts.has_model:
        assert policy is not None, "a draft model"
        return ModelDrafter(drafts, policy, load)
    return EarlyExit(drafts) if drafts.exit_layer else TextDrafter(drafts)
