"""The structures of Open MatSciML's and NequIP's samples, which each data set stores in its own way.

- plain arrays: LiPS, ColabFit, OQMD (whose `cart_coords` are fractional), OC20 from PyTorch Geometric
- a structure of pymatgen, as a dictionary or an object: Alexandria, Materials Project
- a CIF file as a dictionary of text, with fractional coordinates: the Carolina database
- a NOMAD archive, in SI units
- the nodes of a DGL graph: OC20
- points with types: synthetic point groups
- tensors in which values of frames have a first dimension of 1: NequIP's LMDB data sets, which have the same form

What a sample contradicts itself about (numbers of atoms, volumes, coordinates) is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from ase.data import atomic_numbers, covalent_radii
from ase.geometry import cellpar_to_cell

from forgefield.data.frame import atomic_numbers_of, periodicity, real_numbers
from forgefield.errors import ForgefieldError
from forgefield.physics.units import JOULE

POSITION_KEYS = ("pos", "positions", "cart_coords")
NUMBER_KEYS = ("atomic_numbers", "numbers", "z")
CELL_KEYS = ("cell", "lattice_matrix")
METRE = 1e10
"""A."""
_OC20 = {"y": "energy", "y_init": "energy_init", "y_relaxed": "energy_relaxed"}
_CAROLINA = {
    "_symmetry_space_group_name_H-M": "symmetry.symbol",
    "_chemical_formula_sum": "formula",
    "origin_file": "origin_file",
}


_OF_FRAMES = ("cell", "pbc", "total_energy", "free_energy", "stress", "virial", "charge", "spin", "total_charge")
"""Values of frames in NequIP's samples."""
_OF_EDGES = (
    "edge_index",
    "edge_cell_shift",
    "edge_vectors",
    "edge_lengths",
    "edge_types",
    "atom_types",
    "batch",
    "num_atoms",
)
"""Values in NequIP's samples that follow from others."""


@dataclass(frozen=True)
class Structure:
    positions: np.ndarray
    """(n_atoms, 3), A."""
    numbers: np.ndarray
    """(n_atoms,)."""
    cell: np.ndarray
    """(3, 3), A."""
    pbc: np.ndarray
    """(3,) bool."""
    values: dict[str, Any]
    """What else the sample has, by the names that users select."""


def structure_of(sample: dict[str, Any], where: str) -> Structure:
    """The structure and the other values of a sample, in A and, where the data set is in SI units, eV.

    where: the frame, for messages.
    """
    structure = next(read for is_so, read in _KINDS if is_so(sample))(sample, where)
    if "volume" in structure.values and structure.values["volume"] is not None:
        _check_volume(structure.cell, float(structure.values["volume"]), where)
    return structure


def _without(sample: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in sample.items() if key not in names}


def _pymatgen(sample: dict[str, Any], where: str) -> Structure:
    """A structure as pymatgen writes it into dictionaries."""
    structure = sample["structure"]
    lattice, sites = structure["lattice"], structure["sites"]
    cell = real_numbers(lattice["matrix"], where, "the lattice").reshape(3, 3)
    _check_volume(cell, float(lattice.get("volume", abs(np.linalg.det(cell)))), where)
    numbers = np.zeros(len(sites), dtype=np.int64)
    for i, site in enumerate(sites):
        species = site["species"]
        if len(species) != 1 or abs(float(species[0].get("occu", 1)) - 1) > 1e-6:
            raise ForgefieldError(f"{where}: site {i} is not one whole atom; disordered structures cannot be read")
        numbers[i] = atomic_numbers[species[0]["element"]]
    positions = real_numbers([site["abc"] for site in sites], where, "the sites").reshape(-1, 3) @ cell
    if sites and "xyz" in sites[0]:
        stored = np.array([site["xyz"] for site in sites], dtype=np.float64)
        if not np.allclose(stored, positions, atol=1e-3):
            raise ForgefieldError(f"{where}: the fractional and the Cartesian coordinates of its sites disagree")
        positions = stored
    pbc = periodicity(lattice.get("pbc", (True, True, True)), where)
    return Structure(positions, numbers, cell, pbc, _site_values(sites) | _without(sample, "structure"))


def _site_values(sites: list[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """(n_atoms,) numbers that every site has, such as magnetic moments, by name."""
    properties = [site.get("properties") or {} for site in sites]
    names = set(properties[0]).intersection(*properties[1:]) if properties else set()
    columns = {str(name): [item[name] for item in properties] for name in names}
    is_number = (int, float, np.integer, np.floating)
    return {
        name: np.array(column, dtype=np.float64)
        for name, column in columns.items()
        if all(isinstance(value, is_number) and not isinstance(value, bool) for value in column)
    }


def _carolina(sample: dict[str, Any], where: str) -> Structure:
    """A CIF file as a dictionary of text. Its energy is the formation energy."""
    lengths = [float(sample[f"_cell_length_{axis}"]) for axis in "abc"]
    angles = [float(sample[f"_cell_angle_{angle}"]) for angle in ("alpha", "beta", "gamma")]
    cell = np.asarray(cellpar_to_cell(lengths + angles))
    if "_cell_volume" in sample:
        _check_volume(cell, float(sample["_cell_volume"]), where)
    fractions = real_numbers(sample["cart_coords"], where, "cart_coords")
    numbers = atomic_numbers_of(sample["atomic_numbers"], where)
    _check_shape(fractions, numbers, "cart_coords", where)
    if fractions.size and (fractions.min() < -1e-6 or fractions.max() > 1 + 1e-6):
        raise ForgefieldError(f"{where}: its cart_coords must be fractional, but are not all between 0 and 1")
    values: dict[str, Any] = {name: str(sample[key]).strip("'") for key, name in _CAROLINA.items() if key in sample}
    if "_symmetry_Int_Tables_number" in sample:
        values["symmetry.number"] = int(sample["_symmetry_Int_Tables_number"])
    if sample.get("energy") is not None:
        values["targets.energy"] = sample["energy"]
    return Structure(fractions @ cell, numbers, cell, np.ones(3, dtype=bool), values)


def _nomad(sample: dict[str, Any], where: str) -> Structure:
    """An entry of the NOMAD archive; lengths become A, energies eV."""
    stored = sample["properties"]["structures"]["structure_original"]
    elements = {}
    for species in stored["species"]:
        if len(species["chemical_symbols"]) != 1 or abs(float(species.get("concentration", [1.0])[0]) - 1) > 1e-6:
            raise ForgefieldError(
                f"{where}: {species['name']} is not one element; disordered structures cannot be read"
            )
        elements[species["name"]] = atomic_numbers[species["chemical_symbols"][0]]
    numbers = np.array([elements[name] for name in stored["species_at_sites"]], dtype=np.int64)
    positions = METRE * real_numbers(stored["cartesian_site_positions"], where, "the positions").reshape(-1, 3)
    _check_shape(positions, numbers, "cartesian_site_positions", where)
    cell, pbc = np.zeros((3, 3)), periodicity(stored.get("dimension_types", (1, 1, 1)), where)
    if stored.get("lattice_vectors") is not None:
        cell = METRE * real_numbers(stored["lattice_vectors"], where, "the lattice vectors").reshape(3, 3)
    if pbc.all() and "cell_volume" in stored:
        _check_volume(cell, float(stored["cell_volume"]) * METRE**3, where)
    return Structure(positions, numbers, cell, pbc, _nomad_values(sample))


def _nomad_values(sample: dict[str, Any]) -> dict[str, Any]:
    energies = sample.get("energies") or {}
    bands = ((sample["properties"].get("electronic") or {}).get("band_structure_electronic")) or {}
    bands = (bands[-1] if bands else {}) if isinstance(bands, list) else bands
    gap = (bands.get("band_gap") or [{}])[0]
    joules = {
        "energy_total": (energies.get("total") or {}).get("value"),
        "free_energy": (energies.get("free") or {}).get("value"),
        "efermi": bands.get("energy_fermi", energies.get("fermi")),
        "band_gap": gap.get("value") if isinstance(gap, Mapping) else None,
    }
    symmetry = (sample.get("material") or {}).get("symmetry") or {}
    simulation = (sample.get("method") or {}).get("simulation") or {}
    return {
        **{name: float(value) * JOULE for name, value in joules.items() if value is not None},
        "relative_energy": sample.get("relative_energy"),
        "spin_polarized": bands.get("spin_polarized"),
        "symmetry.number": symmetry.get("space_group_number"),
        "symmetry.symbol": symmetry.get("space_group_symbol"),
        "symmetry.point_group": symmetry.get("point_group"),
        "symmetry.crystal_system": symmetry.get("crystal_system"),
        "program_name": simulation.get("program_name"),
        "material_id": (sample.get("material") or {}).get("material_id"),
    }


def _point_group(sample: dict[str, Any], where: str) -> Structure:
    """Points on a sphere; their types count as atomic numbers, and type 0 fills up to the largest number of points."""
    types = np.atleast_1d(atomic_numbers_of(np.atleast_1d(sample["dest_types"]), where))
    points = real_numbers(sample["coordinates"], where, "coordinates").reshape(-1, 3)
    _check_shape(points, types, "coordinates", where)
    used = types > 0
    values = _without(sample, "coordinates", "dest_types", "source_types")
    return Structure(points[used], types[used], np.zeros((3, 3)), np.zeros(3, dtype=bool), values)


def _dgl(sample: dict[str, Any], where: str) -> Structure:
    return _arrays(_without(sample, "graph") | sample["graph"]["ndata"], where)


def _nequip(sample: dict[str, Any], where: str) -> Structure:
    """A frame of NequIP. Values of frames have one row, also in frames with one atom, where only their names tell; a label
    that is missing consists of NaN."""
    n_atoms = len(np.atleast_1d(sample["atomic_numbers"]))
    values = {key: value for key, value in _without(sample, *_OF_EDGES).items() if not _is_missing(value)}
    for key, value in list(values.items()):
        shape = np.shape(value)
        if shape[:1] == (1,) and (n_atoms > 1 or key in _OF_FRAMES):
            values[key] = np.asarray(value)[0]
            if shape == (1, 1):
                values[key] = values[key].item()
    return _arrays(values, where)


def _is_missing(value: object) -> bool:
    array = np.asarray(value)
    return array.dtype.kind == "f" and array.size > 0 and bool(np.isnan(array).all())


def _is_nequip(sample: dict[str, Any]) -> bool:
    by_shape = np.asarray(sample.get("pbc")).shape == (1, 3) or np.asarray(sample.get("total_energy")).shape == (1, 1)
    return by_shape and "pos" in sample and "atomic_numbers" in sample


def _arrays(sample: dict[str, Any], where: str) -> Structure:
    """A sample of plain arrays."""
    name = next((key for key in POSITION_KEYS if sample.get(key) is not None), None)
    charges = next((sample[key] for key in NUMBER_KEYS if sample.get(key) is not None), None)
    if name is None or charges is None:
        raise ForgefieldError(
            f"{where}: no positions and atomic numbers (looked for {', '.join((*POSITION_KEYS, *NUMBER_KEYS))}); "
            f"the sample has {', '.join(map(str, sample))}"
        )
    positions = real_numbers(sample[name], where, name)
    numbers = atomic_numbers_of(charges, where)
    _check_shape(positions, numbers, name, where)
    stored = next((sample[key] for key in CELL_KEYS if sample.get(key) is not None), None)
    cell = np.zeros((3, 3)) if stored is None else real_numbers(stored, where, "the cell").reshape(3, 3)
    pbc = periodicity(np.broadcast_to(np.asarray(sample.get("pbc", stored is not None)), 3), where)
    if name == "cart_coords" and _fractional(positions, numbers, sample.get("sites")):
        if stored is None:
            raise ForgefieldError(f"{where}: its {name} are fractional, but there is no cell to go with them")
        positions = positions @ cell
    values = _without(sample, *POSITION_KEYS, *NUMBER_KEYS, *CELL_KEYS, "pbc", "edge_index", "cell_offsets")
    if "sid" in sample:
        values = {_OC20.get(key, key): value for key, value in values.items()}
    return Structure(positions, numbers, cell, pbc, values)


def _check_shape(positions: np.ndarray, numbers: np.ndarray, name: str, where: str) -> None:
    if positions.shape != (len(numbers), 3):
        raise ForgefieldError(f"{where}: {name} has shape {positions.shape}, but there are {len(numbers)} atoms")


def _fractional(values: np.ndarray, numbers: np.ndarray, sites: object) -> bool:
    """Whether values called Cartesian are fractional: the list of sites says so, or as lengths they are impossible.

    `sites`: texts such as 'Mn @ 0.75 0.25 0.5', always fractional. Impossible: all within 0 and 1, and atoms closer than
    half the sum of their covalent radii.
    """
    if isinstance(sites, list) and len(sites) == len(values) and all("@" in str(site) for site in sites):
        listed = np.array([str(site).split("@")[1].split() for site in sites], dtype=np.float64)
        return bool(np.allclose(listed, values, atol=1e-6))
    if len(values) < 2 or values.min() < -1e-6 or values.max() > 1 + 1e-6:
        return False
    first, second = np.triu_indices(len(values), 1)
    distances = np.linalg.norm(values[first] - values[second], axis=1)
    radii = covalent_radii[numbers]
    return bool((distances < 0.5 * (radii[first] + radii[second])).any())


def _check_volume(cell: np.ndarray, stated: float, where: str) -> None:
    volume = abs(np.linalg.det(cell))
    if abs(volume - stated) > 1e-2 * abs(stated):
        raise ForgefieldError(f"{where}: its cell has {volume:.6g} A^3, but it says its volume is {stated:.6g}")


def _is_nomad(sample: dict[str, Any]) -> bool:
    properties = sample.get("properties")
    structures = properties.get("structures") if isinstance(properties, Mapping) else None
    return isinstance(structures, Mapping) and "structure_original" in structures


def _is_dgl(sample: dict[str, Any]) -> bool:
    return isinstance(sample.get("graph"), Mapping) and isinstance(sample["graph"].get("ndata"), Mapping)


_KINDS: tuple[tuple[Callable[[dict[str, Any]], bool], Callable[[dict[str, Any], str], Structure]], ...] = (
    (lambda sample: isinstance(sample.get("structure"), Mapping), _pymatgen),
    (lambda sample: "_cell_length_a" in sample, _carolina),
    (_is_nomad, _nomad),
    (_is_dgl, _dgl),
    (lambda sample: "coordinates" in sample and "dest_types" in sample, _point_group),
    (_is_nequip, _nequip),
    (lambda sample: True, _arrays),
)
"""How the structure of a sample is recognised and read; the first that applies is used."""
