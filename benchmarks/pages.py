"""Writes the parts of the pages that are made from code and from results.

    python -m benchmarks.pages --check    # are the pages what the code and the results say?
    python -m benchmarks.pages --write    # make them so
    python -m benchmarks.pages --draw     # draw the pictures again, with today's labels

Such a part lies between `<!-- made: NAME -->` and `<!-- end -->`. Runs no benchmark; `--draw` runs
commands of pat_jax, and none of them needs an accelerator.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks import pictures
from benchmarks.plain_results import results_table
from pat_jax.batch_generation.config import GenerateConfig
from pat_jax.common.options.declared import AUTO, Option, options_of
from pat_jax.common.options.help import pages as help_pages
from pat_jax.common.options.names import looked_up, worded
from pat_jax.config.run import RunConfig
from pat_jax.config.sft import RewardModelConfig, SftConfig
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.profiling.capacity.plan_config import PlanConfig
from pat_jax.profiling.capacity.simulate_config import SimulateConfig
from pat_jax.profiling.doctor.config import DoctorConfig
from pat_jax.profiling.measure.config import ProfileConfig
from pat_jax.run.results.compare_config import CompareConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FOREIGN = ROOT / "tests" / "config" / "foreign_options.yaml"
COMMANDS: Mapping[str, Callable[[], Any]] = {
    "train": RunConfig,
    "sft": SftConfig,
    "reward_model": RewardModelConfig,
    "generate": GenerateConfig,
    "evaluate": EvaluateConfig,
    "plan": PlanConfig,
    "profile": ProfileConfig,
    "simulate": SimulateConfig,
    "compare": CompareConfig,
    "doctor": DoctorConfig,
}
MOST_USED = """model data reward steps run_dir resume rollout.num_generations
    rollout.max_completion_length optimizer.learning_rate eval.data"""

# ------------------------------------------------------------------------------ options.md


def options_page() -> str:
    train = list(options_of(RunConfig()))
    by_name = {option.short or option.name: option for option in train}
    lines = ["## Ten that are used most", "", *table([by_name[name] for name in MOST_USED.split()])]
    for command, made in COMMANDS.items():
        options = list(options_of(made()))
        lines += ["", f"## {command}", ""]
        if command == "train":
            for page, found in help_pages(options).items():
                title = page or "What most people set"
                lines += [f"### {title}", "", *table(found), ""]
        else:
            lines += own_options(options, train)
    return "\n".join(lines).rstrip() + "\n"


def own_options(options: Sequence[Option], train: Sequence[Option]) -> Iterator[str]:
    """Those that differ from train's in a table, the others by name."""
    as_train = [option for option in options if option in train]
    yield from table([option for option in options if option not in train])
    if as_train:
        names = ", ".join(f"`--{option.short or option.name}`" for option in as_train)
        yield from ("", f"As for `train`: {names}.")


def table(options: Sequence[Option]) -> Iterator[str]:
    if not options:
        return
    yield "| option | default | |"
    yield "|---|---|---|"
    for option in options:
        words = " ".join(option.help.split()).replace("|", "\\|")
        full = f", `--{option.name}`" if option.short else ""
        name = f"`--{option.short or option.name}`{full}"
        yield f"| {name} | {shown_default(option)} | {in_code(words)} |"


def shown_default(option: Option) -> str:
    if option.is_auto:
        return f"`{AUTO}`"
    value = option.default
    if value in ("", None, ()):
        return ""
    text = " ".join(map(str, value)) if option.takes_many else str(value)
    return f"`{text.lower() if option.kind is bool else text}`"


VALUE = r"(?: (?:true|auto|host|grpo|wandb|\w*\d\w*)\b)?"  # of an option, in a sentence


def in_code(words: str) -> str:
    """A help text in Markdown: options as code, pages as links."""
    words = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", words)
    parts = re.split(r"(`[^`]*`)", words)
    for at in range(0, len(parts), 2):  # outside of code
        plain = parts[at].replace("<", "&lt;")
        parts[at] = re.sub(rf"(?<!\w)(--\w+(?:\.\w+)*{VALUE})", r"`\1`", plain)
    return "".join(parts)


# ------------------------------------------------------------------------------ migrate.md

ALWAYS = ("reward",)  # though only one project has it
ON_PPO_MD = """critic.model critic.learning_rate critic.pretrain_steps algorithm.lam
    algorithm.value_clip algorithm.kl_target algorithm.kl_horizon"""
PROJECTS = {"TRL": ("TRL", "transformers"), "verl": ("verl",), "OpenRLHF": ("OpenRLHF",)}
# What people write most, for which no option here has the same value.
ASKED = """per_device_train_batch_size gradient_accumulation_steps num_train_epochs use_vllm
    vllm_tensor_parallel_size vllm_gpu_memory_utilization gradient_checkpointing bf16 load_in_4bit
    loss_type report_to resume_from_checkpoint use_kl_loss nnodes"""


def known_options() -> list[str]:
    options = options_of(RunConfig())
    return [name for option in options for name in (option.short, option.name) if name]


def foreign_names() -> dict[str, list[str]]:
    """The options of each project, in the order of its own files."""
    lists = yaml.safe_load(FOREIGN.read_text("utf-8"))
    return {
        project: [
            name
            for title, sections in lists.items()
            if title.split()[0].rstrip(",") in titles
            for words in sections.values()
            for name in words.split()
        ]
        for project, titles in PROJECTS.items()
    }


def same_options() -> dict[str, dict[str, list[str]]]:
    """For each option of train, its names in each project: those whose values mean the same."""
    known = known_options()
    found: dict[str, dict[str, list[str]]] = {}
    for project, names in foreign_names().items():
        for name in dict.fromkeys(names):
            ours, answer = looked_up(name, known)
            if ours and not answer:
                found.setdefault(ours, {}).setdefault(project, []).append(name)
    return {ours: found[ours] for ours in known if ours in found}


def usual(names: Sequence[str], ours: str) -> str:
    """Of several names that of the policy, if ours is not of another model, and the shortest."""
    if not names:
        return ""
    leaf, is_of_critic = ours.rpartition(".")[2], ours.startswith("critic.")

    def distance(name: str) -> tuple[bool, bool, int]:
        sections = name.split(".")
        of_another = not is_of_critic and bool({"critic", "ref", "reward"} & {*sections})
        return of_another, sections[-1] != leaf, len(name)

    return f"`{min(names, key=distance)}`"


def same_table() -> str:
    lines = [f"| pat_jax | {' | '.join(PROJECTS)} |", "|---" * (len(PROJECTS) + 1) + "|"]
    for ours, names in same_options().items():
        if (len(names) < 2 and ours not in ALWAYS) or ours in ON_PPO_MD.split():
            continue
        cells = [usual(names.get(project, []), ours) for project in PROJECTS]
        if {cell.strip("`").rpartition(".")[2] for cell in cells} <= {ours.rpartition(".")[2], ""}:
            continue  # nobody has another name
        lines.append(f"| `--{ours}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def answers_table() -> str:
    known = known_options()
    lines = ["| you write | in pat_jax |", "|---|---|"]
    for name in ASKED.split():
        _, answer = looked_up(name, known)
        words = re.sub(r"^is not \w+( here)?: ", "", worded(answer)).rstrip(".")
        lines.append(f"| `{name}` | {in_code(words)} |")
    return "\n".join(lines) + "\n"


def versions() -> str:
    titles = yaml.safe_load(FOREIGN.read_text("utf-8"))
    count = sum(len(words.split()) for one in titles.values() for words in one.values())
    *names, last = [title.partition(",")[0] for title in titles]
    return f"All {count:,} names have an answer, those of\n{', '.join(names)} and {last}.\n"


# ------------------------------------------------------------------------------ pages

PARTS: Mapping[str, Callable[[], str]] = {
    "options": options_page,
    "same options": same_table,
    "answers": answers_table,
    "versions": versions,
    "results": results_table,
}
PART = re.compile(r"(<!-- made: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def remade(page: str) -> str:
    """The page, with each of its parts as the code makes it now."""
    return PART.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n{found[3]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", action="store_true", help="fail where a page says otherwise")
    what.add_argument("--write", action="store_true", help="write the parts into the pages")
    what.add_argument("--draw", action="store_true", help="draw the pictures of docs/ again")
    args = parser.parse_args()
    if args.draw:
        pictures.draw()
        return
    for path in sorted(DOCS.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        made = remade(page)
        if args.write:
            path.write_text(made, encoding="utf-8")
        elif made != page:
            sys.exit(
                f"{path.relative_to(ROOT)}: a part is not what the code makes; run "
                "`python -m benchmarks.pages --write`."
            )


if __name__ == "__main__":
    main()
