"""What bursts with drafts are said to take of a device, against their compiled programs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import TINY

from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.engine.device.draft.draft_model import ModelDrafter
from pat_jax.engine.device.draft.drafter import Drafter
from pat_jax.engine.device.draft.drafters import NO_DRAFTER
from pat_jax.engine.device.draft.early_exit import EarlyExit
from pat_jax.engine.device.draft.text_drafter import TextDrafter
from pat_jax.engine.device.programs.decode import DecodeFunctions
from pat_jax.engine.device.programs.program_specs import ProgramSpecs
from pat_jax.engine.sizing.draft_memory import DraftBytes, draft_bytes
from pat_jax.engine.sizing.memory import memory_alone
from pat_jax.engine.sizing.memory_checks import check_memory
from pat_jax.engine.sizing.pool_pages import pages_per_replica
from pat_jax.layout.buckets import Buckets, Drafts
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.policy import Policy
from pat_jax.models.presets import PRESETS
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key, ProgramTable

DTYPE = jnp.dtype("float32")
DRAFTS = Drafts(num_draft_tokens=(7,), longest=7, most_tokens=64, texts=4)
DRAFTER = TextDrafter(DRAFTS)


def specs_of(vocab_size: int, length: int) -> ProgramSpecs:
    policy = Policy.from_config(replace(PRESETS["tiny"], num_layers=1, vocab_size=vocab_size))
    layouts, _ = layout_chain(factored_mesh(jax.devices()[:2]), policy.config)
    buckets = Buckets.build(
        tuple(layouts), capacity=8, min_rows=4, min_length=length, max_length=length
    )
    functions = DecodeFunctions(policy, DTYPE, (0,), 4, 8, 0, DRAFTER)
    pages = pages_per_replica(layouts, buckets, 16)
    return ProgramSpecs(functions, layouts, buckets, 16, pages, 8)


def bytes_of(specs: ProgramSpecs, drafter: Drafter = DRAFTER) -> dict[Split, DraftBytes]:
    return draft_bytes(specs.layouts, specs.draft_shapes, drafter)


@pytest.mark.parametrize(
    ("vocab_size", "length"), [pytest.param(8192, 256, marks=pytest.mark.slow), (64, 1024)]
)
def test_it_is_what_compiled_programs_take_more_than_those_without_drafts(
    vocab_size: int, length: int
):
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


def test_the_program_that_takes_most_counts_and_none_takes_nothing():
    specs = specs_of(64, 256)
    assert set(bytes_of(specs, NO_DRAFTER).values()) == {DraftBytes(0, 0)}
    few = bytes_of(specs)
    assert few == bytes_of(specs, TextDrafter(replace(DRAFTS, num_draft_tokens=(1, 7))))
    # In dp1tp2 a replica has all eight rows: twice the texts of four.
    (_, least), (_, most) = few.items()
    assert most.source == 2 * least.source


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
