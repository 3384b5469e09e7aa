"""A plan as one HTML file, and as text."""

import re
from pathlib import Path

from pat_jax.common.html.render import Form, rendered
from pat_jax.engine.record.plot import running_plot
from pat_jax.planning.memory import GIB
from pat_jax.profiling.capacity import tables
from pat_jax.profiling.capacity.report import RELIANCE, SOURCES, PlanReport


def page(report: PlanReport) -> str:
    return _rendered(report, "html")


def plan_text(report: PlanReport) -> str:
    """Returns the plan as text: the page without its picture."""
    return re.sub(r"\n{3,}", "\n\n", _rendered(report, "txt")).strip()


def _rendered(report: PlanReport, form: Form) -> str:
    return rendered(
        Path(__file__).with_name("plan.jinja"),
        form,
        report=report,
        tables=tables,
        running_plot=running_plot,
        SOURCES=SOURCES,
        RELIANCE=RELIANCE,
        GIB=GIB,
    )
