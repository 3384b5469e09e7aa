"""Names of an iteration's stages, the same in logs, comparisons and profiler traces."""

ROLLOUT = "rollout"
TRANSFER = "weights to the rollout"
SCORES, LOGPROBS, VALUES = "scores", "log-probabilities", "values"  # what a model predicts


def predictions(what: str, role: str) -> str:
    """Returns the name of a pass without gradients over all responses."""
    return f"{what} of the {role}"


def update(role: str) -> str:
    """Returns the name of all gradients and optimizer steps of an iteration, one after the
    other."""
    return f"update of the {role}"
