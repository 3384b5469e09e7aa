"""Each role has its own options: only the policy is computed by the experts that its rollout recorded."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from routed import CONFIG, SHAPE, TEMPERATURE, own_logprobs, read_batch, recorded_rollouts
from runs import TINY
from tabled_roles import tabled_roles

from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.config.role_table import REFERENCE, TEACHER, role_table
from pat_jax.config.run import RunConfig
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.config import ModelConfig
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Params, Policy
from pat_jax.rl.algorithm.kl import estimate_kl
from pat_jax.training.reader import Reader
from pat_jax.training.role_model import RoleModel
from pat_jax.training.roles import Roles
from pat_jax.training.trainer import POLICY
from tests.lossless import lively_params

MODEL = Policy.from_config(CONFIG)
DENSE = replace(CONFIG, architecture="qwen3", experts=None)
CHAIN = {str(k): v for k, v in layout_chain(factored_mesh(jax.devices()), CONFIG)[0].items()}
(SINGLE,) = layout_chain(factored_mesh(jax.devices()[:1]), CONFIG)[0].values()
PENALTY = ["--algorithm.beta", "0.1", "--algorithm.kl_in", "reward"]
PPO = ["--algorithm.name", "ppo"]
DISTILL = ["--algorithm.name", "distill", "--teacher.model", "t"]


def config_of(*options: str) -> RunConfig:
    words = [*TINY, "--compute_dtype", "float32", "--rollout.temperature", str(TEMPERATURE)]
    return parse([*words, "--run_dir", "unused", "--remat", "full", *options])


def built(
    layout: Layout,
    *options: str,
    critic: ModelConfig | None = None,
    policy: Policy = MODEL,
) -> Roles:
    return tabled_roles(config_of(*options), policy, layout, [SHAPE], critic=critic)


def weights(seed: int) -> Params:
    """On the host. Those of another seed are another model."""
    rng = np.random.default_rng(seed)
    shift = lambda x: np.asarray(x + rng.normal(0, 0.2, x.shape), np.float32)  # noqa: E731
    return jax.tree.map(shift, jax.device_get(lively_params(MODEL)))


def column(reader: Reader, params: Params) -> list[np.ndarray]:
    reader.take(jax.device_put(params))
    return reader.read(read_batch(recorded_rollouts())).by_response(reader.column)


def assert_close(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_a_reference_routes_by_itself_and_the_policy_by_the_record():
    roles, rollouts = built(CHAIN["dp4tp2"], *PENALTY), recorded_rollouts()
    policy, reference = weights(0), weights(1)
    theirs = column(roles.readers[REFERENCE], reference)
    assert_close(theirs, own_logprobs(MODEL, reference, rollouts))
    state = roles.policy["init_state"](jax.device_put(policy, roles.policy.shardings))
    ours = roles.policy.predict(state, read_batch(rollouts)).by_response("old_logprobs")
    assert_close(ours, own_logprobs(MODEL, policy, rollouts, by_recorded=True))
    # The experts of the record are others: KL by them would be another number.
    by_record = own_logprobs(MODEL, reference, rollouts, by_recorded=True)
    right, wrong = (
        float(np.mean(np.concatenate([estimate_kl(x, y) for x, y in zip(ours, each, strict=True)])))
        for each in (theirs, by_record)
    )
    assert abs(wrong - right) > 0.05 * right


def test_a_reference_on_devices_of_its_own_routes_by_itself():
    two = layout_chain(factored_mesh(jax.devices()[:2]), CONFIG)[0]
    own = next(iter(two.values()))
    roles = tabled_roles(config_of(*PENALTY), MODEL, CHAIN["dp4tp2"], [SHAPE], reference=own)
    found = column(roles.readers[REFERENCE], weights(1))
    assert_close(found, own_logprobs(MODEL, weights(1), recorded_rollouts()))


@pytest.mark.parametrize("replays", ["true", "false"])
def test_router_replay_is_an_option_of_the_policy_alone(replays: str):
    options = [*PENALTY, "--algorithm.router_replay", replays]
    roles, rollouts, params = built(SINGLE, *options), recorded_rollouts(), weights(0)
    routed = own_logprobs(MODEL, params, rollouts)
    assert_close(column(roles.readers[REFERENCE], params), routed)
    state = roles.policy["init_state"](jax.device_put(params, roles.policy.shardings))
    ours = roles.policy.predict(state, read_batch(rollouts)).by_response("old_logprobs")
    by_record = own_logprobs(MODEL, params, rollouts, by_recorded=True)
    assert_close(ours, by_record if replays == "true" else routed)


def test_a_reference_with_adapters_of_routers_routes_by_itself():
    """Base and adapters are the policy's at the start; the adapters have moved a router since."""
    targets = ["v_proj", "gate.weight"]
    options = [*PENALTY, "--lora.rank", "2", "--lora.alpha", "4", "--lora.targets", *targets]
    roles, rollouts, base = built(SINGLE, *options), recorded_rollouts(), weights(0)
    lora = Lora.of(MODEL, rank=2, alpha=4.0, targets=targets)
    rng = np.random.default_rng(3)
    adapters = jax.tree.map(
        lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), lora.abstract_params
    )
    roles.policy.freeze(jax.device_put(base, roles.policy.trained.base_shardings))
    found = column(roles.readers[REFERENCE], adapters)
    assert_close(found, own_logprobs(MODEL, lora.attach(base, adapters), rollouts))


def reader_of(name: str, layout: Layout, *options: str) -> Reader:
    table = {role.name: role for role in role_table(config_of(*options), "cpu")}
    return RoleModel(table[name], MODEL, layout).reader([SHAPE])


@pytest.mark.parametrize(("role", "options"), [(REFERENCE, PENALTY), (TEACHER, DISTILL)])
@pytest.mark.parametrize("experts", ["gathered", "exchanged"])
def test_no_role_that_reads_has_the_policys_experts(role: str, options: list[str], experts: str):
    reader = reader_of(role, CHAIN["dp4tp2"], *options, "--experts", experts)
    assert_close(column(reader, weights(1)), own_logprobs(MODEL, weights(1), recorded_rollouts()))


def test_a_teachers_likeliest_tokens_are_of_its_own_experts():
    rollouts, params = recorded_rollouts(), weights(1)
    reader = reader_of(TEACHER, SINGLE, *DISTILL, "--teacher.top_k", "61")
    reader.take(jax.device_put(params))
    batch = reader.read(read_batch(rollouts))
    wanted = own_logprobs(MODEL, params, rollouts)
    for at, one, logprobs in zip(batch.places, rollouts, wanted, strict=True):
        top = batch.mini_batches[at.mini][at.micro].teacher
        assert top is not None
        ids, values = (np.asarray(x)[at.row, at.targets] for x in (top.ids, top.logprobs))
        is_token = ids == one.tokens[:, None]
        assert is_token.sum(axis=1).tolist() == [1] * len(one.tokens)
        np.testing.assert_allclose(values[is_token], logprobs, atol=2e-5)


@pytest.mark.parametrize("experts", ["gathered", "exchanged"])
@pytest.mark.parametrize("is_dense", ["policy", "critic"])
def test_the_form_of_updates_with_experts_is_for_the_models_that_have_some(experts, is_dense):
    models: dict[str, Any] = {"policy": CONFIG, "critic": replace(CONFIG, head="scalar")}
    models[is_dense] = replace(DENSE, head=models[is_dense].head)
    policy = Policy.from_config(models["policy"])
    options = [*PPO, "--experts", experts]
    roles = built(SINGLE, *options, critic=models["critic"], policy=policy)
    assert roles.critic is not None and roles.policy.name == POLICY


def test_the_form_of_updates_is_refused_where_no_trained_model_has_experts():
    dense, critic = Policy.from_config(DENSE), replace(DENSE, head="scalar")
    with pytest.raises(UserError, match=r"--experts is 'gathered'.*no experts"):
        built(SINGLE, *PPO, "--experts", "gathered", critic=critic, policy=dense)
