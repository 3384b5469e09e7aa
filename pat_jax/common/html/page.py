"""One HTML file with everything in it, readable offline and at any width, light or dark."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from pat_jax.common.text_table import Cell, Table, shown

_STYLE = Path(__file__).with_suffix(".css")


def web_page(title: str, content: str) -> str:
    """
    Args:
      title: text.
      content: HTML.
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>"
        f"<style>{_STYLE.read_text(encoding='utf-8')}</style></head>"
        f"<body><main>{content}</main></body></html>\n"
    )


def section(title: str, *content: str, source: str = "") -> str:
    """
    Args:
      content: HTML.
      source: text that says where the figures are from.
    """
    told = f'<p class="source">{escape(source)}</p>' if source else ""
    return f"<section><h2>{escape(title)}</h2>{''.join(content)}{told}</section>"


def tiles(facts: Iterable[tuple[str, str]]) -> str:
    """The few numbers that are looked at first, each with what it is."""
    cells = "".join(f"<li><b>{escape(a)}</b>{escape(b)}</li>" for a, b in facts)
    return f'<ul class="tiles">{cells}</ul>'


def listed(lines: Iterable[str]) -> str:
    """An HTML list; empty where there are no lines."""
    told = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{told}</ul>" if told else ""


def details(title: str, content: str, *, is_open: bool = False) -> str:
    state = " open" if is_open else ""
    return f"<details{state}><summary>{escape(title)}</summary>{content}</details>"


def panels(charts: Sequence[str]) -> str:
    """Charts side by side where there is room."""
    return f'<div class="panels">{"".join(charts)}</div>'


def html_table(table: Table) -> str:
    def cell(value: Cell) -> str:
        kind = "" if isinstance(value, str) else ' class="n"'
        return f"<td{kind}>{escape(shown(value))}</td>"

    head = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in table.rows)
    inner = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table>{inner}</table></div>'
