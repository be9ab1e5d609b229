"""Several models of the same species as one: mean energies, forces and stress, and how much the models deviate.

Deviations have DeePMD-kit's names and definitions (`max_devi_f` and others, population standard deviations), and
`write_model_devi` writes them as `dp model-devi` does. Uncertainties have the names and the meaning that they have for a single
model (`inference.uncertainty`): `energy_uncertainty`, `energies_uncertainty` and `forces_uncertainty` are sample standard
deviations, with n - 1 in the denominator, whose squares do not depend on the number of models in the mean. For an ensemble that
was trained as such (`training.ensemble`) they are scaled to agree with the errors of validation frames.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.files import write_atomically
from forgefield.inference.uncertainty import ENERGIES, ENERGY, FORCES
from forgefield.models.edges import Batch, StepMemory, volumes
from forgefield.models.potential import Potential
from forgefield.runs import Run

VIRIAL_DEVIATIONS = ("max_devi_v", "min_devi_v", "avg_devi_v")
FORCE_DEVIATIONS = ("max_devi_f", "min_devi_f", "avg_devi_f")
DEVIATIONS = (*VIRIAL_DEVIATIONS, *FORCE_DEVIATIONS, "devi_e")
"""Deviations of a frame, in the order of the columns of `model_devi.out`: virial per atom (eV), forces (eV/A), energy per atom
(eV)."""


class Ensemble(Potential):
    """The mean of several potentials.

    members: runs (names, paths or `Run`) or potentials, two or more, of the same species and cutoff; an ensemble among them
    stands for its members. which, device, trust_code: as in `forgefield.load`. scales: factors of the uncertainties of energies
    and of forces, found by calibration.

    Outputs: those of a potential, averaged over the members; `energy_uncertainty` (n_frames,), `energies_uncertainty`
    (n_atoms,), `forces_uncertainty` (n_atoms, 3); and the names in `DEVIATIONS`, (n_frames,). Those of the virial are NaN for
    frames without a volume.
    """

    members: nn.ModuleList

    def __init__(
        self,
        members: Sequence[str | os.PathLike[str] | Run | Potential],
        *,
        which: str = "best",
        device: str | torch.device = "cpu",
        trust_code: bool = False,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        if isinstance(members, (str, os.PathLike)) or len(members) < 2:
            raise ForgefieldError("An ensemble is a list of two or more runs.")
        loaded: list[Potential] = []
        for member in members:
            potential = _load(member, which, device, trust_code)
            loaded += list(potential.members) if isinstance(potential, Ensemble) else [potential]  # type: ignore[arg-type]
            _require_alike(loaded[0], potential, member)
        super().__init__(loaded[0].model, max_neighbours=loaded[0].max_neighbours)
        self.members = nn.ModuleList(loaded)
        self.register_buffer("_species_index", _species_indices(loaded), persistent=False)
        self.forces_are_direct = loaded[0].forces_are_direct
        energy, forces = scales
        self.scales = {ENERGY: energy, ENERGIES: energy, FORCES: forces}
        self.eval().requires_grad_(False)

    _species_index: Tensor

    @property
    def uncertainty_outputs(self) -> Mapping[str, str]:
        return {ENERGY: "frame", ENERGIES: "atom", FORCES: "atom", **dict.fromkeys(DEVIATIONS, "frame")}

    def forward(
        self, batch: Batch, *, forces: bool = True, stress: bool = False, memory: StepMemory | None = None
    ) -> dict[str, Tensor]:
        """Means, uncertainties and deviations; see the class."""
        outputs = []
        for index, member in zip(self._species_index, self.members):
            species = index.index_select(0, batch["species"])
            outputs.append(member(batch | {"species": species}, forces=forces, stress=stress))
        names = [name for name in ("energy", "atomic_energy", "forces", "stress") if name in outputs[0]]
        stacked = {name: torch.stack([output[name] for output in outputs]) for name in names}
        means = {name: values.mean(0) for name, values in stacked.items()}
        pairs = {"energy": ENERGY, "atomic_energy": ENERGIES, "forces": FORCES}
        spreads = {pairs[name]: values.std(0) for name, values in stacked.items() if name in pairs}
        uncertainties = {name: self.scales[name] * values for name, values in spreads.items()}
        return means | uncertainties | deviations(stacked, batch)


def deviations(stacked: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """DeePMD-kit's deviations of each frame, (n_frames,), by name.

    stacked: `energy` (n_members, n_frames), eV, and if there are any `forces` (n_members, n_atoms, 3), eV/A, and `stress`
    (n_members, n_frames, 3, 3), eV/A^3.
    """
    n_atoms, frame = batch["n_atoms"], batch["frame"]
    found = {"devi_e": stacked["energy"].std(0, correction=0) / n_atoms}
    if "forces" in stacked:
        of_atoms = torch.linalg.vector_norm(stacked["forces"].std(0, correction=0), dim=1)
        zero = torch.zeros(len(n_atoms), dtype=of_atoms.dtype, device=of_atoms.device)
        for name, how in zip(FORCE_DEVIATIONS, ("amax", "amin", "mean")):
            found[name] = zero.scatter_reduce(0, frame, of_atoms, how, include_self=False)
    if "stress" in stacked:
        per_atom = (volumes(batch["cell"]) / n_atoms).view(-1, 1, 1)
        of_components = (stacked["stress"] * per_atom).std(0, correction=0).flatten(1)
        found["max_devi_v"], found["min_devi_v"] = of_components.amax(1), of_components.amin(1)
        found["avg_devi_v"] = of_components.square().mean(1).sqrt()
    return {name: found[name] for name in DEVIATIONS if name in found}


def write_model_devi(path: str | os.PathLike[str], rows: Iterable[Mapping[str, float]], *, interval: int = 1) -> Path:
    """Write deviations of frames as DeePMD-kit's `model_devi.out` and return the path.

    rows: deviations of each frame by name (`DEVIATIONS`); missing ones are written as nan. interval: steps between frames.
    """
    lines = ["#" + "step".rjust(11) + "".join(name.rjust(19) for name in DEVIATIONS)]
    for number, row in enumerate(rows):
        lines.append(f"{number * interval:12d}" + "".join(f"{row.get(name, np.nan):19.6e}" for name in DEVIATIONS))
    write_atomically(Path(path), "\n".join(lines) + "\n")
    return Path(path)


def _load(
    member: str | os.PathLike[str] | Run | Potential, which: str, device: str | torch.device, trust_code: bool
) -> Potential:
    potential = member if isinstance(member, Potential) else None
    if potential is None:
        potential = Run.open(member, trust_code=trust_code).load_potential(which, device)  # type: ignore[arg-type]
    if not potential.has_energy:
        raise ForgefieldError(f"{_name(member)} predicts no energy; the members of an ensemble are potentials.")
    return potential.to(device)


def _require_alike(first: Potential, other: Potential, member: object) -> None:
    """Refuse members that cannot be evaluated on the same neighbour lists, or whose outputs differ."""
    for what, one, two in (
        ("species", sorted(first.species), sorted(other.species)),
        ("cutoff", first.cutoff, other.cutoff),
        ("adaptive cutoff", first.adaptive_cutoff, other.adaptive_cutoff),
        ("number of neighbours", first.max_neighbours, other.max_neighbours),
        ("inputs", first.inputs, other.inputs),
        ("direct forces", first.forces_are_direct, other.forces_are_direct),
    ):
        if one != two:
            raise ForgefieldError(
                f"The members of an ensemble must have the same {what}: the first has {_text(one)}, {_name(member)} has "
                f"{_text(two)}."
            )


def _species_indices(members: Sequence[Potential]) -> Tensor:
    """(n_members, n_species): for each species of the first member, its index in that of each member."""
    return torch.tensor([[member.species.index(symbol) for symbol in members[0].species] for member in members])


def _text(value: object) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


def _name(member: object) -> str:
    return "a Potential" if isinstance(member, Potential) else f"run {getattr(member, 'name', member)}"
