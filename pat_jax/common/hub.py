"""Turns names of the Hugging Face Hub, `owner/name`, into files of its client's cache.

Knows models, adapters and datasets, and the client, which is imported when a name is looked up.
Does not know what is in the files. An existing path wins over the Hub, unless the name has been
looked up there before: a process, and a resumed run, stay with the commit that they began with.
"""

import errno
import glob
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pat_jax.common.errors import UserError
from pat_jax.common.hub_files import FORMS, by_place, num_shards, wanted_place

_NAME = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(:(?P<part>[\w.+-]+(/[\w.+-]+)?))?"
    r"(@(?P<revision>[\w./-]+))?",
    re.ASCII,
)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_SECONDS = 10  # timeout of the Hub's list of files

# What the user can do, by HTTP status.
_ADVICE: dict[int | None, str] = {
    401: "check HF_TOKEN, or log in anew with `hf auth login`",
    403: "ask its owner for access, and log in with `hf auth login`",
    429: "wait a while, or log in with `hf auth login`: who has done so may ask more often",
    **dict.fromkeys(range(500, 600), "the fault is there: try again later"),
}

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DESCRIPTION = (
    *(_CONFIG, _INDEX, "generation_config.json", "chat_template*", "tokenizer*", "spiece.model"),
    *("vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
)
_USUAL = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_NOT_READ = ("*/*", "*.py", "consolidated*")  # code, and the weights in another form
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")

_Kind = Literal["model", "dataset"]
_commits: dict[tuple[_Kind, str], str] = {}  # of names found on the Hub, as they were given


def commits() -> dict[str, dict[str, str]]:
    """Returns the commit of each name that this process has found on the Hub, by kind and name."""
    found: dict[str, dict[str, str]] = {}
    for (kind, name), commit in _commits.items():
        found.setdefault(kind, {})[name] = commit
    return found


def go_on_with(commits: Mapping[str, Mapping[str, str]]) -> None:
    """Makes this process use the commits that another one got from `commits()`."""
    kinds: tuple[_Kind, ...] = ("model", "dataset")
    for kind in kinds:
        _commits.update({(kind, name): commit for name, commit in commits.get(kind, {}).items()})


def local_checkpoint(name: str, *, option: str = "model", weights: bool = True) -> str:
    """Returns the directory of a model of the Hub in the client's cache, or any other name
    unchanged. Downloads what the cache lacks (without `weights`, only configuration and tokenizer),
    but does not look for a newer version. Raises UserError if a file is neither in the cache nor
    can be downloaded."""
    repo = _repo(name, option, "model")
    if repo is None:
        return name
    described = _whole(repo, _DESCRIPTION, (_CONFIG,), _USUAL)
    if not weights:
        return described
    same = replace(repo, revision=Path(described).name)
    return _whole(same, (*_DESCRIPTION, "*.safetensors"), (_CONFIG, _WEIGHTS))


def is_checkpoint(name: str) -> bool:
    """Returns whether `name` is a directory, or a model of the Hub. Downloads the configuration of
    such a model. Raises UserError as `local_checkpoint` does."""
    return Path(local_checkpoint(name, weights=False)).is_dir()


def local_adapter(name: str, *, option: str = "adapter") -> str:
    """Returns the directory of a PEFT adapter of the Hub in the cache, or any other name unchanged.
    Raises UserError as `local_checkpoint` does."""
    repo = _repo(name, option, "model")
    return name if repo is None else _whole(repo, _ADAPTER, _ADAPTER)


def dataset_files(name: str, option: str, split: str) -> Sequence[Path]:
    """Returns the files of one split of one configuration of a dataset of the Hub, or () for any
    other name. The list of files comes from the Hub, or from the cache if the Hub does not answer.
    `split` applies if `name` has none. Raises UserError if there is no such split, or if its files
    are neither in the cache nor can be downloaded."""
    repo = _repo(name, option, "dataset")
    if repo is None or name.lower().endswith(FORMS):
        return ()
    return _files(repo, split)


@dataclass(frozen=True)
class _Repo:
    given: str
    option: str
    kind: _Kind
    id: str
    part: str
    revision: str | None

    def fetch(self, wanted: Sequence[str], *, is_online: bool = True) -> str:
        """Returns the folder of a snapshot with these files; downloads missing ones if online.
        Raises UserError if that fails."""
        from huggingface_hub import snapshot_download

        try:
            if is_online:
                self._ask()  # has a timeout; the client itself would wait forever
            return snapshot_download(
                self.id,
                repo_type=self.kind,
                revision=self.revision,
                allow_patterns=list(wanted),
                ignore_patterns=list(_NOT_READ) if self.kind == "model" else None,
                local_files_only=not is_online,
            )
        except _client_errors() as error:
            raise self.refusal(error) from None

    def found(self, folder: str) -> str:
        """Records the commit of a snapshot, for later look-ups, and returns its folder."""
        _commits.setdefault((self.kind, self.given), Path(folder).name)
        return folder

    def file_names(self) -> tuple[Sequence[str], bool]:
        """Returns the names of all files, and whether the Hub (not the cache) has listed them.
        Raises UserError if neither has."""
        try:
            return self._ask(), True
        except _client_errors() as error:
            refusal = self.refusal(error)
        try:
            folder = Path(self.fetch((), is_online=False))
        except UserError:
            raise refusal from None
        paths = (path for path in folder.rglob("*") if path.is_file())
        return [path.relative_to(folder).as_posix() for path in paths], False

    def _ask(self) -> Sequence[str]:
        """Asks the Hub for the names of all files, with a timeout."""
        from huggingface_hub import HfApi

        asked: dict[str, Any] = {"repo_type": self.kind, "revision": self.revision}
        info: Any = HfApi().repo_info(self.id, timeout=_SECONDS, **asked)
        return [file.rfilename for file in info.siblings or ()]

    @property
    def download(self) -> str:
        kind = "--repo-type dataset " * (self.kind == "dataset")
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"run `hf download {kind}{self.id}{revision}` where there is a connection"

    def error(self, what: str, advice: str) -> UserError:
        files = "a checkpoint directory" if self.kind == "model" else "files"
        return UserError(
            f"option --{self.option} is {self.given!r}: expected {files} or a {self.kind} of the "
            f"Hugging Face Hub; there is no such path here, and of {self.id!r} there: {what}; {advice}."
        )

    def refusal(self, error: Exception) -> UserError:
        """Returns an error of the client as a UserError, with what the user can do."""
        from huggingface_hub import constants, errors

        page = f"{constants.ENDPOINT}/{'datasets/' * (self.kind == 'dataset')}{self.id}"
        if isinstance(error, errors.GatedRepoError):
            what = "only those get it who have accepted its licence"
            return self.error(what, f"accept it on {page} and log in with `hf auth login`")
        if isinstance(error, errors.RevisionNotFoundError):
            return self.error(f"it has no revision {self.revision!r}", f"see {page}")
        if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
            advice = "check the spelling, or log in with `hf auth login` if it is private"
            return self.error(f"{constants.ENDPOINT} has none of this name", advice)
        disk = error.__cause__ or error
        if isinstance(disk, OSError) and (disk.errno in _NO_ROOM or disk.filename):
            room = "make room, or " * (disk.errno in _NO_ROOM)
            advice = f"{room}name another folder with HF_HOME"
            return self.error(f"{disk.strerror} for {constants.HF_HUB_CACHE}", advice)
        reason = str(error.__cause__ or error).partition("\n")[0] or type(error).__name__
        asked = f"{constants.ENDPOINT} does not give it ({reason})"
        if constants.HF_HUB_OFFLINE:
            asked = "HF_HUB_OFFLINE says to ask nobody"
        advice = _ADVICE.get(_status(error), self.download)
        return self.error(f"not all of it is in the cache, and {asked}", advice)


def _client_errors() -> tuple[type[Exception], ...]:
    """Returns the errors that the client raises if it cannot get something."""
    from huggingface_hub.errors import (
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]
    )

    answers_of_no_hub = KeyError, TypeError, AttributeError  # such as those of a proxy
    return HTTPError, HFValidationError, OSError, ValueError, RuntimeError, *answers_of_no_hub


def _status(error: Exception) -> int | None:
    response = getattr(error.__cause__ or error, "response", None)
    return getattr(response, "status_code", None)


def _repo(name: str, option: str, kind: _Kind) -> _Repo | None:
    """Parses a name of the Hub. Returns None for other names, and if a file has this name."""
    found = _NAME.fullmatch(name)
    commit = _commits.get((kind, name))
    if not found or (found["part"] and kind == "model"):
        return None
    if commit is None and os.path.exists(name):
        return None
    return _Repo(name, option, kind, found["id"], found["part"] or "", commit or found["revision"])


@cache  # the same name is looked up many times
def _whole(
    repo: _Repo, wanted: Sequence[str], needed: Sequence[str], usual: Sequence[str] = ()
) -> str:
    """Returns the folder of a snapshot with all `needed` files. The cache is used if it has them
    and the `usual` files: without these, another program may have downloaded only a part."""

    def lacking(folder: str) -> list[str]:
        files = [part for file in needed for part in _parts(Path(folder), file)]
        return [file for file in files if not Path(folder, file).is_file()]

    kept = None
    with suppress(UserError):
        kept = repo.fetch(wanted, is_online=False)
        if not lacking(kept) and all(Path(kept, file).is_file() for file in usual):
            return repo.found(kept)
    try:
        folder = repo.fetch(wanted)
    except UserError:
        if kept is None or lacking(kept):
            raise
        return repo.found(kept)  # the model may have no more files
    if lacks := lacking(folder):
        advice = f"choose one that has it, or, if the cache alone lacks it, {repo.download}"
        raise repo.error(f"it has no {lacks[0]}", advice)
    return repo.found(folder)


@cache
def _files(repo: _Repo, split: str) -> Sequence[Path]:
    names, is_online = repo.file_names()
    found = by_place(names)
    place = wanted_place(repo.part, split, {config for config, _ in found})
    if place not in found:
        there = ", ".join(map("/".join, sorted(found))) or f"no file of {', '.join(FORMS)}"
        advice = f"name one, as {repo.id}:{'/'.join(min(found))}" if found else "choose another"
        if not is_online:
            there = f"{there} in the cache"
            advice = f"{advice}, or {repo.download}"
        raise repo.error(f"it has {there}, and not {'/'.join(place)}", advice)
    files = found[place]
    if not is_online and num_shards(files[0]) > len(files):
        raise repo.error("not all of it is in the cache", repo.download)
    folder = repo.found(repo.fetch([glob.escape(file) for file in files], is_online=is_online))
    return tuple(Path(folder, file) for file in files)


def _parts(folder: Path, file: str) -> Sequence[str]:
    """Returns the files that `file` stands for: the shards in an index of weights, or itself."""
    if file != _WEIGHTS or not (folder / _INDEX).is_file():
        return (file,)
    index = (folder / _INDEX).read_text(encoding="utf-8", errors="replace")
    return sorted(set(re.findall(r'"([^"/]+\.safetensors)"', index)))
