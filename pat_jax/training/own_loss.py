"""Finds the loss of `--algorithm.loss`, a class of the user's own, and tries it out before the run.

Knows the columns that a run has. Does not know models, devices or data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np

from pat_jax.common.devices import CACHE_DIR
from pat_jax.common.errors import UserError
from pat_jax.common.rules import OptionError, require
from pat_jax.config.algorithms import ALGORITHMS
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.rl.algorithm.losses import ENTROPY, LOGPROBS, TEACHER_KL, Columns, Loss
from pat_jax.rl.own_code import check_sent, module_of, source_of

LOSSES = CACHE_DIR.parent / "losses"  # folder of loss classes that this user's programs passed on
_OPTION = "algorithm.loss"
_BASE = "pat_jax.rl.algorithm.losses.Loss (examples/loss.py shows one)"
# Columns that only some runs have, and the options that give them.
_COMES_WITH: Mapping[str, str] = {
    "reference_logprobs": "--algorithm.beta above 0",
    "teacher_logprobs": "--teacher.model, but not --teacher.top_k",
    "returns": "--algorithm.baseline critic",
    "old_values": "--algorithm.baseline critic",
}
# Options of the loss that is replaced. A class can read them in its `of`.
_REPLACED = [
    "ratio",
    "surrogate",
    "epsilon",
    "epsilon_high",
    "delta",
    "use_bias_correction_kl",
    "entropy_coef",
    "rollout_correction",
    "rollout_correction_cap",
]


def own_loss(algorithm: AlgorithmConfig, columns: Sequence[str], teacher_top_k: int) -> Loss:
    """Returns the loss that `--algorithm.loss` names. Raises UserError if it names no loss, or one
    that this run cannot compute.

    Args:
      columns: names of the run's per-token arrays that a loss may read.
      teacher_top_k: `--teacher.top_k`.
    """
    loss = _found(algorithm)
    name = type(loss).__name__
    if missing := [each for each in loss.needs if each not in columns]:
        found = [
            f"{each} (with {_COMES_WITH[each]})" if each in _COMES_WITH else each
            for each in missing
        ]
        expected = f"a loss whose `needs` are columns of this run ({', '.join(columns)}), but {name} needs "
        raise OptionError(_OPTION, algorithm.loss, expected + ", ".join(found))
    predicted = [LOGPROBS, ENTROPY, *([TEACHER_KL] if teacher_top_k else ())]
    if unknown := [each for each in loss.predicted if each not in predicted]:
        expected = f"a loss of what the policy predicts ({', '.join(predicted)}), but {name} reads "
        raise OptionError(_OPTION, algorithm.loss, f"{expected}{', '.join(unknown)}")
    reads = f"{loss.teacher_top_k} with a loss whose `teacher_top_k` is {loss.teacher_top_k}"
    require(loss.teacher_top_k == teacher_top_k, "teacher.top_k", teacher_top_k, reads)
    _try_out(loss, algorithm.loss)
    return loss


def _found(algorithm: AlgorithmConfig) -> Loss:
    """Imports the class that the option names, and returns a loss of it."""
    spec = algorithm.loss
    check_sent(_OPTION, spec, LOSSES)
    source = source_of(spec)
    name = spec.rpartition(":")[2]
    if not source or not name:
        raise OptionError(_OPTION, spec, "path/to/file.py:Class or module:Class")
    module = module_of(source, f"option --{_OPTION} is {spec!r}", suffix="_of_loss")
    found = getattr(module, name, None)
    reads_options = False
    if isinstance(found, type) and issubclass(found, Loss):
        reads_options = hasattr(found, "of")
        found = _made(found, algorithm)
    if not isinstance(found, Loss):
        there = f"{name} there is a {type(found).__name__}" if found else f"there is no {name}"
        raise OptionError(_OPTION, spec, f"a class derived from {_BASE}, but {there}")
    if not reads_options:
        _check_replaced(algorithm, type(found).__name__)
    return found


def _made(kind: type, algorithm: AlgorithmConfig) -> object:
    of = getattr(kind, "of", None)
    try:
        return of(algorithm) if of else kind()
    except Exception as error:  # code of the user may raise anything
        how = f"{kind.__name__}.of(algorithm)" if of else f"{kind.__name__}()"
        raise UserError(
            f"option --{_OPTION} is {algorithm.loss!r}: {how} raised {type(error).__name__} ({error}): expected "
            "a class that defines `metrics`, `needs` and `values`, and whose fields have defaults or that has a "
            "class method `of(algorithm)`."
        ) from error


def _check_replaced(algorithm: AlgorithmConfig, name: str) -> None:
    """Raises OptionError if an option is set that only the replaced loss would have read."""
    usual = {**asdict(AlgorithmConfig()), **ALGORITHMS[algorithm.name]}
    for option in _REPLACED:
        value = getattr(algorithm, option)
        expected = f"{usual[option]} with --{_OPTION}, unless {name} reads it in a class method `of(algorithm)`"
        require(value == usual[option], f"algorithm.{option}", value, expected)


def _try_out(loss: Loss, spec: str) -> None:
    """Computes the loss and its gradient for two rows of made-up tokens."""
    name = type(loss).__name__
    shape = (2, 8)
    values = jnp.linspace(0.1, 2.0, 16, dtype=jnp.float32).reshape(shape)
    predicted = {each: -values if each == LOGPROBS else values for each in loss.predicted}
    columns = {each: -values if each.endswith(LOGPROBS) else values - 1 for each in loss.needs}
    weights = jnp.array([[0.1] * 6 + [0.0] * 2] * 2, jnp.float32)
    responses = jnp.array([[1] * 3 + [2] * 3 + [0] * 2] * 2, jnp.int32)

    def of(predicted: Columns) -> jax.Array:
        value, sums = loss(predicted, columns, weights, responses)
        return loss.add(loss.zero_sums(), sums)["loss"] + value

    try:
        hash(loss)
        gradients = jax.jit(jax.grad(of))(predicted)
    except Exception as error:  # code of the user may raise anything
        raise UserError(
            f"option --{_OPTION} is {spec!r}: {name} raised {type(error).__name__} ({error}) for two rows of "
            "made-up tokens: expected a frozen dataclass whose `values` returns an array of one number "
            "per token for each name in `metrics`, one of which is loss."
        ) from error
    if np.any(gradients.get(ENTROPY, 0)) and not loss.has_entropy_gradient:
        raise OptionError(_OPTION, spec, f"`has_entropy_gradient` of {name} to be True")
