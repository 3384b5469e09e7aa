"""Which weights of a policy may have an adapter, and which of them the user's targets choose.

Modules have PEFT's names, which are those of transformers 5: a layer's experts are two stacks,
`gate_up_proj` and `down_proj`. Here `gate_up_proj` is two weights, gate and up, whose adapters
b · a share the factor a, as in PEFT 0.21.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import jax

from pat_jax.common.errors import UserError
from pat_jax.models.hf_tensors import HFTensor, hf_tensors
from pat_jax.models.policy import Params, Policy

# PEFT's name for all linear layers except the output head; in models with experts, it names only
# the linear layers of attention.
ALL_LINEAR = "all-linear"
# For each weight of a layer with experts: the name of PEFT's module that holds it, and the weight's
# index in that module (None if it is the only one).
_SPARSE = {
    "router": ("gate", None),
    "gate": ("experts.gate_up_proj", 0),
    "up": ("experts.gate_up_proj", 1),
    "down": ("experts.down_proj", None),
}


@dataclass(frozen=True)
class Linear:
    """Describes the adapter that a weight may have."""

    module: str
    num_in: int  # number of trailing dimensions that a product sums over; 0 if without an adapter
    part: int | None = None  # index among the weights that share the factor a; None if none do
    is_scalar_head: bool = False  # the weight itself is trained, without an adapter

    @property
    def is_stack(self) -> bool:
        return is_stack(self.module)


def is_stack(module: str) -> bool:
    """Whether the module's weights and adapters are stacks, whose first dimension is the expert."""
    return ".experts." in module


def is_of_experts(policy: Policy, module: str) -> bool:
    """Whether `module`, which may have an adapter, is a stack of experts or a router."""
    return policy.config.experts is not None and ".mlp." in module


def linear_weights(policy: Policy) -> Params:
    """Returns the tree of the policy's parameters with a `Linear` in place of each array."""
    tensors, tree = jax.tree_util.tree_flatten_with_path(hf_tensors(policy))
    variables = jax.tree.leaves(
        policy.abstract_params, is_leaf=lambda x: hasattr(x, "get_metadata")
    )
    contracted = (variable.get_metadata()["contracted"] for variable in variables)
    pairs = zip(tensors, contracted, strict=True)
    linear = [_linear(policy, path, tensor, num) for (path, tensor), num in pairs]
    return jax.tree.unflatten(tree, linear)


def linear_modules(policy: Policy) -> list[str]:
    """Returns the names of the modules that may have an adapter, each once."""
    linear: Sequence[Linear] = jax.tree.leaves(linear_weights(policy))
    return list(dict.fromkeys(each.module for each in linear if each.num_in))


def _linear(
    policy: Policy, path: jax.tree_util.KeyPath, tensor: HFTensor, contracted: int
) -> Linear:
    keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    if policy.config.experts is None or keys[0] != "layers" or keys[2] != "mlp":
        return Linear(tensor.module, contracted, is_scalar_head=tensor.is_scalar_head)
    if not policy.config.is_sparse(keys[1]) or keys[3] not in _SPARSE:
        # PEFT cannot tell an MLP from experts by module name, so no MLP of such a model is adapted.
        return Linear(tensor.module, 0)
    name, part = _SPARSE[keys[3]]
    return Linear(f"model.layers.{keys[1]}.mlp.{name}", 1, part)


def targeted(policy: Policy, targets: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the modules that `targets` choose (see `Lora.of`). Raises UserError if a
    target names no module that may have an adapter."""
    linear = linear_modules(policy)
    chosen = set[str]()
    for target in targets:
        end = f".{target.removesuffix('.weight')}"
        if target == ALL_LINEAR:
            found = {x for x in linear if not is_of_experts(policy, x)}
        else:
            found = {x for x in linear if f".{x}".endswith(end)}
        if not found:
            raise _unmatched(f"option --lora.targets is {target!r}", target, linear, policy)
        chosen |= found
    return tuple(name for name in linear if name in chosen)


def _unmatched(where: str, target: str, linear: Sequence[str], policy: Policy) -> UserError:
    """Returns the error for a target that is not the end of any linear layer's name."""
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    expected = f"expected the ends of names such as {linear[0]!r}, that is {', '.join(kinds)}"
    all_of_these = "these"
    if policy.config.experts is not None:
        all_of_these = "attention, while no MLP beside experts has an adapter"
    last = target.rpartition(".")[2].lower()
    (nearest,) = get_close_matches(last, [*kinds, ALL_LINEAR], n=1, cutoff=0.0)
    return UserError(
        f"{where}: no linear layer of the model is called that, {expected}, or {ALL_LINEAR} for "
        f"{all_of_these}; the nearest is {nearest!r}."
    )
