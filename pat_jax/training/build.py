"""Builds the parts of a trainer that the options ask for.

Knows options. Does not know which roles a run has (`build_roles.py`), nor data, checkpoints or
which devices there are.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict

import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from pat_jax.common.hub import local_adapter
from pat_jax.common.rules import require
from pat_jax.config.compute import Compute, MicroBatches
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.config.lora import AdapterConfig, LoraConfig
from pat_jax.config.role_table import Optimization
from pat_jax.layout.buckets import ladder, largest_length
from pat_jax.layout.layout import Layout
from pat_jax.models.adapted_modules import ALL_LINEAR
from pat_jax.models.checkpoints.peft_adapter import read_adapter
from pat_jax.models.kernels.row_attention import knows_branches
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Policy
from pat_jax.models.weight_formats import WeightFormat
from pat_jax.rl.algorithm.optimizer import make_optimizer, make_schedule
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.algorithm.predict import ModelFunctions
from pat_jax.rl.batches.packing import MOST_SHAPES, Shape, shapes
from pat_jax.training.passes import model_functions

# Bytes of the float32 logits that a device holds at a time. A backward pass also holds their
# gradients in the dtype of the products. Each chunk reads the whole head and adds to its gradient,
# so an accelerator takes larger chunks where there is memory.
LOGIT_BYTES = 2**28  # at least
MOST_LOGIT_BYTES = 2**31
LOGIT_SHARE = 16  # part of the memory that an update leaves free
ROW_UNIT = 32  # tokens: the length of a row is a multiple of it
GROUP_UNIT = 8  # tokens: the same for rows that hold a whole group of responses
SHORTEST_ROW = 64  # tokens of the shortest row in a run that learns from files
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def rollout_policy(policy: Policy, weights: WeightFormat, lora: Lora | None) -> Policy:
    """Returns `policy` in the rollout's weight format, with its adapters as separate arrays.

    Adapters are not merged: bfloat16 weights would lose updates smaller than their last bit.
    """
    kept = policy.with_weights(weights)
    return lora.beside(kept) if lora else kept


def _new_lora(policy: Policy, rank: int, alpha: float = 0.0, targets: Sequence[str] = ()) -> Lora:
    return Lora.of(policy, rank=rank, alpha=alpha or 2.0 * rank, targets=targets or (ALL_LINEAR,))


def build_lora(config: AdapterConfig, policy: Policy) -> Lora | None:
    """Returns the adapters that the options ask for; None if the whole model is trained.

    Raises:
      UserError: a target matches no linear layer, or the adapter to continue from belongs to
        another model or disagrees with the options.
    """
    if not config.is_on:
        return None
    if not isinstance(config, LoraConfig):
        return _new_lora(policy, config.rank)
    if not config.adapter:
        return _new_lora(policy, config.rank, config.alpha, config.targets)
    lora = read_adapter(local_adapter(config.adapter, option="lora.adapter"), policy)
    asked = config.targets and Lora.of(policy, rank=1, alpha=1, targets=config.targets).modules
    for name, value, is_kept, found in (
        ("rank", config.rank, config.rank in (0, lora.rank), lora.rank),
        ("alpha", config.alpha, config.alpha in (0, lora.alpha), lora.alpha),
        ("targets", " ".join(config.targets), asked in ((), lora.modules), " ".join(lora.kinds)),
    ):
        expected = f"{found}, as in the adapter {config.adapter!r}; leave the option out to take it"
        require(is_kept, f"lora.{name}", value, expected)
    return lora


def check_experts(option: str, trained: Sequence[Policy]) -> None:
    """Raises OptionError if `--experts` has another value than auto and no trained model has
    experts."""
    has_experts = any(model.config.experts for model in trained)
    expected = "auto with a model that has no experts"
    require(option == "auto" or has_experts, "experts", option, expected)


def functions_of(
    compute: Compute, policy: Policy, layout: Layout, *, router_replay: bool = False
) -> ModelFunctions:
    """Returns a model's functions for updates and for passes that only read.

    Raises:
      OptionError: the devices do not support an option.
    """
    is_scanned = compute.scans(policy.config.num_layers, layout.platform)
    require(
        not (is_scanned and layout.platform == "cpu" and compute.dtype == "bfloat16"),
        "scan_layers",
        compute.scan_layers,
        "false with --compute_dtype bfloat16 on a CPU, where XLA runs no such products in a loop",
    )
    return model_functions(
        policy,
        layout,
        DTYPES[compute.dtype],
        remat=compute.remat,
        scan_layers=is_scanned,
        router_replay=router_replay,
        experts=compute.experts,
    )


def logit_tokens(policy: Policy, layout: Layout, free: float = 0.0) -> int:
    """Returns for how many tokens a data-parallel part holds logits at a time. TP splits the logits
    over the vocabulary.

    Args:
      free: bytes of a device that all models of an update leave free; 0 if unknown.
    """
    size = LOGIT_BYTES
    if layout.platform != "cpu":
        size = int(min(max(size, free / LOGIT_SHARE), MOST_LOGIT_BYTES))
    return max(1, size * layout.split.tp // (4 * policy.config.padded_vocab_size))


def optimizer_of(asked: Optimization) -> optax.GradientTransformation:
    """Returns AdamW with the learning rate, weight decay and moments that the options ask for."""
    others = ("weight_dtype", "offload")  # options that the trainer reads
    own = {k: v for k, v in asdict(asked.optimizer).items() if k not in others}
    return make_optimizer(total_steps=asked.steps, **own)


def schedule_of(asked: Optimization) -> Callable[[ArrayLike], Array | np.floating]:
    """Returns a function that gives the learning rate of an optimizer step; the first step is 0."""
    optimizer = asked.optimizer
    assert optimizer.learning_rate is not None
    return make_schedule(
        learning_rate=optimizer.learning_rate,
        schedule=optimizer.schedule,
        warmup_steps=optimizer.warmup_steps,
        total_steps=asked.steps,
    )


def policy_loss(
    algorithm: AlgorithmConfig, *, is_on_policy: bool, teacher_top_k: int = 0
) -> PolicyLoss:
    """Returns the loss that an algorithm's options describe.

    Args:
      teacher_top_k: `--teacher.top_k`; with 0, the loss has no teacher's term: a teacher's
        log-probabilities then enter the advantages.
    """
    beta = algorithm.beta if algorithm.kl_in == "loss" else 0.0
    return PolicyLoss(
        ratio=algorithm.ratio,
        surrogate=algorithm.surrogate,
        epsilon=algorithm.epsilon,
        epsilon_high=algorithm.epsilon_high,
        delta=algorithm.delta,
        beta=beta,
        kl_estimator=algorithm.kl_estimator,
        corrects_kl=algorithm.use_bias_correction_kl and beta > 0,
        entropy_coef=algorithm.entropy_coef,
        distill_coef=algorithm.distill_coef if teacher_top_k else 0.0,
        top_k=teacher_top_k,
        correction=algorithm.rollout_correction,
        correction_cap=algorithm.rollout_correction_cap,
        is_on_policy=is_on_policy,
    )


def micro_shapes(batches: MicroBatches, num_shards: int, platform: str) -> list[Shape]:
    """Returns the number and length of the rows of each micro-batch shape, smallest first.

    If responses share prompts, a row holds a whole group where `batches.tokens` allows such rows.

    Args:
      num_shards: number of data-parallel parts that the rows are divided over.
      platform: `jax.Device.platform` of the devices.
    """
    budget = batches.tokens
    responses = batches.num_generations
    longest = batches.max_prompt_length + batches.max_completion_length
    whole = largest_length(longest, min(batches.min_length, ROW_UNIT))

    def of(length: int, most_of_group: int, most: int = MOST_SHAPES) -> list[Shape]:
        """Returns shapes with rows of at most this length, which hold `most_of_group` of the
        longest responses."""
        rows = batches.prompts * -(-responses // most_of_group)
        if batches.demonstrations:
            rows = max(rows, -(-batches.demonstrations // (length // whole)))
        return shapes(ladder(batches.min_length, length), budget, num_shards, rows, most)

    apart = of(whole, 1)
    if not knows_branches(platform):
        return apart
    # Each response has its own copy of the prompt's last token, beside the shared prompt.
    prompt = batches.max_prompt_length - 1
    response = batches.max_completion_length + 1
    group = largest_length(prompt + responses * response, GROUP_UNIT)
    length = max(whole, min(group, budget // num_shards // GROUP_UNIT * GROUP_UNIT))
    return of(length, (length - prompt) // response, len(apart))


def row_shapes(max_length: int, budget: int, num_shards: int, num_texts: int = 1) -> list[Shape]:
    """Returns the shapes of micro-batches of texts: the number and the length of their rows.

    Args:
      max_length: number of tokens of the longest text.
      budget: largest number of tokens of a micro-batch, on all devices together.
      num_texts: number of texts of this length that fit into the longest row.
    """
    shortest = min(SHORTEST_ROW, max_length)
    whole = largest_length(num_texts * max_length, shortest)
    return shapes(ladder(shortest, whole), budget, num_shards)
