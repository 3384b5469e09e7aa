"""How much longer measured stages of an iteration took than was composed for them.

Knows seconds, tokens and names of stages. Does not know where any of them is from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pat_jax.planning import stage_names


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of an iteration's stages on all devices of a machine."""

    seconds: Mapping[str, float]  # by stage
    tokens: float  # of prompts and responses that a role's pass read, shared ones once


@dataclass(frozen=True)
class Factors:
    """Measured over composed seconds, by stage."""

    by_stage: Mapping[str, float] = field(default_factory=dict)
    lacking: tuple[str, ...] = ()  # stages that were not measured

    def of(self, stage: str) -> float:
        """The factor of a stage; 1 if it was not measured."""
        return self.by_stage.get(stage, 1.0)

    @classmethod
    def between(cls, measured: StageSeconds, composed: StageSeconds) -> "Factors":
        """Returns measured seconds over those composed for as many tokens.

        Composed stages that were measured together have one factor: gradients and steps of an
        update, and several reward models. `measured` may have further stages.
        """
        more, found = measured.tokens / composed.tokens, dict[str, float]()
        for name, seconds in measured.seconds.items():
            of = [x for x in composed.seconds if _is_part(x, name)]
            each = (composed.seconds[x] * (more if stage_names.reads_tokens(x) else 1) for x in of)
            if expected := sum(each):
                found |= dict.fromkeys(of, seconds / expected)
        return cls(found, tuple(x for x in composed.seconds if x not in found))


def _is_part(stage: str, name: str) -> bool:
    """Whether a composed stage is in the measured stage `name`: "scores of the reward model 2" is
    in "scores of the reward model"."""
    return stage in stage_names.parts(name) or stage.startswith(f"{name} ")
