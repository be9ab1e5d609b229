"""Predictions and errors of many frames by the evaluation engine, against the model itself.

Without a GPU its kernels run in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/inference/engine`.
"""

from __future__ import annotations

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator

from forgefield.data.batch import to_device
from forgefield.data.dataset import GraphDataset
from forgefield.data.frame import Frame
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.inference.engine import device
from forgefield.inference.engine.batches import BatchEngine
from forgefield.inference.evaluate import BatchEvaluator, evaluate_batches, predict_dataset
from forgefield.inference.predict import predict_file
from forgefield.models.potential import Potential
from tests.support.kernels import DEVICE, needs_kernels
from tests.support.springs import Springs
from tests.support.structures import make_batch, make_frame

pytestmark = needs_kernels


def slab(seed: int) -> Frame:
    frame = make_frame(4, seed=seed, box=4.6)
    return Frame(positions=frame.positions, numbers=frame.numbers, cell=frame.cell, pbc=np.array([True, False, True]))


def frames() -> list[Frame]:
    """In batches of two: the second fits into the program of the first, the third does not."""
    first = [make_frame(4, seed=1, box=4.6), slab(2)]
    second = [make_frame(3, seed=3, periodic=False), make_frame(1, seed=4, periodic=False)]
    return [*first, *second, make_frame(9, seed=5, box=4.6), make_frame(2, seed=6, box=2.8), make_frame(2, seed=7)]


@pytest.fixture
def potential() -> Potential:
    return Potential(Springs()).to(DEVICE).eval()


def structures() -> list[Atoms]:
    """With labels and values that a prediction has to keep."""
    images = []
    for number, frame in enumerate(frames()):
        atoms = Atoms(frame.numbers, positions=frame.positions, cell=frame.cell, pbc=frame.pbc)
        atoms.info["temperature"] = 300.0 + number
        atoms.arrays["charges_read"] = np.arange(len(atoms)) / 8
        atoms.calc = SinglePointCalculator(atoms, energy=-1.5 * number, forces=np.full((len(atoms), 3), 0.25))
        images.append(atoms)
    return images


def test_batches_of_different_structures_equal_the_model(potential):
    engine = BatchEngine(potential.requires_grad_(False), torch.device(DEVICE), notify=(messages := []).append)
    batches = [make_batch(*frames()[start : start + 2]) for start in range(0, 7, 2)]
    captures = []
    for batch in batches:
        batch = to_device(batch, DEVICE)
        found = engine.evaluate(batch, forces=True, stress=True)
        wanted = potential(batch, forces=True, stress=True)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, equal_nan=True)
        captures.append(engine.captures)
    assert captures == [1, 1, 2, 2]  # the second and the last use the program of an earlier one
    assert len(messages) == 1
    assert engine.deviation.forces < 1e-12


def test_energies_alone_and_results_that_stay(potential):
    engine = BatchEngine(potential.requires_grad_(False), torch.device(DEVICE))
    one, other = (to_device(make_batch(*frames()[start : start + 2]), DEVICE) for start in (0, 2))
    first = engine.evaluate(one, forces=False, stress=False)
    kept = first["energy"].clone()
    engine.evaluate(other, forces=False, stress=False)
    assert first.keys() == {"energy", "atomic_energy"}
    assert torch.equal(first["energy"], kept)


def test_arrays_of_a_data_set(potential):
    data = GraphDataset(frames(), SpeciesTable(("H", "O")), Springs.cutoff)
    by_engine, eager = (
        predict_dataset(potential, data, stress=True, device=DEVICE, batch=2, engine=engine) for engine in (True, False)
    )
    assert by_engine.keys() == eager.keys()
    for name in eager.keys() - {"species_symbols"}:
        np.testing.assert_allclose(by_engine[name], eager[name], rtol=1e-12, atol=1e-12)
    assert all(parameter.requires_grad for parameter in potential.parameters())


def test_a_file_of_predictions_keeps_all_values(potential, tmp_path):
    ase.io.write(tmp_path / "source.extxyz", structures(), format="extxyz")
    messages: list[str] = []
    images = []
    for engine in (True, False):
        options = {"engine": engine, "notify": messages.append, "device": DEVICE}
        out = predict_file(potential, tmp_path / "source.extxyz", tmp_path / f"{engine}.extxyz", 2, **options)
        images.append(ase.io.read(out, ":"))
    assert len(messages) == 1
    for found, wanted, original in zip(*images, structures()):
        assert found.info.keys() == wanted.info.keys() >= {"temperature", "REF_energy", "predicted_by"}
        assert found.arrays.keys() == wanted.arrays.keys()
        np.testing.assert_array_equal(found.arrays["charges_read"], original.arrays["charges_read"])
        assert found.info["REF_energy"] == original.get_potential_energy()
        assert found.calc.results.keys() == wanted.calc.results.keys()
        for name, value in wanted.calc.results.items():
            np.testing.assert_allclose(found.calc.results[name], value, atol=2e-8)  # digits of the file


def test_memory_that_runs_out_is_released_and_halves_are_evaluated(potential, monkeypatch):
    batch = make_batch(*frames()[:4])
    wanted = evaluate_batches(potential, [batch], forces=True, stress=False, engine=False)
    released: list[int] = []
    evaluate, release = BatchEngine.evaluate, BatchEngine.release

    def limited(self, part, **options):
        if len(part["n_atoms"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return evaluate(self, part, **options)

    monkeypatch.setattr(BatchEngine, "evaluate", limited)
    monkeypatch.setattr(BatchEngine, "release", lambda self: (released.append(1), release(self)))
    found = evaluate_batches(potential, [batch], forces=True, stress=False, engine=True, device=DEVICE)
    assert released
    forces = np.concatenate([part["forces_pred"] for part in found])
    np.testing.assert_allclose(forces, wanted[0]["forces_pred"], rtol=1e-12, atol=1e-12)


def test_one_batch_is_left_to_the_model_and_several_are_not(potential, monkeypatch):
    chosen = []
    monkeypatch.setattr(BatchEvaluator, "__init__", lambda self, *args, engine, **_: chosen.append(engine))
    monkeypatch.setattr(BatchEvaluator, "builds_edges", False)
    monkeypatch.setattr("forgefield.inference.evaluate._predict_in_parts", lambda *args, **options: [])
    batches = [make_batch(frame) for frame in frames()[:2]]
    for part in (batches[:1], batches):
        evaluate_batches(potential, part, forces=True, stress=False)
    assert chosen == [False, None]


def test_atoms_at_the_same_place_are_reported_with_file_and_frame(potential, tmp_path):
    images = structures()
    images[3].positions[:] = 0.0
    images[4].positions[2] = images[4].positions[7]
    ase.io.write(tmp_path / "source.extxyz", images, format="extxyz")
    with pytest.raises(ForgefieldError, match=r"source\.extxyz.*frame 4.*atoms 2 and 7 are at the same place"):
        predict_file(potential, tmp_path / "source.extxyz", tmp_path / "out.extxyz", 2, engine=True, device=DEVICE)


def test_a_model_without_the_engine(potential, monkeypatch):
    monkeypatch.setattr(device, "refusal", lambda potential, device: "it is too old")
    with pytest.raises(ForgefieldError, match="engine=True is not possible: it is too old"):
        BatchEvaluator(potential, torch.device(DEVICE), engine=True)
    assert BatchEvaluator(potential, torch.device("cpu")).engine is None
