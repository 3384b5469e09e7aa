"""The experts that computed a response are kept with it, and taken back with it, bit for bit."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.rl.batches.types import Prompt
from pat_jax.run.checkpoints.journal import FOLDER, RolloutJournal
from pat_jax.run.generation import to_rollout

POLICY = 7


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
            with journal.iteration(0, POLICY) as iteration:
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
        assert ('"routes"' in (Path(folder) / FOLDER / "iteration-0.jsonl").read_text()) == (
            shape is not None
        )


def test_a_rollout_has_the_routes_of_its_response():
    done = completion(5, 2, (3, 2), 0)
    rollout = to_rollout(Prompt(0, (8, 9), "", {}), 1, done)
    assert rollout.routed_experts is done.routed_experts
    assert rollout.routed_experts is not None
    assert len(rollout.prompt.tokens) + len(rollout.tokens) - 1 == len(rollout.routed_experts)
