"""Kernels that are broken on purpose, interpreted on a CPU: each is found, and replaced."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from broken_kernels import (
    INTERPRETED,
    break_kernels,
    nothing,
    one_key_less,
    one_row_less,
    refused,
    wrong_gradient,
)
from fakes import FakeDevice
from runs import QWEN3

from pat_jax.engine.warm_up import kernel_check
from pat_jax.engine.warm_up.kernel_cases import ROUTED, Part
from pat_jax.engine.warm_up.kernel_check import Checked, check_kernels, usable_kernels
from pat_jax.layout.chain import least_tp
from pat_jax.models.kernels.kernel_choice import Kernels
from pat_jax.profiling.cross_compile.compile import environment
from pat_jax.profiling.predict.targets import Target

WORKER = Path(__file__).parents[1] / "compiled_kernels.py"
PART = Part(kv_heads=2, queries_per_kv=3, head_dim=16, page_size=8, dtype="float32")


EXPERTS = Kernels("cpu").having(["experts"])


def looked_at(
    part: Part = PART, kept: Path | None = None, kernels: Kernels = INTERPRETED
) -> dict[str, str]:
    """What is wrong with each kernel."""
    found = check_kernels(jax.devices()[0], [part], kernels, kept=kept)
    return {one.name: one.trouble for one in found}


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Breaks a CPU's kernels, see `break_kernels`."""
    yield partial(break_kernels, monkeypatch)
    jax.clear_caches()


def test_kernels_that_are_right_stay():
    assert looked_at() == dict.fromkeys(
        ("decode", "prefill", "verify", "append", "rows forward", "rows backward"), ""
    )
    # Shapes that kernels over pages do not take are gathered by everybody.
    assert set(looked_at(replace(PART, head_dim=24))) == {"rows forward", "rows backward"}


@pytest.mark.parametrize(
    ("change", "kernel", "names"),
    [
        (one_key_less, "decode", {"decode"}),
        pytest.param(one_key_less, "blocks", {"prefill", "verify"}, marks=pytest.mark.slow),
        pytest.param(nothing, "rows", {"rows forward", "rows backward"}, marks=pytest.mark.slow),
        (wrong_gradient, "rows", {"rows backward"}),
    ],
)
def test_a_wrong_kernel_is_found(broken, change, kernel, names):
    broken(change, kernel)
    found = {name: trouble for name, trouble in looked_at().items() if trouble}
    assert set(found) == names
    assert all("is wrong (relative error" in trouble for trouble in found.values())


OF_EXPERTS = {*ROUTED, "experts backward"}


def test_kernels_of_experts_are_looked_at_where_a_model_has_any():
    """Forward with the weights that rollouts have."""
    part = replace(PART, expert_sides=(32, 48))
    quantized = replace(part, weights="int8")
    assert looked_at(quantized, kernels=EXPERTS) == dict.fromkeys(OF_EXPERTS, "")
    assert looked_at(kernels=EXPERTS) == {}
    # Of a shape that no kernel takes there is nothing to look at.
    assert looked_at(replace(part, expert_sides=(24, 48)), kernels=EXPERTS) == {}


@pytest.mark.slow  # each kernel of experts compiles once more
def test_a_wrong_kernel_of_experts_is_found(broken):
    broken(one_row_less, "experts")
    found = looked_at(replace(PART, expert_sides=(32, 48)), kernels=EXPERTS)
    assert all("is wrong (relative error" in found[name] for name in OF_EXPERTS)


def test_a_kernel_that_does_not_compile_is_found(broken):
    broken(refused, "decode", "rows")
    found = {name: trouble for name, trouble in looked_at().items() if trouble}
    assert set(found) == {"decode", "rows forward", "rows backward"}
    assert found["decode"] == "does not run (NotImplementedError: no such instruction)"


def test_what_was_right_is_asked_once_and_what_was_wrong_again(broken, tmp_path, monkeypatch):
    path = tmp_path / "cache" / "kernels.json"
    seen = partial(looked_at, kernels=Kernels("cpu").having(["decode", "verify"]))
    broken(refused, "decode")
    assert seen(kept=path)["decode"]
    assert set(seen(kept=path)) == {"decode"}
    assert not [key for key in json.loads(path.read_text()) if '"decode"' in key]
    other = replace(PART, kv_heads=1)
    assert len(seen(other, kept=path)) == 3
    assert set(seen(kept=path)) == {"decode"}  # both are there
    for name, value in (("__version__", "of tomorrow"), ("sources", lambda: "edited")):
        with monkeypatch.context() as changed:
            changed.setattr(kernel_check, name, value)
            assert len(seen(kept=path)) == 3
    path.write_text("[3, {")
    assert len(seen(kept=path)) == 3


def test_kernels_of_a_model_with_other_processes_devices_are_checked_here(monkeypatch):
    """With `--placement split`, process 0 has no device of the critic."""
    looked: list[object] = []

    def look(device: object, *_: object, **__: object) -> list[Checked]:
        looked.append(device)
        return []

    monkeypatch.setattr(kernel_check, "check_kernels", look)
    devices: list[Any] = [FakeDevice(i, i // 2, platform="cpu") for i in range(4, 8)]
    layout = replace(least_tp(devices, QWEN3), kernels=INTERPRETED)
    found = usable_kernels([layout], QWEN3, page_size=8, dtype=jnp.dtype("float32"))
    assert found == INTERPRETED and looked == [jax.local_devices()[0]]


@pytest.mark.cross_compile
@pytest.mark.parametrize("target", ["h100:8", "v5e:2x4"])
@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-30b-a3b"])
def test_every_kernel_compiles_for_a_machine_that_is_not_here(target: str, model: str):
    command = [sys.executable, str(WORKER), target, model]
    done = subprocess.run(
        command, env=environment(Target.parse(target)), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = {"decode", "prefill", "verify", "rows forward", "rows backward"}
    names |= {"append"} if target == "h100:8" else set()
    names |= OF_EXPERTS if model == "qwen3-30b-a3b" else set()
    assert {name for name, _ in found} == names
    assert [trouble for _, trouble in found if trouble] == []
