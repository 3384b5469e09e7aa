"""The table of a run's models. A row (`Role`) names a model, its training, and what it predicts.

Knows options. Does not know devices or arrays: `training/role_model.py` has the model of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pat_jax.config.by_model import settled_dtype
from pat_jax.config.compute import Compute, Remat
from pat_jax.config.critic import REWARD_MODEL, critic_source
from pat_jax.config.fine_tuning import FineTuning
from pat_jax.config.lora import AdapterConfig
from pat_jax.config.optimizer import OptimizerConfig
from pat_jax.config.run import RunConfig

POLICY = "policy"
CRITIC = "critic"
REFERENCE = "reference"
TEACHER = "teacher"
WARM_START_RATE = 3e-3  # peak learning rate of the supervised stage; a cosine falls to zero


@dataclass(frozen=True)
class Optimization:
    """Options of an optimizer, and the number of its steps in a run."""

    optimizer: OptimizerConfig  # with a learning rate, not None
    steps: int  # optimizer steps of the whole run


@dataclass(frozen=True)
class Trained:
    """How a model is trained."""

    optimization: Optimization
    lora: AdapterConfig  # if adapters are off, the whole model is trained
    export_dir: str  # the folder to which the final model is written; empty: none
    num_iterations: int = 1  # passes over the batch in an iteration
    router_aux_loss_coef: float = 0.0  # weight of the loss that balances experts
    is_mean: bool = True  # whether the weights of each mini-batch add up to 1 (`rl.Update`)
    supervised: Optimization | None = None  # optimizer of the supervised stage, if any
    # What waits in the host's memory between updates, if --roles.rest is host.
    waits: Literal["moments", "state"] = "moments"


@dataclass(frozen=True)
class Role:
    """One model of a run.

    Attributes:
      name: policy, critic, reference or teacher, or the value of --reward that names it.
      source: a directory, a model of the Hub or a built-in shape; empty: it begins with the
        parameters of the policy.
      option: the option that names the source, for messages.
      compute: how the model is computed: data type, rematerialization, loops over layers.
      trained: how it is trained; None: it is frozen.
      temperature: the sampling temperature at which log-probabilities are computed.
      replays_routes: whether each token is computed by the experts that the rollout recorded.
      is_read: whether the role predicts its column before an update even if no loss reads it.
      top_k: number of likeliest tokens that it predicts at each position; 0: only `column`.
    """

    name: str
    source: str
    option: str
    compute: Compute
    head: Literal["vocab", "scalar"] = "vocab"
    trained: Trained | None = None
    temperature: float = 1.0
    replays_routes: bool = False
    is_read: bool = True
    top_k: int = 0

    @property
    def key(self) -> str:
        """The role's name in checkpoints."""
        return "train" if self.name == POLICY else self.name

    @property
    def devices(self) -> Literal["policy", "critic", "reference", "teacher", "reward"]:
        """The name of the field of `PlacementConfig` that chooses the role's devices."""
        match self.name:
            case "policy" | "critic" | "reference" | "teacher":
                return self.name
            case _:
                return "reward"

    @property
    def column(self) -> str:
        """The name of the batch's column that the role's predictions fill."""
        if self.trained:
            return "old_values" if self.head == "scalar" else "old_logprobs"
        return "score" if self.devices == "reward" else f"{self.name}_logprobs"

    def with_remat(self, form: Remat) -> "Role":
        """Returns the role with this form of rematerialization in place of `auto`."""
        if self.compute.remat != "auto":
            return self
        return replace(self, compute=replace(self.compute, remat=form))


Roles = tuple[Role, ...]


def role_table(run: RunConfig, platform: str) -> Roles:
    """Returns the models of a run in the order in which they are built.

    Args:
      run: the run's options, with every `auto` settled.
      platform: `jax.Device.platform` of the devices.
    """
    return (_policy(run), *_critic(run), *_reading(run), *reward_roles(run, platform))


def _policy(run: RunConfig) -> Role:
    algorithm = run.algorithm
    return Role(
        POLICY,
        run.model,
        "model",
        run.compute,
        trained=_training(run),
        temperature=run.rollout.temperature,
        replays_routes=algorithm.router_replay,
        # KL in the reward, and a teacher of sampled tokens, compare the policy before the update
        # with another model.
        is_read=algorithm.penalizes_kl or (run.teacher.model != "" and not run.teacher.top_k),
    )


def _training(run: RunConfig) -> Trained:
    algorithm = run.algorithm
    stage = run.warm_start
    # The moments of both optimizers have the same data type.
    moments = run.optimizer.moment_dtype
    before = OptimizerConfig(
        learning_rate=WARM_START_RATE, schedule="cosine", warmup_steps=10, moment_dtype=moments
    )
    is_constant = algorithm.loss_aggregation == "constant"
    return Trained(
        Optimization(run.optimizer_in_use, run.policy_updates),
        run.lora,
        run.checkpoint.export_dir,
        num_iterations=algorithm.num_iterations,
        router_aux_loss_coef=algorithm.router_aux_loss_coef,
        is_mean=not (is_constant and algorithm.router_aux_loss_coef),
        supervised=Optimization(before, stage.steps) if stage.steps else None,
    )


def _critic(run: RunConfig) -> Iterator[Role]:
    if not (run.train and run.algorithm.has_critic):
        return
    trained = Trained(
        Optimization(run.critic.optimizer(run.optimizer), run.critic_updates),
        run.critic.lora,
        run.critic.export_dir,
        num_iterations=run.algorithm.num_iterations,
        waits="state",
    )
    source = critic_source(run.critic.model, run.reward, run.model)
    option = "critic.model" if run.critic.model else "reward"
    yield Role(CRITIC, source, option, run.compute, head="scalar", trained=trained, is_read=False)


def _reading(run: RunConfig) -> Iterator[Role]:
    temperature = run.rollout.temperature
    if run.algorithm.beta:
        yield Role(REFERENCE, "", "", run.compute, temperature=temperature)
    if teacher := run.teacher.model:
        how = Compute(run.compute_dtype)
        top_k = run.teacher.top_k
        yield Role(TEACHER, teacher, "teacher.model", how, temperature=temperature, top_k=top_k)


def reward_roles(run: RunConfig, platform: str) -> Iterator[Role]:
    """Yields the reward models of a run, in bfloat16, on CPUs in float32."""
    dtype = settled_dtype("auto", platform, is_checkpoint=True)
    for name in run.reward:
        if name.startswith(REWARD_MODEL):
            yield reward_role(name, dtype)


def reward_role(name: str, dtype: str, option: str = "reward") -> Role:
    """Returns a reward model.

    Args:
      name: the value of the option, with or without `model:` before the model's name.
    """
    return Role(name, name.removeprefix(REWARD_MODEL), option, Compute(dtype), head="scalar")


def tuned_roles(
    run: FineTuning, head: Literal["vocab", "scalar"], steps: int, *, has_reference: bool
) -> Roles:
    """Returns the models of a run that learns from files: the policy, or a reward model, and a
    frozen reference if its loss reads one.

    Args:
      steps: optimizer steps of the run.
    """
    trained = Trained(
        Optimization(run.optimizer_in_use, steps),
        run.lora,
        run.checkpoint.export_dir,
        router_aux_loss_coef=run.router_aux_loss_coef,
    )
    is_read = run.eval.every > 0
    how = run.compute
    policy = Role(POLICY, run.model, "model", how, head=head, trained=trained, is_read=is_read)
    return (policy, Role(REFERENCE, "", "", how)) if has_reference else (policy,)
