"""After the warm-up nothing is compiled: rollouts with switches, updates and transfers."""

import jax
import jax.numpy as jnp
import pytest
from compilations import counted_compilations
from fakes import SETTINGS, subject
from iterations import Iterations
from restless import Restless

from pat_jax.engine.sequences.responses import Request
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.planner.scripts import FixedLayout, ScriptedPath, Step
from pat_jax.planning.types import RECOMPUTE_ALL, Split
from pat_jax.rl.batches.types import Prompt
from pat_jax.run.generation import EVAL, sampling_request

pytestmark = pytest.mark.timeout(1500)
LAYOUTS = DP8, DP4TP2, TP8 = Split(8, 1), Split(4, 2), Split(1, 8)  # those of "kv2"


def test_the_counter_counts():
    function, x = jax.jit(lambda x: x * 3 + 1), jnp.arange(5.0)
    for count in (1, 0):
        with counted_compilations() as events:
            function(x)
        assert len(events) == count


def held_out(prompt: Prompt, sample: int) -> Request:
    config = SETTINGS["kv2"].rollout
    return sampling_request(config, prompt, (5, EVAL, 0, prompt.id, sample), 0.7)


@pytest.fixture(scope="module")
def warm() -> Iterations:
    return Iterations(subject("kv2"))


def test_iterations_compile_nothing(warm):
    up = ScriptedPath(DP8, (Step(DP4TP2, 13), Step(TP8, 7)))
    down = ScriptedPath(TP8, (Step(DP4TP2, 12), Step(DP8, 6, 20)))
    there_and_back = ScriptedPath(
        DP4TP2, (Step(TP8, 14, RECOMPUTE_ALL), Step(DP8, 9, RECOMPUTE_ALL))
    )
    paths = []
    with counted_compilations() as events:
        paths.append(warm.iterate(0, FixedLayout(DP8)))
        paths.append(warm.iterate(1, up, temperature=1.0, top_k=5))
        paths.append(warm.iterate(2, down, temperature=1.3, top_k=0, top_p=0.9))
        paths.append(warm.iterate(3, there_and_back, temperature=1.0, top_k=3, top_p=0.8))
    assert events == []
    assert paths == [
        [],
        ["dp8tp1", "dp4tp2", "dp1tp8"],
        ["dp1tp8", "dp4tp2", "dp8tp1"],
        ["dp4tp2", "dp1tp8", "dp8tp1"],
    ]


@pytest.mark.slow  # an engine of its own
def test_iterations_that_train_adapters_compile_nothing():
    """And the policy arrives with what the adapters have learned, beside its weights in each layout."""
    adapted = Iterations(subject("kv2", lora_rank=4), has_adapters=True)
    before = jax.device_get(adapted.state.params)
    with counted_compilations() as events:
        for step in range(2):
            adapted.iterate(step, ScriptedPath(DP8, (Step(DP4TP2, 12), Step(TP8, 4))))
    assert events == []
    after = jax.device_get(adapted.state.params)
    assert all((after[name].b != before[name].b).any() for name in before)


def test_moves_between_groups_compile_nothing(warm):
    with counted_compilations() as events:
        for step, split in enumerate((DP8, DP4TP2)):
            planner = Restless(split)
            warm.iterate(10 + step, planner, temperature=1.0)
            assert len(planner.moved) > 2
    assert events == []


def test_planning_by_the_measured_costs_compiles_nothing(warm):
    with counted_compilations() as events:
        planner = CostModelPlanner(LAYOUTS, warm.latency, warm.generator.lengths)
        warm.iterate(4, planner, temperature=1.0)
        prompts = [Prompt(i, (3, 4, 5)[: 1 + i % 3], "", {}) for i in range(20)]
        asked = [held_out(prompt, sample) for prompt in prompts for sample in range(3)]
        assert len(list(warm.generator.evaluate(asked))) == 60
    assert events == []


def test_lengths_are_learned_by_prompt_from_training_rollouts_only(warm, monkeypatch):
    asked = []
    stream = warm.engine.stream

    def spy(requests, *args, **options):
        asked.append({request.prompt_id for request in requests})
        return stream(requests, *args, **options)

    monkeypatch.setattr(warm.engine, "stream", spy)
    warm.iterate(5, FixedLayout(DP8), temperature=1.0)
    learned = warm.generator.lengths
    assert learned.prompts.prompt.tolist() == [0, 1, 2, 3] and (learned.prompts.mean > 0).all()
    assert list(warm.generator.evaluate([held_out(Prompt(2, (3, 4), "", {}), 0)]))
    assert warm.generator.lengths is learned
    # Prompt 2 of the held-out ones is another; in between the transfer was checked.
    assert asked == [{0, 1, 2, 3}, {None}, {None}]
