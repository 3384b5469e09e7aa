"""Generates with `transformers` on PyTorch, one request after another.

Run by `engine_vs_peers.py` with the Python of an environment of its own:

    python -m venv ENV && ENV/bin/pip install torch==2.13.0 'transformers>=5'

All cores, the default cache and attention. The batch runs until its longest row is done.
"""

import sys
import time

import torch
import transformers
from turns import answer


def main() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    model.eval()
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "attention": model.config._attn_implementation,
    }

    def generate(request):
        torch.manual_seed(request["seed"])
        tokens = torch.tensor(request["prompts"])
        longest = max(request["lengths"])
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        assert out.shape[1] == tokens.shape[1] + longest, out.shape
        return seconds

    answer(versions, generate)


if __name__ == "__main__":
    main()
