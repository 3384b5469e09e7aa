"""A token that messages do not have, though an answer may quote it, and a message the answer.

Plain values; imports no jax.
"""

import json
from collections.abc import Mapping
from urllib.parse import quote

_INSTEAD = "[token]"


class Secret:
    """
    Args:
      token: empty: there is none to hide.
    """

    def __init__(self, token: str):
        in_json = json.dumps(token)[1:-1]
        forms = {token, in_json, in_json.replace("/", r"\/"), quote(token, safe="")}
        self._forms = sorted(forms - {""}, key=len, reverse=True)

    def hidden(self, text: str) -> str:
        """A text, whether it quotes the token as it is, as JSON does or as an address does."""
        for form in self._forms:
            text = text.replace(form, _INSTEAD)
        return text

    def hidden_inside(self, value: object) -> object:
        """A value of JSON, with the texts in it."""
        if isinstance(value, str):
            return self.hidden(value)
        if isinstance(value, list):
            return [self.hidden_inside(inner) for inner in value]
        if isinstance(value, Mapping):
            return {self.hidden(key): self.hidden_inside(inner) for key, inner in value.items()}
        return value
