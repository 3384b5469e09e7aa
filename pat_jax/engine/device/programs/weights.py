"""The rollout's copy of the policy's weights, in one layout at a time."""

import jax
import numpy as np

from pat_jax.engine.device.pages import reshard as reshard
from pat_jax.engine.device.programs.program_specs import ProgramSpecs
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params
from pat_jax.programs.programs import Key, ProgramTable


class Weights:
    """The policy's weights, sharded for one layout; `reshard` changes the layout."""

    def __init__(
        self,
        specs: ProgramSpecs,
        programs: ProgramTable,
        params: Params,
        layout: Layout,
        exit_head: np.ndarray | None = None,
    ):
        """Takes over `params`, already sharded for `layout`, and deletes them.

        Args:
          exit_head: float[embed, embed], if the policy's first layers propose drafts; None stands
            for zeros.
        """
        self.specs = specs
        self.programs = programs
        self.params = params
        self.layout = layout
        self.exit_head = specs.drafter.learned(layout, specs.draft_shapes, exit_head)

    def reshard(self, target: Layout) -> tuple[int, int]:
        """Reshards the weights to `target`.

        Returns:
          The bytes sent between devices, and the most that one device held besides its old shards.
        """
        plan = self.specs.reshard(self.layout, target)
        if plan.is_on_host:
            shardings = target.param_shardings(self.specs.functions.policy)
            leaves = [leaf for (leaf,) in plan.runs]
            self.params = reshard.reshard_on_host(self.params, shardings, leaves)
        else:
            programs = [
                self.programs[Key("reshard", self.layout.split, target=target.split, part=part)]
                for part in plan.parts
            ]
            self.params = reshard.reshard(self.params, plan.runs, programs)
        self.layout = target
        return plan.sent_bytes, plan.extra_bytes

    def delete(self) -> None:
        """Frees the memory of the weights."""
        for leaf in jax.tree.leaves((self.params, self.exit_head)):
            leaf.delete()
