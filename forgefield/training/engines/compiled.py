"""The `compile` engine: the step, derivatives included, as one graph compiled by Inductor for batches of any size.

The graph comes from `tracing.py`, so that Inductor has nothing to differentiate and no Python code runs between two kernels.
Compiled code is valid under conditions on sizes (such as indices that fit into 32 bits); they are checked for every batch, and
the step is compiled again for a size that violates them. Inductor caches code on disk for later starts.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.standalone_compile import standalone_compile
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils._sympy.printers import PythonPrinter

from forgefield.data.batch import SHAPES, Batch, Shapes
from forgefield.data.padding import sizes
from forgefield.files import cache_folder, is_writable_folder
from forgefield.training.engines.step import StepFunction
from forgefield.training.engines.tracing import FlatFunction, Traced, TracedEngine, trace

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class CompileEngine(TracedEngine):
    """Training step and evaluation are compiled on first use. options: settings of Inductor."""

    name = "compile"
    training: CompiledFunction
    evaluation: CompiledFunction

    def __init__(
        self,
        function: StepFunction,
        *,
        world_size: int = 1,
        options: dict[str, Any] | None = None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        def make(flat: FlatFunction, name: str) -> CompiledFunction:
            return CompiledFunction(
                flat,
                options or {},
                lambda: notify(f"Compiling the {name}; later starts load the code from disk ..."),
                function.shapes,
            )

        super().__init__(function, make, world_size=world_size)


class CompiledFunction:
    """`function(static, batch)` compiled. Batches must not be smaller than `padding.MIN_SIZES`.

    options: settings of Inductor, by name.
    before_compiling: called before each compilation.
    shapes: of the tensors of a batch.
    compilations: number of compilations, those from the cache included.
    """

    def __init__(
        self,
        function: FlatFunction,
        options: dict[str, Any],
        before_compiling: Callable[[], None] = lambda: None,
        shapes: Shapes = SHAPES,
    ) -> None:
        self.function, self.options, self.shapes = function, options, shapes
        self.before_compiling = before_compiling
        self.compilations = 0
        self._variants: list[tuple[Callable[[int, int, int], bool], Callable[..., Any], Traced]] = []

    def __call__(self, static: Sequence[Tensor], batch: Batch) -> Any:
        size = sizes(batch)
        for holds, code, traced in self._variants:
            if traced.n_static == len(static) and traced.keys == tuple(batch) and holds(*size):
                return traced.unflatten(code(*static, *batch.values()))
        self._compile(static, batch)
        return self(static, batch)

    def reset(self) -> None:
        self._variants.clear()

    def _compile(self, static: Sequence[Tensor], batch: Batch) -> None:
        if len(self._variants) >= 8:
            raise RuntimeError("the step was compiled for eight ranges of batch sizes, which should never be necessary")
        self.before_compiling()
        traced = trace(self.function, static, batch, self.shapes)
        settings = {"joint_custom_post_pass": ShareEqualNodes(), **self.options}
        context = TracingContext(traced.mode)
        _set_cache_folder()
        with torch.no_grad(), tracing(context), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = standalone_compile(
                traced.graph,
                traced.inputs(),
                dynamic_shapes="from_tracing_context",
                options={"config_patches": settings},
            )
        self.compilations += 1
        self._variants.insert(0, (conditions(traced), code, traced))


def conditions(traced: Traced) -> Callable[[int, int, int], bool]:
    """Function of the numbers of frames, atoms and edges that tells whether code of this trace is valid for them."""
    names = {symbol: name for name, symbol in traced.symbols.items()}
    printer, texts = PythonPrinter(), []
    for guard in traced.environment.guards:
        expression = guard.expr.xreplace(
            {s: sympy.Symbol(names[str(s)], integer=True) for s in guard.expr.free_symbols}
        )
        texts.append(f"({printer.doprint(expression)})")
    source = " and ".join(dict.fromkeys(texts)) or "True"
    condition: Callable[[int, int, int], bool] = eval(f"lambda frames, atoms, edges: {source}")
    return condition


class ShareEqualNodes(CustomGraphPass):
    """Merges nodes of a functional graph that compute the same from the same inputs."""

    def __call__(self, graph: Graph) -> None:
        seen: dict[Hashable, Node] = {}
        for node in list(graph.nodes):
            key = _computation_key(node)
            if key is None:
                continue
            if key in seen:
                node.replace_all_uses_with(seen[key])
                graph.erase_node(node)
            else:
                seen[key] = node

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


_NOT_FUNCTIONAL = (torch.ops.aten.empty, torch.ops.aten.empty_strided, torch.ops.aten.copy_)


def _computation_key(node: Node) -> Hashable:
    """A key that is equal for nodes with equal results; None for nodes that cannot be merged."""
    target = node.target
    if node.op != "call_function":
        return None
    if isinstance(target, OpOverload) and (
        target.overloadpacket in _NOT_FUNCTIONAL or torch.Tag.nondeterministic_seeded in target.tags
    ):
        return None
    flat, structure = torch.utils._pytree.tree_flatten((node.args, node.kwargs))
    if any(isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)) for item in flat):
        flat = [(type(item), str(item)) if isinstance(item, torch.SymInt) else item for item in flat]
    try:
        key = (target, tuple((type(item), item) for item in flat), structure)
        hash(key)
    except TypeError:
        return None
    return key


def _set_cache_folder() -> None:
    """Let Inductor use Forgefield's cache folder, unless the user has set another one or it is not writable."""
    folder = cache_folder() / "inductor"
    if CACHE_VARIABLE not in os.environ and is_writable_folder(folder):
        os.environ[CACHE_VARIABLE] = str(folder)
