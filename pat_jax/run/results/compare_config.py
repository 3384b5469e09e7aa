"""Options of `python -m pat_jax.compare`."""

from dataclasses import dataclass

from pat_jax.common.options.declared import Options, option
from pat_jax.common.rules import GIVEN


@dataclass(frozen=True)
class CompareConfig(Options):
    """Compares runs on one page: curves in the same charts, and the options that differ. Folders
    need no --runs before them: python -m pat_jax.compare runs/first runs/second

        python -m pat_jax.compare --runs runs/first runs/second --out compared.html
    """

    runs: tuple[str, ...] = ()
    """Folders of two or more runs of train, sft or reward_model, whether they have ended or not."""
    out: str = option("compare.html", GIVEN)
    """Path of the page, one HTML file."""
