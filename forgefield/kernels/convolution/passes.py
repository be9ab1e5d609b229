"""The convolution by generated kernels, in the four passes of a training: values, cotangents for the forces, tangents, and
cotangents of values and tangents together.

`compile_together` compiles the kernels of all layers in parallel, before the first of them is launched. Triton compiles a
kernel when it is first launched, one after the other. Those of the convolution take seconds each, and Triton spends most of
that time in code that does not hold Python's global lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgefield.kernels.convolution.form import ARGUMENTS, Form, FormBlock, Kind
from forgefield.kernels.convolution.source import write_kernel
from forgefield.kernels.convolution.sums import add_shares, sum_into_field
from forgefield.kernels.core.compiling import CompileOnly, compile_concurrently
from forgefield.kernels.core.fields import TANGENT, VALUE, Field
from forgefield.kernels.core.generation import Launchable, TritonFunction, module_from
from forgefield.kernels.core.runtime import Concurrent, interpreted, storage_type, weight_cotangent_type
from forgefield.ops.graph import EdgeGraph, is_traced

FEW = 4096
"""With fewer programs, one warp each, a GPU idles while they wait for memory; programs then share the edges of an atom."""
SHARES = 4
"""Number of programs that share the edges of one atom, for a chunk of channels, where programs are few. Where they are many,
two programs share the edges for cotangents, which are written for every edge and need no sum over programs."""
LONG = 200
"""With this many couplings the code of all blocks exceeds the instruction cache, and programs of different blocks would evict
each other's code. Blocks are then launched one after the other in passes that compute cotangents."""
MOST_ROWS = 5 * 2**28
"""Limit on the bytes that the last pass writes for edges at a time: where all blocks together would write more, they are
launched one after the other, and the rows of each are summed before the next."""
MOST_REGISTERS = {("forces", 9): 96}
"""By pass and number of harmonics, for kernels that read tables: slightly fewer registers than the compiler would use, for one
more warp on every scheduler."""


MOST_FORCE_ROWS, MEMORY_SHARE = 2**34, 8
"""The pass of the forces writes at most this many bytes for edges at a time, and at most one part in so many of the memory of
the device; where it would write more, ranges of edges follow each other."""


@cache
def row_limit(device: torch.device) -> int:
    """Bytes that the pass of the forces may write for edges at a time."""
    if device.type != "cuda":
        return MOST_FORCE_ROWS
    return min(MOST_FORCE_ROWS, torch.cuda.get_device_properties(device).total_memory // MEMORY_SHARE)


@lru_cache(maxsize=512)
def kernel(form: Form, kind: Kind) -> TritonFunction:
    """The Triton function of this form and kind; Triton compiles it when it is first launched."""
    return getattr(module_from(write_kernel(form, kind)), kind.name)


def with_shares(kind: Kind, form: Form, n_atoms: int) -> Kind:
    """The same kind with the number of shares that suits this number of atoms."""
    if n_atoms * form.n_chunks < FEW:
        return replace(kind, shares=SHARES)
    return replace(kind, shares=2 if kind.backward and form.n_couplings < LONG else 1)


def exceeds_row_limit(form: Form, n_edges: int, dtype: torch.dtype) -> bool:
    """Whether the last pass, computed in this type with a table, would write more than `MOST_ROWS` bytes for this many
    edges."""
    feature_bytes = form.features.dim * storage_type(dtype).itemsize
    weight_bytes = 2 * form.n_weights * weight_cotangent_type(dtype).itemsize
    return n_edges * (feature_bytes + weight_bytes) > MOST_ROWS


@dataclass(frozen=True)
class Radial:
    """Radial weights of a layer.

    weights: (n_rows, n_weights); or, where `position` is set, a table of polynomials (n_intervals, 4, n_weights), packed
        (n_intervals, 3, n_weights).
    row: (n_edges,), row of weights of each edge, or its interval in the table.
    position: (n_edges,), position of each edge in its interval.
    unit: (n_intervals,), units of a packed table (`radial/packing.py`).
    """

    weights: Tensor
    row: Tensor
    position: Tensor | None = None
    unit: Tensor | None = None

    @property
    def in_table(self) -> bool:
        return self.position is not None

    @property
    def packed(self) -> bool:
        return self.unit is not None

    def stored_as(self, dtype: torch.dtype) -> Radial:
        """The same with a table in this type, unless it is packed."""
        return replace(self, weights=self.weights.to(dtype)) if self.in_table and not self.packed else self


@dataclass(frozen=True)
class Motion:
    """Tangents of harmonics (n_edges, n_harmonics), and of rows of weights or of the positions of edges in a table."""

    harmonics: Tensor
    weights: Tensor | None = None
    position: Tensor | None = None


class Rows(NamedTuple):
    """Cotangents that the last pass writes for every edge: of weights and of their tangents, both (n_edges, n_weights), or only
    the columns of one block."""

    of_w: Tensor
    of_dw: Tensor
    block: FormBlock | None


Take = Callable[[Rows], Concurrent[None] | None]
"""Starts to sum rows. Its result is awaited before the memory of the rows is used again."""


class Convolution:
    """A convolution over the edges of one graph.

    harmonics: (n_edges, n_harmonics), the first of which is one. still: features have no tangents and need no cotangents.

    With storage in bfloat16, features as neighbours read them, a table of coefficients and rows written for edges are stored in
    it, except cotangents of rows of weights. With products in tf32, cotangents of the weights of a table are.
    """

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
        """From the cotangents of the output, in the tangents of g, compute those of features, into the tangents of to_x, and of
        harmonics, into `parts` (n_chunks, n_edges, n_harmonics). Returns those of rows of weights, (n_edges, n_weights). With
        a table there are none, and `parts` (n_chunks, n_edges, 4) are of directions and positions in the table."""
        kind = self._kind(backward=True, features=to_x is not None)
        of_w = x.flat.new_empty((0 if self.radial.in_table else self.graph.n_edges, self.form.n_weights))
        tensors = {"x": self._read(x), "g": g.flat, "to_w": of_w, "to_y": parts}
        ranges = [] if to_x is None else self._ranges()
        for first, end in ranges:  # several where the rows of all edges would not fit into the memory
            of_x = self._per_edge(x, to_x, end - first)
            self._launch(replace(kind, ranged=True), {**tensors, "to_x": of_x}, edges=(first, end))
            assert to_x is not None
            sum_into_field(of_x, self.graph.by_source, to_x, TANGENT, edges=(first, end))
            del of_x
        if not ranges:
            of_x = self._per_edge(x, to_x)
            self._launch(kind, {**tensors, "to_x": of_x})
            self._sum(of_x, to_x, TANGENT)
        return of_w

    def _ranges(self) -> list[tuple[int, int]]:
        """Ranges of edges whose rows of cotangents of features fit into the memory; none where those of all do."""
        n_edges, width = self.graph.n_edges, self.form.features.dim * self.stored.itemsize
        if is_traced(self.graph.source) or n_edges * width <= row_limit(self.harmonics.device):
            return []
        length = max(1, row_limit(self.harmonics.device) // width)
        return [(first, min(first + length, n_edges)) for first in range(0, n_edges, length)]

    def back(self, x: Field, g: Field, to_x: Field, motion: Motion, take: Take) -> Concurrent[None] | None:
        """From the cotangents of values and tangents, compute those of the features' values, into to_x, and for every edge
        those of weights and of their tangents, which are passed to `take`, block by block where they are large. Returns the
        last result of `take`."""
        kind = self._kind(dual=True, backward=True, still=self.still)
        launch = partial(self._back, x=x, g=g, to_x=to_x, motion=motion, take=take)
        if not self._apart(kind):
            return launch(kind, None)
        for number, start in enumerate(self.form.features.starts):
            if start not in {block.start for block in self.form.blocks}:
                to_x.block(number, VALUE).zero_()
        done: Concurrent[None] | None = None
        for form in self.form.parts:
            if done is not None:
                done.result()
            done = launch(replace(kind, apart=True), form)
        return done

    def _back(
        self,
        kind: Kind,
        form: Form | None,
        *,
        x: Field,
        g: Field,
        to_x: Field,
        motion: Motion,
        take: Take,
    ) -> Concurrent[None] | None:
        """The last pass of one block, or of all."""
        block = None if form is None else form.blocks[0]
        n_edges, n_weights = self.graph.n_edges, self.form.n_weights if block is None else len(block.columns)
        of_x = self._per_edge(x, to_x) if block is None else x.flat.new_empty((n_edges, block.dim), dtype=self.stored)
        dtype = weight_cotangent_type(x.flat.dtype) if self.radial.in_table else x.flat.dtype
        of_w, of_dw = (x.flat.new_empty((n_edges, n_weights), dtype=dtype) for _ in range(2))
        tensors = {"x": self._read(x), "g": g.flat, "to_x": of_x, "to_w": of_w, "to_dw": of_dw, **_moving(motion)}
        self._launch(kind, tensors, form)
        done = take(Rows(of_w, of_dw, block))
        self._sum(of_x, to_x, VALUE, 0 if block is None else block.start)
        return done

    def _apart(self, kind: Kind) -> bool:
        """Whether each block has its own rows, for which blocks are launched one by one."""
        if not self.radial.in_table or len(self.form.blocks) == 1:
            return False
        return self._one_by_one(kind) or exceeds_row_limit(self.form, self.graph.n_edges, self.harmonics.dtype)

    def _kind(self, **flags: bool) -> Kind:
        kind = Kind(table=self.radial.in_table, packed=self.radial.packed, narrow=self.narrow, **flags)
        return with_shares(kind, self.form, self.graph.n_atoms)

    def _read(self, x: Field) -> Tensor:
        """Features in the storage type; the copy is kept until features change."""
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
        ((_, slot),) = kind.output_slots
        add_shares(parts, self.form, out, slot)

    def _per_edge(self, x: Field, to_x: Field | None, n_edges: int | None = None) -> Tensor:
        """n_edges: default: all."""
        n_edges = self.graph.n_edges if n_edges is None else n_edges
        shape = (0 if to_x is None else n_edges, self.form.features.dim)
        rows = x.flat.new_empty(shape, dtype=self.stored)
        for begin, end in self.form.unused:
            rows[:, begin:end] = 0
        return rows

    def _sum(self, rows: Tensor, to_x: Field | None, slot: int, first: int = 0) -> None:
        if to_x is not None:
            sum_into_field(rows, self.graph.by_source, to_x, slot, first)

    def launcher(self, kernel: TritonFunction) -> Launchable:
        """The kernel itself; operators (`operators.py`) wrap it so that traces record the launch."""
        return kernel

    def _one_by_one(self, kind: Kind) -> bool:
        return kind.backward and kind.shares == 1 and self.form.n_couplings >= LONG

    def _launch(
        self,
        kind: Kind,
        tensors: dict[str, Tensor],
        part_form: Form | None = None,
        edges: tuple[int, int] | None = None,
    ) -> None:
        """Launch the kernel of a part of the form, or of all of it. tensors: arguments of the pass by their names in
        `ARGUMENTS`, without those that all passes have. edges: first edge and end of the range, if there is one."""
        graph, radial = self.graph, self.radial
        n_atoms = graph.n_atoms
        if not is_traced(graph.source) and not n_atoms:
            return
        tensors = {**tensors, "y": self.harmonics, "w": radial.weights, "row": radial.row, "source": graph.source}
        tensors["pointers"] = graph.by_destination.pointers
        if radial.position is not None:
            tensors["u"] = radial.position
        if radial.unit is not None:
            tensors["unit"] = radial.unit
        for name, tensor in tensors.items():
            if not is_traced(graph.source) and not tensor.is_contiguous():
                raise RuntimeError(f"{kind.name}: the argument {name} is not contiguous")
        numbers = {"n_atoms": n_atoms, "n_edges": graph.n_edges}
        if edges is not None:
            numbers |= {"first_edge": edges[0], "end_edge": edges[1]}
        arguments = ARGUMENTS.bind(kind.name, {**tensors, **numbers}, unused=self.harmonics, used=kind.arguments)
        options = {"num_warps": 1, "num_stages": 1}
        if kind.table and (kind.pass_name, self.form.n_harmonics) in MOST_REGISTERS:
            options["maxnreg"] = MOST_REGISTERS[kind.pass_name, self.form.n_harmonics]
        parts = self.form.parts if self._one_by_one(kind) else (self.form,)
        for form in parts if part_form is None else (part_form,):
            grid = (n_atoms * kind.shares * form.n_chunks,)
            self.launcher(kernel(form, kind))[grid](**arguments, **options)


def _moving(motion: Motion) -> dict[str, Tensor]:
    """Tangents as arguments of a kernel."""
    tangents = {"dy": motion.harmonics, "dw": motion.weights, "du": motion.position}
    return {name: tensor for name, tensor in tangents.items() if tensor is not None}


_compiled_keys: set[Any] = set()


class Compiled(Convolution):
    """A convolution whose passes compile their kernels and compute nothing."""

    def launcher(self, kernel: TritonFunction) -> Launchable:
        return CompileOnly(kernel)

    def _sum(self, rows: Tensor, to_x: Field | None, slot: int, first: int = 0) -> None:
        pass

    def _forward(self, kind: Kind, x: Field, out: Field, **tensors: Tensor) -> None:
        self._launch(kind, {"x": self._read(x), "out": out.flat, **tensors})

    def passes(self, x: Field, z: Field, to_x: Field, to_z: Field, *, trained: bool) -> None:
        """All four passes of a training, or those of values and forces."""
        weights = None if self.radial.in_table else self.radial.weights
        motion = Motion(self.harmonics, weights=weights, position=self.radial.position)
        columns = 4 if self.radial.in_table else self.form.n_harmonics
        parts = self.harmonics.new_empty((self.form.n_chunks, self.graph.n_edges, columns))
        if trained:
            self.back(x, to_z, to_x, motion, lambda rows: None)
            self.tangents(x, z, motion)
        self.forces(x, to_z, None if self.still else to_x, parts)
        self.values(x, z)


@dataclass(frozen=True)
class Planned:
    """A convolution that will be launched, with its fields. still: features have no tangents. trained: in all four passes;
    otherwise for values and forces."""

    form: Form
    radial: Radial
    still: bool
    x: Field
    z: Field
    to_x: Field
    to_z: Field
    trained: bool = True

    def key(self, graph: EdgeGraph, harmonics: Tensor) -> Any:
        """Everything that determines which kernels its passes launch."""
        kind = Kind(table=self.radial.in_table, packed=self.radial.packed, still=self.still)
        large = exceeds_row_limit(self.form, graph.n_edges, harmonics.dtype)
        stored = (storage_type(harmonics.dtype), weight_cotangent_type(harmonics.dtype))
        types = (harmonics.dtype, *stored, self.radial.row.dtype, harmonics.device)
        return self.form, with_shares(kind, self.form, graph.n_atoms), large, types, self.trained


def compile_together(layers: Sequence[Planned], graph: EdgeGraph, harmonics: Tensor) -> None:
    """Compile the kernels of those convolutions that this process has not compiled yet."""
    if not harmonics.is_cuda or interpreted():
        return
    new = {layer.key(graph, harmonics): layer for layer in layers}
    new = {key: layer for key, layer in new.items() if key not in _compiled_keys}
    if not new:
        return

    def compile_layer(layer: Planned) -> None:
        passes = Compiled(layer.form, graph, harmonics, layer.radial, still=layer.still)
        passes.passes(layer.x, layer.z, layer.to_x, layer.to_z, trained=layer.trained)

    if compile_concurrently([partial(compile_layer, layer) for layer in new.values()]):
        _compiled_keys.update(new)
