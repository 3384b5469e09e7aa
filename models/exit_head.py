"""A small head that predicts the policy's next token from one of its first layers (early exit).

As in AdaDecode (arXiv 2506.03700), it uses the policy's own final norm and output head, with one
learned matrix between them. With a matrix of zeros, the output head gets the norm's output.
"""

from jaxtyping import Array, Float

from pat_jax.models.layers import linear

ExitHead = Float[Array, "embed embed"]


def exit_hidden(
    hidden: Float[Array, "*batch embed"], head: ExitHead
) -> Float[Array, "*batch embed"]:
    """Returns hidden + head · hidden, the input of the policy's output head.

    Args:
      hidden: output of the early layer, after the policy's final norm.
    """
    return hidden + linear(hidden, head)
