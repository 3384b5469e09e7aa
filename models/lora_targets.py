"""Names of the linear layers that have an adapter, and the error for names that match none.

Knows names of modules. Does not know what an adapter is (`lora.py`).
"""

from collections.abc import Sequence
from difflib import get_close_matches

from pat_jax.common.errors import UserError
from pat_jax.models.policy import Policy

# PEFT's name for all linear layers but the output head; in a model with experts only attention's.
ALL_LINEAR = "all-linear"
# Parts of the module names of experts, and of MLPs beside them, in checkpoints.
_OF_EXPERTS = {"experts", "block_sparse_moe", "router"}
_LATENT = {"fc1_latent_proj", "fc2_latent_proj"}
_BESIDE_ATTENTION = {"mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", *_OF_EXPERTS}
_BESIDE_ATTENTION |= _LATENT


def unmatched(option: str, target: str, linear: Sequence[str], policy: Policy) -> UserError:
    """Returns the error for a target with which no name of a linear layer ends.

    Args:
      option: the option with the target.
      linear: names of all linear layers.
    """
    parts, experts = set(target.split(".")), policy.config.experts
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    expected = f"expected the ends of names such as {linear[0]!r}, that is {', '.join(kinds)}"
    if experts is None and parts & _OF_EXPERTS:
        return UserError(
            f"option --{option} is {target!r}: the model has no experts, {expected}, or {ALL_LINEAR} for "
            "all of these."
        )
    if experts is not None and parts & _BESIDE_ATTENTION:
        return UserError(
            f"option --{option} is {target!r}: in a model with experts those of a layer are "
            "experts.gate_up_proj and experts.down_proj, as PEFT has them, their router is gate.weight, and no "
            f"MLP has an adapter; {expected}, or {ALL_LINEAR} for attention."
        )
    last = target.rpartition(".")[2]
    nearest = get_close_matches(last.lower(), [*kinds, ALL_LINEAR], n=1, cutoff=0.0)[0]
    return UserError(
        f"option --{option} is {target!r}: no linear layer of the model is called that, {expected}, or "
        f"{ALL_LINEAR}; the nearest is {nearest!r}."
    )
