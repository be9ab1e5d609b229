"""The evaluation engine on moving atoms, against the potential on batches of the data layer.

Without a GPU its kernels run in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/inference/engine`. Captured graphs are
tested in `tests/gpu/test_gpu_evaluation.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forgefield.data.frame import Frame
from forgefield.errors import ForgefieldError
from forgefield.inference.engine import comparison
from forgefield.inference.engine.comparison import compare, part_of
from forgefield.inference.engine.device import DeviceEngine, Systems, refusal
from forgefield.inference.engine.program import ProgramSize
from forgefield.inference.lammps.evaluator import Evaluator, Share
from forgefield.kernels.convolution import passes as convolution
from forgefield.kernels.edges.near import COUNT
from forgefield.models.edges import edge_vectors
from forgefield.models.potential import Potential
from tests.support.kernels import DEVICE, needs_kernels
from tests.support.springs import Springs
from tests.support.structures import make_batch, make_frame, make_potential


class Unlike(Springs):
    """Differs in float64, as a wrong kernel would in the other direction."""

    def in_float64(self):
        double = super().in_float64()
        double.stiffness.data *= 1.01
        return double


def slab(seed: int) -> Frame:
    frame = make_frame(4, seed=seed, box=4.6)
    return Frame(positions=frame.positions, numbers=frame.numbers, cell=frame.cell, pbc=np.array([True, False, True]))


CASES = {
    "triclinic": lambda: [make_frame(4, seed=1, box=4.6)],
    "smaller than the cutoff": lambda: [make_frame(2, seed=1, box=2.8)],
    "single atom": lambda: [make_frame(1, seed=4, periodic=False)],
    "several": lambda: [make_frame(3, seed=1, periodic=False), make_frame(1, seed=4, periodic=False), slab(6)],
}


def systems_of(frames: list[Frame]) -> tuple[Systems, torch.Tensor, torch.Tensor]:
    batch = {name: tensor.to(DEVICE) for name, tensor in make_batch(*frames).items()}
    return Systems(batch["species"], batch["n_atoms"], batch["pbc"]), batch["positions"], batch["cell"]


def engine_of(frames: list[Frame], potential: Potential | None = None, **options):
    potential = (potential or Potential(Springs())).to(DEVICE).eval().requires_grad_(False)
    engine = DeviceEngine(potential, torch.device(DEVICE), **options)
    systems, positions, cells = systems_of(frames)
    engine.set_systems(systems)
    return engine, positions, cells


def expected(engine: DeviceEngine, frames: list[Frame], positions, cells) -> dict[str, torch.Tensor]:
    ends = np.cumsum([len(frame) for frame in frames])[:-1]
    moved = [
        Frame(positions=part, numbers=frame.numbers, cell=cell, pbc=frame.pbc)
        for frame, part, cell in zip(frames, np.split(positions.cpu().numpy(), ends), cells.cpu().numpy())
    ]
    batch = {name: tensor.to(DEVICE) for name, tensor in make_batch(*moved).items()}
    return engine.potential(batch, forces=True, stress=True)


def assert_equal(found, wanted: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    for name in ("energy", "atomic_energy", "forces", "stress"):
        value = getattr(found, name).to(DEVICE)
        torch.testing.assert_close(value, wanted[name], rtol=tolerance, atol=tolerance, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("case", CASES)
def test_moving_atoms_and_cells(case):
    frames = CASES[case]()
    engine, positions, cells = engine_of(frames, skin=0.4)
    random = np.random.default_rng(0)
    for step in range(3):
        wanted = expected(engine, frames, positions, cells)
        if step % 2:
            found = engine.evaluate(positions, cells)
        else:
            found = engine.evaluate_on_host(positions.cpu().numpy(), cells.cpu().numpy())
        assert_equal(found, wanted)
        strain = torch.eye(3, dtype=torch.float64) + torch.from_numpy(random.normal(0, 2e-3, (3, 3)))
        strain = 1.05 * strain if step == 1 else strain
        positions = positions + torch.from_numpy(random.normal(0, 0.03, positions.shape)).to(DEVICE)
        cells, positions = (each @ strain.to(DEVICE) for each in (cells, positions))
    assert engine.builds < 4


@needs_kernels
def test_a_strained_crystal_keeps_its_lists_and_a_strained_slab_does_not():
    """Lists of systems without periodicity along all axes are built for the cell as it is."""
    builds = []
    for frames in (CASES["triclinic"](), [slab(6)]):
        engine, positions, cells = engine_of(frames, skin=0.4)
        for scale in (1.0, 1.005, 1.01):
            wanted = expected(engine, frames, scale * positions, scale * cells)
            assert_equal(engine.evaluate(scale * positions, scale * cells), wanted)
        builds.append(engine.builds)
    assert builds == [1, 3]


@needs_kernels
def test_an_atom_that_crosses_the_skin_is_noticed_in_the_same_step():
    frames = [make_frame(4, seed=3, box=9.0)]
    engine, positions, cells = engine_of(frames, skin=0.5)
    engine.evaluate(positions, cells)
    for distance in (0.2, 0.3, 40.0):
        positions = positions.clone()
        positions[0, 0] += distance
        assert_equal(engine.evaluate(positions, cells), expected(engine, frames, positions, cells))
    assert engine.builds == 3  # the first move alone is within the skin


@needs_kernels
def test_more_edges_than_the_program_has_room_for():
    frames = [make_frame(4, seed=3, box=7.0)]
    engine, positions, cells = engine_of(frames, skin=1.0)
    counts = []
    for scale in (1.0, 0.97, 0.5):
        assert_equal(
            engine.evaluate(scale * positions, scale * cells),
            expected(engine, frames, scale * positions, scale * cells),
            1e-11,
        )
        counts.append(engine.captures)
    assert counts[0] == counts[1] < counts[2]


@needs_kernels
@pytest.mark.parametrize("why", ["no room", "invalid lists"])
def test_edges_that_cannot_be_selected_are_left_over_and_refer_to_existing_ones(why):
    """Their evaluation is repeated, but its kernels have read them by then."""
    engine, positions, cells = engine_of([make_frame(12, seed=3, box=9.0)], skin=3.0)
    engine.evaluate(positions, cells)
    program = engine._program
    room = program.size.edges
    if why == "no room":
        program.positions.mul_(0.5)
        program.cell[:1].mul_(0.5)
    else:
        program.builder.status.fill_(1)
    program.run()
    near = program.near
    assert (int(near.status[COUNT]) > room) is (why == "no room")
    assert not near.pointers.any()
    every = torch.arange(room, device=near.reverse.device)
    assert torch.equal(near.reverse[near.reverse], every)
    assert int(near.index.min()) >= 12  # blank atoms
    assert (near.vectors.norm(dim=1) > program.settings.cutoff).all()


@needs_kernels
def test_energies_alone():
    frames = CASES["several"]()
    engine, positions, cells = engine_of(frames)
    found = engine.evaluate(positions, cells, gradients=False)
    assert found.forces is None
    torch.testing.assert_close(found.energy, expected(engine, frames, positions, cells)["energy"], rtol=1e-13, atol=0)


@needs_kernels
def test_nequip_uses_kernels_and_weights_prepared_once():
    frames = [make_frame(3, seed=1, box=4.5)]
    potential = make_potential("float64", num_layers=3, num_features=2)
    engine, positions, cells = engine_of(frames, potential)
    assert_equal(engine.evaluate(positions, cells), expected(engine, frames, positions, cells), 1e-11)
    prepared = engine._fixed.state
    assert prepared is not None
    engine.evaluate(positions + 0.01, cells)
    assert engine._fixed.state is prepared


@needs_kernels
def test_forces_in_ranges_of_edges_are_the_same(monkeypatch):
    """As for systems whose rows of edges would not fit into the memory of a GPU."""
    frames = [make_frame(3, seed=1, box=4.5)]
    potential = make_potential("float64", num_layers=3, num_features=2)
    engine, positions, cells = engine_of(frames, potential, captured=False)
    wanted = engine.evaluate(positions, cells).forces.clone()
    ranges: list[int] = []
    split = convolution.Convolution._ranges

    def counted(self):
        found = split(self)
        ranges.append(len(found))
        return found

    monkeypatch.setattr(convolution, "row_limit", lambda device: 1280)
    monkeypatch.setattr(convolution.Convolution, "_ranges", counted)
    found = engine.evaluate(positions, cells).forces
    assert max(ranges) > 2
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


@needs_kernels
def test_bad_positions_are_refused():
    frames = [make_frame(3, seed=1, box=4.5)]
    engine, positions, cells = engine_of(frames)
    engine.evaluate(positions, cells)
    together = positions.clone()
    together[1] = together[0]
    with pytest.raises(ForgefieldError, match="atoms 0 and 1 are at the same place"):
        engine.evaluate(together, cells)
    together[1] = torch.nan
    with pytest.raises(ForgefieldError, match="not a finite number"):
        engine.evaluate(together, cells)
    assert_equal(engine.evaluate(positions, cells), expected(engine, frames, positions, cells))


@needs_kernels
def test_comparison_finds_a_model_that_differs(monkeypatch):
    frames = CASES["several"]()
    engine, positions, cells = engine_of(frames)
    systems = systems_of(frames)[0]
    assert compare(engine, systems, positions, cells).forces < 1e-12
    monkeypatch.setattr(comparison, "MOST_ATOMS", 3)
    deviation = compare(engine, systems, positions, cells)
    assert (deviation.n_atoms, deviation.whole) == (3, False)
    wrong, *_ = engine_of(frames, Potential(Unlike()))
    with pytest.raises(ForgefieldError, match="is not exact"):
        compare(wrong, systems, positions, cells)


@needs_kernels
@pytest.mark.parametrize("model", ["springs", "nequip"])
def test_edges_from_another_program(model):
    """As LAMMPS passes them: numbers of atoms and edges vary, sums are those of the eager model."""
    potential = Potential(Springs()) if model == "springs" else make_potential("float64", num_features=2)
    potential = potential.to(DEVICE).eval().requires_grad_(False)
    messages: list[str] = []
    by_engine, eager = (Evaluator(potential, engine=engine, notify=messages.append) for engine in (True, False))
    for frames in ([make_frame(4, seed=1, box=4.6)], [make_frame(3, seed=2, box=4.6)], CASES["single atom"]()):
        batch = {name: tensor.to(DEVICE) for name, tensor in make_batch(*frames).items()}
        share = Share(len(batch["species"]), batch["species"], *batch["edge_index"], edge_vectors(batch))
        found, wanted = by_engine.evaluate(share), eager.evaluate(share)
        torch.testing.assert_close(found.energies, wanted.energies, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(found.slopes, wanted.slopes, rtol=1e-11, atol=1e-13)
    assert len(messages) == 1
    assert by_engine.deviation.forces < 1e-11


def test_the_compared_part_is_whole_systems_or_next_to_the_centre():
    frames = CASES["several"]()
    systems, positions, cells = systems_of(frames)
    some, at, _ = part_of(systems, positions, cells)
    assert some.sizes == systems.sizes
    assert torch.equal(at, positions)
    line = torch.arange(601.0, dtype=torch.float64).view(-1, 1) * torch.tensor([1.0, 0, 0], dtype=torch.float64)
    ones = torch.ones(601, dtype=torch.int64)
    chain = Systems(ones, torch.tensor([601]), torch.ones(1, 3, dtype=torch.bool))
    part, at, cell = part_of(chain, line, torch.eye(3, dtype=torch.float64)[None])
    assert part.sizes == (1, comparison.MOST_ATOMS)
    assert not part.pbc.any()
    assert not cell.any()
    assert (at[:, 0] - 300).abs().max() <= comparison.MOST_ATOMS / 2


def test_sizes_leave_room_for_a_blank_system():
    size = ProgramSize(systems=3, atoms=20, listed=100, edges=64)
    assert size.holds(2, 19, 100, 64)
    for larger in ((3, 19, 100, 64), (2, 20, 100, 64), (2, 19, 101, 64), (2, 19, 100, 65)):
        assert not size.holds(*larger)


def test_the_reason_why_the_engine_cannot_evaluate_a_model():
    potential = Potential(Springs())
    potential.max_neighbours = 4
    reason = refusal(potential, torch.device(DEVICE))
    assert reason is not None
    with pytest.raises(ForgefieldError, match="cannot be used"):
        DeviceEngine(potential, torch.device(DEVICE))
