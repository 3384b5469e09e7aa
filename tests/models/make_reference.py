"""Makes the reference checkpoints and logits of test_scalar_head.py with transformers and PyTorch.

    python tests/models/make_reference.py [directory]

needs the `parity` extra. The weights are large enough for every part of the model to move the
logits, and the rotary stretch of the Llama cases lies inside the sequence.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 1000.0}
ROWS, LENGTH = 2, 40
LENGTHS = (40, 29)  # of the rows of models with a scalar head; PAD follows
PAD = 60
SCALAR = {"num_labels": 1, "pad_token_id": PAD}
HEADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "": (AutoModelForCausalLM, {}),
    "tied": (AutoModelForCausalLM, {"tie_word_embeddings": True}),
    "sequence": (AutoModelForSequenceClassification, SCALAR),
    "token": (AutoModelForTokenClassification, SCALAR),
}


def build(name: str) -> PreTrainedModel:
    """The random model called `<family>`, or `<family>-<head>` with a head of `HEADS`."""
    family, _, head = name.partition("-")
    auto_class, options = HEADS[head]
    shape = SHAPE | {"tie_word_embeddings": False} | options
    model = auto_class.from_config(config_of(family, shape))
    randomize(model)
    return model.eval()


def config_of(family: str, shape: dict[str, Any]) -> PreTrainedConfig:
    match family:
        case "llama":
            return LlamaConfig(**shape, rope_parameters=LLAMA_ROPE, rms_norm_eps=1e-5)
        case "qwen2":
            return Qwen2Config(**shape, rope_parameters=QWEN_ROPE)
        case "qwen3":
            return Qwen3Config(**shape, rope_parameters=QWEN_ROPE, head_dim=16)
        case "qwen3_moe":
            # Both kinds of layers, and both kinds of weights that a token's experts have.
            shape |= {"num_hidden_layers": 3, "mlp_only_layers": [1]}
            shape |= {"norm_topk_prob": not shape["tie_word_embeddings"]}
            experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
            return Qwen3MoeConfig(**shape, **experts, rope_parameters=QWEN_ROPE, head_dim=16)
        case "mixtral":
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
            return MixtralConfig(**shape, **experts, rope_parameters=QWEN_ROPE, head_dim=16)
        case _:
            raise ValueError(f"unknown family {family}")


def randomize(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(0.25 * noise)


def logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def values(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """The numbers of a scalar head: one for each row, or for each token, as the class has them."""
    with torch.no_grad():
        is_real = (tokens != PAD).long()
        return model(input_ids=tokens, attention_mask=is_real, use_cache=False).logits[..., 0]


def some_tokens(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SHAPE["vocab_size"], (ROWS, LENGTH), generator=generator)


def padded_tokens(seed: int) -> torch.Tensor:
    """Rows of `LENGTHS` tokens, and `PAD` behind them."""
    is_real = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    return torch.where(is_real, some_tokens(seed) % PAD, PAD)


# Every stored type and all kinds of head occur.
CASES = {
    "llama": torch.bfloat16,
    "llama-tied": torch.float32,
    "qwen2": torch.float16,
    "qwen2-tied": torch.bfloat16,
    "qwen3": torch.bfloat16,
    "qwen3-tied": torch.float16,
    "qwen3_moe": torch.bfloat16,
    "qwen3_moe-tied": torch.float32,
    "mixtral": torch.float16,
    "mixtral-tied": torch.bfloat16,
    "llama-sequence": torch.float16,
    "llama-token": torch.bfloat16,
    "qwen2-sequence": torch.bfloat16,
    "qwen2-token": torch.float16,
    "qwen3-sequence": torch.float32,
    "qwen3-token": torch.bfloat16,
}


def main(directory: Path) -> None:
    for name, dtype in CASES.items():
        model = build(name)
        with torch.no_grad():  # the parameters alone: rotary frequencies stay exact
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))
        is_scalar = name.endswith(("-sequence", "-token"))
        tokens = padded_tokens(1) if is_scalar else some_tokens(1)
        found = (
            {"values": values(model, tokens)} if is_scalar else {"logits": logits(model, tokens)}
        )
        expected = {"tokens": tokens.to(torch.int32), **found}
        expected = {name: tensor.contiguous() for name, tensor in expected.items()}
        torch.nn.Module.to(model, dtype)  # transformers' own `to` has lost its signature
        model.save_pretrained(directory / name)
        save_file(expected, directory / name / "expected.safetensors")
        (directory / name / "generation_config.json").unlink(missing_ok=True)
        for file in (directory / name).iterdir():
            file.chmod(0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "reference"))
