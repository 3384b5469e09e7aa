"""Which layouts have room: as many as a run pinned to each of them has, whatever others would need."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest
from fakes import SPLITS
from runs import TINY

from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.config.run import RunConfig
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sizing.memory import engine_memory, memory_alone
from pat_jax.engine.sizing.memory_checks import layouts_without_memory
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.models.presets import PRESETS
from pat_jax.planning.memory import GIB, USABLE, MemoryModel
from pat_jax.run.start.engine_setup import build_engine
from pat_jax.run.start.setup import build
from pat_jax.training.build import DTYPES

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
LONG = [*TINY, "--devices", "8", "--run_dir", "unused", "--rollout.max_prompt_length", "64"]
LONG += ["--algorithm.tokens_per_micro_batch", "16384"]
LONG += ["--rollout.max_completion_length", "1852"]  # 5 pages of a prompt, 120 of a sequence
TO_THE_LEAST = 1 + 1e-6  # beside a limit that is exactly enough


def asked(*options: str) -> RunConfig:
    return parse([*LONG, "--roles.rest", "device", *options])


def limited(usable: float) -> tuple[str, str]:
    return "--rollout.device_memory_gib", repr(usable / USABLE / GIB)


def alone(config: RunConfig, model: ModelConfig) -> MemoryModel:
    layouts, _ = layout_chain(factored_mesh(jax.devices()), model)
    policy = Policy.from_config(model).with_weights(config.rollout.weights)
    dtype = DTYPES[config.compute_dtype]
    return memory_alone(policy, layouts, config.rollout, dtype, limit=np.inf, resident=())


def around(needs: Sequence[int]) -> Iterator[float]:
    """Limits that are just enough for each, and just not."""
    for need in needs:
        yield from (need * TO_THE_LEAST, need / TO_THE_LEAST)


def engine_of(model: ModelConfig, *options: str) -> RolloutEngine | None:
    try:
        config = asked(*options)
        return build_engine(config.engine, config.task, model, jax.devices())
    except UserError:
        return None


@pytest.mark.parametrize(
    ("kv_heads", "options"),
    [
        (8, ()),
        (1, ()),  # held by all: every layout needs as many pages
        pytest.param(
            *(8, ("--rollout.weights", "int8", "--compute_dtype", "bfloat16")),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_auto_takes_what_is_accepted_pinned(kv_heads: int, options: tuple[str, ...]):
    model = replace(PRESETS["tiny"], num_kv_heads=kv_heads)
    needs = alone(asked(*options), model)
    seen = []
    for usable in around([needs.held(split) for split in SPLITS]):
        limit = *options, *limited(usable)
        asked_for = {split: engine_of(model, *limit, "--layout", str(split)) for split in SPLITS}
        pinned = {split: engine for split, engine in asked_for.items() if engine}
        found, accepted = engine_of(model, *limit), list(pinned)
        assert (list(found.layouts) if found else []) == accepted
        seen.append(len(accepted))
        if found:
            memory = engine_memory(found.specs, asked(*limit).rollout)
            pools = [memory.pool(split) for split in accepted]
            assert len(set(pools)) == 1 and memory.held(accepted[0]) <= memory.usable
            least = memory.needed(np.array(1), np.array(64 + 1852))  # of the longest alone
            assert all(least < memory.pages[split] for split in accepted)
        if found and len(accepted) == 1:
            assert found.specs.pages == pinned[accepted[0]].specs.pages
    assert seen == [4, 3, 3, 2, 2, 1, 1, 0]


def test_a_training_run_takes_what_is_accepted_pinned():
    """Its state stays beside the rollout in every layout."""
    config = asked()
    setup = build(config, jax.devices())
    needs = alone(config, setup.policy.config)
    held = [setup.memory.resident + needs.held(split) for split in SPLITS]
    for usable, accepted in ((held[0] / TO_THE_LEAST, SPLITS[1:]), (held[2], SPLITS[2:])):
        limit = limited(usable * TO_THE_LEAST**0.5)
        found = build(asked(*limit), jax.devices())
        assert tuple(found.layouts) == accepted and found.memory.usable < held[0]
        assert set(found.trainer.programs.missing()) == {
            key
            for key in setup.trainer.programs.missing()
            if key.target is None or key.target in accepted
        }
        for split in SPLITS:
            reasons = [reason for reason in found.dropped if f"layout {split}:" in reason]
            assert len(reasons) == (split not in accepted)
            if split in accepted:
                assert list(build(asked(*limit, "--layout", str(split)), jax.devices()).layouts)
                continue
            with pytest.raises(UserError, match=f"--layout is '{split}': {split} needs"):
                build(asked(*limit, "--layout", str(split)), jax.devices())
    with pytest.raises(UserError, match=r"--layout is 'auto': dp1tp8 needs .* 124 pages of 16"):
        build(asked(*limited(held[3] / TO_THE_LEAST)), jax.devices())


def test_all_that_a_path_names_has_to_fit():
    model = replace(PRESETS["tiny"], num_kv_heads=8)
    limit = limited(alone(asked(), model).held(TP8) * TO_THE_LEAST)
    assert engine_of(model, *limit)
    config = asked(*limit, "--layout", "dp1tp8@10")
    with pytest.raises(UserError, match="--layout is 'dp1tp8@10': dp8tp1 needs"):
        build_engine(config.engine, config.task, model, jax.devices())


def test_pages_that_only_a_layout_with_room_can_do_with():
    """Fewer than dp8tp1 needs, which has no room for so many either."""
    model = replace(PRESETS["tiny"], num_kv_heads=8)
    limit = limited(alone(asked(), model).held(TP8) * 1.1)
    pages = "--rollout.kv_pages", "16"
    found = engine_of(model, *limit, *pages)
    assert found and found.specs.pages == {TP8: 8 * 16}
    assert engine_of(model, *limit, *pages, "--layout", "dp1tp8")


def test_prompts_that_begin_where_nothing_goes_on_do_not_rule_out_where_it_does():
    """The prompts of a rollout have pages in eight replicas, where the longest sequence has
    none."""
    memory = MemoryModel(
        limit=1000 / USABLE,
        resident=0,
        weights={DP8: 8, TP8: 1},
        page={DP8: 1, TP8: 1},
        pages={DP8: 995, TP8: 995},
        page_size=16,
        chunk=0,
        staging=0,
        ahead=8,
    )
    config = replace(asked().rollout, prompts_per_step=1024, num_generations=1, max_prompt_length=8)
    assert memory.starting(DP8, 1024, 8) < 1000 < memory.starting(TP8, 1024, 8)
    assert memory.held(TP8) < 1000 < memory.held(DP8)
    assert list(layouts_without_memory(memory, config)) == [DP8]
    roomy = replace(memory, limit=1200 / USABLE)
    assert list(layouts_without_memory(roomy, config)) == []
    roomy = replace(memory, limit=1010 / USABLE)
    assert list(layouts_without_memory(roomy, config)) == [
        TP8
    ]  # both go on, and only the other begins
