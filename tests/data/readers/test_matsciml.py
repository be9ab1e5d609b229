"""The data sets of Open MatSciML: structures of every kind of sample, and objects of other libraries that stay inert."""

from __future__ import annotations

import base64
import json
import os
import pickle
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from ase.data import covalent_radii

from forgefield.data.frame import Frame
from forgefield.data.neighbours.graph import edge_vectors, neighbour_list
from forgefield.data.options import LabelOptions
from forgefield.data.readers import read_frames
from forgefield.errors import ForgefieldError
from forgefield.untrusted.safe_pickle import RefusedPickle
from forgefield.untrusted.sample_objects import load_sample
from tests.support.lmdb_files import sample, write_lmdb

OBJECTS = Path(__file__).parents[2] / "fixtures" / "matsciml" / "objects.json"


@lru_cache(maxsize=1)
def stored() -> dict[str, bytes]:
    """Samples pickled by pymatgen, emmet and munch; tests/fixtures/matsciml/make_objects.py."""
    return {name: base64.b64decode(text) for name, text in json.loads(OBJECTS.read_text())["samples"].items()}


def read(path: Path, **fields) -> list[Frame]:
    return read_frames(path, LabelOptions(fields=fields or None))


def closest(frame: Frame) -> float:
    """Shortest distance over the sum of the covalent radii."""
    source, destination, shifts = neighbour_list(frame.positions, frame.cell, frame.pbc, 4.0)
    if not len(source):
        return np.inf
    lengths = np.linalg.norm(edge_vectors(frame.positions, frame.cell, source, destination, shifts), axis=1)
    radii = covalent_radii[frame.numbers]
    return float((lengths / (radii[source] + radii[destination])).min())


@pytest.mark.parametrize(
    ("name", "count", "shortest"),
    [("materials_project", 200, 0.7), ("nomad", 200, 0.8), ("carolina_db", 100, 0.6)],  # the last ones are hypothetical
)
def test_crystals_have_distances_of_crystals(shared, name, count, shortest):
    frames = read_frames(shared / "matsciml_lmdb" / name)
    assert len(frames) == count
    assert all(frame.pbc.all() for frame in frames)
    assert all(closest(frame) > shortest for frame in frames)


def test_materials_project(shared):
    fields = {"gap": {"key": "band_gap"}, "group": {"key": "symmetry.number"}, "magmom": "atom", "is_metal": {}}
    frames = read(shared / "matsciml_lmdb" / "materials_project", **fields)
    actinium = frames[0]  # space group 152, a = 4.0027, c = 9.8039
    assert actinium.numbers.tolist() == [89, 89, 89]
    np.testing.assert_allclose(np.linalg.norm(actinium.cell, axis=1), [4.002656, 4.002656, 9.803856], rtol=1e-6)
    np.testing.assert_allclose(actinium.positions[0], 0.655046 * (actinium.cell[0] + actinium.cell[1]), atol=1e-12)
    assert (actinium.fields["group"], actinium.fields["gap"], actinium.fields["is_metal"]) == (152, 0, 1)
    assert actinium.fields["magmom"].shape == (3,)
    assert {frame.energy for frame in frames} == {None}


def test_nomad_is_in_si_units(shared):
    frames = read(shared / "matsciml_lmdb" / "nomad", efermi={}, group={"key": "symmetry.number"})
    oxygen = frames[0]
    assert oxygen.numbers.tolist() == [8, 8, 8, 8]
    np.testing.assert_allclose(oxygen.cell[0], [4.34166917, 0, 0], rtol=1e-12)
    assert oxygen.energy == pytest.approx(-20.839, abs=1e-3)
    assert (oxygen.fields["efermi"], oxygen.fields["group"]) == (pytest.approx(-3.0213, abs=1e-4), 12)
    distances = oxygen.positions[:, None] - oxygen.positions
    distances -= np.round(distances @ np.linalg.inv(oxygen.cell)) @ oxygen.cell
    lengths = np.linalg.norm(distances, axis=2)
    assert lengths[lengths > 0].min() == pytest.approx(1.24, abs=0.02)  # molecules of oxygen


def test_carolina_is_a_cif_file_with_fractional_coordinates(shared):
    path = shared / "matsciml_lmdb" / "carolina_db"
    frames = read(path, group={"key": "symmetry.number"})
    first = frames[0]
    assert first.energy is None  # it is a formation energy
    np.testing.assert_allclose(first.cell, 6.48742247 * np.eye(3), atol=1e-12)
    np.testing.assert_allclose(first.positions[1], 6.48742247 * 0.30783943, rtol=1e-8)
    assert first.fields["group"] == 221
    assert read_frames(path, LabelOptions(energy="targets.energy"))[0].energy == 1.026


def test_stresses_of_which_only_the_upper_triangle_is_stored(shared):
    stresses = np.stack([frame.stress for frame in read_frames(shared / "matsciml_lmdb" / "colabfit")])
    np.testing.assert_array_equal(stresses, stresses.transpose(0, 2, 1))
    np.testing.assert_allclose(stresses[250][:2, 2], [1.055354, 0.45272326], rtol=1e-6)


CIF = {
    **{f"_cell_length_{axis}": "4.0" for axis in "abc"},
    **{f"_cell_angle_{angle}": "90.0" for angle in ("alpha", "beta", "gamma")},
    "_cell_volume": "64.0",
    "cart_coords": np.array([[0.0, 0, 0], [0.5, 0.5, 0.5]]),
    "atomic_numbers": [55, 17],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_cell_volume": "65.0"}, r"its cell has 64 A\^3, but it says its volume is 65"),
        ({"cart_coords": np.array([[0.0, 0, 0], [2.0, 2.0, 2.0]])}, "must be fractional"),
        ({"atomic_numbers": [55]}, r"cart_coords has shape \(2, 3\), but there are 1 atoms"),
        ({"_cell_length_b": None}, "not one that Forgefield knows"),
    ],
)
def test_cif_files_that_contradict_themselves(tmp_path, change, message):
    assert read_frames(write_lmdb(tmp_path / "a.lmdb", {"0": CIF}))[0].positions[1].tolist() == [2, 2, 2]
    with pytest.raises(ForgefieldError, match=message):
        read_frames(write_lmdb(tmp_path / "b.lmdb", {"0": CIF | change}))


def test_structures_of_pymatgen_with_elements_and_with_oxidation_states(tmp_path):
    path = write_lmdb(tmp_path / "a.lmdb", {"0": stored()["species"], "1": stored()["elements"]})
    zinc_oxide, chloride = read(path, magmom="atom", group={"key": "symmetry.number"}, band_gap={})
    assert zinc_oxide.numbers.tolist() == [30, 8]
    cell = [[4.2, 0, 0], [-2.1, 2.1 * np.sqrt(3), 0], [0, 0, 6.1]]
    np.testing.assert_allclose(zinc_oxide.cell, cell, atol=1e-12)
    np.testing.assert_allclose(zinc_oxide.positions[1], [2.1, 2.1 / np.sqrt(3), 2.44], atol=1e-12)
    np.testing.assert_array_equal(zinc_oxide.fields["magmom"], [0.5, -0.25])
    assert (chloride.numbers.tolist(), chloride.fields["group"]) == ([55, 17], 221)
    assert "group" not in zinc_oxide.fields
    with pytest.raises(ForgefieldError, match="disordered structures cannot be read"):
        read_frames(write_lmdb(tmp_path / "b.lmdb", {"0": stored()["disordered"]}))


OC20 = {
    "pos": torch.tensor([[0.0, 0, 0], [0, 0, 1.0], [0, 1.5, 0]]),
    "atomic_numbers": torch.tensor([8.0, 1, 1]),
    "force": torch.arange(9.0).reshape(3, 3),
    "tags": torch.tensor([0, 1, 2]),
}


def assert_water(frame: Frame, energy: float | None) -> None:
    assert frame.numbers.tolist() == [8, 1, 1]
    assert frame.energy == energy
    assert frame.pbc.all()
    np.testing.assert_array_equal(frame.cell, 6 * np.eye(3))
    np.testing.assert_array_equal(frame.positions, OC20["pos"])
    np.testing.assert_array_equal(frame.forces, OC20["force"])
    np.testing.assert_array_equal(frame.fields["tags"], [0, 1, 2])


def test_oc20_from_pytorch_geometric(tmp_path):
    data = pytest.importorskip("torch_geometric.data")
    edges = torch.tensor([[0, 1], [1, 0]])
    graph = data.Data(edge_index=edges, cell=6 * torch.eye(3)[None], y=-2.5, natoms=3, sid=7, fid=0, **OC20)
    relaxed = data.Data(edge_index=edges, cell=6 * torch.eye(3)[None], y_relaxed=-3.5, natoms=3, sid=7, **OC20)
    path = write_lmdb(tmp_path / "a.lmdb", {"0": graph, "1": relaxed, "length": 2})
    first, second = read(path, tags="atom", relaxed={"key": "energy_relaxed"})
    assert_water(first, -2.5)
    assert_water(second, None)
    assert second.fields["relaxed"] == -3.5


def test_oc20_from_dgl(tmp_path):
    dgl = pytest.importorskip("dgl")
    graph = dgl.graph((torch.tensor([0, 1]), torch.tensor([1, 0])), num_nodes=3)
    graph.ndata.update(OC20)
    graph.edata["cell_offsets"] = torch.zeros(2, 3)
    values = {"graph": graph, "y": -2.5, "sid": 7, "fid": 0, "natoms": 3, "cell": 6 * torch.eye(3)[None]}
    (frame,) = read(write_lmdb(tmp_path / "a.lmdb", {"0": values}), tags="atom")
    assert_water(frame, -2.5)
    part = dgl.node_subgraph(graph, torch.tensor([2, 0]))
    assert pickle.loads(pickle.dumps(part)).ndata["tags"].tolist() == [2, 0]
    (frame,) = read_frames(write_lmdb(tmp_path / "b.lmdb", {"0": {"graph": part, "cell": torch.eye(3) * 6}}))
    assert frame.numbers.tolist() == [1, 8]


def test_oc20_from_munch(tmp_path):
    (frame,) = read(write_lmdb(tmp_path / "a.lmdb", {"0": stored()["munch"]}), tags="atom")
    assert (frame.numbers.tolist(), frame.energy) == ([8, 1], -1.25)
    assert frame.forces.tolist() == np.ones((2, 3)).tolist()


def test_synthetic_point_groups_without_their_padding(tmp_path):
    points = np.random.default_rng(0).normal(size=(5, 3))
    points[3:] = 0
    values = {
        "coordinates": torch.tensor(points, dtype=torch.float32),
        "source_types": torch.tensor([3, 9, 1, 7, 2]),
        "dest_types": torch.tensor([6, 6, 8, 0, 0]),
        "label": torch.tensor(17),
        "num_tiles": 3,
        "point_group": "C3v",
    }
    (frame,) = read(write_lmdb(tmp_path / "a.lmdb", {"0": values}), label={})
    assert (frame.numbers.tolist(), frame.fields["label"]) == ([6, 6, 8], 17)
    np.testing.assert_array_equal(frame.positions, values["coordinates"][:3])
    assert not frame.pbc.any()


@pytest.mark.parametrize(
    "targets", [{"band_gap": 0.75, "energy": -3.0}, {"regression": {"band_gap": 0.75, "energy": -3.0}}]
)
def test_targets_are_flat_or_by_kind(tmp_path, targets):
    path = write_lmdb(tmp_path / "a.lmdb", {"0": sample(1.0, targets=targets)})
    (frame,) = read(path, band_gap={}, formation={"key": "targets.energy"})
    assert (frame.energy, frame.fields["band_gap"], frame.fields["formation"]) == (1.0, 0.75, -3.0)


class Calls:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def names(module: str, name: str, args: bytes = pickle.EMPTY_TUPLE, *, state: bytes = b"") -> bytes:
    """A pickle that calls `module.name` and sets a state."""
    return b"\x80\x02" + f"c{module}\n{name}\n".encode() + args + pickle.REDUCE + state + pickle.STOP


@pytest.mark.parametrize(("value", "message"), [
    (Calls(os.mkdir, "touched"), "mkdir"),
    (Calls(getattr, "x", "join"), r"builtins\.getattr"),
    (Calls(getattr, os, "mkdir"), "import_module|nt|posix|os"),
])  # fmt: skip
def test_other_names_are_refused(tmp_path, monkeypatch, value, message):
    monkeypatch.chdir(tmp_path)
    try:
        data = pickle.dumps({"structure": value})
    except TypeError:  # modules are not pickled by every version of Python
        data = names("os", "mkdir")
    with pytest.raises(RefusedPickle, match=message):
        load_sample(data)
    assert not any(tmp_path.iterdir())


def test_known_classes_execute_nothing_and_cannot_be_changed():
    """BUILD on a class, and states of the wrong type."""
    change = b"\x80\x02cpymatgen.core.structure\nStructure\n" + pickle.EMPTY_DICT + pickle.BUILD + pickle.STOP
    with pytest.raises(RefusedPickle):
        load_sample(change)
    for origin in ("structure Structure", "lattice Lattice", "sites PeriodicSite", "composition Composition"):
        module, name = origin.split()
        with pytest.raises(RefusedPickle, match="without values"):
            load_sample(names(f"pymatgen.core.{module}", name))
    with pytest.raises(RefusedPickle, match="enumeration"):
        load_sample(names("pymatgen.core.periodic_table", "Element"))
    assert load_sample(names("pymatgen.io.vasp", "Anything")) is None


def test_an_object_that_contains_itself_is_refused():
    state = pickle.EMPTY_DICT + pickle.BINPUT + b"\x01" + b"U\x06_store" + pickle.BINGET + b"\x00" + pickle.SETITEM
    data = b"\x80\x02ctorch_geometric.data.data\nData\n)R" + pickle.BINPUT + b"\x00" + state + pickle.BUILD + b"."
    with pytest.raises(RefusedPickle):
        load_sample(data)
