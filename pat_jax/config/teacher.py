"""Options of the teacher, a frozen model that the policy is distilled from."""

from dataclasses import dataclass

from pat_jax.common.options.declared import Options, option
from pat_jax.common.rules import count


@dataclass(frozen=True)
class TeacherConfig(Options):
    """The teacher of on-policy distillation (docs/distillation.md)."""

    SECTION = "teacher."

    model: str = ""
    """The teacher model, with --algorithm.name distill: a Hugging Face checkpoint directory or a
    model of the Hub. It may be of any family and size, but must have the tokenizer of --model."""
    top_k: int = option(0, count(0, 256))
    """Learn from the teacher's top_k most likely tokens at each position, and from all other tokens
    together as one. The loss is then the reverse KL over these tokens, and its weight is
    --algorithm.distill_coef. 0: learn from the sampled token alone, through its advantage."""

    def check_use(self, weight: float) -> None:
        """Raises OptionError if a teacher is missing, or if nothing would be learned from one.

        Args:
          weight: weight of the teacher's term (`--algorithm.distill_coef`).
        """
        expected = f"a model that teaches, with --algorithm.distill_coef {weight:g}"
        self.need("model", self.model != "" or not weight, expected)
        if not weight:
            use = "--train is true and --algorithm.distill_coef above 0, as --algorithm.name distill sets it"
            self.need_defaults(["model"], f"unless {use}")
            self.need_defaults(["top_k"], "without a teacher (--algorithm.name distill)")
