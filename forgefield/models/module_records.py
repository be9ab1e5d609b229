"""PyTorch modules of other programs, read as inert records: their classes, children, attributes, parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.untrusted.torch_files import Record


def class_name(value: object) -> str:
    """Name of the class of a record, or of a class or function that is stored itself."""
    origin = getattr(value, "origin", "")
    return str(origin).rpartition(".")[2]


def children_of(module: Record) -> dict[str, Record]:
    """Submodules by name."""
    state = module.state if isinstance(module.state, Mapping) else {}
    children = state.get("_modules") or {}
    return {
        str(name): child
        for name, child in children.items()
        if isinstance(child, Record) and isinstance(child.state, Mapping)
    }


def attribute(path: Path, module: Record, name: str) -> Any:
    """An attribute that the module has to have. path: of the file, for messages."""
    if name not in module.state:
        raise ForgefieldError(
            f"{path}: {class_name(module)} has no attribute {name}; the file is not of a supported version."
        )
    return module.state[name]


def tensors_of(module: Record, prefix: str = "", *, persistent: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of a module by name. persistent: only those that `state_dict` has."""
    left_out = (module.state.get("_non_persistent_buffers_set") or ()) if persistent else ()
    for group in ("_parameters", "_buffers"):
        for name, value in (module.state.get(group) or {}).items():
            if isinstance(value, Tensor) and not (group == "_buffers" and name in left_out):
                yield f"{prefix}{name}", value
    for name, child in children_of(module).items():
        yield from tensors_of(child, f"{prefix}{name}.", persistent=persistent)


def irreps_text(value: object) -> str:
    """Irreps as text, `128x0e+128x1o`, from a record of e3nn's class or from text."""
    if isinstance(value, str):
        return value.replace(" ", "")
    parts = []
    for entry in value.args[0] if isinstance(value, Record) else ():
        mul, irrep = entry.args[0] if len(entry.args) == 1 else entry.args
        l, p = irrep.args[0] if len(irrep.args) == 1 else irrep.args
        parts.append(f"{int(mul)}x{int(l)}{'e' if p == 1 else 'o'}")
    return "+".join(parts)
