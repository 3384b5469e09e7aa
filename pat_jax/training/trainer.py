"""The update on devices: the pure functions of `rl`, compiled for the trainer's layout.

Parameters and optimizer state are split over all devices (FSDP over the data-parallel axes, TP over
the others). Hands the policy to the rollout as one compiled transfer.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pat_jax.common.pytree import with_sharding
from pat_jax.engine.device.programs import Key, ProgramTable
from pat_jax.engine.layout.layout import AutoPartition, Layout
from pat_jax.models.policy import Params, Policy
from pat_jax.planning.types import Split
from pat_jax.rl.batches import MicroBatch, TrainBatch, abstract_micro_batch
from pat_jax.rl.losses import LossSums, zero_sums
from pat_jax.rl.update import PolicyUpdate, TrainState, zero_gradients
from pat_jax.training.transfer import declare_transfer


def model_functions(
    policy: Policy, layout: Layout, dtype: jnp.dtype, *, remat: bool = True
) -> tuple[Callable[[Params, Array], Array], Callable[[Params, Array], Array]]:
    """forward(params, tokens) and logits(params, hidden), as `rl.update` wants them."""
    partition = AutoPartition(layout, "train")

    def forward(params: Params, tokens: Array) -> Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
        model = policy.bind(params)
        return model(tokens, positions, partition=partition, dtype=dtype, remat=remat)[0]

    def logits(params: Params, hidden: Array) -> Array:
        return policy.bind(params).logits(hidden, partition)

    return forward, logits


@dataclass(frozen=True)
class UpdateResult:
    metrics: dict[str, float]
    num_updates: int


class Trainer:
    """The programs of the update, and the transfer of its parameters to a rollout layout."""

    def __init__(
        self,
        policy: Policy,
        layout: Layout,
        update: PolicyUpdate,
        *,
        micro_shapes: Sequence[tuple[int, int]],
        rollout_layouts: dict[Split, Layout],
        rollout_dtype: jnp.dtype,
        is_on_policy: bool,
        num_iterations: int = 1,
        supervised: PolicyUpdate | None = None,
        rollout_policy: Policy | None = None,
    ):
        """
        Args:
          rollout_policy: as the rollout keeps it; `policy` where not given.
          is_on_policy: every batch is used for one optimizer step, so the old policy is the policy.
          supervised: the update of a supervised stage before, with its own optimizer.
        """
        self.supervised_functions = supervised
        self.policy, self.layout, self.update_functions = policy, layout, update
        self.is_on_policy, self.num_iterations = is_on_policy, num_iterations
        self.has_reference = update.beta > 0
        self.programs = ProgramTable()
        self.shardings = layout.param_shardings(policy, role="train")
        self._declare(micro_shapes)
        declare_transfer(
            self.programs,
            self.abstract_params,
            layout,
            rollout_policy or policy,
            rollout_layouts,
            rollout_dtype,
            update.score_step,
        )

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        self.programs.compile_all(threads=os.cpu_count() or 1, progress=progress)

    @property
    def abstract_params(self) -> Params:
        return with_sharding(self.policy.abstract_params, self.shardings)

    @property
    def abstract_state(self) -> TrainState:
        return with_sharding(
            jax.eval_shape(self.update_functions.init, self.abstract_params),
            self._state_shardings(),
        )

    @property
    def resident(self) -> list[TrainState | Params]:
        """Shapes with shardings of what stays on the devices during a rollout."""
        return [self.abstract_state, *[self.abstract_params] * self.has_reference]

    def _state_shardings(self) -> TrainState:
        """Optimizer moments are split like the parameters they belong to; counters are everywhere."""
        state = jax.eval_shape(self.update_functions.init, self.abstract_params)
        everywhere = self.layout.sharding()
        params_tree = jax.tree.structure(self.abstract_params)

        def is_params(node: object) -> bool:
            return jax.tree.structure(node) == params_tree

        return jax.tree.map(
            lambda node: (
                self.shardings if is_params(node) else jax.tree.map(lambda _: everywhere, node)
            ),
            state,
            is_leaf=is_params,
        )

    def _declare(self, micro_shapes: Sequence[tuple[int, int]]) -> None:
        split, update, declare = self.layout.split, self.update_functions, self.programs.declare
        params, state, everywhere = (
            self.abstract_params,
            self.abstract_state,
            self.layout.sharding(),
        )
        sums = with_sharding(
            jax.eval_shape(zero_sums), jax.tree.map(lambda _: everywhere, jax.eval_shape(zero_sums))
        )
        state_shardings = self._state_shardings()
        declare(
            Key("init_state", split),
            update.init,
            params,
            out_shardings=state_shardings,
            donate_argnums=0,
        )
        declare(Key("zero_gradients", split), zero_gradients, params, out_shardings=self.shardings)
        declare(Key("zero_sums", split), zero_sums, out_shardings=everywhere)
        declare(Key("copy", split), _copy, params, out_shardings=self.shardings)
        applied = {"out_shardings": (state_shardings, everywhere, everywhere), "donate_argnums": 0}
        declare(Key("apply", split), update.apply_step, state, params, **applied)
        if self.supervised_functions:
            declare(
                Key("supervised_apply", split),
                self.supervised_functions.apply_step,
                state,
                params,
                **applied,
            )
        for shape in micro_shapes:
            self._declare_passes(shape, params, sums)

    def _declare_passes(self, shape: tuple[int, int], params: Params, sums: LossSums) -> None:
        """Forward and backward for one micro-batch shape."""
        split, everywhere = self.layout.split, self.layout.sharding()
        bare = self._abstract_micro(*shape, has_old=False, has_reference=False)
        accumulated = {"out_shardings": (self.shardings, everywhere), "donate_argnums": (2, 3)}
        if self.supervised_functions and not self.shares_passes:
            run = self.supervised_functions.sft_grad_step
            self.programs.declare(
                Key("supervised_grad", split, *shape),
                run,
                params,
                bare,
                params,
                sums,
                **accumulated,
            )
        if self.has_reference or not self.is_on_policy:
            self.programs.declare(
                Key("logprobs", split, *shape),
                lambda params, micro: self.update_functions.logprob_step(params, micro)[0],
                params,
                bare,
                out_shardings=self.layout.sharding("batch", role="train"),
            )
        full = self._abstract_micro(
            *shape, has_old=not self.is_on_policy, has_reference=self.has_reference
        )
        run = self.update_functions.grad_step
        self.programs.declare(
            Key("grad", split, *shape), run, params, full, params, sums, **accumulated
        )

    def _abstract_micro(
        self, rows: int, length: int, *, has_old: bool, has_reference: bool
    ) -> MicroBatch:
        micro = abstract_micro_batch(rows, length, has_old=has_old, has_reference=has_reference)
        by_rows = self.layout.sharding("batch", role="train")
        return with_sharding(micro, jax.tree.map(lambda _: by_rows, micro))

    def __getitem__(self, name: str) -> Callable:
        return self.programs[Key(name, self.layout.split)]

    def init(self, seed: int) -> Params:
        return self.policy.init(seed, self.shardings)

    def transfer(self, params: Params, layout: Layout) -> Params:
        """The policy on the rollout's shards, as it is kept there, checked against the sender's.

        Raises:
          RuntimeError: what arrived is not what was sent.
        """
        source, target = self.layout.split, layout.split
        received = self.programs[Key("transfer", source, target=target)](params)
        sent_sum = int(self["checksum"](params))
        received_sum = int(self.programs[Key("checksum", source, target=target)](received))
        if sent_sum != received_sum:
            raise RuntimeError(
                f"weight transfer {source} to {target}: checksum {received_sum} arrived, "
                f"{sent_sum} was sent; the rollout would sample another policy."
            )
        return received

    def update(
        self, state: TrainState, batch: TrainBatch, reference: Params | None
    ) -> tuple[TrainState, UpdateResult]:
        """Every optimizer step of one iteration's batch."""
        mini_batches = [
            [self._with_logprobs(micro, state.params, reference) for micro in mini]
            for mini in batch.mini_batches
        ]
        records = []
        for _ in range(self.num_iterations):
            for mini in mini_batches:
                state, record = self._step(state, mini)
                records.append(record)
        return state, _summary(records)

    def supervised_step(
        self, state: TrainState, micro_batches: Sequence[MicroBatch]
    ) -> tuple[TrainState, UpdateResult]:
        """One optimizer step on demonstrations, whose advantages are 1.

        Returns:
          The state and, as `train/loss`, the cross-entropy of the responses in nats.
        """
        passes = "grad" if self.shares_passes else "supervised_grad"
        state, record = self._step(state, micro_batches, passes, "supervised_apply")
        result = _summary([record])
        if self.shares_passes:  # |log π(token) - 0|, as demonstrations have no log-probabilities
            result.metrics["train/loss"] = result.metrics["train/behavior_gap"]
        return state, result

    @property
    def shares_passes(self) -> bool:
        """Whether GRPO's passes are those of the supervised stage as well, which then need no
        programs of their own: at a ratio of 1 its gradient with an advantage of 1 is that of the
        cross-entropy, at temperature 1 and without a penalty."""
        is_plain = self.is_on_policy and not self.has_reference
        return is_plain and self.update_functions.temperature == 1.0

    def _with_logprobs(
        self, micro: MicroBatch, params: Params, reference: Params | None
    ) -> MicroBatch:
        if self.is_on_policy and reference is None:
            return micro
        program = self.programs[Key("logprobs", self.layout.split, *micro.tokens.shape)]
        return replace(
            micro,
            old_logprobs=None if self.is_on_policy else program(params, micro),
            reference_logprobs=None if reference is None else program(reference, micro),
        )

    def _step(
        self,
        state: TrainState,
        micro_batches: Sequence[MicroBatch],
        passes: str = "grad",
        apply: str = "apply",
    ) -> tuple[TrainState, tuple[LossSums, Array, Array]]:
        grads, sums = self["zero_gradients"](state.params), self["zero_sums"]()
        for micro in micro_batches:
            program = self.programs[Key(passes, self.layout.split, *micro.tokens.shape)]
            grads, sums = program(state.params, micro, grads, sums)
        state, grad_norm, is_applied = self[apply](state, grads)
        return state, (sums, grad_norm, is_applied)


def _copy(params: Params) -> Params:
    return jax.tree.map(jnp.copy, params)


def _summary(records: Sequence[tuple[LossSums, Array, Array]]) -> UpdateResult:
    """Means over the optimizer steps, fetched from the devices once."""
    records = jax.device_get(list(records))
    each = [sums.metrics() for sums, _, _ in records]
    metrics = {f"train/{name}": float(np.mean([one[name] for one in each])) for name in each[0]}
    metrics["train/behavior_gap_max"] = max(one["behavior_gap_max"] for one in each)
    metrics["train/grad_norm"] = float(np.mean([norm for _, norm, _ in records]))
    metrics["train/skipped_updates"] = float(sum(not applied for _, _, applied in records))
    return UpdateResult(metrics, len(records))
