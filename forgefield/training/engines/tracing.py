"""Traces a step into one graph of tensor operations that holds for batches of any size.

Sizes of a batch (frames, atoms, edges) are symbols, each on its own: that two of them happen to be equal in the batch
at hand means nothing. Everything inside is unrolled, derivatives included, so that a compiler sees plain operations only.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

from forgefield.data.batch import SHAPES, Shapes
from forgefield.training.engines.blank import LEAST, sizes
from forgefield.training.engines.engine import OnlyOneSize

Batch = dict[str, Tensor]


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
    function: Callable[[list[Tensor], Batch], Any], static: Sequence[Tensor], batch: Batch, shapes: Shapes = SHAPES
) -> Traced:
    """The graph of `function(static, batch)`. static: tensors whose shapes never change.

    batch: only its keys, types and, as a hint, sizes matter. shapes: of its tensors.
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
            graph = make_fx(flat, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
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
