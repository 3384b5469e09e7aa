"""Where a process finds its place among those of a run: by options, by variables of schedulers, or one
sentence that names what is wrong."""

import os
import socket
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from runs import finish, start
from several import free_port

from pat_jax.common.errors import UserError
from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.hosts.place import Place, find_place, in_cluster, located

ALONE = DistributedConfig()
SOUND = {
    "torchrun": {"MASTER_ADDR": "a", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "4"}
    | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    "slurm": {"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    | {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "node[01-02]"},
    "ompi": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}
    | {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"},
}
WILD = st.sampled_from(
    ["", " ", "-1", "0", "1", "1.5", "1e3", "four", "²", "٣", "9" * 30, "9" * 5000, "0x2", "\n", "1\n2", "None", "nan",
     "a b", ":", "[", "[::1", "node[", "x" * 9999, "/", "é", "\x1b[31m", "65536", "4", "00", "+1", "1_0", ";tcp://"]
)  # fmt: skip


def place_or_sentence(variables: dict[str, str]) -> Place | None:
    """With the variables of the process, as JAX reads some of them itself."""
    with pytest.MonkeyPatch.context() as patch:
        for name in {name for one in SOUND.values() for name in one} | {"JAX_COORDINATOR_PORT"}:
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            place = find_place(ALONE, os.environ)
            return located(1, os.environ) if place == Place(None) else place
        except UserError as error:
            message = str(error)
            assert message.isprintable() and len(message) < 1500
            assert any(name in message for name in variables)
            return None


@pytest.mark.parametrize("scheduler", SOUND)
def test_sound_variables_say_where_it_is(scheduler: str):
    place = place_or_sentence(SOUND[scheduler])
    assert place is not None and (place.index, place.count, place.local_device) == (1, 4, 1)


@settings(max_examples=300, deadline=None)
@given(scheduler=st.sampled_from([*SOUND]), which=st.integers(0, 5), wild=WILD, gone=st.booleans())
@example(scheduler="torchrun", which=3, wild="", gone=False)
@example(scheduler="torchrun", which=1, wild="", gone=True)
@example(scheduler="slurm", which=0, wild="²", gone=False)
def test_a_wild_variable(scheduler: str, which: int, wild: str, gone: bool):
    variables = dict(SOUND[scheduler])
    name = list(variables)[which % len(variables)]
    variables[name] = wild
    if gone:
        del variables[name]
    place = place_or_sentence(variables)
    if place is not None:
        assert place.coordinator and 0 <= place.index < place.count


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR"])
@pytest.mark.parametrize("value", ["", "two"])
def test_the_variable_is_named(name: str, value: str):
    if name == "MASTER_ADDR" and value:
        value = f" {value}:5"
    with pytest.raises(UserError, match=f"environment variable {name} is "):
        find_place(ALONE, SOUND["torchrun"] | {name: value})


def test_an_interactive_shell_is_no_cluster_whatever_its_size_says():
    assert not in_cluster({"SLURM_NTASKS": "many"})


@pytest.mark.parametrize(
    "address",
    ["a:0", "a:65536", "a b:1", ":1", "a:", "a:1:2", "[::1:1", "a:١", f"{'x' * 64}:1", "a..b:1"],
)
def test_what_is_no_address(address: str):
    with pytest.raises(UserError, match=r"option --distributed\.coordinator"):
        DistributedConfig(coordinator=address, num_processes=2)


@pytest.mark.parametrize(
    "address", ["a:1", "10.0.0.1:65535", "[::1]:80", "[fe80::1%eth0]:80", "n-1.x_y.z:9"]
)
def test_what_is_an_address(address: str):
    assert DistributedConfig(coordinator=address, num_processes=2).coordinator == address


TORCHRUN = {"MASTER_ADDR": "a", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "16"}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"SLURM_NTASKS": "8"},  # an interactive shell of an allocation
        {"TPU_WORKER_HOSTNAMES": "localhost"},
    ],
)
def test_alone(variables):
    assert find_place(ALONE, variables) is None


def test_a_pod_is_left_to_jax():
    assert find_place(ALONE, {"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2"}) == Place(None)


def test_options_come_before_variables():
    told = DistributedConfig(coordinator="host:1", num_processes=4, process_id=2)
    assert find_place(told, TORCHRUN) == Place("host:1", 2, 4)


def test_torchrun():
    assert find_place(ALONE, TORCHRUN) == Place("a:29500", 3, 16)
    local = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    assert find_place(ALONE, TORCHRUN | local) == Place("a:29500", 3, 16, 1)
    one_each = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert find_place(ALONE, TORCHRUN | one_each) == Place("a:29500", 3, 16)


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


WORKER = str(Path(__file__).with_name("joining_worker.py"))


def begin(address: str, count: int, index: int, *point: str):
    return start(address, str(count), str(index), *point, program=(WORKER,))


@pytest.mark.parametrize("point", ["JAX's join", "the meeting"])
@pytest.mark.parametrize("gone", [0, 1])
def test_who_dies_while_joining_ends_the_others_in_a_sentence(gone: int, point: str):
    address = f"localhost:{free_port()}"
    dies = begin(address, 2, gone, point)
    other = begin(address, 2, 1 - gone)
    said = finish(other, code=1, timeout=180)
    finish(dies, code=-9)
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert (
        line.startswith(f"error: process {gone} on ")
        and "has ended" in line
        and "Traceback" not in said
    )


def test_all_join_while_outsiders_come():
    port = free_port()
    all_of = [begin(f"localhost:{port}", 2, index) for index in (0, 1)]
    outsiders = []
    for _ in range(200):
        try:
            outsiders.append(one := socket.create_connection(("localhost", port), timeout=1))
            one.sendall(b'{"hello": "pat_jax roll call 1", "index": 1, "count": 3}\n')
        except OSError:
            pass
        if all_of[0].poll() is not None:
            break
    for one in all_of:
        assert "error" not in finish(one, timeout=180)
    for one in outsiders:
        one.close()
