"""Counts the work of a training step of MACE from shapes, and the least time that a GPU needs for it.

    python benchmarks/mace_count.py [--atoms 6144] [--edges 332374] [--hbm 4.2] [--l2 10] [--fp32 50]

The model is that of mace_gpu.py, in float32 with radial tables of 1024 intervals. Rates are in TB/s and TFLOPS: those of a
copy, of reads from the L2 cache and of products in float32 on an H200. A convolution needs everything once from memory (HBM)
and, for each edge, the features of the neighbour and three rows of the table from L2; the longer of both times counts.
"""

from __future__ import annotations

import argparse

import torch
from mace_gpu import MODEL, SPECIES

from forgefield.kernels.contraction.program import PASSES, program
from forgefield.models.building import build_model
from forgefield.models.mace.passes import form_of_interaction
from forgefield.models.resolving import resolve_model

INTERVALS, BYTES = 1024, 4
PRODUCTS = 6
"""Products with each matrix in a step: values, forces, tangents, cotangents again, and the gradient of values and tangents."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atoms", type=int, default=6144)
    parser.add_argument("--edges", type=int, default=332374)
    parser.add_argument("--hbm", type=float, default=4.2)
    parser.add_argument("--l2", type=float, default=10.0)
    parser.add_argument("--fp32", type=float, default=50.0)
    args = parser.parse_args()
    n, e = args.atoms, args.edges
    resolved = resolve_model(MODEL, species=SPECIES, cutoff=5.0)
    model = build_model(resolved, precision="float32", seed=0).model
    total = 0.0

    def row(name: str, hbm: float, l2: float = 0.0, flops: float = 0.0) -> None:
        nonlocal total
        times = (hbm / args.hbm / 1e9, (hbm + l2) / args.l2 / 1e9, flops / args.fp32 / 1e9)
        total += max(times)
        print(
            f"  {name:28} {hbm / 1e6:8.0f} MB HBM {l2 / 1e6:8.0f} MB L2 {flops / 1e9:8.1f} GFLOP {max(times):7.3f} ms"
        )

    for number, (interaction, polynomials) in enumerate(zip(model.interactions, model.products)):
        form = form_of_interaction(interaction)
        x, z, w, h = form.features.dim, form.outputs.dim, form.n_weights, form.n_harmonics
        first = number == 0
        print(f"layer {number}: features {x}, sums {z}, {w} radial weights, {form.n_chunks} programs an atom")
        edges, table = e * (h + 2) * BYTES, 3 * INTERVALS * w * BYTES
        atoms, read = n * (x + z) * BYTES, e * (x + 3 * w) * BYTES
        rows = 0 if first else e * x * BYTES
        row("convolution, values", atoms + edges + table, read)
        row("convolution, forces", atoms + edges + table + rows + e * 4 * form.n_chunks * BYTES, read)
        row("convolution, tangents", atoms + 2 * edges + table, read + (0 if first else e * x * BYTES))
        row("convolution, back", 2 * atoms + 2 * edges + table + e * (x + 2 * w) * BYTES, read + e * x * BYTES)
        row("sums of rows", rows + e * x * BYTES)
        row("gradient of the table", e * 2 * w * BYTES)
        channels = polynomials.weights[0].shape[2]
        a = sum(irrep.dim for irrep in polynomials.inputs) * channels
        b = sum(irrep.dim for irrep in polynomials.outputs) * channels
        numbers = {"values": a + b, "forces": 2 * a + b, "tangents": 2 * a + b, "back": 3 * a + 2 * b}
        for kind in PASSES:
            terms = sum(len(names) for made in program(polynomials.plan, kind) for _, names in made.terms)
            row(f"polynomials, {kind}", n * numbers[kind] * BYTES, flops=2 * terms * n * channels)
        maps = [
            (interaction.linear_up, [2 * block.l + 1 for block in interaction.sent], 1 if not first else 0),
            (interaction.linear, [2 * block.l + 1 for block in interaction.summed], 1),
            (polynomials.linear, [irrep.dim for irrep in polynomials.outputs], 1),
        ]
        flops = sum(2 * k * c * d * n * used for linear, ks, used in maps for k, (c, d) in zip(ks, linear.channels))
        row("linear maps", 0, flops=PRODUCTS * flops)
    print(f"least time of a step without geometry, tables, readouts and the optimiser: {total:.1f} ms")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
