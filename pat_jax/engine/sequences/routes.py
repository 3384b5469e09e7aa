"""Routes: the experts that computed each token of a rollout, recorded so that they can be reused.

On the host, in NumPy. A model without experts has empty arrays.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int16

from pat_jax.engine.sequences.prefill_calls import PrefillCall
from pat_jax.engine.sequences.sequence_table import NO_SEQUENCE
from pat_jax.models.experts import NOT_RECORDED, ROUTE_DTYPE

TokenRoutes = Int16[np.ndarray, "tokens layers k"]


class Routes:
    """Keeps the routes of each prompt, once for all of its samples, and those of each response.

    A response's routes begin with its prompt's last token, which the first decode step computes.
    Every burst appends to them."""

    def __init__(self, prompts: Sequence[tuple[int, ...]], of: np.ndarray, shape: tuple[int, int]):
        """
        Args:
          prompts: tokens of each distinct prompt.
          of: int[sequences], the index in `prompts` of each sequence's prompt.
          shape: the number of layers with experts, and the number of experts of a token.
        """
        self._prompts = prompts
        self._of = of
        self.shape = shape
        self._before = [self._none(len(prompt) - 1) for prompt in prompts]
        self._behind: list[list[TokenRoutes]] = [[] for _ in of]
        self._computed: list[tuple[PrefillCall, jax.Array]] = []

    def _none(self, *shape: int) -> np.ndarray:
        return np.full((*shape, *self.shape), NOT_RECORDED, ROUTE_DTYPE)

    def recorded(self, call: PrefillCall, page_size: int) -> np.ndarray:
        """Returns the recorded experts of each block's tokens, int16[blocks, page_size, layers, k].

        Tokens that have not been computed before have NOT_RECORDED."""
        blocks = self._none(call.sequence.size, page_size)
        if blocks.size:
            # A recomputed sequence may have shared pages of another prompt that are gone.
            known = {
                i: self.whole(i) if self._behind[i] else self.known(i)
                for i in np.unique(call.sequence).tolist()
                if i != NO_SEQUENCE
            }
            for block, i, at in zip(blocks, *call.places(), strict=True):
                if i != NO_SEQUENCE:
                    block[: at.stop - at.start] = known[i][at]
        return blocks

    def computed(self, call: PrefillCall, routed: jax.Array) -> None:
        """Keeps the experts that a prefill call used, for `settle` to store.

        Args:
          routed: int16[blocks, page_size, layers, k], an array that the devices may still compute.
        """
        if routed.size:
            self._computed.append((call, routed))

    def settle(self) -> None:
        """Stores the routes of prompt tokens that prefill calls have computed. Routes that are
        already recorded stay."""
        for call, routed in self._computed:
            for block, i, at in zip(np.asarray(routed), *call.places(), strict=True):
                if i != NO_SEQUENCE:
                    mine = self._before[self._of[i]][at]
                    mine[:] = np.where(mine == NOT_RECORDED, block[: len(mine)], mine)
        self._computed.clear()

    def add(self, i: int, routes: TokenRoutes) -> None:
        """Appends the routes that a burst recorded for sequence i."""
        self._behind[i].append(routes)

    def known(self, i: int) -> TokenRoutes:
        """Returns the routes of sequence i so far: those of all its tokens but the newest."""
        return np.concatenate([self._before[self._of[i]], *self._behind[i]])

    def whole(self, i: int) -> TokenRoutes:
        """Returns the same as `known`, with gaps in the prompt filled from prompts that share its
        beginning."""
        self.settle()
        number = self._of[i]
        mine, tokens = self._before[number], self._prompts[number]
        for other, known in zip(self._prompts, self._before, strict=True):
            missing = np.flatnonzero((mine == NOT_RECORDED).any(axis=(1, 2)))
            if not len(missing):
                break
            shared = missing[missing < _alike(tokens, other)]
            shared = shared[shared < len(known)]
            mine[shared] = known[shared]
        return self.known(i)


def _alike(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of leading tokens that two prompts have in common."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))
