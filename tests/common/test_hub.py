"""Names of the Hub, asked of one on this machine by the client itself, in its own processes."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pat_jax.common.errors import UserError
from pat_jax.common.hub import dataset_files, local_checkpoint
from pat_jax.common.hub_files import by_place
from tests.hub_server import SHA, Hub, serving

NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9"}
OFFLINE = {"HF_HUB_OFFLINE": "1"}
MODEL = "hub.local_checkpoint('owner/tiny')"
DATA = "[str(x) for x in hub.dataset_files('owner/sums', 'data', 'train')]"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    files = {
        "owner/tiny": ("config.json", "model.safetensors", "tokenizer.json", "modeling_tiny.py"),
        "owner/pickled": ("config.json", "pytorch_model.bin"),
        "owner/other": ("model.onnx",),
        "owner/gated": ("config.json",),
        "owner/adapter": ("adapter_config.json", "adapter_model.safetensors"),
        "owner/sharded": (
            "config.json",
            *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        ),
        "datasets/owner/sums": (
            *("main/train-00000-of-00002.json", "main/train-00001-of-00002.json"),
            *("main/test-00000-of-00001.json", "more/train.json", "dataset_infos.json"),
        ),
        "datasets/owner/pictures": ("a.png",),
        "datasets/owner/gated": ("train.jsonl",),
    }
    for repository, names in files.items():
        for name in (*names, "README.md", "original/model.safetensors"):
            path = tmp_path / "hub" / repository / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    index = tmp_path / "hub/owner/sharded/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": files["owner/sharded"][1]}}))
    with serving(tmp_path / "hub") as found:
        found.gated |= {"owner/gated", "datasets/owner/gated"}
        yield found


def test_a_model_is_downloaded_once_and_found_without_a_connection(hub: Hub, tmp_path: Path):
    cache = tmp_path / "cache"
    (name,) = hub.ask(cache, MODEL)
    folder = Path(name)
    wanted = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in folder.iterdir()) == wanted == sorted(hub.served)
    assert (folder / "tokenizer.json").read_text() == "tokenizer.json"
    for env in (OFFLINE, {}):
        pinned = MODEL.replace("tiny", f"tiny@{SHA}")
        assert hub.ask(cache, MODEL, pinned, **env) == [name, name]
    assert len(hub.served) == len(wanted)


def test_what_is_planned_alone_needs_no_weights(hub: Hub, tmp_path: Path):
    cache = tmp_path / "cache"
    described = hub.ask(cache, "hub.local_checkpoint('owner/tiny', weights=False)")
    assert sorted(hub.served) == ["config.json", "tokenizer.json"]
    command = f"run `hf download owner/tiny --revision {SHA}` where there is"
    assert command in hub.ask(cache, MODEL, **OFFLINE)[0]
    assert hub.ask(cache, MODEL) == described
    assert hub.served.count("config.json") == 1 and "model.safetensors" in hub.served


def test_every_shard_is_there(hub: Hub, tmp_path: Path):
    cache, asked = tmp_path / "cache", "hub.local_checkpoint('owner/sharded@main')"
    (folder,) = hub.ask(cache, asked)
    assert len(list(Path(folder).glob("*.safetensors"))) == 2
    Path(folder, "model-00001-of-00002.safetensors").unlink()
    (output,) = hub.ask(cache, asked, **OFFLINE)
    assert f"run `hf download owner/sharded --revision {SHA}` where" in output
    assert hub.ask(cache, asked) == [folder]


def test_an_adapter(hub: Hub, tmp_path: Path):
    asked = "hub.local_adapter('owner/adapter')", "hub.local_adapter('owner/tiny')"
    found, refusal = hub.ask(tmp_path / "cache", *asked)
    assert len(list(Path(found).iterdir())) == 2
    assert "option --adapter is 'owner/tiny'" in refusal
    assert "it has no adapter_config.json" in refusal


def test_files_of_a_dataset(hub: Hub, tmp_path: Path):
    cache = tmp_path / "cache"
    folder = cache / f"datasets--owner--sums/snapshots/{SHA}"
    train = [str(folder / f"main/train-0000{i}-of-00002.json") for i in (0, 1)]
    assert hub.ask(cache, DATA) == [str(train)]
    assert len(hub.served) == 2
    assert hub.ask(cache, DATA, **NOWHERE) == [str(train)]
    more, test = hub.ask(cache, *(DATA.replace("sums", f"sums:{x}") for x in ("more", "test")))
    assert more == str([str(folder / "more/train.json")])
    assert test == str([str(folder / "main/test-00000-of-00001.json")])
    Path(train[1]).unlink()
    halved, absent = hub.ask(cache, DATA, DATA.replace("sums", "sums:dev"), **OFFLINE)
    assert "not all of it is in the cache; run `hf download --repo-type dataset" in halved
    assert "it has main/test, main/train, more/train in the cache, and not main/dev" in absent
    assert "or run `hf download --repo-type dataset owner/sums`" in absent


def test_what_the_hub_does_not_have(hub: Hub, tmp_path: Path):
    """One sentence each, which says what to do."""
    cases = [
        (MODEL.replace("tiny", "tinny"), ["has none of this name; check the spelling"]),
        (DATA.replace("sums", "suns"), ["has none of this name; check the spelling"]),
        (MODEL.replace("tiny", "tiny@v2"), ["it has no revision 'v2'"]),
        (MODEL.replace("tiny", "pickled"), ["it has no model.safetensors; choose one"]),
        (MODEL.replace("tiny", "other"), ["it has no config.json; choose one"]),
        (DATA.replace("sums", "pictures"), ["it has no file of .parquet", "choose another"]),
        (
            DATA.replace("sums", "sums:more/test"),
            ["it has main/test, main/train, more/train, and not more/test", "owner/sums:main/test"],
        ),
        (MODEL.replace("tiny", "gated"), [f"accept it on {hub.endpoint}/owner/gated and log in"]),
        (DATA.replace("sums", "gated"), [f"{hub.endpoint}/datasets/owner/gated and log in with"]),
    ]
    answers = hub.ask(tmp_path / "cache", *(asked for asked, _ in cases))
    for output, (_, words) in zip(answers, cases, strict=True):
        assert output.startswith("error: option --")
        for word in words:
            assert word in output


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (OFFLINE, ["HF_HUB_OFFLINE says to ask nobody"]),
        (NOWHERE, ["http://127.0.0.1:9 does not give it", "refused"]),
    ],
)
def test_no_connection(hub: Hub, tmp_path: Path, env: dict[str, str], words: list[str]):
    model, data = hub.ask(tmp_path / "cache", MODEL, DATA, **env)
    assert "run `hf download owner/tiny` where there is a connection" in model
    assert "run `hf download --repo-type dataset owner/sums` where" in data
    for output in (model, data):
        assert output.startswith("error: option --") and all(word in output for word in words)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ((errno.ENOSPC, "No space left on device"), "No space left on device for .*; make room"),
        ((errno.EACCES, "Permission denied", "a"), "Permission denied for .*; name another folder"),
    ],
)
def test_a_cache_that_takes_nothing(monkeypatch, error: tuple[int, str], words: str):
    def full(*args, **options):
        raise OSError(*error)

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", full)
    with pytest.raises(UserError, match=words):
        local_checkpoint("owner/large")


def test_what_the_status_of_an_answer_means(hub: Hub, tmp_path: Path):
    meanings = {
        401: "check HF_TOKEN, or log in anew",
        403: "ask its owner for access",
        429: "wait a while, or log in with",
        500: "the fault is there: try again later",
    }
    for status in meanings:
        hub.answers[f"owner/{status}"] = hub.answers[f"datasets/owner/{status}"] = (status, b"")
    asked = [
        name.replace(old, str(x))
        for x in meanings
        for name, old in ((MODEL, "tiny"), (DATA, "sums"))
    ]
    answers = iter(hub.ask(tmp_path / "cache", *asked))
    for words in meanings.values():
        for output in (next(answers), next(answers)):
            assert output.startswith("error: option --") and words in output


@pytest.mark.parametrize("content", [b"[]", b"<html>log in</html>"])
def test_an_answer_that_is_no_hubs(hub: Hub, tmp_path: Path, content: bytes):
    """Such as that of a proxy to log in at."""
    hub.answers["owner/tiny"] = hub.answers["datasets/owner/sums"] = (200, content)
    for output in hub.ask(tmp_path / "cache", MODEL, DATA):
        assert (
            f"and {hub.endpoint} does not give it (" in output and "; run `hf download " in output
        )


def test_a_hub_that_is_silent(hub: Hub, tmp_path: Path):
    hub.answers["owner/tiny"] = None
    patience = "[setattr(hub, '_SECONDS', 0.5)]"
    _, output = hub.ask(tmp_path / "cache", patience, MODEL)
    assert f"{hub.endpoint} does not give it (" in output and "timed out" in output


def test_a_path_wins_and_other_names_are_no_names_of_the_hub(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/here").mkdir(parents=True)
    for name in ("owner/here", "demo", "/absent/tiny", "./a/b", "a/b/c", "a/b:c", "", "../a"):
        assert local_checkpoint(name) == name
    for name in ("owner/here", "arithmetic", "data/absent.jsonl", "data/a.parquet", "a/b/c.json"):
        assert dataset_files(name, "data", "train") == ()


def test_a_folder_made_since_takes_no_place_of_a_name(hub: Hub, tmp_path: Path):
    """In this process, and in one that goes on with what this one has found."""
    cache, made = tmp_path / "cache", tmp_path / "cache/owner/tiny"
    (name,) = hub.ask(cache, MODEL)
    (data,) = hub.ask(cache, DATA)
    names = [str(cache / name) for name in ("owner/tiny", "owner/sums")]
    make = (
        f"[hub.os.chdir({str(cache)!r}), *map(lambda x: hub.os.makedirs(x, 0o777, True), {names})]"
    )
    found = hub.ask(cache, MODEL, DATA, make, MODEL, DATA, "hub.commits()")
    assert made.is_dir() and found[:2] == found[3:5] == [name, data]
    assert found[5] == str({"model": {"owner/tiny": SHA}, "dataset": {"owner/sums": SHA}})
    begun = f"hub.go_on_with({found[5]})"
    assert hub.ask(cache, make, begun, MODEL, DATA)[2:] == [name, data]
    assert hub.ask(cache, make, MODEL, DATA)[1:] == ["owner/tiny", "[]"]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("main/train-00000-of-00001.parquet", ("main", "train")),
        ("data/train_sft-00000-of-00003-a1b2c3.parquet", ("default", "train_sft")),
        ("data/dapo-math-17k.parquet", ("default", "train")),
        ("en/dev.json", ("en", "validation")),
        ("train/0001.parquet", ("default", "train")),
        ("aime_2025_test.jsonl", ("default", "test")),
    ],
)
def test_where_a_file_belongs(name: str, place: tuple[str, str]):
    assert by_place(["README.md", name, "dataset_infos.json"]) == {place: [name]}


def test_one_form_of_a_dataset_is_read_and_what_says_no_split_left_out():
    assert by_place(["a.jsonl", "a.parquet", "a.json"]) == {("default", "train"): ["a.parquet"]}
    found = by_place(["train.jsonl", "eval.jsonl", "unsaid.jsonl"])
    assert found == {("default", "train"): ["train.jsonl"], ("default", "test"): ["eval.jsonl"]}
