"""Lists the weights of a policy that may have an adapter, under PEFT's module names.

PEFT follows transformers 5, where a layer's experts are two stacks, `gate_up_proj` and `down_proj`.
Here `gate_up_proj` is two weights, gate and up, whose adapters share one a, as in PEFT 0.21.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from pat_jax.models.checkpoints.hf_tensors import HFTensor, hf_tensors
from pat_jax.models.policy import Params, Policy

# For a layer with experts: PEFT's module, and which part of the module's outputs a weight is.
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
    num_in: int  # trailing dimensions that a product with the weight sums over; 0: no adapter
    part: int | None = None  # part of the adapter's outputs, where several weights share its a
    is_scalar_head: bool = False  # trained as a whole, beside the adapters of other weights

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
    return jax.tree.unflatten(tree, [_linear(policy, *at, num) for at, num in pairs])


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
