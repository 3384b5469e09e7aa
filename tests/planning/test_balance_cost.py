"""When it pays to move sequences between replicas, and when the budget of a rollout affords a switch."""

from dataclasses import replace

import numpy as np
import pytest
from fakes import SPLITS
from hypothesis import given
from hypothesis import strategies as st
from made_up_machines import CAP, FASTER_WITH_TP, SLOWER_WITH_TP, lengths_of, machine

from pat_jax.planning.latency.switch_costs import FADING, LEAST, NOISE, OWN, SeenSwitch, SwitchCosts
from pat_jax.planning.planner.balance import balance_seconds
from pat_jax.planning.planner.budget import SHARE, RegretBudget
from pat_jax.planning.planner.planner import CostModelPlanner
from pat_jax.planning.types import Load, Moved, Plan, Split

DP8, DP4TP2, DP2TP4, TP8 = SPLITS
ROW_S = 2e-3  # of a step, each running row of the fullest replica
GENERATED = 60
LEFT = CAP - GENERATED  # of every running sequence, as far as is known: 50 tokens or all of them
LENGTHS = lengths_of((50, 95), (CAP, 5))
GROUP = np.repeat(np.arange(4), [9, 3, 4, 2])
CONTEXT = np.where(np.arange(18) == 0, 5, 60)
ONE, FOUR = GROUP.copy(), GROUP.copy()
ONE[0], FOUR[:4] = 3, [3, 1, 3, 1]


def load(replica: np.ndarray = GROUP, left: int = LEFT) -> Load:
    alike = np.ones(len(replica), int)
    return Load(replica, GENERATED * alike, CONTEXT[: len(replica)], left * alike, step=GENERATED)


def make_planner(
    shift_per_token: float | None,
    *,
    row_s: float = ROW_S,
    step=SLOWER_WITH_TP,
    splits=(DP4TP2,),
    **options,
) -> CostModelPlanner:
    latency = machine(step, per_row=row_s / 2, shift_per_token=shift_per_token, **options)
    return CostModelPlanner(splits, latency, LENGTHS)


def asked(planner: CostModelPlanner, *options: np.ndarray, left: int = LEFT) -> Plan:
    plan = planner.decide(load(left=left), DP4TP2, options)
    assert plan.split == DP4TP2
    return plan


def test_it_takes_what_gains_most():
    """One row less for 5 tokens, or four rows less for 185: a table entry of 64 to 512 tokens."""
    balance = asked(make_planner(1e-4), ONE, FOUR)
    assert (balance.replica == FOUR).all()
    assert 4 * LEFT * ROW_S * 1.064 < balance.predicted_saving_s < 4 * LEFT * ROW_S * 1.512
    assert balance.predicted_cost_s == pytest.approx(1e-4 * 185)
    balance = asked(make_planner(0.05), ONE, FOUR)
    assert (balance.replica == ONE).all()
    assert LEFT * ROW_S * 1.064 < balance.predicted_saving_s < LEFT * ROW_S * 1.512
    assert balance.predicted_cost_s == pytest.approx(0.05 * 5)
    assert "1 of 18 sequences, from 9 to 8" in balance.reason


def test_it_moves_nothing_for_nothing():
    assert asked(make_planner(1.0), ONE, FOUR).replica is None, "dearer than all it saves"
    assert asked(make_planner(1e-4, row_s=0.0), ONE, FOUR).replica is None, "no step is faster"
    assert asked(make_planner(None), ONE, FOUR).replica is None, "nobody knows what it costs"
    assert asked(make_planner(1e-4)).replica is None
    last = asked(make_planner(1e-3), ONE, FOUR, left=1)
    assert last.replica is None, "one step to go"


def test_what_a_switch_will_merge_need_not_be_even():
    """Most end in ten steps, and the others go to TP8 then: replicas are even for those steps
    alone."""
    moves = {"row_s": 0.01, "step": FASTER_WITH_TP, "reshard": 1e-6}
    plans = []
    for splits in ((DP4TP2,), (DP4TP2, TP8)):
        planner = make_planner(0.05, splits=splits, **moves)
        planner.lengths = lengths_of((GENERATED + 10, 90), (CAP, 10))
        plans.append(asked(planner, ONE))
    stays, merges = plans
    assert stays.threshold == 0 and stays.replica is not None
    assert merges.threshold > 0 and merges.replica is None


def test_what_moves_took_is_believed():
    planner = make_planner(1e-3)
    first = asked(planner, FOUR)
    planner.observe(Moved(first, 10 * first.predicted_cost_s))
    second = asked(planner, FOUR)
    assert 8 < second.predicted_cost_s / first.predicted_cost_s < 10
    assert second.predicted_saving_s == pytest.approx(first.predicted_saving_s)
    planner.observe(Moved(second, 1e3 * first.predicted_cost_s))
    assert asked(planner, FOUR).replica is None


def test_a_frozen_planner_believes_its_profile():
    planner = make_planner(1e-3)
    planner.is_frozen = True
    first = asked(planner, FOUR)
    planner.observe(Moved(first, 1e3 * first.predicted_cost_s))
    second = asked(planner, FOUR)
    assert second.predicted_cost_s == first.predicted_cost_s


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30),
    st.integers(1, 50),
)
def test_pages_that_go_equally_far_go_together(moves, round_tokens):
    """Against the rounds counted one by one."""
    old, new = np.array(moves).T
    context = 1 + np.arange(len(old)) * 7 % 40
    seconds = 0.25
    latency = machine(SLOWER_WITH_TP, shift_per_token=seconds)
    latency = replace(latency, round_tokens=round_tokens)
    zeros = np.zeros(len(old), int)
    rounds = 0
    for distance in (1, 2, 3):
        due = [0] * 4
        for tokens, a, b in zip(context.tolist(), old.tolist(), new.tolist(), strict=True):
            due[a] += tokens * ((b - a) % 4 == distance)
        rounds += -(-max(due) // round_tokens)
    found = balance_seconds(latency, Split(4, 2), Load(old, zeros, context, zeros), new)
    assert found == pytest.approx(rounds * seconds)


def test_a_move_within_a_bucket_waits_until_as_much_is_lost_as_it_costs():
    """Fifteen rows or nine: both need the bucket of sixteen, and a step reads what is held."""
    costs = machine(SLOWER_WITH_TP, per_row=1e-3, shift_per_token=2e-3)
    steps = {key: s for key, s in costs.decode_table.items() if key[1] in (1, 2, 4, 8, 16, 32)}
    costs = replace(costs, decode_table=steps, reads="held")
    planner = CostModelPlanner((DP4TP2,), costs, lengths_of((CAP, 1)))
    replica = np.repeat(np.arange(4), [15, 3, 3, 3])
    evened = replica.copy()
    evened[:6] = [1, 1, 2, 2, 3, 3]
    moved_at = []
    for step in range(1, 40):
        alike = np.ones(len(replica), int)
        now = Load(replica, step * alike, 20 * alike, (CAP - step) * alike, step=step)
        if planner.decide(now, DP4TP2, [evened]).replica is not None:
            moved_at.append(step)
    assert moved_at and moved_at == [*range(moved_at[0], 40)] and moved_at[0] > 3


positive = st.floats(0.01, 10)
by_layout = st.tuples(*[positive] * 4).map(np.array)
bursts = st.lists(st.tuples(st.integers(0, 3), by_layout), max_size=8)


@given(by_layout, st.integers(0, 3), bursts, by_layout, st.lists(positive, max_size=3))
def test_behind_is_what_was_spent_over_the_best_layout(prefill, start, ran, correction, switches):
    account = RegretBudget(prefill, start)
    for step, (_, profile_s) in enumerate(ran):
        account.expect(ran[step - 1][0], profile_s, step)  # of one step each
    if ran:
        account.expect(ran[-1][0], np.ones(4), len(ran))
    for seconds in switches:
        account.switch(seconds)
    spent = prefill[start] + sum(switches) + sum(s[i] * correction[i] for i, s in ran)
    static = [prefill[i] + sum(s[i] * correction[i] for _, s in ran) for i in range(4)]
    assert account.spent_s(correction) == pytest.approx(spent)
    assert account.behind_s(correction) == pytest.approx(spent - min(static))
    for cost, remaining in ((0.1, 1.0), (1.0, 100.0)):
        is_within = spent - min(static) + cost <= SHARE * (spent + remaining)
        assert account.affords(cost, remaining, correction) == is_within


PROFILE = np.where(np.eye(4, dtype=bool), 0.0, 0.05)  # reshard, seconds

pairs = st.sampled_from([(a, b) for a in SPLITS for b in SPLITS if a != b])
seconds = st.floats(0.01, 1.0)
switches = st.builds(
    lambda pair, carry, reshard, kv, ratio: SeenSwitch(
        pair[0], pair[1], carry, reshard, kv, ratio * (reshard + kv)
    ),
    pairs,
    st.sampled_from(["migrate", "recompute"]),
    seconds,
    seconds,
    st.floats(0.3, 20),
)


def parts(source, target, carry, reshard_s, kv_s) -> np.ndarray:
    """Of one switch: the fixed part, what is common, that of each pair and of each way."""
    pair = np.zeros((4, 4))
    pair[SPLITS.index(source), SPLITS.index(target)] = reshard_s
    way = kv_s * np.array([carry == "migrate", carry == "recompute"])
    return np.concatenate([[1.0, reshard_s + kv_s], pair.ravel(), way])


def regression(seen: tuple[SeenSwitch, ...]) -> np.ndarray:
    """The mean of the parts' sizes given what was seen: ridge regression, float64."""
    features = np.array(
        [parts(one.source, one.target, one.carry, one.reshard_s, one.kv_s) for one in seen]
    )
    size = np.mean([one.profile_s for one in seen])
    prior = np.concatenate([[size, 1.0], np.full(18, OWN)]) ** 2
    noise = np.array([NOISE * one.profile_s * (1 + FADING * one.age) for one in seen]) ** 2
    excess = np.array([one.actual_s - one.profile_s for one in seen])
    precision = np.diag(1 / prior) + features.T @ (features / noise[:, None])
    return np.linalg.solve(precision, features.T @ (excess / noise))


@given(st.lists(switches, min_size=1, max_size=6))
def test_it_is_bayesian_regression(seen):
    costs = SwitchCosts(tuple(seen))
    fixed, common, *own = regression(costs.seen)
    pair, way = np.reshape(own[:16], (4, 4)), {"migrate": own[16], "recompute": own[17]}
    expected = np.maximum(LEAST * PROFILE, PROFILE * (1 + common + pair) + fixed)
    believed = costs.reshard(SPLITS, PROFILE)
    np.testing.assert_allclose(believed[PROFILE > 0], expected[PROFILE > 0], rtol=1e-6)
    assert (np.diag(believed) == 0).all()
    for carry in ("migrate", "recompute"):
        assert costs.kv(carry) == pytest.approx(max(LEAST, 1 + common + way[carry]), rel=1e-6)


def test_what_was_seen_long_ago_is_forgotten():
    costs = SwitchCosts().observed(SeenSwitch(DP8, TP8, "migrate", 0.05, 0.0, 1.0))
    believed = []
    for _ in range(300):
        believed.append(costs.reshard(SPLITS, PROFILE)[0, 3])
        costs = costs.aged()
    assert (np.diff(believed) < 0).all()
    assert believed[0] > 0.95 and believed[10] > 0.8 and believed[-1] < 0.15


@given(st.lists(switches, min_size=40, max_size=40))
def test_the_past_is_bounded_and_no_switch_is_free(seen):
    costs = SwitchCosts()
    for one in seen:
        costs = costs.observed(one)
    assert len(costs.seen) == 32 and costs.seen[-1] == seen[-1]
    assert (costs.reshard(SPLITS, PROFILE) >= LEAST * PROFILE).all()
    assert min(costs.kv("migrate"), costs.kv("recompute")) >= LEAST


@given(st.lists(st.sampled_from([0.0, 1e-12, 0.05]), min_size=1, max_size=6))
def test_switches_that_the_profile_takes_for_free_are_no_division_by_zero(profile_s):
    model = SwitchCosts()
    for kv_s in profile_s:
        model = model.observed(SeenSwitch(DP8, TP8, "migrate", 0.0, kv_s, actual_s=kv_s))
    assert np.isfinite(model.reshard(SPLITS, PROFILE)).all()
    assert model.kv("migrate") == pytest.approx(1.0) and np.isfinite(model.pages(0.05))
