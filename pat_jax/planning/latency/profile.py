"""A profile in a file: measured times, with the machine and the model that were measured.

Knows the file and its checks. Does not know how anything is measured (`profiling`).
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from pat_jax.common.errors import UserError, shortened, shown
from pat_jax.common.files import replace_text
from pat_jax.common.json_text import parse_json
from pat_jax.planning.latency.model import DRAFTS_FROM, READS, ROUNDS, SHAPE, TABLES, LatencyModel
from pat_jax.planning.types import Reads, Split

VERSION = 3
# A larger bucket may be quicker than a smaller one, by another kernel or by noise. If it takes less
# than this share of the smaller one's time, the entry is wrong.
LEAST_SHARE = 0.25
MOST_S, MOST_SIZE = 1e6, 2**31 - 1  # no program takes so long, nor so many rows or tokens
KEYS: dict[str, tuple[int, int, tuple[str, ...]]] = {  # numbers of layouts and sizes; last words
    "decode_table": (1, 2, ()),
    "reshard_table": (2, 0, ()),
    "migrate_table": (2, 0, ROUNDS),
    "prefill_table": (1, 1, ()),
    "verify_table": (1, 3, ()),
}


class ProfileError(UserError):
    """A profile that cannot be used, and why."""

    def __init__(self, path: Path, problem: str):
        super().__init__(
            f"profile {path}: {problem}; measure it again with python -m pat_jax.profile "
            f"--remeasure --out {path}, or leave it out."
        )


@dataclass(frozen=True)
class Subject:
    """The machine, model and versions that a profile was measured with, and is valid for."""

    backend: str  # cpu, gpu or tpu
    device_kind: str
    num_devices: int
    model: Mapping[str, Any]  # the fields of its configuration
    dtype: str
    jax: str  # version
    weights: str = "auto"  # type of the rollout's weights: int8, fp8, or auto for `dtype`

    @property
    def file_name(self) -> str:
        """The name of the profile's file: equal for equal subjects, different for others."""
        told = _flat(self)
        if self.weights == "auto":
            del told["weights"]  # as in the names of files from before there was a choice
        content = json.dumps(told, sort_keys=True).encode()
        kind = "".join(c if c.isalnum() else "-" for c in self.device_kind.lower())
        return f"{kind}-x{self.num_devices}-{hashlib.sha256(content).hexdigest()[:12]}.json"

    def differences(self, other: "Subject") -> list[str]:
        """Returns the fields that differ, the value of `other` as "there" and that of this one as
        "here". For example "device_kind (NVIDIA H100 there, NVIDIA H200 here)"."""
        here, there = _flat(self), _flat(other)
        return [
            f"{name} ({there.get(name, 'nothing')} there, {here.get(name, 'nothing')} here)"
            for name in sorted(here.keys() | there.keys())
            if here.get(name) != there.get(name)
        ]


def _flat(subject: Subject) -> dict[str, Any]:
    plain = json.loads(json.dumps(asdict(subject)))  # tuples read back as lists
    return {**{f"model.{k}": v for k, v in plain.pop("model").items()}, **plain}


@dataclass(frozen=True)
class Profile:
    """The measured times of one machine and model, in seconds."""

    subject: Subject
    latency: LatencyModel
    # If one device was measured and its links computed: the target, such as "h100:8".
    shards_of: str = ""

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "version": VERSION,
            "subject": asdict(self.subject),
            "latency": self.latency.to_json(),
            **({"shards_of": self.shards_of} if self.shards_of else {}),
        }
        replace_text(path, json.dumps(content, indent=1))


def read_profile(path: Path, subject: Subject | None = None) -> Profile:
    """Reads the profile in `path`. Raises ProfileError if the file cannot be read, is of another
    version, or not of the given `subject`, or holds times that no machine takes."""
    content = _read(path)
    try:
        found = Subject(**content["subject"])
        latency = LatencyModel.from_json(content["latency"])
        differences = (subject or found).differences(found)  # fails if `found` is damaged
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileError(path, f"not as this version writes it ({error!r})") from None
    if differences:
        raise ProfileError(path, f"of something else: {', '.join(differences)}")
    for problem in _problems(latency):
        raise ProfileError(path, problem)
    return Profile(found, latency, str(content.get("shards_of", "")))


def _read(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():
        raise ProfileError(path, "no file")
    try:
        content: Any = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(path, f"cannot be read ({error.strerror})") from None
    except ValueError as error:  # JSON's and Unicode's are of this kind
        raise ProfileError(path, f"truncated or no JSON ({error})") from None
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise ProfileError(path, f"field version is {shown(version)}, expected {VERSION}")
    return content


def _problems(latency: LatencyModel) -> Iterable[str]:
    for name in TABLES:
        num_layouts, num_sizes, words = KEYS[name]
        for key, seconds in getattr(latency, name).items():
            if not _is_key(key, num_layouts, num_sizes, words):
                yield (
                    f"field {name} has an entry {_words(key)}, expected {num_layouts} layouts "
                    f"and {num_sizes} sizes of at least 1{' and a word of ' * bool(words)}{', '.join(words)}"
                )
            if not (isinstance(seconds, int | float) and 0 < seconds <= MOST_S):
                yield (
                    f"field {name}, entry {_words(key)}, is {shown(seconds)}, expected a positive "
                    "number of seconds"
                )
    if latency.reads not in get_args(Reads):
        yield f"field {READS} is {latency.reads!r}, expected one of {', '.join(get_args(Reads))}"
    if not isinstance(latency.drafts_from, str):
        yield f"field {DRAFTS_FROM} is {shown(latency.drafts_from)}, expected a text"
    for name in SHAPE:
        if not _is_count(size := getattr(latency, name)):
            yield f"field {name} is {shown(size)}, expected an integer of at least 1"
    yield from _drops("decode_table", latency.decode_table)
    yield from _drops("prefill_table", latency.prefill_table)


def _is_key(key: tuple, num_layouts: int, num_sizes: int, words: tuple[str, ...]) -> bool:
    layouts = key[:num_layouts]
    sizes = key[num_layouts : num_layouts + num_sizes]
    word = key[num_layouts + num_sizes :]
    return (
        all(isinstance(layout, Split) and all(map(_is_count, layout)) for layout in layouts)
        and (len(layouts), len(sizes)) == (num_layouts, num_sizes)
        and all(map(_is_count, sizes))
        and (len(word) == 1 and word[0] in words if words else not word)
    )


def _is_count(size: object) -> bool:
    return isinstance(size, int) and 1 <= size <= MOST_SIZE


def _drops(name: str, table: Mapping[tuple, float]) -> Iterable[str]:
    """Yields a message for each entry where more rows, or a larger length, take far less time."""
    lines: dict[tuple, list[tuple]] = defaultdict(list)  # keys that differ in one size
    for key in table:
        for i in range(1, len(key)):
            lines[i, key[:i], key[i + 1 :]].append(key)
    for line in lines.values():
        slowest = 0.0
        for key in sorted(line):
            if table[key] < LEAST_SHARE * slowest:
                yield (
                    f"field {name}, entry {_words(key)}, is {table[key]} s, expected at least "
                    f"{LEAST_SHARE} of the {slowest} s of a smaller one"
                )
            slowest = max(slowest, table[key])


def _words(key: object) -> str:
    parts = key if isinstance(key, tuple) else (key,)
    words = (shortened(str(part)) if isinstance(part, Split) else shown(part) for part in parts)
    return shortened(" ".join(words))  # of a text, a part is a character
