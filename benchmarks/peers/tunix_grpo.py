"""google-tunix's GRPO learner, each iteration when it is its turn.

Run by `iteration_vs_peers.py` with the Python of an environment of its own:

    python -m venv ENV && ENV/bin/pip install google-tunix==0.1.7

Actor and rollout share their weights, the reference is a copy, nothing is computed twice in the backward
pass (its defaults); the vanilla sampler, the only one of its engines that runs on a CPU.
"""

import json
import sys

import jax
import numpy as np
import optax
from flax import nnx
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix_sampler import NEVER, Numbers, load
from turns import Turns
from turns_reward import even_tokens


def main() -> None:
    asked = json.loads(sys.argv[1])
    turns = Turns(jax=jax.__version__)
    actor, _ = load(asked["model"])
    reference, _ = load(asked["model"])
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    prompt, response = asked["prompt"], asked["response"]
    cluster = rl_cluster.RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=Numbers(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(rl_cluster.Role, mesh),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.chain(
                    optax.clip_by_global_norm(1.0), optax.adamw(asked["learning_rate"], b2=0.95)
                ),
                eval_every_n_steps=10**9,
                max_steps=10**6,
                mini_batch_size=asked["prompts"],
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=response,
                max_prompt_length=prompt,
                kv_cache_size=prompt + response,
                temperature=1.0,
                top_p=1.0,
                eos_tokens=[NEVER],
            ),
        ),
    )
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=asked["generations"], beta=asked["beta"]),
        reward_fns=even_tokens,
    )

    def batches():
        with open(asked["data"], encoding="utf-8") as file:
            texts = [json.loads(line)["prompt"] for line in file]
        first = 0
        while True:
            some = [texts[(first + i) % len(texts)] for i in range(asked["prompts"])]
            first += asked["prompts"]
            jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
            turns.wait()
            yield {"prompts": np.array(some)}

    learner.train(batches())


if __name__ == "__main__":
    main()
