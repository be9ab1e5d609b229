"""Counts what one training step by generated kernels would launch on a GPU, by the lines that ask for it, without a GPU.

    TRITON_INTERPRET=1 python benchmarks/launches.py [--layers 2] [--l-max 1] [--depth 1] [--knots 16] [--lines]
                                                   [--mace]

Operations of torch that only make views or reserve memory are not counted, every other one is counted once, also where a GPU
takes several launches for it (a sort, a product with split sums). What the optimiser does is not part of it. Without a GPU
kernels run in Triton's interpreter and some plain operations are others than on a GPU; these are replaced here.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from engines import MODELS, trained, water_batch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from forgefield.kernels.core.runtime import interpreted
from forgefield.kernels.edges import segments as segment_kernels
from forgefield.kernels.radial import table
from forgefield.models import potential
from forgefield.ops import graph
from forgefield.training.engines.engine import Engine
from forgefield.training.engines.step import StepFunction
from forgefield.training.precision import Precision

FREE = (
    "empty",
    "new_empty",
    "detach",
    "alias",
    "lift_fresh",
    "_unsafe_view",
    "_has_same_storage",
    "_efficientzero",
    "is_same",
)
"""Beginnings of the names of operations that launch nothing."""
HELPERS = tuple(f"ops/{name}.py" for name in ("graph", "functions", "autograd", "products", "linear"))
"""Files whose callers say more than they do."""
GROUPS = {
    "loss and errors": ("tasks/", "engines/step.py"),
    "tables": (
        "nequip/tables.py",
        "mace/tables.py",
        "radial/layer.py",
        "radial/hidden.py",
        "packing.py",
        "radial/table.py",
        "radial_hidden",
    ),
    "edges": ("geometry.py", "edges.py", "segments.py", "graph.py"),
    "readout and energies": ("readout.py", "terms.py", "potential.py", "encode", "Perceptron"),
}
"""Where a line belongs by what its place contains; all else belongs to the layers."""


class Counting(TorchDispatchMode):
    """Counts by place in `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, returns = func._schema.name.partition("::")[2], func._schema.returns
        is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not is_view and not name.startswith(FREE):
            self.found[place(), name] += 1
        return func(*args, **(kwargs or {}))

    def kernel(self, executor: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
        self.found[place(), f"kernel {executor.fn.__name__}"] += 1
        with _disable_current_modes():
            return run(executor, *args, **kwargs)


def place() -> str:
    """The line that asks for an operation; of a derivative that autograd takes, the line whose derivative it is."""
    frames = [frame for frame in traceback.extract_stack() if "/forgefield/" in frame.filename]
    lines = [f"{frame.filename.split('/forgefield/')[-1]}:{frame.lineno} {frame.name}" for frame in frames]
    node = torch._C._current_autograd_node()
    if node is not None:
        text = [line.split("\n")[0] for line in node.metadata.get("traceback_", []) if "/forgefield/" in line]
        asked = max(number for number, frame in enumerate(frames) if frame.name in ("_by_tangent", "_derivatives"))
        origin = [line.split("/forgefield/")[-1].replace('", line ', ":").replace(", in", "") for line in text]
        lines = [*origin, *lines[asked + 1 :]]
    telling = [line for line in lines if not line.startswith(HELPERS)]
    return [*lines, *telling][-1] if lines else "elsewhere"


def group(line: str) -> str:
    return next((name for name, words in GROUPS.items() if any(word in line for word in words)), "layers")


def as_on_a_gpu() -> ExitStack:
    """Plain operations that take another way on a GPU."""

    def sum_rows(values: Tensor, segments: graph.Segments) -> Tensor:
        return graph.sum_by_pointers(values, None if segments.rows_are_sorted else segments.order, segments.pointers)

    def edge_graph(batch: dict[str, Tensor]) -> graph.EdgeGraph:
        return graph.EdgeGraph(*batch["edge_index"], batch["species"].shape[0], reverse=batch["edge_reverse"])

    def sum_by_kernel(flat: Tensor, order: Tensor | None, pointers: Tensor) -> Tensor:
        return segment_kernels._row_sums(segment_kernels._kernels().add_rows, flat, order, pointers)

    changes = ExitStack()
    changes.enter_context(mock.patch.object(graph, "sum_rows", sum_rows))
    changes.enter_context(mock.patch.object(potential, "edge_graph", edge_graph))
    changes.enter_context(mock.patch.object(graph._registered, "sums", sum_by_kernel))
    changes.enter_context(mock.patch.object(table, "sums_by_kernel", return_value=True))
    return changes


def nequip(layers: int, l_max: int, depth: int) -> dict[str, Any]:
    blocks = {"l_max": l_max, "num_features": [4, 3, 2, 2][: l_max + 1], "parity": False, "type_embed_num_features": 3}
    return {"name": "nequip", "num_layers": layers, "radial_mlp_width": 8, "radial_mlp_depth": depth, **blocks}


def mace(layers: int, l_max: int, depth: int) -> dict[str, Any]:
    blocks = {"hidden_irreps": "4x0e + 4x1o", "max_ell": l_max, "correlation": 2, "mlp_irreps": "4x0e"}
    return {"name": "mace", "num_interactions": layers, "radial_mlp": [8] * depth, **blocks}


def count(model_options: dict[str, Any], knots: int) -> Counter[tuple[str, str]]:
    from triton.runtime.interpreter import GridExecutor

    MODELS["counted"] = model_options
    with Precision("float32").applied("float32"):
        model = trained("counted", 3.0, "float32", torch.device("cpu"))
        batch = water_batch(2, 1, 3.0, torch.device("cpu"))
        engine = Engine(StepFunction(model.potential, model.task, model.errors, derivative="kernels", knots=knots))
        counting, run = Counting(), GridExecutor.__call__
        with as_on_a_gpu():
            engine.differentiate(batch)  # makes what is kept
            watched = mock.patch.object(
                GridExecutor, "__call__", lambda self, *a, **k: counting.kernel(self, run, *a, **k)
            )
            with torch.autograd.set_detect_anomaly(True, check_nan=False), watched, counting:
                engine.differentiate(batch)
    return counting.found


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--l-max", type=int, default=1, choices=range(4))
    parser.add_argument("--depth", type=int, default=1, help="hidden layers of the radial networks")
    parser.add_argument("--knots", type=int, default=16, help="intervals of the tables")
    parser.add_argument("--mace", action="store_true", help="a model of MACE instead of NequIP")
    parser.add_argument("--lines", action="store_true", help="also by line")
    args = parser.parse_args(words)
    if not interpreted():
        parser.error("set TRITON_INTERPRET=1, so that kernels run on the CPU")
    found = count((mace if args.mace else nequip)(args.layers, args.l_max, args.depth), args.knots)
    groups: Counter[str] = Counter()
    for (line, _), times in found.items():
        groups[group(line)] += times
    print(f"{args.layers} layers, l up to {args.l_max}, hidden layers of radial networks {args.depth}: {found.total()}")
    for name, total in groups.most_common():
        print(f"{total:5}  {name}")
        for (line, operation), times in found.most_common() if args.lines else []:
            if group(line) == name:
                print(f"{times:12}  {operation:36} {line}")


if __name__ == "__main__":
    sys.exit(main())
