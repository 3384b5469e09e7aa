"""The examination of a machine: every part is looked at, and one line says what to do."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from runs import finish, start

import pat_jax
import pat_jax.doctor as command
from pat_jax.commands import doctor as body
from pat_jax.common import devices as common_devices
from pat_jax.common.run_command import run_command
from pat_jax.profiling.doctor import checks
from pat_jax.profiling.doctor.checks import devices_found
from pat_jax.profiling.doctor.report import Finding

PARTS = ["devices", "versions", "links", "kernels", "switch", "iteration"]
COMMAND = ("-m", "pat_jax.doctor")


def fine(*_: object) -> Finding:
    return Finding("is fine")


def raises(*_: object) -> Finding:
    raise RuntimeError("INTERNAL: NCCL\noperation failed")


@pytest.fixture
def doctor(monkeypatch, capsys, tmp_path) -> Callable[..., tuple[int, list[str], dict[str, Any]]]:
    """Its exit code, its lines and its report; what takes long is fine unless something else is given."""

    def run(*options: str, **parts: Callable[..., Finding]) -> tuple[int, list[str], dict]:
        for name in ("links", "kernels", "switch", "iteration"):
            monkeypatch.setattr(body, f"{name}_found", parts.get(name, fine))
        monkeypatch.setattr(body, "configure", lambda count: jax.devices()[:2])
        out = tmp_path / "reports" / "doctor.json"
        monkeypatch.setattr(sys, "argv", ["doctor", "--out", str(out), *options])
        with pytest.raises(SystemExit) as caught:
            run_command(command.main)
        assert isinstance(caught.value.code, int)
        content = json.loads(out.read_text())
        return caught.value.code, capsys.readouterr().out.splitlines(), content

    return run


def test_a_machine_that_is_well_is_told_in_a_line_for_each_part_and_a_verdict(doctor):
    code, lines, content = doctor()
    assert code == 0 and content["is_well"]
    assert [line.split()[:2] for line in lines[:-1]] == [["ok", name] for name in PARTS]
    assert lines[-1] == content["verdict"] and "verdict: all is well on 2 x cpu" in lines[-1]
    assert [part["name"] for part in content["parts"]] == PARTS
    versions = content["parts"][1]["figures"]
    assert versions["jax"] == jax.__version__ and {"python", "flax", "pat_jax"} <= set(versions)


def test_a_part_that_fails_keeps_no_other_from_being_looked_at(doctor):
    code, lines, content = doctor(links=raises, iteration=lambda _: Finding("no", {}, "no"))
    assert code == 1 and not content["is_well"]
    assert [line.split()[1] for line in lines[:-1]] == PARTS
    assert [line.split()[0] for line in lines[:-1]].count("FAIL") == 2
    words = (
        "verdict: not well: links: RuntimeError: INTERNAL: NCCL operation failed; iteration: no. "
    )
    assert lines[-1].startswith(f"{words}To do: look at the links") and "pat_jax.train" in lines[-1]


def test_an_iteration_that_hangs_ends_the_process_with_a_verdict(monkeypatch, doctor):
    ended, iteration_found = [], body.iteration_found
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(body, "_iteration", lambda *_: sleep(3) or raises())
    _, lines, content = doctor("--step_seconds", "2", iteration=iteration_found)
    assert ended == [1] and not content["is_well"]
    verdicts = [line for line in lines if "iteration: has not come to an end" in line]
    assert len(verdicts) == 1 and "iteration: RuntimeError" in lines[-1]  # here it goes on


def test_from_python_it_returns_a_report_and_leaves_the_process(monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("the process would end"))
    for name in ("links", "kernels", "switch"):
        monkeypatch.setattr(body, f"{name}_found", fine)
    monkeypatch.setattr(body, "_iteration", lambda *_: sleep(1.5) or raises())
    monkeypatch.setattr(body, "configure", lambda count: jax.devices()[:2])
    hung = pat_jax.doctor(step_seconds=1)
    assert "iteration: has not come to an end" in capsys.readouterr().err and not hung.ok
    assert [(check.name, check.is_well) for check in hung.checks[-2:]] == [
        ("switch", True),
        ("iteration", False),
    ]
    assert "INTERNAL" in hung.checks[-1].sentence and "more than 1 s" in hung.verdict
    monkeypatch.setattr(body, "iteration_found", fine)
    report = pat_jax.doctor()
    assert report.ok and capsys.readouterr() == ("", "")
    assert [(check.name, check.is_well) for check in report.checks] == [(x, True) for x in PARTS]
    assert str(report).splitlines()[-1] == report.verdict and "2 x cpu" in report.verdict


def test_accelerators_that_jax_does_not_use_are_named(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(common_devices, "glob", lambda sign: ["/dev/nvidia0"] * ("nvidia" in sign))
    found = devices_found(jax.devices()[:2])
    assert found.trouble == "JAX runs on cpu, and the device files of cuda are there"
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # as asked for
    assert not devices_found(jax.devices()[:2]).trouble


def test_links_are_measured_for_every_degree():
    found = checks.links_found(jax.devices()[:4], jnp.dtype(jnp.float32))
    assert {name.split()[0] for name in found.figures} == {"2", "4"}
    assert all(seconds > 0 for seconds in found.figures.values())
    assert "GB/s" in found.sentence and not found.trouble
    alone = checks.links_found(jax.devices()[:1], jnp.dtype(jnp.float32))
    assert alone.sentence == "one device sends nothing"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "h100:8"], "option --target is not offered: python -m pat_jax.plan"),
        (["--model", "nothing"], "not a built-in shape"),
        (["--devices", "16"], "option --devices is 16: this machine has 8 cpu devices"),
        (["--out", "."], "report . cannot be written"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(monkeypatch, capsys, options, message):
    monkeypatch.setattr(sys, "argv", ["doctor", *options])
    with pytest.raises(SystemExit, match="2"):
        run_command(command.main)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.slow
def test_the_whole_examination_of_a_cpu(tmp_path: Path):
    out = tmp_path / "doctor.json"
    output = finish(start("--devices", "8", "--out", str(out), program=COMMAND))
    assert "verdict: all is well on 8 x cpu" in output.splitlines()[-1]
    content = json.loads(out.read_text())
    assert [part["name"] for part in content["parts"]] == PARTS
    assert content["parts"][4]["figures"]["path"] == [["dp8tp1", "dp1tp8"], ["dp1tp8", "dp8tp1"]]
    assert content["parts"][5]["figures"]["train/grad_norm"] > 0
