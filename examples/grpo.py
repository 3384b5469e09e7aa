"""GRPO from end to end, flat: prompts, rollouts that switch layouts, rewards, advantages, updates.

    python examples/grpo.py --steps 20

These are the pieces of `python -m pat_jax.train`, without its checkpoints, metrics, evaluation and
reward processes; it takes the same options. Change the reward or the loop to try an idea: here a policy
of random weights learns to write digits.
"""

import sys

import numpy as np

from pat_jax.common.devices import configure
from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import parse
from pat_jax.config.role_table import POLICY, REFERENCE
from pat_jax.config.run import RunConfig
from pat_jax.models.kernels.row_attention import knows_branches
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.rl.algorithm.advantages import group_advantages
from pat_jax.rl.batches.batches import to_train_batch
from pat_jax.rl.batches.types import Rollout
from pat_jax.rl.data.epochs import START
from pat_jax.run.generation import Generator
from pat_jax.run.roles.role_params import initial_params
from pat_jax.run.start.prepare import cost_planner, warm_up
from pat_jax.run.start.setup import build
from pat_jax.training.build import micro_shapes

DEFAULTS = ["--preset", "demo", "--warm_start.steps", "0", "--rollout.max_completion_length", "36"]


def reward(prompt: str, response: str) -> float:
    """The share of digits in a response. Yours goes here."""
    del prompt
    return sum(character.isdigit() for character in response) / max(1, len(response))


def train(config: RunConfig) -> list[float]:
    """Returns the mean reward of each step."""
    # Build task, policy, layouts, engine and trainer; a wrong option raises here.
    setup = build(config, configure(config.devices))
    config, task, engine, trainer = setup.config, setup.task, setup.engine, setup.trainer
    reference = setup.roles.readers.get(REFERENCE)

    # Compile all programs of the update, and a few of the rollout; it compiles others when needed.
    setup.roles.compile()
    engine.compile()
    state = trainer["init_state"](initial_params(setup.roles.models[POLICY], trainer, config.seed))
    if reference is not None:
        reference.take(state.params)
    shapes = micro_shapes(config.micro_batches, trainer.layout.split.dp, trainer.layout.platform)

    # The warm-up runs these programs, and the planner decides by their measured times.
    latency = warm_up(
        config.profile,
        engine,
        setup.subject,
        setup.profile,
        lambda layout: trainer.transfer(state.params, layout),
    )
    lengths = LengthModel.empty(config.rollout.max_completion_length)
    planner = setup.scripted or cost_planner(engine, latency, lengths, setup.memory)
    generator = Generator(engine, trainer, planner, config.rollout, config.seed, lengths)

    def worth(rollout: Rollout) -> float:
        text = task.tokenizer.decode(rollout.tokens.tolist())
        return reward(rollout.prompt.text, text)

    at = START
    means = []
    for step in range(config.steps):
        # Draw prompts and generate a group of responses to each with the newest policy. Between two
        # bursts of decode steps the planner may change the layout.
        prompts, at = task.train.draw(at, config.rollout.prompts_per_step)
        generator.load(state.params)
        groups, report = generator.rollout(prompts, step, lambda place, rollout: None)
        generator.release()  # the update has the devices' memory to itself

        # Rewards, and advantages: how much better each response is than its group.
        rewards = np.array([[worth(rollout) for rollout in group.rollouts] for group in groups])
        advantages = group_advantages(rewards, scale=config.algorithm.scale_rewards)

        # The update, in micro-batches of the compiled shapes.
        batch = to_train_batch(
            groups,
            advantages,
            mini_batch_size=config.mini_batch_size,
            micro_shapes=shapes,
            aggregation=config.algorithm.loss_aggregation,
            truncated=config.algorithm.truncated,
            max_completion_length=config.rollout.max_completion_length,
            shares_prompts=knows_branches(trainer.layout.platform),
        )
        state, result = trainer.update(state, setup.roles.read(batch))

        means.append(float(rewards.mean()))
        path = " -> ".join(report.trace.path)
        loss = result.metrics["train/loss"]
        print(f"step {step + 1}: reward {means[-1]:.3f}, loss {loss:.4f}, {path}")
    return means


def main() -> None:
    train(parse([*DEFAULTS, *sys.argv[1:]], prog="python examples/grpo.py"))


if __name__ == "__main__":
    run_command(main)
