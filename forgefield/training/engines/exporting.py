"""An evaluation as a program of `torch.export`, from which AOTInductor makes a package that needs no Python.

The program is the trace of `tracing.py`, with the weights of the model inside, and holds for batches of other sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from forgefield.data.batch import SHAPES, Shapes
from forgefield.training.engines.blank import not_too_small
from forgefield.training.engines.tracing import Traced, trace

Batch = dict[str, Tensor]


def export_evaluation(evaluate: Callable[[Batch], Any], batch: Batch, shapes: Shapes = SHAPES) -> ExportedProgram:
    """The program of `evaluate(batch)`: it takes the tensors of a batch by their keys, in any order, and gives the same.

    evaluate: gives tensors, or tuples, lists and dictionaries of them. batch: an example with exactly the keys that the
    program is to be given; of any size, on the device where the program is to run. shapes: of its tensors.
    """
    traced = trace(lambda static, given: evaluate(given), [], batch, shapes)
    # Export takes sizes of zero and one for constants; values of the example are never looked at.
    example = not_too_small(batch, reach=1.0, shapes=shapes)
    return torch.export.export(_Evaluation(traced), (), example, dynamic_shapes=_dynamic(batch, shapes))


def _dynamic(batch: Batch, shapes: Shapes) -> dict[str, dict[int, Any]]:
    """Which dimensions of which tensors differ from batch to batch."""
    return {
        key: {place: Dim.DYNAMIC for place, size in enumerate(shapes[key]) if isinstance(size, str)} for key in batch
    }


class _Evaluation(nn.Module):
    """A trace as torch.export wants it.

    The graph must not be called `graph`: weights would become `graph.NAME` of a GraphModule, whose `graph` is its list
    of nodes.
    """

    def __init__(self, traced: Traced) -> None:
        super().__init__()
        self.evaluation = traced.graph

        def forward(**batch: Tensor) -> Any:
            return traced.unflatten(self.evaluation(*(batch[key] for key in traced.keys)))

        # Arguments whose sizes are to differ must have names in the signature.
        names = [Parameter(key, Parameter.KEYWORD_ONLY) for key in traced.keys]
        forward.__signature__ = Signature(names)  # type: ignore[attr-defined]
        self.forward = forward
