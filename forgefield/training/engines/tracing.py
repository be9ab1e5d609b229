"""Traces a step into one graph of tensor operations that holds for batches of any size.

Sizes of a batch (frames, atoms, edges) are symbols, each on its own: that two of them happen to be equal in the batch
at hand means nothing. Everything inside is unrolled, derivatives included, so that a compiler sees plain operations only.
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
from torch.utils._pytree import tree_flatten, tree_unflatten

from forgefield.data.batch import SHAPES, Batch, Shapes
from forgefield.training.engines.engine import Denominators, Engine, OnlyOneSize, Step
from forgefield.training.engines.padding import LEAST, not_too_small, sizes
from forgefield.training.engines.step import Differentiated, Measured, StepFunction


@dataclass(frozen=True)
class Traced:
    """graph: takes the flat list of static tensors and then the batch's tensors in the order of `keys`; gives a flat list.

    symbols: names of the sizes in `environment`, whose guards say for which sizes the graph is right.
    """

    graph: GraphModule
    mode: FakeTensorMode
    n_static: int
    keys: tuple[str, ...]
    environment: ShapeEnv
    symbols: dict[str, str]
    structure: Any

    def inputs(self) -> list[Any]:
        """The stand-ins that it was traced with."""
        return [node.meta["val"] for node in self.graph.graph.nodes if node.op == "placeholder"]

    def unflatten(self, values: Sequence[Tensor]) -> Any:
        return tree_unflatten(list(values), self.structure)


def trace(
    function: Callable[[list[Tensor], Batch], Any],
    static: Sequence[Tensor],
    batch: Batch,
    shapes: Shapes = SHAPES,
    *,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Traced:
    """The graph of `function(static, batch)`. static: tensors whose shapes never change.

    batch: only its keys, types and, as a hint, sizes matter. shapes: of its tensors. decompositions: operators that are
    replaced in the graph by the operations of a function.
    """
    environment = _Sizes(duck_shape=False)
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # sizes are symbols: to look for the same operation takes longer than to do it
    lengths, symbols = _symbolic_sizes(environment, batch)
    keys = tuple(batch)
    structure: Any = None

    def flat(*tensors: Tensor) -> list[Any]:
        nonlocal structure
        given = list(tensors)
        leaves, structure = tree_flatten(function(given[: len(static)], dict(zip(keys, given[len(static) :]))))
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
        raise OnlyOneSize(
            "the step can be traced only for batches of one size, because a size is used as a number "
            f"({environment.pinned[0]})"
        )
    return Traced(graph, mode, len(static), keys, environment, symbols, structure)


def _symbolic_sizes(environment: ShapeEnv, batch: Batch) -> tuple[dict[Any, Any], dict[str, str]]:
    hints = dict(zip(("frames", "atoms", "edges"), sizes(batch)))
    lengths, symbols = {}, {}
    for name, size in hints.items():
        # Nearly the same for all batches of a data set, so that code is found again.
        hint = max(8 if name == "frames" else LEAST[name], 1 << (size - 1).bit_length())
        source = ConstantSource(name)
        symbol = environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        lengths[name] = environment.create_symintnode(symbol, hint=hint, source=source)
        symbols[name] = str(symbol)
    return lengths, symbols


class _Sizes(ShapeEnv):
    """Notes where a size was made a number, which would tie the trace to it."""

    pinned: list[str]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pinned = []

    def _log_guard(self, prefix: str, g: Any, *rest: Any, **more: Any) -> None:
        if isinstance(g, sympy.Eq):
            self.pinned.append(_last_place(traceback.extract_stack()))
        super()._log_guard(prefix, g, *rest, **more)


class _ZeroTangents(TorchFunctionMode):
    """Where an operation meets operands with and without tangent, those without get one of zeros.

    Torch itself would make the zeros, but of a fixed size.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _level_is_open():
            return function(*args, **kwargs)
        flat, structure = tree_flatten((args, kwargs))
        moving = [item for item in flat if _is_floating(item) and forward_ad.unpack_dual(item).tangent is not None]
        if not moving:
            return function(*args, **kwargs)
        operands = len(tree_flatten(args)[0]) if getattr(function, "__name__", "") in _OF_TWO_OPERANDS else 0
        for i, item in enumerate(flat):
            if i < operands and isinstance(item, (int, float)):
                item = torch.full((), item, dtype=moving[0].dtype, device=moving[0].device)
            if _is_floating(item) and forward_ad.unpack_dual(item).tangent is None:
                flat[i] = forward_ad.make_dual(item, torch.zeros_like(item))
        args, kwargs = tree_unflatten(flat, structure)
        return function(*args, **kwargs)


_ARITHMETIC = ("mul", "truediv", "div", "add", "sub")
_OF_TWO_OPERANDS = {
    *("mul", "multiply", "div", "true_divide", "divide", "add", "sub", "rsub"),
    *(f"__{side}{name}__" for side in ("", "r") for name in _ARITHMETIC),
}
"""Operations of two operands, of which one may be a plain number."""


def _is_floating(item: Any) -> bool:
    return isinstance(item, Tensor) and item.is_floating_point()


def _level_is_open() -> bool:
    """Whether tangents are being carried along at this point; inside the handling of an operation they are not."""
    tracing = any(isinstance(mode, ProxyTorchDispatchMode) for mode in _get_current_dispatch_mode_stack())
    return forward_ad._current_level >= 0 and tracing


def where_it_broke(error: BaseException) -> str:
    """`file:line: code` of the place in a traceback that the user can do something about."""
    return _last_place(traceback.extract_tb(error.__traceback__))


def _last_place(frames: Sequence[traceback.FrameSummary]) -> str:
    """The last place inside the user's own model, or of ours where there is none."""
    torch_folder, user_module_folder, here = (
        Path(torch.__file__).parent,
        Path(__file__).parents[2],
        Path(__file__).parent,
    )
    outside = [frame for frame in frames if not {torch_folder, here} & set(Path(frame.filename).parents)]
    entered = max((i for i, frame in enumerate(outside) if Path(frame.filename).name == "potential.py"), default=-1)
    users = [frame for frame in outside[entered + 1 :] if user_module_folder not in Path(frame.filename).parents]
    ours = [frame for frame in outside if user_module_folder in Path(frame.filename).parents]
    chosen = (users if entered >= 0 and users else ours or list(frames))[-1]
    return f"{chosen.filename}:{chosen.lineno}: {(chosen.line or '').strip()}"


Flat = Callable[[list[Tensor], Batch], Any]


class MadeFunction(Protocol):
    """Code made of a function of static tensors and a batch."""

    def __call__(self, static: Sequence[Tensor], batch: Batch) -> Any: ...

    def forget(self) -> None: ...


class TracedEngine(Engine):
    """make: code of a function, named for messages. Batches that are too small for traced code are filled up."""

    def __init__(
        self, function: StepFunction, make: Callable[[Flat, str], MadeFunction], *, world_size: int = 1
    ) -> None:
        super().__init__(function, world_size=world_size)
        self.reach = function.potential.adaptive_cutoff or function.potential.cutoff
        n, m = len(function.trained), len(function.trained) + len(function.fixed)
        self.training = make(
            lambda static, batch: function.differentiate(
                static[:n], static[n:m], batch, static[m], static[m + 1] if len(static) > m + 1 else None
            ),
            "training step",
        )
        self.evaluation = make(lambda static, batch: function.evaluate(static[:n], static[n:], batch), "evaluation")

    def step(self, batch: Batch, denominators: Denominators | None = None) -> Step:
        return self._given(self.differentiate(batch, denominators))

    def differentiate(self, batch: Batch, denominators: Denominators | None = None) -> Differentiated:
        trained, fixed, batch, weights, known = self._inputs(self._not_too_small(batch), denominators)
        return self.training([*trained, *fixed, weights, *([] if known is None else [known])], batch)

    def evaluate(self, batch: Batch) -> Measured:
        trained, fixed, batch, _, _ = self._inputs(self._not_too_small(batch), None)
        return self.evaluation([*trained, *fixed], batch)

    def _not_too_small(self, batch: Batch) -> Batch:
        return not_too_small(batch, self.reach, self.function.shapes, self.function.task.outputs)

    def forget(self) -> None:
        self.training.forget()
        self.evaluation.forget()


def export_evaluation(
    evaluate: Callable[[Batch], Any],
    batch: Batch,
    shapes: Shapes = SHAPES,
    *,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> ExportedProgram:
    """The program of `evaluate(batch)`: it takes the tensors of a batch by their keys, in any order, and gives the same.

    evaluate: gives tensors, or tuples, lists and dictionaries of them. batch: an example with exactly the keys that the
    program is to be given; of any size, on the device where the program is to run. shapes: of its tensors.
    decompositions: as in `trace`.
    """
    traced = trace(lambda static, given: evaluate(given), [], batch, shapes, decompositions=decompositions)
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
