"""What two cores are given to do: models, responses of forced lengths, and who generates them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.speed.iteration_vs_peers import write_prompts, write_words
from pat_jax.engine.record.report import RolloutReport
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Params, Policy
from pat_jax.profiling.simulate.machine import Workload
from pat_jax.rl.batches.types import Prompt, Rollout, RolloutGroup
from pat_jax.run.generation import Generator, OnFinish

PROMPT = 16  # tokens


@dataclass(frozen=True)
class Case:
    """A model, and the responses of an iteration."""

    model: ModelConfig
    responses: int
    median: float  # tokens of a response
    spread: float  # of the logarithm of lengths
    cap: int  # tokens
    micro_batch: int = 2048  # tokens
    compiles: str = "all"  # as --rollout.compile
    more: str = ""  # further options of the run

    def lengths(self, iteration: int) -> np.ndarray:
        """Tokens of each response, int[responses]: the same in every iteration, in another order."""
        places = (np.arange(self.responses) + 0.5) / self.responses
        normal = [NormalDist().inv_cdf(place) for place in places]
        drawn = self.median * np.exp(self.spread * np.array(normal))
        found = np.clip(np.round(drawn), 1, self.cap).astype(int)
        return np.random.default_rng(iteration).permutation(found)

    def workload(self, lengths: np.ndarray | None = None) -> Workload:
        """An iteration with responses of these lengths; None: with those of the first iteration."""
        found = self.lengths(0) if lengths is None else lengths
        prompts, numbers = np.full(self.responses, PROMPT), np.arange(self.responses)
        return Workload(prompts, found, self.cap, numbers)

    def options(self, folder: Path, run: str, *more: str) -> list[str]:
        """As `pat_jax.train` is told. `folder` is that of `write_models`."""
        named = {
            "model": folder / "policy",
            "data.files": folder / "prompts.jsonl",
            "reward": f"model:{folder / 'judge'}",
            "steps": 10**6,
            "remat": "none",
            "run_dir": folder / run,
            "log_samples_every": 0,
            "eval.every": 0,
            "checkpoint.every": 10**6,
            "profile": "none",
            "algorithm.name": "ppo",
            "algorithm.whiten_advantages": False,
            "algorithm.beta": 0.05,
            "algorithm.mini_batch_size": self.responses,
            "algorithm.tokens_per_micro_batch": self.micro_batch,
            "reward_model.tokens_per_micro_batch": self.micro_batch,
            "reward_model.max_length": self.cap + 2 * PROMPT,
            "rollout.prompts_per_step": self.responses,
            "rollout.num_generations": 1,
            "rollout.max_prompt_length": PROMPT,
            "rollout.max_completion_length": self.cap,
            "rollout.keep_unfinished": False,
            "rollout.compile": self.compiles,
            "speculation.source": "none",
            "optimizer.learning_rate": 1e-5,
        }
        asked = [part for name, value in named.items() for part in (f"--{name}", str(value))]
        return [*asked, *self.more.split(), *more]


def write_models(folder: Path, model: ModelConfig, prompts: int) -> None:
    """Random weights of the policy and of a reward model of the same size, and prompts for them."""
    words = write_words(folder / "words", model.vocab_size)
    policy = Policy.from_config(model)
    export(folder / "policy", policy, policy.init(1), jnp.float32, words)
    judge = Policy.from_config(replace(model, head="scalar", tie_embeddings=False))
    scores = judge.init(2)
    # Else all scores are 0, and nothing is learned.
    scores["score"] = jax.random.normal(jax.random.key(3), (1, model.embed_dim))
    export(folder / "judge", judge, scores, jnp.float32, words)
    write_prompts(folder / "prompts.jsonl", prompts, PROMPT, model.vocab_size)


@dataclass
class Forced(Generator):
    """Generates responses of given lengths."""

    case: Case | None = None
    ended_s: Sequence[float] = ()  # when each response of the last rollout ended

    @classmethod
    def like(cls, other: Generator, case: Case) -> "Forced":
        kept = {field.name: getattr(other, field.name) for field in fields(Generator)}
        return cls(**kept, case=case)

    def rollout(
        self, prompts: Sequence[Prompt], iteration: int, on_finish: OnFinish, kept: Any = None
    ) -> tuple[list[RolloutGroup], RolloutReport]:
        assert self.case is not None
        self._forced, found = self.case.lengths(iteration), np.zeros(len(prompts))
        start = time.perf_counter()

        def ended(index: int, rollout: Rollout) -> None:
            found[index] = time.perf_counter() - start
            on_finish(index, rollout)

        done = super().rollout(prompts, iteration, ended, kept)
        self.ended_s = tuple(found.tolist())
        return done

    def _generate(self, requests: Any, *rest: Any) -> Iterator[Any]:
        forced = [
            replace(one, max_new_tokens=int(length), ignore_eos=True)
            for one, length in zip(requests, self._forced, strict=True)
        ]
        for i, done in super()._generate(forced, *rest):
            yield i, replace(done, is_truncated=False)  # as if a token had ended it


@dataclass
class Elsewhere(Generator):
    """Has the responses generated by a process of `Rollouts`, at the other end of the link."""

    link: Connection | None = None
    ended_s: Sequence[float] = ()

    def load(self, params: Params) -> None:
        sent = self.trainer.transfer(params, next(iter(self.engine.layouts.values())))
        self.ask("load", [np.asarray(leaf) for leaf in jax.tree.leaves(sent)])

    def compare(self, params: Params) -> float:
        assert self.link is not None
        transfer = self.trainer.transfer
        tokens = self.ask("compare", transfer.probes)
        return self.ask("scores", np.asarray(transfer.score(params, tokens)))

    def rollout(
        self, prompts: Sequence[Prompt], iteration: int, on_finish: OnFinish, kept: Any = None
    ) -> tuple[list[RolloutGroup], RolloutReport]:
        assert self.link is not None
        start, found, ended_s = time.perf_counter(), dict[int, Rollout](), np.zeros(len(prompts))
        self.link.send(("rollout", (prompts, iteration)))
        while not isinstance(told := self.link.recv(), RolloutReport):
            index, found[index] = told
            ended_s[index] = time.perf_counter() - start
            on_finish(index, found[index])
        self.ended_s = tuple(ended_s.tolist())
        groups = [RolloutGroup(prompt, (found[i],)) for i, prompt in enumerate(prompts)]
        return groups, told

    def ask(self, what: str, content: Any) -> Any:
        assert self.link is not None
        self.link.send((what, content))
        return self.link.recv()
