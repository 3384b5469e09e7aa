"""The lossless contract where query heads are padded, and where axes come in another order."""

from dataclasses import replace

import jax
import pytest
from test_lossless import check

from pat_jax.engine.layout.mesh import padded_for
from tests.lossless import MODELS, Settings, Subject, make_requests, tally
from tests.near_ties import Tally

pytestmark = pytest.mark.slow  # each compiles an engine of its own


@pytest.mark.parametrize(
    "num_heads, kv_heads, mlp_dim, num_devices, path",
    [
        (9, 3, 48, 2, (1, 2, 1)),
        (9, 3, 48, 6, (1, 3, 6, 1)),
        (14, 2, 64, 8, (1, 4, 8, 2)),
        (28, 4, 64, 8, (1, 8, 4)),
        (20, 4, 64, 6, (1, 2, 1)),  # three devices of a group would divide nothing
    ],
)
def test_switching_changes_no_token(num_heads, kv_heads, mlp_dim, num_devices, path):
    config = replace(MODELS["kv2"], num_heads=num_heads, num_kv_heads=kv_heads, mlp_dim=mlp_dim)
    config = padded_for(jax.devices()[:num_devices], config)
    settings = Settings(sequences=num_devices * 2, min_rows=4, min_length=64)
    one = Subject(config, settings, num_devices=num_devices)
    requests = make_requests(settings, seed=0)
    static, _ = one.run(requests, one.static(1))
    adaptive, report = one.run(requests, one.adaptive(path, "migrate", len(requests)))
    assert len(report.switches) == len(path) - 1
    others = [one.run(requests, one.static(split.tp))[0] for split in one.engine.layouts]
    check(sum(tally(one, requests, static, [adaptive, *others]).values(), Tally()))
