"""What `forgefield check` examines (the model and frames of a run, or a new model for the data of a config), all checks in
order, and the table of their results."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from forgefield.checks.derivatives import check_cutoff, check_derivative, check_forces, check_stress
from forgefield.checks.outputs import KeyedProbe, OutputProbe, check_outputs
from forgefield.checks.probe import CheckResult, Probe
from forgefield.checks.symmetry import (
    check_batch,
    check_fragments,
    check_isolated_atoms,
    check_no_edges,
    check_symmetry,
)
from forgefield.checks.transformations import PERMUTATION, REFLECTION, ROTATION, SUPERCELL, TRANSLATION, WRAPPING
from forgefield.config.loading import load_config, override_config
from forgefield.config.trust import CONFIG
from forgefield.data.frame import Frame
from forgefield.data.neighbours.graph import graph_of
from forgefield.data.reading import read_table
from forgefield.data.species import SpeciesTable
from forgefield.data.store.table import FrameTable
from forgefield.data.transforms import frame_transform
from forgefield.errors import ForgefieldError
from forgefield.ldos.options import require_frames
from forgefield.models.building import build_model
from forgefield.models.potential import Potential
from forgefield.models.resolving import branch_names, hooks_of, single_branch
from forgefield.runs import Run
from forgefield.settings import Config
from forgefield.training.problem.frames import build_frames_problem


@dataclass(frozen=True)
class Subject:
    """A model and its data.

    model: all options of the model. frames: those to choose from. knots: number of intervals of the radial tables that kernels
    use in training; zero without tables.
    """

    potential: Potential
    frames: FrameTable
    model: Mapping[str, Any]
    knots: int

    @classmethod
    def of_run(
        cls,
        name: str | os.PathLike[str] | Run,
        overrides: Sequence[str] = (),
        *,
        data: object = None,
        which: str = "best",
        head: str | None = None,
        trust_code: bool = False,
    ) -> Subject:
        """The trained model of a run. overrides: settings for reading `data`; default: the training data of the run."""
        run = Run.open(name, trust_code=trust_code)
        run.require_head(head)
        run.require_single_model("checked")
        config = run.config
        if overrides:
            config = override_config(config, list(overrides), allowed=("data.labels", "data.units"), verb="check")
        source = data if data is not None else config.data.train
        if source is None:
            raise ForgefieldError(f"Run {run.name} has no record of its training data; name a file with --data FILE.")
        potential = run.load_potential(which, head=head)
        transform = frame_transform(config.data.transforms, run.trust)
        frames = read_table(source, config.data.labels, config.data.units, required=False, transform=transform)
        return cls(potential, frames, run.info["model"], _knots(config))

    @classmethod
    def of_config(
        cls,
        file: str | Path | dict[str, Any] | Config,
        overrides: Sequence[str] = (),
        *,
        data: object = None,
        head: str | None = None,
        trust_code: bool = False,
    ) -> Subject:
        """A model with new weights for the data of a config. data: frames to check on; default: the training data."""
        config = load_config(file, list(overrides), trust_code=trust_code)
        require_frames(config, "check", "their gradients are compared with autograd at the start of a training")
        knots = _knots(config)
        config.training.precision, config.training.freeze, config.training.lora = "float64", None, None
        problem = build_frames_problem(config)
        potential, resolved = problem.model, problem.resolved
        if head is not None or branch_names(resolved):
            resolved, _ = single_branch(resolved, None, head)
            potential = build_model(resolved, precision="float64", seed=config.seed, trust=CONFIG)
        frames = problem.data.train.frames
        if data is not None:
            transform = frame_transform(config.data.transforms, CONFIG)
            frames = read_table(data, config.data.labels, config.data.units, required=False, transform=transform)
        return cls(potential, frames, resolved, knots)

    def check(self, frames: Sequence[Frame], generator: np.random.Generator) -> list[CheckResult]:
        """The results of all checks on these frames. generator: draws rotations and directions."""
        has_limit = self.potential.interface.isolated_limit
        energies = hooks_of(self.model).isolated_energies(self.model) if has_limit else None
        return run_checks(
            self.potential,
            frames,
            SpeciesTable(self.potential.species, trained=True),
            graph_of(self.potential).reach,
            generator=generator,
            reference_energies=energies,
        )

    def choose_frames(self, count: int, generator: np.random.Generator) -> list[Frame]:
        """Random frames, in the order of the file; frames of one atom only if there are no others."""
        several = (self.frames.n_atoms > 1).nonzero()[0]
        rows = several if len(several) else (self.frames.n_atoms > 0).nonzero()[0]
        chosen = generator.permutation(len(rows))[:count]
        return list(self.frames.frames(rows[sorted(chosen)]))

    def radial_tables(self) -> str | None:
        """One sentence about the accuracy of the radial tables; None where there are none."""
        return self.potential.interface.radial_table_line(self.knots) if self.knots else None


def _knots(config: Config) -> int:
    kernels = config.training.kernels
    if kernels.radial == "exact" or config.training.precision == "float64":
        return 0
    return kernels.knots


def run_checks(
    potential: Potential,
    frames: Sequence[Frame],
    species: SpeciesTable,
    cutoff: float,
    *,
    generator: np.random.Generator,
    reference_energies: Mapping[str, float] | None = None,
) -> list[CheckResult]:
    """Check a float64 copy of `potential` on `frames`; neither is changed. Extra outputs are checked like energies.

    Parameters
    ----------
    potential
        The model.
    frames
        At least one frame; labels are not used.
    species
        Species of the model.
    cutoff
        Cutoff of the model, A.
    generator
        Draws rotations, displacements and directions.
    reference_energies
        Energy of an isolated atom of each species, eV; default: an isolated atom is compared with one in a large box.
    """
    if not frames:
        raise ForgefieldError("There are no frames to check the model on; at least one is needed.")
    results: list[CheckResult] = []
    if potential.has_energy:
        results += _check_energies(KeyedProbe(potential, species, cutoff), frames, generator, reference_energies)
    outputs = OutputProbe(potential, species, cutoff)
    if outputs.declared:
        checked = check_outputs(outputs, frames, generator)
        suffix = "outputs" if potential.has_energy else ""
        results += [replace(result, name=f"{result.name} {suffix}".strip()) for result in checked]
    if not results:
        raise ForgefieldError("This model predicts neither an energy nor properties, so there is nothing to check.")
    return results


def _check_energies(
    probe: Probe,
    frames: Sequence[Frame],
    generator: np.random.Generator,
    reference_energies: Mapping[str, float] | None,
) -> list[CheckResult]:
    return [
        *(check_symmetry(law, probe, frames, generator) for law in (ROTATION, REFLECTION, TRANSLATION, PERMUTATION)),
        *([] if probe.potential.forces_are_direct else [check_forces(probe, frames, generator)]),
        *(check_derivative(probe, name, frames, generator) for name in probe.potential.derivative_outputs),
        check_stress(probe, frames, generator),
        check_batch(probe, frames, generator),
        check_cutoff(probe, frames, generator),
        *(check_symmetry(law, probe, frames, generator) for law in (SUPERCELL, WRAPPING)),
        check_isolated_atoms(probe, reference_energies),
        check_fragments(probe, frames, generator),
        check_no_edges(probe, frames),
    ]


def print_checks(console: Console, results: Sequence[CheckResult]) -> None:
    """Print one row per check: verdict, largest deviation, tolerance and meaning."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("deviation", justify="right", no_wrap=True)
    table.add_column("allowed", justify="right", no_wrap=True)
    table.add_column("meaning")
    for result in results:
        verdict = "[green]ok[/]" if result.passed else "[bold red]FAILED[/]"
        table.add_row(result.name, verdict, f"{result.value:.1e}", f"{result.tolerance:.1e}", result.note)
    console.print(table)
    units = "energies in eV per atom, forces in eV/A, stress in eV/A^3, other outputs in units of their scale"
    console.print(f"[dim]Largest deviations: {units}.[/]")
    failed = [result.name for result in results if not result.passed]
    if failed:
        console.print(f"[bold red]{len(failed)} of {len(results)} checks failed:[/] {', '.join(failed)}")
    else:
        console.print(f"[green]All {len(results)} checks passed.[/]")
