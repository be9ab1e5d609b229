"""How this process was started: by which launcher, as which rank of how many, and where rank 0 is to be met.

Only environment variables are read (and the node file that PBS names in one), never a flag: `srun`, `mpirun` or `torchrun` in
front of a command is enough. Launchers nest (`mpirun` in a SLURM job inherits SLURM's variables), so the innermost is asked
first. Half a set of variables, or one that contradicts itself or the trainer's options, is an error and not a guess.
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
    """One process of a job. Hydra and Open MPI 5 do not tell the nodes: they are counted as if all held `local_size`."""

    launcher: str  # "torchrun", "srun", "Open MPI", "MPICH or Intel MPI", ..., or "none": one process, started plainly
    rank: int  # 0 ... world_size - 1
    world_size: int
    local_rank: int  # 0 ... local_size - 1: the number on this node, which picks the device
    local_size: int
    node_rank: int
    n_nodes: int
    master_address: str  # where rank 0 is
    master_port: int
    restarts: int  # how often torchrun or SLURM has started this job again
    job: str  # the scheduler's job and step for messages, or ""
    note: str  # something the user should read, or ""


@dataclass(frozen=True)
class _Place:
    """What a launcher says of this process; None where it does not say."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    n_nodes: int | None = None
    identity: str = ""  # the same for all processes of a job, another one for another job
    note: str = ""


class _Variables:
    """Environment variables as text and as counts; an empty one is not set."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, *names: str) -> str:
        """The first of `names` that is set, or ""."""
        return next((value for name in names if (value := self._environ.get(name, "").strip())), "")

    def count(self, *names: str) -> int | None:
        """The first of `names` that is set, as a whole number from 0 up, or None."""
        for name in names:
            if value := self.text(name):
                if not re.fullmatch("[0-9]+", value):
                    raise ForgefieldError(f"The environment variable {name}={value} is not a whole number from 0 up.")
                return int(value)
        return None

    def pair(self, rank_name: str, size_name: str) -> tuple[int, int]:
        """A rank and how many there are: both must be set, and the rank be below."""
        rank, size = self.count(rank_name), self.count(size_name)
        if rank is None or size is None:
            there, missing = (rank_name, size_name) if size is None else (size_name, rank_name)
            raise ForgefieldError(
                f"The environment variable {there}={self.text(there)} is set, {missing} is not: set both."
            )
        if rank >= size:
            raise ForgefieldError(
                f"The environment variables {rank_name}={rank} and {size_name}={size} contradict each other:"
                f" ranks count from 0, so {rank_name} must be below {size_name}."
            )
        return rank, size

    def pair_if_set(self, rank_name: str, size_name: str) -> tuple[int | None, int | None]:
        """The same where it is not certain that the two are set."""
        both = self.text(rank_name) and self.text(size_name)
        return self.pair(rank_name, size_name) if both else (self.count(rank_name), self.count(size_name))

    def words_of_file(self, name: str) -> list[str]:
        """What stands in the file that a variable names; nothing if it is not set, or not readable on this node."""
        try:
            return Path(self.text(name)).read_text().split() if self.text(name) else []
        except OSError:
            return []


def expand_node_list(text: str) -> list[str]:
    """The names in SLURM's short form: "gpu[003-005,9],login1" is gpu003, gpu004, gpu005, gpu9, login1."""
    names: list[str] = []
    for item in re.findall(r"(?:\[[^\]]*\]|[^,\s])+", text):
        parts = re.split(r"\[([^\]]*)\]", item)  # text, ranges, text, ranges, ..., text
        if any("[" in part or "]" in part for part in parts):
            raise ForgefieldError(f"The node list {text!r} has a bracket without its partner.")
        choices = [_expand_ranges(part, text) if i % 2 else [part] for i, part in enumerate(parts)]
        names += ["".join(choice) for choice in product(*choices)]
    return names


def _expand_ranges(ranges: str, text: str) -> list[str]:
    """The numbers in "003-005,9", each at least as wide as the lower end of its range is written."""
    numbers: list[str] = []
    for piece in ranges.split(","):
        match = re.fullmatch("([0-9]+)(?:-([0-9]+))?", piece)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ForgefieldError(f"The node list {text!r} has {piece!r} where a number or a range belongs (003-005).")
        numbers += [str(n).zfill(len(match[1])) for n in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return numbers


def _expand_counts(text: str) -> list[int]:
    """SLURM's tasks on each node: "2(x3),1" is 2, 2, 2, 1."""
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", piece)
        if not match:
            raise ForgefieldError(f"SLURM's tasks per node {text!r} are not of the form 2(x3),1.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _torchrun(v: _Variables) -> _Place | None:
    return _torch_variables(v, "torchrun") if v.text("TORCHELASTIC_RUN_ID") else None


def _own_spawning(v: _Variables) -> _Place | None:
    return _torch_variables(v, "forgefield") if v.text("FORGEFIELD_LAUNCHER") == "forgefield" else None


def _by_hand(v: _Variables) -> _Place | None:
    if v.text("RANK", "WORLD_SIZE"):
        return _torch_variables(v, "environment variables")
    for name in ("LOCAL_RANK", "PMIX_RANK"):
        if v.text(name):
            raise ForgefieldError(
                f"The environment variable {name}={v.text(name)} is set, but nothing says how many processes there are:"
                f" unset it, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."
            )
    return None


def _torch_variables(v: _Variables, launcher: str) -> _Place:
    """The names of torch. GROUP_RANK is torchrun's word for the number of the node, NODE_RANK Lightning's."""
    local = v.pair_if_set("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    node = v.count("GROUP_RANK", "NODE_RANK"), v.count("GROUP_WORLD_SIZE")
    return _Place(launcher, *v.pair("RANK", "WORLD_SIZE"), *local, *node, v.text("TORCHELASTIC_RUN_ID"))


def _lightning(v: _Variables) -> _Place | None:
    """Lightning's subprocess launcher sets LOCAL_RANK, NODE_RANK and WORLD_SIZE, but no RANK."""
    if v.text("RANK") or not (v.text("LOCAL_RANK") and v.text("NODE_RANK") and v.text("WORLD_SIZE")):
        return None
    local_rank, size = v.pair("LOCAL_RANK", "WORLD_SIZE")
    node_rank, local_size = v.count("NODE_RANK"), v.count("LOCAL_WORLD_SIZE")
    if node_rank and not local_size:
        raise ForgefieldError(
            f"LOCAL_RANK={local_rank}, NODE_RANK={node_rank} and WORLD_SIZE={size} are set, but neither RANK nor"
            " LOCAL_WORLD_SIZE, so the rank is not known: set LOCAL_WORLD_SIZE to the number of processes on each node."
        )
    rank = (node_rank or 0) * (local_size or 0) + local_rank
    return _Place("Lightning", rank, size, local_rank, local_size, node_rank)


def _open_mpi(v: _Variables) -> _Place | None:
    """Open MPI. Its OMPI_COMM_WORLD_NODE_RANK counts processes on this node: it is not the number of the node."""
    if not v.text("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        return None
    world = v.pair("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local = v.pair("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    n_nodes = v.count("OMPI_MCA_orte_num_nodes")  # Open MPI 4 only
    return _Place("Open MPI", *world, *local, None, n_nodes, v.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"))


def _pals(v: _Variables) -> _Place | None:
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
                f"PALS does not say how many processes it started: {size} are expected, {local_size} on each of the {n_hosts}"
                " nodes of the job. If they are fewer, add --env WORLD_SIZE=... to mpiexec."
            )
        if rank >= size:
            raise ForgefieldError(
                f"The environment variable PALS_RANKID={rank} is set, but nothing says how many processes there are (PALS sets"
                " no PMI_SIZE with --pmi=pmix): add --env WORLD_SIZE=... to mpiexec, with the number after -n."
            )
    local_rank, node_rank = v.count("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"), v.count("PALS_NODEID")
    return _Place("PALS", rank, size, local_rank, local_size, node_rank, None, v.text("PALS_APID"), note)


def _hydra(v: _Variables) -> _Place | None:
    """Hydra: the mpirun of MPICH and of Intel MPI. It tells nothing by which two jobs differ."""
    if not v.text("PMI_RANK", "PMI_SIZE", "PMI_ID"):
        return None
    rank, size = v.pair("PMI_ID" if v.text("PMI_ID") and not v.text("PMI_RANK") else "PMI_RANK", "PMI_SIZE")
    if _is_task_of_srun(v, rank, size):
        return None
    return _Place("MPICH or Intel MPI", rank, size, *v.pair_if_set("MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def _horovodrun(v: _Variables) -> _Place | None:
    if not v.text("HOROVOD_RANK", "HOROVOD_SIZE"):
        return None
    place = *v.pair("HOROVOD_RANK", "HOROVOD_SIZE"), *v.pair("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    node = v.count("HOROVOD_CROSS_RANK"), v.count("HOROVOD_CROSS_SIZE")
    return _Place("horovodrun", *place, *node, v.text("HOROVOD_GLOO_RENDEZVOUS_PORT"))


def _srun(v: _Variables) -> _Place | None:
    """A task of srun; None in a batch script and in salloc's shell, which have no step of their own.

    A job submitted from inside a step inherits that step's variables, and salloc's shell may be a step of one task.
    SLURM_GTIDS, the tasks on this node, is always fresh: a batch script is one task, whatever the rest says.
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
    return _Place("srun", *world, v.count("SLURM_LOCALID"), local_size, node_rank, n_nodes, identity)


def _is_task_of_srun(v: _Variables, rank: int, size: int | None) -> bool:
    """Whether a plugin of srun set PMI's or PALS's variables. Hydra in a SLURM job sets MPI_LOCALRANKID as well."""
    place = None if v.text("MPI_LOCALRANKID") else _srun(v)
    return place is not None and place.rank == rank and size in (None, place.world_size)


def _alone(v: _Variables) -> _Place:
    n_tasks = v.count("SLURM_NTASKS") or 1
    note = (
        f"SLURM gave this job {n_tasks} tasks, but the program was started without srun: one process trains."
        " Put srun in front to use all."
    )
    return _Place("none", 0, 1, note=note if n_tasks > 1 and v.text("SLURM_JOB_ID", "SLURM_JOBID") else "")


def _cluster_launcher(v: _Variables) -> _Place | None:
    """mpirun before srun, for mpirun starts its daemons with srun. RANK and WORLD_SIZE must agree if they are set as well."""
    place = _open_mpi(v) or _pals(v) or _hydra(v) or _horovodrun(v) or _srun(v)
    if place and v.text("RANK") and v.text("WORLD_SIZE"):
        rank, size = v.pair("RANK", "WORLD_SIZE")
        if (rank, size) != (place.rank, place.world_size):
            raise ForgefieldError(
                f"The environment variables RANK={rank} and WORLD_SIZE={size} are set, but {place.launcher} started this"
                f" process as rank {place.rank} of {place.world_size}: unset RANK and WORLD_SIZE."
            )
    return place


def detect_launch(environ: Mapping[str, str]) -> Launch:
    """Who started this process, and as which rank of how many; ForgefieldError where the variables do not fit together."""
    v = _Variables(environ)
    place = _torchrun(v) or _own_spawning(v) or _cluster_launcher(v) or _lightning(v) or _by_hand(v) or _alone(v)
    local_rank, local_size = _local_place(v, place)
    n_nodes = place.n_nodes or max(-(-place.world_size // local_size), (place.node_rank or 0) + 1)
    in_blocks = place.rank % local_size == local_rank  # otherwise the ranks were dealt out one node after the other
    node_rank = min(place.rank // local_size if in_blocks else place.rank % n_nodes, n_nodes - 1)
    address, note = _master_address(v, place, local_size)
    return Launch(
        launcher=place.launcher,
        rank=place.rank,
        world_size=place.world_size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node_rank if place.node_rank is None else place.node_rank,
        n_nodes=n_nodes,
        master_address=address,
        master_port=_master_port(v, place),
        restarts=(v.count("TORCHELASTIC_RESTART_COUNT") or 0) + (v.count("SLURM_RESTART_COUNT") or 0),
        job=_job(v, place.launcher),
        note=" ".join(filter(None, (place.note, note))),
    )


def _local_place(v: _Variables, place: _Place) -> tuple[int, int]:
    """The number on this node and how many are there, derived where only one answer is possible."""
    local_rank, local_size = place.local_rank, place.local_size
    if place.world_size == 1 or place.n_nodes == 1 or v.text("MASTER_ADDR") in _LOOPBACK:
        local_size = place.world_size if local_size is None else local_size
    if local_size == place.world_size and local_rank is None:
        local_rank = place.rank
    if local_rank is None or local_size is None:
        raise ForgefieldError(
            f"This is rank {place.rank} of {place.world_size} ({place.launcher}), but which of the processes on its node it is"
            " cannot be told: set LOCAL_RANK and LOCAL_WORLD_SIZE, and MASTER_ADDR if there are several nodes."
        )
    if not local_rank < local_size <= place.world_size:
        raise ForgefieldError(
            f"The environment variables of {place.launcher} contradict each other: process {local_rank}, counted from 0, of"
            f" {local_size} on this node, but {place.world_size} in all."
        )
    return local_rank, local_size


def _master_address(v: _Variables, place: _Place, local_size: int) -> tuple[str, str]:
    """Where rank 0 is, and a note where that is likely and not sure."""
    if place.launcher == "none":
        return "127.0.0.1", ""
    if v.text("MASTER_ADDR") or local_size == place.world_size:
        return v.text("MASTER_ADDR") or "127.0.0.1", ""
    # Only srun's own step says where its tasks are: the step of mpirun's daemons is another.
    of_step = v.text("SLURM_STEP_NODELIST") if place.launcher == "srun" else ""
    nodes = expand_node_list(of_step or v.text("SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    if hosts := nodes or v.words_of_file("PBS_NODEFILE") or v.text("LSB_HOSTS", "LSB_MCPU_HOSTS").split():
        return hosts[0], ""
    if host := v.text("HYDRA_BSTRAP_LOCALHOST"):
        return host, f"Rank 0 is expected on {host}, where mpirun was started: set MASTER_ADDR if it is elsewhere."
    raise ForgefieldError(
        f"{place.world_size} processes on several nodes, and nothing says where rank 0 is: set MASTER_ADDR to the name of its"
        " node, for example mpirun -x MASTER_ADDR=$(hostname) (Open MPI) or -genv MASTER_ADDR $(hostname) (MPICH, Intel)."
    )


def _master_port(v: _Variables, place: _Place) -> int:
    """MASTER_PORT, or one that all processes of the job compute alike and another job hardly does."""
    port = v.count("MASTER_PORT")
    if port is not None and not 1 <= port <= 65535:
        raise ForgefieldError(f"The environment variable MASTER_PORT={port} is not a port: it must be from 1 to 65535.")
    # Not the scheduler's job where the launcher has an identity: mpirun need not pass the scheduler's variables on.
    identity = f"{place.launcher}/{place.identity or _job(v, '')}/{place.world_size}"
    return port or _FIRST_PORT + zlib.crc32(identity.encode()) % _N_PORTS


def _job(v: _Variables, launcher: str) -> str:
    step = f" step {v.text('SLURM_STEP_ID', 'SLURM_STEPID')}" if launcher == "srun" else ""
    jobs = {"SLURM": v.text("SLURM_JOB_ID", "SLURM_JOBID"), "PBS": v.text("PBS_JOBID"), "LSF": v.text("LSB_JOBID")}
    return next((f"{scheduler} job {job}{step}" for scheduler, job in jobs.items() if job), "")
