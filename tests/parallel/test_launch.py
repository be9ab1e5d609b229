"""Which launcher started a process, from variables recorded under the real programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forgefield.errors import ForgefieldError
from forgefield.parallel.launch import detect_launch
from tests.support.recorded_environments import (
    BY_HAND,
    DOCUMENTED,
    HYDRA,
    OPEN_MPI,
    OPEN_MPI_RANKS,
    PALS,
    RECORDED,
    STEP,
    TORCHRUN,
    TWO_NODES_OF_TWO,
    each,
    place_of,
    with_values,
)


@pytest.mark.parametrize(
    ("environments", "launcher", "places", "more"),
    [pytest.param(*case[1:], id=case[0]) for case in RECORDED + DOCUMENTED],
)
def test_each_process_detects_its_launcher_and_rank(environments, launcher, places, more) -> None:
    launches = [detect_launch(environment) for environment in environments]
    assert [launch.launcher for launch in launches] == [launcher] * len(places)
    assert [place_of(launch) for launch in launches] == places
    assert len({(launch.master_address, launch.master_port) for launch in launches}) == 1, (
        "they must meet at one address"
    )
    for name, value in more.items():
        assert {getattr(launch, name) for launch in launches} == {value}


def test_pals_with_pmix_counts_the_nodes_of_the_job(tmp_path: Path) -> None:
    # Documented by users of Aurora: with --pmi=pmix neither PMI_SIZE nor any other variable has the number of processes.
    nodes = tmp_path / "nodes"
    nodes.write_text("x1\nx1\nx2\nx2\n")
    common = {k: PALS[k] for k in PALS if k not in ("PMI_SIZE", "MASTER_ADDR")} | {
        "PALS_PMI": "pmix",
        "PBS_JOBID": "8.pbs",
    }
    environments = with_values(
        common | {"PBS_NODEFILE": str(nodes)},
        PALS_RANKID=[0, 1, 2, 3],
        PMIX_RANK=[0, 1, 2, 3],
        PALS_LOCAL_RANKID=[0, 1, 0, 1],
        PALS_NODEID=[0, 0, 1, 1],
    )
    launches = [detect_launch(environment) for environment in environments]
    assert [place_of(launch) for launch in launches] == TWO_NODES_OF_TWO
    assert {(launch.launcher, launch.master_address, launch.job) for launch in launches} == {
        ("PALS", "x1", "PBS job 8.pbs")
    }
    assert "4 are expected, 2 on each of the 2 nodes" in launches[0].note

    told = detect_launch(environments[1] | {"WORLD_SIZE": "2"})
    assert (place_of(told), told.note) == ((1, 2, 1, 2, 0, 1), "")
    with pytest.raises(ForgefieldError, match="PALS_RANKID=3 is set, but the number of processes .* --env WORLD_SIZE"):
        detect_launch(environments[3] | {"PBS_NODEFILE": str(tmp_path / "absent")})


def test_two_jobs_meet_at_different_ports_and_the_ranks_of_one_at_the_same() -> None:
    def port(environment: dict[str, str]) -> int:
        return detect_launch(environment).master_port

    steps = [
        STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(100, 120) for step in range(3)
    ]
    ports = [port(step) for step in steps]
    assert all(20000 <= p < 30000 for p in ports)
    assert len(set(ports)) >= 58, "60 jobs and steps on 10000 ports collide rarely"
    assert port(STEP | {"MASTER_PORT": "1234"}) == 1234

    # Ranks that mpirun starts by ssh do not have the scheduler's variables; those beside mpirun have.
    ranks = each(3, OPEN_MPI, *OPEN_MPI_RANKS)
    assert port(ranks[0] | {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "3"}) == port(ranks[1])
    assert port(ranks[0]) != port(ranks[0] | {"PMIX_NAMESPACE": "309919746"})


# ------------------------------------------------------------------------------------------- what does not fit together


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"RANK": "1"}, "RANK=1 is set, WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, RANK is not"),
        ({"WORLD_SIZE": "2", "RANK": ""}, "WORLD_SIZE=2 is set, RANK is not"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is set, but the number of processes"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1 is set, but the number of processes"),
        (BY_HAND | {"RANK": "2"}, "RANK=2 and WORLD_SIZE=2 contradict each other: ranks count from 0"),
        (BY_HAND | {"RANK": "one"}, "RANK=one is not a non-negative integer"),
        (BY_HAND | {"RANK": "-1"}, "RANK=-1 is not a non-negative integer"),
        (BY_HAND | {"RANK": "0", "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        (BY_HAND | {"RANK": "0", "MASTER_ADDR": "a"}, "rank 0 of 2 .* set LOCAL_RANK and LOCAL_WORLD_SIZE"),
        (BY_HAND | {"RANK": "0", "LOCAL_RANK": "2"}, "process 2, counted from 0, of 2 on this node"),
        (BY_HAND | {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}, "of 3 on this node, but 2 in total"),
        (
            BY_HAND | {"RANK": "0", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
            "LOCAL_RANK=1 and LOCAL_WORLD_SIZE=1 contradict",
        ),
        (HYDRA | {"PMI_RANK": "0", "MPI_LOCALRANKID": "3"}, "MPI_LOCALRANKID=3 and MPI_LOCALNRANKS=3 contradict"),
        (BY_HAND | {"NODE_RANK": "1", "LOCAL_RANK": "0"}, "NODE_RANK=1 .* set LOCAL_WORLD_SIZE"),
        (TORCHRUN, "WORLD_SIZE=2 is set, RANK is not"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK=1 is set, OMPI_COMM_WORLD_SIZE is not"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "3"}, "OMPI_COMM_WORLD_RANK=3 and OMPI_COMM_WORLD_SIZE=3"),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "1"},
            "OMPI_COMM_WORLD_LOCAL_SIZE=3 is set, OMPI_COMM_WORLD_LOCAL_RANK is not",
        ),
        ({"PMI_RANK": "1", "MPI_LOCALRANKID": "1"}, "PMI_RANK=1 is set, PMI_SIZE is not"),
        ({"PMI_ID": "1", "MPI_LOCALRANKID": "1"}, "PMI_ID=1 is set, PMI_SIZE is not"),  # mpirun.mpich -pmi-port
        ({"HOROVOD_RANK": "1"}, "HOROVOD_RANK=1 is set, HOROVOD_SIZE is not"),
        (STEP | {"SLURM_PROCID": ""}, "SLURM_STEP_NUM_TASKS=3 is set, SLURM_PROCID is not"),
        (STEP | {"SLURM_PROCID": "5"}, "SLURM_PROCID=5 and SLURM_STEP_NUM_TASKS=3"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(3)"}, r"2\(3\)"),
        (
            STEP | {"RANK": "0", "WORLD_SIZE": "4"},
            "RANK=0 and WORLD_SIZE=4 .* srun started this process as rank 0 of 3",
        ),
    ],
)
def test_half_a_set_of_variables_is_an_error_that_names_them(environment, sentence) -> None:
    with pytest.raises(ForgefieldError, match=sentence):
        detect_launch(environment)


def test_several_nodes_without_an_address_is_an_error_with_a_remedy() -> None:
    environment = HYDRA | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(ForgefieldError) as error:
        detect_launch(environment)
    assert str(error.value) == (
        "There are 3 processes on several nodes, and the node of rank 0 is unknown: set MASTER_ADDR to its name, for example"
        " mpirun -x MASTER_ADDR=$(hostname) (Open MPI) or -genv MASTER_ADDR $(hostname) (MPICH, Intel)."
    )


def test_the_module_needs_no_heavy_import() -> None:
    code = "import sys, forgefield.parallel.launch; print(*{'torch', 'lightning', 'numpy', 'omegaconf'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


# ------------------------------------------------------------------------------------------------------ node lists
