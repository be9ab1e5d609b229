"""NequIP through generated kernels against NequIP by plain operations: energies, forces, stress and gradients of a training.

On a machine without a GPU the kernels run in Triton's interpreter, which has to be asked for before Triton is imported:
`TRITON_INTERPRET=1 pytest tests/kernels`.
"""

import gc
import weakref

import pytest
import torch

from forgefield.kernels.convolution import passes as convolution
from forgefield.models.edges import StepMemory
from forgefield.ops.execution import execution
from forgefield.training.precision import Precision
from tests.support.kernels import DEVICE, needs_kernels
from tests.support.nequip_kernel_cases import CASES, batch, step
from tests.support.structures import make_potential

pytestmark = needs_kernels


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours - reference).norm() / reference.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("case", CASES)
def test_kernels_give_what_reference_operations_give(case):
    potential = make_potential(precision="float64", **CASES[case]).to(DEVICE).eval()
    given = batch()
    plain, plain_gradients = step(potential, given, by_kernels=False)
    ours, our_gradients = step(potential, given, by_kernels=True)
    for key in ("energy", "forces"):
        torch.testing.assert_close(ours[key], plain[key], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours["stress"][0], plain["stress"][0], rtol=1e-10, atol=1e-10)
    for ours_, plain_ in zip(our_gradients, plain_gradients):
        torch.testing.assert_close(ours_, plain_, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_tables_are_as_close_to_float64_as_float32_is(case):
    given = batch()
    reference = make_potential(precision="float64", **CASES[case]).to(DEVICE).eval()
    single = make_potential(precision="float32", **CASES[case]).to(DEVICE).eval()
    exact, plain, ours = (
        step(potential, given, by_kernels=by_kernels)
        for potential, by_kernels in ((reference, False), (single, False), (single, True))
    )
    exact_, plain_, ours_ = (torch.cat([g.flatten().double() for g in found[1]]) for found in (exact, plain, ours))
    assert relative(ours_, exact_) < 3 * relative(plain_, exact_) + 2e-6
    forces = exact[0]["forces"]
    assert relative(ours[0]["forces"], forces) < 3 * relative(plain[0]["forces"], forces) + 1e-6


def test_blocks_one_after_the_other_give_the_same_bits(monkeypatch):
    """As where the last pass would write more for edges than is to lie there at a time."""
    potential, given = (
        make_potential(precision="float32", **CASES["plain"]).to(DEVICE).eval(),
        batch(),
    )
    _, together = step(potential, given, by_kernels=True)
    monkeypatch.setattr(convolution, "MOST_ROWS", 0)
    _, in_turn = step(potential, given, by_kernels=True)
    assert all(torch.equal(one, other) for one, other in zip(in_turn, together, strict=True))


def test_gradients_of_rows_stored_in_bfloat16():
    """Rounding by 2^-9 here and there, and no more than that."""
    case, given = CASES["degrees of unequal width"], batch()
    exact, gradients = step(make_potential(precision="float64", **case).to(DEVICE).eval(), given, by_kernels=False)
    with execution(storage="bfloat16"):
        ours, found = step(make_potential(precision="float32", **case).to(DEVICE).eval(), given, by_kernels=True)
    found, gradients = (torch.cat([g.flatten().double() for g in some]) for some in (found, gradients))
    assert 1e-4 < relative(found, gradients) < 8e-3
    assert 1e-4 < relative(ours["forces"], exact["forces"]) < 4e-3


def test_a_step_in_tf32():
    """Products are rounded to eleven leading bits, tables are not; cotangents of weights to eight, which Triton's interpreter
    does towards zero."""
    case, given = CASES["plain"], batch()
    exact, gradients = step(make_potential(precision="float64", **case).to(DEVICE).eval(), given, by_kernels=False)
    with Precision("tf32").applied("tf32"):
        ours, found = step(make_potential(precision="float32", **case).to(DEVICE).eval(), given, by_kernels=True)
    found, gradients = (torch.cat([g.flatten().double() for g in some]) for some in (found, gradients))
    assert 1e-5 < relative(found, gradients) < 4e-3
    assert 1e-5 < relative(ours["forces"], exact["forces"]) < 2e-3


def test_forces_alone_are_those_of_a_training():
    potential, given = make_potential(precision="float32", **CASES["plain"]).to(DEVICE).eval(), batch()
    with execution(kernels=True):
        alone = potential(given)
        with torch.no_grad():
            energy = potential(given, forces=False)["energy"]
    trained, _ = step(potential, given, by_kernels=True)
    assert torch.equal(alone["forces"], trained["forces"])
    assert torch.equal(alone["energy"], trained["energy"])
    torch.testing.assert_close(energy, trained["energy"], rtol=1e-6, atol=0)


def test_nothing_of_a_pass_is_left_when_it_is_over():
    potential = make_potential(precision="float64", **CASES["plain"]).to(DEVICE).eval()
    memory = StepMemory()
    gc.disable()
    try:
        with execution(kernels=True):
            potential(batch(), memory=memory)
        network = weakref.ref(memory.state.network)
        memory.clear()
        assert network() is None
    finally:
        gc.enable()


def test_trained_frequencies_are_never_remembered():
    potential = make_potential(precision="float32", **CASES["trained frequencies"]).to(DEVICE).eval()
    for parameter in potential.parameters():
        parameter.requires_grad_(False)
    given = batch()
    with execution(kernels=True):
        before = potential(given)["energy"]
        potential.model.bessel_frequencies.data.mul_(1.05)  # as a captured optimiser changes them
        after = potential(given)["energy"]
    torch.testing.assert_close(after, potential(given)["energy"], rtol=1e-5, atol=1e-5)
    assert (after - before).abs().max() > 1e-4
