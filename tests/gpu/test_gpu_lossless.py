"""On one device too few pages, drafts and fewer rows change no token that was not a near-tie."""

from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import pytest
from one_device import device, kernels, note

from pat_jax.engine.device.draft.text_drafter import TextDrafter
from pat_jax.layout.buckets import NO_DRAFTS, Drafts
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.planning.drafts import Acceptance
from tests.lossless import MODELS, Settings, Subject, make_requests, tally
from tests.near_ties import Tally

pytestmark = pytest.mark.gpu
DRAFTS = Drafts(num_draft_tokens=(3,), longest=5, most_tokens=256, texts=8)
SETTINGS = Settings(sequences=32, min_rows=16, min_length=64)
# With heads that the kernels over pages take.
WIDE = replace(MODELS["kv8"], embed_dim=128, num_heads=4, num_kv_heads=2, head_dim=64)
WAYS = {
    "few pages": replace(SETTINGS, kv_pages=48),
    "drafts": replace(SETTINGS, drafter=TextDrafter(DRAFTS)),
    "drafts and few pages": replace(SETTINGS, drafter=TextDrafter(DRAFTS), kv_pages=48),
    "fewer rows": replace(SETTINGS, min_rows=4),
}


@cache
def subject(settings: Settings, is_wide: bool = False, dtype: str = "float32") -> Subject:
    wanted = kernels() if is_wide else Kernels(device().platform)
    model = WIDE if is_wide else MODELS["kv8"]
    return Subject(model, settings, jnp.dtype(dtype), 1, wanted)


def compared(way: str, is_wide: bool = False, dtype: str = "float32") -> Tally:
    """Against a run with room for all, and without drafts."""
    requests = make_requests(SETTINGS, seed=0)
    plain, other = (subject(x, is_wide, dtype) for x in (SETTINGS, WAYS[way]))
    expected, _ = plain.run(requests, plain.static(1))
    planner, drafts = other.static(1), other.settings.drafter.drafts
    if drafts != NO_DRAFTS:
        planner = replace(planner, num_draft_tokens=3, accept_prob=Acceptance.unseen().accept_prob)
    found, report = other.run(requests, planner)
    assert (report.preempted > 0) == (other.settings.kv_pages > 0)
    assert (report.drafted > 0) == (drafts != NO_DRAFTS)
    return sum(tally(plain, requests, expected, [found]).values(), Tally())


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("way", WAYS)
def test_plain_operations_in_float32_say_the_same_tokens(way: str):
    total = compared(way)
    assert total.unexplained == total.judge_disagrees == 0
    assert total.compared > 0.9 * total.tokens > 500
    assert max(total.max_logprob_difference, total.max_logprob_error) <= 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["few pages", "drafts"])
def test_kernels_say_nearly_the_same(way: str, dtype: str):
    """A kernel rounds as its platform multiplies: near-ties are wider, and log-probabilities nearly the same."""
    total = compared(way, is_wide=True, dtype=dtype)
    note(
        f"{way} with kernels in {dtype}",
        {
            "tokens": total.tokens,
            "divergences": total.divergences,
            "compared": total.compared,
            "logprobs": total.max_logprob_difference,
        },
    )
    assert total.compared > (0.8 if dtype == "float32" else 0.3) * total.tokens
    assert total.max_logprob_difference <= (0.05 if dtype == "float32" else 0.5)
