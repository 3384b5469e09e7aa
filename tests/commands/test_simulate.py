"""The simulate command: questions in, tables and JSON out, and one sentence for every mistake."""

import json
from functools import partial
from pathlib import Path

import pytest
from fakes import SPLITS
from profiles import save_profile

from pat_jax import simulate

OPTIONS = ["--responses", "32,64", "--max_completion_length", "128"]
OPTIONS += ["--num_generations", "4", "--prompt-tokens", "16"]


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> Path:
    return save_profile(tmp_path_factory.mktemp("profile") / "made-up.json")


@pytest.fixture
def command(in_process):
    return partial(in_process, simulate.main)


def test_every_question_is_answered(command, profile: Path, tmp_path: Path):
    out = tmp_path / "deep" / "answers.json"
    printed = command(
        *("--profile", str(profile), "--lengths", "reasoning", "--out", str(out)),
        *("--length_scale", "0.01", "--host-us", "0,1000"),
        *OPTIONS,
    )
    found = json.loads(out.read_text())
    assert len(found["answers"]) == 4 and found["costs"]["subject"]["device_kind"] == "made up"
    by_question = {}
    for answer in found["answers"]:
        asked = answer["what_if"]
        assert answer["best_static"] in [str(split) for split in SPLITS]
        best = min(s["mean_s"] for s in answer["systems"][1:])
        gain = 1 - answer["systems"][0]["mean_s"] / best
        assert answer["gain_over_best_static"] == pytest.approx(gain)
        key = asked["responses"], asked["host_us"]
        by_question[key] = {s["name"]: s["mean_s"] for s in answer["systems"]}
    for n in (32, 64):
        for name, seconds in by_question[n, 0].items():
            assert seconds < by_question[n, 1000][name]
    assert "64 responses, cap 128, host +1000 us a sequence" in printed
    assert "costs: profile" in printed and "8 x made up" in printed
    assert "extrapolated, for nothing like it was measured: dp4tp2 beyond 8 rows" in printed


def test_rollouts_follow_one_another(command, profile: Path, tmp_path: Path):
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("output_tokens\n" + "\n".join(map(str, range(8, 40))))
    out = tmp_path / "answers.json"
    printed = command(
        *("--profile", str(profile), "--lengths", str(lengths), "--out", str(out)),
        *("--rollouts", "3", *OPTIONS, "--responses", "64"),
    )
    (answer,) = json.loads(out.read_text())["answers"]
    assert len(set(answer["tokens"])) == 3  # other responses in each
    assert len(answer["systems"][0]["total_s"]) == 3 and "rollout  tokens" in printed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--profile", ""], "option --profile is ''"),
        (["--profile", "none.json"], "profile none.json: cannot be read"),
        (["--lengths", "nothing"], "option --lengths is 'nothing'"),
        (["--responses", "12,many"], "option --responses is '12,many'"),
        (["--host_us", "-1"], "option --host_us is '-1'"),
        (["--link_slowdown", "4"], "option --link_slowdown is not offered: plan a machine"),
        (["--trace", "rollout.json"], "option --trace is not offered: run.html shows"),
        (["--correlation", "1"], "option --correlation is 1.0"),
        (["--device-memory-gib", "1e-6"], "no layout fits"),
        (["--max_completion_length", "128,100000"], "is 16 + 100000 = 100016: expected at most"),
        (["--out", "/proc/nothing/x.json"], "option --out is '/proc/nothing/x.json'"),
    ],
)
def test_every_mistake_is_one_sentence(command, refused, profile, options, words):
    assert words in refused(lambda: command("--profile", str(profile), *OPTIONS, *options))


@pytest.fixture(scope="module")
def drafting(tmp_path_factory) -> Path:
    return save_profile(tmp_path_factory.mktemp("verifying") / "made-up.json", {3: 1.06, 7: 1.15})


class TestDrafts:
    """Of a profile with steps that verify them."""

    asked = (*OPTIONS, "--lengths", "reasoning", "--length_scale", "0.01")

    def test_they_are_replayed_where_their_steps_were_measured(self, command, drafting, tmp_path):
        out = tmp_path / "answers.json"
        printed = command("--profile", str(drafting), "--out", str(out), *self.asked)
        assert "with drafts s  tokens a step" in printed
        assert "Drafts are right as often as built in: counted on 1,261 responses" in printed
        assert "from own text, siblings" in printed
        found = json.loads(out.read_text())
        for one in found["answers"]:
            assert one["what_if"]["speculation"]["num_draft_tokens"] == [3, 7]
            names = [system["name"] for system in one["systems"]]
            assert names[:2] == ["adaptive", "adaptive, drafts"]
            plain, drafts = one["systems"][:2]
            assert drafts["tokens_per_step"][0] > 1.5 and drafts["mean_s"] < plain["mean_s"]
        assert "built in" in found["drafts"][0]

    def test_a_profile_without_them_says_so(self, command, profile: Path, capsys):
        printed = command("--profile", str(profile), *self.asked)
        assert "The profile has no steps that verify drafts: none are made." in printed
        with pytest.raises(SystemExit):
            command("--profile", str(profile), "--speculation.source", "suffix", *self.asked)
        output = "has no steps that verify drafts of --speculation.num_draft_tokens (1 3 7)"
        assert output in capsys.readouterr().err
