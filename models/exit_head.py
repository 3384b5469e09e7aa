"""A small head that predicts the policy's next token from one of its first layers (early exit).

As in AdaDecode (arXiv 2506.03700), it uses the policy's own final norm and output head, with one
learned matrix between them. A matrix of zeros changes nothing.
"""

from jaxtyping import Array, Float

from pat_jax.models.layers import linear

ExitHead = Float[Array, "embed embed"]


def exit_hidden(
    hidden: Float[Array, "*batch embed"], head: ExitHead
) -> Float[Array, "*batch embed"]:
    """Returns hidden + head · hidden, the input of the policy's output head.

    Args:
      hidden: the layer's output after the final norm.
    """
    return hidden + linear(hidden, head)
