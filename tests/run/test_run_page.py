"""The page of a run: what it shows of the files in a folder, whatever is in them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from pages import charts_of, parsed, words_of
from run_pages import row, write_run
from traces import TRACE

from pat_jax.run.logging.metrics import MetricsWriter
from pat_jax.run.logging.page.curves import thinned
from pat_jax.run.logging.page.run_page import PAGE_FILE, RunPage, run_page
from pat_jax.run.logging.rollout_files import read_rollouts
from pat_jax.run.logging.samples import Sample


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def seen_in(folder: Path) -> str:
    return words_of(parsed(run_page(folder)))


def test_tiles_are_what_a_person_looks_at_first(folder: Path):
    told = seen_in(folder)
    for words in (
        "model demo; data arithmetic; step 4 of 9",
        "0.250 → 0.500 held-out reward before and after step 4, ± 0.125 (95 %)",
        "2,000 tokens/s of rollout",
        "50.0 % of the steps' time is rollout",
        "2.5 s saved by switches of layout: 2, as predicted, less what they took",
    ):
        assert words in told


def test_a_run_that_learns_from_pairs_shows_what_it_learns_of_them_and_no_responses(tmp_path: Path):
    names = ["loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "reward_mean"]
    (tmp_path / "config.yaml").write_text("{steps: 0, epochs: 3.0}")
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(0, {f"eval/{name}": 0.5 for name in names})
        more = {"train/entropy": 1.0, "train/chosen_logprob": -3.0, "train/dead_experts": 0.0}
        more |= {"train/route_flips": 0.0, "progress/epoch": 0.25}
        metrics.write(1, {f"train/{name}": 0.25 for name in names} | more)
    page = parsed(run_page(tmp_path))
    assert "step 1, epoch 0.25 of 3." in words_of(page)
    titles = [title.text for title in page.iter("h2")]
    assert titles == ["Learning", "Rewards", "Optimization"]
    charts = charts_of(page)
    assert not any("/" in title for title in charts)  # titles of other metrics
    drawn = {line["name"] for lines in charts.values() for line in lines}
    assert drawn >= {f"{of}/{name}" for of in ("train", "eval") for name in names}
    assert "train/chosen_logprob" in drawn and "train/route_flips" not in drawn


def points(line: dict) -> dict[float, float | None]:
    return dict(zip(line["x"], line["y"], strict=True))


def test_a_mean_of_nothing_is_a_gap_in_its_curve(folder: Path):
    charts = charts_of(parsed(run_page(folder)))
    reward, heldout = charts["reward"]
    assert points(reward) == {1: 0.125, 2: 0.25, 3: None, 4: 0.5}  # step 3 has none
    assert points(heldout) == {0: 0.25, 4: 0.5} and heldout["half"] == [0.125, 0.125]
    assert {line["name"]: line["y"][2] for line in charts["length of a response, tokens"]} == {
        "rollout/length_p50": None,
        "rollout/length_max": 100,
    }
    assert not any("KL" in title for title in charts)  # it never left 0


def test_each_function_file_and_k_has_a_curve_and_no_metric_is_left_out(folder: Path):
    names = {"reward/math/mean", "reward/brevity/mean", "eval/hard/reward", "eval/hard/pass@8"}
    with MetricsWriter(folder) as metrics:
        metrics.write(4, dict.fromkeys([*names, "eval/pass@8", "reward/math/parsed"], 0.5))
    charts = charts_of(parsed(run_page(folder)))
    drawn = {title: [line["name"] for line in lines] for title, lines in charts.items()}
    assert {*drawn["reward of each function"]} == {"reward/math/mean", "reward/brevity/mean"}
    assert drawn["held-out reward of each file"] == ["eval/hard/reward"]
    assert drawn["pass@k, share of prompts"] == ["eval/pass@8", "eval/hard/pass@8"]
    assert drawn["reward/math/parsed"] == ["reward/math/parsed"]


def test_seconds_and_tokens_per_second_do_not_count_compiling(folder: Path):
    with MetricsWriter(folder) as metrics:
        for step in range(1, 5):
            waits = {"timing/rollout/compile": 1.5, "timing/update/compile": 1.0}
            metrics.write(step, row(step, **waits, **{"rollout/tokens_per_s": 8000.0}))
    page = run_page(folder)
    seconds = {
        x["name"]: x["y"] for x in charts_of(parsed(page))["time of a step without compiling, s"]
    }
    assert seconds == {"rollout": [0.5] * 4, "step": [1.5] * 4}
    told = words_of(parsed(page))
    assert "8,000 tokens/s of rollout" in told
    assert (
        "6 s time of steps, beside 10 s of compiling 33.3 % of the steps' time is rollout" in told
    )
    (clock,) = json.loads(next(parsed(page).iter("form")).attrib["data-clocks"])
    assert dict(zip(clock["steps"], clock["minutes"], strict=True))[4] == pytest.approx(0.1)


def test_a_long_run_keeps_its_extremes_on_a_page_of_two_megabytes(folder: Path):
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(5, 2001):
            changes = {f"train/x{i}": math.sin(step * i) for i in range(1, 60)}
            changes["train/entropy"] = 9.0 if step == 777 else 1.0
            file.write(f"{json.dumps({'step': step, 'time': 1.0, **row(step, **changes)})}\n")
    page = run_page(folder)
    (entropy,) = charts_of(parsed(page))["entropy of the next token, nats"]
    assert points(entropy)[777] == 9 and entropy["x"][0] == 1 and entropy["x"][-1] == 2000
    assert len(page) < 2_000_000


def test_rollouts_are_the_first_the_slowest_and_the_newest(folder: Path):
    page = parsed(run_page(folder))
    titles = [title.text for title in page.iter("h3")]
    assert titles == ["The first: step 1", "The slowest: step 2", "The newest: step 4"]
    told = words_of(page)
    # At, switch, live, what it took, to the end, had it stayed, cache, moved.
    assert "1.25 dp2tp1 to dp1tp2 40 0.0625 (0.125) 2.75 (2.25) 3.75 migrate 3" in told
    assert "100 responses in 4 s and 160 decode steps, 1 switch." in told


def test_drafts_and_failed_rewards_are_counted(folder: Path):
    page = parsed(run_page(folder))
    lines = charts_of(page)["acceptance rate: accepted share of the draft tokens"]
    assert {line["name"]: line["y"] for line in lines} == dict.fromkeys(
        ["all", "own text"], [0.25] * 4
    )
    told = words_of(page)
    assert "2 s saved by drafts, by the planner's estimate; 3 s predicted" in told
    assert "timeout 8 4" in told and "held-out, any cause 1 4" in told


def test_samples_are_merged_coloured_and_beside_the_right_answer(folder: Path):
    page = parsed(run_page(folder))
    told = words_of(page)
    assert told.index("step 4 prompt") < told.index("step 1 prompt 1+2= right answer 3")
    assert "response 3 2 × reward 1, 2 tokens, stop response 4 reward 0, 2 tokens, stop" in told
    turns = [each for each in page.iter("div") if each.get("class") == "turn response"]
    styles = [turn.get("style", "") for turn in turns]
    assert ["#009e73 100.0%" in styles[1], "#009e73 0.0%" in styles[2]] == [True, True]
    assert styles[3] == "--reward:var(--rule)"


def test_the_page_is_whole_fetches_nothing_and_runs_nobodys_markup(tmp_path: Path):
    (folder := tmp_path / "<img src=x>").mkdir()
    write_run(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "time": 1.0, "rollout/layouts": "<script>"}\n')
        file.write('{"step": 9, "time": 1.0, "reward/<script>/failed/timeout": 1}\n')
    told = seen_in(folder)
    assert told.count('alert("1")') == 5  # prompt, answer, response, finish, function
    assert "<img src=x>" in told and "<script>: timeout 1 9" in told


def test_of_a_run_that_has_just_begun_there_is_a_page_too(folder: Path):
    for name in ("metrics.jsonl", "rollouts.json", "samples.json", "config.yaml"):
        (folder / name).unlink()
        assert folder.name in seen_in(folder)


def test_a_resumed_run_keeps_what_it_does_not_repeat(folder: Path):
    page = RunPage(folder)
    with page.kept(3):
        page.rollout(4, replace(TRACE, total_s=9.0))
    found = read_rollouts(folder)
    assert [one.step for one in found.values()] == [1, 4, 4]  # first, slowest, newest
    with (again := RunPage(folder)).kept(1):
        assert [one.step for one in read_rollouts(folder).values()] == [1, 1, 1]
        again.rollout(2, TRACE)
    assert [one.step for one in read_rollouts(folder).values()] == [1, 1, 2]


def test_a_page_that_cannot_be_written_is_a_line_of_the_log(folder: Path, caplog):
    (folder / PAGE_FILE).unlink()
    (folder / PAGE_FILE).mkdir()
    RunPage(folder).write()
    (line,) = caplog.messages
    assert line.startswith("run.html was not written (") and "\n" not in line


def test_a_chat_is_shown_message_by_message(tmp_path: Path):
    messages = [{"role": "system", "content": "Be <b>brief."}, {"role": "user", "content": "1+2?"}]
    with MetricsWriter(tmp_path) as metrics:
        metrics.samples(1, [Sample("<|im_start|>", "3", 1.0, 1, "stop", messages=messages)])
    told = words_of(parsed(run_page(tmp_path)))
    assert "system Be <b>brief. user 1+2? assistant 3 reward 1" in told


def test_a_section_that_cannot_be_drawn_takes_no_other_with_it(folder: Path, caplog):
    (folder / "samples.json").write_text('{"1": [3]}')
    RunPage(folder).write()
    (line,) = caplog.messages
    assert line.startswith("a section of run.html is left out (") and "\n" not in line
    words = words_of(parsed((folder / PAGE_FILE).read_text()))
    assert "A section is left out here" in words and "held-out" in words


def test_a_thinned_curve_has_its_extremes_and_the_means_of_its_parts():
    values = [float(i % 10 == 0) for i in range(3000)]  # a mean of 0.1
    found = thinned([(i, value, math.nan) for i, value in enumerate(values)], 600)
    assert len(found) <= 601 and found[-1][0] == 2999
    assert {value for _, value, _, _ in found} == {0.0, 1.0}
    means = [mean for *_, mean in found]
    assert sum(means) / len(means) == pytest.approx(0.1, abs=0.01) and max(means) <= 0.2
