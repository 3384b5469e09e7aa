"""Tokens per verification step that drafts copied from texts would give, counted on real responses.

    python -m benchmarks.speculation.draft_acceptance --data ../shared/data \
        --out benchmarks/results/draft_acceptance.json

Nothing is generated: the policy's choice is the recorded token. All samples of a prompt run in lockstep, a
verification step each (`draft_counting.py`). Drafts come from the response's own text
with its prompt, from other samples of the prompt as far as they are at that moment, or from whole responses
to the same prompt of an earlier policy. A tree has a second draft beside the first, which begins with
another token; chains of as many tokens are among `--drafts`. "At launch" the samples are as they were when
the burst began, and texts are laid out as the engine does, in the room that it has.

Prints the priors of `planning/drafts.py` as well: what all sets but the control come to, each with the same
weight.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.report import options, write
from benchmarks.speculation.draft_counting import Group, Record, Rules, Tokens, verify
from benchmarks.speculation.draft_runs import counts_of
from pat_jax.planning.draft_counts import BRANCHES, DRAFTS, KINDS, DraftResult

BURST = 32  # steps
ROOM = 4.0  # of the engine for texts of others, in such lengths as rows have room for
# Which texts may be drafted from, by name.
SOURCES = {
    "own": Rules(siblings=False, earlier=False),
    "own, siblings": Rules(siblings=True, earlier=False),
    "own, siblings at launch": Rules(siblings=True, earlier=False, burst=BURST, room=ROOM),
    "own, siblings, earlier": Rules(siblings=True, earlier=True),
    "own, earlier": Rules(siblings=False, earlier=True, burst=BURST, room=ROOM),
    "own, siblings at launch, earlier": Rules(siblings=True, earlier=True, burst=BURST, room=ROOM),
}
PRIOR_OF = "own, siblings"
CONTROL = "codegen"  # a base model, which repeats little: not in the prior
MOST = 8  # tokens of the drafts of the prior
TREES = ((6, 2), (12, 4))  # tokens of a draft, and of another beside it


def recorded_responses(data: Path) -> Path:
    return data / "speculation" / "dev.parquet"


def groups_of(path: Path, samples: int) -> Iterator[Group]:
    """
    Args:
      samples: of a prompt, at the most.
    """
    prompts: dict[tuple[str, str], Tokens] = {}
    responses: defaultdict[tuple[str, str, str], defaultdict[int, list[Tokens]]]
    responses = defaultdict(lambda: defaultdict(list))
    for row in pq.read_table(path).to_pylist():
        if row["sample"] < 0:
            prompts[row["set"], row["prompt_id"]] = row["token_ids"]
        else:
            of = row["set"], row["model"], row["prompt_id"]
            responses[of][row["epoch"]].append(row["token_ids"])
    for (name, model, prompt), by_epoch in responses.items():
        newest, *before = sorted(by_epoch, reverse=True)
        earlier = [text for epoch in before for text in by_epoch[epoch][:samples]]
        of_prompt = prompts.get((name, prompt), [])
        yield Group(f"{name}, {model}", of_prompt, by_epoch[newest][:samples], earlier)


def counted(groups: Sequence[Group], record: Record, drafts: Sequence[int]) -> dict[str, object]:
    """Tokens per step, by what is drafted from and the most tokens of a draft."""
    tokens = sum(len(response) for group in groups for response in group.responses)
    has_earlier = any(group.earlier for group in groups)

    def a_step(draft: int, branch: int = 0) -> dict[str, float]:
        return {
            name: round(tokens / len(verify(record, replace(one, draft=draft, branch=branch))), 3)
            for name, one in SOURCES.items()
            if has_earlier or not one.earlier
        }

    found: dict[str, object] = {"prompts": len(groups), "tokens": tokens}
    found |= {f"drafts of {draft}": a_step(draft) for draft in drafts}
    return found | {f"trees of {one} and {other}": a_step(one, other) for one, other in TREES}


def prior_of(counts: Sequence[DraftResult]) -> dict[str, list]:
    """Of several sets, which weigh the same, by the names that `planning/drafts.py` has for it."""
    proposed, accepted, begun, branch_counts = (
        np.sum([getattr(x, name) / x.begun.sum() for x in counts], axis=0)
        for name in ("proposed", "accepted", "begun", "branch_counts")
    )
    rates = np.divide(accepted, proposed, where=proposed > 0, out=np.zeros(proposed.shape))[
        :, 1:, :8
    ]
    total = branch_counts.sum(axis=1, keepdims=True)
    branch_counts = np.divide(branch_counts, total, where=total > 0, out=np.eye(KINDS))
    return {
        "PRIOR": rates[DRAFTS].round(2).tolist(),
        "PRIOR_BRANCHES": rates[BRANCHES].round(2).tolist(),
        "PRIOR_BRANCH_COUNTS": branch_counts.round(3).tolist(),
        "PRIOR_BEGUN": (begun / begun.sum()).round(3).tolist(),
    }


def main() -> None:
    parser = options(__doc__, has_data=True)
    parser.add_argument(
        "--drafts", type=int, nargs="+", default=[16, 8, 7, 3], help="most tokens of a draft"
    )
    parser.add_argument("--context", type=int, default=16, help="most tokens of a match")
    parser.add_argument("--samples", type=int, default=16, help="most samples of a prompt")
    parser.add_argument("--most_prompts", type=int, default=10**6, help="of each set")
    args = parser.parse_args()
    by_name: defaultdict[str, list[Group]] = defaultdict(list)
    for group in groups_of(recorded_responses(args.data), args.samples):
        if len(by_name[group.name]) < args.most_prompts:
            by_name[group.name].append(group)
    sets, counts = {}, []
    for name, groups in sorted(by_name.items()):
        record = Record(groups, args.context)
        sets[name] = counted(groups, record, args.drafts)
        print(name, json.dumps(sets[name]), flush=True)
        if not name.startswith(CONTROL):
            steps = verify(record, replace(SOURCES[PRIOR_OF], draft=MOST, branch=MOST))
            counts.append(counts_of(steps, MOST))
    prior = prior_of(counts) if counts else {}
    print(json.dumps(prior))
    write(args.out, {"steps of a burst": BURST, "tokens a step": sets, "prior": prior})


if __name__ == "__main__":
    main()
