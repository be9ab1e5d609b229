"""The `script` engine: the traced step (`tracing.py`) as TorchScript, which executes it without Python, operation by operation.

PyTorch deprecates TorchScript in favour of torch.compile (`compiled.py`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.node import Argument

from forgefield.data.batch import SHAPES, Batch, Shapes
from forgefield.training.engines.step import StepFunction
from forgefield.training.engines.tracing import FlatFunction, Traced, TracedEngine, trace


class ScriptEngine(TracedEngine):
    name = "script"

    def __init__(self, function: StepFunction, *, world_size: int = 1) -> None:
        super().__init__(function, lambda flat, name: ScriptedFunction(flat, function.shapes), world_size=world_size)


class ScriptedFunction:
    """`function(static, batch)` as TorchScript, for batches of any size."""

    def __init__(self, function: FlatFunction, shapes: Shapes = SHAPES) -> None:
        self.function, self.shapes = function, shapes
        self._scripted: tuple[Callable[..., Sequence[Tensor]], Traced, list[int]] | None = None

    def __call__(self, static: Sequence[Tensor], batch: Batch) -> Any:
        if self._scripted is None or (self._scripted[1].n_static, self._scripted[1].keys) != (
            len(static),
            tuple(batch),
        ):
            self._scripted = self._script(static, batch)
        scripted, traced, indices = self._scripted
        with torch.no_grad():
            values = scripted(*static, *batch.values())
        results: list[Tensor | None] = [None] * traced.structure.num_leaves
        for index, value in zip(indices, values):
            results[index] = value
        return traced.unflatten(results)

    def reset(self) -> None:
        self._scripted = None

    def _script(
        self, static: Sequence[Tensor], batch: Batch
    ) -> tuple[Callable[..., Sequence[Tensor]], Traced, list[int]]:
        traced = trace(self.function, static, batch, self.shapes)
        graph, indices = scriptable(traced)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.jit.script(graph), traced, indices


def scriptable(traced: Traced) -> tuple[GraphModule, list[int]]:
    """The graph of a trace, changed in place for TorchScript, and the indices of its outputs.

    TorchScript returns tensors only, so outputs that are None are removed.
    """
    graph = traced.graph
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    values = list(output.args[0])
    indices = [index for index, value in enumerate(values) if value is not None]
    output.args = ([values[index] for index in indices],)
    _use_torchscript_names(graph)
    return graph, indices


def _torchscript_literal(graph: GraphModule, value: Argument) -> Argument:
    """Infinity and NaN as calls that TorchScript can parse; any other value as it is."""
    if isinstance(value, float) and not math.isfinite(value):
        return graph.graph.call_function(float, (str(value),))
    return value


def _use_torchscript_names(graph: GraphModule) -> None:
    """Replace overloads of operations by their names, and operations of sizes by methods of tensors."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten.sym_size.int:
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.call_method("size", node.args))
            graph.graph.erase_node(node)
        elif isinstance(node.target, torch._ops.OpOverload):
            node.target = node.target.overloadpacket
            with graph.graph.inserting_before(node):
                node.args = tuple(_torchscript_literal(graph, value) for value in node.args)
    graph.graph.lint()
    graph.recompile()
