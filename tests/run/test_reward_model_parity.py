"""Reward models beside transformers and TRL: scores, padding, training (needs the `parity` extra)."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from file_runs import made, whole_run
from plain_model import outputs
from runs import JUDGE, QWEN3, TINY, reward_models, write_checkpoint

from pat_jax import reward_model
from pat_jax.config.command_line import parse
from pat_jax.config.role_table import reward_role
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.policy import Policy
from pat_jax.rl.text.scored_text import scored_tokens, until_padding
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.run.files.folder import options_of_run
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.roles.reward_models import find_reward_model, load_reward_models
from pat_jax.run.scoring import open_scorer
from pat_jax.run.sft.inputs import padding_of
from pat_jax.run.sft.lessons import RewardLessons
from pat_jax.run.sft.reading import read_lessons
from pat_jax.run.sft.setup import SftSetup

torch = pytest.importorskip("torch", reason="needs the `parity` extra")
transformers = pytest.importorskip("transformers", reason="needs the `parity` extra")

EOS, PAD, OTHER = "<eos>", "<pad>", "<im>"  # tokens 0, 1 and 2
PROMPT, RESPONSES = "1?", ["a", "bbbb and more", "cc!"]
# What the base says: pad_token_id of config.json, pad_token of the tokenizer; and the id to export.
BASES: dict[str, tuple[Any, str | None, int]] = {
    "by the tokenizer": (None, PAD, 1),
    "by nothing": (None, None, 0),
    "end token": (None, EOS, 0),
    "end token in both": (0, EOS, 0),
    "by config.json": (1, None, 1),
    "by two": (2, PAD, 2),
    "a row without a token": (270, PAD, 1),
    "a token of texts": (70, PAD, 1),
    "negative": (-1, None, 0),
}


def write_base(folder: Path, named: Any, token: str | None, with_template: bool) -> Path:
    model = write_checkpoint(folder, JUDGE)
    for name, changes in {
        "config.json": {"pad_token_id": named},
        "tokenizer_config.json": {"pad_token": token}
        | ({} if with_template else {"chat_template": None}),
    }.items():
        fields = json.loads((model / name).read_text()) | changes
        kept = {key: x for key, x in fields.items() if x is not None}
        (model / name).write_text(json.dumps(kept))
    return model


def options(base: Path, folder: Path) -> list[str]:
    row = {"prompt": PROMPT, "chosen": RESPONSES[0], "rejected": RESPONSES[1]}
    (folder / "pairs.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    words = ["--model", str(base), "--data", str(folder / "pairs.jsonl"), "--devices", "1"]
    words += ["--steps", "1", "--batch_size", "2", "--max_length", "64", "--eval.every", "0"]
    return [*words, "--run_dir", str(folder / "run"), "--checkpoint.export_dir", str(folder / "rm")]


def ours(judge: Path) -> tuple[np.ndarray, list[list[int]]]:
    """Scores, and the tokens up to the scored one, as `evaluate` and `--reward model:` read them."""
    found = find_reward_model(reward_role(str(judge), "float32"), "a test")
    policy = Policy.from_config(found.shape)
    params = load_params(judge, policy, None, jnp.dtype(jnp.float32))
    texts = [scored_tokens(found.tokenizer, PROMPT, text) for text in RESPONSES]
    read = [until_padding(np.array(tokens), found.pad_id).tolist() for tokens in texts]
    return np.array([outputs(policy, params, tokens)[-1] for tokens in read]), read


def theirs(judge: Path, side: str, with_template: bool) -> np.ndarray:
    """In one batch, by the tokenizer that was exported."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(judge, padding_side=side)
    if with_template:
        chats = [
            [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": text}]
            for text in RESPONSES
        ]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    else:
        texts = [f"{PROMPT}{text}{tokenizer.eos_token}" for text in RESPONSES]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    assert (batch["attention_mask"] == 0).any()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(judge).float().eval()
    with torch.no_grad():
        return (
            model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].numpy()
        )


def assert_same_scores(judge: Path, expected: int, with_template: bool) -> list[list[int]]:
    assert json.loads((judge / "config.json").read_text())["pad_token_id"] == expected
    assert transformers.AutoTokenizer.from_pretrained(judge).pad_token_id == expected
    found, read = ours(judge)
    assert np.ptp(found) > 0.01, "too flat to tell"
    for side in ("right", "left"):
        np.testing.assert_allclose(theirs(judge, side, with_template), found, atol=1e-5)
    return read


@pytest.mark.parametrize("with_template", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize("base", BASES)
def test_the_scores_are_the_same(tmp_path: Path, base: str, with_template: bool):
    named, token, expected = BASES[base]
    model = write_base(tmp_path / "base", named, token, with_template)
    policy = Policy.from_config(check_checkpoint(model))
    params = load_params(model, policy, None, jnp.dtype(jnp.float32))
    padding = padding_of(HuggingFaceTokenizer(model))
    export(tmp_path / "rm", policy, params, jnp.float32, model, padding=padding)
    read = assert_same_scores(tmp_path / "rm", expected, with_template)
    lessons = read_lessons(
        options_of_run(options(model, tmp_path), reward_model.read), policy.config
    )
    learned = lessons.train.draw(0, 1)[0]
    assert [learned.chosen.tokens.tolist(), learned.rejected.tokens.tolist()] == read[:2]


def test_a_run_exports_what_makes_them_so(tmp_path: Path):
    """Nothing names a token to pad with: it is the end of each text."""
    base = write_base(tmp_path / "base", None, None, with_template=False)
    given = made(*options(base, tmp_path), command=reward_model)
    whole_run(given)
    assert_same_scores(tmp_path / "rm", 0, with_template=False)


from transformers import (  # noqa: E402 - it imports torch
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

FAMILIES = {
    "qwen3": QWEN3,
    "qwen2": replace(QWEN3, architecture="qwen2", qk_norm=False, attention_bias=True),
    "llama": replace(QWEN3, architecture="llama", qk_norm=False),
}
PROMPTS = ["What is 2 + 2?", "What is 2 + 2?", "Name a colour.", "Be brief: who wrote Faust?"]
ANSWERS = ["4", "It is four, as two and two make four. " * 3, "", "Goethe"]


def scores_of_transformers(folder: Path) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        tokens = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=False)
        with torch.no_grad():
            scores.append(float(model.eval()(input_ids=tokens).logits[0, 0]))
    return scores


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(tmp_path: Path, family: str):
    shape = replace(FAMILIES[family], head="scalar", tie_embeddings=False)
    folder = write_checkpoint(tmp_path / "judge", shape)
    config = parse([*TINY, "--reward", f"model:{folder}"])
    config = replace(config, rollout=replace(config.rollout, max_prompt_length=96))
    models = reward_models(config)
    load_reward_models(models)
    with open_scorer(config.reward, config.reward_limits, models) as scorer:
        ours = scorer.score(PROMPTS, ANSWERS, {})
    expected = scores_of_transformers(folder)
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(ours, expected, atol=1e-5, rtol=0)


trl = pytest.importorskip("trl", reason="needs the `parity` extra")

LLAMA = replace(QWEN3, architecture="llama", qk_norm=False, tie_embeddings=False)
RATE, BATCH, MOST = 1e-2, 16, 64


def write_pairs(folder: Path) -> tuple[Path, Path]:
    """The response with more a's is preferred."""
    draw, rows = random.Random(0), set()
    while len(rows) < 1200:
        length = draw.randrange(6, 13)
        more = draw.randrange(1, length + 1)
        counts = more, draw.randrange(more)
        texts = ["".join(draw.sample("a" * n + "b" * (length - n), length)) for n in counts]
        rows.add((f"{draw.randrange(1000)}?", *texts))
    names = ("prompt", "chosen", "rejected")
    lines = [json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in sorted(rows)]
    random.Random(1).shuffle(lines)
    paths = folder / "train.jsonl", folder / "test.jsonl"
    for path, part in zip(paths, (lines[:800], lines[800:]), strict=True):
        path.write_text("".join(part))
    return paths


@pytest.fixture(scope="module")
def trained_on(tmp_path_factory) -> tuple[Path, Path, Path]:
    """A model without a chat template: TRL puts texts into none."""
    folder = tmp_path_factory.mktemp("given")
    model = write_checkpoint(folder / "model", LLAMA)
    path = model / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({x: y for x, y in fields.items() if x != "chat_template"}))
    return model, *write_pairs(folder)


def trained_here(trained_on: tuple[Path, Path, Path], folder: Path) -> SftSetup:
    model, train, test = map(str, trained_on)
    words = ["--model", model, "--data", train, "--eval.data", test, "--eval.num_examples", "400"]
    words += ["--optimizer.learning_rate", str(RATE), "--batch_size", str(BATCH), "--devices", "1"]
    words += ["--optimizer.schedule", "constant", "--optimizer.weight_decay", "0"]
    words += ["--optimizer.b2", "0.999", "--max_length", str(MOST), "--run_dir", str(folder)]
    setup = made(*words, command=reward_model)
    whole_run(setup)
    return setup


def accuracy_of_trl(trained_on: tuple[Path, Path, Path], folder: Path) -> float:
    datasets, transformers = map(pytest.importorskip, ("datasets", "transformers"))
    model, train, test = map(str, trained_on)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    theirs.config.pad_token_id = tokenizer.pad_token_id
    torch.nn.init.zeros_(theirs.score.weight)
    files = {"train": train, "test": test}
    data = datasets.load_dataset("json", data_files=files, cache_dir=str(folder / "cache"))
    args = trl.RewardConfig(
        str(folder),
        learning_rate=RATE,
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        lr_scheduler_type="constant",
        max_length=MOST,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to=[],
    )
    trainer = trl.RewardTrainer(
        theirs,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer.evaluate()["eval_accuracy"]


@pytest.mark.filterwarnings("ignore")  # what TRL itself uses is deprecated
def test_the_same_accuracy(trained_on, tmp_path: Path):
    expected = accuracy_of_trl(trained_on, tmp_path / "theirs")
    setup = trained_here(trained_on, tmp_path / "run")
    assert isinstance(setup.lessons, RewardLessons)
    found = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["eval/accuracy"]
    print(f"accuracy {found:.4f}, TRL's {expected:.4f}")
    assert expected >= 0.95 and abs(found - expected) <= 0.01
