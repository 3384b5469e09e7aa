"""Models with experts, predicted: what a device stores, reads and sends, and what a switch moves."""

import csv
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import SPLITS
from hypothesis import given
from hypothesis import strategies as st
from orders import order_of
from published import DATA, needs_data

from pat_jax.common.errors import UserError
from pat_jax.config.rollout import RolloutConfig
from pat_jax.layout.buckets import Buckets, Drafts
from pat_jax.models.config import ExpertsConfig, ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.planning.planner.costs import CostTables
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Split
from pat_jax.profiling.capacity.costs import costs_of
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic
from pat_jax.profiling.cross_compile.target_build import Order
from pat_jax.profiling.predict.composer import ONE, Composer
from pat_jax.profiling.predict.expert_width import settled_width
from pat_jax.profiling.predict.kernel_model import ModelledKernels
from pat_jax.profiling.predict.layer_times import most_active
from pat_jax.profiling.predict.links import links_of, waiting_s
from pat_jax.profiling.predict.model_sizes import (
    active_weights,
    num_weights,
    stored_weights,
    weight_bytes,
)
from pat_jax.profiling.predict.shard_profile import ShardProfiler
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.predict.update_work import Collective, Rows, UpdateWork
from pat_jax.profiling.simulate.machine import Machine, Workload
from pat_jax.profiling.simulate.simulator import replay
from pat_jax.training.model_flops import matrix_weights

SMALL, LARGE, MIXED = preset("qwen3-30b-a3b"), preset("qwen3-235b-a22b"), preset("tiny-moe")
EXPERTS = ExpertsConfig(128, 8, 768)  # of SMALL
LATENT = replace(SMALL, experts=replace(EXPERTS, expert_dim=4 * 768, latent_dim=512))
MODELS = ("qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b", "bigmac-3.8b")
# GB of weights of one of eight devices, from dp8tp1 to dp1tp8.
HELD = {"qwen3-30b-a3b": (10.3, 8.8, 8.0, 7.6), "qwen3-235b-a22b": (72.8, 64.8, 60.8, 58.8)}


def composer_of(text: str, model: ModelConfig = SMALL) -> Composer:
    return Composer(ModelledKernels(Target.parse(text)), model)


def planned(model: str, target: str) -> Order:
    config, _ = PlanConfig(target=target).settled(preset(model).max_position)
    machine = Target.parse(target)
    return order_of(machine, config, preset(model), (2, 4))


@pytest.mark.parametrize("tokens", [1, 5, 16, 64])
@pytest.mark.parametrize("ways", [1, 8])
def test_experts_that_a_device_reads_are_those_of_drawn_tokens(tokens: int, ways: int):
    rng = np.random.default_rng(tokens)
    drawn = np.argsort(rng.random((2000, tokens, 128)), axis=-1)[..., :8]
    is_read = np.zeros((2000, 128), bool)
    np.put_along_axis(is_read, drawn.reshape(2000, -1), True, axis=1)
    most = is_read.reshape(2000, ways, -1).sum(axis=2).max(axis=1).mean()
    expected = most_active(128 // ways, ways, 1 - (1 - 8 / 128) ** tokens)
    assert expected == pytest.approx(most, rel=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_stored_weights_are_those_of_the_arrays_and_active_ones_those_of_a_token(name: str):
    shallow = replace(preset(name), num_layers=1)
    leaves = jax.tree.leaves(Policy.from_config(shallow).abstract(jnp.bfloat16))
    assert num_weights(shallow) == sum(leaf.size for leaf in leaves if leaf.ndim > 1)
    model = preset(name)
    head = model.vocab_size * model.embed_dim
    assert active_weights(model) == matrix_weights(model) - head
    assert active_weights(model) < stored_weights(model) / 3


@pytest.mark.parametrize("name", HELD)
def test_what_a_device_holds_is_an_eighth_of_the_experts_and_a_part_of_the_rest(name: str):
    """And of small things that each has: routers, and at TP8 copies of the four KV heads' weights."""
    weights = by_arithmetic(planned(name, "h200:8")).alone.weights
    assert [weights[split] / 1e9 for split in SPLITS] == pytest.approx(HELD[name], rel=0.011)


def test_no_range_is_told_for_steps_with_experts():
    costs = costs_of(by_arithmetic(planned("tiny-moe", "h100:2")), None, "nccl")
    assert costs.range is None
    assert [note for note in costs.notes if note.startswith("Each token chooses its experts")]


def test_a_switch_moves_no_expert():
    """As much as with twice as many experts, and no more than what layouts divide."""
    twice = replace(SMALL, experts=replace(EXPERTS, num_experts=256))
    few, many = composer_of("h100:8"), composer_of("h100:8", twice)
    chip = few.kernels.chip
    for source, target in [(SPLITS[0], SPLITS[3]), (SPLITS[3], SPLITS[0])]:
        assert few.reshard(source, target) == many.reshard(source, target)
    down = few.reshard(SPLITS[3], SPLITS[0]) - few.switch_s
    assert weight_bytes(SMALL) == pytest.approx(3.06e9, rel=0.01)
    assert down == pytest.approx(7 / 8 * weight_bytes(SMALL) / chip.link_bytes_s)


@pytest.mark.parametrize(("model", "width"), [(SMALL, 2048), (LATENT, 512)], ids=["all", "latent"])
def test_links_around_experts_follow_the_layout(model: ModelConfig, width: int):
    """A gather of rows and routes and a scatter over the replicas; a sum over a replica's devices.
    All are as wide as experts see a token; the sum behind attention is as wide as the layer."""
    target, composer = Target.parse("h100:8"), composer_of("h100:8", model)
    links, row = links_of(target), 2 * width

    def exchange(devices: int, rows: int) -> float:
        gather = links.all_gather_s(devices, rows * (row + 8 * 8))
        scatter = links.all_gather_s(devices, rows * row)
        return gather + scatter + 2 * waiting_s(target.chip, devices)

    def sums(devices: int, rows: int) -> float:
        sent = links.all_reduce_s(devices, rows * row) + links.all_reduce_s(
            devices, rows * 2 * 2048
        )
        return sent + 2 * waiting_s(target.chip, devices)

    expected = {
        Split(8, 1): exchange(8, 8 * 16),
        Split(4, 2): exchange(4, 4 * 16) + sums(2, 16),
        Split(1, 8): sums(8, 16),
    }
    for split, seconds in expected.items():
        sent = composer.layer_links_ms(16, split, is_sparse=True)
        assert sent == pytest.approx(1e3 * seconds)
    assert composer.layer_links_ms(16, ONE, is_sparse=True) == 0.0
    assert composer.layer_links_ms(16, Split(8, 1)) == 0.0


@pytest.mark.parametrize("tokens", [1, 16])
def test_experts_that_see_less_of_a_token_are_as_large_and_take_as_long(tokens: int):
    """In the products of experts alone, of few rows: the two shared matrices come on top."""
    few, many = composer_of("h100:8", LATENT), composer_of("h100:8")
    split = Split(8, 1)
    assert few.experts_ms(tokens, split) == pytest.approx(many.experts_ms(tokens, split), rel=0.02)
    more = few.products_ms(tokens, split, is_sparse=True)
    more -= many.products_ms(tokens, split, is_sparse=True)
    gemm = few.kernels.gemm
    more -= few.experts_ms(tokens, split) - many.experts_ms(tokens, split)
    assert more == pytest.approx(gemm(tokens, 512, 2048) + gemm(tokens, 2048, 512))
    shared = 48 * 2 * 512 * 2048
    assert stored_weights(LATENT) - stored_weights(SMALL) == shared
    assert matrix_weights(LATENT) - matrix_weights(SMALL) == shared


@pytest.mark.parametrize("text", ["h100:8", "v5e:2x4", "v5p:2x2x2"])
@given(rows=st.integers(1, 512), split=st.sampled_from(SPLITS))
def test_a_step_is_never_faster_than_what_it_reads(text: str, rows: int, split: Split):
    composer = composer_of(text)
    distinct = 16 * (1 - (1 - 8 / 128) ** (rows * split.dp))  # of a device, in the mean
    of_experts = 2 * 48 * distinct * 3 * EXPERTS.expert_dim * SMALL.embed_dim
    rest = weight_bytes(SMALL) - 2 * SMALL.padded_vocab_size * SMALL.embed_dim
    least = (of_experts + rest / split.tp) / composer.kernels.chip.memory_bytes_s
    assert composer.decode_step(split, rows, 128) > least


def test_work_of_an_update_multiplies_few_weights_and_gathers_all():
    """Two layers, width 8, of 4 experts with 6 units, 2 of which compute a token."""
    model = replace(MIXED, num_layers=2, embed_dim=8, num_heads=4, num_kv_heads=2, head_dim=4)
    model = replace(model, experts=ExpertsConfig(4, 2, 6), vocab_size=64)
    attention, expert, head = 8 * (16 + 2 * 8 + 16), 3 * 8 * 6, 64 * 8
    router = 4 * 8
    work = UpdateWork(model, dp=4, fsdp=4)
    forward = work.scores(Rows(10, 33.0))
    assert forward.flops == 2 * 10 * (2 * (attention + router + 2 * expert) + head)
    gathered = 2 * 2 * (attention + router + 4 * expert)
    assert forward.sent[0] == Collective("all-gather", gathered, 4)
    gradients = work.gradients(Rows(10, 33.0))
    last = 2 * 2 * 8 * 6  # of two experts in two layers
    assert gradients.flops == 4 * forward.flops - 2 * 10 * last
    assert gradients.sent[3] == Collective("reduce-scatter", gathered / 4, 4)


def test_a_divided_width_shares_what_one_row_reads():
    """Of 8 picks over 8 devices the fullest reads 2.6 experts; over four pairs 3.3 halves. What is sent
    is the same."""
    composer = composer_of("v5e:2x4")
    whole, halves = (replace(composer, expert_ways=8 // w, expert_width=w) for w in (1, 2))
    read = [most_active(128 // n, n, 8 / 128) for n in (8, 4)]
    assert read == pytest.approx([2.6, 3.5], abs=0.2)
    shares = halves.experts_ms(1, Split(1, 8)) / whole.experts_ms(1, Split(1, 8))
    assert shares == pytest.approx(read[1] / 2 / read[0], rel=0.05)
    for split in SPLITS:
        assert whole.expert_split(split) == halves.expert_split(split) == split
        links = [x.layer_links_ms(16, split, is_sparse=True) for x in (whole, halves)]
        assert links[0] == links[1]


def test_work_of_an_update_that_sends_tokens_to_their_experts():
    """A token's row goes to two experts and comes back; backward its gradient goes along."""
    model = replace(MIXED, num_layers=2, embed_dim=8, num_heads=4, num_kv_heads=2, head_dim=4)
    model = replace(model, experts=ExpertsConfig(4, 2, 6), vocab_size=64)
    together = UpdateWork(model, dp=4, fsdp=4)
    sent = replace(together, exchanged_tokens=10, ep=4)
    rows, more = Rows(10, 33.0), Rows(11, 33.0)
    assert sent.scores(more) == together.scores(more)
    layers = Collective("all-gather", 2 * 2 * (8 * (16 + 2 * 8 + 16) + 4 * 8), 4)
    there = Collective("ragged-all-to-all", 2 * 10 * 2 * 8, 4, count=2 * 2)
    forward, gradients = sent.scores(rows), sent.gradients(rows)
    assert (forward.sent[0], forward.sent[-1]) == (layers, there)
    assert there._replace(count=2 * 5) in gradients.sent
    assert Collective("reduce-scatter", layers.num_bytes / 4, 4) in gradients.sent
    assert gradients.flops == together.gradients(rows).flops
    copied = replace(sent, dp=8, fsdp=8).scores(rows).sent[0]  # two devices have parts of the same
    assert copied.num_bytes == layers.num_bytes + 2 * 2 * 3 * 8 * 6


@needs_data
@pytest.mark.parametrize("model", [SMALL, LARGE], ids=["30b", "235b"])
def test_a_layer_of_experts_is_near_measured_ones(model):
    """As measured there: tokens that choose experts by turns, all on one device."""
    (path,) = (DATA / "calibration").glob("aiconfigurator/h100_sxm_*_moe_bf16.csv")
    kernels, experts = ModelledKernels(Target.parse("h100:8")), model.experts
    sizes = model.embed_dim, experts.expert_dim, 8, 128, 1, 1
    names = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    errors = []
    with path.open() as file:
        for row in csv.DictReader(file):
            tokens = int(row["num_tokens"])
            of_shape = tuple(int(row[name]) for name in names) == sizes
            if row["distribution"] == "balanced" and of_shape and tokens <= 512:
                rows, active = 8 * tokens, min(128, 8 * tokens)
                found = kernels.grouped(rows, active, 2 * experts.expert_dim, model.embed_dim)
                found += kernels.grouped(rows, active, model.embed_dim, experts.expert_dim)
                errors.append(abs(found / float(row["latency_ms"]) - 1))
    assert len(errors) == 17
    assert np.mean(errors) < 0.15


def test_shards_of_a_model_with_experts_are_refused():
    target, device = Target.parse("h100:8"), jax.devices()[0]
    profiler = ShardProfiler(SMALL, target, RolloutConfig(), device, jnp.bfloat16, 8)
    with pytest.raises(UserError, match=r"^option --shards is 'h100:8': the model has experts"):
        profiler.engines  # noqa: B018


def test_a_step_is_priced_by_the_tokens_that_are_there():
    """One request in eight replicas is one routed token, for planner and replay alike; a step with drafts
    has as many times the tokens."""
    composer, config = composer_of("h200:8"), replace(RolloutConfig(), min_rows=1, min_length=1024)
    config = replace(config, max_prompt_length=512, max_completion_length=3584)
    latency = composer.latency_model(Buckets.of(SPLITS, 64, config), Drafts((3,), 3, 256, 0))
    one, eight = (latency.decode_step(SPLITS[0], 1, 4096, running=n) for n in (1, 8))
    each = [composer.experts_ms(n / 8, SPLITS[0]) for n in (1, 8)]
    assert (
        eight == latency.decode_step(SPLITS[0], 1, 4096) == composer.decode_step(SPLITS[0], 1, 4096)
    )
    assert eight - one == pytest.approx(SMALL.num_layers * (each[1] - each[0]) / 1e3, rel=1e-6)
    verified = latency.verifying(3)
    spared = verified.decode_step(SPLITS[0], 1, 4096) - verified.decode_step(
        SPLITS[0], 1, 4096, running=1
    )
    each = [composer.experts_ms(4 * n / 8, SPLITS[0]) for n in (1, 8)]
    assert spared == pytest.approx(SMALL.num_layers * (each[1] - each[0]) / 1e3, rel=0.02)
    rows, context = np.ones((4, 1)), np.full((4, 1), 4096.0)
    steps = CostTables.of(latency, SPLITS).steps(rows, context, context, np.ones((4, 1)))
    priced = [latency.decode_step(split, 1, 4096, running=1) for split in SPLITS]
    assert steps[:, 0].tolist() == pytest.approx(priced)
    machine = Machine.of(latency, SPLITS[:1], config, capacity=8)
    work = Workload(np.full(1, 16), np.full(1, 64), 3584)
    done = replay(work, FixedLayout(SPLITS[0]), machine)
    assert done.spent("decode") == pytest.approx(
        64 * latency.decode_step(SPLITS[0], 1, 1024, 48, running=1), rel=0.02
    )


@pytest.mark.parametrize("responses", [8, 128, 2048, 8192])
def test_auto_divides_widths_as_steps_of_halving_batches_take_least(responses: int):
    def seconds(width: int) -> float:
        one = replace(composer_of("h100:8"), expert_ways=8 // width, expert_width=width)
        one = replace(one, kernels=ModelledKernels(Target.parse("h100:8"), sums="nccl"))
        halved = [2**k for k in range(14) if 2**k <= responses]
        return sum(min(one.decode_step(s, -(-n // s.dp), 4096) for s in SPLITS) for n in halved)

    target = Target.parse("h100:8")
    width = settled_width(target, SMALL, RolloutConfig(), "auto", responses)
    saved = 1 - seconds(width) / seconds(1)
    assert width == 1 or saved > 0.005
    assert seconds(width) <= 1.006 * min(map(seconds, (1, 2, 4, 8)))
    assert (width == 8) == (responses <= 128) and (width == 1) == (responses >= 2048)


def test_auto_leaves_experts_whole_where_nothing_is_known_of_narrow_ones():
    def width(target: str, model: ModelConfig = SMALL, **options: Any) -> int:
        experts = options.pop("experts", "auto")
        rollout = replace(RolloutConfig(), **options)
        return settled_width(Target.parse(target), model, rollout, experts, 128)

    assert width("h100:8") == 8 and width("h100:8", expert_width=2) == 2
    dense = replace(SMALL, experts=None)
    assert width("v5e:2x4") == width("h100:1") == width("h100:8", dense) == 1
    assert width("h100:8", expert_parallel=8) == width("h100:8", experts="exchanged") == 1
