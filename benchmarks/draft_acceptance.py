"""Tokens per verification step that drafts copied from texts would give, counted on real responses.

    python -m benchmarks.draft_acceptance --data ../shared/data/speculation/dev.parquet \
        --out benchmarks/results/draft_acceptance.json

Nothing is generated: the policy's choice is the recorded token. All samples of a prompt go in lockstep, a
verification step each. A draft is what followed the longest match of the last tokens (at most `--context`)
in the response's own text with its prompt, in its siblings as far as they are at that moment (whole once
they have ended), or in whole responses to the same prompt of an earlier policy; of equally long matches
the newest, own text first. A step accepts what of the draft agrees with the record from its beginning, and
one token more. Each source alone and with those before it.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

# Which of these may be drafted from, by name.
SOURCES = {
    "own": ("own",),
    "own, siblings": ("own", "siblings"),
    "own, siblings, earlier": ("own", "siblings", "earlier"),
}
Tokens = Sequence[int]


@dataclass
class Texts:
    """Texts that grow, and where each run of up to `context` tokens was seen last in them."""

    context: int
    texts: list[list[int]] = field(default_factory=list)
    # By length and tokens: the text, and the place behind the run.
    _seen: list[dict[tuple[int, ...], tuple[int, int]]] = field(default_factory=list)

    def __post_init__(self):
        self._seen = [{} for _ in range(self.context + 1)]

    def begin(self, tokens: Tokens) -> int:
        """The number of a new text."""
        self.texts.append([])
        self.append(len(self.texts) - 1, tokens)
        return len(self.texts) - 1

    def append(self, number: int, tokens: Tokens) -> None:
        text = self.texts[number]
        for token in tokens:
            # What follows a run is what it is looked up for: it counts when that is there.
            for length in range(1, min(self.context, len(text)) + 1):
                self._seen[length][tuple(text[-length:])] = number, len(text)
            text.append(token)

    def draft(self, last: Tokens, length: int, most: int) -> list[int] | None:
        """What came after these `length` last tokens."""
        found = self._seen[length].get(tuple(last[-length:]))
        if found is None:
            return None
        number, place = found
        return self.texts[number][place : place + most]


def steps_of(
    prompt: Tokens,
    responses: Sequence[Tokens],
    earlier: Sequence[Tokens],
    sources: Sequence[str],
    *,
    draft: int,
    context: int,
) -> int:
    """Verification steps of all samples of a prompt."""
    own = [Texts(context) for _ in responses]
    for texts in own:
        texts.begin(prompt)
    shared, whole = Texts(context), Texts(context)  # siblings and itself; earlier responses
    numbers = [shared.begin(prompt) for _ in responses]
    for text in earlier:
        whole.begin([*prompt, *text])
    at, steps = [0] * len(responses), 0
    while any(at[i] < len(response) for i, response in enumerate(responses)):
        said = {}
        for i, response in enumerate(responses):
            if at[i] == len(response):
                continue
            steps += 1
            places = [own[i]]
            places += [shared] * ("siblings" in sources) + [whole] * ("earlier" in sources)
            guess = _longest(places, own[i].texts[0], context, draft)
            rest = response[at[i] : at[i] + len(guess) + 1]
            accepted = next(
                (n for n, (a, b) in enumerate(zip(guess, rest, strict=False)) if a != b),
                min(len(guess), len(rest)),
            )
            said[i] = response[at[i] : at[i] + accepted + 1]
        for i, tokens in said.items():  # what siblings say in a step none of them sees in it
            at[i] += len(tokens)
            own[i].append(0, tokens)
            if "siblings" in sources:
                shared.append(numbers[i], tokens)
    return steps


def _longest(places: Sequence[Texts], text: Tokens, context: int, most: int) -> list[int]:
    for length in range(min(context, len(text)), 0, -1):
        for texts in places:
            if guess := texts.draft(text, length, most):
                return guess
    return []


@dataclass(frozen=True)
class Group:
    name: str  # set, and the model where a set has several
    prompt: Tokens
    responses: Sequence[Tokens]
    earlier: Sequence[Tokens]


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


def counted(groups: Sequence[Group], draft: int, context: int) -> Mapping[str, float]:
    """Tokens per step, by what is drafted from."""
    tokens = sum(len(response) for group in groups for response in group.responses)
    found = {}
    for name, sources in SOURCES.items():
        if "earlier" in sources and not any(group.earlier for group in groups):
            continue
        steps = sum(
            steps_of(x.prompt, x.responses, x.earlier, sources, draft=draft, context=context)
            for x in groups
        )
        found[name] = round(tokens / steps, 3)
    return {"prompts": len(groups), "tokens": tokens, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--draft", type=int, default=8, help="most tokens of a draft")
    parser.add_argument("--context", type=int, default=16, help="most tokens of a match")
    parser.add_argument("--samples", type=int, default=16, help="most samples of a prompt")
    parser.add_argument("--most_prompts", type=int, default=10**6, help="of each set")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    by_name: defaultdict[str, list[Group]] = defaultdict(list)
    for group in groups_of(args.data, args.samples):
        by_name[group.name].append(group)
    found = {}
    for name, groups in sorted(by_name.items()):
        found[name] = counted(groups[: args.most_prompts], args.draft, args.context)
        print(name, json.dumps(found[name]), flush=True)
    if args.out:
        command = "python -m benchmarks.draft_acceptance " + " ".join(sys.argv[1:])
        args.out.write_text(json.dumps({"command": command, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
