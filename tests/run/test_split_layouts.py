"""How weights come to all processes from those that own the policy: a copy for each host."""

from dataclasses import replace
from typing import Any

import pytest
from fakes import FakeDevice
from runs import QWEN3, TINY

from pat_jax.common.rules import OptionError
from pat_jax.config.command_line import parse
from pat_jax.layout.mesh import padded_for
from pat_jax.run.roles.placed_layouts import PlacedLayouts
from pat_jax.run.roles.places import Places

SPLIT = [*TINY, "--algorithm", "ppo", "--placement", "split", "--algorithm.mini_batch_size", "4"]
SPLIT += ["--rollout.prompts_per_step", "96"]


def devices_of(hosts: int, processes: int, each: int) -> list[Any]:
    """So many processes of each host, with `each` devices."""
    per_host = processes * each
    return [FakeDevice(i, i // each, i // per_host) for i in range(hosts * per_host)]


@pytest.mark.parametrize(
    ("hosts", "processes", "each", "inside"),
    [(4, 1, 8, 8), (2, 2, 4, 8), (2, 8, 1, 8), (6, 1, 4, 4), (1, 4, 2, 2)],
)
def test_the_devices_of_a_host_divide_what_is_sent(
    hosts: int, processes: int, each: int, inside: int
):
    devices = devices_of(hosts, processes, each)
    model = padded_for(devices, replace(QWEN3, embed_dim=1536, num_heads=32, num_kv_heads=8))
    config = parse(SPLIT)
    places = Places.of(config, devices)
    placed = PlacedLayouts.of(model, places, config.rollout, config.layout_choice, config.fsdp_size)
    assert placed.policy.devices == {*devices[: len(devices) // 2]}
    assert {layout.devices for layout in placed.rollouts.values()} == {frozenset(devices)}
    assert placed.carriers.keys() >= placed.rollouts.keys()
    (carrier,) = {*placed.carriers.values()}
    for layout in carrier.source, carrier.target:
        assert carrier.spreads and layout.split.tp == 1
        assert layout.size(layout.fsdp_axes) == inside


def test_hosts_that_cannot_be_halved_are_refused():
    with pytest.raises(OptionError, match="split needs an even number of processes and hosts"):
        Places.of(parse(SPLIT), devices_of(3, 2, 4))
