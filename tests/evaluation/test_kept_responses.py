"""What a kill leaves of an evaluation: responses that are whole are asked once, the others again, and its
folder is one evaluation's at a time."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.common.errors import UserError
from pat_jax.config.data import DataConfig
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.evaluation.folder import EvaluationFolder, KeptResponses
from pat_jax.evaluation.options import RESULTS_FILE
from pat_jax.evaluation.problem_sets import ProblemSets
from pat_jax.rl.batches.types import Prompt
from pat_jax.run.start.heldout import HeldoutSet

REQUESTS = [Request((5, 6, i), sequence_key(0, i), 9, Sampling(0.5)) for i in range(6)]
SavedResponse = tuple[list[int], bool]


class Asked:
    """Answers in an order that is not theirs, to each by its own key, and remembers them."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __call__(self, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        self.requests += requests
        for i in sorted(range(len(requests)), key=lambda i: int(requests[i].key[1])):
            length = 1 + int(requests[i].key[0]) % 9
            tokens = np.arange(length, dtype=np.int32) + requests[i].tokens[-1]
            yield i, Completion(tokens, np.zeros(length, np.float32), is_truncated=length == 9)


def output(
    path: Path, requests: Sequence[Request] = REQUESTS
) -> tuple[dict[int, SavedResponse], Asked]:
    """What was said to each request, in whatever order, and what was asked for it."""
    asked = Asked()
    with closing(KeptResponses(path)) as kept:
        pairs = list(kept.ask(asked, requests))
    found = {i: (done.tokens.tolist(), done.is_truncated) for i, done in pairs}
    assert len(pairs) == len(found) == len(requests)
    assert kept.num_tokens == sum(1 + int(request.key[0]) % 9 for request in asked.requests)
    return found, asked


@given(st.data())
def test_what_is_whole_is_kept_and_the_rest_is_asked(data: st.DataObject):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "responses.jsonl"
        expected, first = output(path)
        assert first.requests == REQUESTS
        content = path.read_bytes()
        size = data.draw(st.integers(0, len(content)), label="bytes that were written")
        path.write_bytes(content[:size])
        found, again = output(path)
        whole = content[:size].count(b"\n")
        assert found == expected and len(again.requests) == len(REQUESTS) - whole
        assert sorted(path.read_bytes().splitlines()) == sorted(content.splitlines())
        assert output(path)[1].requests == []


def test_a_response_is_on_disk_when_it_is_handed_on(tmp_path: Path):
    path = tmp_path / "responses.jsonl"
    with closing(KeptResponses(path)) as kept:
        for number, _ in enumerate(kept.ask(Asked(), REQUESTS), start=1):
            assert path.read_bytes().count(b"\n") == number


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUESTS[3], tokens=(5, 6, 7)),
        replace(REQUESTS[3], key=sequence_key(1, 3)),
        replace(REQUESTS[3], max_new_tokens=10),
        replace(REQUESTS[3], sampling=Sampling(0.5, top_k=2)),
        None,
    ],
)
def test_responses_to_other_requests_are_refused(tmp_path: Path, other: Request | None):
    path = tmp_path / "responses.jsonl"
    output(path)
    before = path.read_bytes()
    changed = [*REQUESTS[:3], *([other] if other else []), *REQUESTS[4:]]
    with pytest.raises(UserError, match=r"line \d, is the response to another problem") as error:
        output(path, changed)
    assert "\n" not in str(error.value) and path.read_bytes() == before


@pytest.mark.parametrize("line", ["{", "[]", '{"place": 0}', '{"place": 0, "tokens": [1e99]}'])
def test_what_is_no_response_is_refused(tmp_path: Path, line: str):
    path = tmp_path / "responses.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(UserError, match="line 1, is no response of an evaluation"):
        KeptResponses(path)
    assert path.read_text() == f"{line}\n"


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


def test_one_that_was_begun_goes_on(tmp_path: Path):
    with EvaluationFolder(config(tmp_path)):
        pass
    with EvaluationFolder(config(tmp_path, resume=True)) as again:
        assert again.path == tmp_path


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
