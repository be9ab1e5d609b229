"""MACE through generated kernels against MACE by reference operations: energies, forces, stress and gradients of a training.

On a machine without a GPU the kernels run in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/kernels`.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from ase.data import chemical_symbols

from forgefield.kernels.contraction import passes as contraction
from forgefield.models.edges import StepMemory
from forgefield.models.mace import stacks
from forgefield.ops.execution import execution
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.verify import largest_difference
from forgefield.training.precision import Precision
from tests.support.engine_cases import labelled, step_function
from tests.support.kernels import DEVICE, needs_kernels
from tests.support.mace_kernel_cases import CASES, mace
from tests.support.nequip_kernel_cases import batch, step
from tests.support.structures import make_batch, make_frame

pytestmark = needs_kernels


def relative(found: torch.Tensor, reference: torch.Tensor) -> float:
    return ((found - reference).norm() / reference.norm().clamp(min=1e-30)).item()


def assert_same_step(potential, given) -> None:
    expected, expected_gradients = step(potential, given, by_kernels=False)
    found, gradients = step(potential, given, by_kernels=True)
    for key in ("energy", "forces"):
        torch.testing.assert_close(found[key], expected[key], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found["stress"][0], expected["stress"][0], rtol=1e-10, atol=1e-10)
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_kernels_compute_what_reference_operations_compute(case):
    assert_same_step(mace("float64", **CASES[case]).to(DEVICE).eval(), batch())


def test_polynomials_without_kernels_are_computed_by_reference_operations(monkeypatch):
    monkeypatch.setattr(contraction, "LONGEST", 0)
    assert_same_step(mace("float64").to(DEVICE).eval(), batch())


def test_the_step_of_an_engine_has_the_gradients_of_a_double_backward():
    potential, given = mace("float64").to(DEVICE), {key: value.to(DEVICE) for key, value in labelled(3).items()}
    found, expected = (
        Engine(step_function(potential, derivative=form)).differentiate(given) for form in ("kernels", "double")
    )
    names = [name for name, _ in potential.named_parameters()]
    assert largest_difference(found, expected, names)[0] < 1e-9


@pytest.mark.parametrize("n_species", [1, 20])
def test_one_species_and_many(n_species):
    numbers = tuple(range(1, n_species + 1))
    species = tuple(chemical_symbols[number] for number in numbers)
    frames = [make_frame(n, seed=n, box=4.5, periodic=n == 3, numbers=numbers) for n in (3, 2, 1)]
    given = {key: value.to(DEVICE) for key, value in make_batch(*frames, species=species).items()}
    assert_same_step(mace("float64", species=species).to(DEVICE).eval(), given)


def test_several_heads():
    potential = mace("float64", branches=["pbe", "scan"]).to(DEVICE).eval()
    given = batch() | {"branch": torch.tensor([1, 0, 1], device=DEVICE)}
    assert_same_step(potential, given)


@pytest.mark.parametrize("case", ["residual, correlation 3", "density", "envelope of weights", "last readout alone"])
def test_tables_are_as_close_to_float64_as_float32_is(case):
    given, options = batch(), CASES[case]
    reference = mace("float64", **options).to(DEVICE).eval()
    single = mace("float32", **options).to(DEVICE).eval()
    exact, plain, found = (
        step(potential, given, by_kernels=by_kernels)
        for potential, by_kernels in ((reference, False), (single, False), (single, True))
    )
    exact_, plain_, found_ = (torch.cat([g.flatten().double() for g in made[1]]) for made in (exact, plain, found))
    assert relative(found_, exact_) < 3 * relative(plain_, exact_) + 2e-6
    forces = exact[0]["forces"]
    assert relative(found[0]["forces"], forces) < 3 * relative(plain[0]["forces"], forces) + 1e-6


def test_a_step_in_tf32():
    given, options = batch(), CASES["plain"]
    exact, gradients = step(mace("float64", **options).to(DEVICE).eval(), given, by_kernels=False)
    with Precision("tf32").applied("tf32"):
        outputs, found = step(mace("float32", **options).to(DEVICE).eval(), given, by_kernels=True)
    found, gradients = (torch.cat([g.flatten().double() for g in some]) for some in (found, gradients))
    assert relative(found, gradients) < 4e-3
    assert relative(outputs["forces"], exact["forces"]) < 2e-3


def test_rows_stored_in_bfloat16_and_products_in_bfloat16():
    """Rounding by 2^-9 here and there, and no more than that."""
    given = batch()
    _, exact = step(mace("float64").to(DEVICE).eval(), given, by_kernels=False)
    for setting in (execution(storage="bfloat16"), Precision("bf16-mixed").applied("bf16-mixed")):
        with setting:
            _, found = step(mace("float32").to(DEVICE).eval(), given, by_kernels=True)
        found, expected = (torch.cat([g.flatten().double() for g in some]) for some in (found, exact))
        assert 1e-4 < relative(found, expected) < 2e-2


def test_long_sums_of_matrix_gradients(monkeypatch):
    monkeypatch.setattr(stacks, "ROWS", 3)
    assert_same_step(mace("float64", **CASES["plain"]).to(DEVICE).eval(), batch())


def test_forces_alone_are_those_of_a_training():
    potential, given = mace("float32").to(DEVICE).eval(), batch()
    with execution(kernels=True):
        alone = potential(given)
    trained, _ = step(potential, given, by_kernels=True)
    assert torch.equal(alone["forces"], trained["forces"])
    assert torch.equal(alone["energy"], trained["energy"])


def test_nothing_of_a_pass_is_left_when_it_is_over():
    potential = mace("float64").to(DEVICE).eval()
    memory = StepMemory()
    gc.disable()
    try:
        with execution(kernels=True):
            potential(batch(), memory=memory)
        layer = weakref.ref(memory.state.layers[0])
        memory.clear()
        assert layer() is None
    finally:
        gc.enable()
