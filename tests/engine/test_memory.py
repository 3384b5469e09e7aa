"""What the parts of a run take of a device, against arrays that are really there."""

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import SPLITS
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from runs import TINY

from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.engine.device.draft.draft_model import ModelDrafter
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.engine.device.draft.generated import EarlyExit
from pat_jax.engine.device.draft.text_drafter import TextDrafter
from pat_jax.engine.device.programs.decode import DecodeFunctions
from pat_jax.engine.device.programs.program_specs import ProgramSpecs
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sizing.device_memory import cache_limit, memory_limit
from pat_jax.engine.sizing.draft_memory import draft_bytes
from pat_jax.engine.sizing.memory import (
    kv_bytes,
    memory_alone,
    memory_model,
    most_at_once,
)
from pat_jax.engine.sizing.memory_checks import check_memory
from pat_jax.layout.buckets import Buckets, Drafts
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import shard_bytes
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.policy import Policy
from pat_jax.models.presets import PRESETS
from pat_jax.planning.memory import GIB, DraftBytes
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key, ProgramTable
from pat_jax.run.start.setup import Setup, build
from tests.bucket_limits import BucketLimits

OPTIONS = [*TINY, "--devices", "8", "--run_dir", "unused"]


@cache
def setup(*options: str) -> Setup:
    return build(parse([*OPTIONS, *options]), jax.devices())


def on_first_device(tree: object) -> int:
    """Bytes of the shards that lie on device 0."""
    return sum(
        shard.data.nbytes
        for x in jax.tree.leaves(tree)
        for shard in x.addressable_shards
        if shard.device == jax.devices()[0]
    )


@pytest.fixture(scope="module", params=["auto", "int8", "fp8"])
def engine(request: pytest.FixtureRequest) -> RolloutEngine:
    """Two KV heads: replicated beyond TP 2."""
    policy = Policy.from_config(replace(PRESETS["tiny"], vocab_size=61, num_kv_heads=2))
    policy = policy.with_weights(request.param)
    config = parse(OPTIONS).rollout
    return RolloutEngine(policy, jax.devices(), config, capacity=32, eos_ids=(0,))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_bytes_are_those_of_real_shards(engine: RolloutEngine, split):
    config = parse(OPTIONS).rollout
    memory = memory_model(engine.specs, config, limit=math.inf, resident=())
    layout, policy = engine.layouts[split], engine.policy
    shards = layout.param_shardings(policy)
    weights = jax.tree.map(
        lambda x, sharding: jax.device_put(np.zeros(x.shape, x.dtype), sharding),
        policy.abstract(jnp.float32),
        shards,
    )
    assert memory.weights[split] == on_first_device(weights)
    shape = engine.specs.pool(layout)
    pool = jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), shape)
    assert memory.pool(split) == on_first_device(pool) == shard_bytes(shape)
    assert memory.pool(split) == memory.pool(SPLITS[0])  # the same in every layout
    dtype, layouts = jnp.dtype("float32"), engine.layouts
    alone = memory_alone(policy, layouts, config, dtype, limit=math.inf, resident=())
    assert (alone.weights, alone.page) == (memory.weights, memory.page)
    assert math.isinf(memory.limit)


def test_training_state_stays_beside_the_rollout():
    done = setup("--algorithm.beta", "0.1")
    params = done.trainer.trained.init(0)
    state = done.trainer.abstract_state
    without = setup().memory.resident
    assert done.memory.resident == shard_bytes(state) + on_first_device(params)
    assert without == shard_bytes(state) >= 3 * on_first_device(params)


class FakeDevice:
    """Of one process, with a figure of its memory or none."""

    process_index = 0

    def __init__(self, **stats: int):
        self.stats = stats

    def memory_stats(self):
        return self.stats or None


def test_the_limit_is_the_smallest_of_the_devices_or_the_option():
    assert memory_limit(0.0, [FakeDevice(bytes_limit=n, num_allocs=1) for n in (5, 3)]) == 3
    assert memory_limit(0.0, [FakeDevice()]) == math.inf == memory_limit(0.0, jax.devices())
    assert memory_limit(2.0, [FakeDevice(bytes_limit=5)]) == 2 * GIB


def test_caches_of_a_cpu_are_sized_by_the_memory_of_the_machine(monkeypatch):
    asked, devices = parse(OPTIONS), jax.devices()
    whole = setup().engine.specs.pages
    full = setup().memory.pool(SPLITS[0])
    for share, is_whole in ((1000 * full, True), (full // 2, False)):
        # The weights and what is trained are beside the pool, a tenth of the device is left.
        held = setup().memory.held(SPLITS[0]) - full
        memory = 4 * len(devices) * (held + share) / 0.9
        monkeypatch.setattr(
            "pat_jax.engine.sizing.device_memory.machine_memory", lambda memory=memory: memory
        )
        limit = cache_limit(asked.rollout.device_memory_gib, devices)
        assert limit == memory / 4 / len(devices)
        pages = build(asked, devices).engine.specs.pages
        assert (pages == whole) == is_whole
        assert all(0 < pages[split] <= whole[split] for split in whole)
    assert cache_limit(2.0, devices) == 2 * GIB


def test_a_cpu_runs_as_many_sequences_as_copies_of_their_caches_fit(monkeypatch):
    devices, engine, wanted = jax.devices(), setup().engine, 64
    config = replace(parse(OPTIONS).rollout, prompts_per_step=8, num_generations=8)
    made_of = engine.policy, engine.layouts, config, jnp.dtype("float32"), devices
    one = engine.specs.buckets.lengths[-1] * engine.policy.config.kv_bytes_per_token
    for sequences, expected in ((4 * wanted, wanted), (2, max(s.dp for s in engine.layouts))):
        memory = 4 * len(devices) * sequences * one
        monkeypatch.setattr(
            "pat_jax.engine.sizing.device_memory.machine_memory", lambda memory=memory: memory
        )
        assert most_at_once(*made_of) == expected
    on_gpu = [SimpleNamespace(platform="gpu")]
    assert most_at_once(*made_of[:-1], cast(Any, on_gpu)) == wanted


def test_arrays_of_other_devices_are_not_added_up():
    def of(devices: slice, rows: int) -> jax.ShapeDtypeStruct:
        split = NamedSharding(Mesh(np.array(jax.devices()[devices]), ("x",)), PartitionSpec("x"))
        return jax.ShapeDtypeStruct((rows, 2), jnp.float32, sharding=split)

    first, second, every = of(slice(0, 4), 16), of(slice(4, 8), 24), of(slice(0, 8), 8)
    assert [shard_bytes(x) for x in (first, second, every)] == [32, 48, 8]
    assert shard_bytes([first, second, every]) == 48 + 8
    assert shard_bytes([first, first, every]) == 2 * 32 + 8 and shard_bytes([]) == 0


# --- bursts with drafts, against their compiled programs ------------------------------------------

DTYPE = jnp.dtype("float32")
DRAFTS = Drafts(num_draft_tokens=(7,), longest=7, most_tokens=64, texts=4)
DRAFTER = TextDrafter(DRAFTS)


def specs_of(vocab_size: int, length: int) -> ProgramSpecs:
    policy = Policy.from_config(replace(PRESETS["tiny"], num_layers=1, vocab_size=vocab_size))
    layouts, _ = layout_chain(factored_mesh(jax.devices()[:2]), policy.config)
    buckets = Buckets.of(tuple(layouts), 8, BucketLimits(4, length, length))
    functions = DecodeFunctions(policy, DTYPE, (0,), 4, 8, 0, DRAFTER)
    whole = 1 + 4 * length // 16  # of all rows at full length
    pages = {split: whole * layout.size(layout.kv_axes) for split, layout in layouts.items()}
    return ProgramSpecs(functions, layouts, buckets, 16, pages, 8)


def bytes_of(specs: ProgramSpecs, drafter: Drafter = DRAFTER) -> dict[Split, DraftBytes]:
    return draft_bytes(specs.layouts, specs.draft_shapes, drafter)


@pytest.mark.parametrize(
    ("vocab_size", "length"), [pytest.param(8192, 256, marks=pytest.mark.slow), (64, 1024)]
)
def test_it_is_what_compiled_programs_take_more_than_those_without_drafts(vocab_size, length):
    """Where logits are most of it, and where the scores of a CPU's attention are."""
    specs, table = specs_of(vocab_size, length), ProgramTable()
    specs.declare(table)
    layout = next(iter(specs.layouts.values()))
    sizes = []
    for num_draft_tokens in (0, 7):
        compiled = table.lower(
            Key("decode", layout.split, 4, length, num_draft_tokens=num_draft_tokens)
        ).compile()
        found = compiled.memory_analysis()
        assert found is not None
        sizes.append((found.argument_size_in_bytes, found.temp_size_in_bytes))
    (arguments, temporaries), (more_arguments, more_temporaries) = sizes
    predicted = bytes_of(specs)[layout.split]
    texts, steps = more_arguments - arguments, more_temporaries - temporaries
    # How likely runs are right, and more reserved pages.
    assert predicted.source == 4 * 4 * (5 * length + 8 + 3 + 2)
    assert 0 <= texts - predicted.source < 4096
    assert 0.98 * steps <= predicted.steps <= 1.5 * steps


def test_a_model_that_says_drafts_is_counted_with_its_cache_and_a_head_of_layers_too():
    specs = specs_of(64, 256)
    own, texts = specs.functions.policy, bytes_of(specs)
    model = own.config
    by_layers = bytes_of(specs, EarlyExit(replace(DRAFTS, exit_layer=1, texts=0)))
    by_model = bytes_of(specs, ModelDrafter(replace(DRAFTS, has_model=True), own))
    weights = sum(x.size * 4 for x in jax.tree.leaves(own.abstract(DTYPE)))
    for split in specs.layouts:
        assert by_layers[split] == (4 * model.embed_dim**2, texts[split].steps)
        rows = specs.buckets.rows[split][-1]
        pages = 1 + rows * 256 // 16
        cache = 4 * 2 * model.num_layers * pages * 16 * model.num_kv_heads * model.head_dim
        tables = 4 * rows * (1 + 256 // 16)  # and each row's newest token but one
        assert by_model[split].source == weights + cache + tables


def test_where_it_does_not_fit_the_sentence_says_how_to_do_without():
    config = parse([*TINY, "--devices", "2", "--run_dir", "unused"]).rollout
    policy = Policy.from_config(PRESETS["tiny"])
    layouts, _ = layout_chain(factored_mesh(jax.devices()[:2]), policy.config)
    memory = memory_alone(policy, layouts, config, DTYPE, limit=1e5, resident=(), drafter=DRAFTER)
    with pytest.raises(UserError, match=r"drafts .* GiB\), but .*--speculation.source none"):
        check_memory(memory, list(layouts), "option --layout is 'auto'")


@given(st.integers(1, 300), st.sampled_from([(3,), (1, 3), (1, 3, 7), (1, 2, 4, 8)]))
def test_of_the_budgets_with_room_few_have_programs(rows: int, numbers: tuple[int, ...]):
    """The largest of drafts that are copied; the smallest of those that cost a pass for each token."""
    copied = Drafts(numbers, longest=8, most_tokens=256, texts=4)
    generated = replace(copied, texts=0, exit_layer=1)
    fitting = [n for n in numbers if rows * (1 + n) <= 256]
    for drafts in (copied, generated):
        assert set(drafts.of(rows)) <= set(fitting)
        assert len(drafts.of(rows)) == min(2, len(fitting))
    if fitting:
        assert (copied.of(rows)[-1], generated.of(rows)[0]) == (fitting[-1], fitting[0])


def test_memory_counts_a_draft_model():
    config = parse([*TINY, "--devices", "2", "--run_dir", "unused"]).rollout
    policy = Policy.from_config(PRESETS["tiny"])
    layouts, _ = layout_chain(factored_mesh(jax.devices()[:2]), policy.config)
    asked = {"limit": GIB, "resident": ()}
    plain = memory_alone(policy, layouts, config, DTYPE, **asked)
    alone = memory_alone(policy, layouts, config, DTYPE, **asked, drafter=DRAFTER)
    before = kv_bytes(policy, layouts, config, DTYPE, **asked)
    left = kv_bytes(policy, layouts, config, DTYPE, **asked, drafter=DRAFTER)
    assert set(map(plain.drafted, layouts)) == {0}
    for split in layouts:
        assert alone.held(split) - plain.held(split) == alone.drafted(split) > 0
        assert alone.starting(split, 8, 16) - plain.starting(split, 8, 16) == alone.drafted(split)
    least, most = sorted(map(alone.drafted, layouts))
    assert least <= before - left <= most
    specs = specs_of(64, 256)
    built = memory_model(specs, config, **asked)
    drafted = bytes_of(specs)
    assert built.drafts == drafted
    # Temporaries have the tenth of a device that is left to those of all programs, and count beyond it.
    for split, (source, steps) in drafted.items():
        assert built.drafted(split) == source
        assert replace(built, limit=10.0).drafted(split) == source + steps - 1
