"""A reward model of several processes: the same batches in each, whichever of them scores a response."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from joined import companies, in_each
from runs import QWEN3, run, write_checkpoint
from several import SMALL, ends, start_all
from tokenizer_files import write_tokenizer

from pat_jax.common.hosts.together import ProcessGroup
from pat_jax.rl.rewards.model import RewardModel
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.scorer import RewardScorer
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer
from pat_jax.run.logging.metrics import read_metrics

SPEC = "model:judge"
PROMPTS = ["p", "p", "q", "q", "r", "r", "s"]
ANSWERS = ["a", "bb", "a", "", "dddd", "bb", "much too long for it"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> HuggingFaceTokenizer:
    folder = write_tokenizer(tmp_path_factory.mktemp("judge"), eos_token="<eos>")
    return HuggingFaceTokenizer(folder)


@pytest.mark.parametrize("count", [2, 3])
def test_every_process_runs_the_same_batches(ended, tokenizer, count):
    told = [Response(prompt, answer, {}) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]

    def rewards(one: ProcessGroup) -> tuple[list[float], list[bytes]]:
        batches: list[bytes] = []

        def score(texts: Sequence[np.ndarray]) -> np.ndarray:
            batches.extend(text.tobytes() for text in texts)
            return np.array([len(text) for text in texts], np.float32)

        model = RewardModel(SPEC, tokenizer, score, max_length=8)
        with RewardScorer(SPEC, timeout=1.0, shares=one, models={SPEC: model}) as scorer:
            scoring = scorer.begin(PROMPTS, told.__getitem__)
            # Responses end in another order in each process.
            for row in np.random.default_rng(one.index).permutation(len(told)).tolist():
                scoring.add(row, row)
            return scoring.rewards().tolist(), batches

    with companies(count) as found:
        ours, *others = in_each(found, rewards)
    whole = [prompt + answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    expected = [len(text) + 2.0 for text in whole]  # the beginning and the end are tokens, too
    np.testing.assert_array_equal(ours[0], [*expected[:-1], np.nan])
    assert len(set(ours[1])) == len(set(whole[:-1]))
    assert len(ours[1]) == len(set(whole[:-1]))
    for other in others:
        np.testing.assert_array_equal(other[0], ours[0])
        assert other[1] == ours[1]
    assert ended == []


@pytest.mark.slow  # whole commands
@pytest.mark.timeout(900)
def test_two_processes_have_the_rewards_of_one(tmp_path: Path):
    judge = write_checkpoint(tmp_path / "judge", replace(QWEN3, head="scalar"))
    options = [*SMALL, "--reward", f"model:{judge}", "--warm_start.steps", "0", "--steps", "1"]
    several, alone = tmp_path / "several", tmp_path / "alone"
    for code, output in ends(start_all(2, *options, "--run_dir", str(several))):
        assert code == 0, output
    run(*options, "--run_dir", str(alone))
    for ours, theirs in zip(
        read_metrics(several / "metrics.jsonl"), read_metrics(alone / "metrics.jsonl"), strict=True
    ):
        for name in ("reward/mean", "reward/std", "eval/reward"):
            assert ours.get(name) == pytest.approx(theirs.get(name), abs=1e-5), name
