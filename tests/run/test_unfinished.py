"""Whatever a kill leaves of an iteration, what is whole is taken, bit for bit, and the rest is drawn; routes of
experts too."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.rl.batches.types import Prompt
from pat_jax.rl.rewards.outcome import Cause, Failure
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.scorer import RewardScorer
from pat_jax.run.checkpoints.files import JOURNAL
from pat_jax.run.checkpoints.journal import Iteration, RolloutJournal
from pat_jax.run.generation import to_rollout

BATCHES, SIZE, POLICY = 2, 4, 0xFFFFFFFF
SCORES = 0.1, None, -3.0, 1e30  # of a function that does not apply to one
COUNTING = """
import pathlib
HERE = pathlib.Path(__file__).parent
def length(prompts, completions, **columns):
    for text in completions:
        (HERE / f"scored {text}").touch(exist_ok=False)
    return [float(len(text)) for text in completions]
"""


def requests(batch: int) -> list[Request]:
    return [Request((5, i), sequence_key(batch, i), 9, Sampling(0.5)) for i in range(SIZE)]


def answer(request: Request) -> Completion:
    """By its key; log-probabilities with bits that no decimal notation of a few digits keeps."""
    rng = np.random.default_rng(request.key)
    tokens, drawn = rng.integers(0, 300, 1 + rng.integers(9), np.int32), rng.random(9, np.float32)
    unfiltered = np.log(drawn[: len(tokens)] / 3) if rng.random() < 0.5 else None
    logprobs = np.log(drawn[: len(tokens)])
    return Completion(tokens, logprobs, len(tokens) == 9, unfiltered_logprobs=unfiltered)


@dataclass
class Model:
    """Answers in an order that is not theirs, and remembers who was asked."""

    batch: int
    asked: list[int] = field(default_factory=list)

    def __call__(self, places: Sequence[int]) -> Iterator[tuple[int, Completion]]:
        for place in reversed(places):
            self.asked.append(place)
            yield place, answer(requests(self.batch)[place])


def iterate(iteration: Iteration) -> list[Model]:
    """All batches of an iteration, scored; each response is what it would be without a disk."""
    models = []
    with iteration:
        for number in range(BATCHES):
            batch, model = iteration.batch(number), Model(number)
            models.append(model)
            found = dict(batch.completions(requests(number), model))
            assert found.keys() == set(range(SIZE)) and batch.taken == SIZE - len(model.asked)
            for place, done in found.items():
                assert_same(done, answer(requests(number)[place]))
                value = SCORES[place]
                failure = Failure(Cause.NONE, "returned None")
                score = (failure if value is None else value, {"depth": place / 7})
                if known := batch.scores.get(place):
                    assert known in ({}, {"f": score})
                batch.keep(place, "f", score)
    return models


def assert_same(one: Completion, other: Completion) -> None:
    assert one.is_truncated == other.is_truncated
    for name in ("tokens", "logprobs", "unfiltered_logprobs"):
        ours, theirs = getattr(one, name), getattr(other, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()


def folders(folder: str | Path) -> RolloutJournal:
    return RolloutJournal(Path(folder), Path(folder) / "checkpoints", is_on=True)


@given(st.data())
def test_what_is_whole_is_taken_and_the_rest_is_drawn(data: st.DataObject):
    with TemporaryDirectory() as folder:
        path = Path(folder) / JOURNAL / "iteration-3.jsonl"
        assert all(
            len(model.asked) == SIZE for model in iterate(folders(folder).iteration(3, POLICY))
        )
        content = path.read_bytes()
        size = data.draw(st.integers(0, len(content)), label="bytes that were written")
        path.write_bytes(content[:size])
        models = iterate(folders(folder).iteration(3, POLICY))
        whole = content[:size].rpartition(b"\n")[0].count(b'"policy"')
        assert sum(len(model.asked) for model in models) == BATCHES * SIZE - whole
        assert sorted(path.read_bytes().splitlines()) == sorted(content.splitlines())


def test_a_response_is_on_disk_when_it_is_handed_on(tmp_path: Path):
    with folders(tmp_path).iteration(0, POLICY) as iteration:
        batch, path = iteration.batch(0), tmp_path / JOURNAL / "iteration-0.jsonl"
        for number, _ in enumerate(batch.completions(requests(0), Model(0)), start=1):
            assert path.read_bytes().count(b"\n") == number


def test_what_another_policy_said_is_drawn_again_and_so_is_the_answer_to_another_request(tmp_path):
    iterate(folders(tmp_path).iteration(0, POLICY))
    # A later kill leaves both; the newer one counts.
    assert len(iterate(folders(tmp_path).iteration(0, POLICY - 1))[0].asked) == SIZE
    assert iterate(folders(tmp_path).iteration(0, POLICY - 1))[0].asked == []
    with folders(tmp_path).iteration(0, POLICY - 1) as iteration:
        batch, model = iteration.batch(0), Model(0)
        others = [replace(one, max_new_tokens=8 + (i != 2)) for i, one in enumerate(requests(0))]
        assert len(list(batch.completions(others, model))) == SIZE
        assert model.asked == [2] and 2 not in batch.scores
    with folders(tmp_path).iteration(1, POLICY - 1) as other:
        assert other.batch(0).before == {}


def test_lines_that_are_none_cost_nothing_but_themselves(tmp_path: Path):
    iterate(folders(tmp_path).iteration(0, POLICY))
    path = tmp_path / JOURNAL / "iteration-0.jsonl"
    lines = path.read_text().splitlines()
    other = lines[0].replace("Completion", "Request")
    path.write_text("\n".join(["{", "[]", '{"batch": 0}', other, *lines[1:]]) + "\n")
    assert len(iterate(folders(tmp_path).iteration(0, POLICY))[0].asked) == 1


def test_an_iteration_is_forgotten_when_a_checkpoint_covers_it(tmp_path: Path):
    run = folders(tmp_path)
    for step in range(3):
        iterate(run.iteration(step, POLICY))
    assert len(list((tmp_path / JOURNAL).iterdir())) == 3  # no checkpoint yet
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    iterate(run.iteration(3, POLICY))
    assert sorted(path.stem[-1] for path in (tmp_path / JOURNAL).iterdir()) == ["2", "3"]
    run.finish()
    assert not (tmp_path / JOURNAL).exists()


def test_a_disk_that_takes_nothing_costs_no_response(tmp_path: Path):
    (tmp_path / JOURNAL).write_text("in the way")
    assert len(iterate(folders(tmp_path).iteration(0, POLICY))[0].asked) == SIZE
    switched_off = RolloutJournal(tmp_path / "off", tmp_path, is_on=False)
    assert len(iterate(switched_off.iteration(0, POLICY))[0].asked) == SIZE
    assert not (tmp_path / "off").exists()


@pytest.mark.parametrize("known", [0, 1, 2])
def test_a_group_is_scored_again_unless_all_its_scores_are_known(tmp_path: Path, known: int):
    """Of a function that sees a group: its scores may be relative."""
    (tmp_path / "counting.py").write_text(COUNTING)
    texts, rewards = ["a", "bb", "ccc", "dddd"], []

    def read(place: int) -> Response:
        return Response("", texts[place], {})

    for attempt in range(2):
        with (
            folders(tmp_path).iteration(0, POLICY) as iteration,
            RewardScorer(f"{tmp_path / 'counting.py'}:length", timeout=60.0) as scorer,
        ):
            batch = iteration.batch(0)
            scoring = scorer.begin(["p", "p", "q", "q"], read, batch)
            for place, _ in batch.completions(requests(0), Model(0)):
                scoring.add(place, place)
            rewards.append(scoring.rewards().tolist())
            scored = 2 if attempt == 1 and known == 2 else 4
            assert len(list(tmp_path.glob("scored *"))) == scored
        for path in tmp_path.glob("scored *"):
            path.unlink()
        _keep_scores(tmp_path / JOURNAL / "iteration-0.jsonl", known)
    assert rewards[0] == rewards[1] == [1, 2, 3, 4]


def _keep_scores(path: Path, count: int) -> None:
    """So many of the first group alone."""
    lines = path.read_text().splitlines(keepends=True)
    scores = [line for line in lines if '"function"' in line]
    first = [line for line in scores if '"place": 0' in line or '"place": 1' in line]
    path.write_text("".join(line for line in lines if line not in scores or line in first[:count]))


EARLIER_POLICY = 7


def completion(length: int, prompt: int, shape: tuple[int, int] | None, seed: int) -> Completion:
    rng = np.random.default_rng(seed)
    routes = None
    if shape is not None:
        routes = rng.integers(0, 2**15, (prompt + length - 1, *shape)).astype(np.int16)
    tokens, logprobs = rng.integers(0, 300, length, np.int32), rng.random(length, np.float32)
    return Completion(tokens, logprobs, length == 9, routed_experts=routes)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from([None, (1, 1), (3, 2), (48, 8)]),
    st.integers(0, 1000),
)
def test_routes_are_read_as_they_were_written(lengths, shape, seed: int):
    requests = [Request((5, 6, i), sequence_key(seed, i), 9) for i in range(len(lengths))]
    answers = [completion(n, 3, shape, seed + i) for i, n in enumerate(lengths)]
    asked: list[int] = []

    def ask(places: Sequence[int]) -> Iterator[tuple[int, Completion]]:
        for place in places:
            asked.append(place)
            yield place, answers[place]

    with TemporaryDirectory() as folder:
        for _ in range(2):  # the second time nothing is left to ask for
            journal = RolloutJournal(Path(folder), Path(folder) / "checkpoints", is_on=True)
            with journal.iteration(0, EARLIER_POLICY) as iteration:
                found = dict(iteration.batch(0).completions(requests, ask))
            assert found.keys() == set(range(len(lengths)))
            for place, done in found.items():
                routes, wanted = done.routed_experts, answers[place].routed_experts
                if routes is None or wanted is None:
                    assert routes is wanted is None
                else:
                    assert (routes.dtype, routes.shape) == (wanted.dtype, wanted.shape)
                    np.testing.assert_array_equal(routes, wanted)
        assert asked == list(range(len(lengths)))


def test_a_rollout_has_the_routes_of_its_response():
    done = completion(5, 2, (3, 2), 0)
    rollout = to_rollout(Prompt(0, (8, 9), "", {}), 1, done)
    assert rollout.routed_experts is done.routed_experts
    assert rollout.routed_experts is not None
    assert len(rollout.prompt.tokens) + len(rollout.tokens) - 1 == len(rollout.routed_experts)
