"""Which policy is evaluated: a run's checkpoint as it is, or a directory with adapters merged into it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evaluations import completions, evaluate_here
from plain_model import outputs
from runs import QWEN3, write_checkpoint, write_problems
from safetensors.numpy import load_file, save_file
from saved_runs import learned, policy_of, save_run

from pat_jax import generate
from pat_jax.commands import evaluate_pairs
from pat_jax.commands import generate as generate_command
from pat_jax.common.errors import UserError
from pat_jax.config.command_line import dump, parse
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.checkpoints.peft_adapter import export_adapter
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Policy
from pat_jax.rl.text.scored_text import scored_tokens
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.run.checkpoints.side_files import as_bytes
from pat_jax.run.results.session import SessionSetup
from pat_jax.run.start.exit_head_state import FOLDER

OPTIONS = "--num_prompts 6 --num_generations 2 --reward mine.py:even"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A base, runs that have trained all of it and adapters, and what they would have exported."""
    folder = tmp_path_factory.mktemp("policies")
    base = write_checkpoint(folder / "base", replace(QWEN3, num_layers=2))  # the first drafts
    write_problems(folder / "sums.jsonl")
    policy = policy_of(base)
    lora = Lora.of(policy, rank=4, alpha=8.0, targets=["all-linear"])
    params, adapters = learned(policy.abstract_params, 5), learned(lora.abstract_params, 6, 0.2)
    earlier, other = learned(policy.abstract_params, 7), learned(policy.abstract_params, 8)
    save_run(folder / "full", base, earlier, step=2)
    save_run(folder / "full", base, params, step=4)
    save_run(folder / "lora", base, adapters, step=3, lora=lora)
    write_checkpoint(folder / "small")
    save_run(folder / "moved", base.rename(folder / "gone"), params, step=4)
    (folder / "gone").rename(base)
    export_adapter(folder / "adapter", lora, adapters, base)
    merged = lora.merge(load_params(base, policy, None, jnp.dtype(jnp.float32)), adapters)
    exports = {"earlier_hf": earlier, "full_hf": params, "merged_hf": merged, "other": other}
    for name, whole in exports.items():
        export(folder / name, policy, whole, jnp.dtype(jnp.float32), tokenizer_dir=base)
    return folder


def output(monkeypatch, tmp_path: Path, folder: Path, *options: str, out: str) -> list[str]:
    """The responses of an evaluation."""
    data = str(folder / "sums.jsonl")
    evaluate_here(monkeypatch, tmp_path, *options, "--data", data, *OPTIONS.split(), out=out)
    return [line["completion"] for line in completions(tmp_path / out)]


@pytest.mark.parametrize(
    ("options", "export"),
    [
        ("--run_dir full", "full_hf"),
        pytest.param("--run_dir full --checkpoint 2", "earlier_hf", marks=pytest.mark.slow),
        pytest.param("--run_dir lora", "merged_hf", marks=pytest.mark.slow),
        pytest.param("--model base --adapter adapter", "merged_hf", marks=pytest.mark.slow),
    ],
)
def test_a_policy_says_what_its_export_says(monkeypatch, tmp_path, folder, capsys, options, export):
    paths = [one if one[0] in "-2" else str(folder / one) for one in options.split()]
    found = output(monkeypatch, tmp_path, folder, *paths, out="found")
    told = capsys.readouterr().err
    expected = output(
        monkeypatch, tmp_path, folder, "--model", str(folder / export), out="expected"
    )
    assert found == expected and len(found) == 12
    if export == "full_hf":
        policy = json.loads((tmp_path / "found" / "results.json").read_text())["options"]
        assert (policy["checkpoint"], policy["model"]) == (4, str(folder / "base"))
        assert f"the policy after step 4 of {folder / 'full'}" in told


def drafting(monkeypatch, tmp_path: Path, folder: Path, who: str, layer: int) -> np.ndarray:
    """The head that the first layers draft with, where a run's checkpoint is evaluated or generates."""
    source = f"early_exit:{layer}"
    if who == "session":
        monkeypatch.setattr(generate_command, "configure", lambda _: jax.devices()[:2])
        options = {"max_length": 64, "batch": 2, "layout": "dp2tp1"}
        options["speculation.source"] = source
        opened = generate.session(options, run=folder / "full").session
    else:
        seen, real = [], SessionSetup.open

        def remembered(*args, **options):
            seen.append(real(*args, **options))
            return seen[-1]

        monkeypatch.setattr(SessionSetup, "open", remembered)
        run = ["--run_dir", str(folder / "full"), "--speculation.source", source]
        output(monkeypatch, tmp_path, folder, *run, out="out")
        (opened,) = seen
    return np.asarray(opened.engine.weights.exit_head)


@pytest.mark.slow  # compiles bursts with drafts
@pytest.mark.parametrize("who", ["evaluate", "session"])
def test_first_layers_draft_with_what_the_run_has_learned(
    monkeypatch, tmp_path: Path, folder: Path, capsys, caplog, who: str
):
    embed = policy_of(folder / "base").config.embed_dim
    head = np.random.default_rng(0).normal(size=(embed, embed)).astype(np.float32)
    run, options = folder / "full", ["--model", str(folder / "base"), "--steps", "4"]
    data = str(folder / "sums.jsonl")
    (run / "config.yaml").write_text(dump(parse([*options, "--data", data, "--run_dir", str(run)])))
    path = run / FOLDER / "step-4.bin"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(as_bytes({".params": head, "layer": np.asarray(1)}))
    assert (drafting(monkeypatch, tmp_path, folder, who, layer=1) == head).all()
    assert str(path) not in capsys.readouterr().err + caplog.text
    path.unlink()
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert (drafting(monkeypatch, tmp_path, folder, who, layer=1) == 0).all()
    assert f"{path} is not there" in capsys.readouterr().err + caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--checkpoint 4 --model {}/base", ["--checkpoint is 4: expected with it the run"]),
        ("--run_dir {}/full --checkpoint -1", ["--checkpoint is -1: expected an integer from 0"]),
        ("--run_dir {}/full --checkpoint 3", ["option --checkpoint is 3", "which are 2, 4"]),
        ("--run_dir {}/none", ["--run_dir is '{}/none': expected the folder of a run"]),
        ("--run_dir {}/base", ["--run_dir is '{}/base': expected the folder of a run"]),
        ("--run_dir {}/full --adapter {}/adapter", ["--adapter is", "none with --run_dir"]),
        ("--run_dir {}/full --model {}/small", ["num_layers (2 there, 1 here)"]),
        ("--run_dir {}/lora --model {}/other", ["are of another base, whose weights differ"]),
        ("--run_dir {}/moved", ["--model is '{}/gone', with which the run in '{}/moved' began"]),
        ("--model {}/base --adapter {}/base", ["there is no adapter_config.json"]),
        ("--model {}/small --adapter {}/adapter", ["is of another model than --model"]),
    ],
    ids=str,
)
def test_mistakes_are_one_sentence_and_write_nothing(
    monkeypatch, tmp_path: Path, folder: Path, capsys, options: str, words: list[str]
):
    asked = options.replace("{}", str(folder)).split()
    with pytest.raises(SystemExit, match="2"):
        output(monkeypatch, tmp_path, folder, *asked, out="out")
    message = capsys.readouterr().err
    assert not (tmp_path / "out").exists() and message.count("\n") == 1, message
    assert all(word.replace("{}", str(folder)) in message for word in words), message


ROWS = [
    {"prompt": f"{i}?", "chosen": "a" * (1 + i % 7), "rejected": "b" * (1 + i % 5), "subset": kind}
    for i, kind in enumerate(["chat", "code", "chat"] * 5)
]


@pytest.fixture(scope="module")
def pairs_folder(tmp_path_factory) -> Path:
    pairs_folder = tmp_path_factory.mktemp("given")
    write_checkpoint(
        pairs_folder / "judge", replace(QWEN3, num_layers=2, head="scalar", tie_embeddings=False)
    )
    write_checkpoint(pairs_folder / "policy")
    long = {"prompt": "x" * 600, "chosen": "a", "rejected": "b"}
    text = "".join(f"{json.dumps(row)}\n" for row in [*ROWS, {**long, "subset": "chat"}])
    (pairs_folder / "bench.jsonl").write_text(text)
    (pairs_folder / "more.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS[:4]))
    return pairs_folder


def rewards_of(judge: Path) -> np.ndarray:
    """Of each text alone."""
    policy, tokenizer = Policy.from_config(check_checkpoint(judge)), HuggingFaceTokenizer(judge)
    params = load_params(judge, policy, None, jnp.dtype(jnp.float32))

    def reward(prompt: str, response: str) -> float:
        return outputs(policy, params, scored_tokens(tokenizer, prompt, response))[-1]

    return np.array([[reward(x["prompt"], x[key]) for key in ("chosen", "rejected")] for x in ROWS])


def test_accuracy_by_file_and_subset(pairs_folder: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate_pairs, "configure", lambda count: jax.devices()[:count])
    monkeypatch.setattr(evaluate_pairs, "AT_ONCE", 4)
    words = ["--reward_model", str(pairs_folder / "judge"), "--devices", "2"]
    data = ["--data", str(pairs_folder / "bench.jsonl"), str(pairs_folder / "more.jsonl")]
    found = evaluate_here(monkeypatch, tmp_path, *words, *data, small=False)
    rewards = rewards_of(pairs_folder / "judge")
    is_right = rewards[:, 0] > rewards[:, 1]
    assert 0 < is_right.sum() < len(ROWS)
    bench = found["sets"]["bench"]
    assert (bench["pairs"], bench["left_out"]) == (len(ROWS), {"too_long": 1})
    assert bench["accuracy"] == pytest.approx(is_right.mean())
    assert bench["margin"] == pytest.approx(np.mean(rewards[:, 0] - rewards[:, 1]), abs=1e-5)
    for kind in ("chat", "code"):
        chosen = [row["subset"] == kind for row in ROWS]
        part = bench["subsets"][kind]
        assert part["pairs"] == sum(chosen)
        assert part["accuracy"] == pytest.approx(is_right[chosen].mean())
    both = np.concatenate([is_right, is_right[:4]])
    assert found["all"]["accuracy"] == pytest.approx(both.mean())
    printed, told = capsys.readouterr()
    assert "bench: 15 pairs; left out: 1 with more than 512 tokens" in told
    assert "bench" in printed and "  chat" in printed and "all" in printed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "{folder}/policy"}, "this model generates text; choose a reward model"),
        ({"model": "{folder}/nowhere"}, "expected the directory of a reward model"),
        ({"max_length": 513}, "--reward_model.max_length is 513: expected at most the 512 tokens"),
        ({"max_length": 5}, "bench has no pairs to evaluate (left out: 16 with more"),
    ],
)
def test_what_cannot_be_evaluated(pairs_folder: Path, options: dict, words: str, tmp_path: Path):
    default = EvaluateConfig()
    given = {"model": f"{pairs_folder}/judge", **options}
    given["model"] = given["model"].format(folder=pairs_folder)
    config = replace(
        default,
        out=str(tmp_path / "out"),
        devices=1,
        data=replace(default.data, files=(str(pairs_folder / "bench.jsonl"),)),
        reward_model=replace(default.reward_model, **given),
    )
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as error:
        patch.setattr(evaluate_pairs, "configure", lambda count: jax.devices()[:count])
        evaluate_pairs.evaluate_pairs(config)
    assert words in str(error.value) and not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_give_no_accuracy(pairs_folder, tmp_path, monkeypatch, capsys):
    judge = Path(shutil.copytree(pairs_folder / "judge", tmp_path / "judge"))
    tensors = load_file(judge / "model.safetensors")
    tensors["score.weight"][0, 0] = np.nan
    save_file(tensors, judge / "model.safetensors")
    monkeypatch.setattr(evaluate_pairs, "configure", lambda count: jax.devices()[:count])
    words = [
        "--reward_model",
        str(judge),
        "--devices",
        "1",
        "--data",
        str(pairs_folder / "more.jsonl"),
    ]
    with pytest.raises(SystemExit):
        evaluate_here(monkeypatch, tmp_path, *words, small=False)
    printed, told = capsys.readouterr()
    assert "accuracy" not in printed and f"{judge}/model.safetensors: tensor 'score.weight'" in told


@pytest.mark.parametrize(
    "words",
    [
        "--model=policy",
        "--run_dir=run",
        "--resume=true",
        "--seed=1",
        "--temperature=0.5",
        "--batch=8",
        "--weights=int8",
        "--layout=dp1tp2",
        "--num_generations=4",
        "--num_prompts=5",
        "--max_prompt_length=64",
        "--reward=math",
        "--reward_timeout=3",
        "--speculation.source=suffix",
        "--data.answer_key=answer",
    ],
)
def test_what_a_reward_model_makes_no_use_of_is_refused(words: str):
    """Its own options alone are taken; nothing is sampled, and nothing else scores."""
    base = ["--reward_model", "judge", "--data", "pairs.jsonl", "--devices", "2"]
    base += ["--compute_dtype", "float32", "--data.prompt_key", "question", "--out", "found"]
    assert parse(base, EvaluateConfig, presets=None).reward_model.model == "judge"
    name = words.partition("=")[0]
    default = "auto " if name == "--max_prompt_length" else ""
    sentence = f"^option {name} is .*: expected {default}.*with --reward_model.*; leave it out"
    with pytest.raises(UserError, match=sentence):
        parse([*base, words], EvaluateConfig, presets=None)
