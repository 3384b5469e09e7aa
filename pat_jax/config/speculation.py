"""Options of drafts: tokens that a rollout guesses, and verifies several at a time."""

from dataclasses import dataclass
from typing import Literal

from pat_jax.common.options.declared import Options, option
from pat_jax.common.rules import COUNT, COUNT_OR_ZERO, count, matches

EXIT = "early_exit:"
MODEL = "model:"
SOURCE = matches(
    rf"auto|none|suffix|{EXIT}[1-9]\d{{0,3}}|{MODEL}.+",
    f"auto, none, suffix, {MODEL}DIR or {EXIT}LAYER",
)
LONGEST = 16  # tokens of a draft that anybody may ask for


@dataclass(frozen=True)
class SpeculationConfig(Options):
    """Drafts: tokens guessed from texts, several of which a step verifies. They change
    no token, and where they do not pay the planner makes none."""

    SECTION = "speculation."

    source: str = option("auto", SOURCE)
    """Where drafts come from. suffix: what followed the last tokens before, in the response itself,
    in others to its prompt, or in those of earlier iterations. model:DIR: what a smaller model of
    the same vocabulary generates, a Hugging Face checkpoint or owner/name of the Hub.
    early_exit:LAYER: what the policy would generate if it ended behind its first LAYER layers.
    auto: suffix on accelerators; none on a CPU, where a step takes longer the more tokens it
    verifies. none: no drafts."""
    longest: int = option(7, count(1, LONGEST))
    """Most tokens of a draft."""
    num_draft_tokens: tuple[int, ...] = (1, 3, 7)
    """Draft tokens of a step, for each row: a program for each is compiled, and the planner chooses
    by load. The room goes to the tokens that are likeliest right, in any row."""
    texts: int = option(4, count(0, 64))
    """Tokens of other responses that each row drafts from, in lengths of its own context; 0: from
    its own text alone."""
    stagger: Literal["auto", "on", "off"] = "off"
    """on: where more sequences are asked for than run at once, the first few samples of each prompt
    begin one after the other, so that later ones draft from finished siblings. off: all samples of
    a prompt begin together. auto is off, for older configurations."""
    earlier: int = option(2**24, COUNT_OR_ZERO)
    """Tokens of earlier iterations, responses with their prompts, that a training run keeps to
    draft from when a prompt comes again: 4 bytes each, in memory and beside every checkpoint. 0
    keeps none."""
    most_tokens: int = option(0, count(0, 2**16))
    """Tokens, newest ones and drafts, that a step of a replica may verify; 0 takes as many as
    read the weights about as long as they compute with them: 256 on accelerators, 64 on a CPU."""
    cache_tokens: int = option(2**16, COUNT)
    """Tokens of sequences that a draft model's cache holds, of each replica, and one sequence of
    full length at least. While the rows of a replica hold more, no model drafts."""

    def __post_init__(self):
        super().__post_init__()
        self.need(
            "num_draft_tokens",
            len(self.num_draft_tokens) > 0
            and list(self.num_draft_tokens) == sorted(set(self.num_draft_tokens))
            and self.num_draft_tokens[0] >= 1
            and self.num_draft_tokens[-1] <= self.longest,
            f"one or several numbers, ascending, from 1 to --speculation.longest ({self.longest})",
        )

    @property
    def is_generated(self) -> bool:
        """By a model, token by token."""
        return self.exit_layer > 0 or self.draft_model != ""

    @property
    def exit_layer(self) -> int:
        """Layers of the policy that draft; 0 where they do not."""
        return int(self.source.removeprefix(EXIT)) if self.source.startswith(EXIT) else 0

    @property
    def draft_model(self) -> str:
        """The folder of a draft model's checkpoint; empty where none drafts."""
        return self.source.removeprefix(MODEL) if self.source.startswith(MODEL) else ""
