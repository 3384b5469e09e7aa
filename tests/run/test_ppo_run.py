"""A run of PPO: advantages as a plain computation has them, a policy that waits, and a resume bit for bit."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import assert_same_bits
from compilations import counted_in_iterations
from plain_model import outputs
from runs import JUDGE, TINY, presets_of_one_layer, run_to_end, without_times, write_checkpoint

from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse
from pat_jax.config.role_table import CRITIC, POLICY
from pat_jax.models.checkpoints.hf_config import read_config
from pat_jax.models.checkpoints.hf_load import load_params
from pat_jax.models.policy import Params, Policy
from pat_jax.rl.batches.train_batch import TrainBatch
from pat_jax.rl.batches.types import Rollout
from pat_jax.rl.data.arithmetic import TOKENIZER
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer, check_vocabulary
from pat_jax.run import learning
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.start.setup import build

BETA, TARGET, HORIZON, GAMMA, LAM = 0.05, 0.01, 40, 0.99, 0.9
PENALTY, CLIP, PRETRAIN = 0.5, 1.5, 1
OPTIONS = f"""
    --deterministic --layout dp2tp1 --seed 3 --warm_start.steps 0 --eval.every 0
    --rollout.prompts_per_step 6 --rollout.num_generations 1 --algorithm.name ppo
    --algorithm.mini_batch_size 3 --algorithm.beta {BETA} --algorithm.kl_target {TARGET}
    --algorithm.kl_horizon {HORIZON} --algorithm.gamma {GAMMA} --algorithm.lam {LAM}
    --algorithm.normalize_reward true --algorithm.reward_clip {CLIP}
    --algorithm.missing_eos_penalty {PENALTY} --critic.pretrain_steps {PRETRAIN}
    --log_completions true --critic.learning_rate 1e-2 --optimizer.learning_rate 1e-2 --checkpoint.every 1
"""
# By lengths: some responses are better than others.
REWARD = """
def score(prompts, completions, **columns):
    return [float(len(text) % 7) for text in completions]
"""


@dataclass
class Recorded:
    """What each iteration's batch was made of, and the run's end."""

    states: list[Any] = field(default_factory=list)  # of the trained roles, before the update
    responses: list[list[Rollout]] = field(default_factory=list)
    batches: list[TrainBatch] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)  # after the warm-up
    last: Any = None


def trained(folder: Path, *more: str, judge: Path | None = None) -> Recorded:
    """Runs the command's loop in this process.

    Args:
      judge: a reward model that scores beside the function, without weight in the reward.
    """
    (folder.parent / "reward.py").write_text(REWARD)
    reward = ["--reward", f"{folder.parent / 'reward.py'}:score"]
    if judge:
        reward += [f"model:{judge}", "--reward_weights", "1", "0", "--critic.model", "tiny"]
    config = parse([*TINY, *OPTIONS.split(), *reward, "--run_dir", str(folder), *more])
    found, made = Recorded(), learning.training_batch

    def recording(algorithm, scored, rewards, read, **options) -> Any:
        batch, measured = made(algorithm, scored, rewards, read, **options)
        (states,) = read.args
        found.states.append(jax.device_get({k: state.params for k, state in states.items()}))
        found.responses.append([one for group in scored.groups for one in group.rollouts])
        found.batches.append(batch)
        return batch, measured

    setup = build(config, jax.devices()[: config.devices])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "training_batch", recording)
        with counted_in_iterations() as found.compiled:
            run = run_to_end(setup)
    found.last = jax.device_get(dict(run.learner.states))
    found.rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]
    return found


@pytest.fixture(autouse=True, scope="module")
def one_layer() -> Iterator[None]:
    with presets_of_one_layer("tiny"):
        yield


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "judge", JUDGE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, judge: Path) -> tuple[Path, Recorded]:
    folder = tmp_path_factory.mktemp("ppo") / "whole"
    export = ["--critic.export_dir", str(folder.parent / "critic")]
    export += ["--checkpoint.export_dir", str(folder.parent / "policy")]
    return folder, trained(folder, "--steps", "3", *export, judge=judge)


def test_nothing_compiles_after_the_warm_up(whole: tuple[Path, Recorded]):
    """With a policy, a critic, a reference and a reward model."""
    _, found = whole
    assert found.compiled == []
    assert len({row["reward/judge/mean"] for row in found.rows}) == 3


def test_the_policy_waits_while_the_critic_alone_is_trained(whole: tuple[Path, Recorded]):
    _, found = whole
    policies, critics = ([states[name] for states in found.states] for name in ("train", "critic"))
    assert_same_bits(policies[0], policies[PRETRAIN])
    for before, after in ((critics[0], critics[1]), (policies[PRETRAIN], policies[PRETRAIN + 1])):
        moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), before, after)
        assert max(jax.tree.leaves(moved)) > 1e-3
    told = [{"train/loss", "train/learning_rate"} <= row.keys() for row in found.rows]
    assert told == [False, True, True]
    assert all(np.isfinite(row["critic/loss"]) for row in found.rows)
    assert [row["critic/learning_rate"] for row in found.rows] == pytest.approx([1e-2] * 3)
    assert found.last["critic"].step == 6 and found.last["train"].step == 4


def policy_of(scalar: bool) -> Policy:
    config = parse([*TINY, *OPTIONS.split(), "--run_dir", "unused"])
    setup = build(config, jax.devices()[:2])
    return setup.roles.models[CRITIC if scalar else POLICY].policy


def numbers(policy: Policy, params: Params, rollout: Rollout) -> np.ndarray:
    """At each token of a response its log-probability, or the value before it, by the model alone."""
    tokens = np.concatenate([rollout.prompt.tokens, rollout.tokens])
    found = outputs(policy, params, tokens)
    at = slice(len(rollout.prompt.tokens) - 1, len(tokens) - 1)
    if policy.config.head == "scalar":
        return found[at]
    logits = found[at]
    chosen = logits[np.arange(len(logits)), rollout.tokens]
    return chosen - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) - logits.max(1)


def test_advantages_and_returns_are_those_of_the_papers_formulas(whole: tuple[Path, Recorded]):
    """From tokens and parameters alone, in float64, one response and one token at a time."""
    folder, found = whole
    actor, critic = policy_of(scalar=False), policy_of(scalar=True)
    reference, beta, seen = found.states[0]["train"], BETA, []
    texts = [len(row["completion"]) % 7 for row in completions(folder)]
    for step, (states, responses, batch) in enumerate(
        zip(found.states, found.responses, found.batches, strict=True)
    ):
        rewards = np.array(texts[6 * step : 6 * step + 6], float)
        seen += list(rewards)
        scale = np.std(seen, ddof=1) + 1e-6
        scores = np.clip((rewards - np.mean(seen)) / scale, -CLIP, CLIP)
        every: list[tuple[np.ndarray, np.ndarray]] = []
        kls = []
        for score, one in zip(scores, responses, strict=True):
            score -= PENALTY * (one.finish.value == "length")
            values = numbers(critic, states["critic"], one)
            kl = numbers(actor, states["train"], one) - numbers(actor, reference, one)
            kls.append(kl)
            advantage, gained = np.zeros(len(values)), np.zeros(len(values))
            later, value = 0.0, 0.0
            for t in reversed(range(len(values))):
                reward = -beta * kl[t] + (score if t == len(values) - 1 else 0.0)
                later = reward + GAMMA * value - values[t] + GAMMA * LAM * later
                value = values[t]
                advantage[t], gained[t] = later, later + values[t]
            every.append((advantage, gained))
        raw = np.concatenate([each for each, _ in every])
        mean, deviation = raw.mean(), np.sqrt(raw.var(ddof=1) + 1e-8)
        for (advantage, gained), ours, returns in zip(
            every, batch.by_response("advantages"), batch.by_response("returns"), strict=True
        ):
            np.testing.assert_allclose(ours, (advantage - mean) / deviation, rtol=1e-4, atol=2e-4)
            np.testing.assert_allclose(returns, gained, rtol=1e-4, atol=2e-5)
        told = found.rows[step]
        assert told["train/kl_coef"] == pytest.approx(beta, rel=1e-6)
        mean_kl = np.concatenate(kls).mean()
        assert told["reward/kl_per_token"] == pytest.approx(mean_kl, abs=1e-5)
        if step >= PRETRAIN:
            beta *= 1 + np.clip(mean_kl / TARGET - 1, -0.2, 0.2) * len(responses) / HORIZON
    assert beta != BETA and np.abs(found.batches[2].by_response("returns")[0]).max() > 0.01


def completions(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


@pytest.mark.slow  # two more runs
def test_a_resumed_run_is_bit_for_bit_the_run_that_was_not_stopped(whole, judge, tmp_path):
    folder = tmp_path / "resumed"
    first = trained(folder, "--steps", "2", judge=judge)
    second = trained(folder, "--steps", "3", "--resume", "true", judge=judge)
    assert_same_bits(second.last, whole[1].last)
    assert len(first.rows) == 2 and [row["step"] for row in second.rows] == [1, 2, 3]
    assert without_times(second.rows[2:]) == without_times(whole[1].rows[2:])


def test_the_critic_is_exported_as_a_token_classifier_with_the_values_it_has(whole):
    folder, found = whole
    config = read_config(folder.parent / "critic")
    assert (config.head, config.head_bias) == ("scalar", True)
    policy = Policy.from_config(config)
    read = load_params(folder.parent / "critic", policy, None, jnp.dtype(jnp.float32))
    one, kept = found.responses[0][0], found.last["critic"].params
    values = numbers(policy_of(scalar=True), kept, one)
    np.testing.assert_allclose(numbers(policy, read, one), values, atol=1e-5)
    assert np.abs(values).max() > 1e-3


@pytest.mark.parametrize("name", ["policy", "critic"])
def test_exports_have_the_tokenizer_of_the_built_in_task(whole: tuple[Path, Recorded], name: str):
    folder, found = whole
    tokenizer = HuggingFaceTokenizer(folder.parent / name)
    check_vocabulary(tokenizer, read_config(folder.parent / name).vocab_size)
    one = found.responses[0][0]
    assert tokenizer.encode(TOKENIZER.decode(one.prompt.tokens)) == list(one.prompt.tokens)


@pytest.mark.slow  # four more runs
def test_adapters_of_policy_and_critic_over_one_base_go_on_where_they_were(tmp_path: Path):
    """Neither base is in a checkpoint; a critic's base with other weights is refused."""
    lora = ["--lora.rank", "2", "--critic.lora.rank", "2"]
    lora += ["--critic.pretrain_steps", "0", "--steps"]
    whole = trained(tmp_path / "whole", *lora, "2")
    trained(tmp_path / "other", *lora, "1")
    second = trained(tmp_path / "other", *lora, "2", "--resume", "true")
    assert_same_bits(second.last, whole.last)
    assert without_times(second.rows[1:]) == without_times(whole.rows[1:])
    assert whole.compiled == []
    adapters = whole.last["critic"].params
    kinds = {name.rpartition(".")[2] for name in adapters}
    assert kinds > {"q_proj", "down_proj", "score"} and np.abs(adapters["score"]).max() > 1e-3
    silent = ["--log_completions", "false"]  # it would stay open where the run ends
    with pytest.raises(UserError, match="are of another base"):
        trained(tmp_path / "other", *lora, "3", "--resume", "true", "--seed", "4", *silent)
