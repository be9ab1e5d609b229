"""The config that `forgefield init` proposes for snapshots of grid points.

What the files contain is filled in. Whether the descriptors are those that Forgefield computes is tested at a few points. The
energies of the levels are in no file, so they are left to the user; a training stops at that line until they are given.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase.data import chemical_symbols
from ase.symbols import Symbols

from forgefield.config.loading import load_config, override_keys
from forgefield.config.template import require_config_path, write_config, yaml_with_comments
from forgefield.config.typed import select, update
from forgefield.ldos.data.show import is_snapshot_name
from forgefield.ldos.data.snapshot import Snapshot
from forgefield.ldos.data.snapshot_files import INFO_SUFFIX, INPUT, SUFFIXES, find_snapshots
from forgefield.ldos.descriptor_options import LARGEST_TWOJMAX, DescriptorOptions
from forgefield.ldos.descriptors import make_descriptors
from forgefield.ldos.descriptors.bispectrum import bispectrum_triples
from forgefield.settings import as_dict
from forgefield.text import counted

BATCH = 1000
_UNSET = {"energies": {"first": 0.0, "spacing": 1.0, "levels": 1}}
"""Makes a config valid in which only the settings of the user are looked up."""
COMPARED = 4
"""Number of points at which descriptors are computed and compared with those of a file."""


def are_snapshots(files: Sequence[str]) -> bool:
    """Whether files, folders and patterns are named as snapshots are."""
    return all(_is_folder(Path(file)) if Path(file).is_dir() else is_snapshot_name(file) for file in files)


def _is_folder(folder: Path) -> bool:
    endings = (*(f"{INPUT}{suffix}" for suffix in SUFFIXES), INFO_SUFFIX)
    return any(file.name.endswith(endings) for file in folder.iterdir())


def propose_points_config(
    files: Sequence[str], overrides: Sequence[str], *, out: str | None, name: str | None, overwrite: bool
) -> tuple[Path, str]:
    """Write a commented config for snapshots; returns its path and one line about the data."""
    stem = Path(files[0].rstrip("/")).name.strip("*?[]").split(".")[0]
    path = Path(out) if out is not None else Path(f"{stem or 'config'}.yaml")
    require_config_path(path, overwrite=overwrite)
    snapshots = find_snapshots(list(files), need=("targets",), setting="init")
    is_here = path.absolute().parent == Path.cwd()  # else relative paths would not hold for the config
    values, notes = _config(snapshots, is_here=is_here, name=name or path.stem)
    settings = as_dict(load_config({"name": values["name"], "data": {"points": _UNSET}}, overrides))
    for key in override_keys(overrides):
        update(values, key, select(settings, key))
        notes.pop(key, None)
        notes.pop(key.rpartition(".")[0], None)
    header = f"Written by `forgefield init`. Change what you like, then:  forgefield train {path}"
    text = yaml_with_comments(values, header=header, notes=notes)
    return write_config(path, text), describe(snapshots)


def describe(snapshots: Sequence[Snapshot]) -> str:
    """One line: 3 snapshots of 8748 to 10000 points; Be2; 91 descriptors, 11 levels."""
    sizes = [snapshot.n_points for snapshot in snapshots]
    size = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    formulas = {
        Symbols(snapshot.info.numbers).get_chemical_formula()
        for snapshot in snapshots
        if snapshot.info.numbers is not None
    }
    columns = [f"{snapshots[0].n_inputs} descriptors"] if snapshots[0].inputs is not None else ["no descriptors"]
    columns.append(counted(snapshots[0].n_targets, "level"))
    parts = [f"{counted(len(snapshots), 'snapshot')} of {size} points", *sorted(formulas), ", ".join(columns)]
    return "; ".join(parts) + "."


def _config(snapshots: Sequence[Snapshot], *, is_here: bool, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The proposed settings, and comments on some of them by dotted key. The last snapshot validates."""
    names = [_path(snapshot, is_here) for snapshot in snapshots]
    several = len(names) > 1
    n_train = sum(snapshot.n_points for snapshot in (snapshots[:-1] if several else snapshots))
    descriptors, about = _descriptors(snapshots[0])
    points: dict[str, Any] = {
        "target": "ldos",
        "energies": {"first": None, "spacing": None, "levels": snapshots[0].n_targets},
        "scaling": {"inputs": "feature-wise-standard", "outputs": "feature-wise-standard"},
    }
    if descriptors is not None:
        points["descriptors"] = descriptors
    width = max(64, min(800, 4 * max(snapshots[0].n_inputs, snapshots[0].n_targets)))
    values = {
        "name": name,
        "seed": 0,
        "data": {
            "train": names[:-1] if several else names[0],
            "val": names[-1] if several else 0.1,
            "batch": {"points": BATCH},
            "points": points,
        },
        "model": {"name": "ldos", "hidden": [width, width], "activation": "leakyrelu"},
        "task": {"ldos": {}} | ({"observables": {"metrics": ["band_energy", "density"]}} if several else {}),
        "training": {"lr": 1.0e-3, "ema": 0.99, "precision": "float32"},
        "trainer": {"max_epochs": 100},
    }
    steps = -(-n_train // BATCH)
    notes = {
        "data.train": describe(snapshots),
        "data.points.energies": "eV. Enter the first energy and the spacing of the levels, emin and delta_e of pp.x.",
        "trainer.max_epochs": f"{steps} batches make an epoch.",
    }
    return values, notes | ({} if descriptors is None else {"data.points.descriptors": about})


def _path(snapshot: Snapshot, is_here: bool) -> str:
    """The file by which a config names a snapshot."""
    source = snapshot.inputs.path if snapshot.inputs is not None else Path(snapshot.info.source)
    return str(source) if is_here else os.path.abspath(source)


def _descriptors(snapshot: Snapshot) -> tuple[dict[str, Any] | None, str]:
    """Settings of descriptors, and a comment. None: they are not those that Forgefield computes with usual settings."""
    usual: dict[str, Any] = {
        "type": "bispectrum",
        "twojmax": DescriptorOptions.twojmax,
        "cutoff": DescriptorOptions.cutoff,
    }
    if snapshot.inputs is None:
        return usual, "Descriptors are computed with these settings."
    sizes = {len(bispectrum_triples(twojmax)): twojmax for twojmax in range(LARGEST_TWOJMAX + 1)}
    info, twojmax = snapshot.info, sizes.get(snapshot.n_inputs)
    if twojmax is None or info.numbers is None or info.grid_shape is None or info.cell is None:
        return None, ""
    settings = usual | {"twojmax": twojmax}
    if not _reproduces(snapshot, DescriptorOptions(**settings)):
        return None, ""
    return settings, f"They reproduce the descriptors of {snapshot.name} at {COMPARED} points."


def _reproduces(snapshot: Snapshot, options: DescriptorOptions) -> bool:
    """Whether descriptors with these settings are those of the file at a few points."""
    info = snapshot.info
    assert info.grid_shape is not None
    assert info.numbers is not None
    rows = np.linspace(0, snapshot.n_points - 1, COMPARED).astype(int)
    places = np.stack(np.unravel_index(rows, info.grid_shape), axis=1) / np.array(info.grid_shape)
    atoms = info.atoms()
    species = [chemical_symbols[number] for number in sorted(set(atoms.numbers.tolist()))]
    values = make_descriptors(options, species).at_points(
        places @ np.asarray(info.cell), atoms.cell, atoms.positions, atoms.numbers, atoms.pbc
    )
    stored = np.concatenate([snapshot.read(int(row), int(row) + 1)[0] for row in rows]).astype(np.float64)
    return bool(np.allclose(np.asarray(values.cpu()), stored, rtol=1e-4, atol=1e-4 * np.abs(stored).max()))
