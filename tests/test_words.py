"""Pages and public docstrings use the words of docs/glossary.md, in short sentences and lines."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REPORTS = sorted((ROOT / "benchmarks" / "reports").glob("*.md"))
GENERATED = ROOT / "docs" / "options.md"  # help texts of options
DOCS = sorted({*(ROOT / "docs").glob("*.md")} - {GENERATED})
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, *REPORTS]
PRODUCT = ("pat_jax", "rl", "models", "profiling")
LONGEST_LINE = 100  # characters; tables, links and code may be longer
LONGEST_SENTENCE = 35  # words; aim for 25
ARGUMENT = re.compile(r"\n +(\*{0,2}\w+(?:, \*{0,2}\w+)*): ")
Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# Parts of identifiers that are not used.
NO_NAMES = re.compile(
    r"(?i)(^|_)(says?|said|saying|foretell|foretold|foreseen|clairvoyant|hindsight|reslices?|live|spoilt|occupants)"
    r"($|_)"
)

GENERATES = "rows?|sequences?|responses?|samples?|siblings?|policy|policies|models?|layers|steps?"
NOT_USED = {
    "generate": rf"\b({GENERATES}) (has |have |had )?sa(y|ys|id)\b",
    "generate (a token)": r"\bsa(y|ys|id) (a|one|its|the|several|more|most) (\w+ )?tokens?\b",
    "generated (tokens)": r"\bsaid tokens?\b|\btokens? (that (was|were) )?said\b",
    "print, log, generate": r"\b(is|are|was|were|be|been) said\b",
    "predict": r"\bfore(tell\w*|told|see\w*|saw)\b",
    "oracle": r"\bclairvoyant\w*",
    "reshard": r"\bre-?slic\w+",
    "replica": r"\b(DP|TP|data-parallel|tensor-parallel) groups?\b",
    "at launch": r"\bas of launch\b",
    "carried": r"\bborne\b",
    "who, what": r"\bwhoever\b",
    "is not": r"(?<!there )\bis no\b(?! (longer|larger|smaller|faster|slower|more|less|better)\b)",
    "except": r"\bbut for\b",
    "among, for": r"(^|[.!?:] )(?-i:Of [a-z])",
}


def docstrings(tree: ast.Module) -> str:
    """A page of the docstrings of a module and of its public classes and functions.

    An Args section is a list with the names as code.
    """
    texts = (ast.get_docstring(node) or "" for node in public_nodes(tree))
    return "\n\n".join(ARGUMENT.sub(r"\n\n- `\1`: ", text) for text in texts)


def wide_docstrings(tree: ast.Module, code: str) -> list[str]:
    """Lines of public docstrings that are too long; examples may be."""
    first = [node.body[0] for node in public_nodes(tree) if ast.get_docstring(node)]
    lines = code.splitlines()
    parts = (lines[one.lineno - 1 : one.end_lineno] for one in first)
    return [
        line for part in parts for line in part if len(line) > LONGEST_LINE and ">>>" not in line
    ]


def public_nodes(node: ast.Module | Documented) -> Iterator[ast.Module | Documented]:
    """A module or class with the public classes and functions in it, `__init__` among them."""
    yield node
    for child in node.body:
        if isinstance(child, Documented) and not re.match(r"_(?!_)", child.name):
            yield from public_nodes(child)


def without_code(page: str) -> str:
    """The page's own words: no blocks of code, comments and addresses, X for each code span."""
    page = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    page = re.sub(r"(?<=\n\n)(    .*\n|\n(?=    ))+", "", page)
    page = re.sub(r"`[^`]*`", "X", page)
    return re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", page)


def paragraphs(page: str) -> list[str]:
    """Each paragraph, list item, heading and row of a table in one line."""
    begins = r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) ?)"
    return [" ".join(part.split()) for part in re.split(begins, without_code(page)) if part.strip()]


def wrong_words(page: str) -> list[str]:
    return [
        f"{found[0].strip()!r}: {instead}? … {part[max(0, found.start() - 30) :][:90]}"
        for part in paragraphs(page)
        for instead, pattern in NOT_USED.items()
        for found in re.finditer(pattern, re.sub(r"^([-*#]+|\d+\.) ", "", part), re.IGNORECASE)
    ]


def long_sentences(page: str) -> list[str]:
    prose = (part for part in paragraphs(page) if not part.startswith("|"))
    sentences = (one for part in prose for one in re.split(r"(?<=[.!?])[)*]* ", part))
    return [one for one in sentences if len(re.findall(r"\w\S*", one)) > LONGEST_SENTENCE]


def long_lines(page: str) -> list[str]:
    lines = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE).splitlines()
    may_be_long = re.compile(r"\s*\||.*\]\(|    ")
    return [line for line in lines if len(line) > LONGEST_LINE and not may_be_long.match(line)]


def wrong_in_code(code: str) -> list[str]:
    """In docstrings, comments and names; sentences and lines of public docstrings, too."""
    tree, tokens = ast.parse(code), list(tokenize.generate_tokens(io.StringIO(code).readline))
    page = docstrings(tree)
    wrong = [*wrong_words(page), *long_sentences(page), *wide_docstrings(tree, code)]
    texts = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    nodes = (node for node in ast.walk(tree) if isinstance(node, Documented))
    texts += [ast.get_docstring(node) or "" for node in nodes]
    wrong += [one for one in wrong_words("\n\n".join(texts)) if ": among, for?" not in one]
    names = {token.string for token in tokens if token.type == tokenize.NAME}
    return [*wrong, *filter(NO_NAMES.search, sorted(names))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_has_the_words_of_the_glossary_in_short_sentences_and_lines(path: Path):
    page = path.read_text(encoding="utf-8")
    assert [*wrong_words(page), *long_sentences(page), *long_lines(page)] == []


@pytest.mark.parametrize("room", PRODUCT)
def test_code_has_the_words_of_the_glossary(room: str):
    files = sorted((ROOT / room).rglob("*.py"))
    found = {str(path): wrong_in_code(path.read_text(encoding="utf-8")) for path in files}
    assert files and {path: wrong for path, wrong in found.items() if wrong} == {}
