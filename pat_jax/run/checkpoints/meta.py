"""Reads a checkpoint's fingerprint (the shape of its models) and metadata, without its arrays.

Reads a small JSON file, starts no backend and writes nothing. Does not know what the metadata mean.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from pat_jax.common.errors import UserError
from pat_jax.common.json_text import parse_json
from pat_jax.models.config import PADDING, ModelConfig
from pat_jax.run.checkpoints.files import METADATA, checkpoints_in, damage

# Values of fields that earlier versions did not have.
_DEFAULTS = {x.name: x.default for x in fields(ModelConfig) if x.default is not MISSING} | {
    "learns_from": "examples"
}
_LATER = {"optimizer.moment_dtype"}  # fields that earlier versions did not write


def newest_meta(directory: str | Path) -> dict[str, Any] | None:
    """Returns fingerprint and metadata of the newest checkpoint whose files have the right sizes,
    or None."""
    for path in reversed(checkpoints_in(Path(directory).absolute())):
        if damage(path, by_checksum=False):
            continue
        try:
            return read_meta(path)
        except (OSError, ValueError):  # missing, or no JSON
            continue
    return None


@contextmanager
def as_written(checkpoint: Path) -> Iterator[None]:
    """Turns errors that are raised inside, as metadata have another form than expected, into a
    UserError."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"{checkpoint / METADATA} is not as this version writes it ({type(error).__name__}: {error}): expected "
            "the metadata of a checkpoint; resume the run with the pat_jax that wrote it, or move that "
            "checkpoint away."
        ) from None


def check_fingerprint(
    directory: str | Path, fingerprint: Mapping[str, Any], changed: Sequence[str] = ()
) -> None:
    """Raises UserError if the newest checkpoint has another fingerprint. `changed` are the options
    that differ from those of its run."""
    if (meta := newest_meta(directory)) is not None:
        check_same(meta["fingerprint"], as_json(fingerprint), Path(directory).absolute(), changed)


def read_meta(path: Path) -> dict[str, Any]:
    """Returns the checkpoint's JSON: an object of `fingerprint` and `meta`. Raises ValueError if it
    has another form, and OSError if it cannot be read."""
    meta = parse_json((path / METADATA).read_bytes())
    if not isinstance(meta, dict) or not {"fingerprint", "meta"} <= meta.keys():
        raise ValueError("it has no fingerprint or no metadata")
    if not all(isinstance(meta[name], dict) for name in ("fingerprint", "meta")):
        raise ValueError("its fingerprint or its metadata are no objects")
    if not isinstance(meta["meta"].get("config", ""), str):
        raise ValueError("the options in its metadata are no text")
    return meta


def check_same(
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    directory: Path,
    changed: Sequence[str] = (),
) -> None:
    """Raises UserError if two fingerprints differ, except for padding. A field that another version
    did not write counts as its default."""
    both = [{**_DEFAULTS, **one} for one in (saved, wanted)]
    there, here = ({name: one.get(name, "nothing") for name in both[0] | both[1]} for one in both)
    unsaid = {*PADDING, *(_LATER - saved.keys())}
    differences = [
        f"{name} ({there[name]} there, {here[name]} here)"
        for name in here
        if name not in unsaid and there[name] != here[name]
    ]
    if differences:
        options = f", by the options {', '.join(changed)}" if changed else ""
        raise UserError(
            f"the checkpoint in {directory} is of another model, which differs in"
            f" {', '.join(differences)}{options}: give the --model and options it was saved with, or"
            " another --run_dir."
        )


def as_json(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(fingerprint)))
