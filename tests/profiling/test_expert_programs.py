"""Programs of models with experts, compiled for machines that are not there: what they send."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from orders import order_of

from pat_jax.config.run import AlgorithmConfig, RolloutConfig, RunConfig
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.models.config import ExpertsConfig, ModelConfig
from pat_jax.models.presets import preset
from pat_jax.planning.types import Split
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic
from pat_jax.profiling.cross_compile.compile import Compilation, compile_for, environment
from pat_jax.profiling.cross_compile.compiled import CompiledProgram
from pat_jax.profiling.cross_compile.target_build import TargetBuild
from pat_jax.profiling.predict.model_sizes import expert_weights, num_weights
from pat_jax.profiling.predict.targets import Target
from pat_jax.profiling.predict.update_work import Collective, Rows, UpdateWork
from tests.hlo_text import Sent, collectives, flops, sent_by

TARGETS = [pytest.param(x, marks=pytest.mark.cross_compile) for x in ("v5e:2x4", "h100:8")]
# Experts so wide that a device's two of one matrix are more than twice all else in float32.
MODEL = replace(
    preset("qwen3-30b-a3b"),
    num_layers=2,
    embed_dim=256,
    mlp_dim=512,
    num_heads=8,
    num_kv_heads=8,
    vocab_size=1024,
    experts=ExpertsConfig(16, 2, 2**15, dense_layers=(0,)),
)
SHARD_BYTES = 2 * 2 * 2**15 * 256
# The same with experts that see a quarter of a token's numbers.
BIGMAC = replace(MODEL, experts=ExpertsConfig(16, 2, 2**12, dense_layers=(0,), latent_dim=64))
CONFIG = RunConfig(
    rollout=RolloutConfig(
        prompts_per_step=16,  # eight rows of a replica: of fewer a TPU scatters none, and sums all
        num_generations=4,
        max_prompt_length=32,
        max_completion_length=96,
        check_every=4,
        burst_steps=8,
        prefill_blocks=8,
    ),
    algorithm=AlgorithmConfig(mini_batch_size=16, tokens_per_micro_batch=1024),
    speculation=SpeculationConfig("none"),
    compute_dtype="bfloat16",
    remat="full",
)


Found = tuple[TargetBuild, Compilation, Path]  # the folder has the programs' texts


@cache
def compiled(
    text: str, folder: Path, model: ModelConfig = MODEL, config: RunConfig = CONFIG
) -> Found:
    order = order_of(Target.parse(text), config, model, (0,))
    texts = folder / f"texts-{text}"
    texts.mkdir()
    return by_arithmetic(order), compile_for(order, folder=folder, texts=texts), texts


@pytest.fixture(params=TARGETS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return compiled(request.param, tmp_path_factory.getbasetemp())


def sent_bytes(every: Sequence[Sent]) -> dict[str, int]:
    """Bytes of the results of all collectives of a kind."""
    sent: Counter[str] = Counter()
    for one in every:
        sent[one.kind] += one.num_bytes
    return dict(sent)


def step_bytes(model: ModelConfig, split: Split, rows: int) -> dict[str, int]:
    """Bytes that each collective of a decode step in bfloat16 results in, by its kind.

    Args:
      rows: of a replica.
    """
    assert model.experts is not None
    hidden, layers = 2 * rows * model.embed_dim, len(model.sparse_layers)
    seen = 2 * rows * model.expert_embed_dim  # of a row by its experts
    sent = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), 0)
    if split.dp > 1:
        # Rows with the numbers of their experts in four bytes and weights in two; what comes back.
        routes = (4 + 2) * rows * model.experts.num_experts_per_tok
        sent["all-gather"] += layers * split.dp * (seen + routes)
        sent["reduce-scatter"] += layers * seen
    if split.tp > 1:
        # Two sums in a layer of either kind, one of the embedding. Five numbers of each shard choose a
        # token; logits are gathered in the branch for options of sampling.
        sent["all-reduce"] += (2 * model.num_layers + 1 - layers) * hidden + layers * seen
        sent["all-gather"] += 4 * rows * (5 * split.tp + model.padded_vocab_size)
    return {kind: size for kind, size in sent.items() if size}


def test_experts_are_wider_than_all_else_together():
    """What the tests below take for granted."""
    rest = num_weights(MODEL) - expert_weights(MODEL)
    assert 2 * 4 * rest < SHARD_BYTES == 2 * expert_weights(MODEL) // 3 // 8


@pytest.mark.timeout(1500)
def test_everything_compiles_and_a_device_holds_what_is_computed(found: Found):
    here, compilation, _ = found
    assert [(str(program), program.error) for program in compilation.failed] == []
    decoding = {x.split: x for x in compilation.programs if x.name == "decode"}
    assert len(decoding) == 4 and decoding.keys() == here.layouts.keys()
    for split, program in decoding.items():
        held = here.memory.weights[split] + here.memory.pool(split)
        assert program.argument_bytes == pytest.approx(held, rel=0.003)


@pytest.mark.timeout(1500)
def test_a_layer_of_experts_gathers_once_and_scatters_once(found: Found):
    check_steps(MODEL, found[1], found[2])


@pytest.mark.cross_compile
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("target", ["v5e:2x2", "h100:4"])
def test_bigmac_sends_the_numbers_that_its_experts_see(target: str, tmp_path: Path):
    """Of a row a quarter is gathered, scattered and summed."""
    assert BIGMAC.expert_embed_dim == BIGMAC.embed_dim // 4
    _, compilation, texts = compiled(target, tmp_path, BIGMAC, replace(CONFIG, train=False))
    check_steps(BIGMAC, compilation, texts)


def check_steps(model: ModelConfig, compilation: Compilation, texts: Path) -> None:
    """Each layout's decode step sends what `step_bytes` counts, in as few collectives as there can
    be."""
    steps = [program for program in compilation.programs if program.name == "decode"]
    assert len(steps) > 2
    for program in steps:
        split = program.split
        step = [one for one in sent_by(texts, program) if one.depth == 2]
        assert sent_bytes(step) == step_bytes(model, split, program.rows)
        counts = Counter(one.kind for one in step)
        # With the rows go two small arrays; a compiler may make one gather of all.
        of_sampling = 3 * (split.tp > 1)
        assert (split.dp > 1) + of_sampling <= counts["all-gather"] <= 3 + of_sampling
        assert counts["reduce-scatter"] == (split.dp > 1)
        assert counts["all-reduce"] == (2 * model.num_layers + 1) * (split.tp > 1)


@pytest.mark.timeout(1500)
def test_no_switch_and_no_transfer_moves_an_expert(found: Found):
    here, compilation, texts = found
    weights = here.memory.weights
    of_switch = {(x.split, x.target): x for x in compilation.programs if x.name == "reshard"}
    for narrow, wide in pairwise(here.layouts):
        up, down = of_switch[narrow, wide], of_switch[wide, narrow]
        for program in (up, down):  # nor does one have any
            assert program.argument_bytes + program.output_bytes < SHARD_BYTES
        assert sent_by(texts, up) == []
        received = sum(x.num_bytes * (1 - 1 / x.group) for x in sent_by(texts, down))
        assert received == weights[narrow] - weights[wide] > 0
    transfers = [x for x in compilation.programs if x.name == "transfer"]
    assert len(transfers) == 2
    for program in transfers:
        assert program.argument_bytes > expert_weights(MODEL) // 8
        assert 0 < sum(x.num_bytes for x in sent_by(texts, program)) < SHARD_BYTES


DENSE = ModelConfig("qwen3", 1024, 256, 512, 2, 4, 4, head_dim=64, qk_norm=True)
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
    return RunConfig(rollout=rollout, algorithm=tokens, compute_dtype="bfloat16", remat="full")


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
    # All logits exist at a time.
    work = UpdateWork(model, 4, 4, logit_tokens=LENGTH).gradients(Rows(LENGTH, 0.0))
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
    model = replace(DENSE, num_layers=layers)
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
