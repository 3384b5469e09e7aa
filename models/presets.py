"""Built-in model shapes by name: eight of our own for random weights, and published models."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial

from pat_jax.common.errors import UserError
from pat_jax.models.config import ExpertsConfig, ModelConfig, RopeScaling


def preset(name: str, vocab_size: int | None = None) -> ModelConfig:
    """Returns the built-in shape `name`, with `vocab_size` in place of its own if given. Raises
    UserError if there is no shape of this name."""
    if name not in PRESETS:
        nearest = get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.0)[0]
        raise UserError(
            f"model '{name}' is not a built-in shape, expected one of {', '.join(PRESETS)}; the nearest is "
            f"'{nearest}', and a model of the Hugging Face Hub is named owner/name."
        )
    return PRESETS[name] if vocab_size is None else replace(PRESETS[name], vocab_size=vocab_size)


def shape_lines() -> Iterator[str]:
    """Yields a line about each built-in shape, for --help."""
    width = max(map(len, PRESETS))
    for name, shape in PRESETS.items():
        layers = f"{shape.num_layers} layers of width {shape.embed_dim:,}"
        heads = f"{shape.num_heads} query heads, {shape.num_kv_heads} KV heads"
        experts = shape.experts
        sparse = f", {experts.num_experts} experts" if experts else ""
        yield f"  {name:<{width}}  {layers}, {heads}{sparse}"


def _qwen3(
    embed_dim: int,
    mlp_dim: int,
    num_layers: int,
    num_heads: int,
    tie_embeddings: bool,
    *,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    vocab_size: int = 151_936,
    vocab_multiple: int = 128,
    max_position: int = 40_960,
    experts: ExpertsConfig | None = None,
) -> ModelConfig:
    has_latent = experts is not None and experts.latent_dim > 0
    return ModelConfig(
        architecture="bigmac" if has_latent else "qwen3_moe" if experts else "qwen3",
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        mlp_dim=mlp_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_theta=1_000_000.0,
        qk_norm=True,
        tie_embeddings=tie_embeddings,
        max_position=max_position,
        experts=experts,
        vocab_multiple=vocab_multiple,
    )


def _llama3_1(embed_dim: int, mlp_dim: int, num_layers: int, num_heads: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=128_256,
        embed_dim=embed_dim,
        mlp_dim=mlp_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, original_max_position=8192),
        norm_eps=1e-5,
        max_position=131_072,
    )


# Small enough to learn a built-in task on a laptop in a minute; divisible by TP 1, 2 and 4.
_demo = partial(
    _qwen3,
    128,
    384,
    2,
    4,
    True,
    num_kv_heads=4,
    head_dim=32,
    vocab_size=128,
    vocab_multiple=32,
    max_position=4096,
)
# Narrow layers that compile in seconds, for tests; divisible by TP up to 8.
_tiny = partial(
    _qwen3,
    32,
    64,
    num_heads=8,
    tie_embeddings=True,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=128,
    vocab_multiple=8,
    max_position=4096,
)

PRESETS: Mapping[str, ModelConfig] = {
    "demo": _demo(),
    "tiny": _tiny(num_layers=2),
    # Two experts have as many hidden units as the MLP of `demo`.
    "demo-moe": _demo(experts=ExpertsConfig(8, 2, 192)),
    # A layer without experts between two that have them.
    "tiny-moe": _tiny(num_layers=3, experts=ExpertsConfig(8, 2, 16, dense_layers=(1,))),
    # As many parameters as `demo-moe` and `tiny-moe`; experts see a quarter of a token's numbers.
    "demo-bigmac": _demo(experts=ExpertsConfig(8, 2, 760, latent_dim=32)),
    "tiny-bigmac": _tiny(
        num_layers=3, experts=ExpertsConfig(8, 2, 64, dense_layers=(1,), latent_dim=8)
    ),
    # 100 M parameters, nearly all in the layers' matrices, so that a decode step streams weights as
    # a large model's does. One KV head, as in Gemma 2B: wider TP replicates it, so that DP is
    # faster for a large batch and TP for a small one, even where devices share a memory.
    "random-100m": _qwen3(1024, 3072, 7, 16, True, num_kv_heads=1, vocab_size=4096),
    # `random-100m` with two layers, which compiles in a third of the time.
    "random-30m": _qwen3(1024, 3072, 2, 16, True, num_kv_heads=1, vocab_size=4096),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, False),
    "qwen3-14b": _qwen3(5120, 17_408, 40, 40, False),
    "qwen3-30b-a3b": _qwen3(
        2048, 6144, 48, 32, False, num_kv_heads=4, experts=ExpertsConfig(128, 8, 768)
    ),
    "qwen3-235b-a22b": _qwen3(
        4096, 12_288, 94, 64, False, num_kv_heads=4, experts=ExpertsConfig(128, 8, 1536)
    ),
    # As large as the model in table 4 of the BigMac paper (GPT3-XL with experts), with three
    # matrices of 1,365 units in each expert instead of two of 2,048.
    "bigmac-3.8b": _qwen3(
        2048,
        8192,
        24,
        16,
        True,
        num_kv_heads=16,
        vocab_size=50_257,
        max_position=2048,
        experts=ExpertsConfig(64, 8, 1365, latent_dim=512),
    ),
    "mixtral-8x7b": ModelConfig(
        architecture="mixtral",
        vocab_size=32_000,
        embed_dim=4096,
        mlp_dim=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1_000_000.0,
        norm_eps=1e-5,
        max_position=32_768,
        experts=ExpertsConfig(8, 2, 14_336),
    ),
    "llama-3.1-8b": _llama3_1(4096, 14_336, 32, 32),
    "llama-3.1-70b": _llama3_1(8192, 28_672, 80, 64),
    "qwen2.5-7b": ModelConfig(
        architecture="qwen2",
        vocab_size=152_064,
        embed_dim=3584,
        mlp_dim=18_944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        rope_theta=1_000_000.0,
        attention_bias=True,
        max_position=131_072,
    ),
}
