"""Labels of selected structures, each computed once, whatever happens in between.

With a calculator, every label is a file of its own, written when it is computed. With a command, structures are divided into
jobs; a job records its exit code itself, so that one that ended while nobody was watching is not repeated. SLURM jobs are found
again by their names. Structures without a valid label are set aside with the reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms
from ase.calculators.calculator import BaseCalculator
from ase.calculators.singlepoint import SinglePointCalculator

from forgefield.config.components import environment_of_children, import_class
from forgefield.config.trust import CONFIG
from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically, written_atomically
from forgefield.inference.xyz_files import write_extxyz
from forgefield.processes import die_with_parent
from forgefield.trust.loop.options import LabelOptions

INPUT, OUTPUT, EXIT, LOG = "input.extxyz", "output.extxyz", "exit", "log.txt"


def label_structures(
    structures: Sequence[Atoms], options: LabelOptions, folder: Path, *, notify: Callable[[str], None]
) -> tuple[list[Atoms], dict[int, str]]:
    """Labelled structures, and the reasons, by index, why others have no label. Existing labels in `folder` are used."""
    folder.mkdir(parents=True, exist_ok=True)
    if options.calculator is not None:
        _with_calculator(structures, options, folder, notify)
    else:
        _with_command(structures, options, folder, notify)
    labelled: list[Atoms] = []
    failed: dict[int, str] = {}
    for index in range(len(structures)):
        if _label_file(folder, index).exists():
            labelled += ase.io.iread(_label_file(folder, index))
        else:
            failed[index] = _failure_file(folder, index).read_text()
    return labelled, failed


def _label_file(folder: Path, index: int) -> Path:
    return folder / f"{index:04d}.extxyz"


def _failure_file(folder: Path, index: int) -> Path:
    return folder / f"{index:04d}.failed"


def _is_done(folder: Path, index: int) -> bool:
    return _label_file(folder, index).exists() or _failure_file(folder, index).exists()


def _store(folder: Path, index: int, structure: Atoms, results: dict[str, object], options: LabelOptions) -> str | None:
    """Write a label; the reason if it is not valid."""
    reason = _problem(structure, results, options.max_force)
    if reason is not None:
        write_atomically(_failure_file(folder, index), reason)
        return reason
    image = Atoms(structure.numbers, positions=structure.positions, cell=structure.cell, pbc=structure.pbc)
    image.info = {key: value for key, value in structure.info.items() if key in ("start", "iteration", "temperature")}
    image.calc = SinglePointCalculator(image, **results)
    with written_atomically(_label_file(folder, index)) as partial:
        write_extxyz(partial, [image])
    return None


def _problem(structure: Atoms, results: dict[str, object], max_force: float | None) -> str | None:
    energy, forces = results.get("energy"), np.asarray(results.get("forces", np.nan), dtype=float)
    if energy is None or not np.isfinite(float(energy)):  # type: ignore[arg-type]
        return "the energy is missing or not finite"
    if forces.shape != (len(structure), 3) or not np.isfinite(forces).all():
        return "forces are missing or not finite"
    largest = float(np.linalg.norm(forces, axis=1).max())
    if max_force is not None and largest > max_force:
        return f"the largest force is {largest:.3g} eV/A, above label.max_force"
    return None


# ---- calculators


def _with_calculator(
    structures: Sequence[Atoms], options: LabelOptions, folder: Path, notify: Callable[[str], None]
) -> None:
    missing = [index for index in range(len(structures)) if not _is_done(folder, index)]
    if not missing:
        return
    make = import_class(str(options.calculator), BaseCalculator, where="label.calculator", trust=CONFIG, factories=True)
    for index in missing:
        atoms = Atoms(
            structures[index].numbers,
            positions=structures[index].positions,
            cell=structures[index].cell,
            pbc=structures[index].pbc,
        )
        try:
            atoms.calc = make(**options.options)
            results: dict[str, object] = {"energy": float(atoms.get_potential_energy()), "forces": atoms.get_forces()}
            if atoms.cell.volume > 0 and "stress" in atoms.calc.implemented_properties:
                results["stress"] = atoms.get_stress()
            reason = _store(folder, index, structures[index], results, options)
        except Exception as error:  # a calculator may raise anything; the loop continues with the other structures
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            write_atomically(_failure_file(folder, index), reason)
        if reason is not None:
            notify(f"structure {index} has no label: {reason}")


# ---- commands


def _with_command(
    structures: Sequence[Atoms], options: LabelOptions, folder: Path, notify: Callable[[str], None]
) -> None:
    size = options.frames_per_job
    jobs = [_Job(folder, start, structures[start : start + size], options) for start in range(0, len(structures), size)]
    waiting = [job for job in jobs if not job.is_collected()]
    for job in waiting:
        job.prepare()
        if options.sbatch is not None:
            job.submit()
        else:
            job.run()
            job.collect(notify)
    while options.sbatch is not None and waiting:
        for job in list(waiting):
            if job.has_ended():
                job.collect(notify)
                waiting.remove(job)
        if waiting:
            time.sleep(options.poll)


class _Job:
    """A command that labels some structures, in a folder of its own."""

    def __init__(self, folder: Path, first: int, structures: Sequence[Atoms], options: LabelOptions) -> None:
        self.folder, self.first, self.structures, self.options = folder, first, structures, options
        self.place = folder / f"job-{first:04d}"
        digest = hashlib.sha256(str(self.place.absolute()).encode()).hexdigest()[:10]
        self.name = f"forgefield-label-{digest}"

    def is_collected(self) -> bool:
        return all(_is_done(self.folder, self.first + i) for i in range(len(self.structures)))

    def prepare(self) -> None:
        """Write the structures and the script, unless a job was started already."""
        self.place.mkdir(exist_ok=True)
        script = self.place / "job.sh"
        if script.exists():
            return
        images = []
        for number, structure in enumerate(self.structures):
            image = Atoms(structure.numbers, positions=structure.positions, cell=structure.cell, pbc=structure.pbc)
            image.info["label_id"] = self.first + number
            images.append(image)
        with written_atomically(self.place / INPUT) as partial:
            write_extxyz(partial, images)
        place = self.place.absolute()
        names = {"{input}": str(place / INPUT), "{output}": str(place / OUTPUT)}
        command = str(self.options.command)
        for key, value in names.items():
            command = command.replace(key, shlex.quote(value))
        end = shlex.quote(str(place / EXIT))
        lines = ["#!/bin/bash", f"[ -e {end} ] && exit 0", f"cd {shlex.quote(os.getcwd())}", f"( {command} )"]
        write_atomically(script, "\n".join([*lines, f"echo $? > {end}.new && mv {end}.new {end}", ""]))

    def run(self) -> None:
        """Run the command here and wait for it."""
        if (self.place / EXIT).exists():
            return
        environ = {**os.environ, **environment_of_children()}
        with (self.place / LOG).open("w") as log:
            subprocess.run(
                ["bash", str(self.place / "job.sh")],
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent(),
                env=environ,
                check=False,
            )

    def submit(self) -> None:
        """Submit to SLURM, unless this was done before."""
        if (self.place / EXIT).exists() or (self.place / "job.json").exists() or self._in_queue():
            return
        words = ["sbatch", "--parsable", "--job-name", self.name, "--output", str(self.place.absolute() / LOG)]
        words += [*(self.options.sbatch or []), str(self.place / "job.sh")]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ForgefieldError("label.sbatch: there is no sbatch on this machine.") from error
        if done.returncode != 0:
            raise ForgefieldError(f"label.sbatch: sbatch failed: {done.stderr.strip().splitlines()[-1:]}")
        write_atomically(self.place / "job.json", json.dumps({"job": done.stdout.strip(), "name": self.name}))

    def _in_queue(self) -> bool:
        done = subprocess.run(
            ["squeue", "-h", "-n", self.name, "-o", "%i"], capture_output=True, text=True, check=False
        )
        return done.returncode == 0 and bool(done.stdout.strip())

    def has_ended(self) -> bool:
        """Whether the command has ended, or its job has left the queue without it."""
        if (self.place / EXIT).exists():
            return True
        if self._in_queue():
            return False
        time.sleep(1.0)  # files of other machines may arrive late
        return True

    def collect(self, notify: Callable[[str], None]) -> None:
        """Store the labels in the output; structures without one are set aside."""
        code = _code(self.place / EXIT)
        images, problem = self._outputs()
        if code != "0":
            ended = "ended without an exit code" if code is None else f"ended with exit code {code}"
            problem = f"the command {ended}; see {self.place / LOG}"
        for number, structure in enumerate(self.structures):
            index = self.first + number
            image, reason = images.get(index), problem
            if image is not None and _same(image, structure):
                results = dict(image.calc.results) if image.calc is not None else {}
                wanted = {name: results[name] for name in ("energy", "forces", "stress") if name in results}
                reason = _store(self.folder, index, structure, wanted, self.options)
            else:
                reason = reason or "the output has no such structure"
                write_atomically(_failure_file(self.folder, index), reason)
            if reason is not None:
                notify(f"structure {index} has no label: {reason}")

    def _outputs(self) -> tuple[dict[int, Atoms], str | None]:
        """Structures of the output by index: that in `label_id`, or their position if there are as many as in the input."""
        try:
            images = ase.io.read(self.place / OUTPUT, index=":", format="extxyz")
        except Exception as error:  # whatever a damaged file makes the reader raise
            return {}, f"the output cannot be read: {type(error).__name__}"
        assert isinstance(images, list)
        if all("label_id" in image.info for image in images):
            return {int(image.info["label_id"]): image for image in images}, None
        if len(images) != len(self.structures):
            return {}, f"the output has {len(images)} structures without label_id, not {len(self.structures)}"
        return {self.first + number: image for number, image in enumerate(images)}, None


def _code(path: Path) -> str | None:
    return path.read_text().strip() if path.exists() else None


def _same(one: Atoms, other: Atoms) -> bool:
    return np.array_equal(one.numbers, other.numbers) and np.allclose(one.positions, other.positions, atol=1e-4)
