"""A small head behind one of a policy's layers: what it would generate if it ended there.

After AdaDecode (arXiv 2506.03700): the policy's own final norm and logits, and between them one
matrix that is learned. A matrix of zeros changes nothing.
"""

from jaxtyping import Array, Float

from pat_jax.models.layers import linear

ExitHead = Float[Array, "embed embed"]


def exit_hidden(
    hidden: Float[Array, "*batch embed"], head: ExitHead
) -> Float[Array, "*batch embed"]:
    """
    Args:
      hidden: behind the layer and the final norm.
    """
    return hidden + linear(hidden, head)
