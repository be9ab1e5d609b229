"""Which launcher started a process: from variables recorded under the real programs, and by running them.

Recorded with Open MPI 4.1.4, MPICH 4.0.2, SLURM 22.05.8 and torch 2.13 and cut down to the variables that matter. Nodes node1
and node2 are two host names of one machine. PALS, horovodrun, Intel MPI, LSF and SLURM on several nodes follow their
documentation and the sources of the programs that set the variables.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forgefield.errors import ForgefieldError
from forgefield.parallel.contradictions import check_trainer_options
from forgefield.parallel.launch import Launch, detect_launch, expand_node_list

Place = tuple[int, int, int, int, int, int]  # rank, world_size, local_rank, local_size, node_rank, n_nodes
ALONE: Place = (0, 1, 0, 1, 0, 1)
WITHOUT_SRUN = (
    "SLURM gave this job 4 tasks, but the program was started without srun: one process trains."
    " Put srun in front to use all."
)


def on_one_node(n: int) -> list[Place]:
    return [(rank, n, rank, n, 0, 1) for rank in range(n)]


def each(n: int, common: dict[str, str], *rank_names: str) -> list[dict[str, str]]:
    """n environments that differ in `rank_names` only, which are the rank."""
    return [common | dict.fromkeys(rank_names, str(rank)) for rank in range(n)]


def with_values(common: dict[str, str], **values: Iterable[Any]) -> list[dict[str, str]]:
    """Environments that differ in `values`: one value for each."""
    return [common | {k: str(x) for k, x in zip(values, row)} for row in zip(*values.values())]


def place_of(launch: Launch) -> Place:
    return (launch.rank, launch.world_size, launch.local_rank, launch.local_size, launch.node_rank, launch.n_nodes)


# ---------------------------------------------------------------------------------------------- recorded variables

BATCH = {
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_NODELIST": "vm",
    "SLURM_NNODES": "1",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_TASKS_PER_NODE": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
}
STEP = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "vm",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "3",
    "SLURM_TASKS_PER_NODE": "3",
    "SLURM_NTASKS": "3",
    "SLURM_NPROCS": "3",
    "SLURM_GTIDS": "0,1,2",
}
SALLOC = {k: BATCH[k] for k in BATCH if k not in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS")}
# The step of one task in which mpirun of MPICH starts its daemon. SLURM_NTASKS is the job's again: Hydra put it back.
DAEMON_STEP = BATCH | {
    "SLURM_STEP_ID": "4",
    "SLURM_STEP_NODELIST": "vm",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1",
    "SLURM_NPROCS": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "309919745",
    "OMPI_MCA_orte_num_nodes": "1",
    "PMIX_NAMESPACE": "309919745",
}
OPEN_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK", "PMIX_RANK")
HYDRA = {"PMI_SIZE": "3", "MPI_LOCALNRANKS": "3", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "vm"}
HYDRA_RANKS = ("PMI_RANK", "MPI_LOCALRANKID")
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "2f6a20e7-0699-46d9-ac32-92d35de38d1a",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "40281",
}
STEP_RANKS = ("SLURM_PROCID", "SLURM_LOCALID")
MPI_ON_2_NODES = {"MASTER_ADDR": "node1"}

Case = tuple[str, list[dict[str, str]], str, list[Place], dict[str, Any]]
RECORDED: list[Case] = [
    ("Open MPI", each(3, OPEN_MPI, *OPEN_MPI_RANKS), "Open MPI", on_one_node(3), {"master_address": "127.0.0.1"}),
    (
        "Open MPI on node1:2,node2:1",  # NODE_RANK is 0 on both nodes: not the number of the node
        with_values(
            OPEN_MPI | MPI_ON_2_NODES | {"OMPI_MCA_orte_num_nodes": "2"},
            OMPI_COMM_WORLD_RANK=[0, 1, 2],
            OMPI_COMM_WORLD_LOCAL_RANK=[0, 1, 0],
            OMPI_COMM_WORLD_NODE_RANK=[0, 1, 0],
            OMPI_COMM_WORLD_LOCAL_SIZE=[2, 2, 1],
        ),
        "Open MPI",
        [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 2), (2, 3, 0, 1, 1, 2)],
        {"master_address": "node1"},
    ),
    (
        "Open MPI on node1:2,node2:2 with --map-by node",
        with_values(
            OPEN_MPI | MPI_ON_2_NODES | {"OMPI_MCA_orte_num_nodes": "2", "OMPI_COMM_WORLD_SIZE": "4"},
            OMPI_COMM_WORLD_RANK=[0, 1, 2, 3],
            OMPI_COMM_WORLD_LOCAL_RANK=[0, 0, 1, 1],
            OMPI_COMM_WORLD_NODE_RANK=[0, 0, 1, 1],
            OMPI_COMM_WORLD_LOCAL_SIZE=[2, 2, 2, 2],
        ),
        "Open MPI",
        [(0, 4, 0, 2, 0, 2), (1, 4, 0, 2, 1, 2), (2, 4, 1, 2, 0, 2), (3, 4, 1, 2, 1, 2)],
        {"master_address": "node1"},
    ),
    ("MPICH", each(3, HYDRA, *HYDRA_RANKS), "MPICH or Intel MPI", on_one_node(3), {"master_address": "127.0.0.1"}),
    (
        "MPICH on node1:2,node2:2",
        with_values(
            HYDRA | MPI_ON_2_NODES | {"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"},
            PMI_RANK=[0, 1, 2, 3],
            MPI_LOCALRANKID=[0, 1, 0, 1],
        ),
        "MPICH or Intel MPI",
        [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)],
        {"master_address": "node1"},
    ),
    ("srun", each(3, STEP, *STEP_RANKS), "srun", on_one_node(3), {"job": "SLURM job 2 step 0"}),
    (
        "srun --mpi=pmi2",
        each(3, STEP | {"PMI_SIZE": "3", "PMI_JOBID": "2.2"}, *STEP_RANKS, "PMI_RANK"),
        "srun",
        on_one_node(3),
        {},
    ),
    (
        "srun --mpi=pmix",
        each(3, STEP | {"PMIX_NAMESPACE": "slurm.pmix.15.0"}, *STEP_RANKS, "PMIX_RANK"),
        "srun",
        on_one_node(3),
        {},
    ),
    (
        "srun --mpi=cray_shasta, which sets PALS's variables",
        each(3, STEP | {"PALS_APID": "2.3", "PALS_NODEID": "0"}, *STEP_RANKS, "PALS_RANKID"),
        "srun",
        on_one_node(3),
        {},
    ),
    ("a batch script", [BATCH], "none", [ALONE], {"note": WITHOUT_SRUN, "job": "SLURM job 2"}),
    ("a shell of salloc", [SALLOC], "none", [ALONE], {"note": WITHOUT_SRUN, "job": "SLURM job 2"}),
    (
        "a shell of salloc that is an interactive step",
        [DAEMON_STEP | {"SLURM_STEP_ID": "4294967290", "SLURM_TASKS_PER_NODE": "4"}],
        "none",
        [ALONE],
        {"note": WITHOUT_SRUN},
    ),
    (
        "a shell of salloc that is an interactive step, for one task",
        [DAEMON_STEP | {"SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "1"}],
        "none",
        [ALONE],
        {"note": ""},
    ),
    (
        "a batch script that was submitted from inside a step of 3 tasks",
        [STEP | BATCH],
        "none",
        [ALONE],
        {"note": WITHOUT_SRUN},
    ),
    (
        "a batch script that was submitted from inside a step of 1 task",
        [DAEMON_STEP | BATCH],
        "none",
        [ALONE],
        {"note": WITHOUT_SRUN},
    ),
    (
        "a batch script of a job with nodes but no number of tasks",
        [{k: BATCH[k] for k in BATCH if k not in ("SLURM_NTASKS", "SLURM_NPROCS")}],
        "none",
        [ALONE],
        {"note": ""},
    ),
    (
        "Open MPI in a batch script",
        each(3, BATCH | OPEN_MPI, *OPEN_MPI_RANKS),
        "Open MPI",
        on_one_node(3),
        {"note": ""},
    ),
    ("Open MPI in a step", each(3, DAEMON_STEP | OPEN_MPI, *OPEN_MPI_RANKS), "Open MPI", on_one_node(3), {}),
    ("MPICH in a batch script", each(3, DAEMON_STEP | HYDRA, *HYDRA_RANKS), "MPICH or Intel MPI", on_one_node(3), {}),
    (
        "torchrun",
        each(2, TORCHRUN, "RANK", "LOCAL_RANK"),
        "torchrun",
        on_one_node(2),
        {"master_address": "localhost", "master_port": 40281},
    ),
    (
        "torchrun --nnodes 2 with 2 and 1 processes",
        with_values(
            TORCHRUN | {"WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
            RANK=[0, 1, 2],
            LOCAL_RANK=[0, 1, 0],
            LOCAL_WORLD_SIZE=[2, 2, 1],
            GROUP_RANK=[0, 0, 1],
        ),
        "torchrun",
        [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 2), (2, 3, 0, 1, 1, 2)],
        {},
    ),
    (
        "torchrun in a batch script",
        each(2, BATCH | TORCHRUN, "RANK", "LOCAL_RANK"),
        "torchrun",
        on_one_node(2),
        {"note": ""},
    ),
    ("torchrun in a step", each(2, STEP | TORCHRUN, "RANK", "LOCAL_RANK"), "torchrun", on_one_node(2), {"note": ""}),
    ("nothing", [{"PATH": "/usr/bin", "MASTER_ADDR": "elsewhere"}], "none", [ALONE], {"master_address": "127.0.0.1"}),
]

# ------------------------------------------------------------------------------------------- documented variables

UNEVEN_STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "gpu[007-011]",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "gpu[008-011]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_RESTART_COUNT": "2",
}
HOROVOD = {
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "43210",
    "MASTER_ADDR": "10.0.0.1",
}
TWO_NODES_OF_TWO = [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]
PALS = {"PALS_APID": "6a4f", "PALS_LOCAL_SIZE": "2", "PALS_DEPTH": "8", "PMI_SIZE": "4", "MASTER_ADDR": "x1"}
BY_HAND = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"}
DOCUMENTED: list[Case] = [
    (
        "srun on four nodes, one with fewer tasks",
        with_values(
            UNEVEN_STEP,
            SLURM_PROCID=range(7),
            SLURM_LOCALID=[0, 1, 0, 1, 0, 1, 0],
            SLURM_NODEID=[0, 0, 1, 1, 2, 2, 3],
            SLURM_GTIDS=["0,1", "0,1", "2,3", "2,3", "4,5", "4,5", "6"],
        ),
        "srun",
        [(rank, 7, rank % 2, 1 if rank == 6 else 2, rank // 2, 4) for rank in range(7)],
        {"master_address": "gpu008", "restarts": 2, "job": "SLURM job 77 step 3"},
    ),
    (
        "MPICH on two SLURM nodes with one process on each: as many daemons as processes, each with SLURM_PROCID=0",
        with_values(
            DAEMON_STEP
            | HYDRA
            | {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
            | {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"},
            PMI_RANK=[0, 1],
        ),
        "MPICH or Intel MPI",
        [(0, 2, 0, 1, 0, 2), (1, 2, 0, 1, 1, 2)],
        {"master_address": "n1"},
    ),
    (
        "a launcher that speaks PMI and no more, in a step of as many tasks",
        each(
            3,
            STEP | {"PMI_SIZE": "3", "MASTER_ADDR": "localhost", "SLURM_LOCALID": "0", "SLURM_PROCID": "2"},
            "PMI_RANK",
        )[:2],
        "MPICH or Intel MPI",
        on_one_node(3)[:2],
        {},
    ),
    (
        "Intel MPI from two hosts without a scheduler",
        with_values(
            {"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2", "HYDRA_BSTRAP_LOCALHOST": "head"},
            PMI_RANK=[0, 1, 2, 3],
            MPI_LOCALRANKID=[0, 1, 0, 1],
        ),
        "MPICH or Intel MPI",
        TWO_NODES_OF_TWO,
        {
            "master_address": "head",
            "note": "Rank 0 is expected on head, where mpirun was started: set MASTER_ADDR if it is elsewhere.",
        },
    ),
    (
        "PALS with Cray's PMI",
        with_values(
            PALS,
            PALS_RANKID=[0, 1, 2, 3],
            PMI_RANK=[0, 1, 2, 3],
            PALS_LOCAL_RANKID=[0, 1, 0, 1],
            PALS_NODEID=[0, 0, 1, 1],
        ),
        "PALS",
        TWO_NODES_OF_TWO,
        {"master_address": "x1", "note": ""},
    ),
    (
        "horovodrun in a batch script",
        with_values(
            BATCH | HOROVOD,
            HOROVOD_RANK=[0, 1, 2, 3],
            HOROVOD_LOCAL_RANK=[0, 1, 0, 1],
            HOROVOD_CROSS_RANK=[0, 0, 1, 1],
        ),
        "horovodrun",
        TWO_NODES_OF_TWO,
        {"master_address": "10.0.0.1", "note": ""},
    ),
    (
        "Open MPI in an LSF job",
        with_values(
            OPEN_MPI
            | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_num_nodes": "2"}
            | {"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "hostA 2 hostB 2"},
            OMPI_COMM_WORLD_RANK=[0, 1, 2, 3],
            OMPI_COMM_WORLD_LOCAL_RANK=[0, 1, 0, 1],
        ),
        "Open MPI",
        TWO_NODES_OF_TWO,
        {"master_address": "hostA", "job": "LSF job 9"},
    ),
    (
        "Forgefield's own processes in a step",
        each(2, STEP | BY_HAND | {"FORGEFIELD_LAUNCHER": "forgefield", "LOCAL_WORLD_SIZE": "2"}, "RANK", "LOCAL_RANK"),
        "forgefield",
        on_one_node(2),
        {"master_port": 4000, "note": ""},
    ),
    ("RANK and WORLD_SIZE, all on this machine", each(2, BY_HAND, "RANK"), "environment variables", on_one_node(2), {}),
    (
        "RANK and WORLD_SIZE on two nodes",
        with_values(
            BY_HAND | {"MASTER_ADDR": "a", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            RANK=[0, 1, 2, 3],
            LOCAL_RANK=[0, 1, 0, 1],
        ),
        "environment variables",
        TWO_NODES_OF_TWO,
        {"master_address": "a"},
    ),
    (
        "RANK and WORLD_SIZE that agree with srun",
        each(3, STEP | {"WORLD_SIZE": "3"}, "RANK", *STEP_RANKS),
        "srun",
        on_one_node(3),
        {},
    ),
    (
        "Lightning on the second node",
        with_values(
            {"NODE_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            LOCAL_RANK=[0, 1],
        ),
        "Lightning",
        TWO_NODES_OF_TWO[2:],
        {},
    ),
]


@pytest.mark.parametrize(
    ("environments", "launcher", "places", "more"),
    [pytest.param(*case[1:], id=case[0]) for case in RECORDED + DOCUMENTED],
)
def test_each_process_knows_its_launcher_and_its_place(environments, launcher, places, more) -> None:
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
    with pytest.raises(ForgefieldError, match="PALS_RANKID=3 is set, but nothing says how many .* --env WORLD_SIZE"):
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
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is set, but nothing says how many processes"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1 is set, but nothing says how many processes"),
        (BY_HAND | {"RANK": "2"}, "RANK=2 and WORLD_SIZE=2 contradict each other: ranks count from 0"),
        (BY_HAND | {"RANK": "one"}, "RANK=one is not a whole number"),
        (BY_HAND | {"RANK": "-1"}, "RANK=-1 is not a whole number"),
        (BY_HAND | {"RANK": "0", "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        (BY_HAND | {"RANK": "0", "MASTER_ADDR": "a"}, "rank 0 of 2 .* set LOCAL_RANK and LOCAL_WORLD_SIZE"),
        (BY_HAND | {"RANK": "0", "LOCAL_RANK": "2"}, "process 2, counted from 0, of 2 on this node"),
        (BY_HAND | {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}, "of 3 on this node, but 2 in all"),
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


def test_several_nodes_without_an_address_is_an_error_that_says_how_to_give_one() -> None:
    environment = HYDRA | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(ForgefieldError) as error:
        detect_launch(environment)
    assert str(error.value) == (
        "3 processes on several nodes, and nothing says where rank 0 is: set MASTER_ADDR to the name of its node, for example"
        " mpirun -x MASTER_ADDR=$(hostname) (Open MPI) or -genv MASTER_ADDR $(hostname) (MPICH, Intel)."
    )


def launched(launcher: str, world_size: int, local_size: int, n_nodes: int) -> Launch:
    return Launch(launcher, 0, world_size, 0, local_size, 0, n_nodes, "127.0.0.1", 20000, 0, "", "")


@pytest.mark.parametrize("devices", [None, "auto", -1, "-1", 4, "4", [0, 1, 2, 3], (4, 5, 6, 7), "0,1,2,3"])
@pytest.mark.parametrize("num_nodes", [None, 2])
def test_options_that_agree_with_the_launcher_pass(devices, num_nodes) -> None:
    check_trainer_options(launched("srun", 8, 4, 2), devices=devices, num_nodes=num_nodes, accelerator="auto")


@pytest.mark.parametrize("devices", [None, "auto", -1, 1, 4, "4", [1, 3], "0,1", "2,"])
def test_without_a_launcher_the_devices_are_free(devices) -> None:
    check_trainer_options(launched("none", 1, 1, 1), devices=devices, num_nodes=1, accelerator="gpu")


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
def test_a_contradiction_with_the_launcher_says_what_to_do(launch, options, sentence) -> None:
    with pytest.raises(ForgefieldError) as error:
        check_trainer_options(launch, **{"devices": None, "num_nodes": None, "accelerator": "auto"} | options)
    assert str(error.value) == sentence


@pytest.mark.parametrize("devices", [0, -2, True, 1.5, "two", "1,x", [], [0, "1"], [-1]])
def test_devices_that_are_no_devices_are_refused(devices) -> None:
    with pytest.raises(ForgefieldError, match="trainer.devices="):
        check_trainer_options(launched("none", 1, 1, 1), devices=devices, num_nodes=None, accelerator="auto")


@pytest.mark.parametrize("num_nodes", [0, -1, True, "2", 1.0])
def test_a_number_of_nodes_that_is_none_is_refused(num_nodes) -> None:
    with pytest.raises(ForgefieldError, match="trainer.num_nodes="):
        check_trainer_options(launched("none", 1, 1, 1), devices=None, num_nodes=num_nodes, accelerator="auto")


def test_the_module_needs_no_heavy_import() -> None:
    code = "import sys, forgefield.parallel.launch; print(*{'torch', 'lightning', 'numpy', 'omegaconf'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


# ------------------------------------------------------------------------------------------------------ node lists

WORD = st.from_regex("[a-z][a-z0-9-]{0,3}[a-z-]", fullmatch=True)


@st.composite
def ranges_and_numbers(draw) -> tuple[str, list[str]]:
    """The inside of a pair of brackets, and the numbers it stands for."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        first, length = draw(st.integers(0, 1200)), draw(st.integers(1, 4))
        width = draw(st.integers(1, 5))
        padded = [str(first + i).zfill(max(width, len(str(first)))) for i in range(length)]
        texts.append(padded[0] if length == 1 else f"{padded[0]}-{padded[-1]}")
        numbers += padded
    return ",".join(texts), numbers


@st.composite
def node_lists(draw) -> tuple[str, list[str]]:
    texts, names = [], []
    for _ in range(draw(st.integers(1, 3))):
        text = draw(WORD)
        expanded = [text]
        for i in range(draw(st.integers(0, 2))):
            middle = draw(WORD) if i else ""
            inside, numbers = draw(ranges_and_numbers())
            text += f"{middle}[{inside}]"
            expanded = [name + middle + number for name in expanded for number in numbers]
        texts.append(text)
        names += expanded
    return ",".join(texts), names


@settings(deadline=None)
@given(node_lists())
def test_a_node_list_is_expanded_to_the_names_it_was_made_from(pair: tuple[str, list[str]]) -> None:
    assert expand_node_list(pair[0]) == pair[1]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pair=node_lists())
def test_a_node_list_is_expanded_as_by_scontrol(slurm, pair: tuple[str, list[str]]) -> None:
    done = subprocess.run(["scontrol", "show", "hostnames", pair[0]], capture_output=True, text=True, check=True)
    assert expand_node_list(pair[0]) == done.stdout.split()


def test_node_lists_of_the_manual() -> None:
    assert expand_node_list("gpu[003-005,9],login1") == ["gpu003", "gpu004", "gpu005", "gpu9", "login1"]
    assert expand_node_list("r[1-2]n[3-4]") == ["r1n3", "r1n4", "r2n3", "r2n4"]
    assert expand_node_list("n[9-11]") == ["n9", "n10", "n11"]
    assert expand_node_list("") == []


@pytest.mark.parametrize("text", ["n[1-3", "n1-3]", "n[3-1]", "n[a-b]", "n[]", "n[1,]"])
def test_a_broken_node_list_is_an_error_that_shows_it(text) -> None:
    with pytest.raises(ForgefieldError, match="node list"):
        expand_node_list(text)


# ------------------------------------------------------------------------------------- the launchers themselves

PROBE = """
import dataclasses, json, os
from forgefield.parallel.launch import detect_launch
print(json.dumps(dataclasses.asdict(detect_launch(os.environ))), flush=True)
"""
AS_ROOT = ["--allow-run-as-root", "--oversubscribe"]
CLEAN = {"HOME": os.environ.get("HOME", "/"), "PATH": f"{os.environ['PATH']}:/usr/sbin", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def probe(tmp_path: Path) -> list[str]:
    """The command that prints what detect_launch finds."""
    file = tmp_path / "probe.py"
    file.write_text(PROBE)
    return [sys.executable, str(file)]


def program(*names: str) -> str:
    found = next((path for name in names if (path := shutil.which(name))), None)
    return found or pytest.skip(f"{names[0]} is not installed")


def launches_in(text: str) -> list[Launch]:
    return sorted((Launch(**json.loads(line)) for line in text.splitlines() if line.startswith("{")), key=place_of)


def run(*command: str, more: dict[str, str] | None = None) -> list[Launch]:
    """What the processes started by `command` print, in the order of their ranks."""
    done = subprocess.run(command, env=CLEAN | (more or {}), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return launches_in(done.stdout)


def assert_found(launches: list[Launch], launcher: str, places: list[Place]) -> None:
    assert [launch.launcher for launch in launches] == [launcher] * len(places)
    assert [place_of(launch) for launch in launches] == places
    assert len({(launch.master_address, launch.master_port) for launch in launches}) == 1


def test_started_plainly(probe) -> None:
    assert_found(run(*probe), "none", [ALONE])


def test_mpirun_of_open_mpi(probe) -> None:
    assert_found(run(program("mpirun.openmpi"), *AS_ROOT, "-n", "3", *probe), "Open MPI", on_one_node(3))


def test_mpirun_of_mpich(probe) -> None:
    launches = run(program("mpirun.mpich", "mpiexec.hydra"), "-n", "3", *probe)
    assert_found(launches, "MPICH or Intel MPI", on_one_node(3))


@pytest.fixture
def other_host(tmp_path: Path) -> str:
    """Instead of ssh: runs a command on this machine under another host name, which is all that mpirun sees of a node."""
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("only root can give a process another host name")
    file = tmp_path / "other-host"
    file.write_text(
        '#!/bin/bash\n[ "$1" = -x ] && shift\nhost=$1; shift\nexec unshare --uts bash -c "hostname $host; $*"\n'
    )
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize("by", ["slot", "node"])
def test_mpirun_of_open_mpi_on_two_nodes(probe, other_host, by) -> None:
    ssh = ["--mca", "plm", "rsh", "--mca", "plm_rsh_agent", other_host, "--host", "node1:2,node2:2", "--map-by", by]
    launches = run(program("mpirun.openmpi"), *AS_ROOT, *ssh, "-x", "MASTER_ADDR=node1", "-n", "4", *probe)
    in_turn = [(0, 4, 0, 2, 0, 2), (1, 4, 0, 2, 1, 2), (2, 4, 1, 2, 0, 2), (3, 4, 1, 2, 1, 2)]
    assert_found(launches, "Open MPI", in_turn if by == "node" else TWO_NODES_OF_TWO)
    assert launches[0].master_address == "node1"


def test_mpirun_of_mpich_on_two_nodes(probe, other_host) -> None:
    ssh = ["-bootstrap", "ssh", "-bootstrap-exec", other_host, "-hosts", "node1:2,node2:2"]
    launches = run(program("mpirun.mpich"), *ssh, "-genv", "MASTER_ADDR", "node1", "-n", "4", *probe)
    assert_found(launches, "MPICH or Intel MPI", TWO_NODES_OF_TWO)
    assert launches[0].master_address == "node1"


TORCHRUN_PROGRAM = [sys.executable, "-m", "torch.distributed.run"]


def test_torchrun(probe) -> None:
    assert_found(run(*TORCHRUN_PROGRAM, "--nproc-per-node=2", probe[1]), "torchrun", on_one_node(2))


def test_torchrun_on_two_nodes(probe, tmp_path: Path) -> None:
    # The first agent picks the port, and the second finds it in a file: nothing is guessed, so nothing can collide.
    rendezvous = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={tmp_path}/store", "--rdzv-id=7"]
    rendezvous += ["--rdzv-conf=store_type=file"]
    agents = [
        subprocess.Popen(
            [*TORCHRUN_PROGRAM, *rendezvous, f"--nproc-per-node={n}", probe[1]],
            env=CLEAN,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in (1, 2)
    ]
    outputs = [agent.communicate(timeout=240) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    launches = launches_in("".join(out for out, _ in outputs))
    one_first = [(0, 3, 0, 1, 0, 2), (1, 3, 0, 2, 1, 2), (2, 3, 1, 2, 1, 2)]
    two_first = [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 2), (2, 3, 0, 1, 1, 2)]
    assert_found(launches, "torchrun", one_first if launches[0].local_size == 1 else two_first)


def test_torchrun_that_restarts_its_processes(tmp_path: Path) -> None:
    file = tmp_path / "probe.py"
    file.write_text(f"import os, sys\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': sys.exit(3)\n{PROBE}")
    launches = run(*TORCHRUN_PROGRAM, "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1", str(file))
    assert_found(launches, "torchrun", on_one_node(2))
    assert [launch.restarts for launch in launches] == [1, 1]


def test_the_subprocess_launcher_of_lightning(tmp_path: Path) -> None:
    file = tmp_path / "probe.py"
    file.write_text(
        "from lightning.fabric.plugins.environments import LightningEnvironment\n"
        "from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher\n"
        "launcher = _SubprocessScriptLauncher(LightningEnvironment(), num_processes=2, num_nodes=1)\n"
        f"launcher.launch(lambda: exec({PROBE!r}))\n"
        "for child in launcher.procs: child.wait()\n"
    )
    assert_found(run(sys.executable, str(file)), "Lightning", on_one_node(2))


@pytest.fixture(scope="module")
def in_slurm(slurm, tmp_path_factory) -> dict[str, list[Launch]]:
    """What is found inside one job of 4 tasks, by how the program was started there."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "probe.py").write_text(PROBE)
    probe = f"{sys.executable} {folder}/probe.py"
    plugins = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True).stdout.split()
    commands = {"batch": probe, "srun": f"srun -n 3 {probe}", "srun, all tasks": f"srun {probe}"}
    commands |= {"srun in a shell": f"srun -n 3 bash -c 'true; {probe}'"}
    commands |= {
        f"srun --mpi={name}": f"srun --mpi={name} -n 3 {probe}" for name in ("pmi2", "cray_shasta") if name in plugins
    }
    if shutil.which("mpirun.openmpi"):
        commands["Open MPI"] = f"mpirun.openmpi {' '.join(AS_ROOT)} -n 3 {probe}"
        commands["Open MPI in a step"] = f"srun -n 1 mpirun.openmpi {' '.join(AS_ROOT)} -n 3 {probe}"
    if shutil.which("mpirun.mpich"):
        commands["MPICH"] = f"mpirun.mpich -n 3 {probe}"
    lines = [f"echo '# {name}'\n{command}" for name, command in commands.items()]
    output = slurm.wait(slurm.submit("set -e\n" + "\n".join(lines), folder, "-n", "4", environ=CLEAN), folder)
    sections = [section.split("\n", 1) for section in output.split("# ")[1:]]
    assert [name for name, _ in sections] == list(commands), output
    return {name: launches_in(text) for name, text in sections}


def test_a_batch_script_without_srun_is_one_process_and_says_so(in_slurm) -> None:
    assert_found(in_slurm["batch"], "none", [ALONE])
    assert in_slurm["batch"][0].note == WITHOUT_SRUN


@pytest.mark.parametrize(
    ("started", "launcher", "n"),
    [
        ("srun", "srun", 3),
        ("srun, all tasks", "srun", 4),
        ("srun in a shell", "srun", 3),
        ("srun --mpi=pmi2", "srun", 3),
        ("srun --mpi=cray_shasta", "srun", 3),
        ("Open MPI", "Open MPI", 3),
        ("Open MPI in a step", "Open MPI", 3),
        ("MPICH", "MPICH or Intel MPI", 3),
    ],
)
def test_the_innermost_launcher_counts_in_a_slurm_job(in_slurm, started, launcher, n) -> None:
    if started not in in_slurm:
        pytest.skip(f"{started} is not installed")
    assert_found(in_slurm[started], launcher, on_one_node(n))
    assert all(launch.job.startswith("SLURM job ") and not launch.note for launch in in_slurm[started])
    assert all(("step" in launch.job) == (launcher == "srun") for launch in in_slurm[started])


def test_a_shell_of_salloc_is_one_process(slurm, probe) -> None:
    salloc = ["salloc", "--quiet", "-n", "4"]
    for shell in ([], ["srun", "--interactive", "--preserve-env", "-n1", "-N1"]):  # by SLURM's use_interactive_step
        launches = run(*salloc, *shell, *probe)
        assert_found(launches, "none", [ALONE])
        assert launches[0].note == WITHOUT_SRUN
    assert_found(run(*salloc, "srun", "-n", "3", *probe), "srun", on_one_node(3))


def test_a_job_submitted_from_inside_a_step_does_not_take_that_step_for_its_own(slurm, probe, tmp_path: Path) -> None:
    submitting = (
        f"[ $SLURM_PROCID = 1 ] || exit 0; sbatch --parsable -n 3 -o {tmp_path}/job-%j.out --wrap '{' '.join(probe)}'"
    )
    command = ["srun", "--quiet", "-n", "3", "bash", "-c", submitting]
    job = subprocess.run(command, env=CLEAN, capture_output=True, text=True, timeout=240, check=True).stdout.strip()
    launches = launches_in(slurm.wait(job, tmp_path))
    assert_found(launches, "none", [ALONE])
    assert "3 tasks" in launches[0].note


def test_a_requeued_job_knows_that_it_was_restarted(slurm, probe, tmp_path: Path) -> None:
    script = (
        f"if [ -z $SLURM_RESTART_COUNT ]; then scontrol requeue $SLURM_JOB_ID; sleep 60; fi\nsrun {' '.join(probe)}"
    )
    job = slurm.submit(script, tmp_path, "-n", "2", "--open-mode=append", environ=CLEAN)
    launches = launches_in(slurm.wait(job, tmp_path))
    assert_found(launches, "srun", on_one_node(2))
    assert [launch.restarts for launch in launches] == [1, 1]


def test_starting_slurm_again_changes_nothing(slurm) -> None:
    def daemons() -> list[bytes]:
        return [file.read_bytes() for name in ("slurmctld", "slurmd") if (file := Path(f"/run/{name}.pid")).exists()]

    before = daemons()
    subprocess.run([str(Path(__file__).with_name("start-slurm.sh"))], check=True, timeout=60)
    assert daemons() == before
