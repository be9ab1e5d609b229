"""What radial tables lose by three words for a polynomial, by the number of bits that the highest coefficient gets.

    python benchmarks/packing.py [--preset M] [--knots 1024] [--bits 7 8 9 10 11] [--faster 1 2 4]

Prints deviations from the network in float64 as `forgefield check` does, root mean square and largest, relative to the root
mean square of all radial weights or slopes, and the root mean square of the jumps of slopes at knots; first with four
coefficients.
`--faster`: the first weights of radial networks are multiplied by this, so that curves vary faster. It needs no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from engines import MODELS, resolve
from torch import Tensor

from forgefield.kernels.radial.packing import pack_by_operations, unpack
from forgefield.models.building import build_model
from forgefield.models.nequip import tables as nequip_tables
from forgefield.models.nequip.model import NequIP

SHORTEST = 0.05
"""Of the cutoff, from where on tables are compared."""


def model_of(preset: str, faster: float) -> NequIP:
    model = build_model(resolve(preset, 5.0), precision="float32", seed=1).model
    with torch.no_grad():
        for layer in model.layers:
            layer.radial.weights[0].mul_(faster)
    return model


def packed(table: Tensor, bits: int) -> Tensor:
    """Coefficients as they are read."""
    return unpack(pack_by_operations(table, bits), bits)


@torch.no_grad()
def jump(model: NequIP, knots: int, stored: Callable[[Tensor], Tensor]) -> float:
    """Root mean square of the jumps of slopes at knots, relative to that of slopes."""
    jumps, slopes = [], []
    for table in (one.polynomials() for one in nequip_tables.radial_tables(model, knots)):
        _, c1, c2, c3 = stored(table)[int(SHORTEST * knots) :].double().unbind(1)
        begin, end = (c1 + 2 * t * c2 + 3 * t * t * c3 for t in (-0.5, 0.5))
        jumps.append((end[:-1] - begin[1:]).flatten())
        slopes.append(begin.flatten())
    return float((torch.cat(jumps).square().mean() / torch.cat(slopes).square().mean()).sqrt())


def line(name: str, model: NequIP, knots: int, stored: Callable[[Tensor], Tensor]) -> str:
    with mock.patch.multiple(nequip_tables, pack=stored, unpack=lambda table: table):
        found, _ = nequip_tables.table_deviation(model, knots)
    numbers = " ".join(f"{root:.2e} ({largest:.1e})" for root, largest in (found.values, found.slopes))
    return f"{name:<20} {numbers}  {jump(model, knots, stored):.2e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="M", choices=[name for name in MODELS if name != "A"])
    parser.add_argument("--knots", type=int, default=1024)
    parser.add_argument("--bits", type=int, nargs="+", default=[7, 8, 9, 10, 11])
    parser.add_argument("--faster", type=float, nargs="+", default=[1.0, 2.0, 4.0, 10.0])
    given = parser.parse_args()
    for faster in given.faster:
        model = model_of(given.preset, faster)
        print(f"{given.preset}, {given.knots} intervals, first weights times {faster:g}")
        print(f"{'':<20} {'weights':<18} {'slopes':<19} jumps of slopes")
        print(line("four coefficients", model, given.knots, lambda table: table))
        for bits in given.bits:
            print(line(f"c2 {32 - bits}, c3 {bits} bits", model, given.knots, partial(packed, bits=bits)), flush=True)


if __name__ == "__main__":
    main()
