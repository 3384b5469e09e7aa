"""Options of the teacher, a frozen model that the policy is distilled from."""

from dataclasses import dataclass

from pat_jax.common.options.declared import Options


@dataclass(frozen=True)
class TeacherConfig(Options):
    """The teacher of on-policy distillation (docs/algorithms.md)."""

    SECTION = "teacher."

    model: str = ""
    """The teacher, with --algorithm.name distill: a Hugging Face checkpoint directory or a model of
    the Hub with the tokenizer of --model, of any family and size."""
