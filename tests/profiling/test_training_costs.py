"""What is counted of the training step, against the arithmetic of a transformer."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from orders import order_of

from pat_jax.config.run import AlgorithmConfig, RolloutConfig, RunConfig
from pat_jax.models.config import ModelConfig
from pat_jax.profiling.cross_compile.compile import environment
from pat_jax.profiling.cross_compile.compiled import CompiledProgram
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.predict.update_work import Collective, Rows, UpdateWork
from tests.hlo_text import Sent, collectives, flops

MODEL = ModelConfig("qwen3", 1024, 256, 512, 2, 4, 4, head_dim=64, qk_norm=True)
LENGTH = 1024


def config(devices: int) -> RunConfig:
    """One row of full length on each device."""
    rollout = RolloutConfig(
        prompts_per_step=4,
        num_generations=2,
        max_prompt_length=LENGTH // 2,
        max_completion_length=LENGTH // 2,
        min_length=LENGTH,
        check_every=4,
        burst_steps=8,
    )
    tokens = AlgorithmConfig(mini_batch_size=4, tokens_per_micro_batch=LENGTH * devices)
    return RunConfig(rollout=rollout, algorithm=tokens, compute_dtype="bfloat16")


IN_ITS_PROCESS = """
import json, sys
from pathlib import Path
from pat_jax.profiling.cross_compile.jobs import jobs_of
from pat_jax.profiling.cross_compile.target_build import Order, TargetBuild
from pat_jax.profiling.cross_compile.worker import Compiler, devices_of

order = Order.from_json(json.load(sys.stdin))
for job in jobs_of(TargetBuild(order, devices_of(order.target))):
    if job.record.name == "grad":
        folder = Path(sys.argv[1])
        print(json.dumps(Compiler(folder, "", texts=folder).run(job).to_json()))
"""


def check_arithmetic(text: str, model: ModelConfig) -> None:
    """What `plan` takes, against what was compiled."""
    work = UpdateWork(model, 4, 4).gradients(Rows(LENGTH, 0.0))
    assert flops(text) == pytest.approx(work.flops, rel=1e-3)
    sent, told = received(collectives(text, in_loops=True)), received(work.sent)
    # The head goes round in float32, and token numbers with the weights.
    assert told["all-gather"] < sent["all-gather"] < 1.3 * told["all-gather"]
    assert sent["all-to-all"] == pytest.approx(told["all-to-all"], rel=0.3)
    # A TPU's compiler sums small gradients everywhere, and cuts them after.
    summed = sent["all-reduce"] / 2 + sent["reduce-scatter"]
    assert told["all-reduce"] / 2 + told["reduce-scatter"] == pytest.approx(summed, rel=0.3)


def received(sent: Iterable[Collective | Sent]) -> Counter[str]:
    """Bytes that a device gets, by kind."""
    found = Counter[str]()
    for one in sent:
        whole = one.num_bytes * (one.group if one.kind == "reduce-scatter" else 1)
        passes = 2 if one.kind == "all-reduce" else 1
        found[one.kind] += round(passes * one.count * whole * (one.group - 1) / one.group)
    return found


@pytest.mark.cross_compile
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("layers", [2, 6])
@pytest.mark.parametrize("text", ["v5e:2x2", "h100:4"])
def test_the_products_are_those_of_the_matrices(text: str, layers: int, tmp_path: Path):
    """Gradients are compiled whole, whatever the depths of other programs."""
    model = replace(MODEL, num_layers=layers)
    order = order_of(Target.parse(text), config(4), model, (1, 2))
    output = subprocess.run(
        [sys.executable, "-c", IN_ITS_PROCESS, str(tmp_path)],
        env=environment(order.target),
        input=json.dumps(order.to_json()),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    (program,) = (CompiledProgram.from_json(json.loads(x)) for x in output.splitlines())
    assert program.error is None and program.layers == layers
    (path,) = tmp_path.glob("grad_*.txt")
    check_arithmetic(path.read_text(), model)
