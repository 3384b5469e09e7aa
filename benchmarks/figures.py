"""The table of benchmarks/reports/README.md, made from the results of the other benchmarks.

    python -m benchmarks.figures --check    # is the table what the results say?
    python -m benchmarks.figures --write    # make it so

Knows `benchmarks/results/*.json` and how each claim is read from them. Runs no benchmark.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

HERE = Path(__file__).parent
PAGE = HERE / "reports" / "README.md"
BEGIN, END = "<!-- made by `python -m benchmarks.figures --write` -->\n", "<!-- end -->\n"
MOST_ROWS = 30
GONE = " --show_switch false"  # an option that recorded commands have, and today's do not
OF_A_PLACE = ("--out", "--output", "--plot", "--data", "--processes")  # not worth a reader's time
Kind = Literal["measured", "compiled", "computed"]


@dataclass(frozen=True)
class Row:
    """One claim.

    Attributes:
      page: of reports/, with the details.
      results: names of the files in results/, whose contents `read` gets, in this order.
      read: the numbers that `text` has room for.
      is_met: whether they reach `goal`, where there is one.
    """

    page: str
    claim: str
    kind: Kind
    results: tuple[str, ...]
    read: Callable[..., tuple[Any, ...]]
    text: str
    goal: str = ""
    is_met: Callable[..., bool] | None = None

    def cells(self, results: Path) -> tuple[str, ...]:
        found = [json.loads((results / f"{name}.json").read_text()) for name in self.results]
        numbers = self.read(*found)
        goal = self.goal
        if self.is_met is not None:
            goal += ": met" if self.is_met(*numbers) else ": **missed**"
        command = typed(found[0]["command"])
        raw = ", ".join(f"[raw](../results/{name}.json)" for name in self.results)
        claim = f"[{self.claim}]({self.page}.md)"
        return claim, self.text.format(*numbers), goal, self.kind, f"`{command}`, {raw}"


def typed(command: str) -> str:
    """A recorded command as it is typed today, without `python -m benchmarks.` and without paths."""
    if not (found := re.match(r"python -m benchmarks\.(?:\w+\.)*(\w+)(.*)", command)):
        return command.partition(";")[0].replace(GONE, "")
    (module,) = HERE.rglob(f"{found[1]}.py")
    words, kept = iter(shlex.split(found[2])), []
    for word in words:
        if word in OF_A_PLACE:
            next(words)
        else:
            kept.append(word)
    return " ".join([".".join(module.relative_to(HERE).with_suffix("").parts), *kept])


def gained(*each: dict) -> tuple[float, ...]:
    """Least and most points of accuracy that five seeds gain, of each file."""
    found = ()
    for one in each:
        runs = [run for name, run in one["held_out"].items() if name.startswith("seed")]
        gains = [100 * (run[-1] - run[0]) for run in runs]
        found += min(gains), max(gains)
    return found


def learned(one: dict) -> tuple[float, ...]:
    """Percent of the sums held back that the real model adds rightly: before, and after training here
    and by TRL, means of the seeds; and how many times as long a step of TRL takes."""
    found = one["summary"]
    after = (100 * fmean(found[name]["accuracy"]) for name in ("pat_jax", "trl"))
    return 100 * one["accuracy_before"], *after, fmean(found["trl"]["times_as_long"])


def unlike(one: dict) -> tuple[int, int]:
    """Iterations whose mean reward differs with switches, and all of them."""
    static, switched = one["curves"]["static"], one["curves"]["switched"]
    return sum(a != b for a, b in zip(static, switched, strict=True)), len(static)


def at(*path: str, of: tuple[str, ...] = ()) -> Callable[[dict], tuple[Any, ...]]:
    """What is in that place, or these values of it."""

    def read(one: Any) -> tuple[Any, ...]:
        for name in path:
            one = one[name]
        return tuple(one[name] for name in of) if of else tuple(one)

    return read


def percent(*path: str) -> Callable[[dict], tuple[Any, ...]]:
    """Of time, mean and worst."""
    return at("percent", *path, of=("mean", "worst"))


def faster_than_others(one: dict) -> tuple[float, ...]:
    """Percent by which adapting is faster than each static layout."""
    gain = one["percent"][TAIL]["gain_over"]
    return tuple(gain[f"static tp{tp}"]["mean"] for tp in (1, 2, 4, 8))


def gains(one: dict) -> tuple[float, ...]:
    """Percent by which adapting is faster, mean, least and most, by kind of sums."""
    found = (one["percent"][sums]["all"] for sums in ("nccl", "one-shot"))
    return tuple(x[name] for x in found for name in ("mean", "least", "most"))


def times_peers(*each: dict) -> tuple[float, ...]:
    """Useful tokens a second over those of Tunix and of transformers, with long-tailed lengths."""
    rows = [one["lengths"]["heavy"] for one in each]
    return tuple(
        row[peer]["best_is_times"][0] for row in rows for peer in ("tunix", "transformers")
    )


def iteration(one: dict) -> tuple[float, float, float]:
    ours = "pat_jax, 2 devices"
    times = (one["times_as_long"][peer][ours]["median"] for peer in ("tunix", "trl"))
    return one["seconds"][ours]["median"], *times


def tokens_a_step(one: dict) -> tuple[float, float]:
    sets = {name: counts["drafts of 8"] for name, counts in one["tokens a step"].items()}
    of_rl = sets["rl3b, Llama-3.2-3B-Instruct RL"]["own, siblings, earlier"]
    return of_rl, sets["misguided, QwQ-32B"]["own, siblings"]


def unchecked_and_checked(one: dict) -> tuple[float, ...]:
    """Percent behind the oracle, where the profile's step times are wrong."""
    read = (percent(TAIL, "regret", f"{STEPS_WRONG}{also}") for also in ("", ", checked"))
    return tuple(value for each in read for value in each(one))


def speed_ups(one: dict) -> tuple[float, ...]:
    found = (of["speed_up"]["planned with drafts"] for of in one["all_cells"].values())
    return tuple(x for speed_up in found for x in (speed_up["mean"], speed_up["min"]))


def lossless(one: dict) -> tuple[int, int, float]:
    total = one["summary"]["float32"]["all"]
    return total["divergences"], total["compared"], total["max_logprob_difference"]


def lossless_drafts(*each: dict) -> tuple[int, ...]:
    names = "divergences", "compared"
    return tuple(sum(x[name] for x in one["by source"].values()) for one in each for name in names)


def survived(*each: dict) -> tuple[int, ...]:
    same = sum(one["of_which_bit_for_bit_like_the_unkilled_one"] for one in each)
    runs = sum(one["runs_that_came_to_their_end"] for one in each)
    return *(one["kills_in_all"] for one in each), same, runs


def of_the_memory(steps: dict, attention: dict) -> tuple[float, ...]:
    shares = (100 * cell["of_bandwidth"] for cell in steps["cells"].values())
    asked = {"rows": 64, "queries_per_kv_head": 4, "context": 1024}
    (cell,) = (
        x for x in attention["cells"] if asked.items() <= x.items() and x["what"] == "decode"
    )
    spent = cell["us_by_keys_warps_stages_and_parts"]["64 2 1"]["4"]
    return *shares, 1e3 * cell["kv_gb"] / spent


def compiled(one: dict) -> tuple[int, int, int, int, int]:
    cases = one["cases"]
    layouts = [layout for case in cases for layout in case["layouts"].values()]
    failed = sum(len(case["failed"]) for case in cases)
    programs = sum(case["programs"] for case in cases)
    designed = sum(layout["step_sends_as_designed"] for layout in layouts)
    return failed, programs, len(cases), designed, len(layouts)


def composed(one: dict) -> tuple[float, float, float, float]:
    shares = [
        [row["measured_ms"] / row[name] for row in one[rows]]
        for rows, name in (("steps", "tables_ms"), ("tpu_steps", "composed_ms"))
    ]
    return min(shares[0]), max(shares[0]), min(shares[1]), max(shares[1])


REGRET, TAIL, R1 = ("planner_regret",), "with a tail", ("adaptive_vs_static_cpu2_r1",)
STEPS_WRONG = "steps +-20 %, by layout"
DEMO, ITERATION = ("demo_algorithms_cpu2",), ("iteration_vs_peers_cpu2",)
QWEN3 = ("engine_vs_peers_qwen3_b1", "engine_vs_peers_qwen3_b8")
GAIN = "{:.1f} % on average ({:.1f} to {:.1f})"
RATIO, MEAN_WORST = "{:.3f} ({:.3f} to {:.3f})", "{:.1f} % on average, {:.1f} % at worst"
CLOSE = "average ≤ 2 %, worst ≤ 5 %"


def is_close(mean: float, worst: float) -> bool:
    return mean <= 2 and worst <= 5


ROWS = (
    Row("learning", "Accuracy gained by the first command, five seeds", "measured",
        (*DEMO, "demo_experts_cpu2"), gained, "+{:.0f} to +{:.0f} points; with experts +{:.0f} to +{:.0f}",
        "≥ 20", lambda low, _, low_of_experts, high: min(low, low_of_experts) >= 20),
    Row("learning", "Accuracy of SmolLM2-135M-Instruct on sums held back, three seeds", "measured", ("real_model_cpu2",),
        learned, "{:.0f} % before, {:.0f} % here, {:.0f} % by TRL, whose step takes {:.2f} times as long"),
    Row("learning", "Iterations whose reward differs when rollouts switch", "measured", DEMO, unlike,
        "{} of {}", "0", lambda differ, of: differ == 0),
    Row("learning", "Processor time of the first command, empty cache", "measured", ("first_command",),
        lambda x: tuple(one["now"]["processor_s"] for one in x["rounds"]), "{:.0f} s and {:.0f} s"),
    Row("speed", "Adaptive rollout, seconds over the best static layout's", "measured", R1,
        at("systems", "adaptive", "ratio"), RATIO, "≤ 1.02", lambda ratio, low, high: ratio <= 1.02),
    Row("speed", "Planning, share of a rollout", "measured", R1,
        lambda x: (100 * max(x["planner_share_of_rollout"]),), "{:.2f} %", "≤ 0.5 %",
        lambda share: share <= 0.5),
    Row("speed", "One GRPO iteration of a 2.5 M model", "measured",
        ITERATION, iteration, "{:.2f} s; Tunix takes {:.2f} times as long, TRL {:.2f} times", "≥ 2 and 1.5 times",
        lambda s, tunix, trl: tunix >= 2 and trl >= 1.5),
    Row("speed", "FLOP/s of the update, as a share of those of one large product", "measured", ITERATION,
        lambda x: (100 * x["pat_jax"]["pat_jax, 2 devices"]["update"]["of_a_large_product"],),
        "{:.0f} %", "≥ 50 %", lambda share: share >= 50),
    Row("speed", "Tokens/s of generation, 2.5 M model, 16 requests", "measured",
        ("engine_vs_peers_cpu2",), times_peers, "{:.1f} times Tunix's, {:.1f} times those of transformers", "≥ 4 and 8",
        lambda tunix, torch: tunix >= 4 and torch >= 8),
    Row("speed", "Tokens/s of generation, Qwen3-0.6B", "measured", QWEN3, times_peers,
        "1 request: {:.1f} times Tunix's, {:.1f} times those of transformers; 8 requests: {:.1f} and {:.1f} times"),
    Row("speed", "Time of one token through 8 of 128 experts, over a plain sum of as many bytes", "measured",
        ("one_token_of_experts",), lambda x: (x["ratio"],), "{:.2f} times", "≤ 2",
        lambda ratio: ratio <= 2),
    Row("speed", "Decode steps on one H200, earlier attention kernel: share of the memory's rate",
        "measured", ("gpu_decode_h200", "gpu_attention_h200"), of_the_memory,
        "Qwen3-0.6B {:.0f}, {:.0f} and {:.0f} % (1, 8, 64 requests); Llama-3.1-8B {:.0f} and {:.0f} % (1, 8); attention of 64 rows {:.1f} TB/s"),
    Row("planning", "Slower than the oracle's plan", "computed", REGRET, percent(TAIL, "regret", "right"),
        MEAN_WORST, CLOSE, is_close),
    Row("planning", "Faster than the best static layout of each rollout, six sets of lengths",
        "computed", ("rollout_gains",), gains, f"all-reduces of NCCL: {GAIN}; of a serving engine: {GAIN}", "least ≥ -2 %",
        lambda *found: min(found[1], found[4]) >= -2),
    Row("planning", "Faster than one static layout for all rollouts", "computed", REGRET, faster_than_others,
        "than TP1 {:.0f} %, TP2 {:.0f} %, TP4 {:.0f} %, TP8 {:.0f} %"),
    Row("planning", "A naive rule, TP doubles when 16 requests run: slower than the oracle", "computed", REGRET,
        percent(TAIL, "regret", "naive threshold"), MEAN_WORST),
    Row("planning", "PPO of four processes on two cores: `--placement split` against the better `flatten`", "measured",
        ("four_processes_cpu2",), lambda x: (x["best_flatten_over_split"],), "{:.1f} times as fast"),
    Row("planning", "Scores and updates of PPO on two hosts at 200 Gb/s with `--fsdp_size 8`", "computed",
        ("slow_networks",), lambda x: (x["rates"]["200 Gb/s"]["scores_and_updates"],), "{:.2f} times as fast",
        "≥ 1.2", lambda times: times >= 1.2),
    Row("planning", "If step times are wrong by 20 %: slower than the oracle",
        "computed", REGRET, unchecked_and_checked, f"{MEAN_WORST}; after the check at the start {MEAN_WORST}", CLOSE,
        lambda *both: is_close(*both[2:])),
    Row("planning", "KV pools of 10 to 40 GiB: slower than the best static layout", "computed",
        ("hard_regret_pressed",), percent("pools of 10 to 40 GiB"), MEAN_WORST, CLOSE, is_close),
    Row("planning", "8 to 128 responses, drawn to be hard: slower than the best static layout", "computed",
        ("hard_regret_small",), percent("small"), MEAN_WORST, "worst ≤ 5 %", lambda _, worst: worst <= 5),
    Row("planning", "Simulating a rollout of 2,048 sequences of 24K tokens", "measured",
        ("simulate_speed",), lambda x: (x["median_seconds"]["adaptive"],), "{:.2f} s", "≤ 1 s",
        lambda seconds: seconds <= 1),
    Row("speculation", "Acceptance length of copied drafts of 8 tokens", "computed",
        ("draft_acceptance",), tokens_a_step, "policy in RL {:.2f} tokens, QwQ-32B {:.2f}", "≥ 2.75 and 1.85",
        lambda rl, qwq: rl >= 2.75 and qwq >= 1.85),
    Row("speculation", "Speed-up with drafts over the best static layout without",
        "computed", ("token_replay", "speculation_replay"),
        lambda tokens, classes: (*at("speed_up", "policy in RL", "all", of=("mean", "min"))(tokens), *speed_ups(classes)),
        "token by token, policy in RL: {:.2f} (at least {:.2f}); by classes: {:.2f} ({:.2f}), QwQ-32B {:.2f} ({:.2f})",
        "average ≥ 1.5", lambda *found: min(found[::2]) >= 1.5),
    Row("contracts", "Tokens that switching changes, float32", "measured", ("lossless",), lossless,
        "{} of {:,}; log-probabilities within {:.1e}", "0, 1e-4",
        lambda differ, of, logprob: differ == 0 and logprob <= 1e-4),
    Row("contracts", "Tokens that are the first to differ between layouts, bfloat16", "measured", ("lossless",),
        lambda x: (100 * x["summary"]["bfloat16"]["all"]["divergence_rate"],), "{:.2f} %", "≤ 0.5 %",
        lambda share: share <= 0.5),
    Row("contracts", "Tokens that drafts change, float32", "measured",
        ("lossless_drafts", "lossless_drafts_experts"), lossless_drafts,
        "{} of {:,}; with experts {} of {:,}", "0", lambda plain, _, experts, of: plain == experts == 0),
    Row("contracts", "Killed and failed runs that end bit for bit like others", "measured",
        ("kills", "kills_ppo", "kills_separate", "errors"), survived,
        "{} kills, {} of PPO, {} with models apart, {} errors: {} of {} runs", "all",
        lambda *found: found[-2] == found[-1]),
    Row("targets", "Programs that GPUs' and TPUs' compilers refuse", "compiled", ("plan_targets",),
        compiled, "{} of {} in {} cases; {} of {} layouts send as designed", "0",
        lambda failed, *rest: failed == 0),
    Row("costs", "Measured step times over composed ones", "computed",
        ("composed_steps",), composed, "GPUs {:.2f} to {:.2f}, v5e {:.2f} to {:.2f}"),
)  # fmt: skip


def table(results: Path = HERE / "results") -> str:
    head = ("what", "seen", "goal", "how", "command, behind `python -m benchmarks.`")
    rows = [head, ("---",) * len(head), *(row.cells(results) for row in ROWS)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def replaced(page: str, made: str) -> str:
    """The page with that table."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE}: expected a table between {BEGIN.strip()} and {END.strip()}.")
    return before + begin + "\n" + made + "\n" + end + after


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="fail where the page says otherwise")
    what.add_argument("--write", action="store_true", help="write the table into the page")
    args = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    made = replaced(page, table())
    if args.write:
        PAGE.write_text(made, encoding="utf-8")
    elif made != page:
        sys.exit(
            f"{PAGE}: the table is not what benchmarks/results holds; run "
            "`python -m benchmarks.figures --write`."
        )


if __name__ == "__main__":
    main()
