"""`import pat_jax`: what a program or a notebook calls does what the commands do."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import TINY, finish, named, start, without_times

import pat_jax
from pat_jax import UserError
from pat_jax.__main__ import COMMANDS
from pat_jax.rl.data import arithmetic
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.run.logging.metrics import read_metrics

OPTIONS = [*TINY, "--layout", "dp2tp1"]

# Compiles sooner; nothing here is of the model.
ONE_LAYER = """
from dataclasses import replace
from pat_jax.models.presets import PRESETS
PRESETS["tiny"] = replace(PRESETS["tiny"], num_layers=1)
"""
THE_COMMAND = "import runpy; runpy.run_module('pat_jax.train', run_name='__main__')"
# Run, resume, go on and fail in one process, as in a notebook; each fact a line.
PROGRAM = """
import json, sys
import pat_jax
from dataclasses import dataclass
from pat_jax.config.command_line import parse
from pat_jax.rl.algorithm.policy_loss import PolicyLoss

folder, options = sys.argv[1], json.loads(sys.argv[2])
seen = []

def tell(**facts):
    print(json.dumps(facts), file=sys.stderr)

def exact(completions, answer, **columns):
    seen.append(1)
    return [float(text == right) for text, right in zip(completions, answer)]

@dataclass(frozen=True)
class Mine(PolicyLoss):
    is_on_policy: bool = True

run = pat_jax.train(options, run_dir=f"{folder}/api", reward=[exact], loss=Mine())
tell(samples={step: len(run.samples[step]) for step in run.samples}, path=run.rollout.path)
tell(seen=seen, trace=len(run.plot_rollout().plots))
try:
    pat_jax.train(options, run_dir=f"{folder}/api")
except pat_jax.UserError as error:
    tell(refused=str(error))
run = pat_jax.train(run_dir=f"{folder}/api", resume=True, steps=3, reward=exact)
tell(steps=[row["step"] for row in run.metrics], reward=run.config.reward, loss=run.config.algorithm.loss)
tell(exported=str(run.export(f"{folder}/exported")))
# A clock would choose the layout, and a near-tie of one layout another token.
session = pat_jax.session(run=run, max_length=96, batch=4, layout="dp2tp1")
texts = [[answer.text for answer in answers] for answers in session.generate(["1+2="] * 2, n=2)]
more = [[answer.text for answer in answers] for answers in session.generate(["1+2="] * 2, n=2)]
tell(texts=texts, same=texts == more, tokens=sum(session.rollout.running[:1]))
try:
    session.generate(["1+2=", "x" * 200])
except pat_jax.UserError as error:
    tell(too_long=str(error))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def facts(folder: Path) -> dict:
    """What the program told."""
    program = start(str(folder), json.dumps(named(OPTIONS)), program=("-c", ONE_LAYER + PROGRAM))
    told: dict = {}
    for line in finish(program).splitlines():
        if line.startswith("{"):
            told |= json.loads(line)
    return told


def metrics(folder: Path) -> list[dict]:
    rows = without_times(read_metrics(folder / "metrics.jsonl"))
    return [{k: v for k, v in row.items() if not k.startswith("progress/")} for row in rows]


@pytest.mark.slow  # a whole command
def test_a_run_measures_what_the_command_measures(folder: Path, facts: dict):
    """With a function and a class of the program as its reward and loss, and the usual ones there."""
    program = "-c", ONE_LAYER + THE_COMMAND
    finish(start(*OPTIONS, "--run_dir", str(folder / "command"), program=program))
    ours, theirs = metrics(folder / "api"), metrics(folder / "command")
    assert ours[:3] == theirs and len(theirs) == 3


def test_a_run_has_metrics_samples_and_its_rollout(folder: Path, facts: dict):
    ours = metrics(folder / "api")
    assert len(ours) == 4 and {"train/loss", "reward/mean", "rollout/tokens"} <= ours[1].keys()
    assert facts["samples"] == {"1": 4} and facts["path"] == ["dp2tp1"]
    assert facts["seen"] == [] and facts["trace"] == 1


def test_a_run_goes_on_in_the_process_that_ended_it(facts: dict):
    assert facts["refused"].endswith("choose another, or --resume the run in it.")
    assert facts["steps"] == [0, 1, 2, 3]
    (reward,) = facts["reward"]
    assert reward.endswith(".reward:exact") and facts["loss"].endswith(".loss:Mine")


def test_what_was_learned_is_exported_and_generates(facts: dict):
    assert (Path(facts["exported"]) / "model.safetensors").is_file()
    tokenizer = HuggingFaceTokenizer(facts["exported"])  # of the built-in task, as train exports it
    assert tokenizer.encode("1+2=") == list(arithmetic.TOKENIZER.encode("1+2="))
    (a, b), (c, d) = facts["texts"]
    assert len({a, b, c, d}) > 1 and facts["same"] and facts["tokens"] == 4
    assert facts["too_long"].startswith("prompt 2: 200 tokens of prompt")


def test_importing_takes_no_time_and_starts_nothing():
    code = (
        "import sys, time; start = time.perf_counter(); import pat_jax; dir(pat_jax); "
        "print(time.perf_counter() - start, [x for x in ('jax', 'numpy') if x in sys.modules])\n"
        "from pat_jax import plan, session, train, UserError, SavedRun\n"
        "from jax._src import xla_bridge\n"
        "print(callable(train), callable(plan), xla_bridge.backends_are_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ}
    )
    first, second = done.stdout.splitlines()
    assert float(first.split()[0]) < 0.5 and first.endswith("[]")
    assert second == "True True False"


def test_options_are_read_before_jax_is_imported():
    code = (
        "import sys\nfrom importlib import import_module\n"
        "for name in sys.argv[1:]:\n"
        "    sys.argv = ['it', '--no_such_option', '1']\n"
        "    try:\n        import_module(f'pat_jax.{name}').main()\n"
        "    except Exception as error:\n        print(name, error)\n"
        "    print(name, {'jax', 'scipy', 'flax', 'orbax'} & set(sys.modules))"
    )
    names = sorted(COMMANDS)
    done = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, check=True
    )
    lines = done.stdout.strip().splitlines()
    assert lines[1::2] == [f"{name} set()" for name in names]
    assert all("no_such_option" in line for line in lines[::2]) and len(lines) == 2 * len(names)


@pytest.mark.parametrize("name", pat_jax.__all__)
def test_every_name_is_there_and_says_what_it_does(name: str):
    found = getattr(pat_jax, name)
    assert callable(found) and (found.__doc__ or "").strip() and name in dir(pat_jax)


# `compare` takes runs, and not the options of one.
FUNCTIONS = [name for name in pat_jax.__all__ if name in COMMANDS and name != "compare"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_modules_of_commands_are_called_whatever_was_imported_first(name: str):
    module = __import__(f"pat_jax.{name}", fromlist=["main"])
    assert getattr(pat_jax, name) is module and callable(module.main)
    parameters = inspect.signature(module).parameters
    assert "config" in parameters and "options" in parameters
    with pytest.raises(UserError, match=r"^unknown option modl='tiny'"):
        module(*[["a"]] * ("prompts" in parameters), modl="tiny")


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'pat_jax' has no attribute 'trian'"):
        _ = pat_jax.trian  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("given", [{"prompts": "x.jsonl"}, {"out": "x.jsonl"}, {"resume": True}])
def test_a_session_takes_no_files(given: dict):
    with pytest.raises(UserError, match=rf"option --{next(iter(given))} is .*: expected none here"):
        pat_jax.session({"model": "tiny"} | given)


def test_an_error_is_one_line_in_a_notebook():
    assert UserError("what, where.")._render_traceback_() == ["error: what, where."]
