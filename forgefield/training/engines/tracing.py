"""Traces a step as one graph of tensor operations for batches of any size.

Sizes of a batch (frames, atoms, edges) are independent symbols, even if two of them are equal in the example. Everything is
unrolled, derivatives included, so that the graph contains tensor operations only.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Protocol

import sympy
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from forgefield.data.batch import SHAPES, Batch, Shapes
from forgefield.data.padding import MIN_SIZES, padded_to_minimum, sizes
from forgefield.training.engines.engine import Denominators, Engine, FixedSizeError, Step
from forgefield.training.engines.step import Differentiated, Measured, StepFunction


@dataclass(frozen=True)
class Traced:
    """A traced function.

    graph: takes the static tensors and then the tensors of a batch in the order of `keys`; returns a flat list.
    symbols: names of the sizes in `environment`, whose guards are the conditions on sizes under which the graph is valid.
    structure: of the result, for `unflatten`.
    """

    graph: GraphModule
    mode: FakeTensorMode
    n_static: int
    keys: tuple[str, ...]
    environment: ShapeEnv
    symbols: dict[str, str]
    structure: TreeSpec

    def inputs(self) -> list[Any]:
        """The fake tensors with which it was traced."""
        return [node.meta["val"] for node in self.graph.graph.nodes if node.op == "placeholder"]

    def unflatten(self, values: Sequence[Tensor | None]) -> Any:
        return tree_unflatten(list(values), self.structure)


def trace(
    function: Callable[[list[Tensor], Batch], Any],
    static: Sequence[Tensor],
    batch: Batch,
    shapes: Shapes = SHAPES,
    *,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Traced:
    """The graph of `function(static, batch)`.

    static: tensors whose shapes never change.
    batch: an example; its keys and types are used, and its sizes as hints.
    shapes: of the tensors of a batch.
    decompositions: operators, and functions whose operations replace them in the graph.
    """
    environment = _SymbolicSizes(duck_shape=False)
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # with symbolic sizes the search in the cache takes longer than the operation
    lengths, symbols = _symbolic_sizes(environment, batch)
    keys = tuple(batch)
    structure: TreeSpec | None = None

    def flat(*tensors: Tensor) -> list[Any]:
        nonlocal structure
        arguments = list(tensors)
        leaves, structure = tree_flatten(function(arguments[: len(static)], dict(zip(keys, arguments[len(static) :]))))
        return leaves

    with mode, enable_python_dispatcher():
        inputs: list[Any] = [mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in static]
        for key, tensor in batch.items():
            shape = [lengths.get(size, size) for size in shapes[key]]
            inputs.append(torch.empty(shape, dtype=tensor.dtype, device=tensor.device))
        with torch.enable_grad(), _ZeroTangents():
            table = dict(decompositions or {})
            graph = make_fx(flat, table, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
    if environment.pinned:
        raise FixedSizeError(
            "the step can be traced only for batches of one size, because a size is used as a number "
            f"({environment.pinned[0]})"
        )
    assert structure is not None
    return Traced(graph, mode, len(static), keys, environment, symbols, structure)


def _symbolic_sizes(environment: ShapeEnv, batch: Batch) -> tuple[dict[Any, Any], dict[str, str]]:
    hints = dict(zip(("frames", "atoms", "edges"), sizes(batch)))
    lengths, symbols = {}, {}
    for name, size in hints.items():
        # Rounded up, so that most batches of a data set have the same hint and cached code is found again.
        hint = max(8 if name == "frames" else MIN_SIZES[name], 1 << (size - 1).bit_length())
        source = ConstantSource(name)
        symbol = environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        lengths[name] = environment.create_symintnode(symbol, hint=hint, source=source)
        symbols[name] = str(symbol)
    return lengths, symbols


class _SymbolicSizes(ShapeEnv):
    """Records the lines of code that require a size to be a constant, `pinned`."""

    pinned: list[str]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pinned = []

    def _log_guard(self, prefix: str, g: sympy.Basic, *arguments: Any, **options: Any) -> None:
        if isinstance(g, sympy.Eq):
            self.pinned.append(_user_line(traceback.extract_stack()))
        super()._log_guard(prefix, g, *arguments, **options)


class _ZeroTangents(TorchFunctionMode):
    """Operands without a tangent get a tangent of zeros in operations with operands that have one.

    Torch itself would create zeros of a fixed size.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not _level_is_open():
            return function(*args, **kwargs)
        flat, structure = tree_flatten((args, kwargs))
        duals = [item for item in flat if _is_floating(item) and forward_ad.unpack_dual(item).tangent is not None]
        if not duals:
            return function(*args, **kwargs)
        operands = len(tree_flatten(args)[0]) if getattr(function, "__name__", "") in _OF_TWO_OPERANDS else 0
        for i, item in enumerate(flat):
            if i < operands and isinstance(item, (int, float)):
                item = torch.full((), item, dtype=duals[0].dtype, device=duals[0].device)
            if _is_floating(item) and forward_ad.unpack_dual(item).tangent is None:
                flat[i] = forward_ad.make_dual(item, torch.zeros_like(item))
        args, kwargs = tree_unflatten(flat, structure)
        return function(*args, **kwargs)


_ARITHMETIC = ("mul", "truediv", "div", "add", "sub")
_OF_TWO_OPERANDS = {
    *("mul", "multiply", "div", "true_divide", "divide", "add", "sub", "rsub"),
    *(f"__{side}{name}__" for side in ("", "r") for name in _ARITHMETIC),
}
"""Operations of two operands, one of which may be a number."""


def _is_floating(item: object) -> bool:
    return isinstance(item, Tensor) and item.is_floating_point()


def _level_is_open() -> bool:
    """Whether forward-mode differentiation is active; inside the handling of an operation it is not."""
    tracing = any(isinstance(mode, ProxyTorchDispatchMode) for mode in _get_current_dispatch_mode_stack())
    return forward_ad._current_level >= 0 and tracing


def failing_line(error: BaseException) -> str:
    """The line of code that raised an error, as `file:line: code`: of the user's model if possible."""
    return _user_line(traceback.extract_tb(error.__traceback__))


def _user_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of the user's model, else of Forgefield."""
    torch_folder, forgefield_folder, here = (
        Path(torch.__file__).parent,
        Path(__file__).parents[2],
        Path(__file__).parent,
    )
    outside = [frame for frame in frames if not {torch_folder, here} & set(Path(frame.filename).parents)]
    entered = max((i for i, frame in enumerate(outside) if Path(frame.filename).name == "potential.py"), default=-1)
    users = [frame for frame in outside[entered + 1 :] if forgefield_folder not in Path(frame.filename).parents]
    ours = [frame for frame in outside if forgefield_folder in Path(frame.filename).parents]
    innermost = (users if entered >= 0 and users else ours or list(frames))[-1]
    return f"{innermost.filename}:{innermost.lineno}: {(innermost.line or '').strip()}"


FlatFunction = Callable[[list[Tensor], Batch], Any]


class TracedFunction(Protocol):
    """A function of static tensors and a batch that is traced on its first call."""

    def __call__(self, static: Sequence[Tensor], batch: Batch) -> Any: ...

    def reset(self) -> None: ...


class TracedEngine(Engine):
    """An engine that traces training step and evaluation. Batches smaller than `MIN_SIZES` are padded.

    make: called with each function and its name for messages.
    """

    def __init__(
        self, function: StepFunction, make: Callable[[FlatFunction, str], TracedFunction], *, world_size: int = 1
    ) -> None:
        super().__init__(function, world_size=world_size)
        self.cutoff = function.potential.adaptive_cutoff or function.potential.cutoff
        n, m = len(function.trained), len(function.trained) + len(function.fixed)
        self.training = make(
            lambda static, batch: function.differentiate(
                static[:n], static[n:m], batch, static[m], static[m + 1] if len(static) > m + 1 else None
            ),
            "training step",
        )
        self.evaluation = make(lambda static, batch: function.evaluate(static[:n], static[n:], batch), "evaluation")

    def step(self, batch: Batch, denominators: Denominators | None = None) -> Step:
        return self._as_step(self.differentiate(batch, denominators))

    def differentiate(self, batch: Batch, denominators: Denominators | None = None) -> Differentiated:
        trained, fixed, batch, weights, values = self._inputs(self._padded(batch), denominators)
        result: Differentiated = self.training(
            [*trained, *fixed, weights, *([] if values is None else [values])], batch
        )
        return result

    def evaluate(self, batch: Batch) -> Measured:
        trained, fixed, batch, _, _ = self._inputs(self._padded(batch), None)
        result: Measured = self.evaluation([*trained, *fixed], batch)
        return result

    def _padded(self, batch: Batch) -> Batch:
        return padded_to_minimum(batch, self.cutoff, self.function.shapes, self.function.task.outputs)

    def reset(self) -> None:
        self.training.reset()
        self.evaluation.reset()


def export_evaluation(
    evaluate: Callable[[Batch], Any],
    batch: Batch,
    shapes: Shapes = SHAPES,
    *,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> ExportedProgram:
    """The program of `evaluate(batch)`, which takes the tensors of a batch as keyword arguments.

    evaluate: returns tensors, or tuples, lists and dictionaries of them.
    batch: an example of any size, with exactly the keys that the program takes, on the device where the program will run.
    shapes: of the tensors of a batch.
    decompositions: as in `trace`.
    """
    traced = trace(lambda static, batch: evaluate(batch), [], batch, shapes, decompositions=decompositions)
    # torch.export treats sizes of zero and one as constants; the values of the example are not used.
    example = padded_to_minimum(batch, cutoff=1.0, shapes=shapes)
    return torch.export.export(_Evaluation(traced), (), example, dynamic_shapes=_dynamic(batch, shapes))


def _dynamic(batch: Batch, shapes: Shapes) -> dict[str, dict[int, Any]]:
    """The dimensions of tensors that differ between batches."""
    return {key: {i: Dim.DYNAMIC for i, size in enumerate(shapes[key]) if isinstance(size, str)} for key in batch}


class _Evaluation(nn.Module):
    """A trace as a module for torch.export.

    The attribute must not be named `graph`: weights would become `graph.NAME` of a GraphModule, whose `graph` is its list of
    nodes.
    """

    def __init__(self, traced: Traced) -> None:
        super().__init__()
        self.evaluation = traced.graph

        def forward(**batch: Tensor) -> Any:
            return traced.unflatten(self.evaluation(*(batch[key] for key in traced.keys)))

        # Arguments with dynamic sizes must have names in the signature.
        names = [Parameter(key, Parameter.KEYWORD_ONLY) for key in traced.keys]
        forward.__signature__ = Signature(names)  # type: ignore[attr-defined]
        self.forward = forward
