"""The options of the plan of a training run, from the run's own."""

from collections.abc import Mapping
from typing import Any

from pat_jax.common.bars import note
from pat_jax.common.options.declared import options_of
from pat_jax.config.algorithms import ALGORITHMS
from pat_jax.config.by_model import KnownModel, settled
from pat_jax.config.critic import REWARD_MODEL
from pat_jax.config.run import RunConfig
from pat_jax.profiling.capacity.replay_options import ReplayOptions

# Options of a run under whose names a plan has its own, or which are read apart.
OWN = ("run_dir", "profile", "compile", "reward", "compute_dtype")
UNREAD = ("layout", "devices", "profile", "placement.name")
OF_UPDATES = ("algorithm.", "critic.", "teacher.", "roles.", "optimizer.")
ANY_CHECKPOINT = KnownModel("", is_checkpoint=True, context=2**24, platform="gpu")


def of_run(plan: ReplayOptions, run: RunConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a plan by name: the sizes of a run's rollouts and updates, and what
    else is not the run's default.

    Args:
      plan: its defaults.
      run: the run to be planned.
      given: options that the user gives to the plan itself. They win, and others follow them.

    Raises:
      OptionError: the run trains what a plan does not know.
    """
    run, _ = settled(run, ANY_CHECKPOINT)
    rollout = run.rollout
    trains = given.get("train", run.train)
    found = _changed(plan, run, trains=trains)
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
        _check_known(run, given)
        found |= {
            "beta": run.algorithm.beta,
            "lora_rank": run.lora.rank,
            # 0 if it is all prompts, as the user may change their number.
            "mini_batch_size": run.mini_batch_size % rollout.prompts_per_step,
            "tokens_per_micro_batch": run.algorithm.tokens_per_micro_batch,
            "reward": tuple(name for name in run.reward if name.startswith(REWARD_MODEL)),
        }
    return found


def _changed(plan: ReplayOptions, run: RunConfig, *, trains: bool) -> dict[str, Any]:
    """Returns the options of the plan that are not the run's default. A note names what is unread."""
    names = {each.name for each in options_of(plan)}.difference(OWN)
    usual = {each.name: each.default for each in options_of(RunConfig())}
    changed = [each for each in options_of(run) if each.default != usual[each.name]]
    if unread := [f"--{each.name}" for each in changed if each.name in UNREAD]:
        note(f"note: a plan does not read these options of a run: {', '.join(unread)}")
    found: dict[str, Any] = {}
    for each in changed:
        ours = each.name if each.name in names else each.name.removeprefix("rollout.")
        is_read = trains or not each.name.startswith(OF_UPDATES)
        if ours in names and is_read:
            found[ours] = each.default
    return found


def _check_known(run: RunConfig, given: Mapping[str, Any]) -> None:
    """Raises OptionError if the run trains otherwise than a plan can tell."""
    run.need(
        "lora.adapter",
        "lora_rank" in given or run.lora.rank > 0 or not run.lora.adapter,
        "--lora.rank beside it, as a plan does not read the adapter",
    )
    name, ours = run.algorithm.name, ALGORITHMS[run.algorithm.name]
    is_known = {
        "baseline": run.algorithm.has_critic == (ours["baseline"] == "critic"),
        "distill_coef": (run.algorithm.distill_coef > 0) == (ours["distill_coef"] > 0),
    }
    for part in is_known:
        run.need(
            f"algorithm.{part}",
            "algorithm.name" in given or is_known[part],
            f"{ours[part]} as with --algorithm.name {name}: a plan knows an algorithm by its name, "
            "so give it the --algorithm.name that is nearest",
        )
