"""Reads a row's variables for the chat template, as in TRL: `tools` and `chat_template_kwargs`.

A column holds the value itself or its JSON text. Knows values. Does not know where the row is from,
nor which variables a template has.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pat_jax.common.json_text import JsonError, has_lone_surrogate, parse_json

TOOLS = "tools"
VARIABLES = "chat_template_kwargs"
# Columns that TRL and verl show to multimodal models; models here read only text.
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
Error = Callable[[str, object, str], Exception]  # from (column, its value, what was expected)


def template_variables(fields: Mapping[str, object], error: Error) -> dict[str, Any]:
    """Returns the template's variables that a row sets, without empty tools and without nulls in
    objects. For a value of the wrong type, raises the exception that `error` returns."""
    variables = _value(fields, VARIABLES, error)
    if variables is not None and not isinstance(variables, dict):
        raise error(VARIABLES, fields[VARIABLES], "an object, or its JSON text")
    found = dict(variables or {})
    tools = _value(fields, TOOLS, error)
    is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if tools is not None and not is_list:
        raise error(TOOLS, fields[TOOLS], "a list of objects (JSON schemas), or its JSON text")
    return found | ({TOOLS: tools} if tools else {})


def _value(fields: Mapping[str, object], name: str, error: Error) -> object:
    value = fields.get(name)
    if isinstance(value, str):
        try:
            value = parse_json(value) if value.strip() else None
        except JsonError as wrong:
            raise error(name, fields[name], f"JSON, but it is {wrong}") from None
    else:
        value = without_nulls(value)
    if has_lone_surrogate(value):
        raise error(name, value, "whole characters, but it has half of one")
    return value


def without_nulls(value: object) -> Any:
    """Returns a value without nulls in objects at any depth, which Parquet fills in."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value
