"""What a run begins with: the state of its newest checkpoint, or of a policy that has learned nothing.

Knows checkpoints and the supervised stage. Does not know the loop that follows (`loop.py`).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from pat_jax.config.run import RunConfig
from pat_jax.models.policy import Params
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.run.process.open_run import OpenRun, Restored
from pat_jax.run.setup import Setup
from pat_jax.run.start.adapters import check_base, freeze_base
from pat_jax.run.start.warm_start import warm_start
from pat_jax.run.totals import Totals

_OTHER_PROBLEMS = {
    "train": "resumed with other problems than before, or in another order (the files of --data or how "
    "they are read): some come twice in this epoch, and some not at all",
    "heldout": "resumed with other held-out problems than before (the files, or how many): evaluations "
    "from here on are not those before",
}


@dataclass(frozen=True)
class Beginning:
    steps_done: int
    state: TrainState
    reference: Params | None  # None: no loss looks at it
    lengths: LengthModel
    totals: Totals
    base_checksum: int | None  # of what adapters are added to; None: all of the policy is trained


def begin(config: RunConfig, setup: Setup, run: OpenRun) -> Beginning:
    """Raises UserError where a run is to be resumed and every checkpoint of it is damaged, or its
    adapters are of another base."""
    base_checksum = freeze_base(setup.trainer, partial(setup.initial_policy, config))
    trainer = setup.trainer
    abstract: dict[str, Any] = {"train": trainer.abstract_state}
    if trainer.has_reference:
        abstract["reference"] = trainer.abstract_params
    if (found := run.restore(abstract)) is not None:
        return _resumed(config, setup, run, found, base_checksum)
    state = trainer["init_state"](setup.initial_params(config))
    state = warm_start(config, setup, state, run.progress)
    reference = trainer["copy"](state.params) if trainer.has_reference else None
    lengths = LengthModel.empty(config.rollout.max_completion_length)
    return Beginning(0, state, reference, lengths, Totals(), base_checksum)


def _resumed(
    config: RunConfig, setup: Setup, run: OpenRun, found: Restored, base_checksum: int | None
) -> Beginning:
    step, saved, meta = found
    check_base(meta, base_checksum, config)
    before = meta.get("problems", {})  # of a checkpoint of an earlier version it is not known
    for name, checksum in setup.task.checksums.items():
        if before.get(name, checksum) != checksum:
            run.progress.print(_OTHER_PROBLEMS[name])
    lengths = LengthModel.from_json(meta["lengths"])
    lengths = lengths.with_cap(config.rollout.max_completion_length)
    size = config.rollout.prompts_per_step
    totals = Totals.from_json(meta, step, size, setup.task.train.after)
    reference = saved.get("reference")
    return Beginning(step, saved["train"], reference, lengths, totals, base_checksum)
