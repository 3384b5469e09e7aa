"""Generates with google-tunix's sampler, one request after another.

Run by `engine_vs_peers.py` with the Python of an environment of its own:

    python -m venv ENV && ENV/bin/pip install google-tunix==0.1.7

The sampler takes text, so prompts are written as numbers. Its batch runs until its longest row is
done; rows that are done before go on being computed.
"""

import json
import sys
import time

import jax
from tunix.generate import sampler
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params
from turns import answer

NEVER = -1  # no token has this id: responses end at their forced length


class Numbers:
    """A tokenizer of "3 17 5"."""

    def encode(self, text, **kwargs):
        return [int(word) for word in text.split()]

    def decode(self, ids, **kwargs):
        return " ".join(map(str, ids))

    def bos_id(self):
        return None

    def eos_id(self):
        return 1

    def pad_id(self):
        return 0


def load(directory: str):
    with open(f"{directory}/config.json", encoding="utf-8") as file:
        hf = json.load(file)
    rope = hf.get("rope_parameters") or hf
    config = qwen3.ModelConfig(
        num_layers=hf["num_hidden_layers"],
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        head_dim=hf["head_dim"],
        num_kv_heads=hf["num_key_value_heads"],
        rope_theta=int(rope["rope_theta"]),
        norm_eps=hf["rms_norm_eps"],
        use_tied_embedding=hf["tie_word_embeddings"],
    )
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return params.create_model_from_safe_tensors(directory, config, mesh), config


def main() -> None:
    directory, cache_size = sys.argv[1], int(sys.argv[2])
    model, config = load(directory)
    cache = sampler.CacheConfig(cache_size, config.num_layers, config.num_kv_heads, config.head_dim)
    tunix = sampler.Sampler(model, Numbers(), cache)
    versions = {"jax": jax.__version__, "devices": str(jax.devices())}

    def generate(request):
        prompts = [" ".join(map(str, prompt)) for prompt in request["prompts"]]
        start = time.perf_counter()
        out = tunix(
            prompts,
            max_generation_steps=max(request["lengths"]),
            max_prompt_length=len(request["prompts"][0]),
            eos_tokens=[NEVER],
            temperature=1.0,
            top_p=1.0,
            seed=request["seed"],
        )
        seconds = time.perf_counter() - start
        made = min(len(tokens) for tokens in out.tokens)
        assert made == max(request["lengths"]), f"{made} tokens, not {max(request['lengths'])}"
        return seconds

    answer(versions, generate)


if __name__ == "__main__":
    main()
