"""Losses and gradients against TRL's own code, on the same advantages (needs the `parity` extra).

Where the two differ on purpose: TRL clamps no exponents, and its clip of CISPO is at `epsilon_high`
itself, ours at 1 + epsilon_high.
"""

import contextlib
import json
from collections import defaultdict
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from algorithm_cases import BETA, LONGEST, SPREAD, Response, batch_of, drawn, flat, ours

from pat_jax.config.algorithms import ALGORITHMS
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.rl.rewards.responses import Response as Scored
from pat_jax.rl.rewards.signatures import Recognised

torch = pytest.importorskip("torch", reason="needs the `parity` extra")
pytest.importorskip("trl", reason="needs the `parity` extra")

from trl.rewards import (  # noqa: E402 - it imports torch
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    think_format_reward,
)
from trl.trainer.grpo_config import GRPOConfig  # noqa: E402 - it imports torch
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.rloo_trainer import RLOOTrainer  # noqa: E402
from trl_losses import RECORDED, everything  # noqa: E402

DEFAULTS = {x.name: x.default for x in fields(GRPOConfig)}
KL_ALONE, BY_SEQUENCE = {"use_bias_correction_kl": False}, {"loss_aggregation": "sequence"}
TRUNCATE = {"rollout_correction": "token_truncate"}
GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
GSPO |= {"epsilon_low": 3e-4, "epsilon_high": 4e-4}
# Ours by name, with what is not as the name says; TRL's options that are not its defaults.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "as it is": ("grpo", {"delta": 0.0}, {}),
    "KL alone": ("grpo", {"delta": 0.0} | KL_ALONE, KL_ALONE),
    "grpo": ("grpo", {}, {"loss_type": "dapo", "delta": 3.0}),
    "grpo of the paper": ("grpo", BY_SEQUENCE | {"delta": 0.0}, {"loss_type": "grpo"}),
    "dr_grpo": ("dr_grpo", {}, {"loss_type": "dr_grpo", "delta": 3.0}),
    "dapo": ("dapo", {}, {"loss_type": "dapo", "delta": 3.0, "epsilon_high": 0.28}),
    "gspo": ("gspo", {}, GSPO),
    "cispo": ("cispo", {}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "token_truncate": ("grpo", TRUNCATE, {"loss_type": "dapo", "delta": 3.0, "use_vllm": True}),
    "rloo": ("rloo", {}, {}),
}


def padded(rows: list[np.ndarray]) -> Any:
    filled = np.zeros((len(rows), LONGEST))
    for row, values in zip(filled, rows, strict=True):
        row[: len(values)] = values
    return torch.tensor(filled)


def theirs(
    everyone: list[Response], advantages: list[float], is_rloo: bool, **options: Any
) -> tuple[float, list[np.ndarray]]:
    """The loss in float64, and its gradient with respect to each response's log-probabilities."""
    lengths = [len(x.new) for x in everyone]
    logprobs = padded([x.new for x in everyone]).requires_grad_()
    mask = padded([np.ones(n) for n in lengths])
    options = DEFAULTS | {"epsilon_low": DEFAULTS["epsilon"]} | options
    if options["epsilon_high"] is None:  # as in TRL's constructor
        options["epsilon_high"] = options["epsilon"]
    read = "delta", "use_bias_correction_kl"
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            logprobs,
            torch.zeros_like(mask),
            None,
        ),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        args=SimpleNamespace(steps_per_generation=1, **{name: options[name] for name in read}),
        aux_loss_enabled=False,
        beta=BETA,
        current_gradient_accumulation_steps=1,
        epsilon_high=options["epsilon_high"],
        epsilon_low=options["epsilon_low"],
        importance_sampling_level=options["importance_sampling_level"],
        loss_type=options["loss_type"],
        max_completion_length=LONGEST,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=options["off_policy_mask_threshold"],
        top_entropy_quantile=options["top_entropy_quantile"],
        use_vllm=options["use_vllm"],
        vllm_importance_sampling_correction=options["vllm_importance_sampling_correction"],
    )
    old = padded([x.old for x in everyone])
    sampled = padded([as_sampled(x) for x in everyone])
    inputs = {
        "advantages": torch.tensor(np.array(advantages, np.float64)),
        "completion_ids": torch.zeros(mask.shape),
        "completion_mask": mask,
        "importance_sampling_ratio": torch.exp(old - sampled).clamp(max=2.0),
        "num_items_in_batch": mask.sum(),
        "old_logps": (old * mask).sum(1),
        "old_per_token_logps": old,
        "prompt_ids": torch.zeros(len(everyone), 1),
        "prompt_mask": torch.ones(len(everyone), 1),
        "ref_per_token_logps": padded([x.reference for x in everyone]),
    }
    loss: Any = (RLOOTrainer if is_rloo else GRPOTrainer)._compute_loss(trainer, None, inputs)
    loss.backward()
    gradient = logprobs.grad.numpy()
    return loss.item(), [row[:n] for row, n in zip(gradient, lengths, strict=True)]


def as_sampled(x: Response) -> np.ndarray:
    """What the rollout's distribution made of the tokens: half of them twice as unlikely."""
    return x.old - np.log(3.0) * (np.arange(len(x.old)) % 2)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradients_are_trls(case: str, seed: int):
    name, parts, options = CASES[case]
    groups = drawn(seed, SPREAD.get(name, 0.4))
    everyone = flat(groups)
    sampled = [as_sampled(x) for x in everyone]
    value, gradients = ours(name, groups, {"sampled_logprobs": sampled}, **parts)
    _, batch = batch_of(name, groups, **parts)
    advantages = [float(each[0]) for each in batch.by_response("advantages")]
    wanted, wanted_gradients = theirs(everyone, advantages, name == "rloo", **options)
    assert abs(value - wanted) <= 1e-6 * max(1, abs(wanted))
    for found, expected in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.abs(np.concatenate(wanted_gradients)).max() > 1e-3


def test_grpo_is_trls_default_but_for_the_bound_of_the_ratio():
    """The parts of the name, beside TRL's own defaults: a default that moves there fails here."""
    names = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}
    ours, theirs = ALGORITHMS["grpo"], DEFAULTS
    assert names[ours["loss_aggregation"]] == theirs["loss_type"]
    assert ours["ratio"] == theirs["importance_sampling_level"]
    assert ours["epsilon"] == theirs["epsilon"] and theirs["epsilon_high"] is None
    assert ours["use_bias_correction_kl"] == theirs["use_bias_correction_kl"]
    assert ours["entropy_coef"] == theirs["entropy_coef"]
    assert ours["scale_rewards"] == theirs["scale_rewards"]
    assert AlgorithmConfig.beta == theirs["beta"]
    assert ours["delta"] == 3.0 and theirs["delta"] is None


def assert_same(found, recorded) -> None:
    if isinstance(recorded, dict):
        assert found.keys() == recorded.keys()
        for name in recorded:
            assert_same(found[name], recorded[name])
    elif isinstance(recorded, list):
        for one, wanted in zip(found, recorded, strict=True):
            assert_same(one, wanted)
    else:
        np.testing.assert_allclose(found, recorded, rtol=1e-7, atol=1e-8)


def test_trl_gives_what_is_recorded():
    assert_same(json.loads(json.dumps(everything())), json.loads(RECORDED.read_text()))


def test_trls_own_reward_functions_run_unchanged():
    """On chats, with what they return on TRL's own arguments."""
    texts = ["", "<think>\n2 + 3\n</think>\n5", "abcabcabcabc"]
    ids = [list(map(ord, text)) for text in texts]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    chat = ({"role": "user", "content": "What is 2 + 3?"},)
    group = [
        Scored("p", text, {}, (1,), tokens, messages=chat)
        for text, tokens in zip(texts, ids, strict=True)
    ]
    for function in (
        think_format_reward,
        get_soft_overlong_punishment(max_completion_len=12, soft_punish_cache=4),
        get_repetition_penalty_reward(ngram_size=3),
    ):
        recognised = Recognised(function, "trl:function")
        with contextlib.closing(recognised.loop):
            assert recognised(group).scores == function(completions=messages, completion_ids=ids)
