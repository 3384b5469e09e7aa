"""A trained reward model in transformers: batches padded by its own tokenizer, with the scores that
pat_jax gives, whatever its base says of padding (needs the `parity` extra)."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from file_runs import made, whole_run
from plain_model import outputs
from runs import JUDGE, write_checkpoint

from pat_jax import reward_model
from pat_jax.config.role_table import reward_role
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.policy import Policy
from pat_jax.rl.text.scored_text import scored_tokens, until_padding
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.run.files.folder import options_of_run
from pat_jax.run.roles.reward_models import find_reward_model
from pat_jax.run.sft.inputs import padding_of
from pat_jax.run.sft.reading import read_lessons

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
    whole_run(given, reward_model.COMMAND)
    assert_same_scores(tmp_path / "rm", 0, with_template=False)
