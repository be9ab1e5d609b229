"""Small real data and small configs that many tests share."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator

SHARED_DATA = Path(__file__).parents[2].parent / "shared" / "data"
"""Real data sets that may lie beside the checkout; tests that need them skip where they do not."""


def emt_frames(n: int, seed: int, symbols: tuple[str, ...] = ("Cu", "Au")) -> list[Atoms]:
    """Rattled, strained fcc cells of 4 or 8 atoms with EMT energies, forces and stress."""
    frames = []
    for atoms in _emt_frames(n, seed, symbols):
        own = atoms.copy()
        own.calc = SinglePointCalculator(own, **deepcopy(atoms.calc.results))
        frames.append(own)
    return frames


@cache
def _emt_frames(n: int, seed: int, symbols: tuple[str, ...]) -> list[Atoms]:
    rng = np.random.default_rng(seed)
    frames = []
    for _ in range(n):
        atoms = bulk("Cu", cubic=True, a=3.8 + 0.2 * rng.random()) * ((2, 1, 1) if rng.random() < 0.5 else (1, 1, 1))
        atoms.symbols[:] = rng.choice(symbols, size=len(atoms))
        atoms.set_cell(atoms.cell.array @ (np.eye(3) + 0.02 * rng.standard_normal((3, 3))), scale_atoms=True)
        atoms.positions += 0.1 * rng.standard_normal(atoms.positions.shape)
        atoms.calc = EMT()
        results = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces(), "stress": atoms.get_stress()}
        atoms.calc = SinglePointCalculator(atoms, **results)
        frames.append(atoms)
    return frames


def property_frames(n: int, seed: int) -> list[Atoms]:
    """The same with further labels: `gap` (intensive, eV), `cohesion` (extensive: the EMT energy of the frame in another
    unit), `moduli` (three intensive numbers) and, of atoms, `site_charge`; each is missing in some frames."""
    frames = emt_frames(n, seed)
    for number, atoms in enumerate(frames):
        share = float((atoms.symbols == "Au").mean())
        per_atom = atoms.get_volume() / len(atoms)
        labels = {"gap": 1.0 + share + 0.1 * (per_atom - 12.0), "cohesion": 23.0 * atoms.get_potential_energy()}
        labels["moduli"] = np.array([share, per_atom, share * per_atom])
        missing = {1: ("gap",), 3: ("cohesion",), 4: ("site_charge", "moduli")}.get(number % 6, ())
        atoms.info.update({name: value for name, value in labels.items() if name not in missing})
        if "site_charge" not in missing:
            atoms.arrays["site_charge"] = (
                np.where(atoms.symbols == "Au", -0.4, 0.3) + 0.02 * atoms.get_forces()[:, 0] ** 2
            )
    return frames


PROPERTIES = {
    "gap": {"unit": "eV"},
    "cohesion": {"unit": "kcal/mol"},
    "moduli": {"shape": [3]},
    "site_charge": {"per": "atom", "unit": "e"},
}
"""`data.labels.fields` of these frames."""


def write_properties(path: Path, n: int, seed: int = 0) -> Path:
    path.write_text(_text(property_frames, n, seed))
    return path


def write_emt(path: Path, n: int, seed: int = 0) -> Path:
    path.write_text(_text(emt_frames, n, seed))
    return path


@cache
def _text(frames: Callable[[int, int], list[Atoms]], n: int, seed: int) -> str:
    """These frames as extxyz; most tests begin with some, and they are always the same."""
    text = StringIO()
    ase.io.write(text, frames(n, seed), format="extxyz")
    return text.getvalue()


def tiny_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """A config of a NequIP small enough to train for a few epochs within a second or two. changes: section -> keys."""
    path = folder / "frames.extxyz"
    if not path.exists():
        write_emt(path, 14)
    config: dict[str, Any] = {
        "name": "tiny",
        "out": str(folder / "runs"),
        "seed": 3,
        "data": {"train": str(path), "val": 4, "cutoff": 3.5, "batch": {"frames": 2}, "cache": False},
        "model": {"name": "nequip", "num_layers": 2, "l_max": 1, "num_features": 4, "radial_mlp_width": 8},
        "task": {"energy": {"weight": 1.0}, "forces": {"weight": 1.0}},
        "training": {"lr": 0.01, "ema": 0.9, "tensorboard": 0, "checkpoint": {"every_epochs": 1}},
        "trainer": {"max_epochs": 3, "enable_progress_bar": False, "accelerator": "cpu"},
    }
    for section, values in changes.items():
        if isinstance(values, dict) and isinstance(config.get(section), dict):
            config[section] = {**config[section], **values}
        else:
            config[section] = values
    return config
