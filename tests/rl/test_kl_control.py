"""β towards a target KL: verl's own numbers, and what a run relies on."""

import json
import math
from pathlib import Path

import pytest

from pat_jax.rl.algorithm.kl_control import KLControl

# Made by make_critic_reference.py.
VERL = json.loads(Path(__file__).with_name("recorded_critic.json").read_text(encoding="utf-8"))


def test_beta_is_verls():
    wanted = VERL["kl_control"]
    control = KLControl(wanted["beta"], wanted["target"], wanted["horizon"])
    for step in wanted["steps"]:
        control = control.after(step["kl"], step["n"])
        assert control.beta == pytest.approx(step["beta"], rel=1e-12)


def test_a_fixed_beta_stays():
    assert KLControl(0.05).after(100.0, 512) == KLControl(0.05)


def test_at_the_target_and_without_responses_beta_stays():
    control = KLControl(0.05, target=6.0)
    assert control.after(6.0, 512) == control.after(math.nan, 0) == control


def test_it_moves_at_most_a_fifth_of_the_horizons_share():
    control = KLControl(1.0, target=0.1, horizon=1000)
    assert control.after(1e9, 100).beta == pytest.approx(1.02)
    assert control.after(-1e9, 100).beta == pytest.approx(0.98)


@pytest.mark.parametrize("control", [KLControl(0.1), KLControl(0.1, 3.0, 500).after(7.0, 33)])
def test_a_checkpoint_has_all_of_it(control: KLControl):
    assert KLControl.from_json(json.loads(json.dumps(control.to_json()))) == control
