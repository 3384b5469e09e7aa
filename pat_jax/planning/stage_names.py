"""Names of an iteration's stages, the same in predictions, logs, pictures and profiler traces."""

ROLLOUT = "rollout"
TRANSFER = "weights to the rollout"
SCORES, LOGPROBS, VALUES = "scores", "log-probabilities", "values"  # what a model predicts


def predictions(what: str, role: str) -> str:
    """Returns the name of a pass without gradients over all responses."""
    return f"{what} of the {role}"


def gradients(role: str) -> str:
    return f"gradients of the {role}"


def step(role: str) -> str:
    """Returns the name of an optimizer step by gradients that are there."""
    return f"step of the {role}"


def update(role: str) -> str:
    """Returns the name of all gradients and optimizer steps of an iteration, one after the
    other."""
    return f"update of the {role}"


def parts(name: str) -> tuple[str, ...]:
    """Returns the stages that a stage consists of: an update is gradients and a step."""
    role = name.removeprefix(update(""))
    return (name,) if role == name else (gradients(role), step(role))


def reads_tokens(name: str) -> bool:
    """Whether a stage takes longer the more tokens an iteration has."""
    return name != TRANSFER and not name.startswith(step(""))
