"""Energies, forces and virials of LAMMPS on 1, 2 and 4 MPI processes equal those of the ASE calculator."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.lammps_runs import (
    MODELS,
    Case,
    Results,
    alloy,
    by_ase,
    cluster,
    launch,
    single_points,
    write_input,
    write_run,
)

TOLERANCE = 1e-9
SHAPES = ("skewed", "small_box", "one_cell_skewed", "empty_ranks")


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> list[Case]:
    """Every model on a small alloy, and one model on all kinds of structures."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {name: write_run(folder, name) for name in MODELS}
    in_float32 = write_run(folder / "single", "nequip", "float32")
    cases = [Case(name.replace(" ", "_"), run.path, alloy()) for name, run in runs.items()]
    nequip, local = runs["nequip"].path, runs["deeppot"].path
    return [
        *cases,
        Case("skewed", nequip, alloy(skewed=True, seed=1)),
        Case("small_box", nequip, alloy((1, 1, 2), seed=2)),
        Case("one_cell_skewed", nequip, alloy((1, 1, 1), skewed=True, seed=2)),
        Case("empty_ranks", nequip, cluster()),
        Case("empty_ranks_local", local, cluster()),
        Case("empty_ranks_painn", runs["painn"].path, cluster()),
        Case("real_units", nequip, alloy(seed=4), units="real"),
        Case("in_float64", in_float32.path, alloy(seed=5), options="dtype float64 which last"),
    ]


@pytest.fixture(scope="module")
def expected(cases) -> dict[str, Results]:
    return {case.name: by_ase(case) for case in cases}


@pytest.fixture(scope="module", params=[1, 2, 4])
def found(request, cases, tmp_path_factory, plugin_cache) -> dict[str, Results]:
    """On four processes only the shapes of boxes: neighbourhoods differ there, and models exchange what they do on two."""
    ranks = request.param
    cases = [case for case in cases if case.name in SHAPES] if ranks == 4 else cases
    folder = tmp_path_factory.mktemp(f"ranks{ranks}")
    write_input(folder, cases)
    done = launch(folder, ranks, FORGEFIELD_CACHE=plugin_cache)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return single_points(folder, cases)


def relative(one: np.ndarray | float, other: np.ndarray | float) -> float:
    return float(np.max(np.abs(np.subtract(one, other))) / np.max(np.abs(other)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_energies_forces_and_virials_are_those_of_ase(found, expected):
    for name, result in found.items():
        for quantity in ("energy", "forces", "energies", "virial", "atomic_virial"):
            deviation = relative(getattr(result, quantity), getattr(expected[name], quantity))
            assert deviation < TOLERANCE, f"{quantity} of {name}: {deviation:.1e}"
