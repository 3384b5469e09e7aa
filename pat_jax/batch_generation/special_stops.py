"""Stop strings that are special tokens. Knows a tokenizer. Does not know lines of prompts."""

from collections.abc import Sequence
from dataclasses import replace

from pat_jax.common.errors import shown
from pat_jax.engine.sequences.sampling import MAX_STOP_IDS, Sampling
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer


def with_special_stops(
    sampling: Sampling, stops: Sequence[str], tokenizer: HuggingFaceTokenizer | None
) -> Sampling:
    """With the special tokens among the stop strings as stop tokens: no text has them.

    Raises:
      ValueError: one sentence, where a stop string has a special token inside, or there are too many.
    """
    if tokenizer is None or not stops:
        return sampling
    ids, special = list(sampling.stop_token_ids), tokenizer.special.texts
    by_text = {text: token for token, text in special.items()}
    for stop in stops:
        if stop in by_text:
            ids.append(by_text[stop])
        elif inside := next((text for text in by_text if text in stop), ""):
            raise ValueError(
                f"stop is {shown(stop)}, in which {inside!r} is a special token, which no text has: "
                f"expected it alone or not at all; give {shown(inside)}."
            )
    ids = [token for token in dict.fromkeys(ids) if token not in tokenizer.eos_ids]
    if len(ids) > MAX_STOP_IDS:
        raise ValueError(
            f"stop and stop_token_ids have {len(ids)} tokens together: expected up to {MAX_STOP_IDS}."
        )
    return replace(sampling, stop_token_ids=tuple(ids))
