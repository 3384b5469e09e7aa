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
    """Drafts: proposed tokens, several of which a step verifies. They change no
    generated token, and the planner uses none where they do not pay."""

    SECTION = "speculation."

    source: str = option("auto", SOURCE)
    """Where drafts come from. suffix: what followed earlier occurrences of the last tokens, in the
    response itself, in others to its prompt, or in earlier iterations. model:DIR: a smaller model
    of the same vocabulary, a Hugging Face checkpoint or owner/name of the Hub. early_exit:LAYER:
    the policy's first LAYER layers. auto: suffix on accelerators; none on a CPU, where a step takes
    longer the more tokens it verifies. none: no drafts."""
    num_draft_tokens: tuple[int, ...] = (1, 3, 7)
    """Numbers of draft tokens per row and step: each has its own program, and the planner chooses
    by load. A step verifies the tokens most likely to be accepted, of any row; no row has more than
    the largest number."""

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
