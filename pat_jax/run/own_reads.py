"""What models of whole processes read of a batch, once its responses have ended.

Each process reads with its own models while others read with theirs, and score with reward models.
Then all tell each other what they have found. Does not know what the columns are for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pat_jax.common.owners import is_absent, known_to_all
from pat_jax.models.kernels.row_attention import knows_branches
from pat_jax.rl.batches.packing import Shape
from pat_jax.rl.batches.types import Rollout
from pat_jax.run.early_columns import Columns
from pat_jax.run.lanes import predicted
from pat_jax.training.roles import Prediction, Roles, States


@dataclass
class OwnReads:
    """The columns of one batch of responses.

    Args:
      reads: the predictions of all models, in the same order in every process.
      shares_prompts: whether responses may share their prompt in a row.
    """

    reads: Sequence[Prediction]
    micro_shapes: Sequence[Shape]
    shares_prompts: bool = False
    columns: Columns = field(default_factory=dict)  # once all are there
    _ended: dict[int, Rollout] = field(default_factory=dict)
    _found: Columns = field(default_factory=dict)  # of this process's models, by index

    @classmethod
    def of_run(cls, roles: Roles, states: Callable[[], States]) -> "OwnReads":
        """Returns what is read of one batch of a run; `states` returns those of trained roles."""
        shared = knows_branches(roles.policy.layout.platform)
        return cls(list(roles.predictions(states)), roles.micro_shapes, shared)

    def add(self, index: int, ended: Rollout) -> None:
        """Adds the response `index`, which has ended."""
        self._ended[index] = ended

    def ask(self) -> None:
        """Reads all responses with this process's models."""
        own = [one for one in self.reads if not is_absent(one.devices)]
        in_order = [self._ended[i] for i in sorted(self._ended)]
        self._found = predicted(
            own, self.micro_shapes, in_order, shares_prompts=self.shares_prompts
        )

    def wait(self, count: int) -> None:
        """Waits for the columns that other processes have read, of all `count` responses."""
        assert len(self._ended) == count
        self.columns = {
            one.column: known_to_all(one.column, one.devices, self._found.get(one.column, ()))
            for one in self.reads
        }
