"""Geometry of edges by kernels: directions, their harmonics, and positions of lengths in a table.

There is one generated kernel for each of three passes: values, tangents along moving edge vectors, and cotangents of the edge
vectors. Everything is computed in float64 and rounded when it is written. Harmonics of each degree are computed from those of
the next lower one, as in `ops/harmonics.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from forgefield.kernels.core.generation import ArgumentTable, module_from
from forgefield.ops.harmonics import raising_terms

EDGES = 128
"""Edges of one program."""
ARGUMENTS = ArgumentTable(
    vectors="(n_edges, 3) float64, edge vectors",
    tangents="tangents of vectors",
    inverse_cutoff="(1,) or (n_edges,), one over the cutoff",
    harmonics="(n_edges, (l_max + 1)^2), or their tangents; in the pass of cotangents those of the directions, (n_edges, 3)",
    place="(n_edges,), positions in the interval, their tangents or cotangents",
    at="(n_edges,) int16, interval of each edge",
    result="(n_edges, 3), directions; in the pass of cotangents those of the vectors",
    n_edges="number of edges",
    n_intervals="number of intervals of the table",
    row="stride of the rows of `harmonics`",
    step="stride of `place`",
)
"""Arguments of all three kernels."""
USED = {
    "values": ("vectors", "inverse_cutoff", "harmonics", "place", "at", "result"),
    "tangents": ("vectors", "tangents", "inverse_cutoff", "harmonics", "place"),
    "cotangents": ("vectors", "inverse_cutoff", "harmonics", "place", "result"),
}
"""Tensors that the kernel of each pass uses."""


class EdgeGeometry(torch.autograd.Function):
    """vectors (n_edges, 3) float64, inverse (1,) or (n_edges,) one over the cutoff -> harmonics (n_edges, (l_max + 1)^2),
    directions (n_edges, 3), position of each edge in its interval (n_edges,), all in `dtype`, and that interval (n_edges,)
    int16. Positions are from -1/2 to 1/2; zero is the middle of an interval.

    Harmonics have no gradient: operations on them compute cotangents of the directions instead."""

    @staticmethod
    def forward(ctx, vectors, inverse, l_max, n_intervals, dtype):
        vectors, inverse = vectors.contiguous(), inverse.contiguous()
        ctx.save_for_backward(vectors, inverse)
        ctx.numbers = (l_max, n_intervals)
        n_edges = vectors.shape[0]
        harmonics = torch.empty((n_edges, (l_max + 1) ** 2), dtype=dtype, device=vectors.device)
        place = torch.empty((n_edges,), dtype=dtype, device=vectors.device)
        direction = torch.empty((n_edges, 3), dtype=dtype, device=vectors.device)
        at = torch.empty((n_edges,), dtype=torch.int16, device=vectors.device)
        tensors = {"vectors": vectors, "inverse_cutoff": inverse, "harmonics": harmonics, "place": place, "at": at}
        _launch("values", l_max, n_intervals, {**tensors, "result": direction})
        ctx.mark_non_differentiable(harmonics, at)
        ctx.set_materialize_grads(False)
        return harmonics, direction, place, at

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _, to_direction, to_place, __):
        vectors, inverse = ctx.saved_tensors
        result = torch.empty_like(vectors)
        n_edges = vectors.shape[0]
        if to_direction is None:  # no output depends on it
            to_direction = vectors.new_zeros((n_edges, 3))
        if to_place is None:
            to_place = vectors.new_zeros((n_edges,))
        to_direction = to_direction if to_direction.stride(1) == 1 else to_direction.contiguous()
        tensors = {"vectors": vectors, "inverse_cutoff": inverse, "harmonics": to_direction, "place": to_place}
        _launch("cotangents", *ctx.numbers, {**tensors, "result": result})
        return result, None, None, None, None


def moved_geometry(
    vectors: Tensor, tangents: Tensor, inverse: Tensor, l_max: int, n_intervals: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Tangents of harmonics and positions in the table, from those of the edge vectors."""
    n_edges = vectors.shape[0]
    harmonics = torch.empty((n_edges, (l_max + 1) ** 2), dtype=dtype, device=vectors.device)
    place = torch.empty((n_edges,), dtype=dtype, device=vectors.device)
    moving = {"vectors": vectors, "tangents": tangents, "inverse_cutoff": inverse}
    tensors = {name: tensor.contiguous() for name, tensor in moving.items()}
    _launch("tangents", l_max, n_intervals, {**tensors, "harmonics": harmonics, "place": place})
    return harmonics, place


def _launch(name: str, l_max: int, n_intervals: int, tensors: dict[str, Tensor]) -> None:
    """name: of the pass. tensors: by their names in `ARGUMENTS`."""
    n_edges = tensors["vectors"].shape[0]
    if n_edges:
        numbers = {"n_edges": n_edges, "n_intervals": n_intervals}
        numbers |= {"row": tensors["harmonics"].stride(0), "step": tensors["place"].stride(0)}
        named = {**tensors, **numbers}
        arguments = ARGUMENTS.bind(f"geometry_{name}", named, unused=tensors["vectors"], used=USED[name])
        kernel = _kernel(name, l_max, tensors["inverse_cutoff"].numel() > 1)
        kernel[(-(-n_edges // EDGES),)](**arguments, num_warps=EDGES // 32)


@lru_cache(maxsize=64)
def _kernel(name: str, l_max: int, each: bool) -> Any:
    return getattr(module_from(write_geometry(name, l_max, each)), f"geometry_{name}")


def write_geometry(name: str, l_max: int, each: bool) -> str:
    """Source of a module with the kernel `geometry_{name}`. each: every edge has its own cutoff."""
    lines = [
        f"edge = tl.program_id(0).to(tl.int64) * {EDGES} + tl.arange(0, {EDGES})",
        "inside = edge < n_edges",
        f"inverse = tl.load(inverse_cutoff{' + edge, mask=inside, other=1.0' if each else ''})",
        "n_intervals = n_intervals.to(tl.float64)",
    ]
    lines += [f"v{i} = tl.load(vectors + edge * 3 + {i}, mask=inside, other=1.0)" for i in range(3)]
    lines += ["length = tl.sqrt(v0 * v0 + v1 * v1 + v2 * v2)", "over = 1.0 / length"]
    lines += [f"u{i} = v{i} * over" for i in range(3)]
    lines += ["scaled = length * inverse * n_intervals"]
    lines += [] if name == "cotangents" else _harmonics(l_max)
    n_harmonics = (l_max + 1) ** 2
    if name == "values":
        lines += ["interval = tl.minimum(scaled, n_intervals - 1.0).to(tl.int32)"]
        lines += [f"tl.store(harmonics + edge * {n_harmonics} + {j}, y{j}, mask=inside)" for j in range(n_harmonics)]
        lines += ["middle = interval.to(tl.float64) + 0.5"]
        lines += ["tl.store(place + edge, tl.minimum(scaled, n_intervals) - middle, mask=inside)"]
        lines += ["tl.store(at + edge, interval.to(tl.int16), mask=inside)"]
        lines += [f"tl.store(result + edge * 3 + {i}, u{i}, mask=inside)" for i in range(3)]
    elif name == "tangents":
        lines += [f"m{i} = tl.load(tangents + edge * 3 + {i}, mask=inside, other=0.0)" for i in range(3)]
        lines += ["along = u0 * m0 + u1 * m1 + u2 * m2"]
        lines += [f"du{i} = (m{i} - u{i} * along) * over" for i in range(3)]
        lines += _moved(l_max)
        lines += [f"tl.store(harmonics + edge * {n_harmonics} + {j}, dy{j}, mask=inside)" for j in range(n_harmonics)]
        lines += ["moved = tl.where(scaled <= n_intervals, along * inverse * n_intervals, 0.0)"]
        lines += ["tl.store(place + edge, moved, mask=inside)"]
    else:
        for i in range(3):
            lines.append(f"b{i} = tl.load(harmonics + edge * row + {i}, mask=inside, other=0.0).to(tl.float64)")
        lines += ["g = tl.load(place + edge * step, mask=inside, other=0.0).to(tl.float64)"]
        lines += ["along = u0 * b0 + u1 * b1 + u2 * b2"]
        lines += ["g = tl.where(scaled <= n_intervals, g * inverse * n_intervals, 0.0)"]
        for i in range(3):
            line = f"result + edge * 3 + {i}, (b{i} - u{i} * along) * over + u{i} * g"
            lines.append(f"tl.store({line}, mask=inside)")
    head = [
        "import triton",
        "import triton.language as tl",
        "",
        "",
        "@triton.jit(do_not_specialize=['n_edges', 'n_intervals', 'row', 'step'])",
        f"def geometry_{name}({ARGUMENTS.signature}):",
    ]
    return "\n".join([*head, *(f"    {line}" for line in lines)]) + "\n"


def _harmonics(l_max: int) -> list[str]:
    lines = [f"y0 = tl.full([{EDGES}], 1.0, tl.float64)"]
    lines += [f"y{1 + i} = {3**0.5!r} * u{i}" for i in range(3)] if l_max else []
    for degree in range(1, l_max):
        low, high = degree**2, (degree + 1) ** 2
        for k, terms in raising_terms(degree).items():
            lines.append(f"y{high + k} = " + " + ".join(f"{value!r} * y{low + i} * u{j}" for i, j, value in terms))
    return lines


def _moved(l_max: int) -> list[str]:
    """Tangents dy of all harmonics, from those of the direction, du."""
    lines = [f"dy0 = tl.zeros([{EDGES}], tl.float64)"]
    lines += [f"dy{1 + i} = {3**0.5!r} * du{i}" for i in range(3)] if l_max else []
    for degree in range(1, l_max):
        low, high = degree**2, (degree + 1) ** 2
        for k, terms in raising_terms(degree).items():
            parts = (f"{value!r} * (dy{low + i} * u{j} + y{low + i} * du{j})" for i, j, value in terms)
            lines.append(f"dy{high + k} = " + " + ".join(parts))
    return lines
