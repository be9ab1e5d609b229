"""Deep Potential: the reference numbers, physics, statistics, and options that are refused."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from ase.data import atomic_numbers
from scipy.spatial.transform import Rotation

from forgefield.data.batch import batch_from_frames
from forgefield.data.frame import Frame
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.models import build_model, resolve_model
from forgefield.models.deeppot.descriptor import environment_rows, switch
from forgefield.models.deeppot.importer import read_deepmd
from forgefield.models.deeppot.statistics import environment_statistics
from forgefield.models.edges import EdgeContext, edge_vectors
from forgefield.models.resolving import model_statistics
from tests.support.deeppots import CUTOFF, SPECIES, make_deeppot, section
from tests.support.structures import SHARED, make_batch, make_frame

REFERENCE = SHARED / "deepmd_reference"
ROOM = {"sel": [40, 40]}
MODELS = {
    "se_e2_a": {},
    "se_e2_a with room": {**ROOM, "type_one_side": True},
    "se_e2_r": {"kind": "se_e2_r"},
    "se_e2_r with room": {"kind": "se_e2_r", **ROOM},
    "excluded": {"exclude_types": [[0, 1]], **ROOM, "resnet_dt": True},
    "radial, excluded": {"kind": "se_e2_r", "exclude_types": [[0, 0]], "type_one_side": True},
    "excluded in the model": {"model": {"pair_exclude_types": [[1, 1]]}, **ROOM},
    "zbl": {"model": {"zbl": True}},
}


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="the reference data is not here")
@pytest.mark.parametrize("number", range(3))
def test_reference_of_deepmd_kit_is_met(number):
    """Its own model and its own numbers: atomic energies, forces, virials, descriptor."""
    case = yaml.safe_load((REFERENCE / "deeppot-testcase.yaml").read_text())
    imported = read_deepmd(REFERENCE / "deeppot_sea.yaml")
    potential = build_model(imported.resolved, precision="float64", seed=0)
    potential.load_state_dict(imported.state)
    expected = case["results"][number]
    box = expected["box"]
    numbers = np.array([atomic_numbers[case["type_map"][t]] for t in expected["atype"]])
    cell = np.reshape(box, (3, 3)).astype(float) if box else np.zeros((3, 3))
    frame = Frame(np.reshape(expected["coord"], (-1, 3)), numbers, cell, np.full(3, bool(box)), None, None, None)
    batch = batch_from_frames([frame], SpeciesTable(tuple(case["type_map"])), case["rcut"])
    found = potential.eval()(batch, stress=bool(box))
    np.testing.assert_allclose(found["atomic_energy"], np.ravel(expected["atomic_energy"]), atol=1e-10)
    np.testing.assert_allclose(found["forces"], np.reshape(expected["force"], (-1, 3)), atol=1e-10)
    virial = np.reshape(expected["atomic_virial"], (-1, 3, 3)).sum(0)
    if box:
        np.testing.assert_allclose(-found["stress"][0] * np.linalg.det(cell), virial, atol=1e-10)
    if "descriptor" in expected:
        described, _ = potential.model.descriptor(batch, EdgeContext.of(batch))
        shape = tuple(described.shape)
        np.testing.assert_allclose(described.detach(), np.reshape(expected["descriptor"], shape), atol=1e-10)


def test_switch_is_one_then_zero_and_smooth_to_the_second_derivative():
    r = torch.tensor([0.3, 1.0, 2.0, 3.0, 4.0], dtype=torch.float64, requires_grad=True)
    values = switch(r, 1.0, 3.0)
    torch.testing.assert_close(values, torch.tensor([1.0, 1.0, 0.5, 0.0, 0.0], dtype=torch.float64))
    (first,) = torch.autograd.grad(values.sum(), r, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), r)
    for derivative in (first, second):
        assert float(derivative.detach()[[0, 1, 3, 4]].abs().max()) < 1e-12


@pytest.mark.parametrize("name", MODELS)
def test_energy_is_invariant_and_forces_are_equivariant(name):
    options = dict(MODELS[name])
    potential = make_deeppot(options.pop("kind", "se_e2_a"), **options).eval()
    frame = make_frame(9, seed=3, box=4.5)
    turn = Rotation.random(random_state=1).as_matrix() @ np.diag([1, 1, -1])
    order = np.random.default_rng(0).permutation(9)
    moved = replace(
        frame,
        positions=(frame.positions @ turn.T + [0.3, -0.7, 1.9])[order],
        cell=frame.cell @ turn.T,
        numbers=frame.numbers[order],
    )
    first, second = (potential(make_batch(f), stress=True) for f in (frame, moved))
    torch.testing.assert_close(second["energy"], first["energy"], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(second["forces"], (first["forces"] @ torch.tensor(turn.T))[order], rtol=1e-9, atol=1e-11)
    matrix = torch.tensor(turn)
    torch.testing.assert_close(second["stress"][0], matrix @ first["stress"][0] @ matrix.T, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_forces_and_stress_are_derivatives_of_the_energy(name):
    options = dict(MODELS[name])
    potential = make_deeppot(options.pop("kind", "se_e2_a"), **options).eval()
    frame = make_frame(7, seed=5)
    found = potential(make_batch(frame), stress=True)

    def energy(positions: np.ndarray, cell: np.ndarray) -> float:
        with torch.no_grad():
            moved = make_batch(replace(frame, positions=positions, cell=cell))
            return float(potential(moved, forces=False)["energy"])

    step, rng = 1e-5, np.random.default_rng(2)
    direction, strain = rng.normal(size=(7, 3)), rng.normal(size=(3, 3))
    up, down = (energy(frame.positions + s * step * direction, frame.cell) for s in (1, -1))
    assert float((found["forces"].numpy() * direction).sum()) == pytest.approx(-(up - down) / (2 * step), rel=1e-6)
    strain = strain + strain.T
    grown = [np.eye(3) + s * step * strain for s in (1, -1)]
    up, down = (energy(frame.positions @ g, frame.cell @ g) for g in grown)
    work = float((found["stress"][0].numpy() * strain).sum()) * abs(np.linalg.det(frame.cell))
    assert work == pytest.approx((up - down) / (2 * step), rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_neighbour_enters_and_leaves_smoothly(name):
    options = dict(MODELS[name])
    potential = make_deeppot(options.pop("kind", "se_e2_a"), **options).eval()

    def at(distance: float) -> dict[str, torch.Tensor]:
        positions = np.array([[0.0, 0, 0], [0.3, -1.0, 0], [0.0, distance, 0]])
        return potential(
            make_batch(Frame(positions, np.array([8, 1, 8]), np.zeros((3, 3)), np.zeros(3, bool), *[None] * 3))
        )

    inside, outside = at(CUTOFF - 1e-5), at(CUTOFF + 1e-5)
    torch.testing.assert_close(inside["energy"], outside["energy"], rtol=0, atol=1e-12)
    torch.testing.assert_close(inside["forces"], outside["forces"], rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", MODELS)
def test_energy_is_extensive_and_an_atom_alone_is_fine(name):
    options = dict(MODELS[name])
    potential = make_deeppot(options.pop("kind", "se_e2_a"), **options).eval()
    frame = make_frame(4, seed=8, box=4.2)
    images = [np.array(i) @ frame.cell for i in np.ndindex(2, 1, 2)]
    big = replace(
        frame,
        positions=np.concatenate([frame.positions + image for image in images]),
        numbers=np.tile(frame.numbers, 4),
        cell=frame.cell * np.array([[2], [1], [2]]),
    )
    alone = Frame(np.zeros((1, 3)), np.array([8]), np.zeros((3, 3)), np.zeros(3, bool), None, None, None)
    one, four, single = (potential(make_batch(f)) for f in (frame, big, alone))
    torch.testing.assert_close(four["energy"], 4 * one["energy"], rtol=1e-11, atol=1e-11)
    assert bool(single["energy"].isfinite().all())
    assert float(single["forces"].abs().max()) == 0


def test_without_sel_an_isolated_atom_of_a_species_has_one_energy_whatever_the_norm():
    alone = make_batch(Frame(np.zeros((1, 3)), np.array([1]), np.zeros((3, 3)), np.zeros(3, bool), None, None, None))
    energies = [float(make_deeppot(neighbour_norm=norm).eval()(alone)["energy"]) for norm in (5.0, 50.0)]
    assert energies[0] == pytest.approx(energies[1], abs=1e-12)


def test_energies_of_isolated_atoms_are_exact_where_they_are_set():
    given = section(set_davg_zero=True, fitting={"atom_ener": [-13.6, None]})
    del given["out_bias"]
    statistics = {"reference_energies": {"H": -1.0, "O": -2.0}}
    resolved = resolve_model(given, species=SPECIES, cutoff=CUTOFF, statistics=statistics)
    assert resolved["out_bias"] == [-13.6, -2.0]
    potential = build_model(resolved, precision="float64", seed=0).eval()
    alone = make_batch(Frame(np.zeros((1, 3)), np.array([1]), np.zeros((3, 3)), np.zeros(3, bool), None, None, None))
    assert float(potential(alone)["energy"]) == pytest.approx(-13.6, abs=1e-12)


def test_atoms_of_excluded_species_have_no_energy():
    potential = make_deeppot(model={"atom_exclude_types": [1]}).eval()
    batch = make_batch(make_frame(8, seed=1))
    energies = potential(batch)["atomic_energy"]
    assert float(energies[batch["species"] == 1].abs().max()) == 0
    assert float(energies[batch["species"] == 0].abs().min()) > 0


def test_parameters_of_frames_and_atoms_enter_standardised():
    fitting = {"numb_fparam": 1, "numb_aparam": 2, "fparam_avg": [1.0], "fparam_std": [2.0]}
    fitting |= {"aparam_avg": [0.0, 0.0], "aparam_std": [1.0, 1.0], "default_fparam": [3.0]}
    potential = make_deeppot(fitting=fitting).eval()
    batch = make_batch(make_frame(4, seed=1), make_frame(3, seed=2))
    batch["aparam"] = torch.randn(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch["fparam"] = torch.tensor([[0.5], [3.0]], dtype=torch.float64)
    first = potential(batch)["energy"]
    missing = potential(batch | {"fparam": torch.tensor([[0.5], [float("nan")]], dtype=torch.float64)})["energy"]
    other = potential(batch | {"fparam": torch.tensor([[0.7], [3.0]], dtype=torch.float64)})["energy"]
    torch.testing.assert_close(missing, first, rtol=0, atol=0)
    assert float(other[0] - first[0]) != 0
    assert float(other[1] - first[1]) == 0
    with pytest.raises(ForgefieldError, match="no field aparam"):
        potential({key: value for key, value in batch.items() if key != "aparam"})


@pytest.mark.parametrize("kind", ["se_e2_a", "se_e2_r"])
@pytest.mark.parametrize("sel", [None, [40, 30]])
def test_statistics_are_means_and_deviations_of_the_rows(kind, sel):
    """Against all rows laid out; with sel the empty places are rows of zeros."""
    batches = [make_batch(make_frame(9, seed=i, box=4.5), make_frame(5, seed=10 + i)) for i in range(3)]
    for i, batch in enumerate(batches):
        batch["energy"] = torch.tensor([-10.0 - i, -7.0 + i], dtype=torch.float64)
    model = {"name": "deeppot", "descriptor": {"type": kind, **({} if sel is None else {"sel": sel})}}
    found = model_statistics(model, lambda: batches, species=SPECIES, cutoff=CUTOFF)["environment"]
    for a in range(2):
        rows = []
        for batch in batches:
            centres = batch["species"][batch["edge_index"][1]]
            rows.append(environment_rows(edge_vectors(batch), 0.5, CUTOFF)[centres == a])
            if sel is not None:
                empty = int((batch["species"] == a).sum()) * sum(sel) - len(rows[-1])
                rows.append(torch.zeros(empty, 4, dtype=torch.float64))
        table = torch.cat(rows).numpy()
        assert found["davg"][a][0] == pytest.approx(table[:, 0].mean(), rel=1e-12)
        assert found["dstd"][a][0] == pytest.approx(table[:, 0].std(), rel=1e-10)
        if kind == "se_e2_a":
            assert found["davg"][a][1:] == [0, 0, 0]
            assert found["dstd"][a][1:] == pytest.approx([table[:, 1:].std()] * 3, rel=1e-10)
    resolved = resolve_model(model, species=SPECIES, cutoff=CUTOFF, statistics={"environment": found})
    again = json.loads(json.dumps(resolved))
    assert again == resolved
    assert resolved["descriptor"]["neighbour_norm"] == (found["mean_neighbours"] if sel is None else 70.0)
    build_model(again, precision="float32", seed=0)


def test_energy_bias_is_the_least_squares_fit_of_total_energies():
    rng = np.random.default_rng(0)
    batches = [make_batch(*(make_frame(int(n), seed=int(n)) for n in rng.integers(3, 8, 4))) for _ in range(3)]
    counts = []
    for batch in batches:
        batch["energy"] = torch.tensor(rng.normal(size=4) - 5 * batch["n_atoms"].numpy())
        species, frame = batch["species"].numpy(), batch["frame"].numpy()
        counts += [[int(((species == a) & (frame == i)).sum()) for a in range(2)] for i in range(4)]
    energies = np.concatenate([batch["energy"].numpy() for batch in batches])
    model = {"name": "deeppot", "fitting_net": {"atom_ener": [None, -4.0]}}
    for options, columns, fixed in ((model, [0], -4.0), ({"name": "deeppot"}, [0, 1], 0.0)):
        found = environment_statistics(options, batches, species=SPECIES, cutoff=CUTOFF)["out_bias"]
        table = np.array(counts, dtype=float)
        rest = energies - (fixed * table[:, 1] if len(columns) == 1 else 0)
        expected = np.linalg.lstsq(table[:, columns], rest, rcond=None)[0]
        assert [found[c] for c in columns] == pytest.approx(list(expected), rel=1e-10)
        assert len(columns) == 2 or found[1] == -4.0


def test_too_small_sel_is_an_error_that_gives_the_required_numbers():
    batch = make_batch(make_frame(9, seed=3, box=4.5))
    species, (source, centre) = batch["species"].numpy(), batch["edge_index"].numpy()
    needed = [max(np.bincount(centre[species[source] == b], minlength=9)) for b in range(2)]
    tight = [int(needed[0]), int(needed[1]) - 1]
    with pytest.raises(ForgefieldError, match=rf"needs at least \[{needed[0]}, {needed[1]}\]"):
        make_deeppot(sel=tight).eval()(batch)
    model = {"name": "deeppot", "descriptor": {"sel": tight}, "out_bias": [0.0, 0.0]}
    found = model_statistics(model, lambda: [batch], species=SPECIES, cutoff=CUTOFF)
    with pytest.raises(ForgefieldError, match=rf"an atom has {needed[1]}"):
        resolve_model(model, species=SPECIES, cutoff=CUTOFF, statistics=found)
    make_deeppot(sel=[int(n) for n in needed]).eval()(batch)


REFUSED = {
    "unknown key": ({"descriptor": {"neurons": [3]}}, "model.descriptor.neurons.*neuron"),
    "unknown descriptor": ({"descriptor": {"type": "se_e2"}}, "model.descriptor.type"),
    "cutoff elsewhere": ({"descriptor": {"rcut": 6.0}}, "data.cutoff"),
    "mask": ({"fitting_net": {"use_aparam_as_mask": True}}, "does not apply"),
    "kind of value": ({"descriptor": {"neuron": 5}}, "model.descriptor.neuron is 5"),
    "no such activation": ({"descriptor": {"activation_function": "tan"}}, "activation_function is 'tan'"),
    "sel of another length": ({"descriptor": {"sel": [3]}}, "1 numbers for 2 species"),
    "switch beyond the cutoff": ({"descriptor": {"rcut_smth": 3.5}}, "below data.cutoff"),
    "axis": ({"descriptor": {"axis_neuron": 50}}, "axis_neuron is 50"),
    "flags": ({"fitting_net": {"trainable": [True]}}, "needs 4"),
    "excluded species": ({"atom_exclude_types": [2]}, "atom_exclude_types"),
    "excluded pair": ({"descriptor": {"exclude_types": [[0, 2]]}}, "exclude_types"),
    "table without a switch": ({"use_srtab": "table.txt"}, "needs model.sw_rmin"),
    "switch without a table": ({"sw_rmin": 0.5}, "only with model.use_srtab"),
    "preset": ({"preset": "S"}, "has none"),
    "no data": ({}, "no training data"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_options_without_meaning_are_refused_with_their_key(what):
    given, message = REFUSED[what]
    with pytest.raises(ForgefieldError, match=message):
        resolve_model({"name": "deeppot", **given}, species=SPECIES, cutoff=CUTOFF)


def test_parts_have_seeds_precisions_and_weights_of_their_own():
    one = make_deeppot(seed=1, precision="float32")
    other = make_deeppot(
        seed=2, precision="float32", fitting={"precision": "float64", "trainable": [True, False, True]}
    )
    same = make_deeppot(seed=3, fitting={"seed": 5}).state_dict()
    again = make_deeppot(seed=4, fitting={"seed": 5}).state_dict()
    assert other.model.descriptor.networks.dtype == torch.float32
    assert other.model.fitting.networks.dtype == torch.float64
    assert not torch.equal(one.model.descriptor.networks.layers[0].w, other.model.descriptor.networks.layers[0].w)
    for name in same:
        assert torch.equal(same[name], again[name]) == (".fitting." in name or name == "model.out_bias")
    flags = [parameter.requires_grad for parameter in other.model.fitting.networks.layers[1].parameters()]
    assert flags
    assert not any(flags)
    frozen = make_deeppot(trainable=False)
    assert not any(parameter.requires_grad for parameter in frozen.model.descriptor.parameters())


def test_first_weights_have_the_spread_of_deepmd_kit():
    networks = make_deeppot(neuron=[100, 200], axis_neuron=2, fitting={"neuron": [300, 300]}).model
    layer = networks.descriptor.networks.layers[1]
    assert float(layer.w.detach().std()) == pytest.approx(1 / np.sqrt(300), rel=0.02)
    assert float(layer.b.detach().std()) == pytest.approx(1.0, rel=0.1)
    timed = networks.fitting.networks.layers[1]
    assert float(timed.idt.detach().mean()) == pytest.approx(0.1, abs=2e-4)
    assert float(timed.idt.detach().std()) == pytest.approx(0.001, rel=0.15)


def test_options_of_every_part_are_documented():
    """A field without a sentence below it would be an option nobody can look up."""
    import inspect

    from forgefield.models.deeppot import options

    source = inspect.getsource(options)
    for kind in (options.SeE2AOptions, options.SeE2ROptions, options.EnergyFittingOptions, options.DeepPotOptions):
        for field in dataclasses.fields(kind):
            if field.name != "type":
                assert f"    {field.name}: " in source
                after = source.split(f"    {field.name}: ", 1)[1].split("\n", 1)[1]
                assert after.lstrip().startswith('"""'), field.name
