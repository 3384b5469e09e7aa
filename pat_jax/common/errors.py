"""The one exception whose message is meant for the person who ran the command, and its words."""

from pat_jax.common.printable import printable


class UserError(Exception):
    """A mistake in the input: one sentence saying what, where, what was expected, what to do.

    Commands print it after `error:` and exit with code 2; nothing has been written by then. Under the cell
    of a notebook it is that line too.
    """

    def _render_traceback_(self) -> list[str]:  # IPython asks for it
        return [f"error: {printable(str(self))}"]


def shown(value: object) -> str:
    """As much of a value as a sentence can hold."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    except ValueError:  # Python writes no integer of so many digits
        return "an integer of thousands of digits"
    return shortened(text)


def shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:160]}... ({len(text):,} characters)"
