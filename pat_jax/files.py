"""Files that a killed run must not leave half written."""

from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Writes a file that is whole, or as it was before, at whatever moment the process dies."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
