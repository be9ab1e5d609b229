"""The `script` engine: the traced step as TorchScript. Upstream deprecates TorchScript; `compile` is what follows it.

The graph is the same as for `compile` (`tracing.py`). TorchScript runs it without Python, operation by operation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from forgefield.data.batch import SHAPES, Batch, Shapes
from forgefield.training.engines.step import StepFunction
from forgefield.training.engines.tracing import Flat, Traced, TracedEngine, trace


class ScriptEngine(TracedEngine):
    name = "script"

    def __init__(self, function: StepFunction, *, world_size: int = 1) -> None:
        super().__init__(function, lambda flat, what: ScriptedFunction(flat, function.shapes), world_size=world_size)


class ScriptedFunction:
    """`function(static, batch)` as TorchScript, for batches of any size."""

    def __init__(self, function: Flat, shapes: Shapes = SHAPES) -> None:
        self.function, self.shapes = function, shapes
        self._made: tuple[Any, Traced, list[int]] | None = None

    def __call__(self, static: Sequence[Tensor], batch: Batch) -> Any:
        if self._made is None or (self._made[1].n_static, self._made[1].keys) != (len(static), tuple(batch)):
            self._made = self._make(static, batch)
        scripted, traced, present = self._made
        with torch.no_grad():
            values = scripted(*static, *batch.values())
        results: list[Any] = [None] * traced.structure.num_leaves
        for place, value in zip(present, values):
            results[place] = value
        return traced.unflatten(results)

    def forget(self) -> None:
        self._made = None

    def _make(self, static: Sequence[Tensor], batch: Batch) -> tuple[Any, Traced, list[int]]:
        traced = trace(self.function, static, batch, self.shapes)
        present = _leave_out_nothing(traced.graph)
        _in_words_of_torchscript(traced.graph)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.jit.script(traced.graph), traced, present


def scriptable(traced: Traced) -> GraphModule:
    """The graph of a trace in operations that TorchScript reads; its outputs are a list of tensors."""
    _leave_out_nothing(traced.graph)
    _in_words_of_torchscript(traced.graph)
    return traced.graph


def _leave_out_nothing(graph: GraphModule) -> list[int]:
    """TorchScript returns tensors only: outputs that are None are taken out. Returns the places of those that stay."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    values = list(output.args[0])
    present = [place for place, value in enumerate(values) if value is not None]
    output.args = ([values[place] for place in present],)
    graph.recompile()
    return present


def _spelt_out(graph: GraphModule, value: Any) -> Any:
    """Infinity and not-a-number are written as TorchScript reads them."""
    if isinstance(value, float) and not math.isfinite(value):
        return graph.graph.call_function(float, (str(value),))
    return value


def _in_words_of_torchscript(graph: GraphModule) -> None:
    """Operations by their plain names, sizes by the tensor's method: TorchScript finds overloads by itself."""
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
                node.args = tuple(_spelt_out(graph, value) for value in node.args)
    graph.graph.lint()
    graph.recompile()
