"""How this process was started: the launcher, the rank, the number of ranks, and the address of rank 0.

Only environment variables are read (and the node file of PBS, which one of them names), no flags: `srun`, `mpirun` or
`torchrun` in front of a command is enough. Launchers nest (`mpirun` in a SLURM job inherits SLURM's variables), so the
innermost is looked for first. An incomplete or contradictory set of variables is an error, not a guess.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from forgefield.errors import ForgefieldError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # SLURM numbers its batch, interactive and extern steps from the top
_FIRST_PORT, _N_PORTS = 20000, 10000  # below the ports that Linux hands out by itself


@dataclass(frozen=True)
class Launch:
    """One process of a job. Hydra and Open MPI 5 do not provide the number of nodes: it is computed as if all had `local_size`
    processes."""

    launcher: (
        str  # "torchrun", "srun", "Open MPI", "MPICH or Intel MPI", ..., or "none": one process without a launcher
    )
    rank: int  # 0 ... world_size - 1
    world_size: int
    local_rank: int  # 0 ... local_size - 1: the index on this node, which selects the device
    local_size: int
    node_rank: int
    n_nodes: int
    master_address: str  # of rank 0
    master_port: int
    restarts: int  # how often torchrun or SLURM has restarted this job
    job: str  # job and step of the scheduler for messages, or ""
    note: str  # message for the user, or ""


@dataclass(frozen=True)
class _LauncherInfo:
    """What the variables of a launcher state about this process; None where they do not."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    n_nodes: int | None = None
    identity: str = ""  # the same for all processes of a job, and different for another job
    note: str = ""


class _Variables:
    """Environment variables as text and as counts; an empty one is not set."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, *names: str) -> str:
        """The first of `names` that is set, or ""."""
        return next((value for name in names if (value := self._environ.get(name, "").strip())), "")

    def count(self, *names: str) -> int | None:
        """The first of `names` that is set, as a non-negative integer, or None."""
        for name in names:
            if value := self.text(name):
                if not re.fullmatch("[0-9]+", value):
                    raise ForgefieldError(f"The environment variable {name}={value} is not a non-negative integer.")
                return int(value)
        return None

    def pair(self, rank_name: str, size_name: str) -> tuple[int, int]:
        """A rank and the number of ranks: both must be set, and the rank must be smaller."""
        rank, size = self.count(rank_name), self.count(size_name)
        if rank is None or size is None:
            present, missing = (rank_name, size_name) if size is None else (size_name, rank_name)
            raise ForgefieldError(
                f"The environment variable {present}={self.text(present)} is set, {missing} is not: set both."
            )
        if rank >= size:
            raise ForgefieldError(
                f"The environment variables {rank_name}={rank} and {size_name}={size} contradict each other:"
                f" ranks count from 0, so {rank_name} must be below {size_name}."
            )
        return rank, size

    def pair_if_set(self, rank_name: str, size_name: str) -> tuple[int | None, int | None]:
        """The same for variables that need not be set."""
        both = self.text(rank_name) and self.text(size_name)
        return self.pair(rank_name, size_name) if both else (self.count(rank_name), self.count(size_name))

    def words_of_file(self, name: str) -> list[str]:
        """The words in the file that a variable names; none if it is not set, or not readable on this node."""
        try:
            return Path(self.text(name)).read_text().split() if self.text(name) else []
        except OSError:
            return []


def expand_node_list(text: str) -> list[str]:
    """The names in a node list of SLURM: "gpu[003-005,9],login1" is gpu003, gpu004, gpu005, gpu9, login1."""
    names: list[str] = []
    for item in re.findall(r"(?:\[[^\]]*\]|[^,\s])+", text):
        parts = re.split(r"\[([^\]]*)\]", item)  # text, ranges, text, ranges, ..., text
        if any("[" in part or "]" in part for part in parts):
            raise ForgefieldError(f"The node list {text!r} has an unmatched bracket.")
        choices = [_expand_ranges(part, text) if i % 2 else [part] for i, part in enumerate(parts)]
        names += ["".join(choice) for choice in product(*choices)]
    return names


def _expand_ranges(ranges: str, text: str) -> list[str]:
    """The numbers in "003-005,9", each padded to the width of the lower end of its range."""
    numbers: list[str] = []
    for piece in ranges.split(","):
        match = re.fullmatch("([0-9]+)(?:-([0-9]+))?", piece)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ForgefieldError(
                f"The node list {text!r} has {piece!r} in place of a number or a range such as 003-005."
            )
        numbers += [str(n).zfill(len(match[1])) for n in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return numbers


def _expand_counts(text: str) -> list[int]:
    """Tasks on each node, as SLURM writes them: "2(x3),1" is 2, 2, 2, 1."""
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", piece)
        if not match:
            raise ForgefieldError(f"SLURM's tasks per node {text!r} are not of the form 2(x3),1.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _torchrun(v: _Variables) -> _LauncherInfo | None:
    return _torch_variables(v, "torchrun") if v.text("TORCHELASTIC_RUN_ID") else None


def _forgefield_spawn(v: _Variables) -> _LauncherInfo | None:
    return _torch_variables(v, "forgefield") if v.text("FORGEFIELD_LAUNCHER") == "forgefield" else None


def _torch_environment(v: _Variables) -> _LauncherInfo | None:
    if v.text("RANK", "WORLD_SIZE"):
        return _torch_variables(v, "environment variables")
    for name in ("LOCAL_RANK", "PMIX_RANK"):
        if v.text(name):
            raise ForgefieldError(
                f"The environment variable {name}={v.text(name)} is set, but the number of processes is unknown:"
                f" unset it, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."
            )
    return None


def _torch_variables(v: _Variables, launcher: str) -> _LauncherInfo:
    """The variables of torch. GROUP_RANK is the index of the node in torchrun, NODE_RANK in Lightning."""
    local = v.pair_if_set("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    node = v.count("GROUP_RANK", "NODE_RANK"), v.count("GROUP_WORLD_SIZE")
    return _LauncherInfo(launcher, *v.pair("RANK", "WORLD_SIZE"), *local, *node, v.text("TORCHELASTIC_RUN_ID"))


def _lightning(v: _Variables) -> _LauncherInfo | None:
    """Lightning's subprocess launcher sets LOCAL_RANK, NODE_RANK and WORLD_SIZE, but no RANK."""
    if v.text("RANK") or not (v.text("LOCAL_RANK") and v.text("NODE_RANK") and v.text("WORLD_SIZE")):
        return None
    local_rank, size = v.pair("LOCAL_RANK", "WORLD_SIZE")
    node_rank, local_size = v.count("NODE_RANK"), v.count("LOCAL_WORLD_SIZE")
    if node_rank and not local_size:
        raise ForgefieldError(
            f"LOCAL_RANK={local_rank}, NODE_RANK={node_rank} and WORLD_SIZE={size} are set, but neither RANK nor"
            " LOCAL_WORLD_SIZE, so the rank is unknown: set LOCAL_WORLD_SIZE to the number of processes on each node."
        )
    rank = (node_rank or 0) * (local_size or 0) + local_rank
    return _LauncherInfo("Lightning", rank, size, local_rank, local_size, node_rank)


def _open_mpi(v: _Variables) -> _LauncherInfo | None:
    """Open MPI. OMPI_COMM_WORLD_NODE_RANK counts processes on this node: it is not the index of the node."""
    if not v.text("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        return None
    world = v.pair("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local = v.pair("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    n_nodes = v.count("OMPI_MCA_orte_num_nodes")  # Open MPI 4 only
    return _LauncherInfo("Open MPI", *world, *local, None, n_nodes, v.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"))


def _pals(v: _Variables) -> _LauncherInfo | None:
    """PALS of HPE and Cray. With --pmi=pmix no variable has the number of processes."""
    rank = v.count("PALS_RANKID")
    if rank is None or _is_task_of_srun(v, rank, v.count("PMI_SIZE")):
        return None
    local_size, note = v.count("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"), ""
    if size_name := next((name for name in ("PMI_SIZE", "WORLD_SIZE") if v.text(name)), None):
        size = v.pair("PALS_RANKID", size_name)[1]
    else:
        n_hosts = len(set(v.words_of_file("PBS_NODEFILE")))
        size = (local_size or 0) * n_hosts
        if n_hosts > 1:
            note = (
                f"PALS does not provide the number of processes: {size} are expected, {local_size} on each of the {n_hosts}"
                " nodes of the job. If there are fewer, add --env WORLD_SIZE=... to mpiexec."
            )
        if rank >= size:
            raise ForgefieldError(
                f"The environment variable PALS_RANKID={rank} is set, but the number of processes is unknown (PALS does not set"
                " PMI_SIZE with --pmi=pmix): add --env WORLD_SIZE=... to mpiexec, with the number after -n."
            )
    local_rank, node_rank = v.count("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"), v.count("PALS_NODEID")
    return _LauncherInfo("PALS", rank, size, local_rank, local_size, node_rank, None, v.text("PALS_APID"), note)


def _hydra(v: _Variables) -> _LauncherInfo | None:
    """Hydra: the mpirun of MPICH and of Intel MPI. It sets no variable that distinguishes two jobs."""
    if not v.text("PMI_RANK", "PMI_SIZE", "PMI_ID"):
        return None
    rank, size = v.pair("PMI_ID" if v.text("PMI_ID") and not v.text("PMI_RANK") else "PMI_RANK", "PMI_SIZE")
    if _is_task_of_srun(v, rank, size):
        return None
    return _LauncherInfo("MPICH or Intel MPI", rank, size, *v.pair_if_set("MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def _horovodrun(v: _Variables) -> _LauncherInfo | None:
    if not v.text("HOROVOD_RANK", "HOROVOD_SIZE"):
        return None
    info = *v.pair("HOROVOD_RANK", "HOROVOD_SIZE"), *v.pair("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    node = v.count("HOROVOD_CROSS_RANK"), v.count("HOROVOD_CROSS_SIZE")
    return _LauncherInfo("horovodrun", *info, *node, v.text("HOROVOD_GLOO_RENDEZVOUS_PORT"))


def _srun(v: _Variables) -> _LauncherInfo | None:
    """A task of srun; None in a batch script and in the shell of salloc, which are not steps.

    A job submitted from inside a step inherits the variables of that step, and the shell of salloc may be a step of one task.
    SLURM_GTIDS, the tasks on this node, is always current: a batch script is one task, whatever the other variables say.
    """
    step = v.text("SLURM_STEP_ID", "SLURM_STEPID")
    if not step.isdecimal() or int(step) >= _FIRST_SPECIAL_STEP:
        return None
    rank = v.count("SLURM_PROCID")
    size_name = "SLURM_STEP_NUM_TASKS" if v.text("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    node_rank, n_nodes = v.count("SLURM_NODEID"), v.count("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    counts = _expand_counts(v.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or "0")
    tasks_here = len(v.text("SLURM_GTIDS").split(","))
    local_size = (counts[node_rank] if node_rank is not None and node_rank < len(counts) else 0) or tasks_here
    inherited = v.text("SLURM_GTIDS") and tasks_here != local_size
    if inherited or (v.count(size_name) == 1 and rank == 0 and (v.count("SLURM_NTASKS") or 1) > 1):
        return None
    identity = f"{v.text('SLURM_JOB_ID', 'SLURM_JOBID')}.{step}"
    world = v.pair("SLURM_PROCID", size_name)
    return _LauncherInfo("srun", *world, v.count("SLURM_LOCALID"), local_size, node_rank, n_nodes, identity)


def _is_task_of_srun(v: _Variables, rank: int, size: int | None) -> bool:
    """Whether a plugin of srun set PMI's or PALS's variables. Hydra in a SLURM job sets MPI_LOCALRANKID as well."""
    info = None if v.text("MPI_LOCALRANKID") else _srun(v)
    return info is not None and info.rank == rank and size in (None, info.world_size)


def _single_process(v: _Variables) -> _LauncherInfo:
    n_tasks = v.count("SLURM_NTASKS") or 1
    note = (
        f"This SLURM job has {n_tasks} tasks, but the program was started without srun: one process trains."
        " Put srun in front of the command to use all tasks."
    )
    return _LauncherInfo("none", 0, 1, note=note if n_tasks > 1 and v.text("SLURM_JOB_ID", "SLURM_JOBID") else "")


def _cluster_launcher(v: _Variables) -> _LauncherInfo | None:
    """The variables of mpirun come before those of srun, because mpirun starts its daemons with srun. RANK and WORLD_SIZE must
    agree with them if they are set."""
    info = _open_mpi(v) or _pals(v) or _hydra(v) or _horovodrun(v) or _srun(v)
    if info and v.text("RANK") and v.text("WORLD_SIZE"):
        rank, size = v.pair("RANK", "WORLD_SIZE")
        if (rank, size) != (info.rank, info.world_size):
            raise ForgefieldError(
                f"The environment variables RANK={rank} and WORLD_SIZE={size} are set, but {info.launcher} started this"
                f" process as rank {info.rank} of {info.world_size}: unset RANK and WORLD_SIZE."
            )
    return info


def detect_launch(environ: Mapping[str, str]) -> Launch:
    """How this process was started; ForgefieldError if the variables are incomplete or contradict each other."""
    v = _Variables(environ)
    info = (
        _torchrun(v)
        or _forgefield_spawn(v)
        or _cluster_launcher(v)
        or _lightning(v)
        or _torch_environment(v)
        or _single_process(v)
    )
    local_rank, local_size = _local_rank_and_size(v, info)
    n_nodes = info.n_nodes or max(-(-info.world_size // local_size), (info.node_rank or 0) + 1)
    in_blocks = info.rank % local_size == local_rank  # otherwise consecutive ranks are on consecutive nodes
    node_rank = min(info.rank // local_size if in_blocks else info.rank % n_nodes, n_nodes - 1)
    address, note = _master_address(v, info, local_size)
    return Launch(
        launcher=info.launcher,
        rank=info.rank,
        world_size=info.world_size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node_rank if info.node_rank is None else info.node_rank,
        n_nodes=n_nodes,
        master_address=address,
        master_port=_master_port(v, info),
        restarts=(v.count("TORCHELASTIC_RESTART_COUNT") or 0) + (v.count("SLURM_RESTART_COUNT") or 0),
        job=_job(v, info.launcher),
        note=" ".join(filter(None, (info.note, note))),
    )


def _local_rank_and_size(v: _Variables, info: _LauncherInfo) -> tuple[int, int]:
    """Index among the processes of this node and their number, derived where only one answer is possible."""
    local_rank, local_size = info.local_rank, info.local_size
    if info.world_size == 1 or info.n_nodes == 1 or v.text("MASTER_ADDR") in _LOOPBACK:
        local_size = info.world_size if local_size is None else local_size
    if local_size == info.world_size and local_rank is None:
        local_rank = info.rank
    if local_rank is None or local_size is None:
        raise ForgefieldError(
            f"This is rank {info.rank} of {info.world_size} ({info.launcher}), but its index among the processes of its node"
            " is unknown: set LOCAL_RANK and LOCAL_WORLD_SIZE, and MASTER_ADDR if there are several nodes."
        )
    if not local_rank < local_size <= info.world_size:
        raise ForgefieldError(
            f"The environment variables of {info.launcher} contradict each other: process {local_rank}, counted from 0, of"
            f" {local_size} on this node, but {info.world_size} in total."
        )
    return local_rank, local_size


def _master_address(v: _Variables, info: _LauncherInfo, local_size: int) -> tuple[str, str]:
    """Address of rank 0, and a note if it is uncertain."""
    if info.launcher == "none":
        return "127.0.0.1", ""
    if v.text("MASTER_ADDR") or local_size == info.world_size:
        return v.text("MASTER_ADDR") or "127.0.0.1", ""
    # Only the step of srun has the nodes of its tasks; mpirun starts its daemons in a different step.
    of_step = v.text("SLURM_STEP_NODELIST") if info.launcher == "srun" else ""
    nodes = expand_node_list(of_step or v.text("SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    if hosts := nodes or v.words_of_file("PBS_NODEFILE") or v.text("LSB_HOSTS", "LSB_MCPU_HOSTS").split():
        return hosts[0], ""
    if host := v.text("HYDRA_BSTRAP_LOCALHOST"):
        return host, f"Rank 0 is assumed to be on {host}, where mpirun was started: set MASTER_ADDR if it is not."
    raise ForgefieldError(
        f"There are {info.world_size} processes on several nodes, and the node of rank 0 is unknown: set MASTER_ADDR to its"
        " name, for example mpirun -x MASTER_ADDR=$(hostname) (Open MPI) or -genv MASTER_ADDR $(hostname) (MPICH, Intel)."
    )


def _master_port(v: _Variables, info: _LauncherInfo) -> int:
    """MASTER_PORT, or a port that is the same for all processes of the job and most likely different for another job."""
    port = v.count("MASTER_PORT")
    if port is not None and not 1 <= port <= 65535:
        raise ForgefieldError(f"The environment variable MASTER_PORT={port} is not a port: it must be from 1 to 65535.")
    # The job of the scheduler is a fallback: mpirun need not pass on the variables of the scheduler.
    identity = f"{info.launcher}/{info.identity or _job(v, '')}/{info.world_size}"
    return port or _FIRST_PORT + zlib.crc32(identity.encode()) % _N_PORTS


def _job(v: _Variables, launcher: str) -> str:
    step = f" step {v.text('SLURM_STEP_ID', 'SLURM_STEPID')}" if launcher == "srun" else ""
    jobs = {"SLURM": v.text("SLURM_JOB_ID", "SLURM_JOBID"), "PBS": v.text("PBS_JOBID"), "LSF": v.text("LSB_JOBID")}
    return next((f"{scheduler} job {job}{step}" for scheduler, job in jobs.items() if job), "")
