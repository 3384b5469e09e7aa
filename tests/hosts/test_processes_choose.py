"""`train --placement auto` on several processes: the first one chooses, and each is cut alike."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from joined import companies, in_each

from pat_jax.commands.auto_placement import chosen_placement
from pat_jax.common.devices import Device
from pat_jax.common.hosts import together
from pat_jax.common.hosts.together import ProcessGroup
from pat_jax.config.command_line import parse
from pat_jax.config.placement import PlacementConfig
from pat_jax.config.run import RunConfig
from pat_jax.profiling.capacity.placing import Placing
from pat_jax.profiling.placement.candidates import Candidate
from pat_jax.profiling.placement.priced import Priced
from pat_jax.profiling.predict.targets import PaperDevice
from pat_jax.run.start.chosen_placement import ChosenPlacement
from pat_jax.run.start.places import Places

H100 = "NVIDIA H100 80GB HBM3"
TINY = """
    --model tiny --placement auto --compute_dtype bfloat16 --speculation.source none
    --rollout.prompts_per_step 16 --rollout.num_generations 4 --algorithm.mini_batch_size 16
    --rollout.max_prompt_length 1024 --rollout.max_completion_length 3072
"""


@dataclass(frozen=True)
class HostDevice(PaperDevice):
    """A device that says on which host it is."""

    slice_index: int = 0


def devices_of(*sizes: int, per_host: int, platform: str = "gpu") -> Sequence[Device]:
    """Devices of several processes, one after the other, and so many on each host."""
    owners = [owner for owner, size in enumerate(sizes) for _ in range(size)]
    made_of = {"platform": platform, "device_kind": H100}
    found = [HostDevice(i, x, slice_index=i // per_host, **made_of) for i, x in enumerate(owners)]
    return [cast("Device", each) for each in found]


def config_of(*options: str) -> RunConfig:
    return parse([*TINY.split(), *options])


class NoGroup(ProcessGroup):
    """In place of the run's processes: what one of them prices must not wait for others."""

    def agree(self, name: str, make: Any) -> Any:
        raise AssertionError(f"the processes are to agree on {name}")

    def gather(self, name: str, value: Any, *, trouble: str = "") -> Any:
        raise AssertionError(f"the processes are to gather {name}")


@pytest.mark.parametrize("per_host", [2, 4])  # processes on two hosts, or on one
def test_all_processes_take_what_the_first_chooses(
    ended, per_host: int, monkeypatch: pytest.MonkeyPatch
):
    """Were flatten ten times as slow as it is."""
    priced, asked_for = Placing.priced, []

    def without_flatten(self: Placing, one: Candidate, **how: bool) -> Priced:
        found = priced(self, one, **how)
        asked_for.append(str(self.question.build.order.target))
        slower = one.placement.is_flat and found.seconds
        return replace(found, seconds=10 * slower) if slower else found

    monkeypatch.setattr(Placing, "priced", without_flatten)
    devices = devices_of(2, 2, per_host=per_host)
    group = "--distributed.coordinator", "h:1", "--distributed.num_processes", "2"
    asked = [config_of(*group, "--distributed.process_id", str(i)) for i in range(2)]

    def choose(us: ProcessGroup) -> ChosenPlacement:
        return chosen_placement(asked[us.index], devices, us)

    with companies(2) as found:
        monkeypatch.setattr(together, "_process_group", NoGroup())
        chosen = in_each(found, choose)
    assert {*asked_for} == {"h100:2x2" if per_host == 2 else "h100:4"}
    first = chosen[0]
    for config, one in zip(asked, chosen, strict=True):
        place, roles = PlacementConfig("separate", "gradients"), first.config.roles
        assert one == replace(first, config=replace(config, placement=place, roles=roles))
    assert "separate, gradients: an iteration is predicted to be" in first.reason
    places = Places.of(first.config, devices)
    assert [each.id for each in places["rollout"]] == [0, 2]
    assert [each.id for each in places["policy"]] == [1, 3]
    assert ended == []


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        (devices_of(1, 1, per_host=1), "each of the 2 processes has one device, for all models."),
        (devices_of(3, 1, per_host=4), "the 2 processes have different numbers of devices."),
        (
            devices_of(4, 4, per_host=8, platform="tpu"),
            "a TPU slice is priced for one process, and there are 2.",
        ),
    ],
)
def test_processes_for_which_nothing_is_priced_leave_flatten(
    devices: Sequence[Device], reason: str
):
    chosen = chosen_placement(config_of(), devices)
    assert chosen.reason == f"flatten: {reason}"
    assert chosen.config.placement == PlacementConfig() and not chosen.table
