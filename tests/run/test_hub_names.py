"""A model, an adapter and a dataset by their names on the Hub, from the cache of its client."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pat_jax.batch_generation.config import GenerateConfig
from pat_jax.commands import evaluate, generate, plan
from pat_jax.common import hub
from pat_jax.common.errors import UserError
from pat_jax.common.hub import local_checkpoint
from pat_jax.config.command_line import dump, parse
from pat_jax.config.role_table import POLICY
from pat_jax.config.sft import SftConfig
from pat_jax.engine.sizing.draft_choice import checkpoint_of
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.models.checkpoints.peft_adapter import export_adapter
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Policy
from pat_jax.run.files.folder import CONFIG_FILE, options_of_run
from pat_jax.run.files.hub_names import NAMES_FILE, go_on_with_names, keep_names
from pat_jax.run.results.saved_run import SavedRun
from pat_jax.run.roles.role_params import loaded
from pat_jax.run.sft import setup as sft
from pat_jax.run.start.setup import build
from pat_jax.training.build import build_lora
from tests.hub_server import SHA
from tests.runs import QWEN3, SMALL_ROLLOUT, engine_of, write_checkpoint, write_problems

MODEL, ADAPTER, DATA = "owner/tiny", "owner/adapter", "owner/sums"
OPTIONS = [
    *("--model", MODEL, "--data", DATA, "--eval.data", f"{DATA}:more/test", "--run_dir", "absent"),
    *("--rollout.max_prompt_length", "120", *SMALL_ROLLOUT),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """As the client leaves it."""
    cache = tmp_path_factory.mktemp("cache")
    write_checkpoint(_snapshot(cache, "models", MODEL))
    data = _snapshot(cache, "datasets", DATA)
    for name, count in (("main/train", 24), ("more/test", 20)):
        path = data / f"{name}-00000-of-00001.jsonl"
        path.parent.mkdir(parents=True)
        write_problems(path, count)
    lora = Lora.of(Policy.from_config(QWEN3), rank=2, alpha=4, targets=("q_proj",))
    export_adapter(_snapshot(cache, "models", ADAPTER), lora, lora.init(0), base=MODEL)
    return cache


def _snapshot(cache: Path, kind: str, name: str) -> Path:
    folder = cache / f"{kind}--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(SHA)
    (folder / "snapshots").mkdir()
    return folder / "snapshots" / SHA


@pytest.fixture(autouse=True)
def only_cache(cache: Path, tmp_path: Path, monkeypatch):
    """No test asks for anything that is not there (`conftest.py`)."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)


def test_a_run(cache: Path):
    config = parse(OPTIONS)
    setup = build(config, jax.devices()[:2])
    assert len(setup.task.train.first(4)) == 4
    (heldout,) = setup.task.heldout
    assert heldout.name == "more" and len(heldout.prompts) == 8
    directory = cache / "models--owner--tiny/snapshots" / SHA
    local = build(parse([*OPTIONS, "--model", str(directory)]), jax.devices()[:2])
    assert setup.fingerprint == local.fingerprint
    found, wanted = (
        loaded(x.roles.models[POLICY], x.trainer.shardings, jnp.dtype(jnp.float32))
        for x in (setup, local)
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert f"model: {MODEL}\n" in dump(config)


def test_the_other_commands_take_it(tmp_path: Path):
    assert plan.model_of(MODEL) == checkpoint_of(MODEL)
    asked = ["--model", MODEL, "--data", f"{DATA}:more", "--out", "x"]
    config, _ = evaluate.with_saved(parse(asked, EvaluateConfig, presets=None))
    assert config.model == MODEL
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "the"}))
    options = ["--model", MODEL, "--adapter", ADAPTER, "--devices", "1", "--prompts", str(prompts)]
    asked = parse(options, GenerateConfig, presets=None)
    assert generate.prepared(asked).tokenizer is not None


def test_examples():
    texts = ["--data", DATA, "--data.prompt_key", "question", "--data.completion_key", "answer"]
    options = ["--model", MODEL, *texts, "--max_length", "128", "--lora.adapter", ADAPTER]
    config = parse([*options, "--eval.data", f"{DATA}:more/test"], SftConfig, presets=None)
    found = sft.build(config, jax.devices()[:1])
    assert len(found.lessons.heldout) == 20
    lora = build_lora(config.lora, found.policy)
    assert lora is not None and lora.rank == 2


@pytest.fixture(scope="module")
def described(cache: Path) -> str:
    """A model whose weights are still to be downloaded."""
    folder = write_checkpoint(_snapshot(cache, "models", "owner/described"))
    (folder / "model.safetensors").unlink()
    return "owner/described"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "download owner/described --revision"),
        (["--rollout.max_prompt_length", "3"], "leaves nothing to train on"),
        (["--speculation.source", "model:absent"], "but this folder does not exist"),
    ],
)
def test_weights_are_asked_for_last(described: str, options: list[str], words: str):
    with pytest.raises(UserError, match=words):
        build(parse([*OPTIONS, "--model", described, *options]), jax.devices()[:2])


def test_a_profile_needs_no_weights(described: str):
    config = parse([*OPTIONS, "--compute_dtype", "float32", "--model", described])
    assert engine_of(config, jax.devices()[:2]).layouts


def test_a_resumed_run_takes_no_folder_made_since(cache: Path, tmp_path: Path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(dump(parse([*OPTIONS, "--model", "owner/again"])) + "...\n")
    monkeypatch.setattr(hub, "_commits", {})
    snapshot = write_checkpoint(_snapshot(cache, "models", "owner/again"))
    local_checkpoint("owner/again")
    keep_names(folder)
    monkeypatch.setattr(hub, "_commits", {})
    (tmp_path / "owner/again").mkdir(parents=True)
    assert local_checkpoint("owner/again") == "owner/again"
    config = options_of_run(["--resume", "--run_dir", str(folder)], parse)
    assert local_checkpoint(config.model) == str(snapshot)
    assert checkpoint_of(config.model) == checkpoint_of(MODEL)


@pytest.mark.parametrize("content", ["[]", '{"model": {"owner/x": "main"}}'])
def test_names_that_no_run_has_written_are_left_out(content: str, tmp_path: Path, caplog):
    (tmp_path / NAMES_FILE).write_text(content)
    go_on_with_names(tmp_path)
    assert "commits of the Hub of before are left out" in caplog.text
    assert "owner/x" not in hub.commits().get("model", {})


def test_a_run_that_is_looked_at_changes_no_name(tmp_path: Path, monkeypatch):
    """A session with its policy goes on with its commit, whichever run was opened last."""
    monkeypatch.setattr(hub, "_commits", {})
    commits = "1" * 40, "2" * 40
    for commit in commits:
        (tmp_path / commit).mkdir()
        (tmp_path / commit / CONFIG_FILE).write_text(f"model: {MODEL}\ndata: {DATA}\n")
        (tmp_path / commit / NAMES_FILE).write_text(json.dumps({"model": {MODEL: commit}}))
    runs = [SavedRun(tmp_path / commit) for commit in commits]
    assert not hub.commits()

    def asked(name: str, **_: object):
        raise LookupError(hub.commits()["model"][name])

    monkeypatch.setattr(generate, "local_checkpoint", asked)
    for run, commit in zip(runs, commits, strict=True):
        with pytest.raises(LookupError, match=commit):
            generate.prepared(GenerateConfig(model=MODEL), run)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "owner/absent"], ["--model is 'owner/absent'", "`hf download owner/absent`"]),
        (["--data", "owner/absent"], ["--data is 'owner/absent'", "dataset owner/absent`"]),
        (["--eval.data", DATA], ["--eval.data is 'owner/sums'", "and not main/test; name one, as"]),
        (["--data.answer_key", "x"], ["datasets--owner--sums", "has the columns question, answer"]),
    ],
)
def test_refusals(options: list[str], words: list[str]):
    with pytest.raises(UserError) as caught:
        build(parse([*OPTIONS, *options]), jax.devices()[:2])
    for word in words:
        assert word in str(caught.value)
