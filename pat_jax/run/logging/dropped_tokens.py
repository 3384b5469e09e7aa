"""Special tokens that a policy generates and that texts leave out.

Knows tokens. Does not know who reads texts.
"""

from collections.abc import Callable, Sequence

import numpy as np

from pat_jax.rl.batches.types import Rollout
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer, Tokenizer


class DroppedTokens:
    """Says once that there are some, where texts leave out others than those of beginning, end and padding."""

    def __init__(self, tokenizer: Tokenizer, say: Callable[[str], None]):
        is_known = isinstance(tokenizer, HuggingFaceTokenizer)
        self._texts, self._say = dict(tokenizer.dropped) if is_known else {}, say

    def look(self, rollouts: Sequence[Rollout]) -> None:
        if not self._texts or not rollouts:
            return
        tokens = np.concatenate([one.tokens for one in rollouts])
        found = tokens[np.isin(tokens, list(self._texts))]
        if found.size:
            many = sum(bool(np.isin(one.tokens, found).any()) for one in rollouts)
            self._say(
                f"{many} of {len(rollouts)} responses have special tokens such as "
                f"{self._texts[int(found[0])]!r}, which rewards and written responses leave out: "
                "--reward_skip_special_tokens false keeps them"
            )
            self._texts = {}
