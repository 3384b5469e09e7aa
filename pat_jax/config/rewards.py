"""Options of rewards, for runs and evaluations."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from pat_jax.common.options.declared import Options, auto, option
from pat_jax.common.rules import (
    COUNT,
    GIVEN,
    MEMORY_GIB,
    TOKENS,
    Rule,
    count,
    positive,
    require,
)
from pat_jax.config.critic import REWARD_MODEL

_SMALLEST, _LARGEST = 1e-6, 1e6  # bounds of the size of a weight other than 0
SOME: Rule = (
    lambda names: names != () and all(name.removeprefix(REWARD_MODEL) for name in names),
    GIVEN[1],
)


@dataclass(frozen=True)
class RewardModelOptions(Options):
    """How the reward models of --reward run."""

    SECTION = "reward_model."

    max_length: int = auto(TOKENS)
    """Maximum number of tokens of prompt and response together, with the reward model's own
    tokenizer and chat template. The response of a longer text gets no reward. auto: twice the
    longest prompt and response of a rollout, at least 1,024, and at most the model's context."""
    tokens_per_micro_batch: int = option(8192, COUNT)
    """Maximum number of tokens (rows x padded length, on all devices together) in one forward pass
    of a reward model."""


@dataclass(frozen=True)
class RewardLimits:
    """How rewards are computed and added up, as plain values; the options say what each is."""

    weights: Sequence[float]
    timeout_s: float
    workers: int
    memory_gib: float


@dataclass(frozen=True)
class RewardOptions(Options):
    """Reward functions, and how they are run."""

    reward: tuple[str, ...] = option(("auto",), SOME)
    """Reward functions; their weighted sum is the reward. Each is one of: `module:function` or
    `path/to/file.py:function`; `http://host:port/path`, a program that scores (docs/rewards.md);
    `model:DIR` or `model:owner/name`, a reward model (docs/reward-models.md); `math`: 1 if the
    response is not cut and its final answer, as `\\boxed{x}`, `<answer>x</answer>`, `#### x`,
    `Answer: x`, or `$x$` on the last line, equals the reference answer, else 0; `math_lenient`: 1
    if the last `\\boxed{x}`, or else the last number, equals it; `exact`: 1 if the response is not
    cut and the text after its last `#` is the answer; `none`: always 0, to learn from a teacher
    alone; or auto: the built-in task's own reward, or math for files."""
    reward_weights: tuple[float, ...] = ()
    """A weight for each --reward; if none is given, each weight is 1. A negative weight makes a
    penalty. With weight 0, the reward is logged but not used."""
    reward_timeout: float = option(10.0, positive(86_400))
    """Time limit, in wall-clock seconds, for scoring one response or for one request to an
    endpoint. A longer call is killed and logged, and training leaves its response out of the
    baseline and the loss."""
    reward_workers: int = option(0, count(0, 1024))
    """Number of processes of each reward function that score responses at the same time, or of
    concurrent requests to an endpoint. 0 takes the number of CPU cores."""
    reward_memory: float = option(8.0, MEMORY_GIB)
    """Memory limit in GiB for each process that runs a reward function, and for each of its child
    processes; 0 sets no limit."""
    reward_skip_special_tokens: bool = True
    """Leave special tokens out of the texts that reward functions, completions.jsonl and samples
    get. false keeps all special tokens except the one that ends a response."""
    reward_model: RewardModelOptions = field(default_factory=RewardModelOptions)

    def __post_init__(self):
        super().__post_init__()
        _check_weights(self.reward_weights, self.reward)
        if not self.has_reward_model:
            names = (f"reward_model.{each.name}" for each in fields(RewardModelOptions))
            self.need_defaults(names, "without a reward model in --reward, such as model:DIR")

    @property
    def has_reward_model(self) -> bool:
        return any(name.startswith(REWARD_MODEL) for name in self.reward)

    @property
    def reward_limits(self) -> RewardLimits:
        return RewardLimits(
            weights=self.reward_weights,
            timeout_s=self.reward_timeout,
            workers=self.reward_workers,
            memory_gib=self.reward_memory,
        )


def _check_weights(weights: Sequence[float], names: Sequence[str]) -> None:
    def need(is_valid: bool, expected: str) -> None:
        require(is_valid, "reward_weights", " ".join(f"{weight:g}" for weight in weights), expected)

    need(
        all(x == 0 or _SMALLEST <= abs(x) <= _LARGEST for x in weights),
        f"numbers of size {_SMALLEST:g} to {_LARGEST:,.0f}, or 0",
    )
    need(
        len(weights) in (0, len(names)),
        f"one number for each of the {len(names)} in --reward ({' '.join(names)}), or none",
    )
    need(not weights or any(weights), "one at least that is not 0")
