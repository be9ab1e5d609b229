"""A trained model for torch-sim: energies, forces and stress of many systems in one batch.

On a GPU the evaluation engine (`inference/engine`) evaluates models that it supports; states stay on the device. Otherwise the
eager model does, with neighbour lists that have a skin, as in the ASE calculator: a list is built again only when one of its
atoms has moved by half the skin or the cell has changed, and only pairs within the cutoff reach the model, so that results do
not depend on the skin. On a CPU each system has a list of its own; on a GPU the lists of all systems are built together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_sim.models.interface import ModelInterface

from forgefield.data.frame import Frame
from forgefield.data.neighbours.graph import GraphOptions, graph_of
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.inference.ase import DEFAULT_SKIN, VerletList
from forgefield.inference.engine.comparison import Deviation, compare
from forgefield.inference.engine.device import DeviceEngine, Systems, choose_engine
from forgefield.inference.evaluate import evaluate_batch
from forgefield.inference.uncertainty import with_uncertainty
from forgefield.models.potential import Potential
from forgefield.ops.neighbour_lists import batched_neighbours, squared_lengths
from forgefield.runs import Run

Batch = dict[str, Tensor]


class Model(ModelInterface):  # type: ignore[misc]
    """A trained model as a torch-sim model.

    Parameters
    ----------
    run
        Name or path of a run, a packaged model (`.ff`), a `Run`, a `Potential`, or an `Ensemble`, whose results include
        uncertainties and deviations.
    which
        Weights of the run, `best` or `last`.
    device
        Where the model runs; default: `cuda` if available, otherwise `cpu`.
    dtype
        Data type of states and results. The network computes in the precision in which it was trained.
    compute_forces, compute_stress
        What to compute in addition to energies.
    skin
        Distance beyond the cutoff up to which neighbours are remembered, A; default: 1 with the engine, otherwise 0.5.
    head
        Branch of a model with several branches.
    trust_code
        Whether to import code to which the run refers, such as a user-defined model.
    uncertainty
        `energy` or `forces`, to add uncertainties to the results of a run that has them.
    engine
        Whether models are evaluated by captured CUDA graphs with kernels; an error where that is not possible. Default: on a
        GPU, for models that it supports.
    notify
        Receives the deviation of the engine from the eager model in float64, once, before the first result.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | Run | Potential,
        *,
        which: str = "best",
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float64,
        compute_forces: bool = True,
        compute_stress: bool = True,
        skin: float | None = None,
        head: str | None = None,
        trust_code: bool = False,
        uncertainty: str | None = None,
        engine: bool | None = None,
        notify: Callable[[str], None] = print,
    ) -> None:
        super().__init__()
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._dtype = dtype
        self._compute_forces, self._compute_stress = compute_forces, compute_stress
        self._memory_scales_with = "n_atoms_x_density"
        if isinstance(run, Potential):
            self.potential = run.to(self._device).eval()
        else:
            opened = Run.open(run, trust_code=trust_code)
            opened.require_head(head)
            potential = opened.load_potential(which, self._device, head=head)
            self.potential = with_uncertainty(potential, opened, which, uncertainty, head)
        if not self.potential.has_energy:
            raise ForgefieldError(
                f"This model predicts {', '.join(self.potential.extra_outputs) or 'noise'} but no energy, "
                "which torch-sim needs."
            )
        self.species = SpeciesTable(self.potential.species, trained=True)
        graph = graph_of(self.potential)
        all_pairs = graph.adaptive_cutoff is None and graph.max_neighbours is None
        batched = self._device.type == "cuda" and all_pairs
        host_skin = DEFAULT_SKIN if skin is None else skin
        self.neighbours: SystemLists | BatchedLists = (
            BatchedLists(graph.cutoff, host_skin) if batched else SystemLists(graph, host_skin)
        )
        self._engine = choose_engine(self.potential, self._device, engine, skin, notify)
        self._composition: tuple[Tensor, ...] = ()
        self._versions: tuple[int, ...] = ()
        self.deviation: Deviation | None = None
        """Deviation of the engine from the eager model in float64, on the first state."""

    @property
    def compute_stress(self) -> bool:
        """Whether stress is computed."""
        return self._compute_stress

    @compute_stress.setter
    def compute_stress(self, value: bool) -> None:
        self._compute_stress = value

    @property
    def compute_forces(self) -> bool:
        """Whether forces are computed."""
        return self._compute_forces

    @compute_forces.setter
    def compute_forces(self, value: bool) -> None:
        self._compute_forces = value

    def forward(self, state: Any, **_: Any) -> dict[str, Tensor]:
        """Energies (n_systems,), eV, forces (n_atoms, 3), eV/A, and stress (n_systems, 3, 3), eV/A^3, of a torch-sim state.

        The stress of a system without a volume is NaN.
        """
        if self._engine is not None:
            return self._by_engine(self._engine, state)
        batch = self._batch(state)
        outputs, _extra = evaluate_batch(
            self.potential, batch, forces=self._compute_forces, stress=self._compute_stress
        )
        names = ("energy", *("forces",) * self._compute_forces, *("stress",) * self._compute_stress)
        uncertain = (name for name in self.potential.uncertainty_outputs if name in outputs)
        return {name: outputs[name].to(self._dtype) for name in (*names, *uncertain)}

    def _by_engine(self, engine: DeviceEngine, state: Any) -> dict[str, Tensor]:
        positions, cell = self._geometry(state)
        values = (_value(state, name) for name in ("atomic_numbers", "system_idx", "pbc"))
        given = tuple(torch.as_tensor(() if value is None else value) for value in values)
        if not self._is_known(given):
            # The tensors are kept, so that others cannot have their addresses.
            self._composition, self._versions = given, tuple(tensor._version for tensor in given)
            systems = self._systems(state, cell)
            engine.set_systems(systems)
            if self.deviation is None:
                self.deviation = compare(engine, systems, positions, cell)
                engine.set_systems(systems)
                engine.notify(f"Evaluation engine: {self.deviation}.")
        found = engine.evaluate(positions, cell, gradients=self._compute_forces or self._compute_stress)
        results = {"energy": found.energy}
        if self._compute_forces and found.forces is not None:
            results["forces"] = found.forces
        if self._compute_stress and found.stress is not None:
            results["stress"] = found.stress
        return {name: value.to(self._dtype, copy=True) for name, value in results.items()}

    def _is_known(self, given: tuple[Tensor, ...]) -> bool:
        """Whether species, systems and periodicity are those of the last state. Tensors of the same address are not compared by
        value, for which the host would wait for the device."""
        if tuple(tensor._version for tensor in self._composition) != self._versions:
            return False  # they have been written to since
        pairs = list(zip(given, self._composition))
        same = (a.shape == b.shape and (a.data_ptr() == b.data_ptr() or torch.equal(a, b)) for a, b in pairs)
        return len(pairs) > 0 and all(same)

    def _geometry(self, state: Any) -> tuple[Tensor, Tensor]:
        """Positions (n_atoms, 3) and cells with lattice vectors as rows (n_systems, 3, 3), A, float64."""
        positions = _value(state, "positions").detach().to(self._device, torch.float64).contiguous()
        cell = _value(state, "cell").detach().to(self._device, torch.float64).mT.contiguous().reshape(-1, 3, 3)
        return positions, cell

    def _systems(self, state: Any, cell: Tensor) -> Systems:
        numbers, n_systems = _value(state, "atomic_numbers").cpu().numpy(), len(cell)
        species = torch.from_numpy(self.species.index(numbers, where="state")).to(self._device)
        frame = self._frame(state, len(species))
        pbc = torch.as_tensor(_value(state, "pbc"), dtype=torch.bool, device=self._device).expand(n_systems, 3)
        return Systems(species, torch.bincount(frame, minlength=n_systems), pbc)

    def _frame(self, state: Any, n_atoms: int) -> Tensor:
        """System of each atom, (n_atoms,)."""
        system = _value(state, "system_idx")
        return (torch.zeros(n_atoms, dtype=torch.int64) if system is None else system).to(self._device, torch.int64)

    def _batch(self, state: Any) -> Batch:
        """The batch of a state, which is left as it is. Positions and cells are taken to float64."""
        positions, cell = self._geometry(state)
        systems = self._systems(state, cell)
        batch = {
            "positions": positions,
            "species": systems.species,
            "frame": self._frame(state, len(positions)),
            "n_atoms": systems.n_atoms,
            "pbc": systems.pbc,
            "cell": cell,
        }
        return batch | self.neighbours.edges(batch, _value(state, "atomic_numbers").cpu().numpy())


def _value(state: Any, name: str) -> Any:
    return state[name] if isinstance(state, Mapping) else getattr(state, name)


class SystemLists:
    """Neighbour lists of a batch on the CPU: one list with a skin for each system."""

    def __init__(self, graph: GraphOptions, skin: float) -> None:
        self.graph, self.skin = graph, skin
        self._lists: list[VerletList] = []

    @property
    def builds(self) -> int:
        """How many lists have been built."""
        return sum(each.builds for each in self._lists)

    def edges(self, batch: Batch, numbers: np.ndarray) -> Batch:
        """`edge_index` (2, n_edges) and `edge_shift` (n_edges, 3) of all pairs within the cutoff."""
        device = batch["positions"].device
        positions, cells, pbc = (batch[name].cpu().numpy() for name in ("positions", "cell", "pbc"))
        last = np.cumsum(batch["n_atoms"].cpu().numpy())
        first = last - batch["n_atoms"].cpu().numpy()
        self._lists += [VerletList(self.graph, self.skin) for _ in range(len(first) - len(self._lists))]
        sources, destinations, shifts = [], [], []
        for number, (begin, end) in enumerate(zip(first, last)):
            frame = Frame(
                positions=positions[begin:end].copy(),
                numbers=numbers[begin:end].astype(np.int64),
                cell=cells[number],
                pbc=pbc[number],
                source="systems of the state",
                index=number,
            )
            source, destination, shift = self._lists[number].edges(frame)
            sources.append(source + begin)
            destinations.append(destination + begin)
            shifts.append(shift)
        index = np.stack([np.concatenate(sources), np.concatenate(destinations)])
        return {
            "edge_index": torch.from_numpy(index).to(device),
            "edge_shift": torch.from_numpy(np.concatenate(shifts).astype(np.float64)).to(device),
        }


class BatchedLists:
    """Neighbour lists of all systems of a batch, built together on its device, within the cutoff plus a skin."""

    def __init__(self, cutoff: float, skin: float) -> None:
        if not skin >= 0:
            raise ForgefieldError(f"The skin of the neighbour list is {skin}; it should be 0 or more, in A.")
        self.cutoff, self.skin = cutoff, skin
        self.builds = 0
        """How often the lists have been built."""
        self._reference: Batch = {}
        self._edges: tuple[Tensor, Tensor] | None = None

    def edges(self, batch: Batch, numbers: np.ndarray) -> Batch:
        """`edge_index` (2, n_edges) and `edge_shift` (n_edges, 3) of all pairs within the cutoff."""
        if self._edges is None or not self._still_valid(batch):
            index, shift, _ = batched_neighbours(
                batch["positions"], batch["n_atoms"], batch["cell"], batch["pbc"], self.cutoff + self.skin
            )
            self._edges = index, shift.double()
            self._reference = {name: batch[name].clone() for name in ("positions", "cell", "pbc", "frame")}
            self.builds += 1
        (source, destination), shift = self._edges
        squares = squared_lengths(batch["positions"], batch["cell"], batch["frame"], source, destination, shift)
        near = squares <= self.cutoff**2
        return {"edge_index": torch.stack([source[near], destination[near]]), "edge_shift": shift[near]}

    def _still_valid(self, batch: Batch) -> bool:
        for name in ("cell", "pbc", "frame"):
            if not torch.equal(batch[name], self._reference[name]):
                return False
        moved = batch["positions"] - self._reference["positions"]
        return bool(moved.square().sum(1).max() <= (self.skin / 2) ** 2) if len(moved) else True
