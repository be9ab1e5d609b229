"""Variables that launchers set, and what they say about the place of each process.

Recorded with Open MPI 4.1.4, MPICH 4.0.2, SLURM 22.05.8 and torch 2.13 and cut down to the variables that matter. Nodes node1
and node2 are two host names of one machine. PALS, horovodrun, Intel MPI, LSF and SLURM on several nodes follow their
documentation and the sources of the programs that set the variables.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from forgefield.parallel.launch import Launch

Place = tuple[int, int, int, int, int, int]  # rank, world_size, local_rank, local_size, node_rank, n_nodes
ALONE: Place = (0, 1, 0, 1, 0, 1)
WITHOUT_SRUN = (
    "This SLURM job has 4 tasks, but the program was started without srun: one process trains."
    " Put srun in front of the command to use all tasks."
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
            "note": "Rank 0 is assumed to be on head, where mpirun was started: set MASTER_ADDR if it is not.",
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
