"""The reward_model command beside TRL's RewardTrainer: the same pairs, the same accuracy.

Both read the same tokens, and begin with the same weights and a head of zeros.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from file_runs import made, whole_run
from runs import QWEN3, write_checkpoint

from pat_jax import reward_model
from pat_jax.run.logging.metrics import read_metrics
from pat_jax.run.sft.lessons import RewardLessons
from pat_jax.run.sft.setup import SftSetup

torch = pytest.importorskip("torch", reason="needs the `parity` extra")
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
def given(tmp_path_factory) -> tuple[Path, Path, Path]:
    """A model without a chat template: TRL puts texts into none."""
    folder = tmp_path_factory.mktemp("given")
    model = write_checkpoint(folder / "model", LLAMA)
    path = model / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({x: y for x, y in fields.items() if x != "chat_template"}))
    return model, *write_pairs(folder)


def ours(given: tuple[Path, Path, Path], folder: Path) -> SftSetup:
    model, train, test = map(str, given)
    words = ["--model", model, "--data", train, "--eval.data", test, "--eval.num_examples", "400"]
    words += ["--optimizer.learning_rate", str(RATE), "--batch_size", str(BATCH), "--devices", "1"]
    words += ["--optimizer.schedule", "constant", "--optimizer.weight_decay", "0"]
    words += ["--optimizer.b2", "0.999", "--max_length", str(MOST), "--run_dir", str(folder)]
    setup = made(*words, command=reward_model)
    whole_run(setup, reward_model.COMMAND)
    return setup


def theirs(given: tuple[Path, Path, Path], folder: Path) -> float:
    datasets, transformers = map(pytest.importorskip, ("datasets", "transformers"))
    model, train, test = map(str, given)
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
def test_the_same_accuracy(given, tmp_path: Path):
    expected = theirs(given, tmp_path / "theirs")
    setup = ours(given, tmp_path / "run")
    assert isinstance(setup.lessons, RewardLessons)
    found = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["eval/accuracy"]
    print(f"accuracy {found:.4f}, TRL's {expected:.4f}")
    assert expected >= 0.95 and abs(found - expected) <= 0.01
