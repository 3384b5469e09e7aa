"""A plan as one HTML file, and as text."""

from pathlib import Path

from pat_jax.common.html.render import rendered
from pat_jax.engine.record.running_plot import running_plot
from pat_jax.planning.memory import GIB
from pat_jax.profiling.capacity import charts, tables
from pat_jax.profiling.capacity.report import SOURCES, PlanReport
from pat_jax.profiling.capacity.update_report import RELIANCE


def page(report: PlanReport) -> str:
    return _rendered(report, "plan.html.jinja")


def plan_text(report: PlanReport) -> str:
    """The plan as text: what fits, what is sent, how long steps take, what adapting gains, what
    the update adds, what limits it."""
    return _rendered(report, "plan.txt.jinja").rstrip()


def _rendered(report: PlanReport, template: str) -> str:
    return rendered(
        Path(__file__).with_name(template),
        report=report,
        tables=tables,
        charts=charts,
        running_plot=running_plot,
        SOURCES=SOURCES,
        RELIANCE=RELIANCE,
        GIB=GIB,
    )
