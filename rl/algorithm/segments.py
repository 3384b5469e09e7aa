"""Sums over the responses of packed rows. Knows arrays alone."""

import jax
from jaxtyping import Array, Float, Int


def sum_by_response(
    values: Float[Array, "rows length"], responses: Int[Array, "rows length"]
) -> Float[Array, "rows length"]:
    """At each position the sum of `values` over the positions of its response.

    Args:
      responses: the number of the response in its row, 0 … length - 1.
    """

    def of_row(values: Array, responses: Array) -> Array:
        # By rows: they are split over devices, and no sum crosses one.
        return jax.ops.segment_sum(values, responses, len(values))[responses]

    return jax.vmap(of_row)(values, responses)
