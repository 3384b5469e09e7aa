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
        "{} of {:,} tokens differ when layouts switch, {} of {:,} when drafts are used (float32; in bfloat16 each layout rounds differently).",
        "measured, CPU", "contracts",
    ),
    Result(
        "Does a killed run continue exactly?", ("kills", "kills_ppo", "kills_separate", "errors"), survived,
        "After {} + {} + {} kills and {} errors, {} of {} runs ended bit for bit like an undisturbed one.",
        "measured, CPU", "contracts",
    ),
    Result(
        "What does adapting gain over the best fixed layout? (8B and 14B, 8 H100, six sets of lengths)",
        ("rollout_gains",), gains,
        "{:.1f} % of the rollout's time on average ({:.1f} to {:.1f}) with NCCL's all-reduces; {:.1f} % ({:.1f} to {:.1f}) with those of a serving engine.",
        "computed", "planning",
    ),
    Result(
        "And over one fixed layout for batches and lengths of all kinds?", REGRET, faster_than_others,
        "{:.0f} % over TP1, {:.0f} % over TP2, {:.0f} % over TP4, {:.0f} % over TP8.",
        "computed", "planning",
    ),
    Result(
        "And with n-gram drafts?", ("token_replay",), at("speed_up", "policy in RL", "all", of=("mean", "min")),
        "{:.2f} times as fast as the best fixed layout without drafts, at least {:.2f} times.",
        "computed", "speculation",
    ),
    Result(
        "How far are plans from the best ones?", REGRET, percent(TAIL, "regret", "right"),
        "{:.1f} % slower than a plan that knows every length, {:.1f} % at worst.",
        "computed", "planning",
    ),
    Result(
        "When does it lose? (8 to 128 responses, drawn to be hard)", ("hard_regret_small",), percent("small"),
        "{:.1f} % slower than the best fixed layout on average, {:.0f} % at worst.",
        "computed", "planning",
    ),
    Result(
        "Does it pay on two CPU cores?", R1,
        at("systems", "adaptive", "ratio"),
        "No: {:.2f} of the best fixed layout's time ({:.2f} to {:.2f}), and one engine for each device is as fast.",
        "measured, CPU", "speed",
    ),
    Result(
        "One GRPO iteration of a 2.5 M model", ("iteration_vs_peers_cpu2",), iteration,
        "{:.2f} s. Tunix takes {:.2f} times as long, TRL {:.2f} times.",
        "measured, CPU", "speed",
    ),
    Result(
        "Tokens/s of generation", ("engine_vs_peers_cpu2", *QWEN3), both_peers,
        "{:.1f} times Tunix and {:.1f} times transformers (2.5 M model, 16 requests); {:.1f} and {:.1f} times (Qwen3-0.6B, 8 requests).",
        "measured, CPU", "speed",
    ),
    Result(
        "A decode step on one H200", ("gpu_decode_h200", "gpu_attention_h200"), of_the_memory,
        "Llama-3.1-8B reads {3:.0f} % of what the memory can deliver with 1 request, {4:.0f} % with 8; Qwen3-0.6B {0:.0f} to {2:.0f} %. With an earlier attention kernel.",
        "measured, H200", "speed",
    ),
    Result(
        "Do the programs compile for GPUs and TPUs?", ("plan_targets",), compiled,
        "{} of {} programs fail, in {} pairs of model and devices; {} of {} layouts send exactly what they should.",
        "compiled", "targets",
    ),
    Result(
        "Does the first command learn? (five seeds)", DEMO, gained,
        "Held-out accuracy rises by {:.0f} to {:.0f} points.",
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
