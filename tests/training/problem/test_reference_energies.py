"""A model's first energies are those of its atoms: for a user's own classes too, and less ZBL where the model adds it."""

from __future__ import annotations

import ase.io
import numpy as np
import pytest
import torch
from ase.calculators.singlepoint import SinglePointCalculator

import forgefield
from forgefield.config.loading import load_config
from forgefield.config.trust import CONFIG
from forgefield.data.module import read_data
from forgefield.models import build_model, resolve_model
from forgefield.training.problem.model_options import requested_task, resolved_model
from forgefield.training.problem.transfer import fit_shifts, set_shifts
from tests.support.helpers import emt_frames, tiny_config
from tests.support.structures import make_batch, make_frame

PAIRS, REFERENCED = "tests.support.own_model.Pairs", "tests.support.own_model.Referenced"
SPECIES = ("Cu", "Au")
STATISTICS = {"mean_neighbours": 9.0, "forces_rms": 1.3, "reference_energies": {"Cu": -700.0, "Au": -900.0}}


def resolved_own(name: str, statistics=STATISTICS):
    return resolve_model({"name": name}, species=SPECIES, cutoff=3.0, statistics=statistics, trust=CONFIG)


@pytest.mark.parametrize("name", [PAIRS, REFERENCED])
def test_reference_energies_are_added_to_a_model_once(name):
    potential = build_model(resolved_own(name), precision="float64", seed=0, trust=CONFIG)
    batch = make_batch(make_frame(5, numbers=(29, 79)), species=SPECIES)
    network = build_model(resolved_own(PAIRS, {}), precision="float64", seed=0, trust=CONFIG)(batch)
    references = torch.tensor([-700.0, -900.0], dtype=torch.float64)[batch["species"]]
    found = potential(batch)
    torch.testing.assert_close(found["atomic_energy"], network["atomic_energy"] + references)
    torch.testing.assert_close(found["forces"], network["forces"])


def test_runs_recorded_without_reference_energies_predict_as_before():
    old = {"name": PAIRS, "species": list(SPECIES), "cutoff": 3.0}
    batch = make_batch(make_frame(5, numbers=(29, 79)), species=SPECIES)
    assert abs(float(build_model(old, precision="float64", seed=0, trust=CONFIG)(batch)["energy"].detach())) < 10


def shifted_frames(tmp_path) -> dict:
    """EMT data whose energies are hundreds of eV/atom away from zero."""
    config = tiny_config(tmp_path, trainer={"max_epochs": 1}, training={"lr": 1e-6})
    frames = emt_frames(14, seed=1)
    for atoms in frames:
        results = dict(atoms.calc.results)
        results["energy"] += sum(-700.0 if symbol == "Cu" else -900.0 for symbol in atoms.symbols)
        atoms.calc = SinglePointCalculator(atoms, **results)
    ase.io.write(tmp_path / "frames.extxyz", frames)
    return config


def test_a_training_of_a_user_model_starts_at_the_reference_energies_and_its_run_keeps_them(tmp_path):
    config = shifted_frames(tmp_path) | {"model": {"name": PAIRS}}
    run = forgefield.train(config)
    assert run.info["model"]["reference_energies"] == run.info["statistics"]["reference_energies"]
    predicted = np.load(run.path / "predictions" / "val.npz")
    off = (predicted["energy_pred"] - predicted["energy_ref"]) / predicted["n_atoms"]
    assert np.abs(off).max() < 2.0  # eV/atom; hundreds without them


def zbl_data(tmp_path, frames=40, **model) -> tuple:
    """Data whose energies are exactly those of atoms plus ZBL plus forces of a known size."""
    config = load_config({**tiny_config(tmp_path), "model": model})
    energies = {"Cu": -3.0, "Au": -4.0}
    given = {**model, "energy_shifts": energies, "energy_scales": 1e-9, "avg_num_neighbours": 9.0}
    cutoff = float(config.data.cutoff)
    teacher = build_model(
        resolve_model(given, species=SPECIES, cutoff=cutoff), precision="float64", seed=0, trust=CONFIG
    ).eval()
    rng, made = np.random.default_rng(3), emt_frames(frames, seed=2)
    for atoms in made:
        frame = make_frame(1)
        frame = type(frame)(
            atoms.positions,
            atoms.numbers.astype(np.int64),
            atoms.cell.array,
            atoms.pbc,
            energy=None,
            forces=None,
            stress=None,
        )
        out = teacher(make_batch(frame, species=SPECIES, cutoff=cutoff))
        forces = out["forces"].numpy() + 0.5 * rng.standard_normal((len(atoms), 3))
        atoms.calc = SinglePointCalculator(atoms, energy=float(out["energy"]), forces=forces)
    ase.io.write(tmp_path / "frames.extxyz", made)
    data = read_data(config.data, config.seed)
    requested_task(config, data)
    return config, data, energies


@pytest.mark.parametrize(
    "more", [{"zbl": True}, {"zbl": {"polynomial_cutoff_p": 4.0}, "per_edge_type_cutoff": {"Cu": 3.0}}]
)
@pytest.mark.parametrize("name", ["nequip", "schnet"])
def test_reference_energies_and_scale_are_fitted_to_what_zbl_leaves(tmp_path, name, more):
    config, data, energies = zbl_data(tmp_path, name=name, num_layers=1, num_features=4, **more)
    assert abs(data.statistics.reference_energies["Cu"] - energies["Cu"]) > 0.1  # what a fit to all of the energy gives
    resolved = resolved_model(config, data)
    assert resolved["energy_shifts"] == pytest.approx(energies, abs=1e-5)
    assert resolved["energy_scales"] == pytest.approx(0.5, rel=0.1)


def test_the_bias_of_a_deep_potential_is_fitted_to_what_zbl_leaves(tmp_path):
    zbl_data(tmp_path, name="schnet", num_layers=1, num_features=4, zbl=True)
    model = {"name": "deeppot", "zbl": True, "descriptor": {"type": "se_e2_a", "neuron": [4, 8]}}
    config = load_config({**tiny_config(tmp_path), "model": model})
    data = read_data(config.data, config.seed)
    requested_task(config, data)
    resolved = resolved_model(config, data)
    bias = dict(zip(resolved["species"], resolved["out_bias"]))
    assert bias == pytest.approx({"Cu": -3.0, "Au": -4.0}, abs=1e-4)


def test_shifts_of_a_user_model_can_be_fitted_to_new_data(tmp_path):
    config = load_config(shifted_frames(tmp_path) | {"model": {"name": PAIRS}})
    data = read_data(config.data, config.seed)
    resolved = resolved_own(PAIRS) | {"species": list(data.species.symbols), "cutoff": float(config.data.cutoff)}
    resolved["reference_energies"] = dict.fromkeys(data.species.symbols, -1.0)
    potential = build_model(resolved, precision="float64", seed=0, trust=CONFIG)
    fit = fit_shifts(potential, data.train, device=torch.device("cpu"))
    set_shifts(potential, resolved, fit.after)
    assert fit.rms_after < 1.0 < fit.rms_before
    assert resolved["reference_energies"] == pytest.approx(dict(zip(fit.species, fit.after)))
    assert potential.reference_energies.tolist() == pytest.approx(fit.after)
