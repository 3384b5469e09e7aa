"""Cells of the grid: what is compared is alike, and what is learned from is not what is replayed."""

import pytest

from benchmarks.planner.kernel_tables import SPLITS
from benchmarks.planner.regret_cells import Cell, run_cell
from benchmarks.planner.workloads import read
from benchmarks.report import options
from pat_jax.planning.planner.scripts import FixedLayout
from pat_jax.profiling.predict.composer import SWITCH_S
from pat_jax.profiling.simulate.simulator import replay
from tests.published import DATA, needs_data


def test_missing_data_is_said_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        options(None, has_data=True).parse_args(["--data", str(tmp_path)])
    assert "has no folder calibration" in capsys.readouterr().err


@needs_data
def test_static_layouts_keep_their_groups_even_and_hindsight_is_never_slower():
    cell = Cell("8xH100", "llama-3.1-8b", 512, "math", DATA, SWITCH_S)
    seconds, machine = run_cell(cell, 1, ["right"]), cell.machine()
    workload = read(DATA)["math"].sample(512, 0)
    for split in SPLITS[:-1]:
        uneven = replay(workload, FixedLayout(split), machine).total_s
        assert seconds[f"static tp{split.tp}"][0] < uneven
    assert min(seconds["clairvoyant"]) == min(
        second for name, values in seconds.items() if "next" not in name for second in values
    )


@needs_data
def test_what_is_fitted_and_what_is_replayed_have_no_response_in_common():
    for lengths in read(DATA).values():
        halves = [set(lengths._half(number).tolist()) for number in (0, 1)]
        assert halves[0].isdisjoint(halves[1])
        assert len(halves[0] | halves[1]) == len(lengths.responses)
        workload = lengths.sample(64, 3)
        assert workload.size == 64 and workload.responses.max() <= lengths.cap
