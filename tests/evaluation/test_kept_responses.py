"""What a kill leaves of an evaluation: responses that are whole are asked once, the others again, and its
folder is one evaluation's at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pat_jax.common.errors import UserError
from pat_jax.config.data import DataConfig
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.evaluation.folder import EvaluationFolder
from pat_jax.evaluation.options import RESULTS_FILE
from pat_jax.evaluation.problem_sets import ProblemSets
from pat_jax.rl.batches.types import Prompt
from pat_jax.run.checkpoints.files import JOURNAL
from pat_jax.run.start.heldout import HeldoutSet

REQUESTS = [Request((5, 6, i), sequence_key(0, i), 9) for i in range(6)]


def config(folder: Path, *, resume: bool = False) -> EvaluateConfig:
    return EvaluateConfig(
        model="m", data=DataConfig(files=("d.jsonl",)), out=str(folder), resume=resume
    )


@pytest.mark.parametrize("resume", [False, True])
def test_what_another_process_has_evaluated_meanwhile_is_kept(tmp_path: Path, resume: bool):
    with EvaluationFolder(config(tmp_path)) as first:
        first.finish("{}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(UserError, match="another process has evaluated there meanwhile"):
        EvaluationFolder(config(tmp_path, resume=resume))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before
    assert RESULTS_FILE in before


def test_one_that_was_begun_goes_on_with_what_has_been_asked(tmp_path: Path):
    asked: list[Request] = []

    def answers(requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        asked.extend(requests)
        for i in reversed(range(len(requests))):
            tokens = np.array(requests[i].tokens, np.int32)
            yield i, Completion(tokens, np.zeros(3, np.float32), is_truncated=False)

    with EvaluationFolder(config(tmp_path)) as first:
        ended = first.ask(answers, REQUESTS)
        assert [next(ended)[0], next(ended)[0]] == [5, 4] and first.num_tokens == 6
    asked.clear()
    other = replace(REQUESTS[4], max_new_tokens=10)  # the file of the problems has changed
    with EvaluationFolder(config(tmp_path, resume=True)) as again:
        assert again.path == tmp_path and len(again.kept.before) == 2
        both = dict(again.ask(answers, [*REQUESTS[:4], other, REQUESTS[5]]))
        assert asked == [*REQUESTS[:4], other] and again.num_tokens == 15
        assert all(both[i].tokens.tolist() == [5, 6, i] for i in range(6))
        again.finish("{}")
    assert not (tmp_path / JOURNAL).exists()


def problem_sets(*lengths: int) -> ProblemSets:
    prompts = [Prompt(i, (5,) * n, "", {}) for i, n in enumerate(lengths)]
    return ProblemSets(["math"], [HeldoutSet("sums", prompts)], [], [], {})


@pytest.mark.parametrize(
    ("lengths", "samples", "rows", "longest"),
    [
        ((20, 90, 40), 2, 8, 90),  # six samples, a row of each of four devices alike
        ((20,), 1, 4, 20),
        ((20, 90, 40), 100, 64, 90),  # no more than the options say
        ((700, 30), 1, 4, 512),
    ],
)
def test_rows_and_prompts_of_an_evaluation(lengths, samples, rows, longest):
    asked = RolloutConfig(prompts_per_step=64, num_generations=1, max_prompt_length=512)
    fitted = problem_sets(*lengths).fitted(asked, samples, num_devices=4)
    assert (fitted.prompts_per_step, fitted.max_prompt_length) == (rows, longest)
