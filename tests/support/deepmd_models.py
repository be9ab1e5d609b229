"""Models of DeePMD-kit in tests/fixtures/deepmd (make_models.py), with its predictions and parameter gradients."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import torch
from ase.data import atomic_numbers

from forgefield.data.batch import Batch, batch_from_frames
from forgefield.data.frame import Frame
from forgefield.data.species import SpeciesTable
from forgefield.models import Potential, build_model
from forgefield.models.deeppot.importer import read_deepmd

FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepmd"


def unpacked(folder: Path, name: str) -> Path:
    """The file NAME.xz of the fixtures, decompressed."""
    path = folder / name
    path.write_bytes(lzma.decompress((FIXTURES / f"{name}.xz").read_bytes()))
    return path


def loaded(path: Path) -> Potential:
    imported = read_deepmd(path)
    potential = build_model(imported.resolved, precision=imported.precision, seed=0)
    potential.load_state_dict(imported.state)
    return potential


def predictions(name: str) -> dict[str, np.ndarray]:
    """Structure, results and factors of the gradients, as DeePMD-kit has them."""
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        return dict(arrays)


def batch_for(potential: Potential, expected: dict[str, np.ndarray]) -> Batch:
    table = SpeciesTable(potential.species)
    numbers = np.array([atomic_numbers[potential.species[kind]] for kind in expected["atype"][0]])
    frame = Frame(
        expected["coord"].reshape(-1, 3), numbers, expected["box"].reshape(3, 3), np.ones(3, bool), None, None, None
    )
    batch = batch_from_frames([frame], table, potential.cutoff)
    return batch | ({"spin": torch.from_numpy(expected["spin"]).reshape(-1, 3)} if "spin" in expected else {})


def assert_equal_predictions(potential: Potential, expected: dict[str, np.ndarray], tolerance: float = 1e-9) -> None:
    batch = batch_for(potential, expected)
    found = potential.eval()(batch, stress=True)
    virial = -found["stress"] * float(torch.linalg.det(batch["cell"][0]).abs())
    theirs = expected["virial"].reshape(3, 3)
    results = {"energy": found["energy"], "atom_energy": found["atomic_energy"], "force": found["forces"]}
    results |= {name: found[name] for name in potential.derivative_outputs}
    for key, value in results.items():
        np.testing.assert_allclose(
            value.detach(), expected[key].reshape(value.shape), rtol=0, atol=tolerance, err_msg=key
        )
    np.testing.assert_allclose(virial[0].detach(), 0.5 * (theirs + theirs.T), rtol=0, atol=tolerance, err_msg="virial")


def gradients(potential: Potential, expected: dict[str, np.ndarray], form: str) -> dict[str, torch.Tensor]:
    """Derivatives, in each weight, of the sum whose factors are in `expected`. form: `double` or `tangent`."""
    batch = batch_for(potential, expected)
    volume = torch.linalg.det(batch["cell"][0]).abs()
    factor = torch.tensor(expected["c_v"].reshape(1, 3, 3))
    adjoints = {
        "energy": torch.tensor(expected["c_e"].reshape(-1)),
        "forces": torch.tensor(expected["c_f"].reshape(-1, 3)),
        "stress": -volume * 0.5 * (factor + factor.transpose(1, 2)),
    }
    adjoints |= {name: torch.tensor(expected["c_m"].reshape(-1, 3)) for name in potential.derivative_outputs}
    weights = {name: weight for name, weight in potential.named_parameters() if weight.requires_grad}
    if form == "double":
        outputs = potential.train()(batch, stress=True)
        values, cotangents = [outputs[key] for key in adjoints], list(adjoints.values())
    else:
        values, cotangents = potential.eval().response(batch, adjoints)
    found = torch.autograd.grad(values, list(weights.values()), cotangents, allow_unused=True)
    return {
        name: torch.zeros_like(weight) if gradient is None else gradient
        for (name, weight), gradient in zip(weights.items(), found)
    }
