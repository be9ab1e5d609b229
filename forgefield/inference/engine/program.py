"""One evaluation in tensors of fixed sizes and addresses: selection of edges, model, derivative, sums.

On a GPU it is captured as a CUDA graph and replayed. Contract: `input` is written before `run`, and `output` is valid after it,
until the next run; neighbour lists and the composition are written by `set_lists` and `set_systems`, at any time between runs.
Sizes include at least one blank system, which has all atoms and edges that are left over (`data/padding.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forgefield.inference.capture import capture
from forgefield.kernels.convolution.dispatch import evaluation
from forgefield.kernels.core.runtime import joined
from forgefield.kernels.edges.lists import ListBuilder
from forgefield.kernels.edges.near import NearEdges, SkinLists, select_near, sum_over_edges, sum_over_frames
from forgefield.models.edges import EdgeContext, FixedWeights
from forgefield.models.potential import Potential
from forgefield.ops.execution import execution
from forgefield.ops.graph import EdgeGraph, GradientSwitch, edge_graph

STATUS = 5
"""Numbers of the status at the beginning of the output; see `kernels/edges/near.py`."""
WARM_UPS = 2
ATOMS_OF_SHARE = 256
"""Atoms of a system that one program sums."""


@dataclass(frozen=True)
class ProgramSize:
    """Sizes of the tensors of a program: systems and atoms, blank ones included; edges of lists with a skin; edges within the
    cutoff, an even number."""

    systems: int
    atoms: int
    listed: int
    edges: int

    def holds(self, systems: int, atoms: int, listed: int, edges: int) -> bool:
        """Whether systems of these sizes fit, with at least one blank system and atom."""
        return systems < self.systems and atoms < self.atoms and listed <= self.listed and edges <= self.edges


@dataclass(frozen=True)
class Settings:
    """cutoff, skin, closest: A; atoms within `closest` of each other coincide. gradients: whether forces and stress are
    computed."""

    cutoff: float
    skin: float
    closest: float
    gradients: bool


class Program:
    """See the module. potential: in evaluation mode, on `device`."""

    def __init__(
        self,
        potential: Potential,
        fixed: FixedWeights,
        size: ProgramSize,
        settings: Settings,
        device: torch.device,
    ) -> None:
        self.potential, self.fixed, self.size, self.settings, self.device = potential, fixed, size, settings, device
        systems, atoms = size.systems, size.atoms

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.input = zeros(9 * systems + 3 * atoms)
        """Cells of all systems, then positions of all atoms, A."""
        self.cell = self.input[: 9 * systems].view(systems, 3, 3)
        self.positions = self.input[9 * systems :].view(atoms, 3)
        self.cell[-1] = 2 * settings.cutoff * torch.eye(3, dtype=torch.float64, device=device)
        self.output = zeros(STATUS + 10 * systems + 4 * atoms)
        """Status; energies and stress of all systems; forces and energies of all atoms."""
        parts = self.output.split([STATUS, systems, 9 * systems, 3 * atoms, atoms])
        self.status, self.energy, self.stress, self.forces, self.atomic = parts
        self.species = zeros(atoms, dtype=torch.int64)
        self.system = zeros(atoms, dtype=torch.int64)
        self.n_atoms = zeros(systems, dtype=torch.int64)
        self.first_atoms = zeros(systems + 1, dtype=torch.int64)
        self.pbc = torch.ones(systems, 3, dtype=torch.bool, device=device)
        self.lists = SkinLists(
            pointers=zeros(atoms + 1, dtype=torch.int64),
            source=zeros(size.listed, dtype=torch.int32),
            shift=zeros(size.listed, 3, dtype=torch.int16),
            reverse=zeros(size.listed, dtype=torch.int32),
            positions=zeros(atoms, 3),
            cell=self.cell.clone(),
            inverse=zeros(systems, 3, 3),
        )
        self.builder = ListBuilder(
            self.positions,
            self.cell,
            self.pbc,
            self.system,
            self.first_atoms,
            self.lists,
            settings.cutoff + settings.skin,
        )
        self.near = NearEdges.empty(atoms, size.listed, size.edges, device)
        self.n_shares = max(1, min(256, -(-atoms // (ATOMS_OF_SHARE * max(1, systems - 1)))))
        self.staged: Tensor | None = None
        """Copies of input and output in the memory of the host, where they are used."""
        self.fetched: Tensor | None = None
        self._graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        """Of a build of the lists and of an evaluation, where they have been captured."""

    # ---- what is written between runs

    def set_systems(self, species: Tensor, n_atoms: Tensor, pbc: Tensor) -> None:
        """species: (n,), n_atoms: (n_systems,), pbc: (n_systems, 3), of the real atoms and systems."""
        real, systems = species.shape[0], n_atoms.shape[0]
        self.species.zero_()[:real] = species
        counts = self.n_atoms.zero_()
        counts[:systems] = n_atoms
        counts[-1] = self.size.atoms - real
        self.system.copy_(torch.repeat_interleave(counts, output_size=self.size.atoms))
        self.first_atoms[1:] = counts.cumsum(0)
        self.pbc.fill_(True)[:systems] = pbc
        self.positions[real:] = 0.0
        self.cell[systems:] = self.cell[-1].clone()

    def set_lists(self, index: Tensor, shift: Tensor, reverse: Tensor, inverse: Tensor) -> None:
        """Neighbour lists for the positions and cells in `input`. index: (2, n_edges), shift: (n_edges, 3) and reverse:
        (n_edges,) int64; inverse: (n_systems, 3, 3), see `SkinLists`."""
        lists, listed = self.lists, index.shape[1]
        lists.source[:listed] = index[0]
        lists.shift[:listed] = shift
        lists.reverse[:listed] = reverse
        every_atom = torch.arange(self.size.atoms + 1, device=self.device)
        lists.pointers.copy_(torch.searchsorted(index[1].contiguous(), every_atom))
        lists.positions.copy_(self.positions)
        lists.cell.copy_(self.cell)
        lists.inverse.zero_()[: inverse.shape[0]] = inverse
        lists.inverse[inverse.shape[0] :] = torch.linalg.inv(self.cell[-1])
        self.builder.status.zero_()

        if self.staged is not None:
            self.staged.copy_(self.input)

    # ---- an evaluation

    def host_memory(self) -> tuple[Tensor, Tensor]:
        """Pinned memory for input and output; that of the input holds what was set last."""
        if self.staged is None or self.fetched is None:
            pinned = self.device.type == "cuda"
            self.staged = torch.empty(self.input.shape, dtype=torch.float64, pin_memory=pinned)
            self.fetched = torch.empty(self.output.shape, dtype=torch.float64, pin_memory=pinned)
            self.staged.copy_(self.input)
        return self.staged, self.fetched

    def run(self) -> None:
        """Evaluate what is in `input`."""
        if self._graphs is None:
            self._compute()
        else:
            self._graphs[1].replay()

    def build_lists(self) -> None:
        """Build neighbour lists for the positions and cells in `input`. Where they do not fit, the status of the next run says
        so."""
        if self._graphs is None:
            self.builder.build()
        else:
            self._graphs[0].replay()

    def capture(self, pool: object) -> None:
        """From now on, replay a CUDA graph. Lists and systems must have been set. pool: memory shared with other graphs."""

        build = captured_evaluation(self.builder.build, pool)
        self._graphs = build, captured_evaluation(self._compute, pool)

    @property
    def captured(self) -> bool:
        return self._graphs is not None

    def _compute(self) -> None:
        settings, near = self.settings, self.near
        select_near(
            self.lists,
            near,
            self.positions,
            self.cell,
            self.system,
            cutoff=settings.cutoff,
            skin=settings.skin,
            closest=settings.closest,
            first_blank=self.first_atoms[-2:-1],
            invalid=self.builder.status,
        )
        self.status.copy_(near.status)
        batch = self._batch()
        with execution(kernels=True), evaluation():
            graph = replace(edge_graph(batch), pointers=near.pointers)
            atomic, slope = energies_and_slopes(
                self.potential, batch, graph, near.vectors, self.fixed, gradients=settings.gradients
            )
            if slope is None:
                virials = torch.zeros((self.size.atoms, 9), dtype=torch.float64, device=self.device)
            else:
                virials = torch.empty((self.size.atoms, 9), dtype=torch.float64, device=self.device)
                sum_over_edges(slope, near.vectors, near.pointers, near.reverse, self.forces, virials)
            self.atomic.copy_(atomic)
            parts = torch.empty((self.size.systems, self.n_shares, 10), dtype=torch.float64, device=self.device)
            sum_over_frames(self.atomic, virials, self.first_atoms, self.cell, parts, self.energy, self.stress)

    def _batch(self) -> dict[str, Tensor]:
        near = self.near
        return {
            "positions": self.positions,
            "species": self.species,
            "frame": self.system,
            "n_atoms": self.n_atoms,
            "pbc": self.pbc,
            "cell": self.cell,
            "edge_index": near.index,
            "edge_shift": torch.zeros(1, 3, dtype=torch.float64, device=self.device).expand(self.size.edges, 3),
            "edge_reverse": near.reverse,
        }


def energies_and_slopes(
    potential: Potential,
    batch: dict[str, Tensor],
    graph: EdgeGraph,
    vectors: Tensor,
    fixed: FixedWeights,
    *,
    gradients: bool,
) -> tuple[Tensor, Tensor | None]:
    """Energies of atoms (n_atoms,), eV, and their derivative in the edge vectors (n_edges, 3), eV/A, by kernels where the model
    has some; None without `gradients`. vectors: (n_edges, 3), A. fixed: of the potential, whose weights do not change."""
    with torch.set_grad_enabled(gradients):
        vectors = vectors.detach().requires_grad_(gradients)
        edges = EdgeContext(vectors, batch, graph, GradientSwitch(), differentiated_again=False, fixed_weights=fixed)
        atomic = potential.atomic_energies(batch, edges)
        if not gradients:
            return atomic, None
        if not atomic.requires_grad:  # a model without any weights for these species
            return atomic, torch.zeros_like(vectors)
        (slope,) = torch.autograd.grad([atomic], [vectors], [torch.ones_like(atomic)])
    return atomic.detach(), slope.contiguous()


def captured_evaluation(function: Callable[[], None], pool: object) -> torch.cuda.CUDAGraph:
    """The CUDA graph of a function without arguments. pool: memory shared with other graphs."""

    def joining() -> None:
        with joined():
            function()

    graph, _ = capture(
        joining,
        warm_up=function,
        warm_ups=WARM_UPS,
        pool=pool,  # type: ignore[arg-type]
        refusal="the evaluation cannot be captured as a CUDA graph",
        instead="it is computed without.",
    )
    return graph
