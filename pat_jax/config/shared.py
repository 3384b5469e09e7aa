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
from pat_jax.config.compute import Remat
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
    """Random seed of sampling."""
    devices: int = option(0, DEVICES)
    """Number of devices to use, in all processes together. 0 takes all devices; on a CPU, 0 gives
    each process the largest power of two of devices up to min(cores, 8)."""
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
    """auto: the planner chooses the layout, and changes it during a rollout. `dp2tp4` keeps one:
    two replicas, each with tensor parallelism over four devices. Their load is still balanced."""
    profile: str = option("auto", GIVEN)
    """The profile (measured times of steps) that the planner uses. It is a file of `python -m
    pat_jax.profile`. auto: the file for this model and these devices. none, or auto without such a
    file: a quick profile is measured during warm-up."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)


@dataclass(frozen=True)
class ChatOptions(Options):
    """Options of chat templates, which turn chats into text."""

    system_prompt: str = option("", WHOLE_TEXT)
    """System message for chats that have none."""
    chat_template_kwargs: str = option("", JSON_OBJECT)
    """Variables of the chat template, as a JSON object such as '{"enable_thinking": false}'. If a
    row sets a variable itself, the row's value is used."""

    @property
    def template_variables(self) -> Mapping[str, Any]:
        return json.loads(self.chat_template_kwargs or "{}")


@dataclass(frozen=True)
class RowOptions(ChatOptions):
    """Options of files whose rows become prompts or texts to learn from."""

    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What to do with unusable rows: broken lines, missing, empty or null values, and pairs of
    equal responses. refuse: stop at the first such row, before anything is computed. skip: leave
    them out, count them, and name the place of the first."""


@dataclass(frozen=True)
class UpdateOptions(Options):
    """How the layers of an update run."""

    remat: Remat = "auto"
    """Values of each layer that are kept for the backward pass, which recomputes all others
    (gradient checkpointing). full: only the layer's input. attention: also the output of attention,
    so that its forward kernel runs only once. dots: also the products with weights. none: all
    values. full takes the least memory, none the least computation. auto: the form with the least
    computation that fits into memory."""
    scan_layers: Literal["auto", "true", "false"] = "auto"
    """Run the layers of an update as one loop. The loop compiles in the time of one layer, but
    reads the layers' parameters from a copy in --compute_dtype. auto: true for models of at least 8
    layers, but on CPUs only in float32."""
    fsdp_size: int = option(0, DEVICES)
    """Number of devices over which parameters, gradients and optimizer state of a trained model are
    sharded; other devices have copies of these shards. If it is the number of devices of one host,
    weights are gathered inside hosts, and only gradients travel between hosts, once for each
    optimizer step (HSDP). 0 shards over all devices."""
    experts: Literal["auto", "gathered", "exchanged"] = "auto"
    """How an update brings tokens and experts together in a mixture of experts. gathered: each
    device gathers the weights of all experts of a layer, as it does for other layers. exchanged:
    tokens are sent to the devices that have their experts. auto: the way that sends less data
    (docs/models.md)."""
