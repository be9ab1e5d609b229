"""The convolution by generated kernels, in the four passes of a training: values, the cotangents that forces are made of,
tangents, and cotangents once more, of values and tangents together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgefield.kernels.convolution.form import Form, FormBlock
from forgefield.kernels.convolution.source import ARGUMENTS, Kind, write_kernel
from forgefield.kernels.convolution.sums import add_shares, sum_into_field
from forgefield.kernels.core.availability import storage_type, weight_cotangent_type
from forgefield.kernels.core.fields import TANGENT, VALUE, Field
from forgefield.kernels.core.modules import module_from
from forgefield.kernels.core.streams import Beside
from forgefield.ops.graph import EdgeGraph, is_traced

FEW = 4096
"""Programs, one warp each, that leave a GPU idle while they wait for memory; edges are then shared out."""
SHARES = 4
"""Programs that share the edges of one atom and some of its channels, where programs are few. Where they are not, cotangents,
which are written for every edge and need no sum over programs, are shared out to two."""
LONG = 200
"""With so many couplings the code of all blocks is more than the cache for instructions holds: programs of different blocks
would drive out each other's. Blocks are then launched one after the other where they compute cotangents."""
MOST_ROWS = 5 * 2**28
"""Bytes that the last pass writes for edges at a time: where all blocks together would write more, they go one after the other,
and what is written for one is summed before the next."""
MOST_REGISTERS = {("forces", 9): 96}
"""By pass and number of harmonics, where tables are read: a few registers fewer than a kernel would take, for one more warp on
every scheduler."""


@lru_cache(maxsize=512)
def kernel(form: Form, kind: Kind) -> Any:
    """The Triton function of this form and kind; Triton compiles it when it is first launched."""
    return getattr(module_from(write_kernel(form, kind)), kind.name)


def in_manner(kind: Kind, form: Form, n_atoms: int) -> Kind:
    """The same with the number of shares that suits so many atoms."""
    if n_atoms * form.n_chunks < FEW:
        return replace(kind, shares=SHARES)
    return replace(kind, shares=2 if kind.backward and form.n_couplings < LONG else 1)


def writes_much(form: Form, n_edges: int, dtype: torch.dtype) -> bool:
    """Whether the last pass, computed in this type with a table, writes more for so many edges than is to lie there at once."""
    of_features = form.features.dim * storage_type(dtype).itemsize
    of_weights = 2 * form.n_weights * weight_cotangent_type(dtype).itemsize
    return n_edges * (of_features + of_weights) > MOST_ROWS


@dataclass(frozen=True)
class Radial:
    """Weights of a layer: rows (n_rows, n_weights) and which one an edge has; or, where `place` (n_edges,) is given, a table of
    polynomials (n_intervals, 4, n_weights), the interval of each edge and its place in it. unit: of a table that is packed
    (`packing.py`), (n_intervals, 3, n_weights)."""

    weights: Tensor
    row: Tensor
    place: Tensor | None = None
    unit: Tensor | None = None

    @property
    def in_table(self) -> bool:
        return self.place is not None

    @property
    def packed(self) -> bool:
        return self.unit is not None

    def stored_as(self, dtype: torch.dtype) -> Radial:
        """With a table of coefficients in this type."""
        return replace(self, weights=self.weights.to(dtype)) if self.in_table and not self.packed else self


@dataclass(frozen=True)
class Motion:
    """Tangents: of harmonics (n_edges, n_harmonics), of rows of weights or of the places of edges in a table."""

    harmonics: Tensor
    weights: Tensor | None = None
    place: Tensor | None = None


class Rows(NamedTuple):
    """Cotangents that the last pass writes for every edge: of weights and of their tangents, (n_edges, n_weights) both, or only
    those that belong to one block."""

    of_w: Tensor
    of_dw: Tensor
    block: FormBlock | None


Take = Callable[[Rows], Beside[None] | None]
"""Begins to sum rows up. What it returns is asked for before the rows' memory is used again."""


class Convolution:
    """Over the edges of one graph. harmonics: (n_edges, n_harmonics), the first of them one. still: features have no tangents
    and nobody asks what they would have to be for the forces. Where kernels are set to store in bfloat16, so are features as
    neighbours read them, a table of coefficients, and what is written for every edge but for cotangents of rows of weights.
    With products in tf32 those of the weights of a table are."""

    def __init__(self, form: Form, graph: EdgeGraph, harmonics: Tensor, radial: Radial, *, still: bool) -> None:
        self.form, self.graph, self.harmonics, self.still = form, graph, harmonics, still
        self.stored = storage_type(harmonics.dtype)
        self.narrow = self.stored != harmonics.dtype
        self.radial = radial.stored_as(self.stored)
        self._copy: Tensor | None = None

    def values(self, x: Field, out: Field) -> None:
        self._copy = None
        self._forward(self._kind(), x, out)

    def tangents(self, x: Field, out: Field, motion: Motion) -> None:
        self._copy = self._copy if self.still else None
        self._forward(self._kind(dual=True, still=self.still), x, out, **_moving(motion))

    def forces(self, x: Field, g: Field, to_x: Field | None, parts: Tensor) -> Tensor:
        """From the cotangents of the output, in the tangents' place of g, those of features, to the same place, and of
        harmonics, to `parts` (n_chunks, n_edges, n_harmonics). Those of rows of weights, (n_edges, n_weights), are returned.
        With a table there are none, and `parts` (n_chunks, n_edges, 4) are of directions and places in the table."""
        kind = self._kind(backward=True, features=to_x is not None)
        of_x = self._per_edge(x, to_x)
        of_w = x.flat.new_empty((0 if self.radial.in_table else self.graph.n_edges, self.form.n_weights))
        self._launch(kind, {"x": self._read(x), "g": g.flat, "to_x": of_x, "to_w": of_w, "to_y": parts})
        self._sum(of_x, to_x, TANGENT)
        return of_w

    def back(self, x: Field, g: Field, to_x: Field, motion: Motion, take: Take) -> Beside[None] | None:
        """From the cotangents of values and tangents those of the features' values, to their place, and for every edge those of
        weights and of their tangents, which are given to `take`, block by block where they are large. What that returned last
        is returned."""
        kind = self._kind(dual=True, backward=True, still=self.still)
        launch = partial(self._back, x=x, g=g, to_x=to_x, motion=motion, take=take)
        if not self._apart(kind):
            return launch(kind, None)
        for number, start in enumerate(self.form.features.starts):
            if start not in {block.start for block in self.form.blocks}:
                to_x.block(number, VALUE).zero_()
        done: Beside[None] | None = None
        for part in self.form.parts:
            if done is not None:
                done.result()
            done = launch(replace(kind, apart=True), part)
        return done

    def _back(
        self,
        kind: Kind,
        part: Form | None,
        *,
        x: Field,
        g: Field,
        to_x: Field,
        motion: Motion,
        take: Take,
    ) -> Beside[None] | None:
        """Of one block alone, or of all."""
        block = None if part is None else part.blocks[0]
        n_edges, n_weights = self.graph.n_edges, self.form.n_weights if block is None else len(block.columns)
        of_x = self._per_edge(x, to_x) if block is None else x.flat.new_empty((n_edges, block.dim), dtype=self.stored)
        dtype = weight_cotangent_type(x.flat.dtype) if self.radial.in_table else x.flat.dtype
        of_w, of_dw = (x.flat.new_empty((n_edges, n_weights), dtype=dtype) for _ in range(2))
        given = {"x": self._read(x), "g": g.flat, "to_x": of_x, "to_w": of_w, "to_dw": of_dw, **_moving(motion)}
        self._launch(kind, given, part)
        done = take(Rows(of_w, of_dw, block))
        self._sum(of_x, to_x, VALUE, 0 if block is None else block.start)
        return done

    def _apart(self, kind: Kind) -> bool:
        """Whether each block has rows of its own, for which blocks are launched one by one."""
        if not self.radial.in_table or len(self.form.blocks) == 1:
            return False
        return self._one_by_one(kind) or writes_much(self.form, self.graph.n_edges, self.harmonics.dtype)

    def _kind(self, **flags: bool) -> Kind:
        kind = Kind(table=self.radial.in_table, packed=self.radial.packed, narrow=self.narrow, **flags)
        return in_manner(kind, self.form, self.graph.n_atoms)

    def _read(self, x: Field) -> Tensor:
        """Features as kernels read them; a copy is kept until they change."""
        if not self.narrow:
            return x.flat
        if self._copy is None:
            self._copy = x.flat.to(self.stored)
        return self._copy

    def _forward(self, kind: Kind, x: Field, out: Field, **tensors: Tensor) -> None:
        if kind.shares == 1:
            self._launch(kind, {"x": self._read(x), "out": out.flat, **tensors})
            return
        parts = out.flat.new_empty((kind.shares, out.flat.shape[0]))
        self._launch(kind, {"x": self._read(x), "out": parts, **tensors})
        ((_, place),) = kind.places
        add_shares(parts, self.form, out, place)

    def _per_edge(self, x: Field, to_x: Field | None) -> Tensor:
        shape = (0 if to_x is None else self.graph.n_edges, self.form.features.dim)
        rows = x.flat.new_empty(shape, dtype=self.stored)
        for begin, end in self.form.unused:
            rows[:, begin:end] = 0
        return rows

    def _sum(self, rows: Tensor, to_x: Field | None, place: int, first: int = 0) -> None:
        if to_x is not None:
            sum_into_field(rows, self.graph.by_source, to_x, place, first)

    def launcher(self, kernel: Any) -> Any:
        """The kernel as it is; operators (`library.py`) have traces see it."""
        return kernel

    def _one_by_one(self, kind: Kind) -> bool:
        return kind.backward and kind.shares == 1 and self.form.n_couplings >= LONG

    def _launch(self, kind: Kind, given: dict[str, Tensor], part: Form | None = None) -> None:
        """Of a part of the form, or of all of it. given: arguments by name, without those that all passes have."""
        graph, radial = self.graph, self.radial
        n_atoms = graph.n_atoms
        if not is_traced(graph.source) and not n_atoms:
            return
        tensors = {**given, "y": self.harmonics, "w": radial.weights, "row": radial.row, "source": graph.source}
        tensors["pointers"] = graph.by_destination.pointers
        if radial.place is not None:
            tensors["u"] = radial.place
        if radial.unit is not None:
            tensors["unit"] = radial.unit
        for name, tensor in tensors.items():
            if not is_traced(graph.source) and not tensor.is_contiguous():
                raise RuntimeError(f"rows of {name} do not lie one after the other")
        arguments: list[Any] = [tensors.get(name, self.harmonics) for name in ARGUMENTS[:-2]]
        options = {"num_warps": 1, "num_stages": 1}
        if kind.table and (kind.pass_name, self.form.n_harmonics) in MOST_REGISTERS:
            options["maxnreg"] = MOST_REGISTERS[kind.pass_name, self.form.n_harmonics]
        parts = self.form.parts if self._one_by_one(kind) else (self.form,)
        for form in parts if part is None else (part,):
            grid = (n_atoms * kind.shares * form.n_chunks,)
            self.launcher(kernel(form, kind))[grid](*arguments, n_atoms, graph.n_edges, **options)


def _moving(motion: Motion) -> dict[str, Tensor]:
    found = {"dy": motion.harmonics, "dw": motion.weights, "du": motion.place}
    return {name: tensor for name, tensor in found.items() if tensor is not None}
