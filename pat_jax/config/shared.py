"""The options that several commands share: one class for each set of them.

Knows names, units, defaults and bounds. Does not know how they are parsed (`command_line.py`) or
used. The string under a field is its help text on the command line.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.json_text import JsonError, has_lone_surrogate, parse_json
from pat_jax.common.options.declared import Options, option
from pat_jax.common.rules import DEVICES, GIVEN, LAYOUT, SEED, Rule, matches
from pat_jax.config.speculation import SpeculationConfig

ComputeDtype = Literal["auto", "float32", "bfloat16"]


def _is_object(text: str) -> bool:
    try:
        return isinstance(parse_json(text or "{}"), dict)
    except JsonError:
        return False


WHOLE_TEXT: Rule = (lambda text: not has_lone_surrogate(text), "text in UTF-8")
JSON_OBJECT: Rule = (_is_object, """a JSON object such as '{"enable_thinking": false}'""")
ONE_LAYOUT = matches(f"auto|{LAYOUT}", "auto or a layout such as dp4tp2")


@dataclass(frozen=True)
class OnDevices(Options):
    """A model, and the devices that compute with it."""

    model: str = ""
    seed: int = option(0, SEED)
    """Seed of sampling."""
    devices: int = option(0, DEVICES)
    """Devices to use, of all processes together; 0 takes all (on CPU the largest power of two up
    to min(cores, 8) in each process)."""
    compute_dtype: ComputeDtype = "auto"
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


@dataclass(frozen=True)
class LayoutChoice:
    """Which layouts rollouts may have.

    Attributes:
      layout: the only allowed layout, such as dp2tp4; auto: all are allowed.
      path: layouts in a fixed order, each with the number of running sequences to switch at.
    """

    layout: str = "auto"
    path: tuple[tuple[str, int], ...] = ()

    @property
    def option(self) -> str:
        """The option that chooses the layouts, and its value, for messages."""
        path = ",".join(f"{layout}@{running}" for layout, running in self.path)
        return f"option --layout is {path or self.layout!r}"

    @property
    def is_planned(self) -> bool:
        """Whether the planner chooses among layouts."""
        return self.layout == "auto" and not self.path


@dataclass(frozen=True)
class Planned(Options):
    """How the layouts of a rollout are chosen."""

    layout: str = option("auto", ONE_LAYOUT)
    """auto lets the planner choose the layout at every moment; `dp2tp4` pins one, whose replicas
    are still balanced."""
    profile: str = option("auto", GIVEN)
    """The profile (measured times) that the planner uses: a file of `python -m pat_jax.profile`;
    auto takes the file for this model and these devices, if any; none measures a quick profile
    while warming up."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)


@dataclass(frozen=True)
class ChatOptions(Options):
    """Options of chat templates, which turn chats into text."""

    system_prompt: str = option("", WHOLE_TEXT)
    """System message of chats that have none."""
    chat_template_kwargs: str = option("", JSON_OBJECT)
    """Variables of the chat template, a JSON object such as '{"enable_thinking": false}'; a row's
    own variables win."""

    @property
    def template_variables(self) -> Mapping[str, Any]:
        return json.loads(self.chat_template_kwargs or "{}")


@dataclass(frozen=True)
class RowOptions(ChatOptions):
    """Options of files whose rows become prompts or texts to learn from."""

    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What to do with rows that cannot be used: broken lines, missing, empty or null values, pairs
    of equal responses. refuse: stop at the first, before anything is computed; skip: leave them
    out, counted, with the place of the first."""


@dataclass(frozen=True)
class UpdateOptions(Options):
    """How the layers of an update run."""

    remat: Literal["full", "attention", "dots", "none"] = "full"
    """What the backward pass keeps of each layer; the rest is computed anew. full: only its input;
    attention: also the output of attention, so that its kernel runs forward once; dots: also the
    products with weights; none: everything. full takes the least memory, none the least
    arithmetic."""
    scan_layers: Literal["auto", "true", "false"] = "auto"
    """Run the layers of an update as a loop, which compiles in the time of one layer but reads
    their parameters from a copy in compute_dtype. auto: on TPUs, and on CPUs in float32, for models
    of at least 8 layers."""
    fsdp_size: int = option(0, DEVICES)
    """Devices over which parameters, gradients and optimizer state of a trained model are divided;
    others have copies of these parts. With as many as a host has, weights are gathered inside
    hosts, and only gradients travel between them, once for each optimizer step (HSDP). 0 divides
    them over all devices."""
    experts: Literal["auto", "gathered", "exchanged"] = "auto"
    """How an update brings tokens and experts together. gathered: each device gathers the weights
    of all experts of a layer, as for other layers; exchanged: tokens are sent to the devices of
    their experts; auto: the one that sends less (docs/models.md)."""
