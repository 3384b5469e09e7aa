"""BigMac's published figures by this project's own functions, and what its form gains by our links.

    python -m benchmarks.planner.bigmac

Table 4 of the paper (arXiv 2502.16927): weights, operations and what devices send, of GPT3-XL with
64 experts, 8 of them for a token, and of its BigMac form. Table 1: how much of a training step the
all-to-alls of the fine-grained form take on 32 GPUs (PCIe, 100 Gb/s between four hosts); from it,
what a step of the BigMac form would take. Last, Qwen3-30B-A3B in both forms, composed from
kernel times and links, with experts where they live here. Nothing ran on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import options, write
from pat_jax.models.config import ModelConfig
from pat_jax.models.presets import preset
from pat_jax.planning.types import Split
from pat_jax.profiling.predict.composer import Composer
from pat_jax.profiling.predict.kernel_model import BYTES
from pat_jax.profiling.predict.model_sizes import num_weights
from pat_jax.profiling.predict.sources import kernels_for
from pat_jax.profiling.predict.targets import Target
from pat_jax.training.model_flops import training_flops

GIB = 2**30
BATCH, LENGTH, DEVICES = 256, 2048, 32  # of table 4: sequences, tokens of each, all with experts
# The paper counts the vocabulary's padding as logits.
LATENT = replace(preset("bigmac-3.8b"), vocab_size=50_304)
# Units of an expert that come nearest below the size of the paper's, by the numbers it sees.
UNITS = {512: 1365, 0: 341}
# Milliseconds of a step's all-to-alls and their share of it, by experts of a token (table 1), and
# how many times as fast all-to-alls and whole steps were measured in the BigMac form (figure 4).
TABLE_1 = {4: (1089.5, 0.841), 8: (2383.4, 0.918)}
MEASURED = {4: (3.48, 2.37), 8: (3.72, 2.95)}
ROWS = (1, 64, 1024)  # running requests


@dataclass(frozen=True)
class Totals:
    """Of one training step of table 4's model."""

    weights: float
    flops: float
    sent_bytes: float

    def over(self, other: "Totals") -> tuple[float, float, float]:
        """Growth of each, as a share."""
        mine, theirs = vars(self).values(), vars(other).values()
        weights, flops, sent = (a / b - 1 for a, b in zip(mine, theirs, strict=True))
        return weights, flops, sent


def of_paper(latent_dim: int, per_token: int = 8) -> Totals:
    """The model of table 4, which takes and gives `latent_dim` numbers of a token (0: all)."""

    def exactly(count: Callable[[ModelConfig], float]) -> float:
        # Its experts have two matrices, ours three: as large with a third of a unit more than UNITS. All
        # counts go straight up with the units.
        low, high = (
            count(_with_experts(latent_dim, UNITS[latent_dim] + more, per_token)) for more in (0, 1)
        )
        return low + (high - low) / 3

    return Totals(exactly(num_weights), exactly(_flops), exactly(sent_bytes))


def _with_experts(latent_dim: int, expert_dim: int, per_token: int) -> ModelConfig:
    experts = LATENT.experts
    assert experts is not None
    experts = replace(
        experts, latent_dim=latent_dim, expert_dim=expert_dim, num_experts_per_tok=per_token
    )
    return replace(LATENT, experts=experts)


def _flops(model: ModelConfig) -> float:
    """As the paper counts them: each token sees all others of its sequence, and routers are free."""
    assert model.experts is not None
    lengths = np.full(BATCH, LENGTH)
    unseen = 6 * model.num_layers * model.num_heads * model.head_dim * BATCH * LENGTH**2
    router = model.num_layers * model.experts.num_experts * model.embed_dim
    return training_flops(model, lengths) + unseen - 6 * router * BATCH * LENGTH


def sent_bytes(model: ModelConfig) -> float:
    """Of all devices, forward and backward: each token to its experts and back, but for those on its
    own device. Numbers and weights of experts are not counted, as in the paper."""
    assert model.experts is not None
    rows = BATCH * LENGTH * model.experts.num_experts_per_tok * (DEVICES - 1) / DEVICES
    return 2 * 2 * len(model.sparse_layers) * rows * model.expert_embed_dim * BYTES


def speed(per_token: int, all_to_all: float) -> float:
    """How many times as fast a step of table 1 is in the BigMac form.

    All that is no all-to-all takes longer as its operations grow (assumed).

    Args:
      per_token: experts of a token.
      all_to_all: how many times as fast the all-to-alls are.
    """
    sent_ms, share = TABLE_1[per_token]
    rest_ms = sent_ms / share - sent_ms
    _, growth, _ = of_paper(512, per_token).over(of_paper(0, per_token))
    return (sent_ms + rest_ms) / (sent_ms / all_to_all + rest_ms * (1 + growth))


def forms() -> tuple[ModelConfig, ModelConfig]:
    """Qwen3-30B-A3B, and the same with experts that see a quarter of a token's numbers."""
    fine = preset("qwen3-30b-a3b")
    assert fine.experts is not None
    latent_dim, expert_dim = fine.embed_dim // 4, 4 * fine.experts.expert_dim
    experts = replace(fine.experts, latent_dim=latent_dim, expert_dim=expert_dim)
    return fine, replace(fine, experts=experts)


def composed(text: str, data: Path) -> dict[str, float]:
    """How many times as fast the second of `forms` is, in the layout of most replicas."""
    target = Target.parse(text)
    kernels, split = kernels_for(target, data, sums="nccl"), Split(target.num_devices, 1)
    fine, latent = (Composer(kernels, model) for model in forms())
    found = {}
    for running in ROWS:
        rows = -(-running // split.dp)
        steps = (each.decode_step(split, rows, LENGTH) for each in (fine, latent))
        found[f"step of {running}"] = next(steps) / next(steps)
    found["prefill"] = fine.prefill_call(split, LENGTH) / latent.prefill_call(split, LENGTH)
    return found


def main() -> None:
    args = options(__doc__, has_data=True).parse_args()
    fine, latent = of_paper(0), of_paper(512)
    record: dict[str, Any] = {"table_4": [vars(fine), vars(latent), latent.over(fine)]}
    for name, each in (("fine-grained", fine), ("BigMac", latent)):
        print(
            f"{name:13} {each.weights / 1e9:.3f} B weights  {each.flops / 1e12:,.2f} T operations",
            end="",
        )
        print(f"  {each.sent_bytes / GIB:,.2f} GiB sent")
    print("growth       ", *(f"{100 * share:+.2f} %" for share in latent.over(fine)))
    for per_token, (all_to_all, measured) in MEASURED.items():
        by_bytes, by_time = speed(per_token, 4.0), speed(per_token, all_to_all)
        record[f"top_{per_token}"] = [by_bytes, by_time, measured]
        print(
            f"top {per_token}: {by_bytes:.2f} times as fast by bytes, {by_time:.2f} with all-to-alls "
            f"{all_to_all} times as fast as measured; measured {measured}"
        )
    for text in ("h100:8", "a40:8x4"):
        record[text] = composed(text, args.data)
        print(f"{text}:", ", ".join(f"{name} {x:.2f}" for name, x in record[text].items()))
    write(args.out, record)


if __name__ == "__main__":
    main()
