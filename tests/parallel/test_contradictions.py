"""Trainer options that contradict the launcher are refused with what to do; those that agree pass."""

from __future__ import annotations

import pytest

from forgefield.errors import ForgefieldError
from forgefield.parallel.environment import check_trainer_options
from forgefield.parallel.launch import Launch


def launched(launcher: str, world_size: int, local_size: int, n_nodes: int) -> Launch:
    return Launch(launcher, 0, world_size, 0, local_size, 0, n_nodes, "127.0.0.1", 20000, 0, "", "")


@pytest.mark.parametrize("devices", [None, "auto", -1, "-1", 4, "4", [0, 1, 2, 3], (4, 5, 6, 7), "0,1,2,3"])
@pytest.mark.parametrize("num_nodes", [None, 2])
def test_options_that_agree_with_the_launcher_pass(devices, num_nodes) -> None:
    launch = launched("srun", 8, 4, 2)
    check_trainer_options(launch, devices=devices, num_nodes=num_nodes, accelerator="auto")
    with pytest.raises(ForgefieldError, match=r"but trainer\.num_nodes=3"):
        check_trainer_options(launch, devices=devices, num_nodes=3, accelerator="auto")


@pytest.mark.parametrize("devices", [None, "auto", -1, 1, 4, "4", [1, 3], "0,1", "2,"])
def test_without_a_launcher_the_devices_are_free(devices) -> None:
    check_trainer_options(launched("none", 1, 1, 1), devices=devices, num_nodes=1, accelerator="gpu")
    if devices in (4, "4"):
        with pytest.raises(ForgefieldError, match=r"trainer\.devices"):
            check_trainer_options(launched("torchrun", 1, 1, 1), devices=devices, num_nodes=1, accelerator="gpu")


@pytest.mark.parametrize(
    ("launch", "options", "sentence"),
    [
        (
            launched("srun", 8, 4, 2),
            {"devices": 2},
            "8 tasks were started by srun on 2 nodes, 4 on each, but trainer.devices=2: leave trainer.devices out, or start"
            " 2 tasks per node (srun --ntasks-per-node=2).",
        ),
        (
            launched("torchrun", 1, 1, 1),
            {"devices": 4},
            "1 process was started by torchrun, but trainer.devices=4: leave trainer.devices out, or start 4 processes per node"
            " (torchrun --nproc-per-node=4).",
        ),
        (
            launched("MPICH or Intel MPI", 2, 2, 1),
            {"devices": "2,"},  # the device with index 2, as Lightning reads it
            "2 processes were started by MPICH or Intel MPI on one node, but trainer.devices=2,: leave trainer.devices out, or"
            " start 1 process per node (mpirun -ppn 1).",
        ),
        (
            launched("Open MPI", 3, 2, 2),
            {"devices": [0]},
            "3 processes were started by Open MPI on 2 nodes, 2 on this one, but trainer.devices=[0]: leave trainer.devices"
            " out, or start 1 process per node (mpirun --map-by ppr:1:node).",
        ),
        (
            launched("environment variables", 2, 2, 1),
            {"devices": 1},
            "2 processes were announced by RANK and WORLD_SIZE on one node, but trainer.devices=1: leave trainer.devices out,"
            " or start 1 process per node.",
        ),
        (
            launched("srun", 8, 4, 2),
            {"devices": 4, "num_nodes": 3},
            "8 tasks were started by srun on 2 nodes, 4 on each, but trainer.num_nodes=3: leave trainer.num_nodes out, or start"
            " on 3 nodes.",
        ),
        (
            launched("torchrun", 2, 2, 1),
            {"accelerator": "mps"},
            "2 processes were started by torchrun on one node, but trainer.accelerator=mps has one device: start one process.",
        ),
        (
            launched("none", 1, 1, 1),
            {"devices": 2, "num_nodes": 3},
            "trainer.num_nodes=3, but one process was started, on one node. Start one process per device on every node:"
            " srun --nodes=3 --ntasks-per-node=2 forgefield train ..., or mpirun -n 6 --hostfile HOSTS forgefield train ..., or"
            " on every node torchrun --nnodes=3 --nproc-per-node=2 --node-rank=... --master-addr=... -m forgefield train ...",
        ),
    ],
)
def test_the_error_of_a_contradiction_with_the_launcher_is_helpful(launch, options, sentence) -> None:
    with pytest.raises(ForgefieldError) as error:
        check_trainer_options(launch, **{"devices": None, "num_nodes": None, "accelerator": "auto"} | options)
    assert str(error.value) == sentence


@pytest.mark.parametrize("devices", [0, -2, True, 1.5, "two", "1,x", [], [0, "1"], [-1]])
def test_unknown_devices_are_refused(devices) -> None:
    with pytest.raises(ForgefieldError, match="trainer.devices="):
        check_trainer_options(launched("none", 1, 1, 1), devices=devices, num_nodes=None, accelerator="auto")


@pytest.mark.parametrize("num_nodes", [0, -1, True, "2", 1.0])
def test_a_number_of_nodes_that_is_none_is_refused(num_nodes) -> None:
    with pytest.raises(ForgefieldError, match="trainer.num_nodes="):
        check_trainer_options(launched("none", 1, 1, 1), devices=None, num_nodes=num_nodes, accelerator="auto")
