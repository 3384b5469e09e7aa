"""Sets the options that are `auto` until the model and the devices are known.

For a checkpoint (a directory, or a model of the Hugging Face Hub), default lengths suit real
questions and answers, and accelerators compute in bfloat16. For a built-in shape, the lengths suit
the small demonstration. Options that the user sets win. Does not know how a model is found.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from pat_jax.config.compute import Remat
from pat_jax.config.fine_tuning import FineTuning
from pat_jax.config.run import RunConfig
from pat_jax.config.shared import ComputeDtype

Options = TypeVar("Options", bound=RunConfig)
Tuning = TypeVar("Tuning", bound=FineTuning)


class Lengths(NamedTuple):
    """Numbers of tokens of the longest prompt and of the longest response."""

    prompt: int
    response: int


OF_CHECKPOINTS, OF_BUILT_IN_SHAPES = Lengths(512, 1024), Lengths(96, 160)
LONGEST_EXAMPLE = 1024  # default `--max_length` in tokens, in supervised fine-tuning


@dataclass(frozen=True)
class KnownModel:
    """The facts of a model that default options depend on."""

    name: str
    is_checkpoint: bool
    context: int  # tokens of the longest sequence it supports
    platform: str  # of the devices, such as cpu


def settled(
    config: Options, model: KnownModel, usual: Lengths | None = None
) -> tuple[Options, str]:
    """Returns the options with every `auto` settled that depends on the model. Also returns a note
    if the model's context is too short for the `usual` lengths (None: those of a run), else ""."""
    usual = usual or (OF_CHECKPOINTS if model.is_checkpoint else OF_BUILT_IN_SHAPES)
    dtype = settled_dtype(config.compute_dtype, model.platform, is_checkpoint=model.is_checkpoint)
    prompt = config.rollout.max_prompt_length
    response = config.rollout.max_completion_length
    left = {}
    if prompt is None:  # in a short context it gets at most half, and the response the rest
        room = model.context // 2 if response is None else model.context - response
        prompt = max(1, min(usual.prompt, room))
        left["max_prompt_length"] = prompt, usual.prompt
    if response is None:
        response = max(1, min(usual.response, model.context - prompt))
        left["max_completion_length"] = response, usual.response
    rollout = replace(config.rollout, max_prompt_length=prompt, max_completion_length=response)
    note = shortened(model.name, model.context, "rollout.", left)
    remat = _on_cpus(config.remat, model.platform)
    return replace(config, compute_dtype=dtype, remat=remat, rollout=rollout), note


def settled_examples(
    config: Tuning, context: int, platform: str, *, is_checkpoint: bool = True
) -> tuple[Tuning, str]:
    """Returns the options of a run that learns from files, with every `auto` settled, and the note
    that `settled` returns."""
    dtype = settled_dtype(config.compute_dtype, platform, is_checkpoint=is_checkpoint)
    config = replace(config, compute_dtype=dtype, remat=_on_cpus(config.remat, platform))
    if config.max_length is not None:
        return config, ""
    longest = min(LONGEST_EXAMPLE, context)
    note = shortened(config.model, context, "", {"max_length": (longest, LONGEST_EXAMPLE)})
    return replace(config, max_length=longest), note


def settled_dtype(asked: ComputeDtype, platform: str, *, is_checkpoint: bool) -> ComputeDtype:
    if asked != "auto":
        return asked
    return "bfloat16" if is_checkpoint and platform != "cpu" else "float32"


def _on_cpus(asked: Remat, platform: str) -> Remat:
    """Returns `none` for auto on CPUs, for which XLA compiles all forms to the same program."""
    return "none" if asked == "auto" and platform == "cpu" else asked


def shortened(name: str, context: int, section: str, lengths: Mapping[str, tuple[int, int]]) -> str:
    """Returns a note for the user if a model's context is too short for the usual lengths, else "".
    `lengths` has the settled and the usual value of each option."""
    changes = [
        f"--{section}{option} is {now:,} in place of {usual:,}"
        for option, (now, usual) in lengths.items()
        if now < usual
    ]
    if not changes:
        return ""
    return f"note: the context of {name!r} has {context:,} tokens: {', '.join(changes)}"
