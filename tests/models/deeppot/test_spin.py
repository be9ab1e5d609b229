"""Models of spins: steps of any engine, physical laws, structures of ASE, and the options that they refuse."""

from __future__ import annotations

import pytest
import torch

from forgefield.data.batch import SHAPES
from forgefield.tasks.metrics import ErrorMetrics
from forgefield.tasks.options import FieldTargetOptions, TargetOptions, TaskOptions
from forgefield.tasks.task import Task
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.script import ScriptEngine
from forgefield.training.engines.step import StepFunction
from tests.support.deepmd_models import loaded, unpacked
from tests.support.engine_cases import difference, labelled


def with_spins(batch, seed=0):
    """The batch with spins, one of them zero, and with magnetic forces of every other atom."""
    generator = torch.Generator().manual_seed(seed)
    spins, forces = torch.randn(2, *batch["positions"].shape, generator=generator, dtype=torch.float64)
    spins[0] = 0.0
    forces[::2] = torch.nan
    return {**batch, "spin": spins, "force_mag": forces}


def step_function(potential, derivative):
    names = ("O", "H")
    options = TaskOptions(energy=TargetOptions(), forces=TargetOptions(weight=2.0))
    options.fields = {"force_mag": FieldTargetOptions(weight=3.0)}
    task = Task(options, names, potential.extra_outputs)
    shapes = {**SHAPES, "spin": ("atoms", 3), "force_mag": ("atoms", 3)}
    return StepFunction(potential.train(), task, ErrorMetrics(task.names, names), derivative=derivative, shapes=shapes)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), [("spin", "tangent")])
def test_one_trace_serves_every_size(name, form, tmp_path):
    potential = loaded(unpacked(tmp_path, f"{name}.dp"))
    engine, eager = ScriptEngine(step_function(potential, form)), Engine(step_function(potential, "double"))
    for number, atoms in enumerate([(1,), (5, 1, 2)]):
        batch = with_spins(labelled(*atoms, seed=number, box=8.0), number)
        assert difference(engine, eager, batch) < 1e-9, atoms
