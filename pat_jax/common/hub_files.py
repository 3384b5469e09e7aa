"""Finds the files of one split of one configuration in a dataset of the Hub, by their names:

    main/train-00000-of-00001.parquet    configuration main, split train
    data/test.jsonl, test/a.jsonl        default, test
    problems.json                        default, train

Knows names only: configurations that a README.md defines are not read.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePosixPath

# If a dataset has several formats, the first of these is read.
FORMS = (".parquet", ".jsonl", ".ndjson", ".json")
MAIN = ("default", "main")  # configurations that need no name
_NO_DATA = re.compile(r"(dataset_infos?|dataset_dict|state|metadata)\.json")
_SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
_SPLITS |= {"eval": "test", "evaluation": "test"}
_SPLITS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
_SHARD = re.compile(r"[-_.]?(\d+-of-0*(\d+)(-[0-9a-f]+)?|\d+)$")

Place = tuple[str, str]  # a configuration and a split


def by_place(names: Sequence[str]) -> dict[Place, list[str]]:
    """Returns the data files of each configuration and split, sorted."""
    data = [name for name in sorted(names) if not _NO_DATA.fullmatch(PurePosixPath(name).name)]
    forms = ([name for name in data if name.lower().endswith(form)] for form in FORMS)
    found: dict[Place, list[str]] = defaultdict(list)
    for name in next(filter(None, forms), ()):
        found[_place(name)].append(name)
    # Files without a split in their name are for training, unless others in their configuration
    # have one: then they are left out.
    named = {config for config, split in found if split}
    return {
        (config, split or "train"): files
        for (config, split), files in found.items()
        if split or config not in named
    }


def wanted_place(part: str, split: str, configs: set[str]) -> Place:
    """Returns the configuration and split that `part` names: a configuration, a split, both as
    `config/split`, or "". `split` is the default split; `configs` are those that exist."""
    first, _, second = part.partition("/")
    if not second and first not in configs:
        first, second = "", first
    return first or next((one for one in MAIN if one in configs), MAIN[0]), second or split


def num_shards(name: str) -> int:
    """Returns the number of shards that a file's name has: 4 for `train-00000-of-00004`, else 1."""
    found = _SHARD.search(PurePosixPath(name).stem)
    return int(found[2]) if found and found[2] else 1


def _place(name: str) -> Place:
    *folders, last = PurePosixPath(name).parts
    stem = _SHARD.sub("", PurePosixPath(last).stem)
    config = folders[0] if folders and folders[0] not in {"data", *_SPLITS} else MAIN[0]
    if "-of-" in last:  # `push_to_hub` begins file names with the split, which may be any word
        return config, stem
    words = map(str.lower, [*folders, *re.split(r"[^A-Za-z]+", stem)])
    return config, next((_SPLITS[word] for word in words if word in _SPLITS), "")
