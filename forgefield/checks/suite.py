"""All checks in order, and the table that shows what they found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.table import Table

from forgefield.checks.derivatives import check_forces, check_stress
from forgefield.checks.locality import (
    check_batch,
    check_fragments,
    check_isolated_atoms,
    check_no_edges,
    check_supercell,
    check_wrapping,
)
from forgefield.checks.outputs import KeyedProbe, OutputProbe, check_outputs
from forgefield.checks.probe import CheckResult, Probe
from forgefield.checks.smoothness import check_cutoff
from forgefield.checks.symmetry import check_permutation, check_reflection, check_rotation, check_translation
from forgefield.data.frame import Frame
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.models.potential import Potential


def run_checks(
    potential: Potential,
    frames: Sequence[Frame],
    species: SpeciesTable,
    cutoff: float,
    *,
    generator: np.random.Generator,
    reference_energies: Mapping[str, float] | None = None,
) -> list[CheckResult]:
    """Check a float64 copy of `potential` on `frames`; neither is changed. Further outputs are checked like energies are.

    cutoff: A. reference_energies: eV per species, what an isolated atom must have; without them that check compares
    a lone atom in empty space with one in a large box.
    """
    if not frames:
        raise ForgefieldError("There is no frame to check the model on; give at least one.")
    results: list[CheckResult] = []
    if potential.has_energy:
        results += _check_energies(KeyedProbe(potential, species, cutoff), frames, generator, reference_energies)
    outputs = OutputProbe(potential, species, cutoff)
    if outputs.said:
        found = check_outputs(outputs, frames, generator)
        which = "outputs" if potential.has_energy else ""
        results += [replace(result, name=f"{result.name} {which}".strip()) for result in found]
    if not results:
        raise ForgefieldError("This model gives neither an energy nor properties, so there is nothing to check.")
    return results


def _check_energies(
    probe: Probe,
    frames: Sequence[Frame],
    generator: np.random.Generator,
    reference_energies: Mapping[str, float] | None,
) -> list[CheckResult]:
    return [
        check_rotation(probe, frames, generator),
        check_reflection(probe, frames, generator),
        check_translation(probe, frames, generator),
        check_permutation(probe, frames, generator),
        *([] if probe.potential.forces_are_direct else [check_forces(probe, frames, generator)]),
        check_stress(probe, frames, generator),
        check_batch(probe, frames, generator),
        check_cutoff(probe, frames, generator),
        check_supercell(probe, frames, generator),
        check_wrapping(probe, frames, generator),
        check_isolated_atoms(probe, reference_energies),
        check_fragments(probe, frames, generator),
        check_no_edges(probe, frames),
    ]


def print_checks(console: Console, results: Sequence[CheckResult]) -> None:
    """One line per check: verdict, what was measured, what is allowed, and what it means."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", justify="right", no_wrap=True)
    table.add_column("allowed", justify="right", no_wrap=True)
    table.add_column("what it means")
    for result in results:
        verdict = "[green]ok[/]" if result.passed else "[bold red]FAILED[/]"
        table.add_row(result.name, verdict, f"{result.value:.1e}", f"{result.tolerance:.1e}", result.note)
    console.print(table)
    units = "energies in eV per atom, forces in eV/A, stress in eV/A^3, other outputs in units of their scale"
    console.print(f"[dim]Largest deviations found: {units}.[/]")
    failed = [result.name for result in results if not result.passed]
    if failed:
        console.print(f"[bold red]{len(failed)} of {len(results)} checks failed:[/] {', '.join(failed)}")
    else:
        console.print(f"[green]All {len(results)} checks passed.[/]")
