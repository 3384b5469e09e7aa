"""The real command at its smallest: options, a checkpoint directory, a data file, processes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pat_jax.config.command_line import parse
from pat_jax.config.role_table import reward_roles
from pat_jax.config.run import RunConfig
from pat_jax.engine.engine import RolloutEngine
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Params, Policy
from pat_jax.models.presets import PRESETS, preset
from pat_jax.rl.algorithm.update import TrainState
from pat_jax.run import loop, opened
from pat_jax.run.checkpoints.checkpoint import Checkpointer
from pat_jax.run.checkpoints.files import CHECKPOINTS
from pat_jax.run.files.folder import CONFIG_FILE
from pat_jax.run.process.stop_signals import StopSignals
from pat_jax.run.roles.reward_models import RewardModels, build_reward_models
from pat_jax.run.roles.role_models import Division
from pat_jax.run.scoring import open_scorer
from pat_jax.run.start.engine_setup import build_engine
from pat_jax.run.start.setup import Setup, build, model_config

ROOT = Path(__file__).parent.parent
COMMAND = ("-m", "pat_jax.train")

# Names of options and their values in turns.
_ROLLOUT = """
    --devices 2 --steps 2 --rollout.prompts_per_step 4 --rollout.num_generations 2
    --rollout.max_completion_length 56 --rollout.min_rows 4 --rollout.min_length 128
    --rollout.prefill_blocks 16 --algorithm.mini_batch_size 4
    --algorithm.tokens_per_micro_batch 1024 --eval.every 2 --eval.num_prompts 8 --checkpoint.every 2
"""
_MODEL = """
    --preset demo --model tiny --warm_start.steps 2
    --rollout.compile all
"""
SMALL_ROLLOUT, TINY = _ROLLOUT.split(), (_MODEL + _ROLLOUT).split()

# A layer is enough where a test is of a command and not of its model: compiling takes as long as there are
# layers.
QWEN3 = ModelConfig(
    *("qwen3", 300, 32, 48, 1, 4, 2, 8),
    qk_norm=True,
    tie_embeddings=True,
    max_position=512,
    vocab_multiple=8,
)
JUDGE = replace(QWEN3, head="scalar", tie_embeddings=False)


@contextmanager
def presets_of_one_layer(*names: str) -> Iterator[None]:
    """So are these built-in shapes in this process, with experts where they have any."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            shape = preset(name)
            experts = shape.experts and replace(shape.experts, dense_layers=())
            patch.setitem(cast(dict, PRESETS), name, replace(shape, num_layers=1, experts=experts))
        yield


CHAT_TEMPLATE = (
    "{% for m in messages %}<im>{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<im>assistant:{% endif %}"
)


def named(words: Sequence[str]) -> dict[str, str]:
    """Options of a command as Python's callers give them."""
    return dict(zip((word[2:] for word in words[::2]), words[1::2], strict=True))


def json_lines(path: Path) -> list[Any]:
    # As bytes: texts hold U+2028 and other ends of lines.
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def start(*options: str, cwd: Path = ROOT, program: Sequence[str] = COMMAND) -> subprocess.Popen:
    """The command in a process of its own, sharing the compiled programs of the tests."""
    cache = str(jax.config.values["jax_compilation_cache_dir"])
    ours = {"JAX_PLATFORMS": "cpu", "PAT_JAX_CACHE": cache, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *program, *options],
        cwd=cwd,
        env={**os.environ, **ours},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, *, code: int = 0, timeout: float = 280) -> str:
    """What the command printed, once it has ended with `code`."""
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == code, output
    return output


def run(*options: str, cwd: Path = ROOT, code: int = 0) -> str:
    return finish(start(*options, cwd=cwd), code=code)


def saved_run(run_dir: Path) -> tuple[Setup, TrainState, int]:
    """What a run was made of, and the state and step of its newest checkpoint."""
    config = parse(["--config", str(run_dir / CONFIG_FILE)])
    unexported = replace(config, checkpoint=replace(config.checkpoint, export_dir=""))
    setup = build(unexported, jax.devices()[: config.devices])
    abstract = {"train": setup.trainer.abstract_state}
    with Checkpointer(run_dir / CHECKPOINTS, fingerprint=setup.fingerprint) as checkpoints:
        step, state, _ = checkpoints.restore(abstract)
    return setup, state["train"], step


def run_to_end(setup: Setup, signals: StopSignals | None = None) -> opened.Run:
    """Runs to the end in this process; returns the run with what it has learned."""
    signals, limits = signals or StopSignals(), setup.config.reward_limits
    with (
        open_scorer(setup.task.rewards, limits, setup.reward_models) as scorer,
        opened.files_of(setup, signals) as files,
        opened.opened(setup, scorer, signals, files) as run,
    ):
        opened.finish(run, loop.learn(run))
    return run


def write_checkpoint(directory: Path, config: ModelConfig = QWEN3) -> Path:
    """A Hugging Face directory: random weights, a byte-level tokenizer and its chat template."""
    policy = Policy.from_config(config)
    export(directory, policy, _random_params(policy), jnp.float32)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=263,
        special_tokens=["<eos>", "<pad>", "<im>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the the the"], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    fields |= {"pad_token": "<pad>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    return directory


def _random_params(policy: Policy) -> Params:
    """Without a compiled program, unlike `policy.init`."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(1.0 if x.ndim == 1 else 0.0, 0.1, x.shape), jnp.float32),
        policy.abstract_params,
    )


def write_problems(path: Path, count: int = 60) -> Path:
    """Sums in GSM8K's format."""
    rows = [
        {"question": f"What is {i} + {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"}
        for i in range(count)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a repetition has to repeat: all but the clock's readings and the memory."""
    clocks = re.compile("time|(timing|memory)/.*|.*(tokens_per_s|seconds)|train/mfu")
    return [{k: v for k, v in row.items() if not clocks.fullmatch(k)} for row in rows]


def engine_of(
    config: RunConfig, devices: Sequence[Any], model: ModelConfig | None = None
) -> RolloutEngine:
    """The engine of a run's options, of another shape than the model's own where one is given."""
    shape = model or model_config(config.task, config.layout_choice, devices)
    return build_engine(config.engine, config.task, shape, devices)


def reward_models(config: RunConfig) -> RewardModels:
    """The reward models of a run on two devices, without weights."""
    made_of = reward_roles(config, "cpu"), config.reward_model, config.rollout
    return build_reward_models(*made_of, jax.devices()[:2], Division(config.rollout.page_size))
