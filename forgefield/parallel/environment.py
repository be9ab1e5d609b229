"""What Lightning needs to know about the launcher, whichever it was: one environment for all of them."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import ClusterEnvironment

from forgefield.errors import ForgefieldError
from forgefield.parallel.launch import Launch, detect_launch

MPI_LAUNCHERS = ("Open MPI", "MPICH or Intel MPI", "PALS")


class LaunchedEnvironment(ClusterEnvironment):
    """The launch as it was detected. Ranks are facts here: what Lightning computes from devices and nodes changes nothing.

    device_index: which of the devices that this process sees is its own; Lightning calls it the local rank.
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
    """For a Lightning script of one's own that is started with mpirun or mpiexec: Open MPI, MPICH, Intel MPI, PALS."""

    def __init__(self) -> None:
        launch = detect_launch(os.environ)
        if launch.launcher not in MPI_LAUNCHERS:
            raise ForgefieldError(
                f"MPIEnvironment: this process was not started by mpirun or mpiexec (found: {launch.launcher})."
            )
        super().__init__(launch)

    @staticmethod
    def detect() -> bool:
        return detect_launch(os.environ).launcher in MPI_LAUNCHERS
