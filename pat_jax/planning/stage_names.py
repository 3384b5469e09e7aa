"""Names of an iteration's stages, the same in logs, comparisons and profiler traces."""

ROLLOUT = "rollout"
TRANSFER = "weights to the rollout"
SCORES, LOGPROBS, VALUES = "scores", "log-probabilities", "values"  # what a model predicts


def predictions(what: str, role: str) -> str:
    """Returns the name of a stage: a role's pass without gradients over all responses."""
    return f"{what} of the {role}"


def update(role: str) -> str:
    """Returns the name of a stage: a role's gradients and optimizer steps in an iteration."""
    return f"update of the {role}"
