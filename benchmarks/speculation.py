"""Rollouts with drafts beside the same ones without, on this machine, by turns.

    XLA_FLAGS="--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false \
        intra_op_parallelism_threads=1" python -m benchmarks.speculation \
        --data ../shared/data/speculation/dev.parquet --model qwen3-0.6b --set rl3b --responses 16 \
        --out benchmarks/results/speculation_cpu2_16.json

The texts are real and the weights random numbers: whatever the logits say, the policy's choice is the
recorded token (everything is computed as always, then the token is replaced). So all variants say the same
tokens, and drafts are accepted as often as in these texts. The responses are samples of as few prompts as
have as many, cut at `--tokens`; a prompt's own tokens come first.

Variants: every static layout with every budget of drafts, and the planner with and without drafts. Each ratio is
of the best static layout without drafts, round by round; medians, with intervals by bootstrap.
"""

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.adaptive_vs_static import median_interval
from benchmarks.draft_acceptance import groups_of
from pat_jax.common.devices import configure
from pat_jax.config.rollout import RolloutConfig
from pat_jax.engine.device import decode, decode_step
from pat_jax.engine.engine import RolloutEngine
from pat_jax.engine.layout.buckets import Drafts
from pat_jax.engine.report import RolloutReport
from pat_jax.engine.sequences.earlier import EarlierResponses
from pat_jax.engine.sequences.responses import Request
from pat_jax.engine.sequences.texts import BESIDE
from pat_jax.models.policy import Policy
from pat_jax.models.presets import preset
from pat_jax.planning.drafts import Acceptance
from pat_jax.planning.latency.model import LatencyModel
from pat_jax.planning.lengths.model import LengthModel
from pat_jax.planning.planner.planner import CostModelPlanner, Planner
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.planning.types import Load
from pat_jax.profiling.measure.warm_up import Warmup
from pat_jax.profiling.simulate.draft_counting import Group

VOCAB = 151_936  # of the recorded tokens
PROMPT = 64  # tokens of a prompt that are kept: the last
PLANNED, ADAPTIVE = "planned, with drafts", "planned, without"


@dataclass(frozen=True)
class Texts:
    """What is to be said: a prompt and a response in each row of `tokens`, zeros behind it."""

    tokens: np.ndarray  # int32[responses, length]
    prompt: Sequence[int]  # tokens of the prompt of each
    length: Sequence[int]  # and of both
    earlier: Sequence[
        tuple[Sequence[int], Sequence[Sequence[int]]]
    ]  # of each prompt, by an older policy

    @classmethod
    def of(cls, groups: Sequence[Group], count: int, most: int) -> "Texts":
        """
        Args:
          most: tokens of a response.
        """
        rows, prompts, lengths = [], [], []
        for group in groups:
            for response in group.responses:
                prompt = list(group.prompt[-PROMPT:]) or [0]
                rows.append([*prompt, *response[:most]])
                prompts.append(len(prompt))
                lengths.append(len(rows[-1]))
        earlier = [
            (list(group.prompt[-PROMPT:]) or [0], [text[:most] for text in group.earlier])
            for group in groups
        ]
        tokens = np.zeros((count, PROMPT + most), np.int32)
        for row, text in zip(tokens, rows[:count], strict=True):
            row[: len(text)] = text
        return cls(tokens, prompts[:count], lengths[:count], earlier)

    def kept(self, of_prompt: int) -> EarlierResponses:
        """What a training run would have kept of them.

        Args:
          of_prompt: see `EarlierResponses`.
        """
        store = EarlierResponses(2**24, of_prompt, BESIDE)
        for prompt, texts in self.earlier:
            store.put(prompt, [np.array(text, np.int32) for text in texts])
        return store

    def requests(self) -> list[Request]:
        """Each as long as its text; its key says which it is."""
        return [
            Request(
                tokens=tuple(row[:start].tolist()),
                key=np.array([i, 0], np.uint32),
                max_new_tokens=stop - start,
                ignore_eos=True,
                prompt_id=hash(tuple(row[:start].tolist())) % 2**31,
            )
            for i, (row, start, stop) in enumerate(
                zip(self.tokens, self.prompt, self.length, strict=True)
            )
        ]

    @contextmanager
    def forced(self) -> Iterator[None]:
        """Programs compiled inside say these texts."""
        said, sample = jnp.asarray(self.tokens), decode_step.sample

        def recorded(keys: jax.Array, positions: jax.Array) -> jax.Array:
            recorded = said[keys[:, 0].astype(jnp.int32), positions].astype(jnp.uint32)
            return jnp.stack([recorded, recorded], axis=1)

        def replaced(logits, keys, *args, **options):
            tokens, logprobs, unfiltered = sample(logits, keys, *args, **options)
            # As if drawn: XLA must not leave the sampling out.
            kept = jnp.where(jnp.isnan(logprobs), tokens, keys[:, 0].astype(jnp.int32))
            return kept, logprobs, unfiltered

        with (
            patch.object(decode, "position_keys", recorded),
            patch.object(decode_step, "sample", replaced),
        ):
            yield


class Rig:
    """One engine, and every way to run it."""

    def __init__(self, args: argparse.Namespace, texts: Texts):
        self.texts = texts
        self.policy = Policy.from_config(preset(args.model, vocab_size=VOCAB))
        count = len(texts.tokens)
        config = RolloutConfig(
            max_prompt_length=PROMPT,
            max_completion_length=args.tokens,
            min_rows=min(4, count),
            min_length=args.min_length,
        )
        drafts = Drafts(tuple(args.budgets), args.longest, args.most_tokens, args.texts)
        self.weights = jax.device_get(self.policy.init(0))
        with texts.forced():
            self.engine = RolloutEngine(
                self.policy, jax.devices(), config, capacity=count, eos_ids=(), drafts=drafts
            )
            self.engine.compile(
                lambda done, total: print(f"\rcompiling {done}/{total} ", end="", file=sys.stderr)
            )
        self.latency = Warmup(self.engine).measure(self._on)
        self.earlier = texts.kept(self.engine.text_room) if args.earlier else None

    def _on(self, layout):
        return jax.device_put(self.weights, layout.param_shardings(self.policy))

    def planners(self, seen: Acceptance) -> Mapping[str, Planner]:
        splits = tuple(self.engine.layouts)
        drafts = self.engine.specs.drafts
        fixed = {
            f"static {split}, budget {budget}": FixedLayout(split, budget=budget, reach=seen.reach)
            for split in splits
            for budget in (0, *drafts.budgets)
        }
        lengths = LengthModel.empty(self.engine.specs.buckets.lengths[-1])
        common = splits, self.latency, lengths
        return {
            **fixed,
            ADAPTIVE: CostModelPlanner(*common),
            PLANNED: CostModelPlanner(*common, acceptance=seen, drafts=drafts.limits),
        }

    def run(self, planner: Planner) -> RolloutReport:
        requests = self.texts.requests()
        zeros = np.zeros(len(requests), int)
        known = np.array([len(x.tokens) for x in requests])
        budget = np.array([x.max_new_tokens for x in requests])
        layout = self.engine.layouts[planner.start(Load(zeros, zeros, known, budget))]
        self.engine.set_weights(self._on(layout), layout)
        done, report = self.engine.rollout(requests, planner, earlier=self.earlier)
        self.engine.release_weights()
        for i, (completion, start, stop) in enumerate(
            zip(done, self.texts.prompt, self.texts.length, strict=True)
        ):
            assert np.array_equal(completion.tokens, self.texts.tokens[i, start:stop]), i
        return report


def measured(rig: Rig, rounds: int, names: Sequence[str]) -> Mapping[str, object]:
    seconds: dict[str, list[float]] = {}
    tokens_per_step: dict[str, float] = {}
    paths: dict[str, object] = {}
    for number in range(rounds):
        planners = rig.planners(Acceptance.unseen())
        order = [name for name in planners if not names or any(n in name for n in names)]
        for name in order if number % 2 == 0 else reversed(order):
            report = rig.run(planners[name])
            seconds.setdefault(name, []).append(report.total_s)
            tokens_per_step[name] = round(report.tokens_per_row_step, 3)
            paths[name] = {"layouts": report.trace.path, "drafts": _runs(report)}
            print(f"{name}: {report.total_s:.2f} s, {tokens_per_step[name]}", flush=True)
    static = [name for name in seconds if name.endswith("budget 0")]
    best = min(static, key=lambda name: float(np.median(seconds[name])))
    rng = np.random.default_rng(0)
    return {
        "best static layout without drafts": best,
        "variants": {
            name: {
                "seconds": [round(s, 3) for s in took],
                "median": round(float(np.median(took)), 3),
                "times_as_fast": [
                    round(x, 3)
                    for x in median_interval(
                        [a / b for a, b in zip(seconds[best], took, strict=True)], rng
                    )
                ],
                "tokens_per_step": tokens_per_step[name],
                **paths[name],  # pyright: ignore[reportGeneralTypeIssues]
            }
            for name, took in seconds.items()
        },
    }


def _runs(report: RolloutReport) -> list[list[int]]:
    """Draft lengths in turn, and for how many bursts."""
    runs: list[list[int]] = []
    for burst in report.bursts:
        if runs and runs[-1][0] == burst.budget:
            runs[-1][1] += 1
        else:
            runs.append([burst.budget, 1])
    return runs


def chosen(args: argparse.Namespace) -> Texts:
    groups = [x for x in groups_of(args.data, args.samples) if x.name.startswith(args.set)]
    groups = groups[args.skip :]
    return Texts.of(groups, args.responses, args.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--set", default="rl3b", help="beginning of its name and model")
    parser.add_argument("--skip", type=int, default=0, help="prompts of the set")
    parser.add_argument("--samples", type=int, default=16, help="of a prompt")
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=448, help="most of a response")
    parser.add_argument("--min_length", type=int, default=256, help="tokens of the shortest bucket")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 3, 7])
    parser.add_argument("--longest", type=int, default=7, help="tokens of a draft")
    parser.add_argument("--most_tokens", type=int, default=64, help="of a group in a step")
    parser.add_argument("--texts", type=int, default=4, help="room for others, in contexts")
    parser.add_argument(
        "--earlier",
        action="store_true",
        help="what an older policy said is kept, where there is some",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", nargs="*", default=[], help="those with these in their name")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    configure(0)
    texts = chosen(args)
    rig = Rig(args, texts)
    found = measured(rig, args.rounds, args.variants)
    result = {
        "command": "python -m benchmarks.speculation " + shlex.join(sys.argv[1:]),
        "machine": f"{platform.processor()} {jax.device_count()} {jax.devices()[0].device_kind}",
        "responses": len(texts.tokens),
        "tokens": int(sum(texts.length) - sum(texts.prompt)),
        "step_s": {
            f"{split}, {rows} rows, {length} tokens, budget {budget}": round(s, 5)
            for (split, rows, length, budget), s in steps(rig.latency)
        },
        **found,
    }
    print(json.dumps(result["variants"], indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def steps(latency: LatencyModel) -> Iterator[tuple[tuple, float]]:
    for key, seconds in latency.decode_table.items():
        yield (*key, 0), seconds
    yield from latency.verify_table.items()


if __name__ == "__main__":
    main()
