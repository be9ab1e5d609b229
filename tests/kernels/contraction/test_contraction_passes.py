"""The symmetric contraction by generated kernels against the reference operations, in all four passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forgefield.kernels.contraction.passes import Contraction, contraction_refusal
from forgefield.kernels.dense.products import sort_by_species
from forgefield.ops.symmetric_contraction import ContractionPlan, Irrep, plan_contraction, symmetric_contraction
from tests.support.kernels import DEVICE, needs_kernels

pytestmark = needs_kernels
INPUTS = tuple(Irrep(l, (-1) ** l) for l in range(3))
CASES = {
    "correlation 1": (INPUTS, (Irrep(0, 1), Irrep(1, -1)), 1, 32),
    "correlation 2": (INPUTS, (Irrep(0, 1), Irrep(1, -1)), 2, 32),
    "correlation 3": (INPUTS, (Irrep(0, 1), Irrep(1, -1), Irrep(2, 1)), 3, 32),
    "scalars alone": (INPUTS, (Irrep(0, 1),), 3, 32),
    "both parities": ((Irrep(0, -1), Irrep(0, 1), Irrep(1, -1), Irrep(1, 1)), (Irrep(0, 1), Irrep(0, -1)), 3, 20),
    "correlation 4": (INPUTS[:2], (Irrep(0, 1), Irrep(1, -1)), 4, 8),
    "no polynomial": ((Irrep(0, 1),), (Irrep(0, 1), Irrep(1, -1)), 2, 130),
}
N_ATOMS = 11


def derivatives(plan: ContractionPlan, a: Tensor, da: Tensor, table: Tensor, species: Tensor, g: Tensor, h: Tensor):
    """Values, tangents, cotangents of features from g, and cotangents of features and weights from h of values and g of
    tangents; rows (components, n_atoms, channels)."""
    a, table = a.requires_grad_(True), table.requires_grad_(True)
    rows = table.index_select(0, species if len(table) > 1 else 0 * species).transpose(0, 1)
    values = torch.cat(symmetric_contraction(a, rows, plan))
    cotangents = torch.ones_like(values, requires_grad=True)
    (back,) = torch.autograd.grad(values, a, cotangents, create_graph=True)
    (tangents,) = torch.autograd.grad((back * da).sum(), cotangents, create_graph=True)
    (to_a,) = torch.autograd.grad((values * g).sum(), a, retain_graph=True)
    total = (values * h).sum() + (tangents * g).sum()
    return values.detach(), tangents.detach(), to_a, *torch.autograd.grad(total, (a, table), allow_unused=True)


def as_blocks(rows: Tensor, irreps: list[Irrep]) -> list[Tensor]:
    """Contiguous (n_atoms, 2l + 1, channels) for each irrep."""
    return [part.transpose(0, 1).contiguous() for part in rows.detach().split([irrep.dim for irrep in irreps])]


def as_rows(blocks: list[Tensor]) -> Tensor:
    return torch.cat([block.transpose(0, 1) for block in blocks])


@pytest.mark.parametrize(
    ("case", "n_species"), [*((case, 3) for case in CASES), *((case, 1) for case in ("correlation 2", "both parities"))]
)
def test_all_passes_are_those_of_reference_operations(case, n_species):
    inputs, outputs, correlation, channels = CASES[case]
    plan = plan_contraction(inputs, outputs, correlation)
    assert contraction_refusal(plan) is None
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE)

    irreps = [output.irrep for output in plan.outputs]
    dims = sum(irrep.dim for irrep in inputs), sum(irrep.dim for irrep in irreps)
    a, da = (random(dims[0], N_ATOMS, channels) for _ in range(2))
    g, h = (random(dims[1], N_ATOMS, channels) for _ in range(2))
    table = random(n_species, plan.n_weights, channels)
    species = torch.randint(n_species, (N_ATOMS,), generator=generator).to(DEVICE) // 2 * 2  # one species has no atom
    expected = derivatives(plan, a, da, table.clone(), species, g, h)

    contraction = Contraction(plan, table, species)
    x, dx = as_blocks(a, list(inputs)), as_blocks(da, list(inputs))
    to_tangents, to_values = as_blocks(g, irreps), as_blocks(h, irreps)
    values, tangents = ([torch.empty_like(block) for block in to_values] for _ in range(2))
    to_a, to_x = ([torch.empty_like(block) for block in x] for _ in range(2))
    contraction.values(x, values)
    contraction.forces(x, to_tangents, to_a)
    contraction.tangents(x, dx, tangents)
    atoms = sort_by_species(species, n_species) if n_species > 1 else None
    to_table = contraction.back(x, dx, to_values, to_tangents, to_x, atoms)
    found = [as_rows(values), as_rows(tangents), as_rows(to_a), as_rows(to_x), to_table]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other, rtol=1e-11, atol=1e-11)


def test_polynomials_that_are_too_long_are_refused():
    plan = plan_contraction(tuple(Irrep(l, p) for l in range(3) for p in (-1, 1)), (Irrep(0, 1), Irrep(2, 1)), 4)
    assert "terms" in (contraction_refusal(plan) or "")
