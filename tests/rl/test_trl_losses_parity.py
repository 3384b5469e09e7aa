"""The recorded numbers of other tests are those of TRL's own trainers (needs the `parity` extra)."""

import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the `parity` extra")
pytest.importorskip("trl", reason="needs the `parity` extra")

from trl_losses import RECORDED, everything


def assert_same(found, recorded) -> None:
    if isinstance(recorded, dict):
        assert found.keys() == recorded.keys()
        for name in recorded:
            assert_same(found[name], recorded[name])
    elif isinstance(recorded, list):
        for one, wanted in zip(found, recorded, strict=True):
            assert_same(one, wanted)
    else:
        np.testing.assert_allclose(found, recorded, rtol=1e-7, atol=1e-8)


def test_trl_gives_what_is_recorded():
    assert_same(json.loads(json.dumps(everything())), json.loads(RECORDED.read_text()))
