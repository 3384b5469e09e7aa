"""Where published measurements are, for tests that read them."""

from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / ".." / "shared" / "data"
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="no folder ../shared/data beside this one"
)
