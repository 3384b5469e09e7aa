"""Which metrics of a run its page shows, on which chart and in which section.

Knows names of metrics. Does not know how a chart is drawn.
"""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import isfinite, nan
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Rows = Sequence[Row]

LEARNING, REWARDS, RESPONSES = "Learning", "Rewards", "Responses"
OPTIMIZATION, SPEED, OTHERS = "Optimization", "Speed", "Other metrics"
SOURCES = {"": "all", "_own": "own text", "_siblings": "siblings", "_earlier": "earlier responses"}
LENGTHS = "rollout/length_p50 rollout/length_p90 rollout/length_max"
# Metrics that charts show in another form, and intervals of other metrics.
_UNDRAWN = (
    "*_ci95 timing/* rollout/drafted* rollout/accepted* eval/seconds progress/* "
    "rollout/tokens_per_row_step"
)


class Panel(NamedTuple):
    section: str
    title: str  # with the unit
    names: str  # metrics, `*` stands for any text; those that were measured are drawn
    is_told_at_zero: bool = True  # also draw a metric that is always 0
    is_main: bool = False  # one of the few that a notebook shows
    is_log: bool = False


PANELS: Sequence[Panel] = (
    Panel(LEARNING, "reward", "reward/mean eval/reward", is_main=True),
    Panel(LEARNING, "held-out reward of each file", "eval/*/reward"),
    Panel(LEARNING, "pass@k, share of prompts", "eval/pass@* eval/*/pass@*"),
    Panel(LEARNING, "maj@k, share of prompts", "eval/maj@* eval/*/maj@*"),
    Panel(LEARNING, "KL to the teacher, nats", "train/teacher_kl", is_main=True),
    Panel(LEARNING, "loss", "train/loss eval/loss", is_main=True),
    Panel(LEARNING, "accuracy on pairs", "train/accuracy eval/accuracy", is_main=True),
    Panel(LEARNING, "held-out text, bits per byte", "eval/bits_per_byte"),
    Panel(REWARDS, "reward of each function", "reward/*/mean"),
    Panel(REWARDS, "held-out reward of each function", "eval/reward/*"),
    Panel(REWARDS, "spread of the rewards, standard deviation", "reward/std"),
    Panel(REWARDS, "groups without signal, share", "reward/groups_without_signal"),
    Panel(REWARDS, "responses without a reward", "reward/failed eval/failed", False),
    Panel(REWARDS, "penalty of long responses", "reward/overlong_penalty", False),
    Panel(REWARDS, "KL in the reward, nats of a token", "reward/kl_per_token", False),
    Panel(REWARDS, "margin of pairs", "train/margin eval/margin"),
    Panel(REWARDS, "rewards of pairs", "train/chosen_reward train/rejected_reward", is_main=True),
    Panel(REWARDS, "held-out rewards of pairs", "eval/chosen_reward eval/rejected_reward"),
    Panel(REWARDS, "mean reward, chosen and rejected", "train/reward_mean eval/reward_mean"),
    Panel(REWARDS, "log-probability of pairs, nats", "train/chosen_logprob train/rejected_logprob"),
    Panel(REWARDS, "advantages", "train/advantage_*", False),
    Panel(RESPONSES, "length of a response, tokens", LENGTHS, is_main=True),
    Panel(RESPONSES, "truncated responses, share", "*/truncated"),
    Panel(OPTIMIZATION, "entropy of the next token, nats", "train/entropy", is_main=True),
    Panel(OPTIMIZATION, "norm of the gradient", "train/grad_norm", is_main=True),
    Panel(OPTIMIZATION, "learning rate", "*/learning_rate"),
    Panel(OPTIMIZATION, "KL from the old policy, nats", "train/approx_kl", False, is_main=True),
    Panel(OPTIMIZATION, "KL from the reference, nats", "train/reference_kl", False, is_main=True),
    Panel(OPTIMIZATION, "clipped tokens, share", "train/clip_fraction*"),
    Panel(OPTIMIZATION, "trainer against rollout, nats", "train/behavior_gap*", is_log=True),
    Panel(OPTIMIZATION, "probability ratio, π / π_old", "train/ratio_*"),
    Panel(OPTIMIZATION, "loss of the critic", "critic/loss", is_main=True),
    Panel(OPTIMIZATION, "explained variance", "critic/explained_variance", is_main=True),
    Panel(OPTIMIZATION, "values and returns of a token", "critic/value_mean critic/return_mean"),
    Panel(OPTIMIZATION, "norm of the critic's gradient", "critic/grad_norm"),
    Panel(OPTIMIZATION, "load of the busiest expert, over the mean", "train/expert_load_max"),
    Panel(OPTIMIZATION, "experts without a token, share", "train/dead_experts"),
    Panel(OPTIMIZATION, "routes unlike the rollout's, share", "train/route_flips", False),
    Panel(SPEED, "time of a step without compiling, s", "seconds/*", is_main=True),
    Panel(SPEED, "time beside the steps, s", "beside/*", False),
    Panel(SPEED, "rollout, tokens/s of all devices", "rollout/tokens_per_s", is_main=True),
    Panel(SPEED, "update, tokens/s of all devices", "train/tokens_per_s"),
    Panel(SPEED, "model FLOP utilization of the update, share", "train/mfu"),
    Panel(SPEED, "peak memory of a device, GiB", "memory/peak_gib"),
    Panel(SPEED, "batch and cache, share", "*/row_occupancy */prefill_padding */kv_waste"),
    Panel(SPEED, "switches of a rollout, s", "rollout/*switch_seconds", False),
    Panel(SPEED, "acceptance rate: accepted share of the draft tokens", "drafts/*"),
    Panel(SPEED, "acceptance length: tokens of a decode step", "accepted/length"),
)


def panels_of(rows: Rows, panels: Sequence[Panel] = PANELS) -> Iterator[tuple[Panel, list[str]]]:
    """Yields each panel that has something to show, with the names of its metrics."""
    names = numeric_names(rows)
    for panel in panels:
        if found := _found(panel, names):
            yield panel, found


def other_panels(rows: Rows) -> Iterator[tuple[Panel, list[str]]]:
    """Yields a panel for each metric that no panel of `PANELS` shows and that is not always 0."""
    patterns = " ".join([_UNDRAWN, *(panel.names for panel in PANELS)]).split()
    for name, has_values in sorted(numeric_names(rows).items()):
        if has_values and not any(fnmatchcase(name, pattern) for pattern in patterns):
            yield Panel(OTHERS, name, name), [name]


def _found(panel: Panel, names: Mapping[str, bool]) -> list[str]:
    return [
        name
        for pattern in panel.names.split()
        for name, has_values in names.items()
        if fnmatchcase(name, pattern) and not name.endswith("_ci95")
        if has_values or panel.is_told_at_zero
    ]


def numeric_names(rows: Rows) -> dict[str, bool]:
    """Returns the metrics that are numbers, and whether each is ever other than 0."""
    found: dict[str, bool] = {}
    for row in rows:
        for name, value in row.items():
            if "/" in name and not isinstance(value, str):
                found[name] = found.get(name, False) or bool(value)
    return found


def with_derived(row: Row) -> Row:
    """Adds what pages show instead of some metrics.

    `seconds/STAGE` and `seconds/step` are times within a step without waits for compilation.
    `beside/WORK` are those waits, evaluation and checkpoints. `drafts/SOURCE` is the share of the
    source's draft tokens that were accepted. `accepted/length` is there only with drafts.
    """
    timing = {name[7:]: number(x) for name, x in row.items() if name.startswith("timing/")}
    waits = {stage: timing.get(f"{stage}/compile", 0.0) for stage in ("rollout", "update")}
    checkpoint = timing.pop("checkpoint", nan)
    # `timing/rollout` includes its wait for compilation, `timing/update` does not.
    less = {"step": sum(waits.values()), "rollout": waits["rollout"]}
    stages = {name: x for name, x in timing.items() if "/" not in name}
    found = {f"seconds/{name}": max(x - less.get(name, 0.0), 0.0) for name, x in stages.items()}
    beside = {"evaluation": number(row.get("eval/seconds")), "checkpoint": checkpoint}
    if "step" in stages:
        beside["compile"] = less["step"]
    found |= {f"beside/{name}": x for name, x in beside.items() if isfinite(x)}
    for key, source in SOURCES.items():
        drafted = number(row.get(f"rollout/drafted{key}"))
        if drafted > 0:
            found[f"drafts/{source}"] = number(row.get(f"rollout/accepted{key}")) / drafted
            found["accepted/length"] = number(row.get("rollout/tokens_per_row_step"))
    return {**row, **found}


def number(value: Any) -> float:
    """Returns the value as a float, or NaN if it is not a finite number."""
    return float(value) if isinstance(value, int | float) and isfinite(value) else nan
