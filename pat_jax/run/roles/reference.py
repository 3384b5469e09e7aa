"""The frozen reference of a run: taken from the policy at the start, or from the run's folder."""

from pat_jax.rl.algorithm.update import TrainState
from pat_jax.run.checkpoints.reference import read_reference, save_reference
from pat_jax.training.roles import REFERENCE, Roles


def begin_reference(roles: Roles, run_dir: str, state: TrainState) -> None:
    """Gives the reference, if there is one, the parameters of `state`, and saves them."""
    if (reference := roles.readers.get(REFERENCE)) is not None:
        reference.take(state.params)
        save_reference(run_dir, reference.params)


def resume_reference(roles: Roles, run_dir: str, step: int) -> None:
    """Reads the reference of a resumed run, if it has one.

    Args:
      step: of the checkpoint that it goes on from.

    Raises:
      UserError: it cannot be read.
    """
    if (reference := roles.readers.get(REFERENCE)) is not None:
        reference.params = read_reference(run_dir, step, reference.abstract_params)
