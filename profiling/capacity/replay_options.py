"""The options of every command that replays rollouts: what is drawn, and how long its bursts
are."""

from dataclasses import dataclass, field

from pat_jax.common.options.declared import Options, option
from pat_jax.common.rules import FRACTION, FRACTION_OR_ZERO, RESPONSES, SEED, TOKENS, positive
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.planning.drafts import PRIOR_GENERATED
from pat_jax.profiling.simulate.draw import CORRELATION, Draw


@dataclass(frozen=True)
class ReplayOptions(Options):
    """Rollouts that are drawn and replayed."""

    lengths: str = ""
    """Response lengths: a .csv, .json or .jsonl file, or reasoning, pat, math or short; empty takes
    those of --responses_file, or reasoning."""
    responses_file: str = ""
    """Recorded responses, several to a prompt, a .jsonl, .json or .parquet file such as python -m
    pat_jax.generate writes: what drafts are worth is counted in them. Token ids, or in `plan`
    texts, where --model is a checkpoint with a tokenizer. Empty takes what is built in."""
    draft_acceptance: float = option(PRIOR_GENERATED, FRACTION)
    """How likely a token of a draft is right where those before it are, of drafts that a model
    generates (--speculation.source model:DIR or early_exit:LAYER); those that are copied are
    counted."""
    length_scale: float = option(1.0, positive(1000))
    """Times that responses are longer than the file or the distribution says."""
    num_generations: int = option(8, RESPONSES)
    """Responses to one prompt, whose lengths are alike."""
    correlation: float = option(CORRELATION, FRACTION_OR_ZERO)
    """Correlation of the normal scores of two responses to one prompt; 0 makes them strangers."""
    prompt_tokens: int = option(256, TOKENS)
    """Tokens of every prompt, where the file of --lengths or --responses_file does not say; in
    `plan` at most --max_prompt_length."""
    seed: int = option(0, SEED)
    """Seed of the rollouts drawn."""
    burst_steps: int = option(256, TOKENS)
    """Most decode steps of one burst, after which the planner looks again."""
    check_every: int = option(16, TOKENS)
    """Decode steps between two tests of the stop condition on the device."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self):
        super().__post_init__()
        self.need(
            "draft_acceptance",
            self.speculation.is_generated or self.draft_acceptance == PRIOR_GENERATED,
            f"{PRIOR_GENERATED} where no model generates drafts; take --speculation.source model:DIR or "
            "early_exit:LAYER, or leave it out",
        )

    def draw(self, responses: int, cap: int) -> Draw:
        """One rollout of so many responses, each cut at `cap` tokens."""
        alike = self.num_generations, self.correlation
        return Draw(responses, cap, *alike, self.length_scale, self.prompt_tokens, self.seed)
