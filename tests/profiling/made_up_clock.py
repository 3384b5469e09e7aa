"""A warm-up on two devices whose times are made up."""

from pat_jax.engine.warm_up.timings import Timed
from pat_jax.engine.warm_up.warm_up import Warmup
from pat_jax.planning.types import Split

DP2, TP2 = Split(2, 1), Split(1, 2)


def made_up_step(split: Split, rows: int) -> float:
    """Eight rows are faster in two groups, four or fewer with TP."""
    return 0.1 / split.tp + 0.02 * rows


class MadeUpClock(Warmup):
    """Runs what it should, and notes times that make the plans certain."""

    def _note(self, *programs: Timed) -> None:
        super()._note(*programs)
        for table, key, *_ in programs:
            seconds = made_up_step(key[0], key[1]) if table == "decode_table" else 0.01
            self.timings.new[table][key] = seconds
