"""Which layouts a run may use on several hosts."""

from dataclasses import replace

import jax
import pytest
from fakes import SPLITS, fake_devices, made_up_latency
from runs import TINY

from pat_jax.config.command_line import parse
from pat_jax.engine.sizing.layout_choice import within_hosts, worth_planning
from pat_jax.layout import layout
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.presets import PRESETS
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.memory import USABLE, MemoryModel
from pat_jax.planning.types import Split
from pat_jax.run.start.setup import build

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
EVERYWHERE = {DP8: 0.4, DP4TP2: 0.3, DP2TP4: 0.2, TP8: 0.1}


def latency(step: dict[Split, float]) -> LatencyModel:
    return made_up_latency(step, dict.fromkeys(step, 0.0), reshard=0.1, migrate_per_token=1e-4)


def chain_of(*per_host: int) -> dict[Split, Layout]:
    config = replace(PRESETS["tiny"], num_heads=8, num_kv_heads=8)
    return layout_chain(factored_mesh(fake_devices(*per_host)), config)[0]


def test_layouts_inside_a_host_need_no_proof():
    chain = chain_of(8)
    assert within_hosts(chain, None) == (chain, [])


@pytest.mark.parametrize(
    "known, reason",
    [
        (None, "no profile has times of it"),
        (latency({DP8: 0.4, DP2TP4: 0.2}), "python -m pat_jax.profile measures it"),
        (latency(EVERYWHERE | {TP8: 0.3}), "no decode step of it is faster than one of dp2tp4"),
    ],
)
def test_what_is_not_shown_to_pay_is_left_out(known, reason):
    layouts, dropped = within_hosts(chain_of(4, 4), known)
    assert list(layouts) == [DP8, DP4TP2, DP2TP4]
    assert len(dropped) == 1 and dropped[0].startswith("layout dp1tp8: its TP crosses hosts")
    assert reason in dropped[0]


def test_what_was_measured_to_pay_stays_in_its_place():
    layouts, dropped = within_hosts(chain_of(4, 4), latency(EVERYWHERE))
    assert list(layouts) == list(SPLITS) and dropped == []


@pytest.mark.parametrize(
    "limit, kept",
    [
        (1000, [DP8, DP4TP2, DP2TP4]),  # 800 bytes of weights in DP8
        (500, [DP4TP2, DP2TP4]),
        (190, [TP8]),  # 200 in DP2TP4
    ],
)
def test_a_layout_across_hosts_is_used_where_only_it_has_room(limit, kept):
    config = parse([*TINY, "--devices", "8", "--run_dir", "unused"])
    memory = MemoryModel(
        limit=limit / USABLE,
        resident=0,
        weights={split: 800 // split.tp for split in SPLITS},
        page=dict.fromkeys(SPLITS, 0),
        pages=dict.fromkeys(SPLITS, 100),
        page_size=16,
        chunk=1,
        staging=0,
        ahead=8,
    )
    layouts, dropped = worth_planning(config.rollout, chain_of(4, 4), memory, None)
    assert list(layouts) == kept and len(dropped) == 4 - len(kept)


def test_a_run_on_two_hosts_says_what_it_leaves_out(monkeypatch):
    monkeypatch.setattr(layout, "hosts_of", lambda devices: [device.id // 4 for device in devices])
    options = [*TINY, "--devices", "8", "--run_dir", "unused"]
    setup = build(parse(options), jax.devices())
    assert TP8 not in setup.layouts and DP2TP4 in setup.layouts
    assert any("dp1tp8: its TP crosses hosts" in reason for reason in setup.dropped)
    pinned = build(parse([*options, "--layout", "dp1tp8"]), jax.devices())
    assert list(pinned.layouts) == [TP8]
    assert pinned.scripted is None, "planned by cost, which keeps its replicas even"
