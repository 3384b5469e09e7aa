"""Generates a group of responses to each prompt; their lengths update the length model."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.together import process_group
from pat_jax.common.timeline import stage
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device.decode.sampling import sequence_key
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.record.report import RolloutReport
from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.sequences.sampling import Sampling
from pat_jax.engine.session import WINDOW
from pat_jax.layout.layout import Layout
from pat_jax.models.policy import Params
from pat_jax.planning import stage_names
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import Planner
from pat_jax.planning.types import Load
from pat_jax.rl.batches.types import FinishReason, Prompt, Rollout, RolloutGroup
from pat_jax.run.checkpoints.journal import Batch
from pat_jax.training.exit_head import ExitHeadTrainer
from pat_jax.training.trainer import Trainer
from pat_jax.training.transfer import logprob_gap

TRAIN, EVAL = 0, 1  # streams of sampling keys

OnFinish = Callable[[int, Rollout], None]


@dataclass
class Generator:
    """The rollout stage of one run: the engine with the policy, and the planner."""

    engine: RolloutEngine
    trainer: Trainer
    planner: Planner
    config: RolloutConfig
    seed: int
    lengths: LengthModel
    exit_head: ExitHeadTrainer | None = None  # only with early-exit drafts
    earlier: EarlierResponses | None = None  # texts that training rollouts copy drafts from

    def load(self, params: Params) -> None:
        """Transfers the policy to the engine: the next rollout samples from it."""
        layout = self._first_layout()
        head = None if self.exit_head is None else self.exit_head.head
        devices = {*self.trainer.layout.devices, *layout.devices}
        with stage(stage_names.TRANSFER, devices):
            self.engine.set_weights(self.trainer.transfer(params, layout), layout, head)

    def compare(self, params: Params) -> float:
        """Returns the difference between the rollout's and the trainer's log-probability of one
        token, in nats. `params` were given to `load`. Costs a prefill and a trainer pass."""
        transfer = self.trainer.transfer
        return logprob_gap(self.engine, partial(transfer.score, params), transfer.probes)

    def _first_layout(self) -> Layout:
        """Returns the layout in which a full rollout starts."""
        load = full_load(self.config, self.engine.capacity)
        start = process_group().agree("first layout", lambda: self.planner.start(load))
        return self.engine.layouts[start]

    @property
    def policy(self) -> int:
        """Checksum of the policy's weights in the engine."""
        assert self.trainer.transfer.sent is not None, "no policy has been loaded"
        return self.trainer.transfer.sent

    def release(self) -> None:
        """Frees the rollout's weights: the update needs the memory."""
        self.engine.release_weights()

    def rollout(
        self,
        prompts: Sequence[Prompt],
        iteration: int,
        on_finish: OnFinish,
        kept: Batch | None = None,
    ) -> tuple[list[RolloutGroup], RolloutReport]:
        """Samples a group of responses to each prompt.

        Args:
          kept: the batch's journal on disk: it gives responses generated before a kill, and gets
        the others.
          on_finish: called with each response as soon as it ends, and with its index among the
            responses of all groups.
        """
        size = self.config.num_generations
        requests = training_requests(self.config, prompts, self.seed, iteration)
        ids = np.array([request.prompt_id for request in requests])
        report = RolloutReport()
        rollouts = dict[int, Rollout]()

        def ask(places: Sequence[int]) -> Iterator[tuple[int, Completion]]:
            asked = [requests[i] for i in places]
            expected = self.lengths.expected(ids[places])
            for i, done in self._generate(asked, report, expected, self.earlier):
                yield places[i], done

        with stage(stage_names.ROLLOUT, self.engine.mesh.devices.flat):
            every = range(len(requests))
            for i, done in kept.completions(requests, ask) if kept else ask(every):
                rollouts[i] = to_rollout(prompts[i // size], i % size, done)
                on_finish(i, rollouts[i])
        in_order = [rollouts[i] for i in range(len(requests))]
        self._learn(in_order)
        groups = [
            RolloutGroup(prompt, tuple(in_order[i * size : (i + 1) * size]))
            for i, prompt in enumerate(prompts)
        ]
        return groups, report

    def evaluate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        """Yields each request's index and completion as it ends. The length model does not learn
        from them. Raises UserError at the end if some request could not be sampled."""
        size = WINDOW * self.engine.capacity
        for start in range(0, len(requests), size):
            some = requests[start : start + size]
            for i, done in self._generate(some, RolloutReport()):
                yield start + i, done

    def _generate(
        self,
        requests: Sequence[Request],
        report: RolloutReport,
        expected: np.ndarray | None = None,
        earlier: EarlierResponses | None = None,
    ) -> Iterator[tuple[int, Completion]]:
        """Yields each request's index and completion. Raises UserError at the end if some request
        could not be sampled."""
        # Every rollout begins in the same layout, whatever layout the last one ended in. So an
        # evaluation or a restart in between changes nothing.
        if (first := self._first_layout()) is not self.engine.layout:
            self.engine.weights.reshard(first)
        stream = self.engine.stream(
            requests, self.planner, report, expected=expected, earlier=earlier
        )
        advice = "go back to an earlier checkpoint, or lower --optimizer.learning_rate"
        yield from sampled(stream, len(requests), advice)

    def _learn(self, rollouts: Sequence[Rollout]) -> None:
        lengths = np.array([len(rollout.tokens) for rollout in rollouts])
        is_cut = np.array([rollout.finish is FinishReason.LENGTH for rollout in rollouts])
        prompt = np.array([rollout.prompt.id for rollout in rollouts])
        self.lengths = self.lengths.updated(lengths, is_cut, prompt)
        self.planner.observe_rollout(self.lengths)


def full_load(config: RolloutConfig, count: int) -> Load:
    """Returns the engine's load of `count` sequences before their first token, with prompts of
    maximal length. The sequences of a group share a prompt."""
    return Load(
        replica=np.zeros(count, int),
        generated=np.zeros(count, int),
        context=np.full(count, config.max_prompt_length),
        remaining_tokens=np.full(count, config.max_completion_length),
        prompt=np.arange(count) // config.num_generations,
    )


def training_requests(
    config: RolloutConfig, prompts: Sequence[Prompt], seed: int, iteration: int
) -> list[Request]:
    """Returns the requests of an iteration, one group after the other."""
    return [
        sampling_request(config, prompt, (seed, TRAIN, iteration, prompt.id, i), config.temperature)
        for prompt in prompts
        for i in range(config.num_generations)
    ]


def sampling_request(
    config: RolloutConfig, prompt: Prompt, ids: tuple[int, int, int, int, int], temperature: float
) -> Request:
    """Returns the request for one response. Its sampling key follows from the numbers in `ids`:
    seed, stream, iteration (or problem set), prompt, sample."""
    return Request(
        tokens=prompt.tokens,
        key=sequence_key(*ids),
        max_new_tokens=config.max_completion_length,
        sampling=Sampling(temperature, config.top_k, config.top_p),
        # Ids of held-out prompts could equal ids of training prompts.
        prompt_id=prompt.id if ids[1] == TRAIN else None,
    )


def sampled(
    stream: Iterable[tuple[int, Completion]], count: int, advice: str
) -> Iterator[tuple[int, Completion]]:
    """Yields the index and completion of each request that could be sampled, of `count` requests.
    At the end, raises UserError if some could not; `advice` tells the user what to do."""
    failed: dict[int, str] = {}
    for i, done in stream:
        if done.error:
            failed[i] = done.error
        else:
            yield i, done
    if failed:
        first = failed[min(failed)].removesuffix(".")
        raise UserError(
            f"{len(failed)} of {count} responses could not be sampled: {first}; {advice}."
        )


def to_rollout(prompt: Prompt, sample: int, done: Completion) -> Rollout:
    return Rollout(
        prompt=prompt,
        sample=sample,
        tokens=done.tokens,
        logprobs=done.logprobs,
        finish=FinishReason.LENGTH if done.is_truncated else FinishReason.STOP,
        unfiltered_logprobs=done.unfiltered_logprobs,
        routed_experts=done.routed_experts,
    )
