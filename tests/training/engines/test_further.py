"""Further targets in every engine: values of frames and atoms beside an energy and without one, the same by every way."""

from __future__ import annotations

import pytest
import torch

from forgefield.data.padding import blank_frames, join_batches
from forgefield.training.engines.compiled import CompileEngine
from forgefield.training.engines.engine import Engine, split_batch
from forgefield.training.engines.script import ScriptEngine
from tests.support.engine_cases import ALL, difference
from tests.support.extra_outputs import FACTS, SHAPES, function, predictor, with_fields


@pytest.mark.parametrize("name", ["nequip", "allegro"])
@pytest.mark.parametrize("targets", [ALL, ("forces",), ("energy", "virial")], ids="+".join)
def test_tangent_form_gives_the_gradients_of_double_backward(name, targets):
    potential = predictor(name, has_energy=True)
    double, tangent = (Engine(function(potential, targets, derivative=form)) for form in ("double", "tangent"))
    assert difference(tangent, double, with_fields(5, 3, 4)) < 1e-10


@pytest.mark.parametrize(
    ("name", "targets", "form"),
    [("nequip", ALL, "double"), ("allegro", ("forces",), "tangent"), ("own", (), "tangent")],
)
def test_script_equals_eager_for_every_size(name, targets, form):
    potential = predictor(name, has_energy=bool(targets), num_layers=1)  # `test_script.py` has two
    engine = ScriptEngine(function(potential, targets, derivative=form))
    eager = Engine(function(potential, targets))
    for number, atoms in enumerate([(1,), (4, 3), (5, 1, 2, 6)]):
        assert difference(engine, eager, with_fields(*atoms, seed=number)) < 1e-9, atoms


@pytest.mark.slow
def test_compiled_equals_eager_from_one_compilation(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    potential = predictor("own", has_energy=False)  # few kernels; those of a NequIP are compiled in `test_compile.py`
    engine = CompileEngine(function(potential, ()))
    for atoms in [(5, 4), (1,), (6, 1, 3)]:
        assert difference(engine, Engine(engine.function), with_fields(*atoms)) < 1e-9, atoms
    assert engine.training.compilations == 1


@pytest.mark.parametrize("targets", [ALL, ()], ids=["with energy", "alone"])
def test_blank_frames_are_inert_and_carry_no_target(targets):
    potential, batch = predictor("nequip", has_energy=bool(targets)), with_fields(5, 3)
    step = function(potential, targets)
    blank = blank_frames(batch, frames=3, atoms=7, edges=200, cutoff=3.0, shapes=SHAPES, targets=step.task.outputs)
    assert all(bool(blank[name].isnan().all()) for name in FACTS)
    assert not bool(blank["field_strength"].any())
    a, b = Engine(step).differentiate(batch), Engine(step).differentiate(join_batches(batch, blank))
    torch.testing.assert_close(a.measured.sums, b.measured.sums, rtol=1e-14, atol=0)
    torch.testing.assert_close(a.measured.errors, b.measured.errors, rtol=1e-14, atol=0)
    for x, y in zip(a.gradients, b.gradients):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


def test_parts_of_a_batch_add_up_to_the_whole():
    step = function(predictor("nequip", has_energy=True), ALL)
    engine, batch = Engine(step), with_fields(5, 3, 4, 2)
    known = step.task.counts(batch)
    whole = engine.differentiate(batch, lambda: known)
    parts = [engine.differentiate(part, lambda: known) for part in split_batch(batch, 3, SHAPES)]
    for number, gradient in enumerate(whole.gradients):
        torch.testing.assert_close(sum(p.gradients[number] for p in parts), gradient, rtol=1e-11, atol=1e-12)


def test_gradients_are_those_of_finite_differences():
    potential, batch = predictor("nequip", has_energy=False), with_fields(4, 3)
    step = function(potential, ())
    gradients = dict(zip(step.trained, Engine(step).differentiate(batch).gradients))
    assert "model.readout.weights.0" not in gradients  # energies are not asked for
    with torch.no_grad():
        for name in ("model.layers.0.linear_in.weight", "heads.of_gap.weights.0", "heads.of_tensor.biases.1"):
            weight = dict(potential.named_parameters())[name]
            direction = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            losses = []
            for size in (1e-5, -2e-5):
                weight += size * direction
                losses.append(float(Engine(step).differentiate(batch).loss))
            weight += 1e-5 * direction
            slope = (losses[0] - losses[1]) / 2e-5
            assert float((gradients[name] * direction).sum()) == pytest.approx(slope, rel=1e-6)
