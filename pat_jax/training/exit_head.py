"""Trains the early-exit head on the policy's own samples, so that it follows the policy.

Only the head (`models/layers.py`) is trained here; the layers before it are the policy's own and
change with it. The loss is the cross-entropy of the policy's samples. Its optimum is the policy's
distribution, as far as those layers can predict it. The head only proposes drafts, which change no
token, so this does not affect the policy.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pat_jax.common.pytree import with_sharding
from pat_jax.layout.partitions import AutoPartition
from pat_jax.models.layers import ExitHead, exit_hidden
from pat_jax.programs.programs import Key, ProgramTable
from pat_jax.rl.algorithm.losses import Sums
from pat_jax.rl.algorithm.predict import ModelFunctions, Predictor
from pat_jax.rl.algorithm.supervised import CrossEntropy
from pat_jax.rl.algorithm.update import TrainState, Update, zero_gradients
from pat_jax.rl.batches.train_batch import MicroBatch, TrainBatch
from pat_jax.training.drafter_state import head_optimizer, head_state
from pat_jax.training.passes import abstract_micro
from pat_jax.training.trainable_params import Leaves
from pat_jax.training.trainer import Trainer


class ExitHeadTrainer:
    """Trains the head beside the policy's trainer, on the same batches."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        depth: int,
        micro_shapes: Sequence[tuple[int, int]],
        dtype: jnp.dtype,
        logit_tokens: int,
        temperature: float = 1.0,
    ):
        """
        Args:
          depth: number of layers before the head.
          micro_shapes: rows and length of the trainer's micro-batches.
          dtype: dtype in which the layers are computed.
          logit_tokens, temperature: see `Predictor`.
        """
        self.trainer = trainer
        self.depth = depth
        self.dtype = dtype
        embed = trainer.policy.config.embed_dim
        predictor = Predictor(
            ModelFunctions(lambda *_: (jnp.zeros(0), {}), lambda head: head),
            trainer.policy.config.vocab_size,
            temperature,
            logit_tokens,
        )
        self._update = Update(predictor, head_optimizer(), CrossEntropy())
        self.programs = ProgramTable()
        self._declare(head_state(trainer.layout, embed), micro_shapes)
        self.state: TrainState = trainer.layout.put(
            jax.device_get(self._update.init(jnp.zeros((embed, embed))))
        )

    @property
    def head(self) -> np.ndarray:
        """The head, float32[embed, embed], in every process."""
        return np.asarray(self.state.params)

    def take(self, leaves: Sequence[np.ndarray]) -> None:
        """Replaces the state by the given leaves."""
        tree = jax.tree.structure(self.state)
        self.state = self.trainer.layout.put(jax.tree.unflatten(tree, leaves))

    def compile(self) -> None:
        self.programs.compile_all(threads=1)

    def _declare(self, state: TrainState, micro_shapes: Sequence[tuple[int, int]]) -> None:
        trainer = self.trainer
        split = self.trainer.layout.split
        head = state.params
        everywhere = trainer.layout.sharding()
        frozen = trainer.trained.abstract_frozen

        sums = with_sharding(jax.eval_shape(self._update.zero_sums), everywhere)
        gradient = with_sharding(jax.eval_shape(zero_gradients, head), everywhere)

        def grad_step(
            frozen: Leaves,
            params: Leaves,
            head: ExitHead,
            micro: MicroBatch,
            grad: Array,
            sums: Sums,
        ) -> tuple[Array, Sums]:
            model = self._over(trainer.trained.whole(frozen, params))
            predictor = replace(self._update.predictor, model=model)
            update = replace(self._update, predictor=predictor)
            return update.grad_step(head, micro, grad, sums)

        for shape in micro_shapes:
            micro = abstract_micro(trainer.policy, trainer.layout, shape, ())
            key = Key("exit_grad", split, *shape)
            options = {"out_shardings": everywhere, "donate_argnums": (4, 5)}
            args = frozen, trainer.abstract_params, head, micro, gradient, sums
            self.programs.declare(key, grad_step, *args, **options)
        options = {"out_shardings": everywhere, "donate_argnums": 0}
        apply = self._update.apply_step
        self.programs.declare(Key("exit_apply", split), apply, state, gradient, **options)

    def _over(self, params: Leaves) -> ModelFunctions:
        """Returns the functions of the policy's first layers; the head is their only parameter."""
        policy = self.trainer.policy
        partition = AutoPartition(self.trainer.layout)

        def forward(
            head: ExitHead, tokens: Array, positions: Array, routes: Array | None
        ) -> tuple[Array, dict[str, Array]]:
            del routes
            model = policy.bind(jax.lax.stop_gradient(params))
            hidden = model(
                tokens, positions, partition=partition, dtype=self.dtype, depth=self.depth
            ).hidden
            return exit_hidden(hidden, head.astype(hidden.dtype)), {}

        def of_policy(head: ExitHead) -> Array:
            del head  # the policy's own gives the logits
            return policy.bind(params).head

        return ModelFunctions(forward, of_policy, by_rows=partition.by_rows)

    def learn(self, params: Leaves, batch: TrainBatch) -> dict[str, float]:
        """Takes an optimizer step on the responses of each mini-batch.

        Returns:
          Metrics by name: the cross-entropy of the policy's tokens under the head, in nats.
        """
        split = self.trainer.layout.split
        losses = []
        for mini in batch.mini_batches:
            count = sum(int(micro.mask.sum()) for micro in mini)
            if not count:
                continue
            everywhere = self.trainer.layout.put
            gradient = everywhere(np.zeros(self.state.params.shape, np.float32))
            sums = everywhere(jax.device_get(self._update.zero_sums()))
            for micro in mini:
                weights = np.asarray(micro.mask, np.float32) / count
                one = replace(micro, weights=weights, columns={}, teacher=None)
                program = self.programs[Key("exit_grad", split, *micro.tokens.shape)]
                frozen = self.trainer.trained.frozen
                gradient, sums = program(frozen, params, self.state.params, one, gradient, sums)
            self.state, _, _ = self.programs[Key("exit_apply", split)](self.state, gradient)
            losses.append(self._update.summary([jax.device_get(sums)])["loss"])
        return {"train/exit_head_loss": float(np.mean(losses))} if losses else {}
