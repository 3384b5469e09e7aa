"""Options of low-rank adapters."""

from dataclasses import dataclass
from typing import Literal

from pat_jax.common.hub import is_checkpoint
from pat_jax.common.options.declared import Options, option
from pat_jax.common.rules import NAMES, count, not_negative

MOST_RANK = 4096


@dataclass(frozen=True)
class AdapterConfig(Options):
    """Low-rank adapters, trained instead of a whole model."""

    rank: int = option(0, count(0, MOST_RANK))
    """Rank of the adapters; alpha is twice the rank. All linear layers have an adapter, but in a
    model with experts only those of attention. 0 trains the whole model."""

    @property
    def is_on(self) -> bool:
        return self.rank > 0


@dataclass(frozen=True)
class LoraConfig(AdapterConfig):
    """Low-rank adapters, trained instead of the whole policy (LoRA, docs/lora.md)."""

    SECTION = "lora."

    rank: int = option(0, count(0, MOST_RANK))
    """Rank of the adapters. 0 takes the rank of --lora.adapter; without an adapter, 0 trains the
    whole policy."""
    alpha: float = option(0.0, not_negative(10**6))
    """An adapter's output is multiplied by alpha / rank. 0 takes the alpha of --lora.adapter;
    without an adapter, 0 means twice the rank."""
    targets: tuple[str, ...] = option((), NAMES)
    """Linear layers that have an adapter, by the ends of their names in a checkpoint (q_proj,
    mlp.up_proj, layers.0.self_attn.o_proj), or experts by PEFT's names (experts.gate_up_proj,
    experts.down_proj, and gate.weight for their router). If none is given: the layers of
    --lora.adapter. Without an adapter: all-linear, which means all linear layers, or only the
    attention layers in a model with experts."""
    adapter: str = ""
    """A PEFT adapter directory, or an adapter of the Hugging Face Hub (owner/name), from which
    training continues. If it is empty, training begins with new adapters, which do not change the
    policy yet."""
    export: Literal["merged", "adapter"] = "merged"
    """What is written to --checkpoint.export_dir. merged: the policy with its adapters merged into
    it. adapter: the adapters alone, in PEFT's format."""

    def __post_init__(self):
        super().__post_init__()
        if not self.is_on:
            off = "with --lora.rank 0 and no --lora.adapter, which trains all of the policy"
            self.need_defaults(("alpha", "targets", "export"), off)

    def check_base(self, model: str) -> None:
        """Raises OptionError if the export is adapters alone, but `model` is not a checkpoint."""
        expected = (
            f"merged with --model {model!r}: its base is random numbers that no other program has"
        )
        self.need("export", self.export == "merged" or is_checkpoint(model), expected)

    @property
    def is_on(self) -> bool:
        return self.rank > 0 or self.adapter != ""
