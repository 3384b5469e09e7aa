"""Compiling for machines that are not there: orders, the child process, what is kept, what is refused."""

import json
import math
import re
import stat
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jax
import pytest
from orders import order_of

from pat_jax.common.errors import UserError
from pat_jax.config.data import DataConfig
from pat_jax.config.run import AlgorithmConfig, RolloutConfig, RunConfig
from pat_jax.config.speculation import SpeculationConfig
from pat_jax.models.config import ModelConfig
from pat_jax.models.presets import preset
from pat_jax.planning.types import Split
from pat_jax.profiling.cross_compile import compile as compilation
from pat_jax.profiling.cross_compile.by_arithmetic import by_arithmetic
from pat_jax.profiling.cross_compile.compile import DEPTHS, Compilation, compile_for
from pat_jax.profiling.cross_compile.compiled import CompiledProgram
from pat_jax.profiling.cross_compile.jobs import jobs_of
from pat_jax.profiling.cross_compile.target_build import Order, TargetBuild
from pat_jax.profiling.cross_compile.worker import Compiler
from pat_jax.profiling.predict.targets import Target
from tests.hlo_text import sent_by

TARGET = Target.parse("h100:8")
TINY = preset("tiny")
CONFIG = RunConfig(
    rollout=RolloutConfig(
        prompts_per_step=8,
        num_generations=4,
        max_prompt_length=32,
        max_completion_length=96,
        check_every=4,
        burst_steps=8,
        prefill_blocks=8,
    ),
    algorithm=AlgorithmConfig(mini_batch_size=8, tokens_per_micro_batch=1024),
    compute_dtype="bfloat16",
    remat="full",
)


def build(config: RunConfig = CONFIG, model: ModelConfig = TINY, depths=(2,)) -> TargetBuild:
    """What would run on eight H100, over the CPU devices of the tests."""
    return TargetBuild(order_of(TARGET, config, model, depths), jax.devices("cpu")[:8])


def weight_bytes(model: ModelConfig, tp: int) -> int:
    """Of one device in bfloat16, by the textbook's formulas."""
    heads, kv, dim = model.num_heads, model.num_kv_heads, model.head_dim
    of_kv = max(1, kv // tp)
    attention = model.embed_dim * dim * (2 * heads // tp + 2 * of_kv)
    norms = 2 * model.embed_dim + (2 * dim if model.qk_norm else 0)
    layer = attention + 3 * model.embed_dim * model.mlp_dim // tp + norms
    tables = (1 if model.tie_embeddings else 2) * model.padded_vocab_size * model.embed_dim // tp
    return 2 * (tables + model.num_layers * layer + model.embed_dim)


@pytest.mark.parametrize("name", ["tiny-moe", "llama-3.1-8b"])
def test_an_order_is_the_same_in_another_process(name):
    order = order_of(Target.parse("v5p:2x2x2"), CONFIG, preset(name), (2, 4))
    others = {"critic": replace(TINY, head="scalar")}
    for one in (order, replace(order, draft_model=TINY), replace(order, others=others)):
        assert Order.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_an_order_holds_only_what_programs_depend_on():
    told = replace(
        CONFIG,
        seed=3,
        steps=7,
        model="somewhere",
        data=DataConfig(files=("else",)),
        layout="dp2tp4",
    )
    assert order_of(TARGET, told, TINY, (2, 4)) == order_of(TARGET, CONFIG, TINY, (0,))
    assert order_of(TARGET, CONFIG, replace(TINY, num_layers=9), (2, 4)).depths == (2, 4)
    assert order_of(TARGET, CONFIG, replace(TINY, num_layers=9), (0,)).depths == (9,)


def test_layouts_without_room_are_compiled_with_pools_of_their_own():
    rollout = replace(CONFIG.rollout, max_completion_length=4096 - 32, num_generations=1)
    config = replace(CONFIG, rollout=rollout, train=False, compute_dtype="float32")
    config = replace(config, speculation=SpeculationConfig("none"))
    alone = build(config).alone
    limit = alone.held(Split(2, 4)) / 0.9 / 2**30
    tight = build(replace(config, rollout=replace(rollout, device_memory_gib=1.01 * limit)))
    memory, least = tight.memory, math.ceil(4096 / 16) + 1
    fits = {split for split in memory.weights if memory.held(split) <= memory.usable}
    assert fits == {Split(2, 4), Split(1, 8)}
    for split in (Split(8, 1), Split(4, 2)):
        assert memory.pages[split] == math.ceil(least / split.tp) * split.tp == alone.pages[split]
    # Four KV heads: no more than four ways.
    assert memory.pages[Split(1, 8)] == memory.pages[Split(2, 4)] < least + 8
    jobs = jobs_of(tight)
    decoding = [
        job for job in jobs if job.record.name == "decode" and not job.record.num_draft_tokens
    ]
    assert [job.record.split for job in decoding] == list(memory.weights)
    assert all(job.parts[0]() for job in decoding[::3])


def test_bursts_with_drafts_are_compiled_of_most_tokens_and_those_without_stand_beside_them():
    here = build()
    drafting = [job for job in jobs_of(here) if job.record.num_draft_tokens]
    first, *_, last = here.layouts
    assert [job.record.split for job in drafting] == [first, last]
    for job in drafting:
        split, rows, num_draft_tokens = (
            job.record.split,
            job.record.rows,
            job.record.num_draft_tokens,
        )
        known = [(n, m) for n in here.buckets.rows[split] for m in here.drafter.drafts.of(n)]
        assert (rows, num_draft_tokens) in known
        assert (
            rows * (1 + num_draft_tokens)
            == max(n * (1 + m) for n, m in known)
            <= here.drafter.drafts.most_tokens
        )
    assert drafting[-1].parts[0]()
    none = replace(CONFIG, speculation=SpeculationConfig("none"))
    assert not any(job.record.num_draft_tokens for job in jobs_of(build(none)))


def test_a_program_is_described_as_it_was_built_and_kept_by_its_text(tmp_path: Path):
    here = build()
    jobs = {
        (job.record.name, job.record.split): job
        for job in jobs_of(here)
        if not job.record.num_draft_tokens
    }
    compiler, split = Compiler(tmp_path, "a machine"), Split(1, 8)
    job = jobs["decode", split]
    record = compiler.run(job)
    assert (record.error, record.layers, record.compiled_layers) == (None, 2, (2,))
    memory = here.memory
    assert record.argument_bytes == pytest.approx(
        memory.weights[split] + memory.pool(split), rel=0.05
    )
    (kept,) = tmp_path.iterdir()
    marked = json.loads(kept.read_text()) | {"temp_bytes": 42, "split": [8, 1]}
    kept.write_text(json.dumps(marked))
    again = compiler.run(job)
    assert (again.temp_bytes, again.split) == (42, split)
    assert Compiler(tmp_path, "another").run(job).temp_bytes == record.temp_bytes > 42
    # Records with other fields are of other code.
    kept.write_text(json.dumps(marked | {"flops": 1.0}))
    assert compiler.run(job).temp_bytes == record.temp_bytes


def test_a_program_that_does_not_compile_is_a_result(tmp_path: Path):
    job = jobs_of(build())[0]

    def broken():
        raise RuntimeError("Ran out of memory\n in memory space hbm")

    record = Compiler(tmp_path, "").run(replace(job, parts=(broken,)))
    assert record.error == "RuntimeError: Ran out of memory in memory space hbm"
    assert not list(tmp_path.iterdir())


CHILD = """#!{python}
import json, sys
asked = json.loads(sys.stdin.read())
order = asked["order"]
open({calls!r}, "a").write("called ")
{body}
"""
SAYS = """
for layers in order["depths"]:
    program = RECORD | {"layers": layers, "compiled_layers": [layers], "temp_bytes": 10 * layers}
    print(json.dumps({"program": program, "jobs": len(order["depths"])}), flush=True)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A compiler's process that says what a test wants."""
    monkeypatch.setattr(compilation, "installed", lambda target: {"jax": "1"})
    monkeypatch.setattr(compilation, "_ptxas", lambda: tmp_path)
    calls = tmp_path / "calls"

    def says(body: str) -> Path:
        script = tmp_path / "child"
        script.write_text(CHILD.format(python=sys.executable, calls=str(calls), body=body))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(compilation.sys, "executable", str(script))
        return calls

    return says


def ask(folder: Path, layers: str = "few", **options) -> Compilation:
    order = order_of(TARGET, CONFIG, replace(TINY, num_layers=10), DEPTHS[layers])
    return compile_for(order, folder=folder / "plans", **options)


def test_what_the_child_says_is_read_at_the_whole_depth_and_kept(child, tmp_path: Path):
    record = json.dumps(CompiledProgram("decode", Split(8, 1)).to_json())
    calls, told = child(SAYS.replace("RECORD", f"json.loads({record!r})")), []
    found = ask(tmp_path, progress=lambda *at: told.append(at))
    (program,) = found.programs
    assert (program.layers, program.temp_bytes, program.is_extrapolated) == (10, 100, True)
    assert [at[:2] for at in told] == [(1, 2), (2, 2)] and not found.failed
    assert ask(tmp_path) == found and calls.read_text() == "called "
    whole = ask(tmp_path, layers="all")
    assert calls.read_text() == "called called "
    assert not whole.programs[0].is_extrapolated


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("sys.stderr.write('no room'); sys.exit(9)", "ended with 9 .*no room"),
        ("print(json.dumps({'refused': 'target x: no such slice'}))", "target x: no such slice"),
    ],
)
def test_a_child_that_fails_is_one_sentence_and_nothing_is_kept(child, tmp_path, body, says):
    calls = child(body)
    for _ in range(2):
        with pytest.raises(UserError, match=says):
            ask(tmp_path)
    assert calls.read_text() == "called called "


CRASHES = "import os, signal\nif {}: os.kill(os.getpid(), signal.SIGSEGV)\n"


def test_a_compiler_that_crashes_compiles_one_program_after_the_other(child, tmp_path, monkeypatch):
    monkeypatch.setattr(compilation.os, "cpu_count", lambda: 2)
    record = json.dumps(CompiledProgram("decode", Split(8, 1)).to_json())
    crashes = CRASHES.format("asked['threads'] > 1")
    calls = child(crashes + SAYS.replace("RECORD", f"json.loads({record!r})"))
    assert len(ask(tmp_path).programs) == 1 and calls.read_text() == "called called "


def test_a_compiler_that_crashes_again_ends_the_plan(child, tmp_path, monkeypatch):
    monkeypatch.setattr(compilation.os, "cpu_count", lambda: 2)
    calls = child(CRASHES.format("True"))
    with pytest.raises(UserError, match="ended with -11 "):
        ask(tmp_path)
    assert calls.read_text() == "called called "


@pytest.mark.parametrize(
    ("text", "module"), [("v5e:2x4", "libtpu"), ("h100:8", "jax_cuda12_plugin")]
)
def test_a_compiler_that_is_not_installed_is_named_with_its_extra(monkeypatch, text, module):
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"target {text}: .*{module}.*'\.\[plan\]'"):
        compile_for(order_of(Target.parse(text), CONFIG, TINY, (0,)))


KERNEL = re.compile("tpu_custom_call|triton")
REAL = replace(preset("qwen3-0.6b"), num_layers=2, vocab_size=4096)


@pytest.mark.cross_compile
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("text", "source"), [("v5e:2x2", "auto"), ("h100:4", "auto"), ("h100:4", "early_exit:1")]
)
def test_every_program_of_a_small_model_compiles_for_a_machine_that_is_not_there(
    text, source, tmp_path
):
    config = replace(CONFIG, speculation=SpeculationConfig(source))
    order = order_of(Target.parse(text), config, REAL, DEPTHS["few"])
    texts = tmp_path / "texts"
    texts.mkdir()
    found, here = compile_for(order, folder=tmp_path, texts=texts), by_arithmetic(order)
    assert [(str(program), program.error) for program in found.failed] == []
    names = {program.name for program in found.programs}
    moving = {"reshard", "view", "pack", "exchange", "exchange_one", "unpack"}
    assert names >= {"decode", "prefill", "grad", *moving}
    verifying = [x for x in found.programs if x.num_draft_tokens]
    # Each row's pages are read once for all of its tokens, by a kernel.
    assert verifying and len([*texts.glob("*_with_drafts_*")]) == len(verifying)
    assert all(KERNEL.search(path.read_text()) for path in texts.glob("*_with_drafts_*"))
    by_name = {(x.name, x.split, x.target): x for x in found.programs if not x.num_draft_tokens}
    for split in here.layouts:
        decode = by_name["decode", split, None]
        held = here.memory.weights[split] + here.memory.pool(split)
        assert here.memory.weights[split] == weight_bytes(REAL, split.tp)
        assert decode.argument_bytes == pytest.approx(held, rel=0.05)
        sent: Counter[str] = Counter()  # of whatever size
        for one in sent_by(texts, decode):
            sent[one.kind] += one.depth == 2
        # Tokens are chosen by two small gathers; a branch for options of sampling gathers logits.
        sums = {"all-gather": 3, "all-reduce": 2 * REAL.num_layers + 1}
        assert +sent == (sums if split.tp > 1 else {})
    (transfer,) = (
        x for x in found.programs if x.name == "transfer" and x.target == [*here.layouts][-1]
    )
    # One array after the other is gathered.
    assert transfer.temp_bytes < weight_bytes(REAL, 1) / 2
    for narrow, wide in pairwise(here.layouts):
        assert sent_by(texts, by_name["reshard", narrow, wide]) == []
        for name, kind in (("exchange", "all-to-all"), ("exchange_one", "collective-permute")):
            moved = sent_by(texts, by_name[name, narrow, wide])
            assert {one.kind for one in moved} == {kind}
