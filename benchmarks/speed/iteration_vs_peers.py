"""Seconds of one GRPO iteration here, of google-tunix's and of TRL's.

    python -m benchmarks.speed.iteration_vs_peers --tunix ENV/bin/python --trl ENV/bin/python \
        --out benchmarks/results/iteration_vs_peers_cpu2.json

Each peer has an environment of its own (see `benchmarks/peers`) and runs in a process of its own, one
iteration each by turns: the same weights (random, written once as a checkpoint), prompts, number and
length of responses, reward, KL to a reference, optimizer; one optimizer step an iteration, all in
float32. While one runs the others wait. No response ends early: the end's embedding points away from all
others. An iteration is the rollout, rewards, the reference's pass, the update, and what each does besides.

Of pat_jax's own metrics: the seconds of its stages, and its update's FLOP/s, as a share of what one large
product reaches on the same cores in the same run. The update's arithmetic is that of a forward and
backward pass and the reference's forward pass (`training/model_flops.py`), padding not counted.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.report import by_turns, machine, median_interval, options, write
from benchmarks.speed.engine_vs_peers import PEERS, SMALL, Peer
from pat_jax.common.devices import configure
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.policy import Params, Policy
from pat_jax.training.model_flops import training_flops

END = "end"  # of a response; no response has it
SIDE = 2048  # of the large product's square matrices


@dataclass(frozen=True)
class Iteration:
    """What every system is asked for."""

    model: str  # checkpoint directory
    data: str  # JSON lines with a `prompt` of `prompt` words, each of them a token
    prompts: int
    generations: int
    prompt: int
    response: int
    beta: float = 0.04
    learning_rate: float = 1e-5
    steps: int = 1000
    reward: str = "even_tokens"  # of turns_reward.py

    def options(self, devices: int, run_dir: Path, **more: object) -> list[str]:
        """As `pat_jax.train` is told, with `more` options."""
        named = {
            "model": self.model,
            "data.files": self.data,
            "reward": f"{PEERS / 'turns_reward.py'}:{self.reward}",
            "steps": self.steps,
            "devices": devices,
            "remat": "none",
            "run_dir": run_dir,
            "eval.every": 0,
            "checkpoint.every": 10**6,
            "rollout.prompts_per_step": self.prompts,
            "rollout.num_generations": self.generations,
            "rollout.max_prompt_length": self.prompt,
            "rollout.max_completion_length": self.response,
            "algorithm.mini_batch_size": self.prompts,
            "algorithm.beta": self.beta,
            "optimizer.learning_rate": self.learning_rate,
            **more,
        }
        return [part for name, value in named.items() for part in (f"--{name}", str(value))]


class Loop(Peer):
    """A training loop in a process of its own, asked for one iteration at a time."""

    def __call__(self, batch: object = None) -> float:
        del batch  # each has its own
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()["seconds"]

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def without_end(policy: Policy) -> Params:
    """Random weights whose responses never end: all embeddings have much in common, which hidden states
    then have too, and that of the end is its opposite."""
    params = policy.init(0)
    table = np.array(params["embedding"])
    table[:, 0] += 4
    table[-1] = np.eye(1, table.shape[1])[0] * -4
    params["embedding"] = jnp.asarray(table)
    return params


def write_words(words: Path, count: int) -> Path:
    """A folder with a tokenizer of the words "0", "1" …, `count` with the last one, which is the end."""
    words.mkdir()
    vocabulary = {str(i): i for i in range(count - 1)} | {END: count - 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(words / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "unk_token": END,
    }
    (words / "tokenizer_config.json").write_text(json.dumps(about))
    end = {"eos_token_id": count - 1, "pad_token_id": count - 1}
    (words / "config.json").write_text(json.dumps(end))
    (words / "generation_config.json").write_text(json.dumps(end))
    return words


def write_checkpoint(folder: Path) -> Path:
    """With the tokenizer of `write_words`."""
    words, policy = write_words(folder / "words", SMALL.vocab_size), Policy.from_config(SMALL)
    export(folder / "model", policy, without_end(policy), jnp.float32, words)
    return folder / "model"


def write_prompts(file: Path, count: int, length: int, vocab_size: int = SMALL.vocab_size) -> Path:
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, vocab_size - 1, (count, length)).tolist()
    lines = [json.dumps({"prompt": " ".join(map(str, prompt)), "answer": ""}) for prompt in prompts]
    file.write_text("\n".join(lines))
    return file


def product_rate() -> float:
    """FLOP/s of one large product of float32, on all cores."""
    x = jnp.ones((SIDE, SIDE), jnp.float32)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, x))
    start = time.perf_counter()
    for _ in range(4):
        jax.block_until_ready(product(x, x))
    return 4 * 2 * SIDE**3 / (time.perf_counter() - start)


def loops(asked: Iteration, folder: Path, args: argparse.Namespace) -> dict[str, Loop]:
    ours = {
        f"pat_jax, {n} device{'s' if n > 1 else ''}": Loop(
            Path(sys.executable), "pat_jax_grpo.py", *asked.options(n, folder / f"run{n}")
        )
        for n in args.devices
    }
    theirs = {"tunix": (args.tunix, "tunix_grpo.py"), "trl": (args.trl, "trl_grpo.py")}
    forced = {"generation_kwargs": {"min_new_tokens": asked.response}}
    return ours | {
        name: Loop(python, script, json.dumps(asdict(asked) | forced))
        for name, (python, script) in theirs.items()
        if python
    }


def stages(run_dir: Path, warm_up: int, asked: Iteration) -> dict[str, dict[str, float]]:
    """Of one of our runs: medians of the seconds of an iteration's stages, and the update's FLOP/s."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [step for line in lines if "timing/step" in (step := json.loads(line))][warm_up:]
    seconds = {
        name: round(median(step[name] for step in steps), 4)
        for name in steps[0]
        if name.startswith("timing/") and name.count("/") == 1
    }
    lengths = np.full(asked.prompts * asked.generations, asked.prompt + asked.response)
    # Forward, and twice that backward; the reference's forward pass besides.
    flops = training_flops(SMALL, lengths) * 4 / 3
    return {"seconds": seconds, "update": {"flop_s": flops / seconds["timing/update"]}}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tunix", type=Path, help="Python with google-tunix")
    parser.add_argument("--trl", type=Path, help="Python with torch and trl")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2], help="of pat_jax")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of every prompt")
    parser.add_argument("--response", type=int, default=128, help="tokens of every response")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--warm_up", type=int, default=3, help="rounds that do not count")
    args = parser.parse_args()
    about = machine(configure(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_prompts(folder / "prompts.jsonl", 64, args.prompt)
        model = write_checkpoint(folder)
        sizes = args.prompts, args.generations, args.prompt, args.response
        asked = Iteration(str(model), str(data), *sizes)
        systems = loops(asked, folder, args)
        rates = []

        def rounds() -> Iterator[None]:
            for _ in range(args.warm_up + args.rounds):
                yield
                rates.append(product_rate())

        taken = by_turns(systems, rounds(), args.warm_up)
        versions = {name: system.versions for name, system in systems.items()}
        for system in systems.values():
            system.end()
        ours = {
            name: stages(folder / f"run{n}", args.warm_up, asked)
            for n, name in zip(args.devices, taken, strict=False)
        }
    report = summary(taken, ours, median(rates))
    print(json.dumps(report, indent=1))
    write(args.out, {"machine": about, "versions": versions, **report})


def summary(
    taken: Mapping[str, Sequence[float]], ours: dict[str, dict], product: float
) -> dict[str, object]:
    """Ratios are taken within a round; intervals are of their medians."""
    rng = np.random.default_rng(0)

    def interval(samples: Sequence[float]) -> dict[str, float]:
        names = "median", "low", "high"
        return {n: round(x, 4) for n, x in zip(names, median_interval(samples, rng), strict=True)}

    for measured in ours.values():
        measured["update"]["of_a_large_product"] = round(measured["update"]["flop_s"] / product, 3)
    return {
        "seconds": {name: interval(seconds) for name, seconds in taken.items()},
        "times_as_long": {
            name: {own: interval(np.divide(taken[name], taken[own]).tolist()) for own in ours}
            for name in taken
            if name not in ours
        },
        "product_flop_s": product,
        "pat_jax": ours,
    }


if __name__ == "__main__":
    main()
