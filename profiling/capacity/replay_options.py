"""The options of every command that replays rollouts: which rollouts, and how long bursts are."""

from dataclasses import dataclass, field

from pat_jax.common.options.declared import Options, option
from pat_jax.common.rules import FRACTION, FRACTION_OR_ZERO, SEED, TOKENS, positive
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.layout.buckets import Drafts
from pat_jax.planning.drafts import PRIOR_GENERATED
from pat_jax.profiling.simulate.draft_sources import DraftSource
from pat_jax.profiling.simulate.draw import CORRELATION, Draw


@dataclass(frozen=True)
class ReplayOptions(Options):
    """Options that choose which rollouts are sampled and replayed."""

    lengths: str = "reasoning"
    """Response lengths: a .csv, .json or .jsonl file, or a built-in distribution (reasoning, pat,
    math or short)."""
    draft_acceptance: float = option(PRIOR_GENERATED, FRACTION)
    """Probability that a draft token is right if those before it are, for drafts that a model
    generates (--speculation.source model:DIR or early_exit:LAYER). For suffix drafts, the
    probability is built in."""
    length_scale: float = option(1.0, positive(1000))
    """Factor by which all response lengths of --lengths are multiplied."""
    correlation: float = option(CORRELATION, FRACTION_OR_ZERO)
    """Correlation of the lengths of two responses to one prompt, in a Gaussian copula; 0 makes the
    lengths independent."""
    prompt_tokens: int = option(256, TOKENS)
    """Number of tokens in every prompt, if the file of --lengths has no prompt lengths. In `plan`
    prompts have at most --rollout.max_prompt_length tokens."""
    seed: int = option(0, SEED)
    """Random seed of the rollouts."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self):
        super().__post_init__()
        self.need(
            "draft_acceptance",
            self.speculation.is_generated or self.draft_acceptance == PRIOR_GENERATED,
            f"{PRIOR_GENERATED} where no model generates drafts; take --speculation.source model:DIR or "
            "early_exit:LAYER, or leave it out",
        )

    def draw(self, responses: int, cap: int, samples: int) -> Draw:
        """Returns how to draw the `responses` of a rollout, `samples` to each prompt, each cut at
        `cap` tokens."""
        scale = self.length_scale
        return Draw(responses, cap, samples, self.correlation, scale, self.prompt_tokens, self.seed)

    def draft_source(self, drafts: Drafts, samples: int) -> DraftSource | None:
        """Returns the source of drafts in the requested rollouts, or None without drafts."""
        if not drafts.num_draft_tokens:
            return None
        if drafts.is_generated:
            return DraftSource.generated(self.speculation.source, self.draft_acceptance)
        return DraftSource.built_in(drafts, samples)
