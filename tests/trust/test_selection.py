"""Selection: which points the methods choose, and which structures of a pool."""

import ase.io
import numpy as np
import pytest

import forgefield
from forgefield.api import train
from forgefield.errors import ForgefieldError
from forgefield.runs import Run
from forgefield.trust.choosing import METHODS, d_optimal, farthest_points, most_uncertain, nearest_distances
from forgefield.trust.selection_figure import principal_axes
from tests.support.helpers import emt_frames, tiny_config

NONE = np.zeros((0, 2))


def test_farthest_points_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    points, reference = rng.normal(size=(60, 3)), rng.normal(size=(5, 3))
    chosen = farthest_points(points, np.zeros(60), 8, reference=reference, tolerance=0.0)
    for position, index in enumerate(chosen):
        before = np.concatenate([reference, points[chosen[:position]]])
        distances = np.linalg.norm(points[:, None] - before[None], axis=2).min(1)
        assert distances[index] == pytest.approx(distances.max())


def test_the_first_of_the_farthest_points_is_the_most_uncertain_without_a_reference() -> None:
    points = np.array([[0.0, 0], [1, 0], [5, 0]])
    assert farthest_points(points, np.array([0.1, 0.9, 0.2]), 2, reference=NONE, tolerance=0.0) == [1, 2]


def test_d_optimal_points_maximise_the_determinant_one_after_the_other() -> None:
    rng = np.random.default_rng(1)
    points = rng.normal(size=(40, 3)) * [3.0, 1.0, 0.3]
    chosen = d_optimal(points, np.zeros(40), 6, reference=np.zeros((0, 3)), tolerance=0.0)
    for position, index in enumerate(chosen):
        information = np.eye(3) + points[chosen[:position]].T @ points[chosen[:position]]
        others = [i for i in range(40) if i not in chosen[:position]]
        gains = [np.linalg.det(information + np.outer(points[i], points[i])) for i in others]
        assert np.linalg.det(information + np.outer(points[index], points[index])) == pytest.approx(max(gains))


def test_kmeans_chooses_one_point_in_each_of_separate_clusters() -> None:
    rng = np.random.default_rng(2)
    centres = np.array([[0.0, 0], [10, 0], [0, 10], [10, 10]])
    points = np.concatenate([centre + 0.3 * rng.normal(size=(20 + 5 * i, 2)) for i, centre in enumerate(centres)])
    chosen = METHODS["kmeans"](points, np.zeros(len(points)), 4, reference=NONE, tolerance=0.0)
    nearest = [int(np.linalg.norm(centres - points[i], axis=1).argmin()) for i in chosen]
    assert nearest == [3, 2, 1, 0]  # larger clusters first


@pytest.mark.parametrize("method", ["uncertainty", *METHODS])
def test_near_duplicates_are_left_out(method) -> None:
    rng = np.random.default_rng(3)
    reference = rng.normal(size=(10, 2))
    copies = reference + 1e-4
    fresh = rng.normal(size=(6, 2)) + 8 * np.arange(6)[:, None] + 20
    points = np.concatenate([copies, fresh, fresh + 1e-4])
    choose = most_uncertain if method == "uncertainty" else METHODS[method]
    scores = np.concatenate([np.full(10, 5.0), np.arange(12.0)])
    chosen = choose(points, scores, 12, reference=reference, tolerance=0.01)
    assert len(chosen) == 6
    assert min(chosen) >= 10
    assert nearest_distances(points[chosen], points[chosen], skip_self=True).min() > 0.01


def test_the_most_uncertain_come_first() -> None:
    points, scores = np.arange(5.0)[:, None], np.array([0.1, 0.5, 0.3, 0.5, 0.2])
    assert most_uncertain(points, scores, 3, reference=points[:0], tolerance=0.0) == [1, 3, 2]


def test_principal_axes_are_the_directions_of_largest_variance() -> None:
    rng = np.random.default_rng(4)
    direction = np.array([3.0, 4.0, 0.0]) / 5
    points = rng.normal(size=(500, 1)) * 5 * direction + rng.normal(size=(500, 3)) * [0, 0, 0.1] + 7.0
    mean, axes, shares = principal_axes(points)
    np.testing.assert_allclose(mean, points.mean(0))
    assert abs(axes[:, 0] @ direction) == pytest.approx(1.0, abs=1e-3)
    assert shares[0] > 0.99


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return train(tiny_config(tmp_path_factory.mktemp("select")))


def squeezed(frames: list, factor: float) -> list:
    for atoms in frames:
        atoms.calc = None
        atoms.set_cell(factor * atoms.cell, scale_atoms=True)
    return frames


@pytest.mark.parametrize("by", ["uncertainty", "distance", "both"])
def test_structures_unlike_the_training_data_are_chosen(run, tmp_path, by) -> None:
    ordinary, unusual = emt_frames(20, seed=21), squeezed(emt_frames(3, seed=22), 0.78)
    for number, atoms in enumerate(unusual):
        atoms.info["comment"] = f"squeezed{number}"
    ase.io.write(tmp_path / "pool.extxyz", [*ordinary[:10], *unusual, *ordinary[10:]])
    found = forgefield.select(
        run.path, tmp_path / "pool.extxyz", 3, tmp_path / "next.extxyz", by=by, figure=tmp_path / "next.png"
    )
    assert found.n_pool == 23
    assert sorted(found.indices) == [10, 11, 12]
    written = ase.io.read(tmp_path / "next.extxyz", ":")
    assert [atoms.info["comment"] for atoms in written] == [f"squeezed{index - 10}" for index in found.indices]
    assert [atoms.info["energies_uncertainty_max"] for atoms in written] == pytest.approx(found.uncertainties)
    assert (tmp_path / "next.png").stat().st_size > 5000


def test_training_frames_and_their_supercells_are_not_chosen(run, tmp_path) -> None:
    frames = ase.io.read(run.config.data.train, ":")
    pool = [frames[0] * (2, 1, 1), *emt_frames(4, seed=30)]
    messages: list[str] = []
    inside = [index for index in range(len(frames)) if index < 14]
    found = forgefield.select(run.path, [*frames, *pool], 30, by="uncertainty", notify=messages.append)
    trained = len(frames) - 4  # four are validation frames
    assert len(found.indices) <= len(frames) + 5 - trained
    assert sum(index in inside for index in found.indices) <= 4
    assert "not 30" in messages[-1]


def test_structures_in_memory_are_returned_as_they_are(run) -> None:
    pool = squeezed(emt_frames(6, seed=40), 0.9)
    for number, atoms in enumerate(pool):
        atoms.info["number"] = number
    found = forgefield.select(run.path, pool, 2, by="uncertainty")
    assert [atoms.info["number"] for atoms in found.frames] == found.indices
    assert "energies_uncertainty_max" not in pool[0].info


def test_labels_of_the_pool_are_kept(run, tmp_path) -> None:
    frames = emt_frames(5, seed=50)
    ase.io.write(tmp_path / "pool.extxyz", frames)
    forgefield.select(run.path, tmp_path / "pool.extxyz", 1, tmp_path / "next.extxyz", tolerance=0.0)
    (chosen,) = ase.io.read(tmp_path / "next.extxyz", ":")
    same = next(atoms for atoms in frames if np.allclose(atoms.positions, chosen.positions, atol=1e-6))
    assert chosen.get_potential_energy() == pytest.approx(same.get_potential_energy(), abs=1e-6)
    np.testing.assert_allclose(chosen.get_forces(), same.get_forces(), atol=1e-6)


def test_missing_uncertainties_are_computed_first(run) -> None:
    run.uncertainty_path().unlink(missing_ok=True)
    messages: list[str] = []
    forgefield.select(run.path, emt_frames(3, seed=60), 1, notify=messages.append)
    assert run.uncertainty_path().exists()
    assert messages[0].startswith("Computing the uncertainties of run tiny")


def test_bad_input_is_refused_in_one_sentence(run, tmp_path) -> None:
    (tmp_path / "empty.extxyz").write_text("")
    silver = emt_frames(1, seed=1)[0]
    silver.symbols[0] = "Ag"
    silver.calc = None
    ase.io.write(tmp_path / "silver.extxyz", [emt_frames(1, seed=2)[0], silver])
    for pool, message in (
        ([], "The pool is empty"),
        (tmp_path / "empty.extxyz", "empty"),
        (tmp_path / "silver.extxyz", r"silver\.extxyz, frame 1: .*Ag"),
        (tmp_path / "absent.extxyz", r"absent\.extxyz"),
    ):
        with pytest.raises(ForgefieldError, match=message):
            forgefield.select(run.path, pool, 2)
    for settings, message in (
        ({"n": 0}, "at least 1"),
        ({"n": 2, "by": "size"}, "choose one of uncertainty, distance, both"),
        ({"n": 2, "method": "best"}, "choose one of farthest, kmeans, d-optimal"),
        ({"n": 2, "out": tmp_path / "next.db"}, "written as .extxyz"),
        ({"n": 2, "tolerance": -1.0}, "0 or more"),
    ):
        with pytest.raises(ForgefieldError, match=message):
            forgefield.select(run.path, emt_frames(3, seed=60), **settings)
