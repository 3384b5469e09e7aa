"""The state of reward shaping: the scale of the rewards, and the weight of the KL penalty.

Both change after each iteration and are part of a checkpoint's metadata. Knows the options of the
algorithm. Does not know how a KL is estimated or how rewards become advantages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import nan
from typing import Any

import numpy as np
from jaxtyping import Float

from pat_jax.common.json_text import of_json
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.rl.algorithm.reward_shaping import KLControl, RewardMoments, shaped_rewards
from pat_jax.rl.batches.types import FinishReason, RolloutGroup

_META = "shaping"  # in a checkpoint's metadata
_LARGEST = 1e100  # limit of a sum of squares of rewards
KL_OF_A_TOKEN = "reward/kl_per_token"


@dataclass(frozen=True)
class Shaping:
    """The state of reward shaping after some iterations."""

    kl: KLControl
    beta: float  # `--algorithm.beta`, from which the weight of the penalty began
    moments: RewardMoments = field(default_factory=RewardMoments)

    @classmethod
    def of(cls, algorithm: AlgorithmConfig, meta: Mapping[str, Any]) -> "Shaping":
        """Returns the state of a checkpoint with this metadata, or that of a new run without it.

        Options of this run win over those that the checkpoint was written with: it keeps the weight
        of the penalty only if `--algorithm.beta` is unchanged."""
        beta = algorithm.beta
        kl = KLControl(beta, algorithm.kl_target or None, algorithm.kl_horizon)
        if (saved := meta.get(_META)) is None:  # a new run, or a checkpoint of an earlier version
            return cls(kl, beta)
        if kl.target is not None and saved.get("beta", beta) == beta:
            kl = replace(kl, beta=of_json(KLControl, saved["kl"]).beta)
        moments = of_json(RewardMoments, saved["moments"])
        if not (0 <= moments.squares < _LARGEST and abs(moments.mean) + kl.beta < _LARGEST):
            raise ValueError("the state of rewards is no state of any")
        return cls(kl, beta, moments)

    def to_meta(self) -> dict[str, Any]:
        """Returns what `of` reads."""
        return {_META: asdict(self)}

    def shaped(
        self,
        algorithm: AlgorithmConfig,
        groups: Sequence[RolloutGroup],
        rewards: Float[np.ndarray, "groups samples"],
    ) -> tuple["Shaping", Float[np.ndarray, "groups samples"]]:
        """Returns the rewards to learn from, and the state with the moments of these `rewards`."""
        moments = self.moments.after(rewards) if algorithm.normalize_reward else self.moments
        ends = [[one.finish is not FinishReason.LENGTH for one in x.rollouts] for x in groups]
        clip = algorithm.reward_clip
        shaped = shaped_rewards(
            rewards,
            np.array(ends),
            moments=moments if algorithm.normalize_reward else None,
            clip=(-clip, clip) if clip else None,
            missing_eos_penalty=algorithm.missing_eos_penalty,
        )
        return replace(self, moments=moments), shaped

    def after(self, measured: Mapping[str, float], responses: int) -> "Shaping":
        """Returns the state for the next iteration, from the metrics of this one."""
        return replace(self, kl=self.kl.after(measured.get(KL_OF_A_TOKEN, nan), responses))
