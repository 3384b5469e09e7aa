"""Renders pages, pictures and texts from jinja2 templates.

A page is one self-contained HTML file, for any width, light or dark. Markup in its values is
escaped.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pat_jax.common.text_table import percent, shown, text_table

if TYPE_CHECKING:
    from jinja2 import Environment

SHARED = Path(__file__).parent
Form = Literal["html", "txt"]


def rendered(template: Path, form: Form = "html", **values: Any) -> str:
    """Renders a template.

    Args:
      template: it can extend and import templates in its folder and in this one, which has `page`
        and `macros` in both forms.
      form: `html` for a page or a picture, `txt` for a text; a variable of the template, too.
      values: the template's variables.
    """
    environment = _environment(template.parent, form)
    text = environment.get_template(template.name).render(values)
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair is not UTF-8


@cache
def _environment(folder: Path, form: Form) -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader([folder, SHARED]),
        autoescape=form == "html",
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "shown": shown,
        "percent": percent,
        "whole": "{:,.0f}".format,
        "text_table": lambda table: text_table(table.header, table.rows),
        "in_a_line": lambda text: " ".join(text.split()),
    }
    made.globals |= {"form": form}
    return made
