"""How evenly routers share tokens out: what is counted of them, and the loss that evens it out."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import TINY

from pat_jax.config.command_line import parse
from pat_jax.config.role_table import tuned_roles
from pat_jax.config.sft import SftConfig
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.config import ExpertsConfig
from pat_jax.models.policy import Params, Policy
from pat_jax.rl.algorithm import balance
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.algorithm.supervised import CrossEntropy, to_example_batch
from pat_jax.rl.algorithm.update import Update, zero_gradients
from pat_jax.rl.batches.batches import Aggregation, to_train_batch
from pat_jax.rl.batches.train_batch import MicroBatch, with_no_routes
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup
from pat_jax.rl.data.examples import Example
from pat_jax.training.passes import model_functions
from pat_jax.training.role_model import RoleModel
from tests.lossless import EXPERTS, lively_params
from tests.tabled_roles import tabled_roles

# A layer is enough: compiling takes as long as there are layers.
CONFIG = replace(EXPERTS["moe"], num_layers=1, experts=ExpertsConfig(8, 2, 16))
POLICY = Policy.from_config(CONFIG)
(LAYOUT,) = layout_chain(factored_mesh(jax.devices()[:1]), CONFIG)[0].values()
LENGTHS = (5, 14, 9, 16, 7, 12)  # tokens of the examples: 63
NARROW, WIDE = (6, 16), (3, 32)  # shapes that hold them all


@cache
def weights() -> Params:
    """On the host; not to be written to."""
    return jax.device_get(lively_params(POLICY))


def packed(shape: tuple[int, int]) -> list[MicroBatch]:
    rng = np.random.default_rng(0)
    examples = []
    for length in LENGTHS:
        in_loss = rng.random(length) < 0.7
        in_loss[-1] = True
        examples.append(Example(rng.integers(1, 61, length, np.int32), in_loss))
    (mini,) = to_example_batch(examples, [shape]).mini_batches
    return [with_no_routes(micro, CONFIG.routes_shape) for micro in mini]


@cache
def update_of(coefficient: float) -> Update:
    model, optimizer = model_functions(POLICY, LAYOUT, jnp.float32), optax.adam(1e-2)
    return Update(Predictor(model, CONFIG.vocab_size), optimizer, CrossEntropy(), coefficient)


@cache
def step_of(coefficient: float) -> Any:
    return jax.jit(update_of(coefficient).grad_step)


def gradient(
    coefficient: float, micro_batches: Sequence[MicroBatch], params: Params | None = None
) -> tuple[Params, Any]:
    params, update = weights() if params is None else params, update_of(coefficient)
    grads, sums = zero_gradients(params), update.zero_sums()
    for micro in micro_batches:
        grads, sums = step_of(coefficient)(params, micro, grads, sums)
    return grads, jax.device_get(sums)


def assert_close(got: Params, wanted: Params) -> None:
    """Each leaf by its largest number."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


def routers_of(params: Params) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(params) if x.shape == (8, CONFIG.embed_dim)]


def test_tokens_that_all_have_the_same_experts_are_the_most_uneven_load():
    """Routers of zeros: of equal logits the lower numbers win."""
    params = jax.tree.map(lambda x: x * (x.shape != (8, CONFIG.embed_dim)), weights())
    assert [x.any() for x in routers_of(params)] == [False]
    _, sums = gradient(0.0, packed(WIDE), params)
    assert sums[balance.TOKENS] == sum(LENGTHS)
    np.testing.assert_array_equal(sums[balance.LOAD], [[63, 63, 0, 0, 0, 0, 0, 0]])
    found = update_of(0.0).summary([sums])
    assert found["expert_load_max"] == 8 / 2
    assert found["dead_experts"] == 6 / 8
    assert found["router_entropy"] == pytest.approx(math.log(8), rel=1e-5)
    assert found["router_aux_loss"] == pytest.approx(2, rel=1e-6)


def made_up(load: Any, probability: Any, tokens: int) -> dict[str, np.ndarray]:
    load, probability = np.array(load, np.float32), np.array(probability, np.float32)
    numbers = {balance.TOKENS: np.float32(tokens), balance.ENTROPY: np.ones(len(load), np.float32)}
    return numbers | {balance.LOAD: load, balance.PROBABILITY: probability}


def test_metrics_are_of_the_tokens_of_all_steps_together():
    """Of three experts, one for each token. Each step is uneven, both together are even."""
    one = made_up([[4, 0, 0]], [[4, 0, 0]], 4)
    other = made_up([[0, 4, 4]], [[0, 4, 4]], 8)
    assert balance.summary([one]) == {
        "router_aux_loss": 3,
        "expert_load_max": 3,
        "dead_experts": pytest.approx(2 / 3),
        "router_entropy": 0.25,
    }
    both = balance.summary([one, other])
    assert both["router_aux_loss"] == pytest.approx(1) and both["expert_load_max"] == 1
    assert both["dead_experts"] == 0
    nothing = balance.summary([jax.device_get(balance.zero_sums(2, 8))])
    assert nothing.keys() == both.keys() and all(map(math.isnan, nothing.values()))


def test_layers_do_not_make_up_for_each_other():
    """Each has all tokens at one expert, though over all layers every expert has as many."""
    assert balance.switch_loss(made_up(np.eye(4) * 6, np.eye(4) * 6, 6)) == 4


def test_neither_padding_nor_the_rows_of_a_micro_batch_change_anything():
    (narrow,), (wide,) = packed(NARROW), packed(WIDE)
    assert narrow.tokens.size == wide.tokens.size == 96
    wanted, wanted_sums = gradient(1.0, [narrow])
    got, sums = gradient(1.0, [wide])
    assert_close(got, wanted)
    without, _ = gradient(0.0, [wide])
    for one, other in zip(routers_of(wanted), routers_of(without), strict=True):
        assert np.abs(one - other).max() > 0.1 * np.abs(one).max()
    np.testing.assert_array_equal(sums[balance.LOAD], wanted_sums[balance.LOAD])
    assert (sums[balance.LOAD].sum(axis=-1) == 2 * sum(LENGTHS)).all()
    for name in (balance.PROBABILITY, balance.ENTROPY):
        np.testing.assert_allclose(sums[name], wanted_sums[name], rtol=1e-5)


def test_the_update_has_the_coefficient_of_the_option():
    """0 in reinforcement learning and 0.001 in supervised fine-tuning, or what is given."""

    def reinforced(*options: str) -> list[float]:
        config = parse([*TINY, "--profile", "none", "--run_dir", "unused", *options])
        updates = tabled_roles(config, POLICY, LAYOUT, []).policy.updates
        return [update.router_aux_loss_coef for update in updates.values()]

    assert reinforced() == [0, 0]
    assert reinforced("--algorithm.router_aux_loss_coef", "0.01") == [0.01, 0.01]
    given = SftConfig(model="m", compute_dtype="float32", max_length=32)
    for config, wanted in ((given, 1e-3), (replace(given, router_aux_loss_coef=0.0), 0.0)):
        (role,) = tuned_roles(config, "vocab", 1, has_reference=False)
        update = RoleModel(role, POLICY, LAYOUT).update(CrossEntropy())
        assert update.router_aux_loss_coef == wanted


CAP = 40  # tokens of the longest response


def policy_batch(aggregation: Aggregation, lengths: Sequence[int], rows: int) -> list[MicroBatch]:
    """Responses of these lengths, of which every third is cut and masked."""
    rng, groups = np.random.default_rng(1), []
    for number, length in enumerate(lengths):
        prompt = Prompt(number, tuple(rng.integers(3, 61, 4).tolist()), "", {})
        tokens = rng.integers(3, 61, length, np.int32)
        finish = FinishReason.LENGTH if number % 3 == 2 else FinishReason.STOP
        logprobs = np.full(length, -4, np.float32)
        groups.append(RolloutGroup(prompt, [Rollout(prompt, 0, tokens, logprobs, finish)]))
    batch = to_train_batch(
        groups,
        np.zeros((len(groups), 1)),
        mini_batch_size=len(groups),
        micro_shapes=[(rows, 32)],
        aggregation=aggregation,
        truncated="mask",
        max_completion_length=CAP,
    )
    (mini,) = batch.mini_batches
    return [with_no_routes(micro, CONFIG.routes_shape) for micro in mini]


def of_balance_alone(micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
    """The gradient of routers that a coefficient of 1 adds."""
    got, without = (
        routers_of(gradient(coefficient, micro_batches)[0]) for coefficient in (1.0, 0.0)
    )
    return [one - other for one, other in zip(got, without, strict=True)]


def by_switch_loss(micro: MicroBatch) -> np.ndarray:
    """The gradient of the balance loss alone, of all tokens of a micro-batch and without weights."""
    return routers_of(_of_switch_loss(weights(), micro.tokens, micro.positions, micro.routes))[0]


@jax.jit
@jax.grad
def _of_switch_loss(params: Params, *read: Any) -> Any:
    return balance.switch_loss(update_of(0.0).predictor.model.forward(params, *read)[1])


@pytest.mark.parametrize("lengths", [[8] * 6, [20] * 6, [3, 20, 9, 17, 5, 12]], ids=str)
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_a_coefficient_is_one_strength(aggregation: Aggregation, lengths: list[int]):
    """However the other loss is averaged, however long the responses are and however many masked; in
    one micro-batch, or in several by their shares of the loss."""
    (whole,) = policy_batch(aggregation, lengths, 6)
    expected = by_switch_loss(whole)
    size = np.abs(expected).max()
    np.testing.assert_allclose(of_balance_alone([whole])[0], expected, rtol=0, atol=2e-5 * size)
    parts = policy_batch(aggregation, lengths, 2)
    shares = np.array([micro.weights.sum() for micro in parts], np.float64)
    assert len(parts) > 1
    each = zip(shares / shares.sum(), map(by_switch_loss, parts), strict=True)
    mean = sum(share * one for share, one in each)
    np.testing.assert_allclose(of_balance_alone(parts)[0], mean, rtol=0, atol=2e-5 * size)
