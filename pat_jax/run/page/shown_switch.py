"""The same rollout twice, on a run's page: what a switch changed, what it cost, and a plan for larger devices."""

from collections.abc import Iterator
from html import escape

from pat_jax.common.html.page import html_table, listed, section
from pat_jax.common.text_table import Table, percent
from pat_jax.run.page.rollouts import rollout_plot
from pat_jax.run.shown_switch import ComputedPlan, ShownSwitch


def shown_switch(shown: ShownSwitch | None) -> str:
    """Empty where a run has shown none."""
    if shown is None:
        return ""
    measured = [
        listed(shown.lines()),
        "<h3>As planned</h3>",
        rollout_plot(shown.planned),
        "<h3>With a forced switch</h3>",
        rollout_plot(shown.forced),
    ]
    computed = _computed(shown.computed) if shown.computed else ()
    return section(
        "The same rollout twice",
        *measured,
        *computed,
        source=f"The rollout that step {shown.step} would have made, after the last checkpoint: nothing was "
        "learned of it. Seconds are without what a program took to compile.",
    )


def _computed(plan: ComputedPlan) -> Iterator[str]:
    yield f"<h3>{escape(plan.model)} on {escape(plan.target)}: computed, not measured</h3>"
    yield f"<p>{escape(plan.words)}. Nothing ran: it is the planner that ships on a "
    yield f"simulated clock. {escape(plan.reliance)}</p>"
    yield html_table(
        Table(
            ["layout", "seconds, computed", "saved by planning"],
            [
                ["as planned", plan.planned_s, None],
                *([name, each, percent(1 - plan.planned_s / each)] for name, each in plan.static),
            ],
        )
    )
    yield rollout_plot(plan.trace)
    yield f"<p>Computed again by:</p><pre>{escape(plan.command)}</pre>"
