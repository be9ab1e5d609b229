"""Descriptors of grid points equal the textbook, LAMMPS' own files, and keep the symmetries of space."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from forgefield.errors import ForgefieldError
from forgefield.kernels.cpu import compiler
from forgefield.ldos.descriptors import DescriptorOptions, make_descriptors, native, require_fitting
from forgefield.ldos.descriptors.bispectrum import SphereHarmonics, bispectrum_triples, quadrature
from tests.support.snap_oracle import snap_of_point

BE2 = Path(__file__).parents[3].parent / "shared" / "data" / "be2_ldos"
CELL = np.array([[4.1, 0.0, 0.0], [1.3, 3.6, 0.0], [-0.7, 0.9, 4.4]])
POSITIONS = np.array([[0.3, 0.2, 0.1], [2.0, 1.1, 2.3], [3.1, 3.0, 3.9]])
NUMBERS = [13, 8, 13]
POINTS = np.array([[0.0, 0.0, 0.0], [1.234, 2.1, 0.4], [9.7, -8.1, 3.3]])


def relative(found, expected) -> float:
    return float(np.max(np.abs(np.asarray(found) - expected) / np.abs(expected)))


def images(cell, positions, point, reach=4):
    shifts = np.stack(np.meshgrid(*[np.arange(-reach, reach + 1)] * 3, indexing="ij"), -1).reshape(-1, 3) @ cell
    return positions[:, None] + shifts - point


@pytest.mark.parametrize(
    "settings",
    [
        {"twojmax": 6, "cutoff": 3.5},
        {"twojmax": 5, "cutoff": 3.0, "switch": False, "element_weights": {"Al": 1.0, "O": -0.37}},
        {"twojmax": 3, "cutoff": 4.4, "rfac0": 0.7, "rmin0": 1.4, "element_weights": {"Al": 0.9, "O": 1.7}},
        {"twojmax": 1, "cutoff": 3.0},
        {"twojmax": 0, "cutoff": 3.0},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_bispectrum_is_that_of_the_textbook_in_a_skewed_crystal_of_two_elements(settings):
    descriptors = make_descriptors(DescriptorOptions(**settings), ["O", "Al"])
    found = descriptors.at_points(POINTS, CELL, POSITIONS, NUMBERS, True).numpy()
    weight = settings.get("element_weights", {"Al": 1.0, "O": 1.0})
    rest = {name: settings[name] for name in ("switch", "rfac0", "rmin0") if name in settings}
    for row, point in zip(found, POINTS):
        point = point - np.floor(point @ np.linalg.inv(CELL)) @ CELL
        away = images(CELL, POSITIONS, point)
        weights = np.repeat([weight["Al"], weight["O"], weight["Al"]], away.shape[1])
        triples = bispectrum_triples(settings["twojmax"])
        oracle = snap_of_point(away.reshape(-1, 3), weights, triples, settings["cutoff"], **rest)
        assert len(triples) == descriptors.size == len(descriptors.columns)
        np.testing.assert_allclose(row, oracle, rtol=1e-10, atol=1e-10 * np.abs(oracle).max())


@pytest.mark.parametrize("twojmax", [2, 10, 14])
def test_no_neighbour_one_neighbour_and_an_atom_on_the_point_itself(twojmax):
    """Molecules: at (0,0,0) one atom is seen, far away none; an atom at the point itself is not counted, as in LAMMPS."""
    descriptors = make_descriptors(DescriptorOptions(twojmax=twojmax, cutoff=3.0), ["C"])
    place = np.array([[0.4, 1.1, -0.9]])
    points = np.array([[0.0, 0.0, 0.0], [30.0, 0.0, 0.0], place[0]])
    found = descriptors.at_points(points, np.zeros((3, 3)), place, [6], False).numpy()
    some = bispectrum_triples(twojmax)[:: 1 + twojmax]
    columns = [bispectrum_triples(twojmax).index(triple) for triple in some]
    np.testing.assert_allclose(found[0, columns], snap_of_point(place, np.ones(1), some, 3.0), rtol=1e-10)
    alone = [j + 1.0 for _, _, j in bispectrum_triples(twojmax)]
    np.testing.assert_allclose(found[1:], [alone, alone], rtol=1e-10)
    nobody = descriptors.at_points(points[:1], np.eye(3), np.zeros((0, 3)), [], True)
    np.testing.assert_allclose(nobody[0], alone, rtol=1e-10)


@pytest.mark.parametrize("snapshot", [0, 1, 2])
def test_descriptors_of_files_made_with_lammps_come_out_to_the_last_digit_of_float32(snapshot):
    if not BE2.is_dir():
        pytest.skip("needs the Be2 snapshots")
    atoms = json.loads((BE2 / f"Be_snapshot{snapshot}.info.json").read_text())["atoms"]
    stored = np.load(BE2 / f"Be_snapshot{snapshot}.in.npy")
    descriptors = make_descriptors(DescriptorOptions(), ["Be"])
    assert stored.shape[-1] == 3 + descriptors.size
    corners = np.stack(np.meshgrid(*[np.arange(1, n, n // 4) for n in stored.shape[:3]], indexing="ij"), -1).reshape(
        -1, 3
    )
    points = corners / stored.shape[:3] @ np.array(atoms["cell"])
    rows = stored[tuple(corners.T)]
    np.testing.assert_allclose(points, rows[:, :3], atol=1e-6)
    at_points = descriptors.at_points(points, atoms["cell"], atoms["positions"], atoms["numbers"], atoms["pbc"])
    assert relative(at_points, rows[:, 3:]) < 1e-7
    if snapshot == 0:
        found = descriptors.on_grid(atoms["cell"], atoms["positions"], atoms["numbers"], atoms["pbc"], stored.shape[:3])
        assert relative(found, stored[..., 3:]) < 1e-7
    single = make_descriptors(DescriptorOptions(precision="float32"), ["Be"])
    rounded = single.at_points(points, atoms["cell"], atoms["positions"], atoms["numbers"], True)
    assert rounded.dtype == torch.float32
    assert float(((rounded - at_points).abs().amax(0) / at_points.std(0)).max()) < 1e-3


@pytest.mark.parametrize(
    ("twojmax", "precision", "tolerance"), [(10, "float64", 1e-11), (5, "float64", 1e-11), (7, "float32", 1e-4)]
)
def test_the_loop_in_c_adds_up_what_torch_does(twojmax, precision, tolerance):
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("needs a C compiler")
    found = [
        make_descriptors(DescriptorOptions(twojmax=twojmax, precision=precision, kernel=kernel), ["Al", "O"]).at_points(
            POINTS, CELL, POSITIONS, NUMBERS, True
        )
        for kernel in ("compiled", "torch")
    ]
    np.testing.assert_allclose(found[0], found[1], rtol=tolerance, atol=tolerance)


def test_without_a_compiler_torch_is_used_with_a_message_unless_the_loop_was_requested(monkeypatch, caplog):
    monkeypatch.setattr("shutil.which", lambda name: None)
    triples = ((0, 0, 1),)
    clear_compiler_caches()
    native._warn_once.cache_clear()
    with caplog.at_level("WARNING"):
        for _ in range(2):
            assert native.triple_sums(triples, torch.float64, required=False) is None
    assert caplog.text.count("computed by PyTorch") == 1
    assert "install one, such as gcc" in caplog.text
    with pytest.raises(ForgefieldError, match="kernel='compiled' needs a working C compiler"):
        native.triple_sums(triples, torch.float64, required=True)
    clear_compiler_caches()


def clear_compiler_caches():
    native._compiled.cache_clear()
    for function in (compiler.load_c, compiler.find_compiler, compiler._describe):
        function.cache_clear()


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler")
def test_the_loop_in_c_leaves_tiny_numbers_to_the_process_and_works_without_openmp(monkeypatch, tmp_path):
    """A library that is linked for fast arithmetic would have the whole process round them to zero."""
    tiny = 2.0**-1070
    monkeypatch.setenv("FORGEFIELD_CACHE", str(tmp_path))
    for parallel in ("-fopenmp", "-fno-such-option"):
        monkeypatch.setattr(compiler, "OPENMP", parallel)
        clear_compiler_caches()
        loop = native.triple_sums(((0, 0, 1),), torch.float64, required=True)
        even = torch.tensor([[[1.0, 1.0]], [[tiny, tiny]]], dtype=torch.float64)
        sums = torch.zeros(1, 1, dtype=torch.float64)
        loop.add(even, torch.zeros_like(even), sums)
        assert sums.item() == 4 * tiny
    assert len(list((tmp_path / "c").glob("*.so"))) == 2
    clear_compiler_caches()
    assert torch.tensor(tiny, dtype=torch.float64).mul(0.5).item() == tiny / 2


def test_a_compiler_that_hangs_is_none(monkeypatch, tmp_path):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 20\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(compiler, "TIMEOUT", 0.2)
    clear_compiler_caches()
    with pytest.raises(ForgefieldError, match="did not finish within"):
        native.triple_sums(((0, 1, 1),), torch.float64, required=True)
    clear_compiler_caches()


def test_columns_of_gaussians_are_in_the_order_of_the_settings():
    gaussian = DescriptorOptions(type="gaussian", cutoff=3.0, sigma=0.5)
    found = {
        order: make_descriptors(replace(gaussian, species=order), ["O", "Al"]).at_points(
            POINTS, CELL, POSITIONS, NUMBERS, True
        )
        for order in (None, ("O", "Al"), ("Al", "O"))
    }
    np.testing.assert_array_equal(found[None], found["O", "Al"])
    np.testing.assert_array_equal(found["Al", "O"], found["O", "Al"].flip(1))
    assert float((found["Al", "O"] - found["O", "Al"]).abs().max()) > 1e-3
    with pytest.raises(ForgefieldError, match=r"species is missing.*symbol, species: \[Al, O\].*species: \[O, Al\]"):
        require_fitting(gaussian, ["O", "Al"], 2)
    require_fitting(replace(gaussian, species=["Al", "O"]), ["O", "Al"], 2)
    with pytest.raises(ForgefieldError, match=r"\[Al, O\] has no Be"):
        require_fitting(replace(gaussian, species=["Al", "O"]), ["Be"], 2)


def test_rotation_translation_order_of_atoms_and_choice_of_images_change_nothing():
    rng = np.random.default_rng(3)
    descriptors = make_descriptors(
        DescriptorOptions(twojmax=8, cutoff=3.4, element_weights={"O": 0.6, "Al": 1.1}), ["O", "Al"]
    )
    plain = descriptors.at_points(POINTS, CELL, POSITIONS, NUMBERS, True)
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    away, order = np.array([0.2, -5.0, 1.0]), [2, 0, 1]
    positions = POSITIONS + rng.integers(-3, 4, (3, 3)) @ CELL
    turned = descriptors.at_points(
        (POINTS + away) @ turn, CELL @ turn, (positions + away)[order] @ turn, np.array(NUMBERS)[order], True
    )
    np.testing.assert_allclose(turned, plain, rtol=1e-9, atol=1e-9)
    doubled = descriptors.at_points(
        POINTS, np.diag([2, 1, 1]) @ CELL, np.concatenate([POSITIONS, POSITIONS + CELL[0]]), NUMBERS * 2, True
    )
    np.testing.assert_allclose(doubled, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["bispectrum", "gaussian"])
def test_chunks_and_periodicity_only_change_what_they_should(kind):
    own = {"twojmax": 4} if kind == "bispectrum" else {"sigma": 0.5}
    descriptors = make_descriptors(DescriptorOptions(type=kind, cutoff=3.0, **own), ["Al", "O"])
    arguments = CELL, POSITIONS, NUMBERS
    whole = descriptors.on_grid(*arguments, True, (5, 4, 3), chunk=1000)
    assert whole.shape == (5, 4, 3, descriptors.size)
    np.testing.assert_allclose(descriptors.on_grid(*arguments, True, (5, 4, 3), chunk=7), whole, rtol=1e-11)
    slab = descriptors.at_points(POINTS[:2], *arguments, [True, True, False])
    walled = np.concatenate([POSITIONS + i * CELL[0] + j * CELL[1] for i in range(-3, 4) for j in range(-3, 4)])
    molecule = descriptors.at_points(POINTS[:2], np.zeros((3, 3)), walled, NUMBERS * 49, False)
    np.testing.assert_allclose(slab, molecule, rtol=1e-11, atol=1e-11)


def test_gaussian_density_is_the_sum_over_the_atoms_of_each_species():
    descriptors = make_descriptors(DescriptorOptions(type="gaussian", cutoff=3.3), ["Al", "O"])
    found = descriptors.on_grid(CELL, POSITIONS, NUMBERS, True, (5, 4, 6))
    sigma = max(np.linalg.norm(CELL, axis=1) / (5, 4, 6)) / 0.08099000022712448 * 0.2
    for i, j, k in ((0, 0, 0), (4, 1, 5), (2, 3, 2)):
        distance = np.linalg.norm(images(CELL, POSITIONS, np.array([i / 5, j / 4, k / 6]) @ CELL), axis=-1)
        value = (
            np.where(distance < 3.3, np.exp(-(distance**2) / (2 * sigma**2)), 0.0).sum(1)
            / (2 * math.pi * sigma**2) ** 1.5
        )
        np.testing.assert_allclose(found[i, j, k], [value[0] + value[2], value[1]], rtol=1e-12)
    assert descriptors.columns == ["density(Al)", "density(O)"]


@pytest.mark.parametrize("kind", ["bispectrum", "gaussian"])
def test_gradients_in_positions_and_cell_are_those_of_finite_differences(kind):
    own = {"twojmax": 3} if kind == "bispectrum" else {"sigma": 0.6}
    descriptors = make_descriptors(DescriptorOptions(type=kind, cutoff=2.6, **own), ["Al", "O"])
    mix = torch.linspace(-1, 1, descriptors.size, dtype=torch.float64)

    def value(positions, cell):
        return (descriptors.at_points(POINTS[:2], cell, positions, NUMBERS, True, chunk=1) * mix).sum()

    positions, cell = (torch.tensor(x, requires_grad=True) for x in (POSITIONS, CELL))
    gradients = torch.autograd.grad(value(positions, cell), (positions, cell))
    generator, step = torch.Generator().manual_seed(0), 1e-4
    for _ in range(3):
        ways = [torch.randn(3, 3, generator=generator, dtype=torch.float64) for _ in range(2)]
        slope = sum((gradient * way).sum() for gradient, way in zip(gradients, ways))
        ahead, behind = (
            value(*(torch.tensor(x) + s * w for x, w in zip((POSITIONS, CELL), ways))) for s in (step, -step)
        )
        np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-5)


def test_harmonics_are_orthonormal_under_the_quadrature_and_add_up_to_chebyshev_polynomials():
    degree = 6
    nodes, weights = quadrature(2 * degree)
    nodes, weights = np.concatenate([nodes, nodes * [1, -1, 1, -1]]), np.concatenate([weights, weights])
    harmonics = SphereHarmonics(degree, torch.float64, torch.device("cpu"))
    by_degree = harmonics.at(torch.as_tensor(nodes)).split([(j + 1) ** 2 for j in range(degree + 1)], 1)
    even = torch.cat(by_degree[0::2], 1)
    np.testing.assert_allclose(even.T @ (torch.as_tensor(weights)[:, None] * even), np.eye(even.shape[1]), atol=1e-13)
    cosine = np.clip(nodes[:5] @ nodes[40:45].T, -1, 1)
    for j, part in enumerate(by_degree):
        expected = np.sin((j + 1) * np.arccos(cosine)) / np.sin(np.arccos(cosine))
        np.testing.assert_allclose(part[:5] @ part[40:45].T / (j + 1), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"twojmx": 10}, r"points\.twojmx: there is no such setting\. Did you mean 'twojmax'"),
        ({"type": "gausian"}, "points.type must be .* Did you mean 'gaussian'"),
        ({"type": "gaussian", "twojmax": 8}, "points.twojmax is a setting of type=bispectrum"),
        ({"sigma": 0.2}, "points.sigma is a setting of type=gaussian"),
        ({"twojmax": 2.5}, "points.twojmax must be a whole number .* not 2.5"),
        ({"twojmax": 21}, "between 0 and 20"),
        ({"cutoff": -1}, "points.cutoff must be a positive number, not -1"),
        ({"rmin0": 5.0}, "below the cutoff"),
        ({"rfac0": 1.5}, "at most 1"),
        ({"switch": "on"}, "true or false"),
        ({"element_weights": {"Aluminium": 1.0}}, "chemical symbol"),
        ({"precision": "float16"}, "float64 or float32"),
        ({"kernel": "fast"}, "auto or compiled or torch"),
        ({"species": ["Al", "O"]}, "points.species is a setting of type=gaussian"),
        ({"type": "gaussian", "species": ["Al", "Al"]}, "points.species must be a list of different elements"),
        ({"type": "gaussian", "species": "Al"}, "points.species must be a list .* not 'Al'"),
    ],
)
def test_meaningless_settings_are_refused_by_name(settings, message):
    with pytest.raises(ForgefieldError, match=message):
        DescriptorOptions.from_mapping(settings, "points")


def test_structures_and_species_that_do_not_fit_are_refused():
    plain = DescriptorOptions(twojmax=2, cutoff=3.0)
    with pytest.raises(ForgefieldError, match="has no weight of O"):
        make_descriptors(DescriptorOptions(element_weights={"Al": 1.0}), ["Al", "O"])
    with pytest.raises(ForgefieldError, match=r"element_weights\.O: there is no such element"):
        make_descriptors(DescriptorOptions(element_weights={"Al": 1.0, "O": 1.0}), ["Al"])
    for wrong in ([], ["Al", 13], ["Alu"]):
        with pytest.raises(ForgefieldError, match="species"):
            make_descriptors(plain, wrong)
    descriptors = make_descriptors(plain, ["Al"])
    with pytest.raises(ForgefieldError, match="the structure contains O; these descriptors are for Al"):
        descriptors.on_grid(CELL, POSITIONS, NUMBERS, True, (2, 2, 2))
    for changed, message in (
        ({"grid_shape": (2, 2)}, "grid_shape"),
        ({"cell": np.ones((3, 3))}, "no volume"),
        ({"cell": np.diag([3.0, 3.0, 0.0])}, "no extent"),
        ({"positions": POSITIONS[:2]}, "for 3 atomic numbers it must be"),
        ({"positions": POSITIONS * np.nan}, "not finite"),
        ({"chunk": 0}, "chunk must be .* not 0"),
    ):
        arguments = {"cell": CELL, "positions": POSITIONS, "numbers": [13] * 3, "pbc": True, "grid_shape": (2, 2, 2)}
        with pytest.raises(ForgefieldError, match=message):
            descriptors.on_grid(**{**arguments, **changed})
    with pytest.raises(ForgefieldError, match="there is no default"):
        make_descriptors(DescriptorOptions(type="gaussian"), ["Al"]).at_points(POINTS, CELL, POSITIONS, [13] * 3, True)
