"""Makes the reference checkpoints and logits of test_reference.py with transformers and PyTorch.

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
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
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


def build(name: str) -> PreTrainedModel:
    """The random model called `<family>` or `<family>-tied`."""
    family, _, tied = name.partition("-")
    shape: dict[str, Any] = SHAPE | {"tie_word_embeddings": bool(tied)}
    match family:
        case "llama":
            model = LlamaForCausalLM(
                LlamaConfig(**shape, rope_parameters=LLAMA_ROPE, rms_norm_eps=1e-5)
            )
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**shape, rope_parameters=QWEN_ROPE))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**shape, rope_parameters=QWEN_ROPE, head_dim=16))
        case "qwen3_moe":
            # Both kinds of layers, and both kinds of weights that a token's experts have.
            shape |= {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": not tied}
            experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
            model = Qwen3MoeForCausalLM(
                Qwen3MoeConfig(**shape, **experts, rope_parameters=QWEN_ROPE, head_dim=16)
            )
        case "mixtral":
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
            model = MixtralForCausalLM(
                MixtralConfig(**shape, **experts, rope_parameters=QWEN_ROPE, head_dim=16)
            )
        case _:
            raise ValueError(f"unknown family {family}")
    randomize(model)
    return model.eval()


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


# Every stored type and both kinds of head occur.
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
}


def main(directory: Path) -> None:
    for name, dtype in CASES.items():
        model = build(name)
        with torch.no_grad():  # the parameters alone: rotary frequencies stay exact
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))
        tokens = torch.randint(
            SHAPE["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)
        )
        expected = {"tokens": tokens.to(torch.int32), "logits": logits(model, tokens).contiguous()}
        torch.nn.Module.to(model, dtype)  # transformers' own `to` has lost its signature
        model.save_pretrained(directory / name)
        save_file(expected, directory / name / "expected.safetensors")
        (directory / name / "generation_config.json").unlink()
        for file in (directory / name).iterdir():
            file.chmod(0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "reference"))
