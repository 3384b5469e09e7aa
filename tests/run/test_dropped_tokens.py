"""Special tokens that a policy says: kept in texts where that is asked for, said once where they are left out."""

from pathlib import Path

import numpy as np
import pytest
from runs import json_lines
from tokenizer_files import write_tokenizer

from pat_jax.config.command_line import parse
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout
from pat_jax.rl.data.arithmetic import TOKENIZER
from pat_jax.rl.rewards.responses import response_reader
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.run.logging.completions import Completions, DroppedTokens
from pat_jax.run.start.task import load_tokenizer

EOS, PAD, IM, BOS = range(4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    return write_tokenizer(folder, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>")


def tokenizer_of(folder: Path, *options: str) -> HuggingFaceTokenizer:
    argv = ["--model", str(folder), "--data", "a.jsonl", *options]
    found = load_tokenizer(parse(argv).task)
    assert isinstance(found, HuggingFaceTokenizer)
    return found


def rollout(*tokens: int, finish: FinishReason = FinishReason.STOP) -> Rollout:
    nothing = np.zeros(len(tokens), np.float32)
    return Rollout(Prompt(1, (9,), "?", {}), 0, np.array(tokens, np.int32), nothing, finish)


@pytest.mark.parametrize(
    ("options", "text"), [((), "thethe"), (("--reward_skip_special_tokens", "false"), "the<im>the")]
)
@pytest.mark.parametrize("finish", FinishReason)
def test_rewards_and_files_have_the_same_text(folder, tmp_path, options, text, finish):
    tokenizer = tokenizer_of(folder, *options)
    the, end = tokenizer.encode("the"), [EOS] * (finish is FinishReason.STOP)
    one, output = rollout(*the, IM, *the, *end, finish=finish), list[str]()
    assert response_reader([], tokenizer)(one).completion == text
    with Completions(tokenizer, tmp_path, output.append, is_asked=True) as completions:
        completions.write(1, "train", [one, one], np.zeros(2, np.float32))
        completions.write(2, "eval", [one], np.zeros(1, np.float32))
    lines = json_lines(tmp_path / "completions.jsonl")
    assert [line["completion"] for line in lines] == [text] * 3
    left_out = (
        "2 of 2 responses have special tokens such as '<im>', which rewards and written responses "
        "leave out: --reward_skip_special_tokens false keeps them"
    )
    assert output == ([] if options else [left_out])


def test_beginning_end_and_padding_are_nothing_to_say(folder):
    output, tokenizer = list[str](), tokenizer_of(folder)
    dropped = DroppedTokens(tokenizer, output.append)
    dropped.look([])
    dropped.look([rollout(BOS, *tokenizer.encode("the"), PAD, EOS), rollout(EOS)])
    assert not output
    dropped.look([rollout(EOS), rollout(IM, EOS), rollout(IM, IM, EOS)])
    dropped.look([rollout(IM, EOS)])
    assert len(output) == 1 and output[0].startswith("2 of 3 responses")
    DroppedTokens(TOKENIZER, output.append).look([rollout(1)])  # of the built-in task
    assert len(output) == 1
