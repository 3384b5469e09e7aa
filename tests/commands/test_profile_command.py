"""The profile command: it measures, goes on where it was, and `train` plans by what it wrote."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest
from profiles import save_profile
from runs import TINY, finish, run, start

from pat_jax import profile as command
from pat_jax.commands import profile as body
from pat_jax.common.errors import UserError
from pat_jax.common.run_command import run_command
from pat_jax.config.command_line import parse
from pat_jax.profiling.measure.config import ProfileConfig
from pat_jax.run.start.setup import model_config

COMMAND = ("-m", "pat_jax.profile")


def profile(*options: str) -> str:
    runs = ("--runs", "6")  # so small a model's times are mostly noise
    return finish(start(*TINY, *runs, *options, program=COMMAND))


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("profiles") / "deep" / "tiny.json"
    return path, profile("--out", str(path))


@pytest.mark.slow  # measures; its parts are tested in tests/profiling
def test_it_prints_tables_and_draws_a_picture(measured: tuple[Path, str]):
    path, output = measured
    for words in ("decode, ms a step", "dp2tp1 -> dp1tp2", f"profile {path}"):
        assert words in output
    assert path.with_suffix(".svg").read_text().startswith("<svg ")
    content = json.loads(path.read_text())
    assert content["subject"]["backend"] == "cpu" and content["subject"]["num_devices"] == 2


@pytest.mark.slow  # measures three times
def test_only_what_is_missing_is_measured(measured: tuple[Path, str], tmp_path: Path):
    content = json.loads(measured[0].read_text())
    table = content["latency"]["decode_table"]
    missing, kept = table[0][0], table[1]
    kept[1] *= 1.5  # no measurement gives this again to the last bit
    content["latency"]["decode_table"] = table[1:]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    profile("--out", str(path))
    again = json.loads(path.read_text())
    assert kept in again["latency"]["decode_table"]
    assert missing in [key for key, _ in again["latency"]["decode_table"]]
    assert again["latency"]["migrate_table"] == content["latency"]["migrate_table"]
    profile("--out", str(path), "--remeasure")
    assert kept not in json.loads(path.read_text())["latency"]["decode_table"]


@pytest.mark.slow  # compiles a trainer and an engine
def test_training_plans_by_it(measured: tuple[Path, str], tmp_path: Path):
    """As it is, but for what takes longer or shorter now."""
    content = json.loads(measured[0].read_text())
    for entry in content["latency"]["reshard_table"]:
        entry[1] += 100.0  # of a machine on which nobody could want to switch
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    run(*TINY, "--profile", str(path), "--steps", "1", "--run_dir", str(tmp_path / "run"))
    used = json.loads((tmp_path / "run" / "profile.json").read_text())["latency"]
    for table in ("decode_table", "prefill_table", "migrate_table"):
        keys, expected = ([key for key, _ in x[table]] for x in (used, content["latency"]))
        assert keys == expected
    assert all(seconds < 10 for _, seconds in used["reshard_table"])
    printed = "profile: reshard_table of dp2tp1 to dp1tp2 takes 0.0"
    assert printed in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.slow  # compiles two engines
def test_shards_go_on_where_they_were_stopped(monkeypatch, tmp_path: Path):
    path = tmp_path / "shards.json"
    options = ["profile", *TINY, "--out", str(path), "--runs", "6"]
    shards = [*options, "--shards", "h100:2"]
    monkeypatch.setattr(sys, "argv", shards)
    monkeypatch.setattr(body, "configure", lambda count: jax.devices()[:2])
    monkeypatch.setattr(body, "SAVE_EVERY_S", 0.0)
    counting = body.counting

    @contextmanager
    def stopped(what: str, *, disable: bool) -> Iterator[Callable[[int, int], None]]:
        with counting(what, disable=disable) as show:

            def stop(done: int, total: int) -> None:
                show(done, total)
                if done > total // 2:
                    raise KeyboardInterrupt

            yield stop

    monkeypatch.setattr(body, "counting", stopped)
    with pytest.raises(KeyboardInterrupt):
        command.main()
    before = json.loads(path.read_text())
    monkeypatch.setattr(body, "counting", counting)
    command.main()
    after = json.loads(path.read_text())
    kept, whole = (content["latency"]["decode_table"] for content in (before, after))
    assert 0 < len(kept) < len(whole) and all(entry in whole for entry in kept)
    for other in ([*shards, "--shards", "a100:2"], options):  # another target, whole devices
        monkeypatch.setattr(sys, "argv", other)
        with pytest.raises(UserError, match=r"the shards of h100:2 measured there, .*--remeasure"):
            command.main()
    assert json.loads(path.read_text()) == after


@pytest.fixture
def printed(monkeypatch, refused) -> Callable[..., str]:
    """The sentence that the command refuses with, in this process."""

    def call(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["profile", *TINY, *options])
        monkeypatch.setattr(body, "configure", lambda count: jax.devices()[:count])
        return refused(lambda: run_command(command.main))

    return call


def test_shards_of_what_nobody_knows_are_refused(printed):
    message = printed("--shards", "h1000:8")
    assert "h1000" in message and "expected one of" in message


@pytest.mark.parametrize("shards", [[], ["--shards", "h100:2"]], ids=str)
def test_lengths_that_the_model_is_not_for_are_not_measured(printed, shards: list[str]):
    lengths = ["--rollout.max_prompt_length", "96", "--rollout.max_completion_length", "4001"]
    message = printed(*shards, *lengths)
    assert "max_completion_length is 96 + 4001 = 4097: expected at most the 4096" in message


@pytest.mark.parametrize(
    ("out", "problem"), [("file/profile.json", "File exists: "), (".", "it is no file")]
)
def test_a_place_that_cannot_be_written_is_refused_before_measuring(
    printed, tmp_path: Path, out: str, problem: str
):
    (tmp_path / "file").write_text("")
    path = tmp_path / out
    message = printed("--out", str(path))
    assert f"profile {path} cannot be written (" in message and problem in message


def test_a_profile_of_another_model_is_refused(tmp_path: Path):
    profile = str(save_profile(tmp_path / "profile.json"))
    options = ("--profile", profile, "--model", "demo", "--run_dir", str(tmp_path / "run"))
    output = run(*TINY, *options, code=2)
    assert "of something else: " in output and "model.embed_dim (32 there, " in output
    assert output.count("\n") == 1 and not (tmp_path / "run").exists()


def test_a_published_shape_is_measured_with_its_own_vocabulary_and_without_data():
    options = ["--preset", "qwen3-8b", "--model", "qwen3-8b"]
    config = parse(options, ProfileConfig)
    assert model_config(config.task, config.layout_choice, jax.devices()).vocab_size == 151_936
    with pytest.raises(UserError, match=r"--data\.files is ''"):
        parse(options)
