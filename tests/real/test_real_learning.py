"""SmolLM2-135M-Instruct learns a format by GRPO: answers that are digits and nothing else."""

import json
from pathlib import Path

import numpy as np
import pytest

import pat_jax

# A slow machine compiles for minutes.
pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]
QUESTIONS = [f"What is {a} + {b}?" for a, b in zip(range(1, 13), range(12, 0, -1), strict=True)]
STEPS = 6


def share_of_digits(completions, **columns) -> list[float]:
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "options",
    [{"optimizer.learning_rate": 2e-5}, {"optimizer.learning_rate": 1e-3, "lora.rank": 8}],
    ids=["full", "lora"],
)
def test_the_reward_rises(smollm2, problems, tmp_path, options, seed):
    run = pat_jax.train(
        {
            "model": str(smollm2),
            "data": str(problems),
            "reward_workers": 1,
            "devices": 1,
            "layout": "dp1tp1",
            "seed": seed,
            "steps": STEPS,
            "rollout.prompts_per_step": 4,
            "rollout.num_generations": 8,
            "rollout.max_prompt_length": 48,
            "rollout.max_completion_length": 8,
            "rollout.min_rows": 32,
            "speculation.source": "none",
            "algorithm.mini_batch_size": 4,
            "algorithm.tokens_per_micro_batch": 1024,
            "eval.every": 0,
            "run_dir": str(tmp_path / "run"),
            **options,
        },
        reward=share_of_digits,
    )
    rewards = np.array([one["reward/mean"] for one in run.metrics if "reward/mean" in one])
    print(np.round(rewards, 3))
    assert len(rewards) == STEPS
    assert rewards[-2:].mean() > 1.3 * rewards[:2].mean()
    # The trainer's old policy is the rollout's: one model, one arithmetic.
    assert max(one.get("train/behavior_gap", 0) for one in run.metrics) < 1e-4
