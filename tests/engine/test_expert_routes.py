"""Experts on eight devices: tokens and routes are the same in every layout, and no expert moves."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fakes import SETTINGS, static_run, subject

from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.device.draft.text_drafter import TextDrafter
from pat_jax.engine.device.programs.program_specs import ProgramSpecs
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.sequences.prefill_calls import PrefillCall
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.sequences.routes import Routes
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.layout.buckets import Drafts
from pat_jax.layout.layout import Backend, Layout
from pat_jax.models.config import ExpertsConfig, ModelConfig
from pat_jax.models.experts import NOT_RECORDED
from pat_jax.models.policy import Policy
from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key, ProgramTable
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.algorithm.update import Update
from pat_jax.training.passes import model_functions
from pat_jax.training.trainable_params import TrainableParams
from pat_jax.training.trainer import Trainer
from pat_jax.training.transfer import Receivers
from tests.hlo_text import collectives
from tests.lossless import CARRIES, EOS_IDS, EXPERTS, Settings, Subject, tally
from tests.near_ties import NEAR_TIE, Decisions, Tally, check_lossless, compare

# Of the narrowest layout and the widest; experts that see fewer numbers, and those of which some devices
# have the same, take as long to compile again.
QUICK = [("moe", (1, 8), "mixed"), ("moe", (8, 1), "recompute")]
# Every way to carry on one model; of the others both kinds of them, up and down.
RUNS = [("moe", path, carry) for path in ((1, 2, 8), (1, 8), (8, 1)) for carry in CARRIES]
RUNS += [("mixtral", (1, 8), "mixed"), ("bigmac", (1, 2, 8), "mixed")]
RUNS += [(name, (8, 1), "recompute") for name in ("mixtral", "bigmac")]
DRAFTS = Drafts(num_draft_tokens=(3,), longest=5, most_tokens=256, texts=8)


def check_routes(requests: Sequence[Request], done: Sequence[Completion], shape: Any) -> None:
    """Every token but the last has its experts in every layer that has any."""
    for request, one in zip(requests, done, strict=True):
        routes = one.routed_experts
        assert routes is not None and routes.dtype == np.int16
        assert routes.shape == (len(request.tokens) + len(one.tokens) - 1, *shape)
        assert routes.min() >= 0
        assert all(len(set(of)) == shape[1] for of in routes.reshape(-1, shape[1]).tolist())


def routes_of(done: Completion) -> np.ndarray:
    """Without the order of a token's experts."""
    assert done.routed_experts is not None
    return np.sort(done.routed_experts, axis=-1)


def check_same(one: Subject, requests: Sequence[Request], static: Any, found: Any) -> Tally:
    """Lossless, and the routes of what has the same tokens are the same."""
    shape = one.policy.config.routes_shape
    check_routes(requests, static, shape)
    check_routes(requests, found, shape)
    total = one.compared(requests, static, found)
    check_lossless(total)
    same = [
        a.tokens.tolist() == b.tokens.tolist() and np.array_equal(routes_of(a), routes_of(b))
        for a, b in zip(static, found, strict=True)
    ]
    assert len(same) - sum(same) == total.divergences <= 1
    return total


@pytest.mark.parametrize(
    ("name", "path", "carry"),
    [pytest.param(*run, marks=[] if run in QUICK else pytest.mark.slow) for run in RUNS],
    ids=str,
)
def test_switching_changes_no_token_and_no_route(name, path, carry):
    requests, static = static_run(name, seed=0)
    one = subject(name)
    found, report = one.run(requests, one.adaptive(path, carry, len(requests)))
    tp = {str(split): split.tp for split in one.engine.layouts}
    assert tuple(tp[switch.target] for switch in report.switches) == path[1:]
    ways = {switch.kv for switch in report.switches}
    assert carry in ways and (carry == "mixed" or len(ways) == 1)
    check_same(one, requests, static, found)


def test_a_sequence_does_not_depend_on_rows_beside_it():
    """Half of the requests, so that other rows are live, in other buckets, and most rows are not."""
    requests, static = static_run("moe", seed=0)
    some = [13, 2, 7, 4, 11, 0, 9]
    fewer, one = [requests[i] for i in some], subject("moe")
    found, _ = one.run(fewer, one.static(8))
    check_same(one, fewer, [static[i] for i in some], found)


def alike() -> list[Request]:
    """Four samples of a prompt, and of others that begin like it: with a full page, and nearly."""
    rng = np.random.default_rng(4)
    first = rng.integers(3, 61, 12).tolist()
    prompts = [first, [*first[:9], 5, 6], [*first[:8], 7, 8, 9, 10], [*first[:5], 9, 9]]
    return [
        Request(tuple(prompts[i // 4]), sequence_key(5, i), 12 + i, Sampling(0.8), True, i // 4)
        for i in range(16)
    ]


@pytest.mark.parametrize("path", [(8,), (1,), (8, 1)], ids=str)
def test_samples_of_a_prompt_have_its_routes_and_pages_that_are_shared_have_routes_too(path):
    requests, one = alike(), subject("moe")
    assert SETTINGS["moe"].page_size == 8
    planner = one.adaptive(path, "recompute", 16) if path[1:] else one.static(path[0])
    found, report = one.run(requests, planner)
    check_routes(requests, found, one.policy.config.routes_shape)
    if path == (8,):  # one replica: each page is computed once
        assert report.prefill_tokens < sum(len(r.tokens) - 1 for r in requests) / 3
    for i, (request, done) in enumerate(zip(requests, found, strict=True)):
        before = len(request.tokens) - 1  # the last token is each one's own to compute
        of_first = routes_of(found[i // 4 * 4])
        np.testing.assert_array_equal(routes_of(done)[:before], of_first[:before])
    for i in (4, 8):  # the other prompts that have the first one's page
        np.testing.assert_array_equal(routes_of(found[i])[:8], routes_of(found[0])[:8])
    decided = one.judge.decisions(requests, found)
    total = sum((compare(d, d, c) for d, c in zip(found, decided, strict=True)), Tally())
    assert total.judge_disagrees == 0 and total.tokens == sum(12 + i for i in range(16))
    assert total.max_logprob_error <= 1e-4


def test_what_is_computed_again_has_the_experts_it_had(monkeypatch: pytest.MonkeyPatch):
    """A switch by recompute gives the program what was recorded, and that is what computes."""
    requests, static = static_run("moe", seed=0)
    one, recorded, given = subject("moe"), Routes.recorded, list[tuple[PrefillCall, np.ndarray]]()

    def noted(self: Routes, call: PrefillCall, page_size: int) -> np.ndarray:
        given.append((call, recorded(self, call, page_size)))
        return given[-1][1]

    def others(self: Routes, call: PrefillCall, page_size: int) -> np.ndarray:
        blocks = recorded(self, call, page_size)
        return np.where(blocks < 0, blocks, (blocks + 3) % 8).astype(blocks.dtype)

    monkeypatch.setattr(Routes, "recorded", noted)
    found, report = one.run(requests, one.adaptive((8, 1), "recompute", len(requests)))
    num_replayed = 0
    for call, blocks in given:
        for block, i, at in zip(blocks, *call.places(), strict=True):
            known = block[: at.stop - at.start]
            if i >= 0 and (known >= 0).any():
                np.testing.assert_array_equal(known, found[i].routed_experts[at])
                num_replayed += len(known)
    assert report.switches[0].running > 4
    assert num_replayed > 100

    monkeypatch.setattr(Routes, "recorded", others)
    wrong, _ = one.run(requests, one.adaptive((8, 1), "recompute", len(requests)))
    total = one.compared(requests, static, wrong)
    assert total.unexplained > 0 and total.max_logprob_difference > 1e-3


def test_what_had_pages_of_another_prompt_is_computed_again_by_their_experts():
    """Of two prompts that begin with the same four tokens the second never computed those."""
    prompts, shape = [(3, 4, 5, 6, 7, 8), (3, 4, 5, 6, 9, 9, 9)], (2, 2)
    routes = Routes(prompts, np.array([0, 1]), shape)

    def call(i: int, start: int, length: int) -> PrefillCall:
        return PrefillCall(*(np.array([[x]], np.int32) for x in (i, start, length)))

    def of(*tokens: int) -> np.ndarray:
        """Made up from each token; those behind the last have others, which nobody may read."""
        every = np.array([*tokens, *[99] * (4 - len(tokens))])
        return np.broadcast_to(every[:, None, None], (4, *shape)).astype(np.int16)

    for at, tokens in (
        (call(0, 0, 4), (3, 4, 5, 6)),
        (call(0, 4, 1), (7,)),
        (call(1, 4, 2), (9, 9)),
    ):
        assert (routes.recorded(at, 4) == NOT_RECORDED).all()
        routes.computed(at, jnp.asarray(of(*tokens))[None])
        routes.settle()
    assert (routes.recorded(call(1, 0, 4), 4) == NOT_RECORDED).all()  # it has not begun
    routes.add(1, of(9, 11)[:2])
    np.testing.assert_array_equal(routes.recorded(call(1, 0, 4), 4)[0], of(3, 4, 5, 6))
    again = routes.recorded(call(1, 4, 4), 4)[0]
    np.testing.assert_array_equal(again[:, 0, 0], [9, 9, 9, 11])
    np.testing.assert_array_equal(routes.whole(1)[:, 1, 1], [3, 4, 5, 6, 9, 9, 9, 11])
    np.testing.assert_array_equal(routes.whole(0)[:, 0, 0], [3, 4, 5, 6, 7])


class TestJudge:
    """What it says of routes that are not what they should be."""

    # Of four tokens in one layer.
    ROUTES = np.array([[[0, 4]], [[1, 5]], [[2, 6]], [[3, 7]]], np.int16)
    STATIC = Completion(
        np.array([5, 6, 7]), np.array([-1.0, -2.0, -3.0]), True, routed_experts=ROUTES
    )

    def decisions(self, route_margins: Sequence[float]) -> Decisions:
        sure = np.ones(3)
        return Decisions(
            self.STATIC.tokens, self.STATIC.logprobs, sure, sure, np.array(route_margins)
        )

    # A prompt of two tokens: the third token computed is the first of the response.
    @pytest.mark.parametrize(("token", "compared"), [(0, 0), (1, 0), (2, 1), (3, 2)])
    @pytest.mark.parametrize(("margin", "unexplained"), [(0.5, 1), (NEAR_TIE / 2, 0)])
    def test_another_route_counts_unless_it_was_nearly_a_tie(
        self, token: int, compared: int, margin: float, unexplained: int
    ):
        routes = self.ROUTES.copy()
        routes[token, 0, 1] = 9
        other = replace(self.STATIC, routed_experts=routes, logprobs=np.array([-1.0, -2.0, 0.0]))
        margins = [1.0] * 4
        margins[token] = margin
        total = compare(self.STATIC, other, self.decisions(margins))
        assert (total.divergences, total.route_divergences) == (1, 1)
        assert (total.unexplained, total.compared) == (unexplained, compared)
        assert total.near_tie_routes == (margin < NEAR_TIE and token > 0)  # the first draws nothing
        assert total.max_logprob_difference == 0  # of tokens before it alone
        assert total.judge_disagrees == 0

    def test_a_recorded_route_that_the_judge_would_not_choose_counts(self):
        requests, static = static_run("moe", seed=0)
        at = next(i for i, done in enumerate(static) if len(done.tokens) > 8)
        request, done, one = requests[at], static[at], subject("moe")
        routes = np.array(done.routed_experts)
        token = len(request.tokens) + 3
        routes[token, 1, 1] = next(i for i in range(8) if i not in routes[token, 1])
        falsified = replace(done, routed_experts=routes)
        (sound,), (wrong,) = (one.judge.decisions([request], [x]) for x in (done, falsified))
        assert sound.route_margins.min() > -NEAR_TIE > wrong.route_margins[token]
        assert compare(done, done, sound).judge_disagrees == 0
        assert compare(falsified, falsified, wrong).judge_disagrees >= 1
        total = compare(done, falsified, sound)
        assert (total.unexplained, total.route_divergences) == (1, 1)
        assert total.compared == 4


@pytest.mark.slow  # an engine of its own
def test_drafts_change_no_token_and_no_route():
    """A token that is accepted has the routes of the step that verified it."""
    settings = Settings(min_rows=16, min_length=64, degrees=(1, 4), drafter=TextDrafter(DRAFTS))
    one = Subject(EXPERTS["moe"], settings, num_devices=4, is_compiled=False)
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(3, 61, 10).tolist()) for _ in range(4)]
    kinds = Sampling(0.0), Sampling(0.7), Sampling(0.8, top_k=12, top_p=0.9), Sampling(0.7)
    once = [
        Request(prompts[i % 4], sequence_key(7, i), 52 - i, kinds[i // 4], i % 3 > 0)
        for i in range(16)
    ]
    requests, (dp4, tp4) = once * 2, one.engine.layouts  # what the first have said, the others find
    static, _ = one.run(requests, FixedLayout(dp4))
    drafting = {"num_draft_tokens": 3, "accept_prob": Acceptance.unseen().accept_prob}
    for planner in (
        FixedLayout(tp4, **drafting),
        replace(one.adaptive((1, 4, 1), "mixed", len(requests)), **drafting),
    ):
        found, report = one.run(requests, planner)
        assert report.tokens_per_row_step > 1.3 and report.accepted > 100
        check_routes(requests, found, one.policy.config.routes_shape)
        total = sum(tally(one, requests, static, [found]).values(), Tally())
        check_lossless(total)


@pytest.mark.slow  # an engine of its own
def test_what_is_preempted_is_computed_again_by_the_same_experts():
    """Pages for one whole sequence and part of another in each of two replicas, in switches too."""
    settings = Settings(sequences=16, min_rows=1, min_length=64, kv_pages=10, degrees=(1, 2))
    one = Subject(EXPERTS["moe"], settings, num_devices=2, is_compiled=False)
    requests, static = static_run("moe", seed=0)
    switching = [one.adaptive((1, 2, 1), x, len(requests)) for x in ("migrate", "recompute")]
    for planner in (one.static(1), *switching):
        found, report = one.run(requests, planner)
        assert report.preempted > 0
        check_same(one, requests, static, found)


# Of the programs. Experts so wide that one matrix of one expert is more than all else together.

WIDE = replace(EXPERTS["moe"], experts=ExpertsConfig(8, 2, 4096, dense_layers=(1,)), num_kv_heads=8)
EXPERT_BYTES = 4 * 4096 * 32  # of one matrix, float32


@cache
def specs_of(config: ModelConfig) -> ProgramSpecs:
    """In every layout; nothing is compiled, and no weight is there."""
    engine = RolloutEngine(
        Policy.from_config(config),
        jax.devices(),
        Settings().rollout,
        capacity=16,
        eos_ids=EOS_IDS,
        reshard_bytes=2**30,
    )
    return engine.specs


def is_expert(params: Any) -> list[bool]:
    """Of each leaf, whether it is a matrix of experts."""
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]
    return [
        "mlp" in name and leaf.ndim == 3
        for name, leaf in zip(names, jax.tree.leaves(params), strict=True)
    ]


def test_no_program_of_a_switch_has_experts_or_sends_as_much():
    """Compiled as where devices have memories of their own: up nothing is sent, down the rest is."""
    specs, table = replace(specs_of(WIDE)), ProgramTable()
    ends = [layout for layout in specs.layouts.values() if layout.split.tp in (1, 2, 8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layout, "backend", replace(Backend.of("cpu"), gathers_on_host=False))
        for pair in permutations(ends, 2):
            specs.declare_reshard(table, *pair)
    table.compile_all(threads=2)
    params = specs.params(ends[0])
    pairs = zip(jax.tree.leaves(params), is_expert(params), strict=True)
    others = sum(4 * x.size for x, is_one in pairs if not is_one)
    assert others < EXPERT_BYTES
    keys = list(table.keys("reshard"))
    assert len(keys) == 6
    for key in keys:
        text = table[key].as_text()
        assert "4096" not in text
        found = collectives(text)
        assert key.target is not None
        if key.target.tp > key.split.tp:
            assert found == []
        else:
            assert {c.kind for c in found} == {"all-gather"}
            plan = specs.reshard(specs.layouts[key.split], specs.layouts[key.target])
            assert (
                0 < sum(c.num_bytes * (c.group - 1) / c.group for c in found) * 8 == plan.sent_bytes
            )


@pytest.mark.parametrize("source", [Split(8, 1), Split(2, 4)], ids=str)
def test_a_transfer_from_the_trainer_moves_no_expert(source: Split):
    """Its experts are split as those of the rollout, in every layout of either."""
    policy, layouts = Policy.from_config(WIDE), specs_of(WIDE).layouts
    layout = layouts[source]
    predictor = Predictor(model_functions(policy, layout, jnp.float32), WIDE.vocab_size)
    update = Update(predictor, optax.sgd(1.0), PolicyLoss())
    trainer = Trainer(
        TrainableParams(policy, layout, None, jnp.float32, jnp.float32),
        update,
        Receivers(jnp.float32, layouts, policy),
        micro_shapes=[(8, 16)],
    )
    which = is_expert(policy.abstract_params)
    ours = jax.tree.leaves(trainer.shardings)
    rest = [
        x for x, one in zip(jax.tree.leaves(policy.abstract_params), which, strict=True) if not one
    ]
    for split, target in layouts.items():
        theirs = jax.tree.leaves(target.param_shardings(policy))
        assert all(a == b for a, b, one in zip(ours, theirs, which, strict=True) if one)
        key = Key("transfer", source, target=split)
        found = collectives(trainer.programs[key].as_text())
        assert found or source == split
        # Other leaves may be gathered over both kinds of axes, each once.
        assert sum(c.num_bytes for c in found) <= 2 * 4 * sum(x.size for x in rest) < EXPERT_BYTES


def layer_collectives(config: ModelConfig, layout: Layout, rows: int) -> Counter:
    """Of the layers with experts in a step of so many rows of a replica, (name, bytes of the result)."""
    assert config.experts is not None
    replicas, k = layout.size(layout.ep_dp_axes), config.experts.num_experts_per_tok
    hidden, layers = rows * config.expert_embed_dim * 4, len(config.sparse_layers)
    found: Counter = Counter()
    if layout.ep_dp_axes:
        # The rows, and of each the numbers of its experts and their weights.
        found["all-gather", replicas * hidden] += layers
        found["all-gather", replicas * rows * k * 4] += 2 * layers
        found["reduce-scatter", hidden] += layers
    if layout.ep_tp_axes:
        found["all-reduce", hidden] += layers
    return found


# TP 2 has both replicas and devices that share one.
STEPS = [(name, tp) for name in EXPERTS for tp in SETTINGS[name].degrees]
QUICK_STEPS = [*((name, tp) for name, tp in STEPS if name == "moe"), ("bigmac", 2)]


@pytest.mark.parametrize(
    ("name", "tp"),
    [pytest.param(*x, marks=[] if x in QUICK_STEPS else pytest.mark.slow) for x in STEPS],
)
def test_a_layer_of_experts_gathers_rows_and_scatters_sums(name, tp):
    """Once in a layer where there are replicas, and sums over a replica's devices where it has several.
    Experts that see a quarter of a token's numbers have a quarter of the rows' bytes sent."""
    config, one = EXPERTS[name], subject(name)
    table = one.engine.programs
    (layout,) = (x for split, x in one.engine.layouts.items() if split.tp == tp)
    keys = [x for x in (*table, *table.missing()) if (x.name, x.split) == ("decode", layout.split)]
    key = max(keys, key=lambda key: (key.rows, -key.length))
    text = table[key].as_text()
    step = Counter((c.kind, c.num_bytes) for c in collectives(text) if c.depth == 2)
    expected = layer_collectives(config, layout, key.rows)
    if tp > 1:  # of attention, of layers without experts, of the embedding and the logits
        dense = config.num_layers - len(config.sparse_layers)
        expected["all-reduce", key.rows * config.embed_dim * 4] += config.num_layers + dense + 1
        expected["all-gather", key.rows * config.padded_vocab_size * 4] += 1
    assert step == expected, (step, expected)
