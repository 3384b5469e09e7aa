"""Every set of lengths is read, and what their gains come to."""

from pathlib import Path

from benchmarks.planner.regret_cells import Cell
from benchmarks.planner.rollout_gains import of_all, summary
from benchmarks.planner.workloads import read


def test_every_file_with_a_length_for_each_response_is_a_set(tmp_path: Path):
    folder = tmp_path / "lengths"
    folder.mkdir()
    math = "zeroeval_math-l5_Qwen2.5-7B-Instruct.csv"
    (folder / math).write_text("id,prompt_tokens,output_tokens\n0,90,100\n1,80,4097\n2,5,0\n")
    (folder / "new_hist.csv").write_text("output_tokens,weight_requests\n10,2.5\n32768,1\n")
    (folder / "steps.csv").write_text("run,response_length_mean\na,100.5\n")
    found = read(tmp_path)
    assert list(found) == ["math", "new_hist"]
    assert found["math"].responses.tolist() == [100, 4097] and found["math"].cap == 4096
    assert found["new_hist"].cap == 16_384 and found["new_hist"].weights.tolist() == [2.5, 1]
    assert set(found["new_hist"].prompts.tolist()) <= {90, 80, 5}


def test_gains_are_told_by_size_and_by_the_share_of_the_tail():
    def rollout(gain: float, tail: float) -> dict:
        return {"gain": gain, "tail": tail}

    cells = [Cell("8xH100", "m", n, "math", Path(), 0.05) for n in (128, 2048)]
    few, many = [rollout(0.0, 0.9), rollout(0.02, 0.9)], [rollout(0.2, 0.5), rollout(0.1, 0.45)]
    found = summary(list(zip(cells, (few, many), strict=True)))
    assert found["all"] == {"mean": 8.0, "least": 0.0, "most": 20.0, "tail": 68.75}
    assert found["tail from 40 % of the steps on, 2048 responses"] == of_all(many)
    assert found["tail from 75 % of the steps on, 128 responses"] == of_all(few)
