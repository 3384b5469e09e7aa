"""One HTML file with everything in it, readable offline and at any width, light or dark."""

from html import escape
from pathlib import Path

_STYLE = Path(__file__).with_suffix(".css")


def web_page(title: str, content: str, style: str = "") -> str:
    """
    Args:
      title: text.
      content: HTML.
      style: CSS of what the content has beside text, tables and headings.
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>"
        f"<style>{_STYLE.read_text(encoding='utf-8')}{style}</style></head>"
        f"<body><main>{content}</main></body></html>\n"
    )
