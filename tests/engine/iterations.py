"""Iterations of a run in small, after the warm-up of its engine and its trainer."""

from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from fakes import SETTINGS

from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.layout.layout import Layout
from pat_jax.models.adapted_weight import is_adapted
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Policy
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.rl.algorithm.optimizer import make_optimizer
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.algorithm.update import Update
from pat_jax.rl.batches.batches import to_train_batch
from pat_jax.rl.batches.types import Prompt
from pat_jax.run.generation import Generator
from pat_jax.training.passes import model_functions
from pat_jax.training.reader import Reader
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import REINFORCED, Trainer
from pat_jax.training.transfer import Receivers
from tests.lossless import Subject

SHAPES = [(8, 64)]


def ignore(*ended: object) -> None:
    """What is told of responses as they end."""


@dataclass
class Iterations:
    """A run in small: sampling, a made-up reward, an update, the next policy."""

    subject: Subject
    has_adapters: bool = False

    def __post_init__(self):
        self.engine = self.subject.engine
        self.policy = Policy.from_config(self.engine.policy.config)
        self.trainer.compile()
        # What is frozen where there are adapters beside it.
        base = jax.tree.map(
            lambda x: x.weight if is_adapted(x) else x, self.subject.params, is_leaf=is_adapted
        )
        params = jax.device_put(base, self.trainer.trained.base_shardings)
        if self.has_adapters:
            self.trainer.freeze(params)
            params = self.trainer.trained.init(0)
        self.state = self.trainer["init_state"](params)
        self.reference = Reader(
            "reference_logprobs",
            self.trainer.trained,
            self.trainer.updates[REINFORCED].predictor,
            SHAPES,
        )
        self.reference.compile(by_need=False)
        self.reference.take(self.state.params)
        self.latency = Warmup(self.engine).measure(
            lambda layout: self.trainer.transfer(self.state.params, layout)
        )
        config = replace(SETTINGS["kv2"].rollout, prompts_per_step=4, num_generations=4)
        lengths = LengthModel.empty(config.max_completion_length)
        self.generator = Generator(
            self.engine,
            self.trainer,
            FixedLayout(self.first.split),
            config,
            seed=5,
            lengths=lengths,
        )
        self.generator.load(self.state.params)

    @property
    def first(self) -> Layout:
        """The one with the least TP, in which it learns."""
        return next(iter(self.engine.layouts.values()))

    @cached_property
    def trainer(self) -> Trainer:
        layout = self.first
        model = model_functions(self.policy, layout, jnp.float32)
        update = Update(
            Predictor(model, self.policy.config.vocab_size),
            make_optimizer(learning_rate=1e-3, total_steps=10),
            PolicyLoss(beta=0.01),
        )
        lora = Lora.of(self.policy, rank=4, alpha=8, targets=["all-linear"])
        return Trainer(
            TrainableParams(self.policy, layout, lora if self.has_adapters else None),
            update,
            Receivers(jnp.float32, self.engine.layouts, self.engine.policy),
            micro_shapes=SHAPES,
        )

    def iterate(self, step: int, planner: Planner, **options: float) -> list[str]:
        """One iteration; returns the layouts that its rollout went through."""
        self.generator.planner = planner
        self.generator.config = replace(self.generator.config, **options)
        rng = np.random.default_rng(step)
        prompts = [
            Prompt(i, tuple(rng.integers(3, 61, rng.integers(1, 13)).tolist()), "", {})
            for i in range(4)
        ]
        groups, report = self.generator.rollout(prompts, step, ignore)
        batch = to_train_batch(
            groups,
            rng.normal(size=(4, 4)),
            mini_batch_size=2,
            micro_shapes=SHAPES,
            aggregation="token",
            truncated="score",
        )
        self.generator.release()
        self.state, result = self.trainer.update(self.state, self.reference.read(batch))
        self.generator.load(self.state.params)
        assert 0 <= self.generator.compare(self.state.params) < 1e-4
        assert len(result.applied) == 2 and np.isfinite(result.metrics["train/loss"])
        is_trained = self.generator.config.temperature == 1  # the trainer's own
        assert (result.metrics["train/behavior_gap_max"] < 1e-4) == is_trained
        switches = report.switches
        return [s.source for s in switches[:1]] + [s.target for s in switches]
