"""The options of the plan of a training run, from the run's own."""

from collections.abc import Mapping
from typing import Any

from pat_jax.common.options.declared import options_of
from pat_jax.config.by_model import KnownModel, settled
from pat_jax.config.critic import REWARD_MODEL
from pat_jax.config.run import RunConfig
from pat_jax.profiling.capacity.replay_options import ReplayOptions

# Options of a run under whose names a plan has its own, or which are read apart.
OWN = ("run_dir", "profile", "seed", "device_memory_gib", "compile", "reward", "compute_dtype")
OF_UPDATES = ("algorithm.", "critic.", "teacher.", "roles.", "optimizer.")
ANY_CHECKPOINT = KnownModel("", is_checkpoint=True, context=2**24, platform="gpu")


def of_run(plan: ReplayOptions, run: RunConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a plan by name: the sizes of a run's rollouts and updates, and what
    else is not the run's default.

    Args:
      plan: its defaults.
      run: the run to be planned.
      given: options that the user gives to the plan itself. They win, and others follow them.
    """
    run, _ = settled(run, ANY_CHECKPOINT)
    rollout = run.rollout
    trains = given.get("train", run.train)
    names = {each.name for each in options_of(plan)}.difference(OWN)
    usual = {each.name: each.default for each in options_of(RunConfig())}
    found: dict[str, Any] = {}
    for each in options_of(run):
        ours = each.name if each.name in names else each.name.removeprefix("rollout.")
        is_read = trains or not each.name.startswith(OF_UPDATES)
        if ours in names and is_read and each.default != usual[each.name]:
            found[ours] = each.default
    num_generations = given.get("num_generations", rollout.num_generations)
    max_prompt_length = given.get("max_prompt_length", rollout.max_prompt_length)
    found |= {
        "responses": rollout.prompts_per_step * num_generations,
        "num_generations": num_generations,
        "max_prompt_length": max_prompt_length,
        "max_completion_length": rollout.max_completion_length,
        "prompt_tokens": min(max_prompt_length, plan.prompt_tokens),
        "compute_dtype": run.compute_dtype,
    }
    if trains:
        found |= {
            "beta": run.algorithm.beta,
            "lora_rank": run.lora.rank,
            # 0 if it is all prompts, as the user may change their number.
            "mini_batch_size": run.mini_batch_size % rollout.prompts_per_step,
            "tokens_per_micro_batch": run.algorithm.tokens_per_micro_batch,
            "reward": tuple(name for name in run.reward if name.startswith(REWARD_MODEL)),
        }
    return found
