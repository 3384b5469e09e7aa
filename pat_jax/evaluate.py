"""`python -m pat_jax.evaluate`: pass@k and mean reward of a model, with intervals.

All samples of all files go through one session of the engine. Each sample is scored as soon as it
ends, by `run/evaluation.py`, which training runs use too.
"""

import sys
from functools import partial

from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import parse
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.evaluation.options import options_of_evaluation

read = partial(parse, config_class=EvaluateConfig, prog="python -m pat_jax.evaluate", presets=None)


def main() -> None:
    config = options_of_evaluation(sys.argv[1:], read)
    from pat_jax.commands.evaluate import evaluate  # and JAX, once the options are right

    evaluate(config)


if __name__ == "__main__":
    run_command(main)
