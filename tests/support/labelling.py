"""Labellers that write down what they compute, fail on request, and can kill the process that uses them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import ase.io
from ase import Atoms
from ase.build import bulk
from ase.calculators.calculator import all_changes
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator

ROOT = Path(__file__).parents[2]


class CountingEMT(EMT):
    """EMT that appends the first coordinates of each structure it computes to $LABEL_LOG.

    With $KILL_AT_LABEL=n, the process is killed before the n-th one. Structures that start with a gold atom fail with
    $FAIL_GOLD.
    """

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        log = Path(os.environ["LABEL_LOG"])
        done = len(log.read_text().splitlines()) if log.exists() else 0
        if os.environ.get("KILL_AT_LABEL") == str(done + 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("FAIL_GOLD") and atoms.symbols[0] == "Au":
            raise RuntimeError("self-consistency was not reached")
        super().calculate(atoms, properties, system_changes)
        with log.open("a") as stream:
            stream.write(" ".join(repr(float(value)) for value in atoms.positions[:2].ravel()) + "\n")


def copper_structures(n: int, *, gold: tuple[int, ...] = ()) -> list[Atoms]:
    """n rattled cells of copper; those numbered in `gold` start with a gold atom."""
    frames = []
    for index in range(n):
        atoms = bulk("Cu", a=3.6, cubic=True)
        atoms.rattle(0.1, seed=index)
        if index in gold:
            atoms.symbols[0] = "Au"
        frames.append(atoms)
    return frames


def label_command() -> str:
    """The command that runs `label_file`, as `label.command` of a loop."""
    return f"PYTHONPATH={ROOT} {sys.executable} -m tests.support.labelling {{input}} {{output}}"


def label_file(source: str, target: str) -> None:
    """Label structures as a command: those that start with a gold atom are left out, and then the exit code is 1."""
    images = []
    for atoms in ase.io.read(source, index=":"):
        if atoms.symbols[0] == "Au":
            continue
        atoms.calc = EMT()
        results = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
        atoms.calc = SinglePointCalculator(atoms, **results)
        images.append(atoms)
        with open(Path(source).parent / "computed.txt", "a") as stream:
            stream.write(f"{atoms.info['label_id']}\n")
    ase.io.write(target, images, format="extxyz")
    sys.exit(0 if len(images) == len(ase.io.read(source, index=":")) else 1)


if __name__ == "__main__":
    label_file(*sys.argv[1:])
