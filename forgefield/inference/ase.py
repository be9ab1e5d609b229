"""A trained model as an ASE calculator: energy, energies per atom, forces and stress for any structure of its species.

Neighbours are found once within the cutoff plus a skin and reused until an atom has moved by half the skin. Of those,
only pairs within the cutoff reach the model, so that results do not depend on the skin, to the last bit.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator as AseCalculator
from ase.calculators.calculator import PropertyNotImplementedError, all_changes
from ase.data import atomic_numbers
from ase.stress import full_3x3_to_voigt_6_stress
from torch import nn

from forgefield.data.frame import Frame, check_frame
from forgefield.data.neighbours.edges import CLOSEST_PAIR, refuse_coinciding_atoms
from forgefield.data.neighbours.graph import (
    GraphOptions,
    build_edges,
    edge_vectors,
    graph_of,
    neighbour_list,
    squared_lengths,
)
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.inference.engine.comparison import Deviation, compare
from forgefield.inference.engine.device import DeviceEngine, Systems, choose_engine
from forgefield.inference.ensemble import Ensemble
from forgefield.inference.evaluate import evaluate_batch, per_atom_outputs
from forgefield.inference.uncertainty import with_uncertainty
from forgefield.kinds import FRAMES
from forgefield.models.interface import AtomisticModel
from forgefield.models.potential import Potential
from forgefield.runs import Run


class VerletList:
    """Edges of `graph`, found again only when an atom moved more than half of `skin` (A).

    A graph other than all pairs within the cutoff is built again each time.
    """

    def __init__(self, graph: GraphOptions, skin: float) -> None:
        if not skin >= 0:
            raise ForgefieldError(f"The skin of the neighbour list is {skin}; it should be 0 or more, in A.")
        self.graph, self.cutoff = graph, graph.cutoff
        self.skin = float(skin)
        self.builds = 0
        """How often the list has been built."""
        self._frame: Frame | None = None

    def edges(self, frame: Frame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Source and destination atoms (n_edges,) and image shifts (n_edges, 3) of all pairs within the cutoff."""
        if self.graph.adaptive_cutoff is not None or self.graph.max_neighbours is not None:
            self.builds += 1
            edges = build_edges(frame.positions, frame.cell, frame.pbc, self.graph)
            if edges.shortest < CLOSEST_PAIR:
                refuse_coinciding_atoms(frame.positions, frame.cell, edges, frame.where)
            return edges.source, edges.destination, edges.shifts
        if not self._still_valid(frame):
            self._edges = neighbour_list(frame.positions, frame.cell, frame.pbc, self.cutoff + self.skin)
            self._frame = frame
            self.builds += 1
        source, destination, shifts = self._edges
        # the formula of neighbour_list, so that a pair at the very cutoff is in or out as in a list without a skin
        squares = squared_lengths(edge_vectors(frame.positions, frame.cell, source, destination, shifts))
        if len(squares) and squares.min() < CLOSEST_PAIR**2:
            worst = int(squares.argmin())
            i, j = sorted((int(source[worst]), int(destination[worst])))
            raise ForgefieldError(f"{frame.where}: atoms {i} and {j} are at the same place; remove one")
        near = squares <= self.cutoff**2
        return source[near], destination[near], shifts[near]

    def _still_valid(self, frame: Frame) -> bool:
        old = self._frame
        if old is None or not np.array_equal(old.numbers, frame.numbers):
            return False
        if not (np.array_equal(old.cell, frame.cell) and np.array_equal(old.pbc, frame.pbc)):
            return False
        moved = frame.positions - old.positions
        return bool(np.max(np.einsum("ij,ij->i", moved, moved)) <= (self.skin / 2) ** 2)


DEFAULT_SKIN = 0.5
"""A, of lists on the host."""
VOIGT = [0, 4, 8, 5, 2, 1]
"""Components xx yy zz yz xz xy of a flat matrix."""
RESPONSES = {"dipole", "polarizability"}
"""Outputs that make a calculator of a model without an energy."""


class Calculator(AseCalculator):
    """ASE calculator of a run, or of a `Potential`.

    Parameters
    ----------
    run
        Name of a run, path of its folder, a `Run`, a `Potential`, or a list of these, whose mean is computed.
    which
        Weights of the run, `best` or `last`.
    device
        Where the model runs, `cpu` or `cuda`.
    head
        Branch of a model that has several.
    dtype
        Arithmetic inside the network, `float32` or `float64`, for a run; default: as trained.
    skin
        How far beyond the cutoff neighbours are remembered, A; default: 1 with the engine, otherwise 0.5.
    trust_code
        Whether code that the run names, such as a user's model, may be imported.
    uncertainty
        `energy` or `forces`, to add uncertainties of energies, or of energies and forces, to the results; for a run that has
        them (`forgefield uncertainty RUN`). An ensemble always has both.
    engine
        Whether models are evaluated by captured CUDA graphs with kernels; an error where that is not possible. Default: on a
        GPU, for models that it supports.
    notify
        Receives the deviation of the engine from the eager model in float64, once, before the first result.

    Notes
    -----
    `results` has energy and free_energy (eV), energies (n_atoms,), forces (n_atoms, 3) (eV/A), and for cells with a volume
    stress (6,) (eV/A^3, Voigt order xx yy zz yz xz xy). Extra outputs of the model are in `results` by name, probabilities of
    classes as `NAME_prob`. A model of dipoles or polarisabilities without an energy gives these alone:
    `atoms.get_dipole_moment()`.

    Uncertainties are standard deviations: `energy_uncertainty` (eV), `energies_uncertainty` (n_atoms,) (eV),
    `forces_uncertainty` (n_atoms, 3) (eV/A) and for cells with a volume `stress_uncertainty` (6,) (eV/A^3). An ensemble also
    has DeePMD-kit's deviations (`max_devi_f` and others).

    A model trained with `task.forces.direct` predicts forces directly: they are not the derivative of the energy, which
    dynamics does not conserve; `forces_are_direct` is true for such a model.
    """

    name = "forgefield"
    implemented_properties = ["energy", "free_energy", "energies", "forces", "stress"]
    ignored_changes = {"initial_charges", "initial_magmoms"}

    def __new__(cls, run: Any = None, **settings: Any) -> Any:
        """The calculator of this run's kind: an LDOS run has one of its own (`LDOSCalculator`), with a temperature."""
        if cls is Calculator and isinstance(run, (str, os.PathLike, Run)):
            opened = Run.open(run, trust_code=bool(settings.get("trust_code")))
            if opened.kind is not FRAMES:
                return opened.kind.calculator.load()(opened, **settings)
            if "temperature" in settings:
                raise ForgefieldError(f"temperature is an option of LDOS runs; run {opened.name} is a potential.")
        return super().__new__(cls)

    def __init__(
        self,
        run: str | os.PathLike[str] | Run | Potential | Sequence[str | os.PathLike[str] | Run | Potential],
        *,
        which: str = "best",
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype | None = None,
        skin: float | None = None,
        head: str | None = None,
        trust_code: bool = False,
        uncertainty: str | None = None,
        engine: bool | None = None,
        notify: Callable[[str], None] = print,
    ) -> None:
        super().__init__()
        self.device = torch.device(device)
        if isinstance(run, (str, os.PathLike, Run)):
            run = Run.open(run, trust_code=trust_code)
        elif not isinstance(run, nn.Module):
            run, uncertainty = Ensemble(run, which=which, device=self.device, trust_code=trust_code), None
        self.potential = load_for_evaluation(run, which, self.device, dtype, head, uncertainty)
        self.forces_are_direct = self.potential.forces_are_direct
        responses = RESPONSES & set(self.potential.extra_outputs)
        if not self.potential.has_energy and not self.forces_are_direct and not responses:
            raise ForgefieldError(
                f"This model predicts {', '.join(self.potential.extra_outputs) or 'noise'} and no energy, so it is not a "
                "calculator; forgefield predict writes what it predicts."
            )
        if self.forces_are_direct:
            warnings.warn(
                "Forces of this model come from a head of their own (task.forces.direct) and are not the derivative of an "
                "energy: energy is not conserved in dynamics.",
                stacklevel=2,
            )
        known = type(self).implemented_properties if self.potential.has_energy else []
        known = ["forces"] if self.forces_are_direct and not known else known
        self.implemented_properties = [*known, *self.potential.extra_outputs, *self.potential.uncertainty_outputs]
        self.species = SpeciesTable(self.potential.species, trained=True)
        self.neighbours = VerletList(graph_of(self.potential), DEFAULT_SKIN if skin is None else skin)
        self.engine = choose_engine(self.potential, self.device, engine, skin, notify)
        """The engine that evaluates the model; None where the eager model does."""
        self.deviation: Deviation | None = None
        """Deviation of the engine from the eager model in float64, on the first structure."""
        self._composition: tuple[np.ndarray, np.ndarray] | None = None
        self._structure: Atoms | None = None
        self._has_volume = False

    def __repr__(self) -> str:
        species = ", ".join(self.potential.species)
        engine = ", engine" if self.engine is not None else ""
        return f"{type(self).__name__}({species}; cutoff {self.potential.cutoff:g} A, on {self.device}{engine})"

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = all_changes,
    ) -> None:
        """Evaluate the model. Forces and stress come together; energies alone are cheaper."""
        if self.engine is not None:
            self._by_engine(self.engine, atoms, properties, system_changes)
            return
        super().calculate(atoms, list(properties), list(system_changes))
        frame = check_frame(frame_of_atoms(self.atoms, self.potential))
        has_volume = frame.volume > 0
        if "stress" in properties and not has_volume:
            raise PropertyNotImplementedError("stress needs a cell with a volume; this structure has none")
        of_gradients = ("forces", "stress", "forces_uncertainty", "stress_uncertainty")
        gradients = self.potential.has_energy and any(name in properties for name in of_gradients)
        # Derivatives come together; direct forces have none, so that a stress is made only where it is asked for.
        stressed = gradients and has_volume and (not self.forces_are_direct or "stress" in properties)
        batch = self._batch(frame) | self._inputs(self.atoms)
        outputs, extra = evaluate_batch(self.potential, batch, forces=gradients, stress=stressed)
        out = {name: value.cpu().numpy() for name, value in outputs.items()}
        self.results = {}
        if self.potential.has_energy:
            energy = float(out["energy"][0])
            self.results = {"energy": energy, "free_energy": energy, "energies": out["atomic_energy"]}
        of_atoms = per_atom_outputs(self.potential)
        for name, per in self.potential.uncertainty_outputs.items():
            if name == "stress_uncertainty" and name in out:
                self.results[name] = full_3x3_to_voigt_6_stress(out[name][0])
            elif name in out:
                self.results[name] = out[name] if per == "atom" else float(out[name][0])
        for name, value in extra.items():
            array = value.cpu().numpy()
            self.results[name] = array if name.removesuffix("_prob") in of_atoms or name in of_atoms else array[0]
        if gradients or "forces" in out:
            self.results["forces"] = out["forces"]
            if "stress" in out:
                self.results["stress"] = full_3x3_to_voigt_6_stress(out["stress"][0])

    def _by_engine(
        self, engine: DeviceEngine, atoms: Atoms | None, properties: Sequence[str], system_changes: Sequence[str]
    ) -> None:
        if system_changes == ["positions"] and self._structure is not None and atoms is not None:
            # The same as a copy of the structure, which takes longer. `reset` has removed the reference to it.
            self._structure.arrays["positions"][:] = atoms.arrays["positions"]
            self.atoms = self._structure
        else:
            super().calculate(atoms, list(properties), list(system_changes))
            self._set_systems(engine)
            self._structure, self._has_volume = self.atoms, bool(self.atoms.cell.volume > 0)
        structure, has_volume = self.atoms, self._has_volume
        if "stress" in properties and not has_volume:
            raise PropertyNotImplementedError("stress needs a cell with a volume; this structure has none")
        # Always with gradients, which are usually requested next: one program is enough.
        found = engine.evaluate_on_host(structure.arrays["positions"], structure.cell.array)
        assert found.forces is not None
        assert found.stress is not None
        energy = float(found.energy[0])
        self.results = {"energy": energy, "free_energy": energy, "energies": found.atomic_energy.numpy().copy()}
        self.results["forces"] = found.forces.numpy().copy()
        if has_volume:
            self.results["stress"] = found.stress[0].numpy().reshape(9)[VOIGT]

    def _set_systems(self, engine: DeviceEngine) -> None:
        """Pass a new composition to the engine; the first one also to the eager model."""
        frame = check_frame(frame_of_atoms(self.atoms, self.potential))
        before, now = self._composition, (frame.numbers, np.asarray(frame.pbc, dtype=bool))
        if before is not None and all(np.array_equal(one, other) for one, other in zip(before, now)):
            return
        species = torch.from_numpy(self.species.index(frame.numbers, where=frame.where)).to(self.device)
        systems = Systems(
            species, torch.tensor([len(frame)], device=self.device), torch.from_numpy(now[1])[None].to(self.device)
        )
        engine.set_systems(systems)
        self._composition = now
        if self.deviation is None:
            positions, cell = (torch.from_numpy(array).to(self.device) for array in (frame.positions, frame.cell[None]))
            self.deviation = compare(engine, systems, positions, cell)
            engine.notify(f"Evaluation engine, {engine.describe()}: {self.deviation}.")

    def forget_structures(self) -> None:
        """Drop results and neighbour lists, so that the next result does not depend on earlier structures to the last bit.

        The models of Forgefield need none of it; calculators of other programs reuse neighbour lists in their own ways.
        """
        self.reset()
        self.neighbours = VerletList(self.neighbours.graph, self.neighbours.skin)
        self._composition = None
        for module in self.potential.modules():
            if isinstance(module, AtomisticModel):
                module.forget_structures()

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """What has changed since the last calculation; ASE does not look at parameters by itself."""
        if self.engine is not None and self.atoms is not None:
            return self._changes(self.atoms, atoms)
        changes = super().check_state(atoms, tol=tol)
        changes += _other_types(self.atoms, atoms)
        if self.potential.inputs and self.atoms is not None:
            before, now = (parameters_of(structure, self.potential) for structure in (self.atoms, atoms))
            names = before.keys() | now.keys()
            changes += [name for name in names if not np.array_equal(now.get(name, np.nan), before.get(name, np.nan))]
        return changes

    @staticmethod
    def _changes(before: Atoms, now: Atoms) -> list[str]:
        """What of a structure has changed that the engine reads; quicker than ASE's comparison, and without a tolerance."""
        changes = [
            name for name in ("positions", "numbers") if not np.array_equal(before.arrays[name], now.arrays[name])
        ]
        changes += [] if np.array_equal(before.cell.array, now.cell.array) else ["cell"]
        changes += _other_types(before, now)
        return changes if np.array_equal(before.pbc, now.pbc) else [*changes, "pbc"]

    def _inputs(self, atoms: Atoms) -> dict[str, torch.Tensor]:
        found = parameters_of(atoms, self.potential)
        return {name: torch.from_numpy(values).to(self.device) for name, values in found.items()}

    def _batch(self, frame: Frame) -> dict[str, torch.Tensor]:
        source, destination, shifts = self.neighbours.edges(frame)
        species = self.species.index(frame.numbers, where=frame.where)
        batch = {
            "positions": torch.from_numpy(frame.positions),
            "species": torch.from_numpy(species),
            "frame": torch.zeros(len(frame), dtype=torch.int64),
            "n_atoms": torch.tensor([len(frame)]),
            "pbc": torch.from_numpy(np.asarray(frame.pbc, dtype=bool))[None],
            "cell": torch.from_numpy(frame.cell)[None],
            "edge_index": torch.from_numpy(np.stack([source, destination])),
            "edge_shift": torch.from_numpy(shifts.astype(np.float64)),
        }
        return {name: tensor.to(self.device) for name, tensor in batch.items()}


def _other_types(before: Atoms | None, now: Atoms) -> list[str]:
    """`numbers` if the names of types have changed."""
    names = [None if atoms is None else atoms.arrays.get(TYPE_NAMES) for atoms in (before, now)]
    if names[0] is None and names[1] is None:
        return []
    first, second = (np.asarray(one, dtype=str) for one in names)
    return [] if np.array_equal(first, second) else ["numbers"]


def parameters_of(atoms: Atoms, potential: Potential) -> dict[str, np.ndarray]:
    """Additional inputs of the model: those of the frame from `atoms.info`, those of atoms from `atoms.arrays`."""
    found = {}
    for name, (per, count) in potential.inputs.items():
        given = (atoms.info if per == "frame" else atoms.arrays).get(name)
        if given is None:
            continue
        rows = 1 if per == "frame" else len(atoms)
        values = np.array(given, dtype=np.float64)
        if values.size != rows * count:
            where = f"atoms.info['{name}']" if per == "frame" else f"atoms.arrays['{name}']"
            raise ForgefieldError(f"{where} has {values.size} numbers; the model reads {rows * count}.")
        found[name] = values.reshape(rows, count)
    return found


TYPE_NAMES = "type_names"
"""Array of a structure with the model's name of each atom's type, where that is not the element."""


def frame_of_atoms(atoms: Atoms, potential: Potential | None = None) -> Frame:
    """The frame of a structure, without labels. potential: may have other names of species, which `atoms.arrays['type_names']`
    then contains."""
    numbers = atoms.numbers
    if potential is not None and potential.type_names is not None and TYPE_NAMES in atoms.arrays:
        by_name = {name: atomic_numbers[s] for name, s in zip(potential.type_names, potential.species)}
        names = [str(name) for name in atoms.arrays[TYPE_NAMES]]
        if unknown := [name for name in names if name not in by_name]:
            raise ForgefieldError(
                f"atoms.arrays['{TYPE_NAMES}'] contains {unknown[0]!r}; the types of the model are {', '.join(by_name)}."
            )
        numbers = [by_name[name] for name in names]
    return Frame(
        positions=np.array(atoms.positions, dtype=np.float64),
        numbers=np.array(numbers, dtype=np.int64),
        cell=np.array(atoms.cell, dtype=np.float64),
        pbc=np.array(atoms.pbc, dtype=bool),
        source=f"structure {atoms.get_chemical_formula()}",
    )


def load_for_evaluation(
    run: Run | Potential,
    which: str,
    device: torch.device,
    dtype: str | torch.dtype | None,
    head: str | None,
    uncertainty: str | None = None,
) -> Potential:
    """A copy of the model in evaluation mode whose weights do not require gradients.

    uncertainty: `energy` or `forces`, to add uncertainties to its outputs.
    """
    if isinstance(run, nn.Module):
        if uncertainty is not None:
            raise ForgefieldError("uncertainty can be chosen for a run; a Potential is used as it is.")
        if head is not None:
            raise ForgefieldError("head can be chosen for a run; a Potential is used as it is.")
        if dtype is not None:
            raise ForgefieldError(
                "dtype can be chosen for a run; a Potential is used in the precision it was built with."
            )
        potential = copy.deepcopy(run)
    else:
        run.require_head(head)
        precision = None if dtype is None else str(dtype).removeprefix("torch.")
        potential = run.load_potential(which, device, head=head, precision=precision)
        potential = with_uncertainty(potential, run, which, uncertainty, head)
    return potential.to(device).eval().requires_grad_(False)
