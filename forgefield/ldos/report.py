"""Sections of the report of an LDOS run: errors of observables, density of states and density, and how to use the model.

Predictions are read from `predictions/SPLIT-points.npz`; where it is missing or damaged, the page says so in place of figures.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from forgefield.errors import ForgefieldError
from forgefield.report.analysis import Pairs, Quantity
from forgefield.report.canvas import COLOURS, house_style, linear_ticks, new_figure, to_svg
from forgefield.report.figures import parity_figure
from forgefield.report.folder import SPLITS, RunData, split_title
from forgefield.report.markup import (
    Child,
    Html,
    card,
    dim_comments,
    join,
    section,
    shorten,
    significant,
    tabbed,
    table,
    tag,
)
from forgefield.report.sections.errors import tests_table
from forgefield.untrusted.archives import npz_arrays

SHOWN = 4
"""Number of snapshots of a split that are shown with figures."""
DENSITY = Quantity("density", "Density", "n", "1/Å³", "1/Å³", 1.0)


@dataclass(frozen=True)
class PointPredictions:
    """Predictions for the snapshots of a split: the arrays of `predictions/SPLIT-points.npz`, by name."""

    arrays: dict[str, np.ndarray]

    @property
    def names(self) -> list[str]:
        return [str(name) for name in self.arrays["names"]]

    @property
    def metrics(self) -> list[str]:
        return [key.removeprefix("error_") for key in self.arrays if key.startswith("error_")]


def read_points(path: Path) -> PointPredictions | None:
    """The predictions of a split; None where the file is missing, damaged or inconsistent."""
    try:
        arrays = npz_arrays(path)
        n, levels = len(arrays["names"]), len(arrays["energies"])
        consistent = all(arrays[f"dos_{kind}"].shape == (n, levels) for kind in ("pred", "ref"))
        consistent = consistent and all(arrays[key].shape == (n,) for key in arrays if key.startswith("error_"))
        return PointPredictions(arrays) if consistent and n else None
    except (OSError, ForgefieldError, KeyError, TypeError):
        return None


def errors_section(run: RunData) -> Html:
    """Errors of observables for each split: a table, densities of states and parity plots of densities."""
    lead = (
        "Observables computed from the predicted LDOS of complete snapshots, compared with those of the reference LDOS."
    )
    splits = run.splits if run.tests else SPLITS
    stored = {split: read_points(run.path / "predictions" / f"{split}-points.npz") for split in splits}
    available = {split: predictions for split, predictions in stored.items() if predictions is not None}
    if not available:
        message = (
            "There are no predictions for complete snapshots yet; forgefield test RUN --data SNAPSHOTS writes them. "
            "Observables need the temperature, the number of electrons and the cell of each snapshot."
        )
        return section("errors", "Errors", lead, tag("div", tag("p", message), class_="card empty"))
    panels = []
    for split, predictions in available.items():
        count = len(predictions.names)
        title = f"{split_title(split, first=True)} · {count} snapshot{'' if count == 1 else 's'}"
        panels.append((title, _panel(run, split, predictions)))
    return section("errors", "Errors", lead, tests_table(run), tabbed(panels))


def _panel(run: RunData, split: str, predictions: PointPredictions) -> Html:
    figures: list[Html] = []
    for number, name in enumerate(predictions.names[:SHOWN]):
        title = shorten(name, 40)
        drawing = to_svg(dos_figure(predictions, number), f"dos-{split}-{number}", f"Density of states of {title}")
        figures.append(card(f"Density of states, {title}", drawing))
        pairs = density_pairs(predictions, number)
        if pairs is not None:
            drawing = to_svg(parity_figure(pairs), f"density-{split}-{number}", f"Density of {title}")
            figures.append(card(f"Density, {title}", drawing))
    return join([tag("div", _table(run, predictions), class_="grid"), tag("div", *figures, class_="grid")])


def usage_section(run: RunData) -> Html:
    """Commands and Python code that use the model."""
    name = shorten(run.argument, 300)
    python = f"import forgefield\n\nmodel = forgefield.load({name!r})\nldos = model(descriptors)  # 1/(eV A^3)"
    shell = f"forgefield test {shlex.quote(name)} --data SNAPSHOTS"
    cards = [card("In Python", tag("pre", dim_comments(python))), card("On the command line", tag("pre", shell))]
    return section("use", "Use this model", None, tag("div", *cards, class_="grid two"))


def dos_figure(predictions: PointPredictions, number: int) -> Figure:
    """Predicted and reference density of states over energy, their difference below, and the reference Fermi energy."""
    arrays = predictions.arrays
    energies, predicted, reference = arrays["energies"], arrays["dos_pred"][number], arrays["dos_ref"][number]
    with house_style():
        figure = new_figure(3.7, 4.1)
        main, below = figure.subplots(2, 1, sharex=True, height_ratios=(3.0, 1))
        main.plot(energies, reference, color=COLOURS["orange"], label="reference")
        main.plot(energies, predicted, color=COLOURS["blue"], linestyle=(0, (4, 2)), label="predicted")
        if "fermi_ref" in arrays:
            fermi = float(arrays["fermi_ref"][number])
            main.axvline(fermi, color=COLOURS["line"], linewidth=0.9, linestyle=(0, (2, 2)), label="Fermi energy")
        below.axhline(0, color=COLOURS["line"], linewidth=0.8)
        below.plot(energies, predicted - reference, color=COLOURS["blue"])
        main.set_ylabel("DOS, 1/eV")
        below.set_ylabel("error")
        below.set_xlabel("energy, eV")
        main.legend(loc="best")
        for axes in (main, below):
            axes.grid(axis="y")
            linear_ticks(axes, "x", 6)
            linear_ticks(axes, "y", 5 if axes is main else 3)
        return figure


def density_pairs(predictions: PointPredictions, number: int) -> Pairs | None:
    """Predicted and reference density at the sampled points of a snapshot; None where none were stored."""
    stored = predictions.arrays.get(f"density_{number}")
    if stored is None or stored.ndim != 2 or len(stored) != 2 or stored.shape[1] == 0:
        return None
    return Pairs(DENSITY, stored[0], stored[1])


def _table(run: RunData, predictions: PointPredictions) -> Html:
    """Errors of all observables of each snapshot, and of energies against the DFT calculation."""
    arrays, units = predictions.arrays, run.heads
    header: list[Child] = [
        "Snapshot",
        *(f"{name.replace('_', ' ')}, {units.get(name, '')}" for name in predictions.metrics),
    ]
    against_dft = {"band": "band_energy", "total": "total"}
    with_dft = {
        name: key
        for name, key in against_dft.items()
        if f"{key}_pred" in arrays and np.isfinite(arrays.get(f"{name}_dft", np.nan)).all()
    }
    header += [f"{name} energy error against DFT, meV/atom" for name in with_dft]
    rows: list[list[Child]] = []
    for number, snapshot in enumerate(predictions.names[:200]):
        row: list[Child] = [shorten(snapshot, 40)]
        row += [significant(float(arrays[f"error_{name}"][number])) for name in predictions.metrics]
        for name, key in with_dft.items():
            difference = arrays[f"{key}_pred"][number] - arrays[f"{name}_dft"][number]
            row.append(significant(float(1000 * difference / arrays["n_atoms"][number])))
        rows.append(row)
    note = "Errors are prediction minus reference. Errors against DFT include those of the reference LDOS itself."
    content = [table(header, rows), tag("p", note, class_="note") if with_dft else None]
    return tag("div", tag("h3", "Observables of each snapshot"), *content, class_="card whole-row")
