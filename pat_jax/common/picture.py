"""Figures that are written to a file, and shown where a cell of a notebook ends in one.

Imports matplotlib: to be imported when something is drawn.
"""

from io import BytesIO
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

CELL_DPI = 90  # dots per inch in a notebook, which keeps them in its file


class Picture(Figure):
    """Without pyplot: the backend and the open figures of a notebook are left alone."""

    def __init__(self, width: float, height: float, **options: Any):
        """Width and height are inches."""
        super().__init__(figsize=(width, height), dpi=160, layout="constrained", **options)
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=CELL_DPI)
        return buffer.getvalue()
