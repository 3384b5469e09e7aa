"""Each algorithm by name, from rewards to gradients, against its paper's formulas in float64."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
import pytest
from algorithm_cases import (
    BETA,
    GROUPS,
    LONGEST,
    SAMPLES,
    SPREAD,
    Response,
    drawn,
    flat,
    ours,
    values_of,
)

from pat_jax.config.algorithms import ALGORITHMS
from pat_jax.config.learning import AlgorithmConfig
from pat_jax.rl.algorithm.losses import ENTROPY, LOGPROBS
from pat_jax.training.build import policy_loss


def group_scores(group: Sequence[Response], rewards: Sequence[float]) -> list[float]:
    mean = sum(rewards) / len(group)
    deviation = (sum((r - mean) ** 2 for r in rewards) / (len(group) - 1)) ** 0.5
    return [(r - mean) / (deviation + 1e-6) for r in rewards]


def k3(x: Response) -> np.ndarray:
    return np.exp(x.reference - x.new) - (x.reference - x.new) - 1


def ppo(ratio: np.ndarray, advantage, low=0.2, high=0.2, delta=3.0) -> np.ndarray:
    gain = np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)
    bounded = np.maximum(gain, delta * advantage) if delta else gain
    return np.where(np.asarray(advantage) < 0, bounded, gain)


def over_tokens(terms: Sequence[np.ndarray]) -> float:
    return float(np.concatenate(terms).mean())


def grpo(groups: list[list[Response]]) -> float:
    """arXiv 2402.03300, eq. 3, averaged over tokens; the penalty is k3."""
    terms = []
    for group in groups:
        for x, advantage in zip(group, group_scores(group, [x.reward for x in group]), strict=True):
            terms.append(BETA * k3(x) - ppo(np.exp(x.new - x.old), advantage))
    return over_tokens(terms)


def dr_grpo(groups: list[list[Response]]) -> float:
    """arXiv 2503.20783, section 3.2: neither lengths nor deviations divide."""
    total = 0.0
    for group in groups:
        mean = sum(x.reward for x in group) / len(group)
        for x in group:
            total += (BETA * k3(x) - ppo(np.exp(x.new - x.old), x.reward - mean)).sum()
    return total / (LONGEST * GROUPS * SAMPLES)


def dapo(groups: list[list[Response]]) -> float:
    """arXiv 2503.14476, eq. 8 and 13: clip-higher and soft overlong punishment."""
    terms, cache = [], 0.2 * LONGEST
    for group in groups:
        rewards = []
        for x in group:
            over = len(x.new) - (LONGEST - cache)
            rewards.append(x.reward - (over / cache if over > 0 else 0.0))
        for x, advantage in zip(group, group_scores(group, rewards), strict=True):
            terms.append(BETA * k3(x) - ppo(np.exp(x.new - x.old), advantage, high=0.28))
    return over_tokens(terms)


def gspo(groups: list[list[Response]]) -> float:
    """arXiv 2507.18071, eq. 5 and 7: one ratio for a sequence, and the mean of sequences."""
    terms = []
    for group in groups:
        for x, advantage in zip(group, group_scores(group, [x.reward for x in group]), strict=True):
            ratio = np.exp((x.new - x.old).sum() / len(x.new))
            gain = ppo(ratio, advantage, 3e-4, 4e-4, delta=0.0)
            terms.append(BETA * k3(x).mean() - float(gain))
    return float(np.mean(terms))


def cispo_gradient_as_loss(groups: list[list[Response]]) -> Callable[[list], float]:
    """arXiv 2506.13585, eq. 4 and 5: weights that are held fixed, times log-probabilities."""
    weights = [np.minimum(np.exp(x.new - x.old), 5.0) for x in flat(groups)]

    def loss(groups: list[list[Response]]) -> float:
        terms = []
        for group in groups:
            scores = group_scores(group, [x.reward for x in group])
            for x, advantage in zip(group, scores, strict=True):
                weight = weights[len(terms)]
                terms.append(BETA * k3(x) - weight * advantage * x.new)
        return over_tokens(terms)

    return loss


def rloo(groups: list[list[Response]]) -> float:
    """arXiv 2402.14740: rewards with KL in them, the mean of the others as baseline, whole
    sequences as actions; PPO's clip on their ratio."""
    terms = []
    for group in groups:
        rewards = [x.reward - BETA * (x.old - x.reference).sum() for x in group]
        for i, x in enumerate(group):
            others = [r for j, r in enumerate(rewards) if j != i]
            advantage = rewards[i] - sum(others) / len(others)
            ratio = np.exp(x.new.sum() - x.old.sum())
            terms.append(-float(ppo(ratio, advantage, delta=0.0)))
    return float(np.mean(terms))


def whitened(advantages: Sequence[np.ndarray]) -> list[np.ndarray]:
    tokens = np.concatenate(advantages)
    return [(each - tokens.mean()) / tokens.std(ddof=1) for each in advantages]


def reinforce_pp(groups: list[list[Response]]) -> float:
    """arXiv 2501.03262: A_t = r - β Σ_{s ≥ t} log(π_old / π_ref), normalised over the batch."""
    everyone, advantages = flat(groups), []
    for x in everyone:
        kl = x.old - x.reference
        advantages.append(np.array([x.reward - BETA * kl[t:].sum() for t in range(len(kl))]))
    pairs = zip(everyone, whitened(advantages), strict=True)
    return over_tokens([-ppo(np.exp(x.new - x.old), advantage) for x, advantage in pairs])


def reinforce_pp_baseline(groups: list[list[Response]]) -> float:
    """arXiv 2501.03262: the mean of the group off, then normalised over the batch; k2 in the loss."""
    everyone, advantages = flat(groups), []
    for group in groups:
        mean = sum(x.reward for x in group) / len(group)
        advantages += [np.full(len(x.new), x.reward - mean) for x in group]
    terms = []
    for x, advantage in zip(everyone, whitened(advantages), strict=True):
        k2 = (x.new - x.reference) ** 2 / 2
        terms.append(BETA * k2 - ppo(np.exp(x.new - x.old), advantage))
    return over_tokens(terms)


def opo(groups: list[list[Response]]) -> float:
    """arXiv 2505.23585: the baseline is the mean reward weighted by lengths."""
    terms = []
    for group in groups:
        tokens = sum(len(x.new) for x in group)
        baseline = sum(len(x.new) * x.reward for x in group) / tokens
        for x in group:
            gain = ppo(np.exp(x.new - x.old), x.reward - baseline)
            terms.append(BETA * k3(x) - gain)
    return over_tokens(terms)


def gdpo(groups: list[list[Response]]) -> float:
    """arXiv 2601.05242 of one reward: GRPO's advantages, normalised over the batch once more."""
    everyone = flat(groups)
    scores = np.concatenate([group_scores(group, [x.reward for x in group]) for group in groups])
    advantages = (scores - scores.mean()) / scores.std(ddof=1)
    terms = [
        BETA * k3(x) - ppo(np.exp(x.new - x.old), advantage)
        for x, advantage in zip(everyone, advantages, strict=True)
    ]
    return over_tokens(terms)


def ppo_with_critic(groups: list[list[Response]]) -> float:
    """arXiv 1707.06347, eq. 7 and 11, with KL in the reward of each token (arXiv 2203.02155)."""
    everyone, advantages = flat(groups), []
    for x in everyone:
        rewards = -BETA * (x.old - x.reference)
        rewards[-1] += x.reward
        values = np.append(values_of(x), 0.0)
        deltas = rewards + values[1:] - values[:-1]
        n = len(deltas)
        advantages.append(
            np.array([sum(0.95 ** (s - t) * deltas[s] for s in range(t, n)) for t in range(n)])
        )
    pairs = zip(everyone, whitened(advantages), strict=True)
    return over_tokens([-ppo(np.exp(x.new - x.old), advantage) for x, advantage in pairs])


def distill(groups: list[list[Response]]) -> float:
    """The reverse KL of sampled tokens as dense reward, without a discount: the teacher's
    log-probability less the policy's (thinkingmachines.ai/blog/on-policy-distillation)."""
    terms = []
    for x in flat(groups):
        terms.append(BETA * k3(x) - ppo(np.exp(x.new - x.old), x.reference - x.old))
    return over_tokens(terms)


PAPERS = {
    "ppo": ppo_with_critic,
    "distill": distill,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "opo": opo,
    "gdpo": gdpo,
}


def test_every_algorithm_has_its_formula():
    assert PAPERS.keys() | {"cispo"} == ALGORITHMS.keys()


def numeric(function: Callable[[list[list[Response]]], float], groups) -> list[np.ndarray]:
    """Central differences with respect to each log-probability of the policy."""
    found, step = [], 1e-6
    for g, group in enumerate(groups):
        for i, x in enumerate(group):
            gradient = np.zeros(len(x.new))
            for t in range(len(x.new)):
                values = []
                for sign in (1, -1):
                    new = x.new.copy()
                    new[t] += sign * step
                    moved = [list(one) for one in groups]
                    moved[g][i] = x._replace(new=new)
                    values.append(function(moved))
                gradient[t] = (values[0] - values[1]) / (2 * step)
            found.append(gradient)
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradients_are_the_papers(name, seed):
    groups = drawn(seed, SPREAD.get(name, 0.4))
    formula = PAPERS.get(name) or cispo_gradient_as_loss(groups)
    # In the papers the KL is not multiplied by the ratio.
    value, gradients = ours(name, groups, use_bias_correction_kl=False)
    wanted, wanted_gradients = formula(groups), numeric(formula, groups)
    assert abs(value - wanted) <= 1e-6 * max(1, abs(wanted))
    for found, expected in zip(gradients, wanted_gradients, strict=True):
        assert np.all(np.abs(found - expected) <= 1e-6 * np.maximum(1, np.abs(expected)))
    others = [other for other in PAPERS if other != name]
    assert all(abs(PAPERS[other](groups) - wanted) > 1e-5 for other in others)  # it can tell


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("how", ["truncate", "mask"])
def test_a_correction_weights_what_another_distribution_sampled(level, how):
    """TIS and MIS: the importance weight of each token or of its response, bounded or left out."""
    rng, cap = np.random.default_rng(5), 1.5
    responses = np.array([[0, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0, 0]])
    new, old, sampled, advantage = rng.normal(-1, 0.5, (4, *responses.shape))
    weights = np.where(responses > 0, 1 / (responses > 0).sum(), 0)
    algorithm = AlgorithmConfig(
        rollout_correction=f"{level}_{how}",  # pyright: ignore[reportArgumentType]
        rollout_correction_cap=cap,
    )
    loss = policy_loss(algorithm, is_on_policy=False)
    columns = {"advantages": advantage, "behavior_logprobs": sampled, "old_logprobs": old}
    columns |= {"sampled_logprobs": sampled}
    as_jax = {name: jnp.asarray(value, jnp.float32) for name, value in columns.items()}
    value, sums = loss(
        {LOGPROBS: jnp.asarray(new, jnp.float32), ENTROPY: jnp.zeros(new.shape)},
        as_jax,
        jnp.asarray(weights, jnp.float32),
        jnp.asarray(responses),
    )
    total, capped = 0.0, 0.0
    for row, t in zip(*np.nonzero(responses), strict=True):
        mine = responses[row] == responses[row, t] if level == "sequence" else [t]
        weight = np.prod(np.exp(old[row, mine] - sampled[row, mine]))
        capped += (weight > cap) * weights[row, t]
        if weight > cap:
            weight = cap if how == "truncate" else 0.0
        gain = ppo(np.exp(new[row, t] - old[row, t]), advantage[row, t])
        total -= weight * float(gain) * weights[row, t]
    assert 0 < capped < 1
    np.testing.assert_allclose(value, total, rtol=1e-5)
    np.testing.assert_allclose(sums["correction_capped"], capped, rtol=1e-5)
