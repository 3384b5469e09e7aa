"""What TRL's own trainers compute for made-up pairs and logits; run as a program, it records that.

    python tests/trl_losses.py

writes rl/recorded_trl.json and needs the `parity` extra.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl.trainer.distillation_trainer import _chunked_divergence_loss
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.reward_trainer import RewardTrainer

RECORDED = Path(__file__).parent / "rl" / "recorded_trl.json"
LENGTHS = ((3, 5), (1, 1), (7, 2), (4, 4), (2, 6))  # tokens of the chosen and the rejected response
REWARD_CASES = ({}, {"margin": True}, {"center_coef": 0.01}, {"center_coef": 0.5, "margin": True})
BETAS = (0.1, 2.0)
METRICS = {
    "accuracy": "accuracy",
    "margin": "margin",
    "mean_reward": "reward_mean",
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "logps/chosen": "chosen_logprob",
    "logps/rejected": "rejected_logprob",
}


def made_up() -> dict[str, Any]:
    rng = np.random.default_rng(7)
    drawn = [[-rng.exponential(1.5, n).round(3) for n in pair] for pair in LENGTHS]
    reference = [[x + rng.normal(0, 0.4, len(x)).round(3) for x in pair] for pair in drawn]
    return {
        "rewards": (2 * rng.normal(size=(len(LENGTHS), 2))).round(3).tolist(),
        "margins": rng.random(len(LENGTHS)).round(3).tolist(),
        "logprobs": [[x.tolist() for x in pair] for pair in drawn],
        "reference": [[x.tolist() for x in pair] for pair in reference],
        "student": rng.normal(0, 2, (2, 4, 7)).round(3).tolist(),
        "teacher": rng.normal(0, 2, (2, 4, 7)).round(3).tolist(),
    }


def trainer(**more: Any) -> Any:
    accelerator = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    return SimpleNamespace(
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **more,
    )


def measured(trainer: Any) -> dict[str, float]:
    seen = trainer._metrics["train"]
    return {ours: seen[theirs][0] for theirs, ours in METRICS.items() if theirs in seen}


def of_rewards(given: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Loss, metrics, and the gradient with respect to each pair's rewards."""
    rewards = torch.tensor(given["rewards"], dtype=torch.float64).T.reshape(-1, 1)
    rewards.requires_grad_()
    fake = trainer(args=SimpleNamespace(center_rewards_coefficient=case.get("center_coef")))
    inputs = {"attention_mask": torch.ones(len(rewards), 1)}
    if "margin" in case:
        inputs["margin"] = torch.tensor(given["margins"], dtype=torch.float64)
    model: Any = lambda **_: SimpleNamespace(logits=rewards)  # noqa: E731
    loss: Any = RewardTrainer.compute_loss(fake, model, inputs)
    loss.backward()
    gradient = rewards.grad.reshape(2, -1).T.tolist()
    return {"loss": loss.item(), "gradient": gradient, "metrics": measured(fake)}


def of_policy(given: dict[str, Any], beta: float) -> dict[str, Any]:
    """Loss, metrics, and the gradient with respect to each response's log-probabilities."""
    longest = max(map(max, LENGTHS))
    order = [(pair, side) for side in range(2) for pair in range(len(LENGTHS))]

    def padded(name: str) -> torch.Tensor:
        rows = [np.array(given[name][pair][side]) for pair, side in order]
        return torch.tensor(np.stack([np.pad(x, (0, longest - len(x))) for x in rows]))

    logprobs = padded("logprobs").requires_grad_()
    mask = torch.zeros(len(order), longest + 1, dtype=torch.int64)
    for row, (pair, side) in zip(mask, order, strict=True):
        row[1 : 1 + LENGTHS[pair][side]] = 1
    chosen, rejected = padded("reference").sum(1).chunk(2)
    fake = trainer(
        aux_loss_enabled=False,
        beta=beta,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        precompute_ref_logps=True,
        use_weighting=False,
    )
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    zeros = torch.zeros_like(logprobs)
    fake.accelerator.device = "cpu"

    def model(**_: Any) -> Any:
        unused = {"entropy": zeros, "mean_logits": zeros, "is_top1": zeros > 0}
        return SimpleNamespace(log_probs=logprobs, **unused)

    loss: Any = DPOTrainer._compute_loss(fake, model, inputs, False)
    loss.backward()
    gradient: list[list[Any]] = [[None, None] for _ in LENGTHS]
    for row, (pair, side) in zip(logprobs.grad, order, strict=True):
        gradient[pair][side] = row[: LENGTHS[pair][side]].tolist()
    return {"loss": loss.item(), "gradient": gradient, "metrics": measured(fake)}


def of_student(given: dict[str, Any]) -> dict[str, Any]:
    """The mean reverse KL over the whole vocabulary, and its gradient in the student's logits."""
    logits = torch.tensor(given["student"], dtype=torch.float64).requires_grad_()
    teacher = torch.tensor(given["teacher"], dtype=torch.float64)
    head = torch.eye(logits.shape[-1], dtype=torch.float64)
    mask = torch.ones(logits.shape[:-1])
    loss, _, _ = _chunked_divergence_loss(logits, teacher, head.requires_grad_(), head, mask, 1.0)
    loss.backward()
    return {"loss": loss.item(), "gradient": logits.grad.tolist()}


def everything() -> dict[str, Any]:
    given = made_up()
    return {
        "given": given,
        "reward": [{"case": case, **of_rewards(given, case)} for case in REWARD_CASES],
        "dpo": [{"beta": beta, **of_policy(given, beta)} for beta in BETAS],
        "distill": of_student(given),
    }


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(everything()) + "\n", encoding="utf-8")
