"""The section `model.spin`: magnetic types, where their virtual atoms are, and how far neighbour lists have to reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forgefield.config.deepmd.data import source_paths
from forgefield.config.deepmd.section import MISSING, Section, is_number

FORCE_MAG = "force_mag"
SPIN = "spin"
REACH = 1.0
"""Distance of virtual atoms from their atoms for which neighbour lists have room, A; more if the data needs it."""
PROTECTION = 0.01
"""`env_protection` of descriptors that see virtual atoms, if none is given, A."""


def translate_spin(section: Section, descriptor: dict[str, Any], rcut: float, types: Sequence[str]) -> dict[str, Any]:
    """Forgefield's `model.spin`; empty without spins. The descriptor is changed where DeePMD-kit changes it.

    section: `model`. rcut: cutoff of the descriptor, A.
    """
    inner = section.below("spin")
    if inner is None:
        return {}
    if inner.take("spin_norm") is not None or inner.take("virtual_len") is not None:
        raise inner.refused(
            "spin_norm",
            "and virtual_len are of DeePMD-kit's TensorFlow, whose data contains the virtual atoms; the PyTorch "
            "backend has virtual_scale, and data with spin.npy",
        )
    magnetic = _magnetic(inner, types)
    scale = _scales(inner, magnetic)
    inner.choice("scheme", "deepspin", ("deepspin",))
    inner.only("allow_missing_label", False, "every frame needs a spin.npy")
    inner.finish()
    if descriptor.get("exclude_types"):
        raise section.refused(
            "descriptor.exclude_types", "has no effect in DeePMD-kit with 'model.spin'; use 'model.pair_exclude_types'"
        )
    descriptor["env_protection"] = descriptor.get("env_protection") or PROTECTION
    return {"use_spin": magnetic, "virtual_scale": scale, "rcut": rcut}


def _magnetic(section: Section, types: Sequence[str]) -> list[bool]:
    """Whether each type has a spin."""
    chosen = section.take("use_spin", MISSING)
    if isinstance(chosen, list) and chosen and all(isinstance(flag, bool) for flag in chosen):
        magnetic = list(chosen) if len(chosen) == len(types) else []
    else:
        entries = chosen if isinstance(chosen, list) else []
        numbers = [types.index(one) if one in types else one for one in entries]
        valid = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < len(types) for n in numbers)
        magnetic = [number in numbers for number in range(len(types))] if valid else []
    if not any(magnetic):
        raise section.wrong(
            "use_spin", chosen, f"true or false for each of {', '.join(types)}, or a list of magnetic types"
        )
    return magnetic


def _scales(section: Section, magnetic: Sequence[bool]) -> list[float]:
    """virtual_scale of each type; 0 without a spin."""
    given = section.take("virtual_scale", MISSING)
    values = [given] * len(magnetic) if is_number(given) else list(given) if isinstance(given, list) else []
    if len(values) == sum(magnetic) != len(magnetic):
        of_magnetic = iter(values)
        values = [next(of_magnetic) if has_spin else 0.0 for has_spin in magnetic]
    valid = len(values) == len(magnetic) and all(is_number(value) for value in values)
    if not valid or any(has_spin and not value > 0 for value, has_spin in zip(values, magnetic)):
        raise section.wrong("virtual_scale", given, "a positive number, or one for each type or each magnetic type")
    return [float(value) if has_spin else 0.0 for value, has_spin in zip(values, magnetic)]


def spin_fields(spin: dict[str, Any], species: Sequence[str], *, labelled: bool) -> dict[str, Any]:
    """`data.labels.fields` of a model of spins. labelled: whether magnetic forces are trained."""
    if not spin:
        return {}
    of_magnetic = [symbol for symbol, has_spin in zip(species, spin["use_spin"]) if has_spin]
    force = {FORCE_MAG: {"per": "atom", "shape": [3], "species": of_magnetic, "unit": "eV/uB"}}
    return {SPIN: {"per": "atom", "shape": [3]}, **(force if labelled else {})}


def cutoff_with_spins(spin: dict[str, Any], data: dict[str, Any], file: Path) -> float:
    """`data.cutoff`, A: neighbour lists that contain all virtual atoms within the cutoff of the descriptor. data: sources."""
    longest = max(
        (_longest(path, file) for name in ("train", "val") for path in source_paths(data.get(name))), default=0.0
    )
    needed: float = math.ceil(11 * longest * max(spin["virtual_scale"])) / 10
    cutoff: float = spin["rcut"] + max(REACH, needed)
    return cutoff


def _longest(path: str, file: Path) -> float:
    """Length of the longest spin in a folder of systems; 0 where it cannot be read here."""
    for start in (Path.cwd(), file.absolute().parent):
        files = sorted((start / path).rglob("set.*/spin.npy")) if (start / path).is_dir() else []
        if files:
            return max(map(_longest_in, files))
    return 0.0


def _longest_in(file: Path) -> float:
    try:
        spins = np.load(file, allow_pickle=False)
        return float(np.linalg.norm(spins.reshape(-1, 3), axis=1).max(initial=0.0))
    except (OSError, ValueError):
        return 0.0  # the reader reports it
