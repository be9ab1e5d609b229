"""Molecular dynamics: order of the integrators, temperatures, exact continuation after kill -9, explosions, bad input."""

from __future__ import annotations

import ase.io
import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.calculators.calculator import Calculator as AseCalculator
from ase.calculators.emt import EMT
from ase.constraints import FixAtoms

import forgefield
from forgefield.cli import main
from forgefield.errors import ForgefieldError
from forgefield.trust.dynamics import Dynamics
from forgefield.trust.options import DynamicsOptions
from tests.support.emt_run import emt_run, kill_when, start_command
from tests.support.helpers import tiny_config


def copper(repeats: int = 1, **settings) -> Atoms:
    atoms = bulk("Cu", a=3.61, cubic=True).repeat(repeats)
    atoms.calc = EMT(**settings)
    return atoms


class Springs(AseCalculator):
    """Every atom is bound to the origin, and the pressure is that of an ideal solid: cheap and smooth."""

    implemented_properties = ["energy", "forces"]

    def calculate(self, atoms=None, properties=("energy",), system_changes=()):
        super().calculate(atoms, properties, system_changes)
        self.results = {"energy": 0.5 * (atoms.positions**2).sum(), "forces": -atoms.positions}


def fluctuation(ensemble: str, timestep: float, **options) -> float:
    """Standard deviation of the conserved quantity over 60 fs, eV."""
    atoms = copper(asap_cutoff=True)
    atoms.rattle(0.05, seed=1)
    dynamics = Dynamics(
        atoms, DynamicsOptions(ensemble=ensemble, temperature=600.0, timestep=timestep, barostat_time=100.0, **options)
    )
    values = [dynamics.conserved()]
    for _ in range(round(60 / timestep)):
        dynamics.step()
        values.append(dynamics.conserved())
    return float(np.std(values))


@pytest.mark.parametrize(
    ("ensemble", "options"),
    [("nve", {}), ("nvt", {}), ("npt", {}), ("npt", {"cell": "full"})],
    ids=["nve", "nvt", "npt", "npt-full"],
)
def test_the_error_of_the_conserved_quantity_is_of_second_order_in_the_time_step(ensemble, options):
    coarse, fine = (fluctuation(ensemble, timestep, **options) for timestep in (4.0, 2.0))
    assert coarse / fine == pytest.approx(4.0, rel=0.25)


@pytest.mark.parametrize("thermostat", ["nose-hoover", "langevin", "bussi"])
def test_thermostats_give_each_degree_of_freedom_its_kinetic_energy(thermostat):
    """Four atoms: counting the three momenta of the centre of mass would be wrong by a third."""
    atoms = Atoms("Cu4", positions=np.zeros((4, 3)), cell=[9, 9, 9], pbc=True)
    atoms.calc = Springs()
    options = DynamicsOptions(temperature=300.0, timestep=2.0, thermostat=thermostat, thermostat_time=20.0, seed=4)
    dynamics = Dynamics(atoms, options)
    assert dynamics.degrees_of_freedom == (12 if thermostat == "langevin" else 9)
    kinetic = []
    for _ in range(12000):
        dynamics.step()
        kinetic.append(atoms.get_kinetic_energy())
    expected = 0.5 * dynamics.degrees_of_freedom * units.kB * 300.0
    assert np.mean(kinetic[2000:]) == pytest.approx(expected, rel=0.06)


class IdealGas(AseCalculator):
    """Atoms that do not interact."""

    implemented_properties = ["energy", "forces", "stress"]

    def calculate(self, atoms=None, properties=("energy",), system_changes=()):
        super().calculate(atoms, properties, system_changes)
        self.results = {"energy": 0.0, "forces": np.zeros((len(atoms), 3)), "stress": np.zeros(6)}


@pytest.mark.parametrize("cell", ["isotropic", "full"])
def test_the_volume_of_an_ideal_gas_at_constant_pressure_is_that_of_its_equation_of_state(cell):
    """Four atoms: with three degrees of freedom too many, volume and temperature would be wrong by a third."""
    pressure, temperature = 0.05, 300.0
    volume = 4 * units.kB * temperature / (pressure * units.GPa)
    positions = np.random.default_rng(0).uniform(0, volume ** (1 / 3), (4, 3))
    atoms = Atoms("Cu4", positions=positions, cell=[volume ** (1 / 3)] * 3, pbc=True)
    atoms.calc = IdealGas()
    times = {"timestep": 4.0, "thermostat_time": 40.0, "barostat_time": 150.0}
    dynamics = Dynamics(
        atoms,
        DynamicsOptions(ensemble="npt", temperature=temperature, pressure=pressure, cell=cell, seed=1, **times),
    )
    volumes, temperatures = [], []
    for _ in range(5000):
        dynamics.step()
        volumes.append(atoms.get_volume())
        temperatures.append(dynamics.temperature)
    assert np.mean(volumes[500:]) == pytest.approx(volume, rel=0.1)
    assert np.mean(temperatures[500:]) == pytest.approx(temperature, rel=0.1)


def test_molecules_in_a_vacuum_neither_drift_nor_rotate():
    for name, degrees in (("H2O", 3), ("CO2", 4), ("N2", 1)):
        atoms = molecule(name)
        atoms.calc = EMT()
        dynamics = Dynamics(atoms, DynamicsOptions(ensemble="nve", temperature=300.0))
        assert dynamics.degrees_of_freedom == degrees
        assert np.abs(atoms.get_momenta().sum(axis=0)).max() < 1e-12
        assert np.abs(atoms.get_angular_momentum()).max() < 1e-10


def test_fixed_atoms_do_not_move_and_are_not_counted():
    atoms = copper()
    atoms.set_constraint(FixAtoms([0, 1]))
    before = atoms.positions[:2].copy()
    dynamics = Dynamics(atoms, DynamicsOptions(temperature=500.0))
    for _ in range(20):
        dynamics.step()
    assert dynamics.degrees_of_freedom == 6
    assert np.array_equal(atoms.positions[:2], before)


@pytest.mark.parametrize(
    "options",
    [
        {"ensemble": "nve"},
        {},
        {"thermostat": "bussi"},
        {"thermostat": "langevin"},
        {"ensemble": "npt"},
        {"ensemble": "npt", "cell": "full"},
    ],
    ids=str,
)
def test_a_restored_state_continues_exactly(options):
    start = copper()
    one = Dynamics(start, DynamicsOptions(temperature=400.0, **options))
    for _ in range(15):
        one.step()
    state = {name: np.array(value) for name, value in one.state().items()}
    one.restore(state)
    other = Dynamics(copper(), DynamicsOptions(temperature=400.0, **options))
    other.restore(state)
    for _ in range(15):
        one.step()
        other.step()
    assert np.array_equal(one.atoms.positions, other.atoms.positions)
    assert np.array_equal(one.atoms.get_momenta(), other.atoms.get_momenta())
    assert np.array_equal(one.atoms.cell, other.atoms.cell)
    assert one.conserved() == other.conserved()


# ---- the command


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with a trained NequIP (runs/tiny), EMT (runs/emt) and two structures."""
    folder = tmp_path_factory.mktemp("md")
    forgefield.train(tiny_config(folder))
    emt_run(folder / "runs")
    first = bulk("Cu", a=3.6, cubic=True)
    first.symbols[0] = "Au"
    ase.io.write(folder / "start.extxyz", [first.repeat((2, 1, 1)), first])
    return folder


@pytest.mark.parametrize(
    ("run", "out", "options"),
    [
        ("tiny", "nvt.extxyz", ["--thermostat", "langevin"]),
        ("emt", "npt.extxyz", ["--ensemble", "npt"]),
        ("emt", "nvt.traj", []),
    ],
    ids=["nequip-langevin", "emt-npt", "emt-traj"],
)
def test_killed_simulations_end_as_uninterrupted_ones(workplace, monkeypatch, run, out, options):
    words = ["md", f"runs/{run}", "start.extxyz", "--temperature", 500, "--ps", 0.12, "--every", 10, "--checkpoint", 20]
    words += [*options, "--device", "cpu", "--trust-code"]
    interrupted, whole = workplace / f"{run}-interrupted-{out}", workplace / f"{run}-whole-{out}"
    state = interrupted.with_name(f"{interrupted.name}.state.npz")

    def step_of(structure: int, step: int):
        def reached() -> bool:
            if not state.exists():
                return False
            with np.load(state) as stored:
                return (int(stored["of"]), int(stored["step"])) >= (structure, step)

        return reached

    kill_when(start_command(workplace, *words, "-o", interrupted), step_of(1, 20))
    assert interrupted.stat().st_size > 0
    if out.endswith(".extxyz"):
        with interrupted.open("a") as stream:
            stream.write("8\nhalf a frame that the state does not know\nCu 0 0")
    monkeypatch.chdir(workplace)
    for file in (interrupted, whole):
        assert main([*map(str, words), "-o", str(file)]) == 0
    ours, theirs = (ase.io.read(file, index=":") for file in (interrupted, whole))
    assert len(ours) == len(theirs) == 26
    assert [a.info["start"] for a in ours] == [0] * 13 + [1] * 13
    for one, other in zip(ours, theirs):
        assert np.array_equal(one.positions, other.positions)
        assert np.array_equal(one.get_momenta(), other.get_momenta())
        assert one.get_potential_energy() == other.get_potential_energy()
    if out.endswith(".extxyz"):
        assert interrupted.read_bytes() == whole.read_bytes()


def test_a_longer_time_extends_a_simulation(workplace, tmp_path):
    run = forgefield.load_run(workplace / "runs/emt", trust_code=True)
    atoms = ase.io.read(workplace / "start.extxyz", index=1)
    options = {"temperature": 300, "every": 10, "checkpoint": 10}
    forgefield.md(run, atoms, tmp_path / "a.extxyz", ps=0.02, **options)
    forgefield.md(run, atoms, tmp_path / "a.extxyz", ps=0.04, **options)
    result = forgefield.md(run, atoms, tmp_path / "b.extxyz", ps=0.04, **options)
    assert (tmp_path / "a.extxyz").read_bytes() == (tmp_path / "b.extxyz").read_bytes()
    assert "finished after 0.04 ps" in repr(result)
    with pytest.raises(ForgefieldError, match="was started with temperature 300"):
        forgefield.md(run, atoms, tmp_path / "a.extxyz", ps=0.04, **{**options, "temperature": 400})


def test_an_explosion_is_a_result_with_its_frame(workplace, tmp_path, capsys):
    atoms = ase.io.read(workplace / "start.extxyz", index=1)
    ase.io.write(tmp_path / "start.extxyz", atoms)
    words = ["md", str(workplace / "runs/emt"), str(tmp_path / "start.extxyz"), "-o", str(tmp_path / "out.extxyz")]
    code = main([*words, "--temperature", "3000", "--timestep", "60", "--ps", "20", "--trust-code", "--device", "cpu"])
    printed = capsys.readouterr().out
    assert code == 1
    assert "exploded after" in printed
    last = ase.io.read(tmp_path / "out.extxyz", index=-1)
    assert last.info["exploded"]
    assert f"{last.info['time_ps']:.4g} ps" in printed


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (lambda atoms: atoms.symbols.__setitem__(0, "Ni"), [], "Ni"),
        (lambda atoms: atoms.set_pbc(False), ["--ensemble", "npt"], "frame 0: the ensemble npt needs a cell"),
        (lambda atoms: None, ["--ps", "-1"], "'ps' must be a positive number"),
        (lambda atoms: None, ["--pressure", "2"], "--pressure has no effect with --ensemble nvt"),
        (lambda atoms: None, ["--ensemble", "nve", "--pressure", "0"], "--pressure has no effect with --ensemble nve."),
        (
            lambda atoms: None,
            ["--ensemble", "nve", "--thermostat", "bussi"],
            "--thermostat has no effect with --ensemble nve",
        ),
        (lambda atoms: None, ["--ensemble", "nve", "--thermostat-time", "9"], "--thermostat-time has no effect with"),
        (lambda atoms: None, ["--barostat-time", "9"], "--barostat-time has no effect with --ensemble nvt"),
        (lambda atoms: None, ["--cell", "full"], "--cell has no effect with --ensemble nvt"),
        (lambda atoms: None, ["--ensemble", "npt", "--thermostat", "langevin"], "--thermostat has no effect with"),
        (lambda atoms: None, ["-o", "trajectory.dat"], "frames are written to files ending in"),
    ],
    ids=[
        "species",
        "cell",
        "ps",
        "pressure",
        "zero-pressure",
        "thermostat",
        "thermostat-time",
        "barostat-time",
        "cell-of-nvt",
        "thermostat-of-npt",
        "suffix",
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    workplace, tmp_path, monkeypatch, capsys, change, words, message
):
    monkeypatch.chdir(tmp_path)
    atoms = ase.io.read(workplace / "start.extxyz", index=1)
    change(atoms)
    ase.io.write("start.extxyz", atoms)
    command = ["md", str(workplace / "runs/emt"), "start.extxyz", "--temperature", "300", "--trust-code"]
    assert main([*command, "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["start.extxyz"]


def test_unknown_options_are_refused(workplace):
    with pytest.raises(ForgefieldError, match="unknown key 'temprature'. Did you mean 'temperature'"):
        forgefield.md(workplace / "runs/tiny", bulk("Cu"), temprature=300)
