"""Models of other libraries: on our edges, with forces by derivative; what would be wrong is refused in a sentence."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.emt import EMT

from forgefield import Calculator, api
from forgefield.checks import run_checks
from forgefield.cli import main
from forgefield.config.trust import CONFIG
from forgefield.data.frame import Frame
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError
from forgefield.models import Potential, build_model, resolve_model
from forgefield.models.adapters.pyg import triplets
from forgefield.models.edges import edge_vectors
from tests.support.check_structures import as_frame
from tests.support.helpers import emt_frames, tiny_config, write_emt
from tests.support.structures import SPECIES, STATISTICS, make_batch, make_frame

PYG = "torch_geometric.nn.models."
HERE = "tests.support.foreign_models."
SCHNET = {"hidden_channels": 8, "num_filters": 6, "num_interactions": 2, "num_gaussians": 7}
DIMENET = {
    "hidden_channels": 8,
    "out_channels": 1,
    "num_blocks": 1,
    "int_emb_size": 4,
    "basis_emb_size": 4,
    "out_emb_channels": 8,
    "num_spherical": 3,
    "num_radial": 3,
    "output_initializer": "glorot_orthogonal",
}
VISNET = {"hidden_channels": 8, "num_heads": 2, "num_layers": 2, "num_rbf": 6}
SECTIONS: dict[str, dict[str, Any]] = {
    "SchNet": {"name": "pyg", "module": f"{PYG}SchNet", "options": SCHNET, "features": "lin1"},
    "DimeNet++": {"name": "pyg", "module": f"{PYG}DimeNetPlusPlus", "options": DIMENET},
    "ViSNet": {"name": "pyg", "module": f"{PYG}ViSNet", "options": VISNET, "features": "prior_model"},
    "factory": {"name": "ase_like", "module": f"{HERE}make_structure"},
    "graph": {"name": "pyg", "module": f"{HERE}GraphModel", "features": "out"},
    "dict": {"name": "mace_like", "module": f"{HERE}Dictionary", "features": "node_feats"},
    "dict of frames": {"name": "mace_like", "module": f"{HERE}Dictionary", "options": {"whole": True}},
    "structure": {"name": "ase_like", "module": f"{HERE}Structure", "features": "density"},
}


def resolved(section: dict[str, Any], **more: Any) -> dict[str, Any]:
    if section.get("module", "").startswith(PYG):
        pytest.importorskip("torch_geometric")
    return resolve_model(section, species=SPECIES, cutoff=3.0, statistics=STATISTICS, trust=CONFIG, **more)


def potential_of(name: str, precision: str = "float64", **more: Any) -> Potential:
    return build_model(resolved(SECTIONS[name], **more), precision=precision, seed=1, trust=CONFIG).eval()


def failing(potential: Potential, *frames: Any) -> set[str]:
    random = np.random.default_rng(0)
    results = run_checks(potential, list(frames), SpeciesTable(SPECIES), 3.0, generator=random)
    return {result.name for result in results if not result.passed}


@pytest.mark.parametrize("name", ["SchNet", "graph", "dict", "dict of frames", "structure", "factory"])
def test_periodic_frames_keep_every_law(name):
    """A cell smaller than the cutoff's sphere; energies, and a head on the features where there are some."""
    heads = {"gap": {"reduce": "mean"}} if "features" in SECTIONS[name] else None
    assert failing(potential_of(name, "float32", heads=heads), make_frame(4, seed=2, box=3.5)) == set()


def test_laws_that_a_foreign_model_breaks_are_named():
    """ViSNet of PyTorch Geometric is not smooth at its cutoff and has no gradients for atoms without neighbours."""
    assert failing(potential_of("ViSNet"), make_frame(3, seed=2, box=5.0)) == {"cutoff smoothness", "no neighbours"}


def test_schnet_of_pytorch_geometric_sees_periodic_images():
    """The same weights called directly on a cluster of images, large enough for the atom in its middle."""
    potential, frame = potential_of("SchNet"), make_frame(2, seed=3, box=3.4)
    shells = list(itertools.product(range(-4, 5), repeat=3))
    images = np.array([np.array(shell) @ frame.cell for shell in shells])
    cluster = (frame.positions[None] + images[:, None]).reshape(-1, 3)
    kept = np.linalg.norm(cluster, axis=1) < 10.5
    numbers = np.tile(frame.numbers, len(images))[kept]
    model = potential.model
    positions = torch.from_numpy(cluster[kept])
    with torch.no_grad():
        features = {}
        for key, batch in {"ours": make_batch(frame), "images": in_the_open(numbers, positions)}.items():
            features[key] = model.encode(with_vectors(batch))[0]
    middle = [int(np.linalg.norm(cluster[kept] - here, axis=1).argmin()) for here in frame.positions]
    torch.testing.assert_close(features["ours"], features["images"][middle], rtol=1e-9, atol=1e-10)


def in_the_open(numbers: np.ndarray, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    return make_batch(Frame(positions.numpy(), numbers.astype(np.int64), np.zeros((3, 3)), np.zeros(3, dtype=bool)))


def with_vectors(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return batch | {"edge_vectors": edge_vectors(batch)}


def test_a_model_of_open_frames_is_right_there_and_refuses_periodic_ones():
    potential = potential_of("DimeNet++")
    frame = make_frame(4, seed=3, periodic=False)
    found = potential(make_batch(frame, make_frame(3, seed=5, periodic=False)))
    alone = potential(make_batch(frame))
    assert float(alone["forces"].abs().max()) > 1e-6
    torch.testing.assert_close(found["energy"][:1], alone["energy"], rtol=1e-12, atol=0)
    torch.testing.assert_close(found["forces"][:4], alone["forces"], rtol=1e-8, atol=1e-12)
    with pytest.raises(
        ForgefieldError, match=r"DimeNetPlusPlus computes distances between the atoms of a cell without periodic"
    ):
        potential(make_batch(make_frame(4, box=3.5)))


def test_a_graph_model_without_images_is_right_for_molecules_and_refused_for_crystals():
    pytest.importorskip("torch_geometric")
    section = {"name": "pyg", "module": f"{HERE}GraphModel", "options": {"images": False}}
    potential = build_model(resolved(section), precision="float64", seed=1, trust=CONFIG).eval()
    molecule = make_batch(make_frame(4, seed=3, periodic=False))
    torch.testing.assert_close(potential(molecule)["energy"], potential_of("graph")(molecule)["energy"])
    with pytest.raises(ForgefieldError, match=r"GraphModel computes distances between the atoms of a cell without"):
        potential(make_batch(make_frame(4, box=3.5)))


def test_an_edge_to_an_image_of_the_same_atom_is_refused_where_the_model_would_drop_it():
    with pytest.raises(ForgefieldError, match=r"edges from an atom to its own periodic image.* repeat their cells"):
        potential_of("ViSNet")(make_batch(make_frame(2, box=2.8)))


def test_triplets_are_all_pairs_of_edges_that_follow_one_another():
    edge_index = make_batch(make_frame(6, seed=2, periodic=False, box=3.0))["edge_index"]
    edges = list(zip(*edge_index.tolist()))
    expected = {
        (i, j, k, first, second)
        for second, (j, i) in enumerate(edges)
        for first, (k, other) in enumerate(edges)
        if other == j and k != i
    }
    destination, source, *found = triplets(edge_index, 6)
    assert (destination.tolist(), source.tolist()) == (edge_index[1].tolist(), edge_index[0].tolist())
    assert set(zip(*(part.tolist() for part in found))) == expected
    assert len(found[0]) == len(expected) > 10


def test_a_foreign_model_is_trained_tested_and_loaded(tmp_path):
    """Through the whole of a training, as a whole with forces and as an encoder beside them."""
    config = tiny_config(tmp_path, trainer={"max_epochs": 2}, training={"lr": 2e-3})
    config["model"] = {"name": "mace_like", "module": f"{HERE}Dictionary", "options": {"width": 6}}
    run = api.train(config)
    assert run.metrics()[-1]["val/loss"] < run.metrics()[0]["val/loss"]
    model = run.load_potential()
    assert model.model.module.norm == pytest.approx(run.info["model"]["options"]["avg_num_neighbors"])
    atoms = emt_frames(1, 5)[0]
    atoms.calc = Calculator(run.path, trust_code=True)
    assert np.isfinite(atoms.get_forces()).all()


def test_a_calculator_is_a_run_that_can_be_tested_and_not_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_emt(tmp_path / "frames.extxyz", 4)
    assert main(["import", "ase", "ase.calculators.emt.EMT", "--species", "Au", "Cu"]) == 0
    assert "runs/EMT" in capsys.readouterr().out
    errors = api.test("EMT", "frames.extxyz", trust_code=True)
    assert (
        max(value for key, value in errors.items() if key.endswith(("mae", "rmse"))) < 1e-3
    )  # meV; as many digits as the file has
    config = tiny_config(tmp_path)
    config["model"] = {"name": "calculator", "module": "ase.calculators.emt.EMT"}
    with pytest.raises(ForgefieldError, match=r"an ASE calculator has no weights to train"):
        api.train(config)


def test_calculator_knows_which_axes_are_periodic():
    section = {"name": "calculator", "module": "ase.calculators.emt.EMT"}
    found = resolve_model(section, species=("Cu",), cutoff=3.0, trust=CONFIG)
    potential = build_model(found, precision="float64", seed=0, trust=CONFIG)
    for pbc in (True, False, (True, False, True)):
        atoms = Atoms("Cu2", positions=[[0, 0, 0], [1.8, 1.8, 0.3]], cell=[3.6, 3.6, 3.6], pbc=pbc)
        out = potential(make_batch(as_frame(atoms), species=("Cu",)), stress=True)
        atoms.calc = EMT()
        assert float(out["energy"]) == pytest.approx(atoms.get_potential_energy(), rel=1e-12)
        np.testing.assert_allclose(out["forces"].numpy(), atoms.get_forces(), atol=1e-12)
        np.testing.assert_allclose(out["stress"][0].numpy(), atoms.get_stress(voigt=False), atol=1e-12)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"name": "pyg"}, r"model\.module is missing"),
        ({"name": "pyg", "module": f"{PYG}SchNett"}, r"model\.module: .*SchNett.* Did you mean 'SchNet'"),
        (
            {"name": "pyg", "module": f"{PYG}SchNet", "options": {"hidden_channel": 4}},
            r"Did you mean 'hidden_channels'",
        ),
        (
            {"name": "pyg", "module": f"{PYG}SchNet", "options": {"cutoff": 4.0}},
            r"cutoff is 4\.0 and data\.cutoff is 3",
        ),
        (
            {"name": "pyg", "module": f"{PYG}SchNet", "options": {"max_num_neighbors": 4}},
            r"max_num_neighbors does not apply",
        ),
        (
            {"name": "pyg", "module": f"{PYG}SchNet", "features": "lin3"},
            r"no submodule 'lin3'\. Did you mean 'lin2'",
        ),
        (
            {"name": "pyg", "module": f"{HERE}not_a_module"},
            r"not_a_module is a function whose return annotation is not torch\.nn\.Module",
        ),
        (
            {"name": "pyg", "module": f"{HERE}lying_factory"},
            r"lying_factory returned a int; it must be a torch\.nn\.Module",
        ),
        (
            {"name": "ase_like", "module": "subprocess.check_call"},
            r"model\.module: subprocess\.check_call is a function",
        ),
        (
            {"name": "calculator", "module": f"{HERE}Structure"},
            r"the class tests\..*\.Structure, not a class derived from ase\.calculators\.calculator\.BaseCalculator",
        ),
        (
            {"name": "mace_like", "module": f"{HERE}Dictionary", "features": "feats"},
            r"features=feats .* returned nothing",
        ),
    ],
)
def test_sections_that_cannot_work_are_refused(section, sentence):
    with pytest.raises(ForgefieldError, match=sentence):
        build_model(resolved(section), precision="float32", seed=0, trust=CONFIG)
