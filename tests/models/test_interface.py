"""The interface of models: an architecture is a folder and one registration; plain modules get the declared defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ase import Atoms
from torch import nn

from forgefield import Calculator
from forgefield.cli import main
from forgefield.errors import ForgefieldError
from forgefield.kinds import ImportPath
from forgefield.models import AtomisticModel, EdgeContext, Potential, build_model, interface, registry, resolve_model
from forgefield.models.edges import StepMemory
from forgefield.models.interface import PlainModule, declared
from forgefield.models.registry import Architecture, FileFormat
from forgefield.training.engines.engine import Engine
from tests.support.engine_cases import difference, labelled, step_function
from tests.support.helpers import tiny_config
from tests.support.structures import SPECIES, STATISTICS, make_batch, make_frame, make_potential
from tests.support.toy_models import Morse
from tests.support.train_many import train_only

FOLDER = "tests.support.toy_architecture"


@pytest.fixture
def gaussians() -> Iterator[None]:
    """The toy architecture, added by the one call that an architecture needs."""
    importers = {"toy": FileFormat(ImportPath(f"{FOLDER}.importer.IMPORTER"), "weights as JSON (.json)")}
    registry.register("gaussians", Architecture(ImportPath(f"{FOLDER}.model.Gaussians"), importers))
    yield
    del registry.ARCHITECTURES["gaussians"]


@pytest.mark.usefixtures("gaussians")
class TestAnArchitectureInOneFolder:
    def potential(self, **heads: object) -> Potential:
        known = {"species": SPECIES, "cutoff": 3.0, "statistics": STATISTICS}
        resolved = resolve_model({"name": "gaussians", "preset": "S"}, heads=heads, **known)  # type: ignore[arg-type]
        return build_model(resolved, precision="float64", seed=1)

    def test_has_forces_stress_and_heads(self) -> None:
        batch = make_batch(make_frame(4), make_frame(3, seed=1))
        potential = self.potential(gap={"reduce": "mean", "shift": [[1.0], [1.0]], "scale": 0.5}).eval()
        outputs = potential(batch, stress=True)
        assert outputs["gap"].shape == (2,)
        step = 1e-4
        energies = []
        for sign in (1, -1):
            moved = batch["positions"].clone()
            moved[0, 0] += sign * step
            energies.append(float(potential(batch | {"positions": moved}, forces=False)["energy"].sum()))
        slope = (energies[0] - energies[1]) / (2 * step)
        assert float(outputs["forces"][0, 0]) == pytest.approx(-slope, rel=1e-6, abs=1e-8)
        assert torch.isfinite(outputs["stress"]).all()

    def test_its_kernel_hook_gives_the_gradients_of_double_backward(self) -> None:
        potential, batch = self.potential(), labelled(4, 3)
        tangent = Engine(step_function(potential, derivative="tangent"))
        assert difference(tangent, Engine(step_function(potential)), batch) < 1e-10
        assert potential.model.passes_by_hook == 1  # type: ignore[union-attr]
        assert potential.interface.kernel_refusal() is None

    def test_trains_and_evaluates_like_any_other(self, tmp_path: Path) -> None:
        config = tiny_config(tmp_path, trainer={"max_epochs": 1}) | {"model": {"name": "gaussians", "width": 3}}
        run = train_only(config)
        potential = run.load_potential("last")
        assert potential.model.options.width == 3  # type: ignore[union-attr]
        fresh = build_model(run.info["model"], precision="float32", seed=3)
        assert not torch.equal(potential.model.weights, fresh.model.weights)  # type: ignore[arg-type]

    def test_is_imported_by_its_importer(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        tree = {"species": ["Cu"], "cutoff": 4.0, "weights": [[0.5, -1.0]], "shifts": [-2.0]}
        (tmp_path / "best.json").write_text(json.dumps(tree))
        assert main(["import", "toy", str(tmp_path / "best.json"), "--out", str(tmp_path)]) == 0
        assert "toy model" in capsys.readouterr().out
        atoms = Atoms("Cu", positions=[[0, 0, 0]])
        atoms.calc = Calculator(tmp_path / "best")
        assert atoms.get_potential_energy() == pytest.approx(-2.0)
        assert main(["import", "toy", "file.json", "--head", "x"]) == 2
        assert "--head does not apply to toy: its files hold one model" in capsys.readouterr().err

    def test_bounds_of_its_options_are_checked(self) -> None:
        with pytest.raises(ForgefieldError, match=r"model\.width must be at least 1, not 0"):
            resolve_model({"name": "gaussians", "width": 0}, species=SPECIES, cutoff=3.0, statistics=STATISTICS)

    def test_a_name_is_registered_once(self) -> None:
        with pytest.raises(ForgefieldError, match="'gaussians', which is the name of a model already"):
            registry.register("gaussians", registry.ARCHITECTURES["nequip"])


class Declares(nn.Module):
    """A plain module with the documented attributes."""

    species, cutoff = SPECIES, 3.0
    only_edge_vectors, adaptive_cutoff = True, 4.0
    inputs, optional_inputs = {"charge": ("frame", 1)}, ("charge",)

    def forward(self, batch):
        return batch["edge_vectors"].sum() + torch.zeros_like(batch["species"], dtype=torch.float64)


def test_attributes_of_a_plain_module_are_honoured_and_weights_keep_their_names():
    plain = Potential(Morse())
    assert list(plain.state_dict()) == ["model.depth", "model.shift"]
    assert isinstance(plain.interface, PlainModule)
    assert not plain.interface.only_edge_vectors
    potential = Potential(Declares())
    assert potential.interface.only_edge_vectors
    assert (potential.adaptive_cutoff, potential.inputs, potential.required_inputs) == (4.0, Declares.inputs, [])


def test_a_model_that_declares_itself_is_not_wrapped():
    potential = make_potential()
    assert declared(potential.model) is potential.model
    assert potential.interface is potential.model


def test_the_example_of_the_interface_trains():
    lines = [line[4:] for line in (interface.__doc__ or "").splitlines() if line.startswith("    ") or not line]
    names: dict[str, type[AtomisticModel]] = {}
    exec("\n".join(lines), names)
    potential = Potential(names["Springs"](species=SPECIES, cutoff=3.0))  # type: ignore[call-arg]
    found = Engine(step_function(potential)).differentiate(labelled(4, 3))
    assert found.gradients[0] is not None
    assert torch.isfinite(found.gradients[0]).all()


def test_a_pass_leaves_the_batch_as_it_is():
    potential, batch = make_potential(), labelled(4, 3)
    keys = set(batch)
    potential(batch, stress=True, memory=StepMemory())
    Engine(step_function(potential, derivative="tangent")).differentiate(batch)
    assert set(batch) == keys


def test_a_batch_with_edge_vectors_uses_them():
    batch = make_batch(make_frame(3))
    vectors = EdgeContext.of(batch).vectors
    assert torch.equal(EdgeContext.of(batch | {"edge_vectors": 2 * vectors}).vectors, 2 * vectors)
