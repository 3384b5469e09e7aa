"""`--remat auto`: the form that recomputes least among those that fit a device."""

import math
from dataclasses import replace

import jax
import pytest
from runs import TINY

from pat_jax.config.command_line import parse
from pat_jax.config.compute import REMAT_FORMS, Remat
from pat_jax.planning.memory import USABLE
from pat_jax.run.start.setup import Setup, build
from pat_jax.training.remat_choice import kept_bytes, settled_remat, update_bytes
from pat_jax.training.update_memory import update_stages


@pytest.fixture(scope="module")
def setup() -> Setup:
    return build(parse([*TINY, "--run_dir", "unused"]), jax.devices()[:4])


@pytest.fixture(scope="module")
def kept(setup: Setup) -> dict[str, int]:
    roles = setup.roles
    return {form: kept_bytes(roles.models["policy"], roles.policy, form) for form in REMAT_FORMS}


def test_each_form_keeps_less_than_the_one_before(setup: Setup, kept: dict[str, int]):
    assert sorted(kept.values(), reverse=True) == [*kept.values()]
    assert len({*kept.values()}) == len(REMAT_FORMS)
    # The inputs of all layers are kept in any case, in float32, of the rows of a device.
    trainer = setup.roles.policy
    config = trainer.policy.config
    ((rows, length),) = trainer.largest
    inputs = config.num_layers * rows // trainer.layout.split.dp * length * config.embed_dim * 4
    assert inputs <= kept["full"] < 4 * inputs


@pytest.mark.parametrize("form", REMAT_FORMS)
def test_the_form_that_just_fits_is_chosen(setup: Setup, form: Remat):
    roles = setup.roles
    limit = (update_bytes(roles, roles.policy, form) + 1) / USABLE
    chosen, words = settled_remat("auto", roles, limit)
    assert chosen == form
    assert (f"--remat auto is {form}" in words) == (form != "none")


def test_what_fits_nowhere_is_full_and_what_is_asked_for_is_kept(setup: Setup):
    assert settled_remat("auto", setup.roles, 1.0)[0] == "full"
    assert settled_remat("auto", setup.roles, math.inf) == ("none", "")
    assert settled_remat("dots", setup.roles, 1.0) == ("dots", "")


def test_a_run_has_the_form_in_its_options_and_programs(setup: Setup):
    roles = setup.roles
    assert setup.config.remat == "none"
    assert {model.role.compute.remat for model in roles.models.values()} == {"none"}
    # The estimate is no less than what XLA's program takes.
    roles.policy.compile(by_need=True)
    most = max(stage.total for stage in update_stages(replace(roles, readers={})))
    assert most <= update_bytes(roles, roles.policy, "none")
