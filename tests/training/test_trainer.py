"""The update is the same on every layout."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from chex import assert_trees_all_close
from orders import order_of
from runs import TINY
from trainers import (
    CHAIN,
    CONFIG,
    LENGTH,
    ROWS,
    SINGLE,
    host_weights,
    made_up_batch,
    make_trainer,
    micro_batches,
    started,
    updated,
    with_reference,
)

from pat_jax.common.rules import OptionError
from pat_jax.config.command_line import parse
from pat_jax.config.compute import Compute
from pat_jax.config.role_table import REFERENCE
from pat_jax.config.run import RunConfig
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import preset
from pat_jax.profiling.predict.targets import Target, paper_devices
from pat_jax.programs.programs import Key
from pat_jax.rl.algorithm.policy_loss import PolicyLoss
from pat_jax.rl.batches.batches import to_supervised_batch
from pat_jax.run.start.setup import build
from pat_jax.training.build import functions_of
from pat_jax.training.handle import Handle
from pat_jax.training.trainer import SUPERVISED, Trainer


def after_a_step(layout: Layout) -> tuple[dict[str, float], Params, Params]:
    """Metrics, summed gradients and new parameters of one optimizer step of two micro-batches."""
    trainer = make_trainer(layout)
    params = jax.device_put(host_weights(), trainer.shardings)
    grads, sums = trainer["zero_gradients"](params), trainer["zero_sums"]()
    for micro in micro_batches():
        program = trainer.programs[Key("grad", layout.split, ROWS, LENGTH)]
        grads, sums = program({}, params, micro, grads, sums)
    state, result = updated(trainer, started(trainer))
    return result.metrics, jax.device_get(grads), jax.device_get(state.params)


@pytest.fixture(scope="module")
def single() -> tuple[dict[str, float], Params, Params]:
    return after_a_step(SINGLE)


@pytest.mark.parametrize(
    "name", ["dp2tp4", *(pytest.param(x, marks=pytest.mark.slow) for x in ("dp8tp1", "dp1tp8"))]
)
def test_an_update_is_that_of_a_single_device(name: str, single):
    metrics, grads, params = after_a_step(CHAIN[name])
    assert single[0]["train/loss"] != 0
    for key, value in single[0].items():
        assert metrics[key] == pytest.approx(value, rel=2e-5, abs=1e-6), key
    assert_trees_all_close(grads, single[1], rtol=2e-4, atol=2e-6)
    assert min(np.abs(x).max() for x in jax.tree.leaves(single[1])) > 1e-4
    # The first step of Adam is the sign of the gradient times the rate, but where it is nearly 0.
    moved = [
        np.mean(np.abs(a - b) < 1e-5)
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(single[2]), strict=True)
    ]
    assert min(moved) > 0.97


def test_a_smaller_micro_batch_is_compiled_when_it_comes():
    layout, shapes = CHAIN["dp8tp1"], ((ROWS, LENGTH), (ROWS, 2 * LENGTH))
    trainer = make_trainer(layout, micro_shapes=shapes, targets=())
    trainer.compile(by_need=True)
    smaller = Key("grad", layout.split, ROWS, LENGTH)
    assert trainer.programs.missing() == [smaller]
    assert (trainer.to_compile(by_need=False), trainer.to_compile(by_need=True)) == (1, 0)
    updated(trainer, started(trainer))
    assert not trainer.programs.missing() and trainer.programs.waited_s > 0


@pytest.mark.parametrize(("target", "first"), [(None, 1), ("h100:1", 2), ("h100:8", 2)])
def test_an_accelerator_has_passes_of_two_shapes_before_the_first_update(target, first):
    devices = paper_devices(Target.parse(target)) if target else jax.devices()[:1]
    layouts, _ = layout_chain(factored_mesh(devices), CONFIG)
    shapes = [(1, LENGTH), (2, LENGTH), (4, LENGTH), (8, LENGTH)]
    for layout in layouts.values():
        role = Handle(layout, shapes)
        for shape in shapes:
            role.programs.declare(Key("grad", layout.split, *shape), lambda x: x)
        assert [role.to_compile(by_need=here) for here in (True, False)] == [first, 4]


def built(*options: str) -> Trainer:
    """Of a run with a supervised stage."""
    config = parse([*TINY, "--profile", "none", "--run_dir", "unused", *options])
    return build(config, jax.devices()[:2]).trainer


def declared(trainer: Trainer) -> set[str]:
    return {key.name for key in trainer.programs.missing()}


@pytest.mark.parametrize(
    "options",
    [
        ("--algorithm.beta", "0.1"),
        ("--rollout.temperature", "0.5"),
        ("--algorithm.num_iterations", "2"),
    ],
)
def test_the_supervised_stage_has_passes_of_its_own_only_where_they_differ(options):
    plain, other = built(), built(*options)
    assert {"grad", "supervised_apply"} <= declared(plain)
    assert "supervised_grad" not in declared(plain) and "supervised_grad" in declared(other)
    for trainer in (plain, other):
        supervised = trainer.updates[SUPERVISED]
        assert supervised.predictor.temperature == 1
        assert supervised.loss == PolicyLoss(is_on_policy=True)


def test_a_supervised_step_by_shared_passes_says_its_cross_entropy():
    trainer = make_trainer(CHAIN["dp8tp1"], has_supervised=True)
    state, losses = started(trainer), []
    shown = to_supervised_batch([([1, 2], [3, 4, 5])] * 3, micro_shapes=[(ROWS, LENGTH)])
    for _ in range(3):
        state, result = trainer.supervised_step(state, shown)
        losses.append(result.metrics["train/cross_entropy"])
    assert losses[0] == pytest.approx(np.log(CONFIG.vocab_size), rel=0.5)
    assert losses[2] < losses[1] < losses[0]


def test_predictions_that_are_there_for_evaluations_are_in_no_update():
    trainer = make_trainer(CHAIN["dp8tp1"], predicts=True)
    assert "predict" in declared(trainer)
    updated(trainer, started(trainer))
    assert not trainer.programs.keys("predict")


def test_predictions_that_are_there_are_not_made_again():
    roles = with_reference(trainer := make_trainer(CHAIN["dp8tp1"]))
    roles.readers[REFERENCE].take(jax.device_put(host_weights(), trainer.shardings))
    (one,) = roles.predictions(dict)
    batch = one.added_to(made_up_batch())
    assert one.name == "log-probabilities of the reference"
    assert one.added_to(batch) is batch


def test_the_columns_that_the_loss_needs_are_predicted_and_a_missing_reference_is_said():
    trainer = make_trainer(CHAIN["dp8tp1"], loss=PolicyLoss(beta=0.5))
    with pytest.raises(ValueError, match="reference_logprobs is missing"):
        updated(trainer, started(trainer))
    roles = with_reference(trainer)
    changed = jax.tree.map(lambda x: 1.1 * x, host_weights())
    roles.readers[REFERENCE].take(jax.device_put(changed, trainer.shardings))
    _, result = trainer.update(started(trainer), roles.read(made_up_batch()))
    # One update: the old policy is the policy, and the reference is another.
    assert result.metrics["train/approx_kl"] == pytest.approx(0, abs=1e-6)
    assert result.metrics["train/reference_kl"] > 0.01


# --- layers as a loop: where it is chosen ---------------------------------------------------------

POLICY = Policy.from_config(replace(CONFIG, num_layers=2))


def test_auto_is_a_loop_where_compilers_take_long():
    half, whole = Compute("bfloat16"), Compute("float32")
    assert half.scans(8, "tpu") and whole.scans(36, "cuda") and whole.scans(8, "cpu")
    assert half.scans(8, "gpu")
    for asked, layers, platform in ((half, 7, "tpu"), (whole, 7, "gpu"), (half, 36, "cpu")):
        assert not asked.scans(layers, platform)
        assert replace(asked, scan_layers="true").scans(layers, platform)
        assert not replace(asked, scan_layers="false").scans(layers, platform)


@pytest.mark.parametrize(
    ("target", "option", "is_scanned"),
    [("v5e:2x4", "auto", True), ("h100:8", "auto", True), ("h100:8", "false", False)],
)
def test_shallow_models_of_a_plan_run_as_the_whole_one(target: str, option: Any, is_scanned: bool):
    config = RunConfig(scan_layers=option, compute_dtype="bfloat16")
    order = order_of(Target.parse(target), config, preset("qwen3-8b"), (2, 4))
    assert order.run.policy.compute.scan_layers == str(is_scanned).lower()


def test_what_a_cpu_cannot_is_refused():
    layout, asked = CHAIN["dp8tp1"], Compute("bfloat16")
    with pytest.raises(OptionError, match=r"--scan_layers is 'true'.*expected false with"):
        functions_of(replace(asked, scan_layers="true"), POLICY, layout)
    functions_of(asked, POLICY, layout)
    functions_of(replace(asked, scan_layers="true", dtype="float32"), POLICY, layout)
    assert POLICY.config.num_layers > 1
