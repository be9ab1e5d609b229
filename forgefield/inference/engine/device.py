"""Evaluates systems whose atoms move on a GPU: neighbour lists with a skin, one captured program for each size.

An evaluation copies positions and cells in, replays a graph, and copies results out together with a status: whether an atom
has moved too far for the neighbour lists, and whether there are more edges than the program has room for. Only then is
something built again, and the evaluation repeated. Nothing else waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forgefield.data.neighbours.edges import CLOSEST_PAIR
from forgefield.data.padding import EDGES_PER_ATOM
from forgefield.errors import ForgefieldError
from forgefield.inference.engine.program import STATUS, Program, ProgramSize, Settings
from forgefield.kernels.core.runtime import can_launch
from forgefield.kernels.edges.near import COINCIDE, COUNT, INVALID, MOVED, TRAVEL, UNIT
from forgefield.models.edges import FixedWeights
from forgefield.models.potential import Potential
from forgefield.ops.neighbour_lists import batched_neighbours, squared_lengths

SKIN = 1.0
"""Default skin on a GPU, A. Edges in the skin cost little there, because each evaluation leaves them out first; lists with a
wide skin are built less often."""
SPARE = 0.04
"""Share of edges for which there is additional room, because their number varies while atoms move."""
LEAST_FILLED = 0.75
"""A program with fewer edges than this share of its room is replaced."""
CAUTION = 1.2
"""Lists are built before an evaluation in which an atom may have moved too far if it moves this many times as far as in the
step before."""
MOST_CAPTURED = 2**24
"""Edges of the largest program that is captured: beyond, launches take no noticeable time, and a captured graph would need
memory of its own in addition to that of the steps before its capture."""
BLANK_ATOMS = 8
"""Atoms that the edges that are left over are distributed to."""
MOST_PROGRAMS = 4
"""Programs that are kept, the latest ones."""


@dataclass(frozen=True)
class Room:
    """Additional room of a program, as shares of what the first systems need: edges, and atoms and systems."""

    edges: float = SPARE
    atoms: float = 0.0


@dataclass(frozen=True)
class Systems:
    """Atoms of several systems, one system after the other. species: (n,), index into the model's species; n_atoms:
    (n_systems,); pbc: (n_systems, 3) bool."""

    species: Tensor
    n_atoms: Tensor
    pbc: Tensor

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of systems and of atoms."""
        return self.n_atoms.shape[0], self.species.shape[0]


@dataclass(frozen=True)
class Results:
    """energy: (n_systems,), eV; atomic_energy: (n,), eV; forces: (n, 3), eV/A; stress: (n_systems, 3, 3), eV/A^3, NaN without a
    volume; the last two only where gradients were requested. Float64, valid until the next evaluation."""

    energy: Tensor
    atomic_energy: Tensor
    forces: Tensor | None
    stress: Tensor | None


def refusal(potential: Potential, device: torch.device) -> str | None:
    """Why the engine cannot evaluate this model on this device; None where it can."""
    if not can_launch(torch.empty(0, device=device)):
        return "it runs on GPUs with Triton"
    if not potential.has_energy or potential.forces_are_direct:
        return "forces of this model are not the derivative of an energy"
    if not potential.interface.only_edge_vectors:
        return "this model reads positions and cells, not edge vectors alone"
    if potential.adaptive_cutoff is not None or potential.max_neighbours is not None:
        return "neighbours of this model are not all pairs within one cutoff"
    if potential.inputs or potential.extra_outputs or potential.uncertainty_outputs:
        return "this model has additional inputs or outputs"
    return None


def choose_engine(
    potential: Potential,
    device: torch.device,
    wanted: bool | None,
    skin: float | None,
    notify: Callable[[str], None],
) -> DeviceEngine | None:
    """The engine for a model; None where the eager model is used.

    wanted, notify: as of `may_use_engine`.
    """
    if may_use_engine(potential, device, wanted, notify):
        return DeviceEngine(potential, device, skin=skin, notify=notify)
    return None


def may_use_engine(
    potential: Potential,
    device: torch.device,
    wanted: bool | None,
    notify: Callable[[str], None] = lambda text: None,
) -> bool:
    """Whether the engine evaluates a model.

    wanted: True: an error where the engine is not possible; False: never; None: on a GPU, for models that it supports. notify:
    receives why the engine does not evaluate a model on a GPU.
    """
    if wanted is False or (wanted is None and device.type != "cuda"):
        return False
    reason = refusal(potential, device)
    if reason is None:
        return True
    if wanted:
        raise ForgefieldError(f"engine=True is not possible: {reason}.")
    notify(f"The eager model is used, not the evaluation engine: {reason}.")
    return False


class DeviceEngine:
    """potential: in evaluation mode, on the device where it is evaluated, with weights that do not change.

    skin: of the neighbour lists, A. captured: whether evaluations are captured as CUDA graphs; default: on a GPU, where this is
    possible. room: of programs, for systems and edges that follow. notify: receives what the user should know.
    """

    def __init__(
        self,
        potential: Potential,
        device: torch.device,
        *,
        skin: float | None = None,
        captured: bool | None = None,
        room: Room | None = None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        reason = refusal(potential, device)
        if reason is not None:
            raise ForgefieldError(f"the evaluation engine cannot be used: {reason}.")
        self.skin = SKIN if skin is None else float(skin)
        if not self.skin >= 0:
            raise ForgefieldError(f"The skin of the neighbour list is {skin}; it should be 0 or more, in A.")
        self.potential, self.device, self.notify = potential, device, notify
        self.captured = device.type == "cuda" if captured is None else captured
        self.room = room or Room()
        self.builds = 0
        """How often neighbour lists have been built."""
        self.captures = 0
        """How many programs have been made."""
        self._fixed = FixedWeights()
        self._systems: Systems | None = None
        self._programs: dict[tuple[ProgramSize, bool], Program] = {}
        self._program: Program | None = None
        self._travel = _Travel()
        self._views: dict[int, Results] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._status = torch.zeros(STATUS, dtype=torch.float64, pin_memory=device.type == "cuda")

    def set_systems(self, systems: Systems) -> None:
        """Choose the systems of the following evaluations. Lists are built again."""
        self._systems, self._program = systems, None

    def replace_systems(self, systems: Systems) -> None:
        """The same for systems that follow others of similar sizes: where they fit into the program in use, it is kept, and
        lists are built on the device. Sums are then in the order of that program, on which the last bit depends."""
        program, (n_systems, n_atoms) = self._program, systems.sizes
        if program is None or not (n_systems < program.size.systems and n_atoms < program.size.atoms):
            self.set_systems(systems)
            return
        self._systems = systems
        program.set_systems(systems.species, systems.n_atoms, systems.pbc)
        self._travel, self._views = _Travel(), {}
        self._travel.due = True

    def forget_programs(self) -> None:
        """Release the memory of all programs."""
        self._programs, self._program, self._views = {}, None, {}

    def evaluate(self, positions: Tensor, cell: Tensor, *, gradients: bool = True) -> Results:
        """Results for positions (n, 3) and cells (n_systems, 3, 3), A, float64, on the device."""
        program = self._current(positions, cell, gradients)
        while True:
            n_systems, n_atoms = self._sizes
            program.cell[:n_systems].copy_(cell)
            program.positions[:n_atoms].copy_(positions)
            self._prepare(program)
            program.run()
            self._status.copy_(program.status, non_blocking=True)
            self._wait()
            following = self._checked(program, self._status.numpy(), gradients)
            if following is None:
                return self._results(program, program.output)
            program = following

    def evaluate_on_host(self, positions: np.ndarray, cell: np.ndarray, *, gradients: bool = True) -> Results:
        """The same for arrays, with one copy to the device and one back; results are on the host."""
        if self._program is None or self._program.settings.gradients is not gradients:
            arrays = (positions, cell.reshape(-1, 3, 3))
            at, of = (torch.from_numpy(np.ascontiguousarray(array)).to(self.device) for array in arrays)
            self._listed(at, of, gradients)
        program = self._program
        assert program is not None
        n_systems, n_atoms = self._sizes
        while True:
            staged, fetched = program.host_memory()
            first = 9 * program.size.systems
            numbers = staged.numpy()
            numbers[: 9 * n_systems] = cell.reshape(-1)
            numbers[first : first + 3 * n_atoms] = positions.reshape(-1)
            length = first + 3 * n_atoms
            program.input[:length].copy_(staged[:length], non_blocking=True)
            self._prepare(program)
            program.run()
            fetched.copy_(program.output, non_blocking=True)
            self._wait()
            following = self._checked(program, fetched[:STATUS].numpy(), gradients)
            if following is None:
                return self._results(program, fetched)
            program = following

    def describe(self) -> str:
        """How systems are evaluated, in a few words."""
        large = self._program is not None and not self._program.captured
        return "captured as a CUDA graph" if self.captured and not large else "without capture"

    # ---- parts of an evaluation

    @property
    def _sizes(self) -> tuple[int, int]:
        assert self._systems is not None
        return self._systems.sizes

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _checked(self, program: Program, status: np.ndarray, gradients: bool) -> Program | None:
        """None if results are valid; else the program with which the evaluation is to be repeated."""
        fits = status[COUNT] <= program.size.edges and status[INVALID] == 0
        if status[MOVED] == 0 and fits:
            if status[COINCIDE]:
                self._refuse_coinciding(program)
            self._travel.add(status[TRAVEL] * UNIT)
            return None
        if fits and not self._travel.due and self._travel.evaluations > 0:
            self._travel.due = True  # build the lists on the device and repeat
            return program
        n_systems, n_atoms = self._sizes
        positions, cell = program.positions[:n_atoms].clone(), program.cell[:n_systems].clone()
        if not bool(torch.isfinite(positions).all()):
            raise ForgefieldError("a position is not a finite number.")
        return self._listed(positions, cell, gradients)

    def _results(self, program: Program, output: Tensor) -> Results:
        """Views of the output of the program, on the device or on the host; made once for the systems."""
        known = self._views.get(output.data_ptr())
        if known is not None:
            return known
        (n_systems, n_atoms), size = self._sizes, program.size
        parts = [STATUS, size.systems, 9 * size.systems, 3 * size.atoms, size.atoms]
        _, energy, stress, forces, atomic = output.split(parts)
        gradients = program.settings.gradients
        results = self._views[output.data_ptr()] = Results(
            energy[:n_systems],
            atomic[:n_atoms],
            forces.view(-1, 3)[:n_atoms] if gradients else None,
            stress.view(-1, 3, 3)[:n_systems] if gradients else None,
        )
        return results

    def _current(self, positions: Tensor, cell: Tensor, gradients: bool) -> Program:
        """The program in use, or a new one for these positions and cells."""
        if self._program is None or self._program.settings.gradients is not gradients:
            return self._listed(positions, cell, gradients)
        return self._program

    def _listed(self, positions: Tensor, cell: Tensor, gradients: bool) -> Program:
        """A program with new neighbour lists for these positions and cells, built by the host step by step."""
        systems, cutoff = self._systems, self.potential.cutoff
        assert systems is not None
        index, shift, reverse = batched_neighbours(positions, systems.n_atoms, cell, systems.pbc, cutoff + self.skin)
        self.builds += 1
        if shift.numel() and int(shift.abs().max()) > torch.iinfo(torch.int16).max:
            raise ForgefieldError(
                "an atom is tens of thousands of cells away from its neighbours; wrap the positions into the cell."
            )
        frame = torch.repeat_interleave(systems.n_atoms, output_size=positions.shape[0])
        squares = squared_lengths(positions, cell, frame, index[0], index[1], shift)
        n_near = int((squares <= cutoff**2).sum())
        program = self._program_for((*systems.sizes, index.shape[1], n_near), gradients)
        n_systems, n_atoms = systems.sizes
        program.cell[:n_systems] = cell
        program.positions[:n_atoms] = positions
        program.set_systems(systems.species, systems.n_atoms, systems.pbc)
        program.set_lists(index, shift, reverse, _inverse(cell, systems.pbc))
        if self.captured and not program.captured and program.size.edges <= MOST_CAPTURED:
            self._capture(program)
        self._program, self._travel, self._views = program, _Travel(), {}
        return program

    def _prepare(self, program: Program) -> None:
        """Build lists on the device if they are due, before they are needed: an evaluation with old ones would be repeated."""
        if self._travel.due:
            program.build_lists()
            self.builds += 1
            self._travel = _Travel()

    def _program_for(self, sizes: tuple[int, int, int, int], gradients: bool) -> Program:
        """The smallest program into which systems of these sizes fit, or a new one; see `ProgramSize.holds`."""
        fitting = [
            program
            for (size, of_gradients), program in self._programs.items()
            if of_gradients is gradients
            and size.holds(*sizes)
            and sizes[3] >= LEAST_FILLED * size.edges - EDGES_PER_ATOM
        ]
        if fitting:
            return min(fitting, key=lambda program: program.size.edges)
        size = planned_size(*sizes, self.room)
        settings = Settings(self.potential.cutoff, self.skin, CLOSEST_PAIR, gradients)
        while len(self._programs) >= MOST_PROGRAMS:
            del self._programs[next(iter(self._programs))]
        program = self._programs[size, gradients] = Program(self.potential, self._fixed, size, settings, self.device)
        self.captures += 1
        return program

    def _capture(self, program: Program) -> None:
        try:
            program.capture(self._pool)
        except ForgefieldError as error:
            self.captured = False
            self.notify(str(error))

    def _refuse_coinciding(self, program: Program) -> None:
        (source, destination), near = program.near.index, int(program.status[COUNT])
        lengths = program.near.vectors[:near].norm(dim=1)
        worst = int(lengths.argmin())
        one, other = sorted((int(source[worst]), int(destination[worst])))
        raise ForgefieldError(f"atoms {one} and {other} are at the same place; remove one")


class _Travel:
    """How far atoms have moved since the lists were built, in units of what they may move; whether the next step may be too
    far."""

    def __init__(self) -> None:
        self.evaluations, self.due = 0, False
        self._latest = 0.0

    def add(self, travel: float) -> None:
        """travel: at the present evaluation."""
        self.evaluations += 1
        step = max(travel - self._latest, travel / self.evaluations)
        self._latest = travel
        self.due = travel > 0 and travel + CAUTION * step > 1


def planned_size(systems: int, atoms: int, listed: int, edges: int, room: Room) -> ProgramSize:
    """Sizes for systems of these sizes, and additional room."""
    return ProgramSize(
        systems + 1 + int(systems * room.atoms),
        atoms + BLANK_ATOMS + int(atoms * room.atoms),
        max(int(listed * (1 + room.edges)), listed + EDGES_PER_ATOM),
        2 * -(-max(int(edges * (1 + room.edges)), edges + EDGES_PER_ATOM) // 2),
    )


def _inverse(cell: Tensor, pbc: Tensor) -> Tensor:
    """Inverse cells (n_systems, 3, 3), 1/A, of systems that are periodic along all axes; zero for others, whose cells must not
    change while a list is used."""
    inverse, failed = torch.linalg.inv_ex(cell)
    usable = pbc.all(1) & (failed == 0)
    return torch.where(usable.view(-1, 1, 1), inverse, torch.zeros_like(inverse))
