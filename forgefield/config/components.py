"""A user's own model, loss or callback by import path, and its options checked against its signature.

Nothing is guessed: a module that is not there, a name that is not in it and an option that is not taken are errors
that name the nearest valid one.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError


def import_path(path: str, *, folders: Sequence[str | Path] = ()) -> Any:
    """The object that `pkg.module.Name` names, for example `my_model.Net` for class Net of ./my_model.py.

    Installed packages are looked up first, then the current working directory, then `folders`.
    """
    parts = str(path).split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ForgefieldError(f"'{path}' is not an import path: write package.module.Name, for example my_model.Net.")
    with _searching([Path.cwd(), *map(Path, folders)]):
        found: Any = _module(parts[0], path)
        for depth, part in enumerate(parts[1:], start=1):
            if not hasattr(found, part) and isinstance(found, ModuleType) and hasattr(found, "__path__"):
                _module(".".join(parts[: depth + 1]), path, optional=True)
            if not hasattr(found, part):
                owner = ".".join(parts[:depth])
                names = [name for name in dir(found) if not name.startswith("_")]
                raise ForgefieldError(f"'{path}': {owner} has no '{part}'.{did_you_mean(part, names)}")
            found = getattr(found, part)
    return found


def check_signature(
    target: Callable[..., Any],
    options: Mapping[str, Any],
    where: str,
    file: str | Path | None = None,
    *,
    supplied: Collection[str] = (),
) -> None:
    """Refuse options that `target` does not take, naming the section `where`, the file and the nearest valid option.

    `supplied` are the arguments that Forgefield passes itself; a user cannot set them.
    """
    valid, takes_any = _keywords(target)
    place = f"{file}: " if file is not None else ""
    name = getattr(target, "__name__", str(target))
    for key in options:
        if key in supplied:
            raise ForgefieldError(f"{place}'{where}.{key}' is set by Forgefield itself; leave it out.")
        if not takes_any and key not in valid:
            allowed = [option for option in valid if option not in supplied]
            hint = did_you_mean(str(key), allowed) or f" It takes: {', '.join(allowed) or 'no options'}."
            raise ForgefieldError(f"{place}unknown key '{where}.{key}': {name} has no option '{key}'.{hint}")


def _keywords(target: Callable[..., Any]) -> tuple[list[str], bool]:
    """Names that can be passed by keyword, and whether any name is taken."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # some functions written in C do not say what they take; calling them will
        return [], True
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [parameter.name for parameter in parameters if parameter.kind in named and parameter.name != "self"]
    return names, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _module(name: str, path: str, *, optional: bool = False) -> ModuleType | None:
    """Import one module; `optional` where an attribute of that name would do as well."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing == name:
            if optional:
                return None
            raise ForgefieldError(
                f"'{path}': there is no module '{name}', neither installed nor in {Path.cwd()}."
                + did_you_mean(name, _modules_here())
            ) from error
        raise ForgefieldError(f"'{path}': importing {name} failed, it needs the missing module '{missing}'.") from error
    except Exception as error:
        raise ForgefieldError(f"'{path}': importing {name} failed: {type(error).__name__}: {error}") from error


def _modules_here() -> list[str]:
    return [file.stem for file in Path.cwd().glob("*.py")]


@contextmanager
def _searching(folders: Sequence[Path]) -> Iterator[None]:
    """Let imports also look into `folders`, behind everything installed, and tidy up afterwards."""
    added = [str(folder) for folder in folders if str(folder) not in sys.path]
    sys.path.extend(added)
    # A file written a moment ago is otherwise invisible to the import system.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)
