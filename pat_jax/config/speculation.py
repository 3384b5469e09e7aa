"""Options of drafts: tokens that are proposed, and verified several at a time."""

from dataclasses import dataclass

from pat_jax.common.options.declared import Options, option
from pat_jax.common.rules import matches

EXIT = "early_exit:"
MODEL = "model:"
SOURCE = matches(
    rf"auto|none|suffix|{EXIT}[1-9]\d{{0,3}}|{MODEL}.+",
    f"auto, none, suffix, {MODEL}DIR or {EXIT}LAYER",
)
LONGEST = 16  # most tokens of a draft that options may ask for


@dataclass(frozen=True)
class SpeculationConfig(Options):
    """Speculative decoding: a step verifies several proposed (draft) tokens. It
    changes no generated token, and the planner turns it off where it does not pay."""

    SECTION = "speculation."

    source: str = option("auto", SOURCE)
    """Where draft tokens come from. suffix: text that followed the last tokens earlier, in the
    response itself, in other responses to its prompt, or in earlier iterations. model:DIR: a
    smaller model with the same vocabulary, a Hugging Face directory or owner/name.
    early_exit:LAYER: the policy's first LAYER layers. none: no drafts. auto: suffix on GPUs and
    TPUs; none on CPUs, where a step takes longer the more tokens it verifies."""
    num_draft_tokens: tuple[int, ...] = (1, 3, 7)
    """Numbers of draft tokens per sequence and step. Each has its own program, and the planner
    chooses one by the load. It is an average: a step verifies the draft tokens that are most likely
    to be accepted, of any sequence. No sequence has more than the largest number."""

    def __post_init__(self):
        super().__post_init__()
        self.need(
            "num_draft_tokens",
            len(self.num_draft_tokens) > 0
            and list(self.num_draft_tokens) == sorted(set(self.num_draft_tokens))
            and self.num_draft_tokens[0] >= 1
            and self.num_draft_tokens[-1] <= LONGEST,
            f"one or several numbers, ascending, from 1 to {LONGEST}",
        )

    @property
    def longest(self) -> int:
        """The largest number of tokens of a draft."""
        return self.num_draft_tokens[-1]

    @property
    def is_generated(self) -> bool:
        """Whether a model generates the drafts, token by token."""
        return self.exit_layer > 0 or self.draft_model != ""

    @property
    def exit_layer(self) -> int:
        """The number of the policy's first layers that propose drafts, or 0 without early exit."""
        return int(self.source.removeprefix(EXIT)) if self.source.startswith(EXIT) else 0

    @property
    def draft_model(self) -> str:
        """Checkpoint or Hub name of the draft model, or "" if there is none."""
        return self.source.removeprefix(MODEL) if self.source.startswith(MODEL) else ""
