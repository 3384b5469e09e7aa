"""Tokens per verification step that drafts copied from texts would give, counted on real responses.

    python -m benchmarks.draft_acceptance --data ../shared/data/speculation/dev.parquet \
        --out benchmarks/results/draft_acceptance.json

Nothing is generated: the policy's choice is the recorded token. All samples of a prompt go in lockstep, a
verification step each. A draft is what followed the longest match of the last tokens (at most `--context`)
in the response's own text with its prompt, in its siblings as far as they are at that moment (whole once
they have ended), or in whole responses to the same prompt of an earlier policy; of equally long matches
the newest, own text first. A step accepts what of the draft agrees with the record from its beginning, and
one token more. A tree has another draft beside it, which begins with another token, behind the longest match
of those; chains of as many tokens are among `--drafts`. Each source alone and with those before it. "As of launch" the siblings are as they were
when the burst began, and they and earlier responses are laid out as the engine does. Where there are
earlier ones, other ways to lay them out are counted too.

Then how well the planner foretells them: see `draft_predictions`.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.draft_predictions import BURST, Counted, errors, prior_of
from pat_jax.profiling.simulate.draft_counting import (
    ORDER,
    Group,
    Record,
    Rules,
    Tokens,
    verify,
)

ROOM = 4.0  # of the engine for texts of others, in such lengths as rows have room for
# Which texts may be drafted from, by name.
SOURCES = {
    "own": Rules(siblings=False, earlier=False),
    "own, siblings": Rules(siblings=True, earlier=False),
    "own, siblings as of launch": Rules(siblings=True, earlier=False, burst=BURST, room=ROOM),
    "own, siblings, earlier": Rules(siblings=True, earlier=True),
    "own, earlier": Rules(siblings=False, earlier=True, burst=BURST, room=ROOM),
    "own, siblings as of launch, earlier": Rules(
        siblings=True, earlier=True, burst=BURST, room=ROOM
    ),
}
ENGINE_RULES = SOURCES["own, siblings as of launch, earlier"]
LAYOUTS = {
    **{f"room for {room}": replace(ENGINE_RULES, room=room) for room in (2, 4, 8, 16)},
    **{
        f"{', '.join(order)}, room for {room}": replace(ENGINE_RULES, order=order, room=room)
        for order in permutations(ORDER)
        for room in (4, 8)
    },
    **{
        f"cut a {part}th of the columns ahead": replace(ENGINE_RULES, ahead_part=part)
        for part in (1, 2, 4, 8, 16)
    },
}
PREDICTED = "own, siblings", "own, siblings, earlier"
CONTROL = "codegen"  # a base model, which repeats little: not in the prior
MOST = 8  # tokens of the drafts that are predicted
TREES = ((6, 2), (12, 4))  # tokens of a draft, and of another beside it
ENGINE = {
    "the same in the engine": "longest match of at most 16 tokens, of equal ones the row's own and the newest; "
    "then siblings as of launch, those that have ended first, of them the longest, then earlier responses, "
    "then siblings that go on; where they are cut; a draft ends where its text did",
    "not in the engine": "siblings as they are at each step; earlier responses without a bound; steps in "
    "lockstep of rows that begin at different times; bursts that are launched behind others see what the "
    "first one saw",
}


def groups_of(path: Path, samples: int) -> Iterator[Group]:
    """
    Args:
      samples: of a prompt, at the most.
    """
    prompts: dict[tuple[str, str], Tokens] = {}
    said: defaultdict[tuple[str, str, str], defaultdict[int, list[Tokens]]]
    said = defaultdict(lambda: defaultdict(list))
    for row in pq.read_table(path).to_pylist():
        if row["sample"] < 0:
            prompts[row["set"], row["prompt_id"]] = row["token_ids"]
        else:
            of = row["set"], row["model"], row["prompt_id"]
            said[of][row["epoch"]].append(row["token_ids"])
    for (name, model, prompt), by_epoch in said.items():
        newest, *before = sorted(by_epoch, reverse=True)
        earlier = [text for epoch in before for text in by_epoch[epoch][:samples]]
        of_prompt = prompts.get((name, prompt), [])
        yield Group(f"{name}, {model}", of_prompt, by_epoch[newest][:samples], earlier)


def rules_of(groups: Sequence[Group]) -> Mapping[str, Rules]:
    has_earlier = any(group.earlier for group in groups)
    return {name: rules for name, rules in SOURCES.items() if has_earlier or not rules.earlier}


def counted(groups: Sequence[Group], record: Record, drafts: Sequence[int]) -> Mapping[str, object]:
    """Tokens per step, by what is drafted from and the most tokens of a draft."""
    tokens = sum(len(response) for group in groups for response in group.responses)
    found: dict[str, object] = {"prompts": len(groups), "tokens": tokens}
    for draft in drafts:
        found[f"drafts of {draft}"] = {
            name: round(tokens / len(verify(record, replace(rules, draft=draft))), 3)
            for name, rules in rules_of(groups).items()
        }
    for draft, branch in TREES:
        found[f"trees of {draft} and {branch}"] = {
            name: round(tokens / len(verify(record, replace(rules, draft=draft, branch=branch))), 3)
            for name, rules in rules_of(groups).items()
        }
    if any(group.earlier for group in groups):
        found["laid out otherwise, drafts of 8"] = {
            name: round(tokens / len(verify(record, rules)), 3) for name, rules in LAYOUTS.items()
        }
    return found


def predicted(groups: Sequence[Group], record: Record, rules: Rules, trees: bool) -> Counted:
    """All steps with drafts of every length, and a branch of the same beside each in `trees`."""
    tokens = [sum(map(len, group.responses)) for group in groups]
    steps = {
        n: verify(record, replace(rules, draft=n, branch=n * trees)) for n in range(1, MOST + 1)
    }
    return Counted.of(np.array(tokens), steps, trees)


def all_of(
    by_name: Mapping[str, Sequence[Group]], drafts: Sequence[int], context: int, splits: int
) -> dict[str, object]:
    """The whole record, printed on the way."""
    sets, expected, priors = {}, {}, []
    for name, groups in sorted(by_name.items()):
        record = Record(groups, context)
        sets[name] = counted(groups, record, drafts)
        print(name, json.dumps(sets[name]), flush=True)
        for sources in [x for x in PREDICTED if x in rules_of(groups)]:
            chains, trees = (predicted(groups, record, SOURCES[sources], x) for x in (False, True))
            if sources == "own, siblings" and not name.startswith(CONTROL):
                priors.append(trees.counts(MOST))
            if len(groups) > 1:
                for kind, steps in (("chains", chains), ("trees", trees)):
                    expected[f"{name}: {sources}, {kind}"] = errors(steps, MOST, splits)
                    told = expected[f"{name}: {sources}, {kind}"]
                    print(sources, kind, json.dumps(told), flush=True)
    prior = {name: x.tolist() for name, x in prior_of(priors).items()} if priors else {}
    print(json.dumps(prior))
    return {"tokens a step": sets, "errors of the planner, %": expected, "prior": prior}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--drafts", type=int, nargs="+", default=[16, 8, 7, 3], help="most tokens of a draft"
    )
    parser.add_argument("--context", type=int, default=16, help="most tokens of a match")
    parser.add_argument("--samples", type=int, default=16, help="most samples of a prompt")
    parser.add_argument("--most_prompts", type=int, default=10**6, help="of each set")
    parser.add_argument("--splits", type=int, default=8, help="random halves of the prompts")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    by_name: defaultdict[str, list[Group]] = defaultdict(list)
    for group in groups_of(args.data, args.samples):
        if len(by_name[group.name]) < args.most_prompts:
            by_name[group.name].append(group)
    found = all_of(by_name, args.drafts, args.context, args.splits)
    if args.out:
        command = "python -m benchmarks.draft_acceptance " + " ".join(sys.argv[1:])
        record = {"command": command, "rules": {"steps of a burst": BURST, **ENGINE}, **found}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
