"""The coefficient β of the KL penalty over a run: fixed, or steered towards a target KL.

Knows numbers. Does not know how a KL is estimated (`kl.py`).
"""

import math
from dataclasses import dataclass, replace

_LARGEST_ERROR = 0.2  # limit of |e|: one iteration multiplies β by at most 1 ± 0.2 n / horizon


@dataclass(frozen=True)
class KLControl:
    """The coefficient β: fixed if there is no target KL, else adapted after each iteration.

        e = clip(KL / target - 1, -0.2, 0.2)
        β ← β (1 + e n / horizon)

    So β grows while the KL to the reference is above the target, and shrinks while it is below. β
    stays positive if it begins so, since an iteration has n < 5 horizon responses.

    Reference: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2.
    """

    beta: float  # β, units of reward per nat
    target: float | None = None  # target KL in nats; None: β is fixed
    horizon: int = 10_000  # number of responses; the larger, the slower β changes

    def after(self, kl: float, n: int) -> "KLControl":
        """Returns the control for the next iteration.

        Args:
          kl: KL(policy || reference) of this iteration in nats, averaged as the target is: over
            tokens, or over responses after summing over their tokens. NaN (no responses) changes
            nothing.
          n: number of responses of this iteration.
        """
        if self.target is None or math.isnan(kl):
            return self
        error = min(max(kl / self.target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        return replace(self, beta=self.beta * (1 + error * n / self.horizon))
