"""Evaluates a model on edges that another program provides, such as LAMMPS, by the kernels and captured graphs of the engine.

Edges are copied into tensors of fixed sizes; those that are left over connect blank atoms with images of themselves beyond the
cutoff. A program is made again when a size is exceeded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forgefield.data.padding import EDGES_PER_ATOM
from forgefield.errors import ForgefieldError
from forgefield.inference.engine.device import MOST_CAPTURED, SPARE
from forgefield.inference.engine.program import captured_evaluation, energies_and_slopes
from forgefield.kernels.convolution.dispatch import evaluation
from forgefield.models.edges import Batch, FixedWeights
from forgefield.models.potential import Potential
from forgefield.ops.execution import execution
from forgefield.ops.graph import EdgeGraph


def edge_batch(species: Tensor, index: Tensor) -> Batch:
    """A batch with edges and without positions. species: (n_atoms,); index: (2, n_edges)."""
    n_atoms, device = species.shape[0], species.device

    def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros((1,) * len(shape), dtype=dtype, device=device).expand(shape)

    return {
        "species": species,
        "edge_index": index,
        "frame": zeros(n_atoms, dtype=torch.int64),
        "n_atoms": torch.full((1,), n_atoms, dtype=torch.int64, device=device),
        "positions": zeros(n_atoms, 3),
        "cell": zeros(1, 3, 3),
        "pbc": zeros(1, 3, dtype=torch.bool),
        "edge_shift": zeros(index.shape[1], 3),
    }


class EdgeEngine:
    """potential: in evaluation mode, on the device where it is evaluated, with weights that do not change.

    captured: whether evaluations are captured as CUDA graphs; default: on a GPU, where this is possible. notify: receives what
    the user should know.
    """

    def __init__(
        self,
        potential: Potential,
        device: torch.device,
        *,
        captured: bool | None = None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.potential, self.device, self.notify = potential, device, notify
        self.captured = device.type == "cuda" if captured is None else captured
        self._fixed = FixedWeights()
        self._program: _EdgeProgram | None = None
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def evaluate(self, species: Tensor, source: Tensor, destination: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Energies of atoms (n_atoms,), eV, and their derivatives in the edge vectors (n_edges, 3), eV/A, float64.

        species: (n_atoms,); source, destination: (n_edges,), ascending in the destination; vectors: (n_edges, 3), A. Results
        are valid until the next evaluation.
        """
        n_atoms, n_edges = species.shape[0], source.shape[0]
        program = self._program
        if program is None or not program.holds(n_atoms, n_edges):
            program = self._program = _EdgeProgram(self.potential, self._fixed, n_atoms, n_edges, self.device)
            program.load(species, source, destination, vectors)
            if self.captured and program.n_edges <= MOST_CAPTURED:
                self._capture(program)
        program.load(species, source, destination, vectors)
        program.run()
        return program.energies[:n_atoms], program.slopes[:n_edges]

    def _capture(self, program: _EdgeProgram) -> None:
        try:
            program.capture(self._pool)
        except ForgefieldError as error:
            self.captured = False
            self.notify(str(error))


class _EdgeProgram:
    """An evaluation in tensors of fixed sizes, with room for these numbers of atoms and edges."""

    def __init__(
        self, potential: Potential, fixed: FixedWeights, n_atoms: int, n_edges: int, device: torch.device
    ) -> None:
        self.potential, self.fixed = potential, fixed
        self.n_edges = max(int(n_edges * (1 + SPARE)), n_edges + EDGES_PER_ATOM)
        self.n_atoms = n_atoms + -(-(self.n_edges - n_edges) // EDGES_PER_ATOM) + 1
        self.species = torch.zeros(self.n_atoms, dtype=torch.int64, device=device)
        self.index = torch.zeros(2, self.n_edges, dtype=torch.int64, device=device)
        self.vectors = torch.zeros(self.n_edges, 3, dtype=torch.float64, device=device)
        self.energies = torch.zeros(self.n_atoms, dtype=torch.float64, device=device)
        self.slopes = torch.zeros(self.n_edges, 3, dtype=torch.float64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def holds(self, n_atoms: int, n_edges: int) -> bool:
        """Whether there is room, and not far too much."""
        half = self.n_edges // 2 <= n_edges + 2 * EDGES_PER_ATOM and self.n_atoms // 2 <= n_atoms + 2
        return n_atoms < self.n_atoms and n_edges <= self.n_edges and half

    def load(self, species: Tensor, source: Tensor, destination: Tensor, vectors: Tensor) -> None:
        """Set the input of the next run; arguments as of `EdgeEngine.evaluate`."""
        n_atoms, n_edges = species.shape[0], source.shape[0]
        self.species[:n_atoms], self.species[n_atoms:] = species, 0
        self.index[0, :n_edges], self.index[1, :n_edges], self.vectors[:n_edges] = source, destination, vectors
        spare = self.n_edges - n_edges
        number = torch.arange(spare, device=self.species.device)
        self.index[:, n_edges:] = n_atoms + number * (self.n_atoms - n_atoms) // max(1, spare)
        self.vectors[n_edges:] = 0.0
        self.vectors[n_edges:, 0] = 2 * self.potential.cutoff

    def capture(self, pool: object) -> None:
        """From now on, replay a CUDA graph. pool: memory shared with other graphs."""
        self._graph = captured_evaluation(self._compute, pool)

    def run(self) -> None:
        """Evaluate what was loaded."""
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()

    def _compute(self) -> None:
        batch = edge_batch(self.species, self.index)
        graph = EdgeGraph(self.index[0], self.index[1], self.n_atoms)
        with execution(kernels=True), evaluation():
            energies, slopes = energies_and_slopes(
                self.potential, batch, graph, self.vectors, self.fixed, gradients=True
            )
        assert slopes is not None
        self.energies.copy_(energies)
        self.slopes.copy_(slopes)
