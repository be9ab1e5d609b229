"""The sections on data and model (training data, options, task), on how to use the model, and on the config."""

from __future__ import annotations

import shlex
from typing import Any

from forgefield.report.folder import RunData, as_number
from forgefield.report.markup import (
    NOTHING,
    Child,
    Html,
    card,
    count,
    dim_comments,
    empty_card,
    flat_rows,
    pairs_card,
    section,
    shorten,
    significant,
    stacks,
    stored_rows,
    table,
    tag,
)
from forgefield.report.sections.headline import mean_atoms, parameter_count, species_of


def model_section(run: RunData) -> Html:
    if run.note("run.json"):
        content = tag("div", empty_card(run, "run.json", "Data, model and versions"), class_="grid")
    else:
        statistics = run.info.get("statistics")
        statistics = statistics if isinstance(statistics, dict) else {}
        described = stored_rows(run.info.get("data"))
        model = _model_rows(run)
        data = pairs_card("Data", described if len(described) > 1 else described + _data_rows(run, statistics))
        left, right = [data, _species_card(run, statistics)], [pairs_card("Model", model)]
        shorter = left if len(model) > 18 else right
        shorter += [pairs_card(title, stored_rows(run.info.get(title.lower()))) for title in ("Task", "Versions")]
        content = stacks(left, right)
    return section("data", "Data and model", None, content)


def _data_rows(run: RunData, statistics: dict[str, Any]) -> list[tuple[str, Child]]:
    if not statistics:
        return []
    number = {key: as_number(value) for key, value in statistics.items()}
    rows: list[tuple[str, Child]] = [
        ("Frames", count(number.get("n_frames"))),
        ("Atoms", count(number.get("n_atoms"))),
        ("Atoms per frame", significant(mean_atoms(run))),
        ("Species", ", ".join(shorten(symbol, 12) for symbol in species_of(run)[:118]) or NOTHING),
    ]
    labels = statistics.get("labels")
    if isinstance(labels, dict):
        listed = list(labels.items())[:8]
        rows += [(f"Frames with {shorten(key, 30)}", count(as_number(value))) for key, value in listed]
    for key, title, unit in (
        ("mean_neighbours", "Neighbours per atom", ""),
        ("min_distance", "Shortest interatomic distance", " Å"),
        ("forces_rms", "RMS of force components", " eV/Å"),
        ("energy_residual_std", "Standard deviation of energies after subtracting references", " eV/atom"),
    ):
        if number.get(key) is not None:
            rows.append((title, significant(number[key]) + unit))
    return rows


def _species_card(run: RunData, statistics: dict[str, Any]) -> Html | None:
    rows = _species_rows(run, statistics)
    if not rows:
        return None
    header: list[Child] = ["Species", "Atoms", "Share", "Reference, eV", "Neighbours", "Force RMS, eV/Å"]
    kind = statistics.get("reference_kind")
    note = tag("p", f"Reference energies: {shorten(kind, 60)}.", class_="note") if kind else None
    return card("Species", table(header, rows), note)


def _species_rows(run: RunData, statistics: dict[str, Any]) -> list[list[Child]]:
    def column(key: str) -> dict[str, float]:
        stored = statistics.get(key)
        pairs = stored.items() if isinstance(stored, dict) else ()
        return {str(symbol): number for symbol, value in pairs if (number := as_number(value)) is not None}

    counts, references = column("species_counts"), column("reference_energies")
    neighbours, forces = column("mean_neighbours_by_species"), column("forces_rms_by_species")
    total = sum(counts.values())
    rows: list[list[Child]] = []
    for symbol in species_of(run)[:118] if counts or references else []:
        share = f"{significant(100 * counts[symbol] / total)} %" if total and symbol in counts else NOTHING
        reference = references.get(symbol)
        energy = f"{reference:.4f}".replace("-", "−") if reference is not None else NOTHING
        numbers = (significant(neighbours.get(symbol)), significant(forces.get(symbol)))
        rows.append([shorten(symbol, 20), count(counts.get(symbol)), share, energy, *numbers])
    return rows


def _model_rows(run: RunData) -> list[tuple[str, Child]]:
    rows: list[tuple[str, Child]] = [("Parameters", count(parameter_count(run)))]
    cutoff = as_number(run.info.get("cutoff"))
    if cutoff is not None:
        rows.append(("Cutoff", f"{significant(cutoff)} Å"))
    if run.info.get("precision"):
        rows.append(("Precision", shorten(run.info["precision"], 40)))
    model = run.info.get("model")
    options = model if isinstance(model, dict) else {}
    return rows + flat_rows(
        {key: value for key, value in options.items() if key not in ("species", "cutoff", "module_folder")}
    )


# ---- use and config


CONFIG_LIMIT = 100_000
"""Longest config shown on the page, in characters; config.yaml has all of it."""


def usage_section(run: RunData) -> Html:
    """Commands and Python code that use the model."""
    name = shorten(run.argument, 300)
    permission, flag = (", trust_code=True", " --trust-code") if run.needs_code else ("", "")
    python = "\n".join(
        (
            "import forgefield",
            "from ase.io import read",
            "",
            'atoms = read("structure.extxyz")',
            f"atoms.calc = forgefield.Calculator({name!r}{permission})",
            "print(atoms.get_potential_energy())  # eV",
            "print(atoms.get_forces())  # eV/A",
        )
    )
    quoted = shlex.quote(name)
    shell = [
        f"forgefield predict {quoted} structures.extxyz -o predicted.extxyz{flag}",
        f"forgefield test {quoted} --data more.extxyz{flag}",
    ]
    shell += [] if run.members else [f"forgefield check {quoted}{flag}"]
    cards = [card("On the command line", tag("pre", "\n".join(shell)))]
    if run.has_energy:
        cards.insert(0, card("In Python, with ASE", tag("pre", dim_comments(python))))
    else:
        cards = [card("On the command line", tag("pre", "\n".join(shell)))]
    return section("use", "Use this model", None, tag("div", *cards, class_="grid two"))


def config_section(run: RunData) -> Html:
    if run.config_text is None:
        return section("config", "Config", None, tag("div", empty_card(run, "config.yaml", "Config"), class_="grid"))
    shown = run.config_text[:CONFIG_LIMIT]
    if len(run.config_text) > CONFIG_LIMIT:
        shown += "\n# ... truncated; see config.yaml in the run folder"
    lines = count(len(run.config_text.splitlines()))
    summary = tag("summary", f"config.yaml · {lines} lines")
    folded = tag("details", summary, tag("pre", dim_comments(shown)), class_="card")
    return section("config", "Config", "All settings, including defaults.", folded)
