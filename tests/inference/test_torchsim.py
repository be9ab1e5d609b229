"""Models in torch-sim: its own validator, equality with the ASE calculator, relaxation and dynamics of many systems."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.optimize import FIRE

from forgefield.errors import ForgefieldError
from forgefield.inference.ase import Calculator
from forgefield.models.building import build_model
from forgefield.models.potential import Potential
from forgefield.models.resolving import resolve_model
from tests.support.kernels import DEVICE, needs_kernels
from tests.support.toy_models import Morse

ts = pytest.importorskip("torch_sim")

from torch_sim.models.interface import validate_model_outputs  # noqa: E402

from forgefield.inference.torchsim import BatchedLists, Model  # noqa: E402

CPU = torch.device("cpu")


def nequip(species: tuple[str, ...], cutoff: float = 4.0) -> Potential:
    options = {"name": "nequip", "num_layers": 2, "l_max": 1, "num_features": 4, "radial_mlp_width": 8}
    facts = {"mean_neighbours": 14.0, "forces_rms": 1.0, "reference_energies": dict.fromkeys(species, -1.0)}
    resolved = resolve_model(options, species=species, cutoff=cutoff, statistics=facts)
    return build_model(resolved, precision="float64", seed=0)


def alloys(count: int, seed: int = 0) -> list[Atoms]:
    random = np.random.default_rng(seed)
    systems = []
    for number in range(count):
        atoms = bulk("Cu", cubic=True, a=3.6 + 0.05 * number) * (1, 1, 1 + number % 3)
        atoms.symbols[::3] = "Au"
        atoms.positions += random.normal(0, 0.08, atoms.positions.shape)
        systems.append(atoms)
    return systems


def state_of(systems: list[Atoms], dtype: torch.dtype = torch.float64):
    return ts.io.atoms_to_state(systems, CPU, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_passes_the_validator_of_torch_sim(dtype: torch.dtype) -> None:
    validate_model_outputs(Model(nequip(("H", "C", "Mg", "Si", "Fe")), device=CPU, dtype=dtype), CPU, dtype)


@pytest.mark.parametrize("lists", ["systems", "batched"])
def test_a_batch_equals_the_ase_calculator_system_by_system(lists: str) -> None:
    potential, systems = nequip(("Cu", "Au")), alloys(5)
    model = Model(potential, device=CPU)
    if lists == "batched":
        model.neighbours = BatchedLists(potential.cutoff, 0.5)
    out = model(state_of(systems))
    first = 0
    for number, atoms in enumerate(systems):
        atoms.calc = Calculator(potential)
        assert float(out["energy"][number]) == pytest.approx(atoms.get_potential_energy(), rel=1e-12)
        last = first + len(atoms)
        np.testing.assert_allclose(out["forces"][first:last].numpy(), atoms.get_forces(), rtol=0, atol=1e-11)
        np.testing.assert_allclose(out["stress"][number].numpy(), atoms.get_stress(voigt=False), rtol=0, atol=1e-12)
        first = last


@pytest.mark.parametrize("lists", ["systems", "batched"])
def test_results_do_not_depend_on_the_skin_along_a_path(lists: str) -> None:
    potential = nequip(("Cu", "Au"))
    state, random = state_of(alloys(3)), torch.Generator().manual_seed(0)
    models = []
    for skin in (0.0, 0.6):
        model = Model(potential, device=CPU, skin=skin)
        if lists == "batched":
            model.neighbours = BatchedLists(potential.cutoff, skin)
        models.append(model)
    for _ in range(12):
        state.positions += 0.05 * torch.randn(state.positions.shape, generator=random, dtype=torch.float64)
        fresh, remembered = (model(state) for model in models)
        for name in ("energy", "forces", "stress"):
            torch.testing.assert_close(remembered[name], fresh[name], rtol=1e-12, atol=1e-13)
    assert models[1].neighbours.builds < models[0].neighbours.builds


def test_states_may_have_systems_in_other_numbers_from_one_call_to_the_next() -> None:
    model, systems = Model(Potential(Morse()), device=CPU), alloys(4)
    whole = model(state_of(systems))["energy"]
    parts = [model(state_of(systems[begin:end]))["energy"] for begin, end in ((2, 4), (0, 1), (1, 2))]
    torch.testing.assert_close(torch.cat([parts[1], parts[2], parts[0]]), whole, rtol=1e-14, atol=0)


def test_relaxes_many_systems_to_the_energies_that_ase_finds() -> None:
    potential, systems = Potential(Morse()), alloys(6)
    optimiser = {"optimizer": ts.Optimizer.fire} if hasattr(ts, "Optimizer") else {"optimizer": ts.optimizers.fire}
    converged = ts.generate_force_convergence_fn(force_tol=1e-4, include_cell_forces=False)
    final = ts.optimize(
        system=systems,
        model=Model(potential, device=CPU),
        convergence_fn=converged,
        max_steps=1000,
        **optimiser,
    )
    for atoms, energy in zip(systems, final.energy.tolist(), strict=True):
        atoms.calc = Calculator(potential)
        FIRE(atoms, logfile=None).run(fmax=1e-4, steps=1000)
        assert energy == pytest.approx(atoms.get_potential_energy(), abs=1e-6)


def test_energy_is_conserved_in_dynamics() -> None:
    model = Model(Potential(Morse()), device=CPU)
    integrator = ts.Integrator.nve if hasattr(ts, "Integrator") else ts.integrators.nve
    settings = {"model": model, "integrator": integrator, "temperature": 300, "timestep": 0.001}

    def total_energy(state) -> torch.Tensor:
        kinetic = 0.5 * (state.momenta.square() / state.masses[:, None]).sum(1)
        return model(state)["energy"].index_add(0, state.system_idx, kinetic)

    start = ts.integrate(system=alloys(4), n_steps=1, **settings)
    potential, total = model(start)["energy"], total_energy(start)
    final = ts.integrate(system=start, n_steps=200, **settings)
    per_atom = 1 / torch.bincount(start.system_idx)
    assert ((model(final)["energy"] - potential).abs() * per_atom).max() > 1e-3  # eV: energy has been exchanged
    assert ((total_energy(final) - total).abs() * per_atom).max() < 1e-4


def test_a_molecule_without_a_cell_has_no_stress() -> None:
    out = Model(nequip(("H", "C")), device=CPU)(state_of([molecule("C6H6")]))
    assert out["energy"].shape == (1,)
    assert out["forces"].shape == (12, 3)


def test_unknown_species_are_named() -> None:
    with pytest.raises(ForgefieldError, match="Si"):
        Model(nequip(("Cu", "Au")), device=CPU)(state_of([bulk("Si")]))


@needs_kernels
def test_the_engine_gives_the_results_of_the_eager_model_while_states_change() -> None:
    """Also for states in tensors of the same address, and for other species in the same tensor."""
    device, messages = torch.device(DEVICE), []
    potential = nequip(("Cu", "Au")).to(device)
    systems = [molecule("H2"), bulk("Cu", a=3.6)]
    systems[0].symbols = "CuAu"
    systems[0].center(vacuum=3.0)
    systems[0].pbc = True
    model = Model(potential, device=device, engine=True, notify=messages.append)
    eager = Model(potential, device=device, engine=False)
    state = ts.io.atoms_to_state(systems, device, torch.float64)

    def assert_equal() -> None:
        found, wanted = model(state), eager(state)
        for name in ("energy", "forces", "stress"):
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-10, atol=1e-11, equal_nan=True)

    assert_equal()
    first = model(state)["forces"]
    kept = first.clone()
    state.positions = state.positions + 0.02
    state.positions[0, 0] += 0.1
    assert_equal()
    assert torch.equal(first, kept)  # results are the caller's
    state.atomic_numbers[0] = 79
    assert_equal()
    assert len(messages) == 1
