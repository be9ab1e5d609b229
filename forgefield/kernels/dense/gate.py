"""The nonlinearity between layers in the four passes of a training, on fields: by generated kernels for a gate, or by autograd
for any other.

With f the activation, a gated component is h = f(s) a and moves by h' = f(s) a' + f'(s) s' a. Given cotangents h and p of
these,
    to_a = f h + f' s' p,    to_s = sum over components of f' a h + (f' a' + f'' s' a) p,
and those of a lone scalar are to_a = f' h + f'' a' p.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from forgefield.kernels.core.fields import TANGENT, VALUE, Field, Shape
from forgefield.kernels.core.generation import ArgumentTable, module_from
from forgefield.ops.linear import Gate

WIDEST = 128
"""Largest number of channels of one program."""
ARGUMENTS = ArgumentTable(
    a="field before the gate",
    h="field after the gate",
    to_h="cotangents of h",
    to_a="cotangents of a",
    n_atoms="number of atoms",
)
"""Arguments of the kernels of all four passes."""


class Nonlinearity:
    """Any function of blocks; its derivatives come from autograd. a: fields before it, h: after it."""

    def __init__(self, function: Callable[[list[Tensor]], list[Tensor]]) -> None:
        self.function = function

    def values(self, a: Field, h: Field) -> None:
        h.fill(VALUE, self.function(a.blocks(VALUE)))

    def tangents(self, a: Field, h: Field) -> None:
        with forward_ad._set_fwd_grad_enabled(True), forward_ad.dual_level():
            tangents = self._moved(a.blocks(VALUE), a.blocks(TANGENT))
        h.fill(TANGENT, tangents)

    def forces(self, a: Field, to_h: Field, to_a: Field) -> None:
        """Cotangents of the tangents, which are those of a total of the values."""
        with torch.enable_grad():
            blocks = [block.detach().requires_grad_(True) for block in a.blocks(VALUE)]
            outputs = self.function(blocks)
        to_a.fill(TANGENT, torch.autograd.grad(outputs, blocks, to_h.blocks(TANGENT)))

    def back(self, a: Field, to_h: Field, to_a: Field) -> None:
        """Cotangents of the values, from those of values and tangents."""
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), forward_ad.dual_level():
            blocks = [block.detach().requires_grad_(True) for block in a.blocks(VALUE)]
            outputs = self.function(blocks) + self._moved(blocks, a.blocks(TANGENT))
        cotangents = to_h.blocks(VALUE) + to_h.blocks(TANGENT)
        to_a.fill(VALUE, torch.autograd.grad(outputs, blocks, cotangents))

    def _moved(self, blocks: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
        duals = self.function([forward_ad.make_dual(block, tangent) for block, tangent in zip(blocks, tangents)])
        return [forward_ad.unpack_dual(value).tangent for value in duals]


class GateByKernels(Nonlinearity):
    """A gate whose activations have kernels."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate)
        self.blocks = _gate_blocks(gate)

    @staticmethod
    def supports(nonlinearity: object) -> TypeGuard[Gate]:
        return isinstance(nonlinearity, Gate) and set(nonlinearity.acts.values()) <= set(_ACTIVATIONS)

    def values(self, a: Field, h: Field) -> None:
        self._launch("values", a=a, h=h)

    def tangents(self, a: Field, h: Field) -> None:
        self._launch("tangents", a=a, h=h)

    def forces(self, a: Field, to_h: Field, to_a: Field) -> None:
        self._launch("forces", a=a, to_h=to_h, to_a=to_a)

    def back(self, a: Field, to_h: Field, to_a: Field) -> None:
        self._launch("back", a=a, to_h=to_h, to_a=to_a)

    def _launch(self, name: str, *, a: Field, **fields: Field) -> None:
        """Launch the kernel of a pass. a, fields: by their names in `ARGUMENTS`."""
        if a.n_atoms:
            grid = (a.n_atoms * sum(block.n_chunks for block in self.blocks),)
            used = ("a", "to_h", "to_a") if name in ("forces", "back") else ("a", "h")
            values = {"a": a.flat, "n_atoms": a.n_atoms, **{key: field.flat for key, field in fields.items()}}
            arguments = ARGUMENTS.bind(f"gate_{name}", values, unused=a.flat, used=used)
            _kernel(self.blocks, name)[grid](**arguments, num_warps=1, num_stages=1)


def nonlinearity_on_fields(function: Callable[[list[Tensor]], list[Tensor]]) -> Nonlinearity:
    """By kernels if they support the function."""
    return GateByKernels(function) if GateByKernels.supports(function) else Nonlinearity(function)


_Columns = tuple[int, int, int, int]
"""Offset of a block, its length for one atom, first column, width of its rows."""


@dataclass(frozen=True)
class _GateBlock:
    """One block of the output. source, gates, result: columns of the input, of the gates (None for scalars) and of the
    output."""

    channels: int
    components: int
    activation: str
    scale: float
    source: _Columns
    gates: _Columns | None
    result: _Columns

    @property
    def tile(self) -> int:
        return min(WIDEST, 1 << (self.channels - 1).bit_length())

    @property
    def n_chunks(self) -> int:
        return -(-self.channels // self.tile)


def _gate_blocks(gate: Gate) -> tuple[_GateBlock, ...]:
    before, after = (Shape(tuple((2 * b.l + 1, b.mul) for b in blocks)) for blocks in (gate.in_blocks, gate.out_blocks))
    where = {(block.l, block.p): number for number, block in enumerate(gate.in_blocks)}
    blocks = []
    column = gate.even_split[0]
    for number, block in enumerate(gate.out_blocks):
        source = where[block.l, block.p]
        components, width = before.blocks[source]
        kind = 0 if block.l else block.p
        gates = None
        if block.l:
            scalars = where[0, 1]
            n_scalars = before.blocks[scalars][1]
            gates = (before.starts[scalars], n_scalars, column, n_scalars)
            column += block.mul
        blocks.append(
            _GateBlock(
                block.mul,
                components,
                gate.acts[kind],
                gate.act_scales[kind],
                (before.starts[source], components * width, 0, width),
                gates,
                (after.starts[number], block.dim, 0, block.mul),
            )
        )
    return tuple(blocks)


_ACTIVATIONS = {
    "silu": [
        "q = tl.sigmoid({x})",
        "f = {scale} * {x} * q",
        "f1 = {scale} * q * (1.0 + {x} * (1.0 - q))",
        "f2 = {scale} * q * (1.0 - q) * (2.0 + {x} * (1.0 - 2.0 * q))",
    ],
    "tanh": [
        "r = {x} * {x}",
        "near = r * (0.021869488536155203 - r * (0.008863235529902197 - r * 0.003592128036572481))",
        "near = r * (0.3333333333333333 - r * (0.13333333333333333 - r * (0.05396825396825397 - near)))",
        "q = tl.where(r < 1e-2, {x} * (1.0 - near), 2.0 * tl.sigmoid(2.0 * {x}) - 1.0)",
        "f = {scale} * q",
        "f1 = {scale} * (1.0 - q * q)",
        "f2 = {scale} * (-2.0) * q * (1.0 - q * q)",
    ],
}
"""Lines that compute f, f1 and f2: the activation and its derivatives at x."""


@lru_cache(maxsize=256)
def _kernel(blocks: tuple[_GateBlock, ...], name: str) -> Any:
    return getattr(module_from(write_gate(blocks, name)), f"gate_{name}")


def write_gate(blocks: tuple[_GateBlock, ...], name: str) -> str:
    """Source of a module with the kernel `gate_{name}`, one warp for an atom and up to 128 channels of a block."""
    total = sum(block.n_chunks for block in blocks)
    lines = [
        "import triton",
        "import triton.language as tl",
        "",
        "",
        "@triton.jit(do_not_specialize=['n_atoms'])",
        f"def gate_{name}({ARGUMENTS.signature}):",
        "    program = tl.program_id(0)",
        "    n_atoms = n_atoms.to(tl.int64)",
        f"    atom = (program // {total}).to(tl.int64)",
        f"    chunk = program % {total}",
    ]
    first = 0
    for block in blocks:
        lines.append(f"    if (chunk >= {first}) & (chunk < {first + block.n_chunks}):")
        lines += [f"        {line}" for line in _lines(block, name, first)]
        first += block.n_chunks
    return "\n".join(lines) + "\n"


def _lines(block: _GateBlock, name: str, first: int) -> list[str]:
    lines = [f"c = (chunk - {first}) * {block.tile} + tl.arange(0, {block.tile})", f"inside = c < {block.channels}"]

    def address(field: str, slot: int, columns: _Columns, k: int) -> str:
        start, length, column, width = columns
        return f"{field} + n_atoms * {2 * start + slot * length} + atom * {length} + {column + k * width} + c"

    def load(target: str, field: str, slot: int, columns: _Columns, k: int) -> None:
        lines.append(f"{target} = tl.load({address(field, slot, columns, k)}, mask=inside, other=0.0)")

    def store(value: str, field: str, slot: int, columns: _Columns, k: int) -> None:
        lines.append(f"tl.store({address(field, slot, columns, k)}, {value}, mask=inside)")

    moves, gates, source, result = name in ("tangents", "back"), block.gates, block.source, block.result
    load("s", "a", VALUE, gates or source, 0)
    lines.extend(line.format(x="s", scale=repr(block.scale)) for line in _ACTIVATIONS[block.activation])
    if moves:
        load("ds", "a", TANGENT, gates or source, 0)
    if gates is None:
        if name == "values":
            store("f", "h", VALUE, result, 0)
        elif name == "tangents":
            store("f1 * ds", "h", TANGENT, result, 0)
        elif name == "forces":
            load("g", "to_h", TANGENT, result, 0)
            store("f1 * g", "to_a", TANGENT, source, 0)
        else:
            load("g", "to_h", VALUE, result, 0)
            load("p", "to_h", TANGENT, result, 0)
            store("f1 * g + f2 * ds * p", "to_a", VALUE, source, 0)
        return lines
    if name in ("forces", "back"):
        lines.append(f"total = tl.zeros([{block.tile}], a.dtype.element_ty)")
    for k in range(block.components):
        load("x", "a", VALUE, source, k)
        if moves:
            load("dx", "a", TANGENT, source, k)
        if name == "values":
            store("f * x", "h", VALUE, result, k)
        elif name == "tangents":
            store("f * dx + f1 * ds * x", "h", TANGENT, result, k)
        elif name == "forces":
            load("g", "to_h", TANGENT, result, k)
            store("f * g", "to_a", TANGENT, source, k)
            lines.append("total += f1 * x * g")
        else:
            load("g", "to_h", VALUE, result, k)
            load("p", "to_h", TANGENT, result, k)
            store("f * g + f1 * ds * p", "to_a", VALUE, source, k)
            lines.append("total += f1 * x * g + (f1 * dx + f2 * ds * x) * p")
    if name in ("forces", "back"):
        store("total", "to_a", TANGENT if name == "forces" else VALUE, gates, 0)
    return lines
