"""The generated kernels as two operations of torch, forward and backward: what tracing, compilers and CUDA graphs see.

Rows that belong to sources of edges come out for every edge; who calls sums them. A convolution is named by a string that says
all about it, so that a traced graph means the same in any process. The shapes are those in `source.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from forgefield.ops.convolution_plan import Block, ConvolutionPlan, plan_convolution
from forgefield.ops.kernels.build import kernel
from forgefield.ops.kernels.form import Form, form_of
from forgefield.ops.kernels.source import ARGUMENTS, Kind

OUTPUTS = ("out", "to_x", "to_w", "to_y")


def name_of(plan: ConvolutionPlan) -> str:
    """Everything a convolution is planned from, as a string."""
    results = sorted({(block.l, block.p) for block in plan.out_blocks})
    blocks = ";".join(f"{block.mul},{block.l},{block.p}" for block in plan.in_blocks)
    return f"{blocks}|{plan.l_max}|{';'.join(f'{degree},{parity}' for degree, parity in results)}"


@lru_cache(maxsize=64)
def form_named(name: str) -> Form:
    """The form of `name_of(plan)`."""
    blocks, l_max, results = name.split("|")
    pairs = (result.split(",") for result in results.split(";"))
    planned = plan_convolution(
        tuple(Block(*map(int, block.split(","))) for block in blocks.split(";")),
        int(l_max),
        frozenset((int(degree), int(parity)) for degree, parity in pairs),
    )
    return form_of(planned)


def _kind(place: Tensor | None, **flags: bool) -> Kind:
    return Kind(table=place is not None, **flags)


def _launch(form: Form, kind: Kind, **tensors: Tensor | None) -> None:
    """Runs a kernel; tensors that it has no use for are left out or None."""
    pointers, source = tensors["pointers"], tensors["source"]
    assert pointers is not None
    assert source is not None
    n_atoms = pointers.shape[0] - 1
    if not n_atoms:
        return
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():  # a compiler may choose other strides
            if name in OUTPUTS:
                raise RuntimeError(f"rows of {name} do not lie one after the other")
            tensors[name] = tensor.contiguous()
    some = tensors["x"]
    given: list[Any] = [some if tensors.get(name) is None else tensors[name] for name in ARGUMENTS[:-1]]
    kernel(form, kind)[(n_atoms * form.n_chunks,)](*given, source.shape[0], num_warps=1, num_stages=1)


def _output(x: Tensor, form: Form, kind: Kind) -> Tensor:
    return x.new_empty((x.shape[0], len(kind.streams), form.out_dim))


def _cotangents(x: Tensor, n_edges: Any, form: Form, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    columns = form.n_harmonics + (1 if kind.table else 0)
    return (
        x.new_empty((n_edges, kind.rows, form.in_dim)),
        x.new_empty((n_edges if kind.weights else 0, kind.rows, form.n_weights)),
        x.new_empty((form.n_chunks if kind.geometry else 0, n_edges, kind.rows, columns)),
    )


@torch.library.custom_op("forgefield::convolution", mutates_args=())
def convolution(
    x: Tensor,
    y: Tensor,
    w: Tensor,
    source: Tensor,
    pointers: Tensor,
    row: Tensor,
    place: Tensor | None,
    plan: str,
    value: bool,
) -> Tensor:
    """Outputs (n_atoms, streams, out_dim). Whether there are tangents is seen from x. value: with tangents, whether values
    are wanted too. place: with a table of weights, where in its interval each edge lies."""
    form, kind = form_named(plan), _kind(place, dual=x.shape[1] == 2, value=value)
    out = _output(x, form, kind)
    _launch(form, kind, x=x, y=y, w=w, out=out, source=source, pointers=pointers, row=row, place=place)
    return out


@convolution.register_fake
def _(
    x: Tensor,
    y: Tensor,
    w: Tensor,
    source: Tensor,
    pointers: Tensor,
    row: Tensor,
    place: Tensor | None,
    plan: str,
    value: bool,
) -> Tensor:
    return _output(x, form_named(plan), _kind(place, dual=x.shape[1] == 2, value=value))


@torch.library.custom_op("forgefield::convolution_backward", mutates_args=())
def convolution_backward(
    g: Tensor,
    x: Tensor,
    y: Tensor,
    w: Tensor,
    source: Tensor,
    pointers: Tensor,
    row: Tensor,
    place: Tensor | None,
    plan: str,
    value: bool,
    geometry: bool,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of features and weights for every edge, and of harmonics (and places) in parts to be summed; without rows
    where they are not asked for. g: (n_atoms, streams, out_dim)."""
    form = form_named(plan)
    kind = _kind(place, dual=x.shape[1] == 2, backward=True, value=value, geometry=geometry, weights=weights)
    to_x, to_w, to_y = _cotangents(x, source.shape[0], form, kind)
    for begin, end in form.unused:
        to_x[:, :, begin:end] = 0
    structure = {"source": source, "pointers": pointers, "row": row, "place": place}
    _launch(form, kind, x=x, y=y, w=w, g=g, to_x=to_x, to_w=to_w, to_y=to_y, **structure)
    return to_x, to_w, to_y


@convolution_backward.register_fake
def _(
    g: Tensor,
    x: Tensor,
    y: Tensor,
    w: Tensor,
    source: Tensor,
    pointers: Tensor,
    row: Tensor,
    place: Tensor | None,
    plan: str,
    value: bool,
    geometry: bool,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    kind = _kind(place, dual=x.shape[1] == 2, backward=True, value=value, geometry=geometry, weights=weights)
    return _cotangents(x, source.shape[0], form_named(plan), kind)
