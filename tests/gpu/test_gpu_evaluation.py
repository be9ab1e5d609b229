"""On a GPU: the evaluation engine, captured, against the eager model in float64, while atoms and cells move."""

from __future__ import annotations

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.md.verlet import VelocityVerlet

from forgefield.data.frame import Frame
from forgefield.inference.ase import Calculator
from forgefield.inference.engine.batches import BatchEngine
from forgefield.inference.engine.device import DeviceEngine, Systems
from forgefield.inference.lammps.evaluator import Evaluator, Share
from forgefield.inference.predict import predict_file
from forgefield.kernels.convolution import passes as convolution
from forgefield.kernels.core.runtime import has_triton
from forgefield.models.edges import edge_vectors
from forgefield.models.potential import Potential, float64_copy
from tests.support.mace_kernel_cases import CASES as MACE_CASES
from tests.support.mace_kernel_cases import mace
from tests.support.structures import make_batch, make_frame, make_potential

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_triton(), reason="needs a CUDA device and Triton"
)
MODEL = {"l_max": 2, "num_layers": 3, "num_features": [8, 4, 4], "parity": False}
TOLERANCE = {"float64": 1e-9, "float32": 3e-5}
DEVICE = torch.device("cuda")


def potential_of(precision: str = "float64", **changes) -> Potential:
    return make_potential(precision=precision, **{**MODEL, **changes}).to(DEVICE).eval().requires_grad_(False)


def slab(seed: int) -> Frame:
    """Periodic along two axes, in a triclinic cell."""
    frame = make_frame(9, seed=seed, box=4.6)
    return Frame(positions=frame.positions, numbers=frame.numbers, cell=frame.cell, pbc=np.array([True, True, False]))


CASES = {
    "triclinic": lambda: [make_frame(8, seed=1, box=4.6)],
    "smaller than the cutoff": lambda: [make_frame(2, seed=1, box=2.4)],
    "slab": lambda: [slab(3)],
    "molecule": lambda: [make_frame(5, seed=2, periodic=False)],
    "single atom": lambda: [make_frame(1, seed=4, periodic=False)],
    "several": lambda: [
        make_frame(7, seed=1, box=4.5),
        make_frame(1, seed=4, periodic=False),
        slab(6),
        make_frame(4, seed=5, periodic=False),
    ],
}


def moved(frames: list[Frame], positions: torch.Tensor, cells: torch.Tensor) -> list[Frame]:
    ends = np.cumsum([len(frame) for frame in frames])[:-1]
    parts = np.split(positions.cpu().numpy(), ends)
    return [
        Frame(positions=part, numbers=frame.numbers, cell=cell, pbc=frame.pbc)
        for frame, part, cell in zip(frames, parts, cells.cpu().numpy())
    ]


def expected(potential: Potential, frames: list[Frame]) -> dict[str, torch.Tensor]:
    batch = {name: tensor.to(DEVICE) for name, tensor in make_batch(*frames).items()}
    return potential(batch, forces=True, stress=True)


def assert_equal(found, wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    for name in ("energy", "atomic_energy", "forces", "stress"):
        value = getattr(found, name).to(DEVICE)
        torch.testing.assert_close(value, wanted[name], rtol=tolerance, atol=tolerance, equal_nan=True, msg=name)


def engine_of(potential: Potential, frames: list[Frame], **options) -> tuple[DeviceEngine, torch.Tensor, torch.Tensor]:
    engine = DeviceEngine(potential, DEVICE, **options)
    batch = {name: tensor.to(DEVICE) for name, tensor in make_batch(*frames).items()}
    engine.set_systems(Systems(batch["species"], batch["n_atoms"], batch["pbc"]))
    return engine, batch["positions"], batch["cell"]


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_moving_atoms_and_cells(case, precision):
    potential, frames = potential_of(precision), CASES[case]()
    reference = float64_copy(potential)
    engine, positions, cells = engine_of(potential, frames, skin=0.3)
    random = np.random.default_rng(0)
    for step in range(12):
        wanted = expected(reference, moved(frames, positions, cells))
        assert_equal(engine.evaluate(positions, cells), wanted, TOLERANCE[precision])
        on_host = engine.evaluate_on_host(positions.cpu().numpy(), cells.cpu().numpy())
        assert_equal(on_host, wanted, TOLERANCE[precision])
        positions = positions + torch.from_numpy(random.normal(0, 0.04, positions.shape)).to(DEVICE)
        strain = np.eye(3) + random.normal(0, 1e-3, (3, 3)) if step % 3 else 1.02 * np.eye(3)
        cells, positions = (each @ torch.from_numpy(strain).to(DEVICE) for each in (cells, positions))
    assert engine._program.captured
    assert 1 <= engine.builds < 13


def test_an_atom_that_crosses_the_skin_is_noticed_in_the_same_step():
    potential, frames = potential_of(), [make_frame(6, seed=3, box=9.0)]
    engine, positions, cells = engine_of(potential, frames, skin=0.5)
    reference = float64_copy(potential)
    engine.evaluate(positions, cells)
    for distance in (0.2, 0.3, 2.0, 40.0):
        positions = positions.clone()
        positions[0, 0] += distance
        wanted = expected(reference, moved(frames, positions, cells))
        assert_equal(engine.evaluate(positions, cells), wanted, 1e-9)
    assert engine.builds == 4  # the first move alone is within the skin


def test_more_edges_than_the_program_has_room_for():
    potential, frames = potential_of(), [make_frame(12, seed=3, box=9.0)]
    engine, positions, cells = engine_of(potential, frames, skin=3.0)
    reference = float64_copy(potential)
    for scale in (1.0, 0.98, 0.7, 0.5, 1.0, 1.3):
        wanted = expected(reference, moved(frames, scale * positions, scale * cells))
        assert_equal(engine.evaluate(scale * positions, scale * cells), wanted, 1e-8)
    assert engine.captures > 1


def test_the_same_bits_on_repetition_and_for_other_compositions_in_between():
    potential = potential_of("float32")
    frames = [make_frame(8, seed=1, box=4.6)]
    engine, positions, cells = engine_of(potential, frames)
    first = engine.evaluate(positions, cells).forces.clone()
    for case in CASES.values():
        batch = {name: tensor.to(DEVICE) for name, tensor in make_batch(*case()).items()}
        engine.set_systems(Systems(batch["species"], batch["n_atoms"], batch["pbc"]))
        engine.evaluate(batch["positions"], batch["cell"])
    batch = {name: tensor.to(DEVICE) for name, tensor in make_batch(*frames).items()}
    engine.set_systems(Systems(batch["species"], batch["n_atoms"], batch["pbc"]))
    assert torch.equal(engine.evaluate(positions, cells).forces, first)


@pytest.mark.parametrize(
    "model",
    [
        {"zbl": True, "per_edge_type_cutoff": {"H": {"O": 2.0}}},
        {"nonlinearity": "norm", "convnet_resnet": True},
        {"avg_num_neighbours": {"H": 5.0, "O": 9.0}},
        {"name": "allegro", "l_max": 2, "num_layers": 2, "num_scalar_features": 8, "num_tensor_features": 4},
    ],
    ids=["repulsion", "norm", "neighbours", "allegro"],
)
def test_other_models(model):
    if model.get("name") == "allegro":
        from forgefield.models import build_model, resolve_model
        from tests.support.structures import SPECIES, STATISTICS

        resolved = resolve_model(model, species=SPECIES, cutoff=3.0, statistics=STATISTICS)
        potential = build_model(resolved, precision="float64", seed=0).to(DEVICE).eval().requires_grad_(False)
    else:
        potential = potential_of("float64", **model)
    messages: list[str] = []
    frames = CASES["several"]()
    engine, positions, cells = engine_of(potential, frames, notify=messages.append)
    wanted = expected(float64_copy(potential), frames)
    assert_equal(engine.evaluate(positions, cells), wanted, 1e-9)
    assert engine._program.captured, messages


@pytest.mark.parametrize("case", ["residual, correlation 3", "density", "nonlinear"])
def test_mace(case):
    frames = CASES["several"]()
    potential = mace("float64", **MACE_CASES[case]).to(DEVICE).eval().requires_grad_(False)
    engine, positions, cells = engine_of(potential, frames)
    wanted = expected(float64_copy(potential), frames)
    assert_equal(engine.evaluate(positions, cells), wanted, 1e-9)
    assert engine._program.captured


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_batches_of_different_structures(precision):
    """As for predictions and errors: programs are used again, energies and forces are those of the eager model."""
    potential, messages = potential_of(precision), []
    reference = float64_copy(potential)
    engine = BatchEngine(potential, DEVICE, notify=messages.append)
    random = np.random.default_rng(5)
    captures = []
    for number in range(8):
        sizes = random.integers(6, 11, 4)
        frames = [make_frame(int(size), seed=7 * number + place, box=4.6) for place, size in enumerate(sizes)]
        frames += [slab(number), make_frame(1, seed=number, periodic=False)]
        batch = {name: tensor.to(DEVICE) for name, tensor in make_batch(*frames).items()}
        gradients = number != 3
        found = engine.evaluate(batch, forces=gradients, stress=gradients)
        wanted = reference(batch, forces=gradients, stress=gradients)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            tolerance = TOLERANCE[precision]
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, equal_nan=True, msg=name)
        captures.append(engine.captures)
    assert captures[-1] < 6
    assert len(messages) == 1
    assert "captured as a CUDA graph" in messages[0]


def test_a_file_of_predictions(tmp_path):
    potential = potential_of("float32")
    frames = [make_frame(6 + number % 3, seed=number, box=4.6) for number in range(9)]
    images = [Atoms(frame.numbers, positions=frame.positions, cell=frame.cell, pbc=True) for frame in frames]
    for number, atoms in enumerate(images):
        atoms.info["temperature"] = 300.0 + number
    ase.io.write(tmp_path / "source.extxyz", images)
    found, wanted = (
        ase.io.read(
            predict_file(potential, tmp_path / "source.extxyz", tmp_path / f"{engine}.xyz", 2, engine=engine), ":"
        )
        for engine in (None, False)
    )
    for one, other in zip(found, wanted):
        assert one.info["temperature"] == other.info["temperature"]
        np.testing.assert_allclose(one.get_forces(), other.get_forces(), atol=3e-5)
        assert one.get_potential_energy() == pytest.approx(other.get_potential_energy(), abs=1e-4)


def test_edges_from_another_program_while_their_number_changes():
    potential, messages = potential_of(), []
    by_engine, eager = (Evaluator(potential, engine=engine, notify=messages.append) for engine in (True, False))
    frame = make_frame(8, seed=1, box=4.6)
    for scale in (1.0, 1.02, 0.98, 0.8, 1.5):
        scaled = Frame(scale * frame.positions, frame.numbers, scale * frame.cell, frame.pbc)
        batch = {name: tensor.to(DEVICE) for name, tensor in make_batch(scaled).items()}
        share = Share(len(batch["species"]), batch["species"], *batch["edge_index"], edge_vectors(batch))
        found, wanted = by_engine.evaluate(share), eager.evaluate(share)
        torch.testing.assert_close(found.energies, wanted.energies, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.slopes, wanted.slopes, rtol=1e-9, atol=1e-10)
    assert len(messages) == 1


def test_forces_in_ranges_of_edges(monkeypatch):
    """As for a million atoms, whose rows of edges do not fit into the memory."""
    potential, frames = potential_of("float32"), CASES["triclinic"]()
    engine, positions, cells = engine_of(potential, frames)
    wanted = engine.evaluate(positions, cells).forces.clone()
    monkeypatch.setattr(convolution, "row_limit", lambda device: 20_000)
    engine, positions, cells = engine_of(potential, frames)
    torch.testing.assert_close(engine.evaluate(positions, cells).forces, wanted, rtol=1e-5, atol=1e-6)
    assert engine._program.captured


def test_dynamics_in_ase_conserves_the_energy_of_the_eager_model():
    potential = potential_of()
    water = molecule("H2O")
    water.center(vacuum=3.0)
    water.calc = Calculator(potential, device="cuda", notify=lambda text: None)
    eager = water.copy()
    eager.calc = Calculator(potential, device="cuda", engine=False)
    for atoms in (water, eager):
        VelocityVerlet(atoms, 0.2 * units.fs).run(30)
    np.testing.assert_allclose(water.positions, eager.positions, atol=1e-9)
    assert water.get_potential_energy() == pytest.approx(eager.get_potential_energy(), abs=1e-9)
    assert water.calc.deviation.forces < 1e-9


def test_the_calculator_follows_changes_of_cell_and_species():
    potential = potential_of("float32")
    atoms = bulk("NaCl", "rocksalt", a=4.4)
    atoms.symbols = "HO"
    atoms = atoms.repeat((2, 2, 1))
    atoms.rattle(0.05, seed=1)
    calculators = [
        Calculator(potential, device="cuda", engine=engine, notify=lambda text: None) for engine in (True, False)
    ]
    for change in range(4):
        if change == 1:
            atoms.set_cell(atoms.cell * 1.01, scale_atoms=True)
        if change == 2:
            atoms.symbols[0] = "O"
        if change == 3:
            del atoms[1]
        results = []
        for calculator in calculators:
            atoms.calc = calculator
            results.append((atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()))
        for one, other in zip(*results):
            np.testing.assert_allclose(one, other, atol=3e-5, rtol=1e-5)
