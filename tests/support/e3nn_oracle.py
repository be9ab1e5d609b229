"""The convolution computed by e3nn, edge by edge."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from e3nn import o3


@contextmanager
def torch_default_dtype(dtype):
    """e3nn keeps its coefficients in the precision that was the default when a module was made."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def to_e3nn(rows, blocks):
    """From channels contiguous to e3nn's order."""
    parts = rows.split([block.dim for block in blocks], dim=1)
    return torch.cat(
        [p.unflatten(1, (2 * b.l + 1, b.mul)).transpose(1, 2).flatten(1) for p, b in zip(parts, blocks)], 1
    )


def e3nn_convolution(features, harmonics, weights, graph, plan):
    """Slow oracle: e3nn's TensorProduct on every edge, then a loop over edges."""
    irreps = o3.Irreps([(b.mul, (b.l, b.p)) for b in plan.in_blocks])
    out = o3.Irreps([(b.mul, (b.l, b.p)) for b in plan.out_blocks])
    instructions = [(path.source, path.l2, number, "uvu", True) for number, path in enumerate(plan.paths)]
    harmonic_irreps = o3.Irreps.spherical_harmonics(plan.l_max)
    with torch_default_dtype(torch.float64):
        product = o3.TensorProduct(
            irreps, harmonic_irreps, out, instructions, shared_weights=False, internal_weights=False
        )
    messages = product(to_e3nn(features, plan.in_blocks)[graph.source], harmonics, weights)
    total = torch.zeros(graph.n_atoms, out.dim, dtype=features.dtype)
    for message, atom in zip(messages, graph.destination.tolist()):
        total[atom] += message
    return total
