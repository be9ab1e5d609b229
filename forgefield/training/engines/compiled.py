"""The `compile` engine: the whole step, derivatives included, as one graph compiled by Inductor for batches of any size.

The graph comes from `tracing.py`, so that Inductor meets no derivative at all and Python runs nothing between two kernels. The
compiled code carries the conditions under which it is right (such as indices that fit 32 bits); they are checked for every new
size, and a size that breaks one gets code of its own. Code is kept on disk by Inductor and found again by later starts.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.standalone_compile import standalone_compile
from torch.fx import Graph, Node
from torch.utils._sympy.printers import PythonPrinter

from forgefield.data.batch import SHAPES, Batch, Shapes
from forgefield.files import cache_folder, is_writable_folder
from forgefield.training.engines.padding import sizes
from forgefield.training.engines.step import StepFunction
from forgefield.training.engines.tracing import Flat, Traced, TracedEngine, trace

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class CompileEngine(TracedEngine):
    """Training step and evaluation compiled, each on first use. options: of Inductor. say: tells what is going on."""

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
        def make(flat: Flat, what: str) -> CompiledFunction:
            return CompiledFunction(
                flat,
                options or {},
                lambda: notify(f"Compiling the {what}; later starts find the code on disk ..."),
                function.shapes,
            )

        super().__init__(function, make, world_size=world_size)


class CompiledFunction:
    """`function(static, batch)` compiled. Batches must not be smaller than `blank.LEAST`.

    options: settings of Inductor, by their names. before: called before code is made. shapes: of a batch.
    compilations: how often code was made, or found on disk.
    """

    def __init__(
        self,
        function: Callable[[list[Tensor], Batch], Any],
        options: dict[str, Any],
        before: Callable[[], None] = lambda: None,
        shapes: Shapes = SHAPES,
    ) -> None:
        self.function, self.options, self.before, self.shapes = function, options, before, shapes
        self.compilations = 0
        self._variants: list[tuple[Callable[[int, int, int], bool], Callable[..., Any], Traced]] = []

    def __call__(self, static: Sequence[Tensor], batch: Batch) -> Any:
        size = sizes(batch)
        for holds, code, traced in self._variants:
            if traced.n_static == len(static) and traced.keys == tuple(batch) and holds(*size):
                return traced.unflatten(code(*static, *batch.values()))
        self._compile(static, batch)
        return self(static, batch)

    def forget(self) -> None:
        self._variants.clear()

    def _compile(self, static: Sequence[Tensor], batch: Batch) -> None:
        if len(self._variants) >= 8:
            raise RuntimeError("eight sizes of batches have needed code of their own; something is wrong")
        self.before()
        traced = trace(self.function, static, batch, self.shapes)
        settings = {"joint_custom_post_pass": ShareEqualNodes(), **self.options}
        context = TracingContext(traced.mode)
        with torch.no_grad(), tracing(context), _kept_cache(), warnings.catch_warnings():
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
    """Whether code made from the trace is right for so many frames, atoms and edges."""
    names = {symbol: name for name, symbol in traced.symbols.items()}
    printer, texts = PythonPrinter(), []
    for guard in traced.environment.guards:
        expression = guard.expr.xreplace(
            {s: sympy.Symbol(names[str(s)], integer=True) for s in guard.expr.free_symbols}
        )
        texts.append(f"({printer.doprint(expression)})")
    source = " and ".join(dict.fromkeys(texts)) or "True"
    return eval(f"lambda frames, atoms, edges: {source}")


class ShareEqualNodes(CustomGraphPass):
    """Nodes of a functional graph that compute the same from the same become one."""

    def __call__(self, graph: Graph) -> None:
        seen: dict[Any, Node] = {}
        for node in list(graph.nodes):
            key = _what_it_computes(node)
            if key is None:
                continue
            if key in seen:
                node.replace_all_uses_with(seen[key])
                graph.erase_node(node)
            else:
                seen[key] = node

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


_UNLIKE_ITSELF = (torch.ops.aten.empty, torch.ops.aten.empty_strided, torch.ops.aten.copy_)


def _what_it_computes(node: Node) -> Any:
    """A key that is equal for nodes with equal results; None where there is no such thing."""
    if node.op != "call_function" or getattr(node.target, "overloadpacket", None) in _UNLIKE_ITSELF:
        return None
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return None
    flat, structure = torch.utils._pytree.tree_flatten((node.args, node.kwargs))
    if any(isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)) for item in flat):
        flat = [(type(item), str(item)) if isinstance(item, torch.SymInt) else item for item in flat]
    try:
        key = (node.target, tuple((type(item), item) for item in flat), structure)
        hash(key)
    except TypeError:
        return None
    return key


@contextmanager
def _kept_cache():
    """Code is kept where our other caches are, unless the user has said where."""
    folder = cache_folder() / "inductor"
    if CACHE_VARIABLE not in os.environ and is_writable_folder(folder):  # else torch keeps it where it usually does
        os.environ[CACHE_VARIABLE] = str(folder)
    yield
