"""The plan of an equivariant convolution: which blocks couple to which, in which order and with which coefficients.

Everything here follows from irreps alone. Source blocks of equal width form groups that go through one batched product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from forgefield.ops.harmonics import clebsch_gordan


class Block(NamedTuple):
    """`mul` channels that transform as degree `l` and parity `p` (+1 or -1), stored as (2l + 1, mul)."""

    mul: int
    l: int
    p: int

    @property
    def dim(self) -> int:
        return (2 * self.l + 1) * self.mul


class Path(NamedTuple):
    """Source block number, degree of the harmonic, degree and parity of the result."""

    source: int
    l2: int
    l3: int
    p3: int


@dataclass(frozen=True, eq=False)
class Group:
    """Source blocks of equal width that go through one batched product.

    `features`, `couplings`, `weights`, `outputs`: its columns in a row of each. `coupling` maps harmonics to the group's
    couplings; `path_of_row` (n_out,) and `row_sum` (n_paths, n_out) assign rows to paths.
    """

    channels: int
    n_in: int
    n_out: int
    features: slice
    couplings: slice
    weights: slice
    outputs: slice
    coupling: Tensor
    path_of_row: Tensor
    row_sum: Tensor

    @property
    def n_paths(self) -> int:
        return self.row_sum.shape[0]

    def tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """`path_of_row` and `row_sum` on the device and in the precision of `like`."""
        return _tables(self, like.device, like.dtype)

    def rows_of_paths(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """(n_paths, longest) both: rows of each path, padded with row 0, and a mask that is one for rows, zero for padding."""
        return _rows_of_paths(self, like.device, like.dtype)


@lru_cache(maxsize=256)
def _tables(group: Group, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    with _disable_current_modes():  # they outlive the trace that may be the first to need them
        return group.path_of_row.to(device), group.row_sum.to(device, dtype)


@lru_cache(maxsize=256)
def _rows_of_paths(group: Group, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    with _disable_current_modes():
        members = [torch.nonzero(row).flatten() for row in group.row_sum]
        rows = torch.nn.utils.rnn.pad_sequence(members, batch_first=True)
        real = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in members], batch_first=True)
        return rows.to(device), real.to(device, dtype)


@dataclass(frozen=True, eq=False)
class ConvolutionPlan:
    """Everything about a convolution that is independent of the data.

    `out_blocks` holds one block per path, in path order; a row of the output is these blocks one after another.
    """

    in_blocks: tuple[Block, ...]
    l_max: int
    paths: tuple[Path, ...]
    out_blocks: tuple[Block, ...]
    groups: tuple[Group, ...]
    n_weights: int
    n_couplings: int

    @property
    def in_dim(self) -> int:
        return sum(block.dim for block in self.in_blocks)

    @property
    def out_dim(self) -> int:
        return sum(block.dim for block in self.out_blocks)

    def coupling_matrix(self) -> Tensor:
        """((l_max + 1)^2, n_couplings) float64: harmonics times this are couplings."""
        return torch.cat([group.coupling for group in self.groups], dim=1)


def list_paths(in_blocks: tuple[Block, ...], l_max: int, out: frozenset[tuple[int, int]]) -> tuple[Path, ...]:
    """All couplings of the blocks with harmonics up to `l_max` whose result (l, p) is in `out`: by block, l2, l3."""
    return tuple(
        Path(number, l2, l3, block.p * (-1) ** l2)
        for number, block in enumerate(in_blocks)
        for l2 in range(l_max + 1)
        for l3 in range(abs(block.l - l2), block.l + l2 + 1)
        if (l3, block.p * (-1) ** l2) in out
    )


@lru_cache(maxsize=64)
def plan_convolution(
    in_blocks: tuple[Block, ...], l_max: int, out: frozenset[tuple[int, int]], widest: int = 16
) -> ConvolutionPlan:
    """Plan of the convolution of `in_blocks` with harmonics up to `l_max`, keeping results in `out`.

    The scale is e3nn's for component normalisation: each path carries sqrt(2 l3 + 1). Neighbouring blocks of equal
    width go into one product of at most `widest` input components: fewer and larger operations, at the price of
    multiplying with structural zeros.
    """
    paths = list_paths(in_blocks, l_max, out)
    runs = _group_blocks(in_blocks, sorted({path.source for path in paths}), widest)
    starts = [sum(block.dim for block in in_blocks[:number]) for number in range(len(in_blocks) + 1)]
    groups: list[Group] = []
    couplings = weights = outputs = 0
    for run in runs:
        mul = in_blocks[run[0]].mul
        group_paths = [path for path in paths if path.source in run]
        n_in = sum(2 * in_blocks[number].l + 1 for number in run)
        n_out = sum(2 * path.l3 + 1 for path in group_paths)
        coupling = torch.zeros((l_max + 1) ** 2, n_out, n_in, dtype=torch.float64)
        rows, row = [], 0
        for path in group_paths:
            l1 = in_blocks[path.source].l
            column = sum(2 * in_blocks[number].l + 1 for number in run if number < path.source)
            values = clebsch_gordan(l1, path.l2, path.l3).permute(1, 2, 0) * (2 * path.l3 + 1) ** 0.5
            rows.append(2 * path.l3 + 1)
            coupling[path.l2**2 : (path.l2 + 1) ** 2, row : row + rows[-1], column : column + 2 * l1 + 1] = values
            row += rows[-1]
        sizes = (n_in * n_out, len(group_paths) * mul, n_out * mul)
        groups.append(
            Group(
                channels=mul,
                n_in=n_in,
                n_out=n_out,
                features=slice(starts[run[0]], starts[run[-1] + 1]),
                couplings=slice(couplings, couplings + sizes[0]),
                weights=slice(weights, weights + sizes[1]),
                outputs=slice(outputs, outputs + sizes[2]),
                coupling=coupling.flatten(1),
                path_of_row=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows)),
                row_sum=torch.block_diag(*(torch.ones(1, n) for n in rows)),
            )
        )
        couplings, weights, outputs = couplings + sizes[0], weights + sizes[1], outputs + sizes[2]
    return ConvolutionPlan(
        in_blocks=in_blocks,
        l_max=l_max,
        paths=paths,
        out_blocks=tuple(Block(in_blocks[path.source].mul, path.l3, path.p3) for path in paths),
        groups=tuple(groups),
        n_weights=weights,
        n_couplings=couplings,
    )


def _group_blocks(in_blocks: tuple[Block, ...], used: list[int], widest: int) -> list[list[int]]:
    """Indices of blocks to be multiplied together."""
    runs: list[list[int]] = []
    for number in used:
        last = runs[-1] if runs else []
        components = sum(2 * in_blocks[i].l + 1 for i in [*last, number])
        fits = last and last[-1] == number - 1 and in_blocks[number].mul == in_blocks[last[0]].mul
        if fits and components <= widest:
            last.append(number)
        else:
            runs.append([number])
    return runs
