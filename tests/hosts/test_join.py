"""Where a process finds its place among those of a run."""

import pytest

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.hosts.place import Place, find_place

ALONE = DistributedConfig()
TORCHRUN = {"MASTER_ADDR": "a", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "16"}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "8"},  # an interactive shell of an allocation
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_alone(variables):
    assert find_place(ALONE, variables) is None


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "2"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
        {"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2"},
    ],
)
def test_clusters_are_left_to_jax(variables):
    assert find_place(ALONE, variables) == Place(None)


def test_options_come_before_variables():
    told = DistributedConfig(coordinator="host:1", num_processes=4, process_id=2)
    assert find_place(told, TORCHRUN) == Place("host:1", 2, 4)


def test_torchrun():
    assert find_place(ALONE, TORCHRUN) == Place("a:29500", 3, 16)
    local = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    assert find_place(ALONE, TORCHRUN | local) == Place("a:29500", 3, 16, 1)
    one_each = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert find_place(ALONE, TORCHRUN | one_each) == Place("a:29500", 3, 16)


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT", "RANK"])
def test_a_missing_variable_is_named(name):
    left = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(UserError, match=f"{name} is not set"):
        find_place(ALONE, left)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"coordinator": "host", "num_processes": 2}, "coordinator"),
        ({"coordinator": "host:1"}, "num_processes"),
        ({"num_processes": 2}, "num_processes"),
        ({"coordinator": "host:1", "num_processes": 2, "process_id": 2}, "process_id"),
    ],
)
def test_options_that_cannot_be(options, named):
    with pytest.raises(UserError, match=rf"option --distributed\.{named}"):
        DistributedConfig(**options)
