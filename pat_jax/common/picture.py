"""Figures that are written to files, and shown in notebooks.

Imports matplotlib: import this module only when something is drawn.
"""

from io import BytesIO
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

CELL_DPI = 90  # dots per inch in a notebook, whose file keeps the picture


class Picture(Figure):
    """A figure without pyplot, which does not change a notebook's backend or open figures."""

    def __init__(self, width: float, height: float, **options: Any):
        """Width and height are in inches."""
        super().__init__(figsize=(width, height), dpi=160, layout="constrained", **options)
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=CELL_DPI)
        return buffer.getvalue()
