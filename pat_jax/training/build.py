"""The parts of a trainer that a configuration asks for.

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
from pat_jax.config.any_run import AnyRun
from pat_jax.config.learning import AlgorithmConfig, OptimizerConfig
from pat_jax.config.lora import AdapterConfig, LoraConfig
from pat_jax.config.run import RunConfig
from pat_jax.layout.buckets import ladder, largest_length
from pat_jax.layout.layout import Layout
from pat_jax.models.checkpoints.peft_adapter import read_adapter
from pat_jax.models.kernels.row_attention import knows_branches
from pat_jax.models.lora import Lora
from pat_jax.models.lora_targets import ALL_LINEAR
from pat_jax.models.policy import Policy
from pat_jax.rl.algorithm.optimizer import make_optimizer, make_schedule
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.algorithm.predict import ModelFunctions, Predictor
from pat_jax.rl.batches.packing import MOST_SHAPES, shapes
from pat_jax.training.passes import model_functions
from pat_jax.training.roles import REFERENCE
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import CRITIC, POLICY

LOGIT_BYTES = 2**28  # float32 logits on a device at a time; a backward pass holds a few times this
# Where a loop over layers is worth its copy of their parameters (docs/targets.md): platforms whose
# compilers take longest per layer, and the number of layers from which it shows.
SCANNED_ON = {("tpu", "float32"), ("tpu", "bfloat16"), ("cpu", "float32")}
SCANNED_FROM = 8  # layers
ROW_UNIT = 32  # the length of a row is a multiple of so many tokens
GROUP_UNIT = 8  # the same for rows that hold a whole group
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def trained_of(config: AnyRun, policy: Policy, layout: Layout) -> TrainableParams:
    """Returns which parameters of the policy the options train.

    Raises:
      UserError: the options ask for adapters that the model cannot have.
    """
    return TrainableParams(
        policy,
        layout,
        build_lora(config.lora, policy),
        # The forward pass rounds to this dtype anyway: nothing is lost, and half the memory saved.
        compute_dtype=DTYPES[config.compute_dtype],
        weight_dtype=DTYPES[config.optimizer.weight_dtype],
    )


def rollout_policy(config: RunConfig, policy: Policy) -> Policy:
    """Returns `policy` as the rollout keeps it: in its weight format, adapters beside weights.

    Adapters are not merged: in bfloat16 weights, updates smaller than the last bit would be lost.
    """
    kept, lora = policy.with_weights(config.rollout.weights), build_lora(config.lora, policy)
    return lora.beside(kept) if lora else kept


def new_adapters(config: AdapterConfig, policy: Policy) -> Lora:
    """Returns the new adapters that the options ask for.

    Raises:
      UserError: a target matches no linear layer.
    """
    alpha, targets = config.alpha or 2.0 * config.rank, config.targets or (ALL_LINEAR,)
    option = f"{config.SECTION}targets"
    return Lora.of(policy, rank=config.rank, alpha=alpha, targets=targets, option=option)


def build_lora(config: LoraConfig, policy: Policy) -> Lora | None:
    """Returns the adapters that the options ask for; None if the whole policy is trained.

    Raises:
      UserError: a target matches no linear layer, or the adapter to continue from belongs to
        another model or disagrees with the options.
    """
    if not config.is_on:
        return None
    if not config.adapter:
        return new_adapters(config, policy)
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


def predictor_of(config: RunConfig, role: str, model: Policy, layout: Layout) -> Predictor:
    """Returns the `Predictor` of a role: of values if `model` has a scalar head, else of
    log-probabilities at the rollout's temperature.

    Only the policy is computed by the experts that its rollout recorded. Routers of all other roles
    choose their own. The options of updates are for trained models and for the reference, which is
    computed as the policy is; for other frozen models they would be another model's.
    """
    if role in (POLICY, CRITIC, REFERENCE):
        replays = role == POLICY and config.algorithm.router_replay
        functions = functions_of(config, model, layout, router_replay=replays)
    else:
        functions = frozen_functions(model, layout, config.compute_dtype)
    if model.config.head == "scalar":
        return Predictor(functions, model.config.vocab_size)
    sizes = config.rollout.temperature, logit_tokens(model, layout)
    return Predictor(functions, model.config.vocab_size, *sizes)


def check_experts(option: str, trained: Sequence[Policy]) -> None:
    """Raises OptionError if `--experts` has another value than auto and no trained model has
    experts."""
    has_experts = any(model.config.experts for model in trained)
    expected = "auto with a model that has no experts"
    require(option == "auto" or has_experts, "experts", option, expected)


def functions_of(
    options: AnyRun, policy: Policy, layout: Layout, *, router_replay: bool = False
) -> ModelFunctions:
    """Returns a trained model's functions for an update, computed as the options say.

    Raises:
      OptionError: the devices do not support an option.
    """
    asked = options.scan_layers, policy.config.num_layers, layout.platform, options.compute_dtype
    is_scanned = scans_layers(*asked)
    require(
        not (is_scanned and layout.platform == "cpu" and options.compute_dtype == "bfloat16"),
        "scan_layers",
        options.scan_layers,
        "false with --compute_dtype bfloat16 on a CPU, where XLA runs no such products in a loop",
    )
    dtype = DTYPES[options.compute_dtype]
    return model_functions(
        policy,
        layout,
        dtype,
        remat=options.remat,
        scan_layers=is_scanned,
        router_replay=router_replay,
        experts=options.experts,
    )


def frozen_functions(policy: Policy, layout: Layout, dtype: str) -> ModelFunctions:
    """Returns the functions of a model that is not trained and whose routers choose the experts."""
    scans = scans_layers("auto", policy.config.num_layers, layout.platform, dtype)
    how = {"remat": "none", "scan_layers": scans, "router_replay": False, "experts": "auto"}
    return model_functions(policy, layout, DTYPES[dtype], **how)


def scans_layers(option: str, num_layers: int, platform: str, compute_dtype: str) -> bool:
    """Whether training runs the layers of a model as a loop.

    Args:
      option: `--scan_layers`.
      platform: `jax.Device.platform` of the devices.
    """
    if option != "auto":
        return option == "true"
    return (platform, compute_dtype) in SCANNED_ON and num_layers >= SCANNED_FROM


def logit_tokens(policy: Policy, layout: Layout) -> int:
    """Returns for how many tokens of a shard of rows logits, split over TP, exist at a time."""
    return max(1, LOGIT_BYTES * layout.split.tp // (4 * policy.config.padded_vocab_size))


def learning_rates(config: RunConfig) -> Callable[[ArrayLike], Array | np.floating]:
    """Returns a function from an optimizer step of the policy, from 0, to its learning rate."""
    return schedule_of(config.optimizer_in_use, config.policy_updates)


def critic_rates(config: RunConfig) -> Callable[[ArrayLike], Array | np.floating]:
    """Returns a function from an optimizer step of the critic, from 0, to its learning rate."""
    return schedule_of(config.critic_optimizer, config.critic_updates)


def optimizer_of(options: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Returns AdamW for `total_steps` optimizer steps."""
    # The trainer handles how weights are kept and where moments rest, the run when to give up.
    others = ("weight_dtype", "offload", "max_skipped")
    own = {k: v for k, v in asdict(options).items() if k not in others}
    return make_optimizer(total_steps=total_steps, **own)


def schedule_of(
    optimizer: OptimizerConfig, total_steps: int
) -> Callable[[ArrayLike], Array | np.floating]:
    """Returns a function from an optimizer step, 0 … `total_steps` - 1, to its learning rate."""
    assert optimizer.learning_rate is not None, "as `optimizer_in_use` has it"
    return make_schedule(
        learning_rate=optimizer.learning_rate,
        schedule=optimizer.schedule,
        warmup_steps=optimizer.warmup_steps,
        total_steps=total_steps,
    )


def policy_loss(
    algorithm: AlgorithmConfig, *, is_on_policy: bool, teacher_top_k: int = 0
) -> PolicyLoss:
    """Returns the loss that an algorithm's options describe.

    Args:
      teacher_top_k: `--teacher.top_k`; 0: what the teacher says is in the advantages.
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


def shares_prompts(config: RunConfig, platform: str) -> bool:
    """Whether the responses of a group may share their prompt in the rows of an update.

    Args:
      platform: `jax.Device.platform` of the devices.
    """
    return config.algorithm.share_prompts and knows_branches(platform)


def micro_shapes(config: RunConfig, num_shards: int, platform: str) -> list[tuple[int, int]]:
    """Returns rows and length of each micro-batch that an update may have, smallest first.

    If responses share prompts, a row holds a whole group where the budget has room for such rows.

    Args:
      num_shards: number of shards that the rows are split into.
      platform: `jax.Device.platform` of the devices.
    """
    rollout, algorithm = config.rollout, config.algorithm
    budget, responses = algorithm.tokens_per_micro_batch, rollout.num_generations
    whole = largest_length(rollout.max_length, min(rollout.min_length, ROW_UNIT))

    def of(length: int, most_of_group: int, most: int = MOST_SHAPES) -> list[tuple[int, int]]:
        """Shapes with rows of this length, each with room for `most_of_group` longest responses."""
        rows = algorithm.mini_batch_size * -(-responses // most_of_group)
        if config.warm_start.steps:
            rows = max(rows, -(-config.warm_start.batch_size // (length // whole)))
        return shapes(ladder(rollout.min_length, length), budget, num_shards, rows, most)

    apart = of(whole, 1)
    if not shares_prompts(config, platform):
        return apart
    # Each response has its own copy of the prompt's last token, beside the shared prompt.
    prompt, response = rollout.max_prompt_length - 1, rollout.max_completion_length + 1
    group = largest_length(prompt + responses * response, GROUP_UNIT)
    length = max(whole, min(group, budget // num_shards // GROUP_UNIT * GROUP_UNIT))
    return of(length, (length - prompt) // response, len(apart))
