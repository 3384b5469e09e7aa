"""Roles with experts beside transformers: a reference's KL, and the strength of the balance loss."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import TINY
from tabled_roles import tabled_roles

from pat_jax.config.command_line import parse
from pat_jax.config.role_table import REFERENCE
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.checkpoints.hf_config import read_config
from pat_jax.models.checkpoints.hf_load import load_params
from pat_jax.models.policy import Params, Policy
from pat_jax.rl.algorithm.kl import estimate_kl
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.algorithm.predict import Predictor
from pat_jax.rl.algorithm.update import Update, zero_gradients
from pat_jax.rl.batches.batches import Aggregation, to_read_batch, to_train_batch
from pat_jax.rl.batches.train_batch import with_no_routes
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup
from pat_jax.training.passes import model_functions

torch = pytest.importorskip("torch", reason="needs the `parity` extra")

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402 - it imports torch

SHAPE, CAP = (4, 48), 64
PENALTY = ["--algorithm.beta", "0.1", "--algorithm.kl_in", "reward", "--compute_dtype", "float32"]


def written(folder: Path, seed: int, layers: int = 2) -> Any:
    """A model of transformers in `folder`, whose experts differ enough to tell them apart."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.3,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def with_other_routers(model: Any, folder: Path) -> Any:
    """The same model, of which only the routers have drifted."""
    torch.manual_seed(9)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight += 0.3 * torch.randn_like(weight)
    model.save_pretrained(folder)
    return model


def loaded(folder: Path) -> tuple[Policy, Params]:
    policy = Policy.from_config(read_config(folder))
    return policy, load_params(folder, policy, None, jnp.float32)


def by_transformers(model: Any, rollout: Rollout) -> np.ndarray:
    tokens = torch.tensor([[*rollout.prompt.tokens, *rollout.tokens.tolist()]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=tokens).logits[0].double(), dim=-1)
    first = len(rollout.prompt.tokens) - 1
    return logprobs[first + torch.arange(len(rollout.tokens)), tokens[0, first + 1 :]].numpy()


def rollouts_of(policy: Policy, params: Params) -> list[Rollout]:
    """Made-up responses with the experts by which this policy computes them."""
    rng, model, found = np.random.default_rng(0), policy.bind(params), []
    for number in range(4):
        prompt = Prompt(number, tuple(rng.integers(1, 128, 5).tolist()), "", {})
        tokens = rng.integers(1, 128, 30, np.int32)
        whole = jnp.asarray([[*prompt.tokens, *tokens.tolist()]], jnp.int32)
        _, _, routed = model(whole, jnp.arange(whole.shape[1])[None])
        routes = np.asarray(routed.experts[0, :-1], np.int16)
        logprobs = np.full(len(tokens), -4, np.float32)
        found.append(Rollout(prompt, 0, tokens, logprobs, FinishReason.STOP, None, routes))
    return found


@pytest.mark.parametrize("drifted", ["all", "routers"])
def test_the_kl_of_a_reference_is_that_of_transformers(tmp_path: Path, drifted: str):
    """The policy samples with its own experts, and the reference is the model at the start."""
    start = written(tmp_path / "start", 0)
    policy, reference_params = loaded(tmp_path / "start")
    at_start = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "start").eval()
    now = (
        with_other_routers(start, tmp_path / "now")
        if drifted == "routers"
        else written(tmp_path / "now", 1)
    )
    _, params = loaded(tmp_path / "now")
    rollouts = rollouts_of(policy, params)

    chain, _ = layout_chain(factored_mesh(jax.devices()[:4]), policy.config)
    config = parse([*TINY, *PENALTY, "--run_dir", "unused"])
    roles = tabled_roles(config, policy, next(iter(chain.values())), [SHAPE])
    roles.readers[REFERENCE].take(reference_params)
    state = roles.policy["init_state"](jax.device_put(params, roles.policy.shardings))
    batch = roles.predict({roles.policy.name: state}, to_read_batch(rollouts, [SHAPE]))
    columns = (batch.by_response(x) for x in ("old_logprobs", "reference_logprobs"))
    found = [estimate_kl(*each) for each in zip(*columns, strict=True)]

    wanted = [
        estimate_kl(by_transformers(now, one), by_transformers(at_start, one)) for one in rollouts
    ]
    assert np.mean(wanted) > 0.01
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_balance_loss_is_as_strong_as_in_trl(tmp_path: Path, aggregation: Aggregation):
    """TRL adds coefficient * aux_loss of a micro-batch whatever its `loss_type`. One layer: with
    several, transformers adds layers up first."""
    coefficient = 0.7
    model = written(tmp_path, 0, layers=1)
    policy, params = loaded(tmp_path)
    rollouts, rows = rollouts_of(policy, params), []
    for one in rollouts:
        rows.append([*one.prompt.tokens, *one.tokens.tolist()])
    output = model(input_ids=torch.tensor(rows), output_router_logits=True)
    (coefficient * output.aux_loss).backward()
    (wanted,) = (x.grad for n, x in model.named_parameters() if n.endswith("mlp.gate.weight"))

    (layout,) = layout_chain(factored_mesh(jax.devices()[:1]), policy.config)[0].values()
    functions = model_functions(policy, layout, jnp.float32, remat="none")
    predictor, loss = Predictor(functions, 128), PolicyLoss(is_on_policy=True)
    update = Update(predictor, optax.sgd(1.0), loss, coefficient)
    batch = to_train_batch(
        [RolloutGroup(one.prompt, [one]) for one in rollouts],
        np.zeros((4, 1)),  # only the balance is learned
        mini_batch_size=4,
        micro_shapes=[SHAPE],
        aggregation=aggregation,
        truncated="score",
        max_completion_length=CAP,
    )
    ((micro,),) = batch.mini_batches
    micro = with_no_routes(micro, policy.config.routes_shape)
    made_of = micro, zero_gradients(params), update.zero_sums()
    grads, _ = jax.jit(update.grad_step)(params, *made_of)
    found = np.asarray(grads["layers"][0]["mlp"]["router"].get_value())
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5 * float(wanted.abs().max()) + 1e-7)
