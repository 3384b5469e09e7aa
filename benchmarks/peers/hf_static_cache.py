"""Decodes with `transformers` and a static cache: one JSON request a line in, one JSON answer a line out.

Run by `gpu_decode.py` with the Python of an environment of its own:

    python -m venv ENV && ENV/bin/pip install torch 'transformers>=5'

Random bfloat16 weights from the config.json in the folder given, on a GPU where there is one.
`generate` compiles the decode step of a static cache by itself on a GPU. An answer holds the seconds of
one decode step: what the new tokens take, less what the first takes, in a cache of the same size; null
where the GPU's memory was too small.
"""

import json
import sys
import time

import torch
import transformers


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.AutoConfig.from_pretrained(sys.argv[1])
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.eval()
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "attention": model.config._attn_implementation,
    }
    print(json.dumps(versions), file=sys.__stdout__, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        tokens = torch.tensor(request["prompts"], device=device)
        longest = max(request["lengths"])
        try:
            seconds = step_seconds(model, tokens, longest)
        except torch.OutOfMemoryError:
            seconds = None
        print(json.dumps({"seconds": seconds}), file=sys.__stdout__, flush=True)


def step_seconds(model, tokens, new_tokens: int) -> float:
    size = tokens.shape[1] + new_tokens
    cache = transformers.StaticCache(config=model.config, max_cache_len=size)
    # The first times compile.
    first, all_of_them = (
        min(generate(model, tokens, cache, n) for _ in range(5)) for n in (1, new_tokens)
    )
    return (all_of_them - first) / (new_tokens - 1)


@torch.inference_mode()
def generate(model, tokens, cache, new_tokens: int) -> float:
    """Seconds of `new_tokens` more for each row."""
    cache.reset()
    synchronize()
    start = time.perf_counter()
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        past_key_values=cache,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
    )
    synchronize()
    assert out.shape[1] == tokens.shape[1] + new_tokens, out.shape
    return time.perf_counter() - start


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.stdout = sys.stderr  # standard output carries answers only
    main()
