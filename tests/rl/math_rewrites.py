r"""Ways to write a final answer, and ways to write a wrong one: what the math reward is held to."""

import re
from collections.abc import Iterator
from decimal import Decimal

BARE = [  # `@` is the answer
    r"so \boxed{@}.",
    r"so \boxed {@}.",
    r"so \boxed{ @ }",
    r"so \boxed{@.}",
    r"so \boxed{$@$}",
    r"so \boxed{\(@\)}",
    r"so \boxed{\displaystyle @}",
    r"so \boxed{\boxed{@}}",
    r"so **\boxed{@}**",
    r"so $\boxed{@}$.",
    r"so $$\boxed{@}$$",
    r"so \(\boxed{@}\).",
    "so\n\\[\n\\boxed{@}\n\\]\n",
    "so \\boxed{@}\n\nThis is it, and not 3.",
    "so \\boxed{@}\n\n$\\boxed{@}$",
    r"so \fbox{@}",
    r"so \fbox{$@$}",
    r"so \framebox{@}",
    "<think>\\boxed{77} or so</think> so <answer>@</answer>",
    "so <answer> $@$ </answer>",
    "so <answer>\n@.\n</answer>",
    r"so <answer>\boxed{@}</answer>",
    "so\nAnswer: @",
    "so\nAnswer: $@$.",
    "so\nanswer: \\(@\\)",
    "so\n**Answer:** $@$",
    "so\n**Answer**: @",
    "so\n**Final Answer: @**",
    "so\nFinal answer: @",
    "so the answer is @.",
    "so\nFinal Answer: The final answer is $@$. I hope it is correct.",
    "so\n**Final Answer**:\n\n$@$",
    "so\n### Final Answer\n\n$\\boxed{@}$",
    "so\n#### @",
    "so\n#### $@$\n",
    "so\n$@$",
    "so\n$$@$$.",
    "so\n\\[\n@\n\\]",
]
BOX = r"so \boxed{%s}"
_INTEGER = re.compile(r"-?\d+")
_THOUSANDS = re.compile(r"(?<=\d)(?=(?:\d{3})+(?!\d))(?<![.^]\d)(?<![.^]\d\d)")
_NUMBER = re.compile(r"-?\d*\.?\d+")
_FRACTION = re.compile(r"(-?)\\d?frac\{(\d+)\}\{(\d+)\}")


def right(gold: str) -> Iterator[str]:
    """Responses whose final answer is `gold`."""
    for form in BARE:
        yield form.replace("@", gold)
    if not re.search(r"[=<>]|\\le|text", gold):
        yield BOX % f"x = {gold}"
    for name in ("dfrac", "tfrac"):
        yield BOX % gold.replace("dfrac", "frac").replace("frac", name)
    yield BOX % gold.replace(",", ", ").replace("+", " + ")
    yield BOX % re.sub(r"\\sqrt\{(.+?)\}", r"√(\1)", gold)
    if "left" not in gold:
        yield BOX % gold.replace("(", r"\left(").replace(")", r"\right)")
    yield BOX % gold.replace("-", "−").replace(r"\pi", "π").replace(r"\cup", "∪")
    yield BOX % gold.replace(r"\infty", "∞")
    for separator in (r"\,", "{,}", r",\!", ","):
        parts = _THOUSANDS.split(gold)
        yield BOX % separator.join(parts)
    if _FRACTION.fullmatch(gold):
        yield BOX % _FRACTION.sub(r"\1\2/\3", gold)
    if _INTEGER.fullmatch(gold):
        for unit in (".0", r"\text{ units}", r" \text{ cm}^2", r"^\circ"):
            yield BOX % (gold + unit)
        yield BOX % rf"\$ {gold}"
        yield BOX % rf"\mathbf{{{gold}}}"
        yield f"Answer: {gold} clips"


def wrong(gold: str) -> Iterator[str]:
    """Responses whose final answer is another, or leaves open which."""
    if _NUMBER.fullmatch(gold):
        yield from _not_the_number(gold)
    if fraction := _FRACTION.fullmatch(gold):
        sign, numerator, denominator = fraction.groups()
        for slip in (1e-3, -1e-3):
            yield BOX % f"{float(sign + numerator) / float(denominator) + slip:.6f}"
        yield BOX % rf"{sign}\frac{{{denominator}}}{{{numerator}}}"
        yield BOX % rf"{gold} \text{{ or }} \frac{{{int(numerator) + 1}}}{{{denominator}}}"
    if pair := re.fullmatch(r"([(\[])([^,]*),([^,]*)([)\]])", gold):
        opening, one, other, closing = pair.groups()
        if one.strip() != other.strip():
            yield BOX % f"{opening}{other},{one}{closing}"
        yield BOX % f"{'[' if opening == '(' else '('}{one},{other}{closing}"
    if float(gold) if _NUMBER.fullmatch(gold) else not re.search(r"text|[=<>,%B]|\\[lc%$]", gold):
        negated = gold[1:] if re.fullmatch("-[^-+]*", gold) else f"-({gold})"
        for sign in (negated, rf"\pm {gold}", f"±{gold}", f"+/-{gold}", rf"{gold} \pm 1"):
            yield BOX % sign
            yield f"Answer: {sign}"


def _not_the_number(gold: str) -> Iterator[str]:
    for other in (str(Decimal(gold) + 1), str(Decimal(gold) - 1)):
        for one, two in ((gold, other), (other, gold)):
            yield from (
                *(BOX % f"{one}{word}{two}" for word in (" or ", r" \text{ or } ", r"\mbox{ or }")),
                *(BOX % f"{one}{sign}{two}" for sign in (", ", "; ", " and ", " | ", r" \lor ")),
                *(
                    BOX % text
                    for text in (rf"\{{{one},{two}\}}", f"x={one} or x={two}", f"({one},{two})")
                ),
                rf"\boxed{{{one}}} or \boxed{{{two}}}",
                rf"$\boxed{{{one}}}$, $\boxed{{{two}}}$.",
                f"\\boxed{{{one}}}\n\\boxed{{{two}}}",
                f"Answer: {one} or {two}",
                f"Answer: between {one} and {two}",
                f"The answer is ${one}$ or ${two}$.",
                f"<answer>{one} or {two}</answer>",
                f"<answer>{one}\n{two}</answer>",
                f"#### {one} or {two}",
                f"Answer: {one} to {two}",
            )
        yield BOX % f"{other} = {gold}"
        yield BOX % rf"{other} \approx {gold}"
    for text in (
        rf"x \ne {gold}",
        f"x > {gold}",
        rf"\le {gold}",
        f"not {gold}",
        f"{gold} is wrong",
    ):
        yield BOX % text
    for slip in (1e-3, -1e-3):
        yield (
            BOX % f"{float(gold) + slip:.3f}"
            if "." not in gold
            else BOX % f"{float(gold) + slip:.6f}"
        )
