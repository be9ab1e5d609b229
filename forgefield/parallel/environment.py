"""The Lightning environment of a launched process, and checks of the config against the launcher before any work is done."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from lightning.fabric.plugins.environments import ClusterEnvironment

from forgefield.errors import ForgefieldError
from forgefield.parallel.launch import Launch, detect_launch

MPI_LAUNCHERS = ("Open MPI", "MPICH or Intel MPI", "PALS")


class LaunchedEnvironment(ClusterEnvironment):
    """The detected launch. Ranks are fixed: what Lightning derives from numbers of devices and nodes does not change them.

    device_index: index of the device of this process among those that are visible to it, the local rank of Lightning.
    """

    def __init__(self, launch: Launch, *, device_index: int | None = None) -> None:
        self.launch = launch
        self._device_index = launch.local_rank if device_index is None else device_index

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.launch.master_address

    @property
    def main_port(self) -> int:
        return self.launch.master_port

    @staticmethod
    def detect() -> bool:
        return detect_launch(os.environ).launcher != "none"

    def world_size(self) -> int:
        return self.launch.world_size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self.launch.rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._device_index

    def node_rank(self) -> int:
        return self.launch.node_rank


class MPIEnvironment(LaunchedEnvironment):
    """For user-defined Lightning scripts that are started with mpirun or mpiexec: Open MPI, MPICH, Intel MPI, PALS."""

    def __init__(self) -> None:
        launch = detect_launch(os.environ)
        if launch.launcher not in MPI_LAUNCHERS:
            raise ForgefieldError(
                f"MPIEnvironment: this process was not started by mpirun or mpiexec (launcher: {launch.launcher})."
            )
        super().__init__(launch)

    @staticmethod
    def detect() -> bool:
        return detect_launch(os.environ).launcher in MPI_LAUNCHERS


def check_trainer_options(launch: Launch, *, devices: object, num_nodes: object, accelerator: object) -> None:
    """Raise ForgefieldError if the options of the trainer contradict the launcher.

    devices: None, "auto", -1 (all), a number, "2", a list of indices or "0,1". num_nodes: None or a number.
    """
    n_devices, n_nodes = _number_of_devices(devices), _number_of_nodes(num_nodes)
    if launch.launcher == "none":
        if n_nodes is not None and n_nodes > 1:
            raise ForgefieldError(_how_to_start_on_nodes(n_nodes, n_devices))
        return
    tasks = "task" if launch.launcher == "srun" else "process"
    if n_devices is not None and n_devices != launch.local_size:
        raise ForgefieldError(
            f"{_started(launch)}, but trainer.devices={devices}: leave trainer.devices out, or start"
            f" {_count(n_devices, tasks)} per node{_option(launch, n_devices)}."
        )
    if n_nodes is not None and n_nodes != launch.n_nodes:
        raise ForgefieldError(
            f"{_started(launch)}, but trainer.num_nodes={num_nodes}: leave trainer.num_nodes out, or start on"
            f" {_count(n_nodes, 'node')}."
        )
    if accelerator == "mps" and launch.local_size > 1:
        raise ForgefieldError(f"{_started(launch)}, but trainer.accelerator=mps has one device: start one process.")


def _number_of_devices(devices: object) -> int | None:
    """Number of devices requested on each node; None for all."""
    if devices is None or devices in ("auto", -1, "-1"):
        return None
    if isinstance(devices, str) and re.fullmatch(r"\s*[0-9]+\s*(,\s*[0-9]+\s*)*,?\s*", devices):
        # As in Lightning "2" is a number of devices and "2," the device with that index.
        indices = [int(piece) for piece in devices.split(",") if piece.strip()]
        devices = indices if "," in devices else indices[0]
    if isinstance(devices, Sequence) and devices and all(type(index) is int and index >= 0 for index in devices):
        return len(devices)
    if type(devices) is int and devices > 0:
        return devices
    raise ForgefieldError(
        f"trainer.devices={devices!r} is neither a positive number of devices, nor a list of indices such as [0, 1], nor auto."
    )


def _number_of_nodes(num_nodes: object) -> int | None:
    if num_nodes is None or (type(num_nodes) is int and num_nodes > 0):
        return num_nodes
    raise ForgefieldError(f"trainer.num_nodes={num_nodes!r} is not a positive integer.")


def _count(n: int, noun: str) -> str:
    return f"1 {noun}" if n == 1 else f"{n} {noun}{'es' if noun.endswith('s') else 's'}"


def _started(launch: Launch) -> str:
    """What the launcher did, for messages: 8 tasks were started by srun on 2 nodes, 4 on each."""
    noun = _count(launch.world_size, "task" if launch.launcher == "srun" else "process")
    by_hand = launch.launcher == "environment variables"
    how = "announced by RANK and WORLD_SIZE" if by_hand else f"started by {launch.launcher}"
    text = f"{noun} {'was' if launch.world_size == 1 else 'were'} {how}"
    if launch.n_nodes > 1:
        share = "each" if launch.local_size * launch.n_nodes == launch.world_size else "this one"
        return f"{text} on {launch.n_nodes} nodes, {launch.local_size} on {share}"
    return f"{text} on one node" if launch.world_size > 1 else text


def _option(launch: Launch, n: int) -> str:
    options = {
        "srun": f"srun --ntasks-per-node={n}",
        "torchrun": f"torchrun --nproc-per-node={n}",
        "Open MPI": f"mpirun --map-by ppr:{n}:node",
        "MPICH or Intel MPI": f"mpirun -ppn {n}",
        "PALS": f"mpiexec --ppn {n}",
    }
    return f" ({options[launch.launcher]})" if launch.launcher in options else ""


def _how_to_start_on_nodes(n_nodes: int, n_devices: int | None) -> str:
    each = n_devices or 4
    example = "" if n_devices else f", here with {each} devices on each"
    return (
        f"trainer.num_nodes={n_nodes}, but one process was started, on one node. Start one process per device on every node"
        f"{example}: srun --nodes={n_nodes} --ntasks-per-node={each} forgefield train ..., or"
        f" mpirun -n {n_nodes * each} --hostfile HOSTS forgefield train ..., or on every node"
        f" torchrun --nnodes={n_nodes} --nproc-per-node={each} --node-rank=... --master-addr=... -m forgefield train ..."
    )
