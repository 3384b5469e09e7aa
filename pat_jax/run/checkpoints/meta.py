"""What a checkpoint says of itself: the fingerprint of its run's model, and the run's metadata.

Reads a small file of JSON beside the arrays, starts no backend and writes nothing. Does not know
what the metadata mean.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pat_jax.common.errors import UserError
from pat_jax.common.json_text import parse_json
from pat_jax.models.config import PADDING
from pat_jax.run.checkpoints.files import METADATA, checkpoints_in, damage


def newest_meta(directory: str | Path) -> dict[str, Any] | None:
    """Fingerprint and metadata of the newest checkpoint whose files have their sizes, if any."""
    for path in reversed(checkpoints_in(Path(directory).absolute())):
        if damage(path, by_checksum=False):
            continue
        try:
            return read_meta(path)
        except (OSError, ValueError):  # it is not there, or no JSON
            continue
    return None


def check_fingerprint(directory: str | Path, fingerprint: Mapping[str, Any]) -> None:
    """Refuses a newest checkpoint with another fingerprint."""
    if (meta := newest_meta(directory)) is not None:
        check_same(meta["fingerprint"], as_json(fingerprint), Path(directory).absolute())


def read_meta(path: Path) -> dict[str, Any]:
    """What `JsonSave` has written: the fingerprint, and the metadata under `meta`."""
    meta = parse_json((path / METADATA).read_bytes())
    if not isinstance(meta, dict) or not {"fingerprint", "meta"} <= meta.keys():
        raise ValueError("it has no fingerprint or no metadata")
    if not all(isinstance(meta[name], dict) for name in ("fingerprint", "meta")):
        raise ValueError("its fingerprint or its metadata are no objects")
    if not isinstance(meta["meta"].get("config", ""), str):
        raise ValueError("the options in its metadata are no text")
    return meta


def check_same(saved: Mapping[str, Any], wanted: Mapping[str, Any], directory: Path) -> None:
    """Refuses one fingerprint where the other is wanted; arrays may be padded in other ways."""
    missing = "nothing"
    differences = [
        f"{name} ({saved.get(name, missing)} there, {wanted.get(name, missing)} here)"
        for name in dict.fromkeys([*wanted, *saved])
        if name not in PADDING and saved.get(name, missing) != wanted.get(name, missing)
    ]
    if differences:
        raise UserError(
            f"the checkpoint in {directory} is of another model, which differs in"
            f" {', '.join(differences)}: give the --model and options it was saved with, or another"
            " --run_dir."
        )


def as_json(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(fingerprint)))
