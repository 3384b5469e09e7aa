"""Options of the evaluation in training, and a check for every evaluation."""

from dataclasses import dataclass

from pat_jax.common.options.declared import Options, option
from pat_jax.common.rules import NAMES, RESPONSES, STEPS, TEMPERATURE, require


@dataclass(frozen=True)
class EvalSchedule(Options):
    """How often, and on which files, a run evaluates."""

    SECTION = "eval."

    every: int = option(20, STEPS)
    """Iterations, or steps of fine-tuning, between two evaluations. The first and the last policy
    are evaluated, too. With 0, the run never evaluates."""
    data: tuple[str, ...] = option((), NAMES)

    def __post_init__(self):
        super().__post_init__()
        never = "none with --eval.every 0, which never evaluates"
        self.need("data", self.every > 0 or not self.data, never)


@dataclass(frozen=True)
class EvalConfig(EvalSchedule):
    """Evaluation on held-out problems."""

    num_prompts: int = option(256, RESPONSES)
    """Number of held-out prompts, which are not used for training; with several --eval.data, this
    many of each."""
    data: tuple[str, ...] = option((), NAMES)
    """Files of problems to evaluate on, or datasets of the Hugging Face Hub (their split test,
    unless another is named). They are read like --data, and each has its own metrics. If none is
    given, a tenth of --data is held out."""
    num_generations: int = option(1, RESPONSES)
    """Number of responses sampled for each held-out prompt. More than one adds eval/pass@k and
    eval/maj@k."""
    temperature: float = option(1.0, TEMPERATURE)
    """Sampling temperature of the evaluation; 0 is greedy."""

    def __post_init__(self):
        super().__post_init__()
        check_samples_differ(self.num_generations, self.temperature, self.SECTION)


def check_samples_differ(num_generations: int, temperature: float, section: str = "") -> None:
    """Raises OptionError if several samples of one prompt would all be the same."""
    require(
        num_generations == 1 or temperature > 0,
        f"{section}temperature",
        temperature,
        f"above 0 with --{section}num_generations {num_generations}: greedy samples are all the same",
    )
