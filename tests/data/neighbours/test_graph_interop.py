"""Batches in other libraries: distances are the periodic ones of ASE, and the way back loses nothing."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.neighborlist import neighbor_list

from forgefield.data.batch import batch_from_frames
from forgefield.data.frame import Frame
from forgefield.data.labels.fields import Field
from forgefield.data.neighbours.graph import GraphOptions
from forgefield.data.neighbours.interop import (
    from_dgl,
    from_pyg,
    graph_from_point_clouds,
    point_clouds,
    to_dgl,
    to_pyg,
)
from forgefield.data.species import SpeciesTable
from forgefield.errors import ForgefieldError

SPECIES = SpeciesTable(["O", "H", "Cu"])
CUTOFF = 3.2


@pytest.fixture
def frames() -> list[Frame]:
    """A skewed crystal smaller than the cutoff, a molecule, a slab and an atom alone; labels on some."""
    rng = np.random.default_rng(0)
    skewed = np.array([[3.0, 0, 0], [1.2, 2.8, 0], [0.3, -0.4, 3.1]])
    slab = np.diag([4.0, 4.2, 0.0])
    return [
        Frame(rng.random((2, 3)) @ skewed, np.array([29, 8]), skewed, np.full(3, True), energy=-1.5, stress=np.eye(3)),
        Frame(rng.uniform(0, 3, (5, 3)), np.array([8, 1, 1, 8, 1]), np.zeros((3, 3)), np.full(3, False)),
        Frame(
            rng.uniform(0, 4, (4, 3)), np.array([29, 29, 1, 8]), slab, np.array([True, True, False]),
            energy=2.0, forces=rng.normal(size=(4, 3)), weight=0.5,
        ),
        Frame(np.zeros((1, 3)), np.array([1]), np.zeros((3, 3)), np.full(3, False)),
    ]  # fmt: skip


@pytest.fixture
def batch(frames) -> dict[str, torch.Tensor]:
    return batch_from_frames(frames, SPECIES, GraphOptions(CUTOFF))


def distances_by_ase(frame: Frame) -> list[tuple[int, int, float]]:
    atoms = Atoms(numbers=frame.numbers, positions=frame.positions, cell=frame.cell, pbc=frame.pbc)
    return sorted((int(i), int(j), round(float(d), 8)) for i, j, d in zip(*neighbor_list("ijd", atoms, CUTOFF)))


def rows(source, destination, lengths) -> list[tuple[int, int, float]]:
    return sorted((int(i), int(j), round(float(d), 8)) for i, j, d in zip(destination, source, lengths))


def assert_same_batch(ours: dict, expected: dict) -> None:
    assert set(ours) == set(expected)
    for key, value in expected.items():
        assert ours[key].dtype == value.dtype, key
        torch.testing.assert_close(ours[key], value, rtol=0, atol=0, equal_nan=True, msg=key)


def test_pyg_graphs_have_the_periodic_distances_of_ase(batch, frames):
    pytest.importorskip("torch_geometric")
    whole = to_pyg(batch, SPECIES)
    assert whole.num_graphs == 4
    again = whole.pos[whole.edge_index[0]] + whole.shift_vec - whole.pos[whole.edge_index[1]]
    torch.testing.assert_close(again, whole.edge_vec, rtol=0, atol=1e-12)
    for graph, frame in zip(whole.to_data_list(), frames):
        assert graph.z.tolist() == frame.numbers.tolist()
        assert rows(*graph.edge_index, graph.edge_weight) == distances_by_ase(frame)
        image = graph.edge_shift @ graph.cell[0]
        torch.testing.assert_close(image, graph.shift_vec)
    assert torch.equal(whole.edge_index, batch["edge_index"])
    assert torch.equal(whole.batch, batch["frame"])


def test_pyg_and_back_is_the_same_batch(batch):
    pytest.importorskip("torch_geometric")
    assert_same_batch(from_pyg(to_pyg(batch, SPECIES), SPECIES), batch)


def test_shuffled_pyg_edges_come_back_in_our_order(batch):
    pytest.importorskip("torch_geometric")
    whole = to_pyg(batch, SPECIES)
    order = torch.randperm(whole.edge_index.shape[1], generator=torch.Generator().manual_seed(0))
    whole.edge_index, whole.edge_shift = whole.edge_index[:, order], whole.edge_shift[order]
    assert_same_batch(from_pyg(whole, SPECIES), batch)


def test_a_pyg_graph_of_somebody_else():
    geometric = pytest.importorskip("torch_geometric.data")
    water = geometric.Data(
        z=torch.tensor([8, 1, 1]),
        pos=torch.tensor([[0.0, 0, 0], [0.9, 0, 0], [0, 0.9, 0]]),
        edge_index=torch.tensor([[2, 0, 0], [0, 1, 2]]),
    )
    batch = from_pyg(water, SPECIES)
    assert batch["edge_index"].tolist() == [[2, 0, 0], [0, 1, 2]]
    assert "edge_reverse" not in batch  # 1 -> 0 is missing
    assert batch["energy"].isnan().all()
    assert batch["forces"].shape == (3, 3)
    water.cell = 5.0 * torch.eye(3)
    with pytest.raises(ForgefieldError, match="cell but no edge_shift"):
        from_pyg(water, SPECIES)
    water.cell, water.z = None, torch.tensor([8, 1, 79])
    with pytest.raises(ForgefieldError, match="Au"):
        from_pyg(water, SPECIES)
    water.z = None
    with pytest.raises(ForgefieldError, match="has no z"):
        from_pyg(water, SPECIES)


def test_a_pyg_layer_sums_over_the_neighbours_of_each_centre(batch):
    """PyG's own message passing on the export gives the sums of a loop over our edges."""
    nn = pytest.importorskip("torch_geometric.nn")
    whole = to_pyg(batch, SPECIES)
    summed = nn.SimpleConv(aggr="sum")(whole.z.double().unsqueeze(1), whole.edge_index, whole.edge_weight).squeeze(1)
    expected = torch.zeros_like(summed)
    for j, i, r in zip(*batch["edge_index"].tolist(), whole.edge_weight.tolist()):
        expected[i] += r * int(whole.z[j])
    torch.testing.assert_close(summed, expected)


def test_dgl_graphs_have_the_periodic_distances_of_ase(batch, frames):
    dgl = pytest.importorskip("dgl")
    graph, per_frame = to_dgl(batch, SPECIES)
    assert torch.equal(per_frame["cell"], batch["cell"])
    assert per_frame["energy"].isnan().tolist() == [False, True, False, True]
    for part, frame in zip(dgl.unbatch(graph), frames):
        assert part.ndata["z"].tolist() == frame.numbers.tolist()
        assert rows(*part.edges(), part.edata["distance"]) == distances_by_ase(frame)
    source, destination = graph.edges()
    again = graph.ndata["pos"][source] + graph.edata["shift_vec"] - graph.ndata["pos"][destination]
    torch.testing.assert_close(again, graph.edata["edge_vec"], rtol=0, atol=1e-12)


def test_dgl_and_back_is_the_same_batch(batch):
    pytest.importorskip("dgl")
    graph, per_frame = to_dgl(batch, SPECIES)
    assert_same_batch(from_dgl(graph, SPECIES, per_frame), batch)
    del graph.edata["edge_shift"]
    with pytest.raises(ForgefieldError, match="DGL graph has a cell but no edge_shift"):
        from_dgl(graph, SPECIES, per_frame)
    del graph.ndata["z"]
    with pytest.raises(ForgefieldError, match="has no node data z"):
        from_dgl(graph, SPECIES, per_frame)


def test_fields_go_along_both_ways(frames):
    pytest.importorskip("torch_geometric")
    pytest.importorskip("dgl")
    rng = np.random.default_rng(1)
    labelled = [
        replace(frame, fields={"gap": np.array(rng.normal()), "charge": rng.normal(size=len(frame))},
                per_atom=frozenset(["charge"]))
        for frame in frames
    ]  # fmt: skip
    fields = {"gap": Field("frame", ()), "charge": Field("atom", ())}
    batch = batch_from_frames(labelled, SPECIES, GraphOptions(CUTOFF))
    assert {"gap", "charge"} <= batch.keys()
    assert_same_batch(from_pyg(to_pyg(batch, SPECIES, fields), SPECIES, fields), batch)
    graph, per_frame = to_dgl(batch, SPECIES, fields)
    assert_same_batch(from_dgl(graph, SPECIES, per_frame, fields), batch)
    without = from_dgl(graph, SPECIES, {k: v for k, v in per_frame.items() if k != "gap"}, fields)
    assert without["gap"].isnan().all()
    with pytest.raises(ForgefieldError, match=r"gap of shape \[4\]; with 12 atoms and 4 frames it should be \[4, 2\]"):
        from_dgl(graph, SPECIES, per_frame, {"gap": Field("frame", (2,))})


@pytest.mark.parametrize(("export", "module"), [(to_pyg, "torch_geometric.data"), (to_dgl, "dgl")])
def test_a_library_that_is_missing_is_named(batch, export, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ForgefieldError, match="not installed"):
        export(batch, SPECIES)


@pytest.mark.parametrize("export", [to_pyg, to_dgl])
def test_a_batch_without_edges_is_refused(batch, export):
    pytest.importorskip("torch_geometric" if export is to_pyg else "dgl")
    with pytest.raises(ForgefieldError, match="no edges yet"):
        export({key: value for key, value in batch.items() if not key.startswith("edge")}, SPECIES)


def test_point_clouds_and_back_is_the_same_batch(batch, frames):
    positions, species, mask = point_clouds(batch)
    assert positions.shape == (4, 5, 3)
    assert mask.sum(1).tolist() == [2, 5, 4, 1]
    assert (species[~mask] == -1).all()
    assert not positions[~mask].any()
    pbc = torch.from_numpy(np.stack([frame.pbc for frame in frames]))
    again = graph_from_point_clouds(positions, species, mask, batch["cell"], pbc, cutoff=CUTOFF)
    labels = ("energy", "forces", "stress", "weight")
    assert_same_batch(
        {k: v for k, v in again.items() if k not in labels}, {k: v for k, v in batch.items() if k not in labels}
    )
    assert again["energy"].isnan().all()


def test_atoms_may_stand_anywhere_in_a_padded_cloud(batch):
    positions, species, mask = point_clouds(batch)
    order = torch.tensor([4, 2, 0, 3, 1])
    spread = graph_from_point_clouds(positions[:, order], species[:, order], mask[:, order], cutoff=CUTOFF)
    assert spread["n_atoms"].tolist() == [2, 5, 4, 1]
    plain = graph_from_point_clouds(positions, species, mask, cutoff=CUTOFF)
    assert spread["edge_index"].shape == plain["edge_index"].shape
    assert sorted(spread["species"][spread["frame"] == 1].tolist()) == sorted(species[1].tolist())


def test_gradients_pass_into_point_clouds(batch):
    positions = batch["positions"].clone().requires_grad_(True)
    padded, _, mask = point_clouds(batch | {"positions": positions})
    padded[mask].square().sum().backward()
    torch.testing.assert_close(positions.grad, 2 * batch["positions"])


def test_point_clouds_that_make_no_sense_are_refused(batch):
    positions, species, mask = point_clouds(batch)
    with pytest.raises(ForgefieldError, match="do not belong together"):
        graph_from_point_clouds(positions[:, :3], species, mask, cutoff=3.0)
    with pytest.raises(ForgefieldError, match="has no species"):
        graph_from_point_clouds(positions, species, torch.ones_like(mask), cutoff=3.0)
    with pytest.raises(ForgefieldError, match="periodic but have no cell"):
        graph_from_point_clouds(positions, species, mask, pbc=torch.ones(4, 3, dtype=torch.bool), cutoff=3.0)
