"""Writes recorded_critic.json: what verl's and TRL's own functions give for made-up responses.

Needs verl 0.9.1 and what it imports, in an environment of its own:

    python tests/rl/make_critic_reference.py
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import verl.trainer.ppo.core_algos as verl
from verl.utils.torch_functional import masked_whiten

LENGTHS = (5, 1, 9, 3, 9)
SETTINGS = ((1.0, 0.95), (0.99, 0.9), (0.9, 0.0), (1.0, 1.0))  # γ, λ
CLIP = 0.2


def drawn(rng: np.random.Generator, spread: float = 1.0) -> list[list[float]]:
    return [(spread * rng.normal(size=n)).tolist() for n in LENGTHS]


def padded(rows: list[list[float]]) -> torch.Tensor:
    filled = np.zeros((len(rows), max(LENGTHS)))
    for row, values in zip(filled, rows, strict=True):
        row[: len(values)] = values
    return torch.tensor(filled)


def by_response(array: torch.Tensor) -> list[list[float]]:
    return [row[:n].tolist() for row, n in zip(array, LENGTHS, strict=True)]


def main() -> None:
    rng = np.random.default_rng(34)
    rewards, values, returns = drawn(rng), drawn(rng), drawn(rng)
    predicted = [
        [x + 0.3 * float(rng.normal()) for x in row] for row in values
    ]  # on both sides of the clip
    mask = padded([[1.0] * n for n in LENGTHS])
    found = {"rewards": rewards, "values": values, "returns": returns, "predicted": predicted}
    for shift_mean in (True, False):
        white = masked_whiten(padded(rewards), mask, shift_mean=shift_mean)
        found[f"whitened_{shift_mean}"] = by_response(white)
    found["gae"] = []
    for gamma, lam in SETTINGS:
        pair = verl.compute_gae_advantage_return(padded(rewards), padded(values), mask, gamma, lam)
        advantages, gained = map(by_response, pair)
        found["gae"].append(
            {"gamma": gamma, "lam": lam, "advantages": advantages, "returns": gained}
        )
    plus_plus, _ = verl.compute_reinforce_plus_plus_outcome_advantage(
        padded(rewards), mask, config=SimpleNamespace(gamma=1.0)
    )
    found["reinforce_pp"] = by_response(plus_plus)
    new = padded(predicted).requires_grad_()
    loss, clipped = verl.compute_value_loss(new, padded(returns), padded(values), mask, CLIP)
    loss.backward()
    found["value_loss"] = {
        "clip": CLIP,
        "loss": loss.item(),
        "clip_fraction": clipped.item(),
        "gradient": by_response(new.grad),
    }
    control = verl.AdaptiveKLController(0.05, target_kl=6.0, horizon=1000)
    seen = []
    for kl, n in ((9.0, 64), (6.3, 64), (0.0, 256), (5.9, 8), (600.0, 128)):
        control.update(kl, n)
        seen.append({"kl": kl, "n": n, "beta": float(control.value)})
    found["kl_control"] = {"beta": 0.05, "target": 6.0, "horizon": 1000, "steps": seen}
    path = Path(__file__).with_name("recorded_critic.json")
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
