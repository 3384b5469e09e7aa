"""The results that a user asks for, in plain words, with their numbers from `benchmarks/results`.

`benchmarks/figures.py` has all results, with their goals and commands.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import (
    DEMO,
    QWEN3,
    R1,
    REGRET,
    TAIL,
    at,
    compiled,
    faster_than_others,
    gained,
    gains,
    iteration,
    learned,
    lossless,
    lossless_drafts,
    of_the_memory,
    percent,
    survived,
    times_peers,
)

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Result:
    """One row.

    Attributes:
      files: in results/, whose contents `read` gets, in this order.
      text: has room for what `read` returns.
      how: it is known, and the report in benchmarks/reports with the details.
    """

    what: str
    files: tuple[str, ...]
    read: Callable[..., tuple[Any, ...]]
    text: str
    how: str
    report: str

    def row(self) -> str:
        contents = [json.loads((RESULTS / f"{name}.json").read_text()) for name in self.files]
        link = f"[{self.how}](../benchmarks/reports/{self.report}.md)"
        return f"| {self.what} | {self.text.format(*self.read(*contents))} | {link} |"


def both_peers(small: dict, *qwen3: dict) -> tuple[float, ...]:
    """Times as fast as Tunix and transformers: of the small model, and of Qwen3 with 8 requests."""
    return *times_peers(small), *times_peers(*qwen3)[2:]


def same_tokens(switched: dict, *drafted: dict) -> tuple[int, ...]:
    """Tokens that differ, and all that were compared: with switches, and with drafts."""
    plain, of_plain, experts, of_experts = lossless_drafts(*drafted)
    differ, compared, _ = lossless(switched)
    return int(differ), int(compared), plain + experts, of_plain + of_experts


ROWS = (
    Result(
        "Do switches or drafts change a response?", ("lossless", "lossless_drafts", "lossless_drafts_experts"), same_tokens,
        "{} of {:,} tokens differ when layouts switch, and {} of {:,} when drafts are used. This is in float32; in bfloat16, rounding differs between layouts.",
        "measured, CPU", "contracts",
    ),
    Result(
        "Does a killed and resumed run end with the same result?", ("kills", "kills_ppo", "kills_separate", "errors"), survived,
        "Yes. After {} kills of GRPO, {} of PPO and {} with `--placement separate`, and after {} errors, {} of {} runs ended bit for bit like a run without interruptions.",
        "measured, CPU", "contracts",
    ),
    Result(
        "How much of a rollout's time does adapting (switching layouts) save, compared with the best fixed layout? (models of 8B and 14B on 8 H100, six sets of response lengths)",
        ("rollout_gains",), gains,
        "{:.1f} % on average ({:.1f} to {:.1f}) with NCCL's all-reduces, {:.1f} % ({:.1f} to {:.1f}) with the faster all-reduces of a serving engine.",
        "computed", "planning",
    ),
    Result(
        "And compared with one layout that is used for all batch sizes and response lengths?", REGRET, faster_than_others,
        "{:.0f} % compared with TP1, {:.0f} % with TP2, {:.0f} % with TP4 and {:.0f} % with TP8.",
        "computed", "planning",
    ),
    Result(
        "How fast are rollouts that adapt and also use n-gram drafts?", ("token_replay",), at("speed_up", "policy in RL", "all", of=("mean", "min")),
        "{:.2f} times as fast as the best fixed layout without drafts on average, and at least {:.2f} times.",
        "computed", "speculation",
    ),
    Result(
        "How much slower is the planner than one that knows all response lengths?", REGRET, percent(TAIL, "regret", "right"),
        "{:.1f} % on average, {:.1f} % at worst.",
        "computed", "planning",
    ),
    Result(
        "When does adapting lose time?", ("hard_regret_small",), percent("small"),
        "With 8 to 128 responses whose lengths are hard to predict: {:.1f} % slower than the best fixed layout on average, {:.0f} % at worst.",
        "computed", "planning",
    ),
    Result(
        "Does adapting save time on two CPU cores?", R1,
        at("systems", "adaptive", "ratio"),
        "No. A rollout takes {:.2f} times as long as with the best fixed layout ({:.2f} to {:.2f}), but one engine on each core is as fast.",
        "measured, CPU", "speed",
    ),
    Result(
        "How long does a GRPO iteration of a model with 2.5 M parameters take?", ("iteration_vs_peers_cpu2",), iteration,
        "{:.2f} s. Tunix takes {:.2f} times as long, TRL {:.2f} times.",
        "measured, CPU", "speed",
    ),
    Result(
        "How many tokens per second are generated?", ("engine_vs_peers_cpu2", *QWEN3), both_peers,
        "{:.1f} times as many as with Tunix and {:.1f} times as many as with transformers (2.5 M parameters, 16 requests); {:.1f} and {:.1f} times as many (Qwen3-0.6B, 8 requests).",
        "measured, CPU", "speed",
    ),
    Result(
        "How much of its memory bandwidth does one H200 use in decode steps?", ("gpu_decode_h200", "gpu_attention_h200"), of_the_memory,
        "With Llama-3.1-8B {3:.0f} % for 1 request and {4:.0f} % for 8 requests, with Qwen3-0.6B {0:.0f} to {2:.0f} %. This was measured with an earlier attention kernel.",
        "measured, H200", "speed",
    ),
    Result(
        "Do the programs compile for GPUs and TPUs?", ("plan_targets",), compiled,
        "{} of {} programs fail to compile, for {} pairs of model and devices. In {} of {} layouts, decode steps send exactly the bytes that they should.",
        "compiled", "targets",
    ),
    Result(
        "Does the demonstration `pat_jax train` learn?", DEMO, gained,
        "With five seeds, the accuracy on held-out problems rises by {:.0f} to {:.0f} percentage points.",
        "measured, CPU", "learning",
    ),
    Result(
        "Does a real model learn as it does with TRL?", ("real_model_cpu2",), learned,
        "Yes. SmolLM2-135M-Instruct answers {:.0f} % of held-out sums rightly before training, {:.0f} % after 40 steps, and {:.0f} % with TRL, whose step takes {:.2f} times as long (means of three seeds).",
        "measured, CPU", "learning",
    ),
)  # fmt: skip


def results_table() -> str:
    return (
        "\n".join(
            ["| question | answer | how it is known |", "|---|---|---|", *(r.row() for r in ROWS)]
        )
        + "\n"
    )
