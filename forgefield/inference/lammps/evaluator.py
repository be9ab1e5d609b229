"""Energies of one process's atoms and their derivatives in the edge vectors, where neighbours may belong to other processes.

A process has `n_local` atoms of its own, and after them in all arrays the ghost atoms: neighbours that other processes own.
Edges end at the process's own atoms, whose energies are computed here; a ghost's energy is computed by its owner. Layers of a
message-passing model need features of ghosts: the owner sends them (`forward`), and the gradients with respect to them go back
to the owner (`reverse`). The derivatives in the edge vectors of all processes together are then those of the total energy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.inference.engine.comparison import Deviation, compare_edges
from forgefield.inference.engine.device import refusal
from forgefield.inference.engine.edges import EdgeEngine, edge_batch
from forgefield.inference.uncertainty import LastLayerUncertainty
from forgefield.kernels.convolution.dispatch import evaluation
from forgefield.models.edges import Batch, EdgeContext
from forgefield.models.potential import Potential
from forgefield.ops.autograd import AutogradContext, Gradients, TypedFunction
from forgefield.ops.graph import EdgeGraph, GradientSwitch


class Exchange(Protocol):
    """Communication between the owners of atoms and the processes where these are ghosts.

    All processes call the same methods in the same order with the same width, also those without atoms.
    """

    def forward(self, rows: Tensor, n_atoms: int) -> Tensor:
        """(n_atoms, width): `rows` (n_local, width) of the process's own atoms, then those of its ghosts."""
        ...

    def reverse(self, rows: Tensor, n_local: int) -> Tensor:
        """(n_local, width): rows of `rows` (n_atoms, width), each plus those of all its ghosts on any process."""
        ...


@dataclass(frozen=True)
class Share:
    """One process's share of a structure.

    n_local: number of its own atoms, which come first. species: (n_atoms,) int64, indices into the model's species, ghosts
    included. source, destination: (n_edges,) int64, neighbour and centre; ascending in the centre. vectors: (n_edges, 3) from
    centre to neighbour, A, float64.
    """

    n_local: int
    species: Tensor
    source: Tensor
    destination: Tensor
    vectors: Tensor


class Evaluated(NamedTuple):
    """Results for one share, float64.

    energies: (n_local,), eV. slopes: (n_edges, 3), derivatives of the total energy in the edge vectors, eV/A. uncertainties:
    (n_local,), of the energies, eV; None where they are not computed.
    """

    energies: Tensor
    slopes: Tensor
    uncertainties: Tensor | None


class Evaluator:
    """Evaluates a potential on shares of structures.

    uncertainty: of the potential's last layer, to compute uncertainties of atomic energies too.
    engine: whether structures that are not divided are evaluated by kernels and captured CUDA graphs; default: on a GPU, for
        models that the engine supports. notify: receives the deviation of the engine from the eager model in float64, once.
    """

    widths: tuple[int, ...]
    """Numbers per atom of each exchange of one evaluation, in order."""

    def __init__(
        self,
        potential: Potential,
        uncertainty: LastLayerUncertainty | None = None,
        *,
        engine: bool | None = None,
        notify: Callable[[str], None] = print,
    ) -> None:
        require_supported(potential)
        self.uncertainty = uncertainty
        self.potential = potential.eval().requires_grad_(False)
        self.species, self.type_names = potential.species, potential.type_names
        self.cutoff = potential.cutoff
        self.can_be_divided = potential.interface.ghost_atoms is not None
        self.device = next((tensor.device for tensor in potential.state_dict().values()), torch.device("cpu"))
        self.widths = self._measure_widths()
        supported = uncertainty is None and refusal(potential, self.device) is None
        self._engine: EdgeEngine | None = None
        if supported and (engine or (engine is None and self.device.type == "cuda")):
            self._engine = EdgeEngine(self.potential, self.device, notify=notify)
        self._notify = notify
        self.deviation: Deviation | None = None
        """Deviation of the engine from the eager model in float64, on the first structure."""

    def evaluate(self, share: Share, exchange: Exchange | None = None) -> Evaluated:
        """Energies of the process's own atoms, and their derivatives.

        exchange: needed where there are ghosts; None: the structure is not divided, and there are none.
        """
        if share.n_local == 0:
            if exchange is not None:
                self._take_part(exchange, share.species.shape[0])
            none = share.vectors.new_zeros(0)
            return Evaluated(none, torch.zeros_like(share.vectors), None if self.uncertainty is None else none)
        ghosts = None if exchange is None or not self.widths else Ghosts(exchange, share.n_local, len(share.species))
        if self._engine is not None and ghosts is None:
            return self._by_engine(self._engine, share)
        return self._evaluate(share, ghosts)

    def _by_engine(self, engine: EdgeEngine, share: Share) -> Evaluated:
        edges = (share.species, share.source, share.destination, share.vectors)
        if self.deviation is None:
            self.deviation = compare_edges(engine, *edges)
            self._notify(f"Evaluation engine: {self.deviation}.")
        energies, slopes = engine.evaluate(*edges)
        if share.n_local < share.species.shape[0]:  # ghosts whose energies their owners compute
            return Evaluated(energies[: share.n_local].clone(), slopes.clone(), None)
        return Evaluated(energies, slopes, None)

    def _evaluate(self, share: Share, ghosts: Ghosts | None) -> Evaluated:
        n_atoms = share.species.shape[0]
        vectors = share.vectors.detach().requires_grad_(True)
        batch = edge_batch(share.species, torch.stack([share.source, share.destination]))
        graph = EdgeGraph(share.source, share.destination, n_atoms)
        edges = EdgeContext(vectors, batch, graph, GradientSwitch(), differentiated_again=False, ghosts=ghosts)
        # MPI may be called from the thread of LAMMPS alone, so that the backward pass must not use another one.
        with torch.enable_grad(), evaluation(), torch.autograd.set_multithreading_enabled(False):
            energies, uncertainties = self._energies(batch, edges, share.n_local)
            if energies.requires_grad:
                (slopes,) = torch.autograd.grad(energies.sum(), vectors)
            else:  # a model without any weights for these species
                slopes = torch.zeros_like(share.vectors)
        if ghosts is not None and ghosts.waiting:
            raise ForgefieldError("the model did not differentiate all of its exchanges with other processes.")
        return Evaluated(energies.detach(), slopes, uncertainties)

    def _energies(self, batch: Batch, edges: EdgeContext, n_local: int) -> tuple[Tensor, Tensor | None]:
        """Energies of the first n_local atoms, eV, and their uncertainties, from one pass through the model."""
        if self.uncertainty is None:
            return self.potential.atomic_energies(batch, edges)[:n_local], None
        last = self.potential.last_layer(batch, edges)
        return last.energies()[:n_local], self.uncertainty.of_features(last.features[:n_local].detach())

    def _take_part(self, exchange: Exchange, n_atoms: int) -> None:
        """The exchanges of an evaluation, on a process without atoms."""
        for width in self.widths:
            exchange.forward(torch.zeros(0, width, dtype=torch.float64), n_atoms)
        for width in reversed(self.widths):
            exchange.reverse(torch.zeros(n_atoms, width, dtype=torch.float64), 0)

    def _measure_widths(self) -> tuple[int, ...]:
        """Of an evaluation of two atoms, one of which is a ghost."""
        if self.potential.interface.ghost_atoms != "exchange":
            return ()
        recorder = _Recorder()
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        vectors = torch.tensor([[0.0, 0.0, 0.5 * self.cutoff]], dtype=torch.float64, device=self.device)
        self._evaluate(Share(1, zero.repeat(2), zero + 1, zero, vectors), Ghosts(recorder, 1, 2))
        return tuple(recorder.widths)


class Ghosts:
    """The ghosts of one evaluation; see `forgefield.models.edges.GhostAtoms`."""

    def __init__(self, exchange: Exchange, n_local: int, n_atoms: int) -> None:
        self.exchange, self.n_local, self.n_atoms = exchange, n_local, n_atoms
        self.waiting = 0
        """Exchanges whose gradients have not been exchanged yet."""

    def fill(self, rows: Tensor) -> Tensor:
        """rows: of the process's own atoms, of ghosts, and possibly others, which are kept."""
        filled: Tensor = _Fill.apply(rows[: self.n_local], self)
        return filled if rows.shape[0] == self.n_atoms else torch.cat([filled, rows[self.n_atoms :]])


class _Fill(TypedFunction):
    """(n_local, width) -> (n_atoms, width). Its gradient sums over the ghosts of an atom, wherever they are."""

    @staticmethod
    def forward(ctx: AutogradContext, rows: Tensor, ghosts: Ghosts) -> Tensor:
        ctx.ghosts = ghosts
        ghosts.waiting += 1
        return ghosts.exchange.forward(rows, ghosts.n_atoms)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> Gradients:
        ghosts: Ghosts = ctx.ghosts
        ghosts.waiting -= 1
        return ghosts.exchange.reverse(grad, ghosts.n_local), None


class _Recorder:
    """An exchange with nobody that records its widths."""

    def __init__(self) -> None:
        self.widths: list[int] = []

    def forward(self, rows: Tensor, n_atoms: int) -> Tensor:
        self.widths.append(rows.shape[1])
        return torch.cat([rows, rows.new_zeros(n_atoms - rows.shape[0], rows.shape[1])])

    def reverse(self, rows: Tensor, n_local: int) -> Tensor:
        return rows[:n_local].clone()


def require_supported(potential: Potential) -> None:
    """Raise unless the potential has energies that depend on the edges of all pairs within the cutoff alone."""
    reason = None
    if not potential.has_energy:
        reason = "it predicts no energy"
    elif potential.forces_are_direct:
        reason = "its forces are predicted directly (task.forces.direct) and are not the derivative of its energy"
    elif not potential.interface.only_edge_vectors:
        reason = "it reads positions and cells, not edge vectors alone"
    elif potential.adaptive_cutoff is not None:
        reason = "its cutoff is adaptive (data.adaptive_cutoff)"
    elif potential.max_neighbours is not None:
        reason = "it limits the number of neighbours (data.max_neighbours)"
    elif potential.required_inputs:
        reason = f"it reads additional inputs ({', '.join(potential.required_inputs)})"
    if reason is not None:
        raise ForgefieldError(f"this model cannot be used in LAMMPS: {reason}.")


def species_of_types(
    potential_species: Sequence[str], symbols: Sequence[str], type_names: Sequence[str] | None = None
) -> list[int]:
    """Index into the model's species for each atom type of LAMMPS. symbols: one for each type, or its name in the model.
    type_names: other names of the model's species."""
    if type_names is not None:
        named = {**dict(zip(potential_species, potential_species)), **dict(zip(type_names, potential_species))}
        unknown = [symbol for symbol in symbols if symbol not in named]
        if unknown:
            raise ForgefieldError(
                f"atom type {list(symbols).index(unknown[0]) + 1} is '{unknown[0]}', but the types of the model are "
                f"{', '.join(type_names)}."
            )
        symbols = [named[symbol] for symbol in symbols]
    for number, symbol in enumerate(symbols, 1):
        if symbol not in potential_species:
            raise ForgefieldError(
                f"atom type {number} is '{symbol}', but the model was trained on {', '.join(potential_species)}."
            )
    return [list(potential_species).index(symbol) for symbol in symbols]
