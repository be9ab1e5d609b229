"""ML-IAP: the exported object, called as LAMMPS calls it, on several ranks with ghosts, owners, exchanges and an empty rank."""

from __future__ import annotations

import io
import pickle
import threading
import zipfile
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.neighborlist import neighbor_list

from forgefield.cli import main
from forgefield.errors import ForgefieldError
from forgefield.inference.ase import Calculator
from forgefield.inference.lammps.mliap import MliapModel, write_mliap
from tests.support.lammps_runs import CUTOFF, SPECIES, alloy, write_run


@dataclass
class World:
    """What the ranks of one evaluation share. owners: for each rank, (ntotal, 2): rank and row of every atom's owner."""

    owners: list[np.ndarray]
    barrier: threading.Barrier
    slots: dict[int, torch.Tensor] = field(default_factory=dict)


class Data:
    """The double of LAMMPS's `MLIAPDataPy` on one rank."""

    def __init__(self, world: World, rank: int, elems, pair_i, pair_j, rij, nlocal: int) -> None:
        self.world, self.rank = world, rank
        self.elems, self.pair_i, self.pair_j = (np.asarray(a, dtype=np.int32) for a in (elems, pair_i, pair_j))
        self.rij = np.asarray(rij, dtype=np.float64).reshape(-1, 3)
        self.nlocal = self.nlistatoms = nlocal
        self.ntotal, self.npairs = len(self.elems), len(self.pair_i)
        self.eatoms = np.zeros(nlocal)
        self.energy = 0.0
        self.slopes = np.zeros((self.npairs, 3))

    def update_pair_forces(self, slopes) -> None:
        assert slopes.dtype == np.float64
        assert slopes.flags.c_contiguous
        self.slopes = np.array(slopes)

    def _share(self, rows: torch.Tensor, width: int) -> None:
        assert rows.shape == (self.ntotal, width)
        assert rows.is_contiguous()
        self.world.slots[self.rank] = rows.clone()
        self.world.barrier.wait()

    def forward_exchange(self, source: torch.Tensor, target: torch.Tensor, width: int) -> None:
        self._share(source, width)
        target.copy_(source)
        for row, (rank, index) in enumerate(self.world.owners[self.rank]):
            if row >= self.nlocal:
                target[row] = self.world.slots[rank][index]
        self.world.barrier.wait()

    def reverse_exchange(self, source: torch.Tensor, target: torch.Tensor, width: int) -> None:
        self._share(source, width)
        target.copy_(source)
        for rank, owners in enumerate(self.world.owners):
            for row, (owner, index) in enumerate(owners):
                if owner == self.rank and not (rank == self.rank and row == index):
                    target[index] += self.world.slots[rank][row]
        self.world.barrier.wait()


def divide(atoms: Atoms, n_ranks: int) -> tuple[list[Data], list[np.ndarray]]:
    """Shares of the structure, the last rank being empty where there are several, and the atoms of each rank.

    As in LAMMPS, every image of a neighbour is a ghost of its own, also on the rank that owns the atom.
    """
    domain = np.minimum((atoms.get_scaled_positions()[:, 0] * max(1, n_ranks - 1)).astype(int), max(0, n_ranks - 2))
    local = [np.flatnonzero(domain == rank) for rank in range(n_ranks)]
    rank_of, row_of = np.zeros(len(atoms), dtype=int), np.zeros(len(atoms), dtype=int)
    for rank, members in enumerate(local):
        rank_of[members], row_of[members] = rank, np.arange(len(members))
    centre, neighbour, shift, vector = neighbor_list("ijSD", atoms, CUTOFF)
    species = np.array([SPECIES.index(symbol) for symbol in atoms.get_chemical_symbols()])
    world = World([], threading.Barrier(n_ranks, timeout=60))
    shares = []
    for rank, members in enumerate(local):
        mine = np.flatnonzero(rank_of[centre] == rank)
        mine = mine[np.argsort(row_of[centre[mine]], kind="stable")]
        ghosts: dict[tuple[int, ...], int] = {}
        pair_j = []
        for edge in mine:
            j, image = neighbour[edge], tuple(shift[edge])
            if rank_of[j] == rank and not any(image):
                pair_j.append(row_of[j])
            else:
                pair_j.append(ghosts.setdefault((j, *image), len(members) + len(ghosts)))
        atoms_of_rank = [*members, *(key[0] for key in ghosts)]
        world.owners.append(np.array([[rank_of[j], row_of[j]] for j in atoms_of_rank], dtype=int).reshape(-1, 2))
        elems = species[np.array(atoms_of_rank, dtype=int)]
        shares.append(Data(world, rank, elems, row_of[centre[mine]], pair_j, vector[mine], len(members)))
    return shares, local


def evaluate(models: list[MliapModel], shares: list[Data]) -> None:
    """All ranks at the same time, each in a thread."""
    errors: list[BaseException] = []

    def work(model: MliapModel, data: Data) -> None:
        try:
            model.compute_descriptors(data)
            model.compute_gradients(data)
            model.compute_forces(data)
        except BaseException as error:
            errors.append(error)
            data.world.barrier.abort()

    threads = [threading.Thread(target=work, args=pair) for pair in zip(models, shares)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def forces_of(shares: list[Data], local: list[np.ndarray], n_atoms: int) -> np.ndarray:
    """As LAMMPS adds them: on the centre and, with the other sign, on the owner of the neighbour."""
    forces = np.zeros((n_atoms, 3))
    for data in shares:
        owner = [local[rank][index] for rank, index in data.world.owners[data.rank]]
        for i, j, slope in zip(data.pair_i, data.pair_j, data.slopes):
            forces[owner[i]] += slope
            forces[owner[j]] -= slope
    return forces


@pytest.mark.parametrize("n_ranks", [1, 4])
@pytest.mark.parametrize("name", ["nequip", "painn", "allegro", "deeppot", "tensornet", "m3gnet"])
def test_energies_and_forces_are_those_of_ase(tmp_path, name, n_ranks):
    run = write_run(tmp_path, name)
    file = write_mliap(run, tmp_path / "model.pt")
    atoms = alloy((2, 2, 1), skewed=True)
    shares, local = divide(atoms, n_ranks)
    if n_ranks > 1:
        assert shares[-1].nlocal == shares[-1].ntotal == 0
    evaluate([torch.load(file, weights_only=False) for _ in shares], shares)
    atoms.calc = Calculator(run)
    assert sum(data.energy for data in shares) == pytest.approx(atoms.get_potential_energy(), rel=1e-12)
    energies = np.zeros(len(atoms))
    for data, members in zip(shares, local):
        energies[members] = data.eatoms
    np.testing.assert_allclose(energies, atoms.get_potential_energies(), rtol=1e-11)
    expected = atoms.get_forces()
    np.testing.assert_allclose(forces_of(shares, local, len(atoms)), expected, atol=1e-10 * np.abs(expected).max())


def test_pairs_in_any_order_give_the_same_slopes(tmp_path):
    model = torch.load(write_mliap(write_run(tmp_path, "allegro"), tmp_path / "model.pt"), weights_only=False)
    (data,), _ = divide(alloy((1, 1, 2)), 1)
    evaluate([model], [data])
    expected = data.slopes
    order = np.random.default_rng(0).permutation(data.npairs)
    data.pair_i, data.pair_j, data.rij = data.pair_i[order], data.pair_j[order], data.rij[order]
    evaluate([model], [data])
    np.testing.assert_allclose(data.slopes, expected[order], rtol=1e-9, atol=1e-13)


def test_build_without_exchange_refuses_message_passing(tmp_path):
    model = torch.load(write_mliap(write_run(tmp_path, "nequip"), tmp_path / "model.pt"), weights_only=False)

    class Plain:
        nlocal = ntotal = npairs = 0

    with pytest.raises(ForgefieldError, match="built with Kokkos"):
        model.compute_forces(Plain())


def test_file_names_a_single_function_and_describes_itself(tmp_path, capsys):
    run = write_run(tmp_path, "nequip", "float32")
    out = tmp_path / "model.pt"
    assert main(["export", str(run.path), "--to", "mliap", "-o", str(out)]) == 0
    assert f"pair_style mliap unified {out} 0" in capsys.readouterr().out
    with zipfile.ZipFile(out) as archive:
        content = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    named = []

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str):
            named.append(f"{module}.{name}")
            return super().find_class(module, name)

    Unpickler(io.BytesIO(content)).load()
    assert named == ["forgefield.inference.lammps.mliap.read_model"]
    model = torch.load(out, weights_only=False)
    assert model.element_types == list(SPECIES)
    assert model.rcutfac == CUTOFF / 2
    assert model.evaluator.potential.interface.weight_dtype() == torch.float32
