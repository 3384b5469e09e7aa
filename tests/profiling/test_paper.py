"""What fits devices that are not there, against weights and caches by plain arithmetic."""

from dataclasses import replace

import pytest

from pat_jax.errors import UserError
from pat_jax.models.presets import preset
from pat_jax.plan import PlanConfig
from pat_jax.profiling.absent_jobs import Order
from pat_jax.profiling.paper import check_room, has_room, larger, on_paper, what_fits
from pat_jax.profiling.targets import Target

GIB = 2**30
PARAMETERS = {"llama-3.1-8b": 8.030e9, "qwen3-14b": 14.77e9}
KV_BYTES = {"llama-3.1-8b": 128 * 1024, "qwen3-14b": 160 * 1024}  # of a token, bfloat16


def order(model: str = "llama-3.1-8b", target: str = "h100:8", **options) -> Order:
    config = PlanConfig(model=model, target=target, **options)
    machine = Target.parse(target)
    return Order.of(machine, config.run(machine), preset(model), (2, 4))


@pytest.mark.parametrize("model", PARAMETERS)
def test_memory_is_weights_and_cache_by_arithmetic(model: str):
    plant = on_paper(order(model))
    memory = plant.memory
    assert memory.resident == pytest.approx(3 * 4 * PARAMETERS[model] / 8, rel=0.05)
    for split in plant.layouts:
        assert memory.weights[split] == pytest.approx(2 * PARAMETERS[model] / split.tp, rel=0.05)
        kv_of_a_token = memory.page[split] / memory.page_size
        assert kv_of_a_token == pytest.approx(KV_BYTES[model] / split.tp)
        assert memory.held(split) <= memory.usable
    # All layouts share what the heaviest leaves.
    assert len({memory.pool(split) for split in plant.layouts}) == 1


def test_layouts_across_hosts_are_known_as_such():
    plant = on_paper(order(target="h100:8x2"))
    crossing = [str(s) for s, layout in plant.layouts.items() if layout.crosses_hosts]
    assert crossing == ["dp1tp16"]


def test_a_model_too_large_says_by_how_much_and_what_would_fit():
    large = on_paper(order("llama-3.1-70b", "h100:8"))
    with pytest.raises(UserError) as caught:
        check_room(large, "llama-3.1-70b")
    message = str(caught.value)
    assert "'llama-3.1-70b': no layout fits h100:8; dp1tp8, the smallest, needs" in message
    memory = large.memory
    best = min(memory.weights, key=memory.held)
    assert f"{(memory.held(best) - memory.usable) / GIB:.3g} GiB more than" in message
    assert message.endswith("would fit.")


def test_what_is_said_to_fit_does():
    too_large = order("llama-3.1-70b", "h100:8")
    words = next(what_fits(too_large))
    assert words.startswith("--train false")
    alone = replace(too_large, config=replace(too_large.config, train=False))
    assert has_room(on_paper(alone))
    more = [text for text in what_fits(too_large) if text.startswith("h100:8x")]
    assert more and has_room(on_paper(order("llama-3.1-70b", more[0])))
    hosts = int(more[0].rpartition("x")[2])
    assert not has_room(on_paper(order("llama-3.1-70b", f"h100:8x{hosts // 2}")))


def test_larger_machines_grow():
    for text in ("h100:8", "v5e:2x4", "v5p:2x2x2"):
        target = Target.parse(text)
        grown = list(larger(target))
        assert grown
        for machine in grown:
            assert machine.chip.platform == target.chip.platform
            more_memory = machine.chip.memory_bytes > target.chip.memory_bytes
            assert more_memory or machine.num_devices > target.num_devices
        counts = [m.num_devices for m in grown if m.chip == target.chip]
        assert counts == sorted(counts) and counts[-1] == 1024
