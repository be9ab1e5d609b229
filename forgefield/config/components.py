"""A user's model, loss, callback, logger or optimiser by import path: the only module that imports code named in a file.

Every name passes three checks before anything is called: the file may name code at all (`Trust`), the name exists, and it is
a class of the expected kind, a function whose return annotation is such a class, or, for a loss, a function. A missing
module, a name that is not in it and an unknown option are errors that name the nearest valid one.
User modules are in the working directory or next to the config file (`also_look_in`).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from forgefield.config.nearest import did_you_mean
from forgefield.config.trust import Trust
from forgefield.errors import ForgefieldError

_FOLDERS: list[Path] = []
"""Folders of the config files that this process has loaded, the newest first. Only `also_look_in` changes it."""


LOOK_IN = "FORGEFIELD_LOOK_IN"
"""Environment variable with the folders in which child processes search for modules named in a config."""


MOVED = {
    "forgefield.training.callbacks.gradient_check.GradientCheck": "forgefield.diagnosis.gradient_check.GradientCheck",
    "forgefield.training.callbacks.forward_nan.ForwardNaNDetection": "forgefield.diagnosis.forward_nan.ForwardNaNDetection",
    "forgefield.training.callbacks.training_helper.TrainingHelper": "forgefield.diagnosis.training_helper.TrainingHelper",
    "forgefield.training.callbacks.autocorrelation.ModelAutocorrelation": (
        "forgefield.diagnosis.autocorrelation.ModelAutocorrelation"
    ),
    "forgefield.training.callbacks.loss_spike.LossSpike": "forgefield.diagnosis.loss_spike.LossSpike",
    "forgefield.training.callbacks.throughput_meter.ThroughputMeter": "forgefield.diagnosis.throughput_meter.ThroughputMeter",
    "forgefield.training.callbacks.energy.EnergyMeter": "forgefield.diagnosis.energy.EnergyMeter",
    "forgefield.training.callbacks.sam.SAM": "forgefield.training.optim.sam.SAM",
    "forgefield.training.schedules.ExponentialTo": "forgefield.training.optim.schedules.ExponentialTo",
    "forgefield.training.schedules.CosineTo": "forgefield.training.optim.schedules.CosineTo",
    "forgefield.training.schedules.WarmupStableDecay": "forgefield.training.optim.schedules.WarmupStableDecay",
}
"""Import paths that configs of earlier versions may hold, and where the classes are now."""


def also_look_in(folder: str | Path) -> None:
    """Let `import_class` also search `folder`, that of a config file, until the process ends."""
    folder = Path(folder).absolute()
    if folder in _FOLDERS:
        _FOLDERS.remove(folder)
    _FOLDERS.insert(0, folder)


def environment_of_children() -> dict[str, str]:
    """This process' variables, with what lets the processes it starts find the same modules."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        LOOK_IN: os.pathsep.join(str(folder) for folder in _FOLDERS),
    }


def look_where_the_parent_did() -> None:
    """In a process that was started with `environment_of_children`: find the same modules."""
    for folder in reversed([word for word in os.environ.get(LOOK_IN, "").split(os.pathsep) if word]):
        also_look_in(folder)


def import_class(
    path: str,
    kinds: type | tuple[type, ...],
    *,
    where: str,
    trust: Trust,
    folders: Sequence[str | Path] = (),
    factories: bool = False,
) -> Any:
    """The class that `pkg.module.Name` names, which is of one of `kinds`; it has not been called.

    Parameters
    ----------
    path : import path, for example `my_model.Net` for class Net of ./my_model.py.
    kinds : classes of which it has to be a subclass.
    where : the setting that names it, for messages.
    trust : whether code may be imported.
    folders : searched after installed packages and the working directory.
    factories : whether a function will do whose return annotation is one of `kinds` or a subclass of it.
    """
    target = _import(path, where=where, trust=trust, folders=folders)
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if inspect.isclass(target) and issubclass(target, kinds):
        return target
    names = " or ".join(_full_name(kind) for kind in kinds)
    if factories and inspect.isfunction(target):
        made = _return_annotation(target)
        if inspect.isclass(made) and issubclass(made, kinds):
            return target
        raise ForgefieldError(
            f"{where}: {path} is a function whose return annotation is not {names}, so it was not "
            f"called; write `def {target.__name__}(...) -> {names}:`, or name a class."
        )
    raise ForgefieldError(
        f"{where}: {path} is {_described(target)}, not a class derived from {names}; it was not called."
    )


def import_function(path: str, *, where: str, trust: Trust) -> Callable[..., Any]:
    """The function that `pkg.module.name` names; it has not been called."""
    target = _import(path, where=where, trust=trust)
    if not inspect.isroutine(target):
        raise ForgefieldError(f"{where}: {path} is {_described(target)}, not a function.")
    return target


def builtin_class(path: str) -> Any:
    """One of Forgefield's classes by its import path, which is written in Forgefield's code. No user folder is searched."""
    module, _, name = path.rpartition(".")
    assert module.split(".")[0] == "forgefield", path
    return getattr(importlib.import_module(module), name)


def _import(path: str, *, where: str, trust: Trust, folders: Sequence[str | Path] = ()) -> Any:
    """The object that `pkg.module.Name` names, once `trust` allows it to be imported.

    Installed packages are searched first, then the current working directory, then `folders`, then those of `also_look_in`.
    """
    path = MOVED.get(str(path), str(path))
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ForgefieldError(
            f"{where}: '{path}' is not an import path: write package.module.Name, for example my_model.Net."
        )
    trust.require(path, where, next(iter(folders), None))
    folders_to_search = [Path.cwd(), *map(Path, folders), *_FOLDERS]
    try:
        with _searching(folders_to_search):
            _refuse_code_in_runs(parts[0], path, trust.never_from)
            _refuse_namesake(parts[0], path)
            return _attribute(parts, path, folders_to_search, trust.never_from)
    except ForgefieldError as error:
        raise ForgefieldError(f"{where}: {error}") from error


def _attribute(parts: Sequence[str], path: str, folders_to_search: Sequence[Path], run: Path | None) -> Any:
    target: object = _module(parts[0], path, folders_to_search=folders_to_search)
    for depth, part in enumerate(parts[1:], start=1):
        if not hasattr(target, part) and isinstance(target, ModuleType) and hasattr(target, "__path__"):
            inner = ".".join(parts[: depth + 1])
            _refuse_code_in_runs(inner, path, run)
            _module(inner, path, optional=True)
        if not hasattr(target, part):
            owner = ".".join(parts[:depth])
            names = [name for name in dir(target) if not name.startswith("_")]
            raise ForgefieldError(f"'{path}': {owner} has no '{part}'.{did_you_mean(part, names)}")
        target = getattr(target, part)
    return target


def _full_name(kind: type) -> str:
    """The name by which users know a class: that of the outermost package that exports it."""
    parts = kind.__module__.split(".")
    modules = (".".join(parts[: depth + 1]) for depth in range(len(parts)))
    public = next(name for name in modules if getattr(sys.modules.get(name), kind.__name__, None) is kind)
    return f"{public}.{kind.__name__}"


def _described(target: object) -> str:
    if inspect.isclass(target):
        return f"the class {target.__module__}.{target.__qualname__}"
    return "a function" if inspect.isroutine(target) else f"a {type(target).__name__}"


def _return_annotation(function: Callable[..., Any]) -> Any:
    try:
        return typing.get_type_hints(function).get("return")
    except Exception:  # an annotation that names something undefined
        return None


def _refuse_code_in_runs(name: str, path: str, run: Path | None) -> None:
    """Refuse the module `name`, whose parents have been imported, if it is in `run` or any other run folder."""
    if name in sys.modules:
        loaded = sys.modules[name]
        origins = [getattr(loaded, "__file__", None), *getattr(loaded, "__path__", ())]
    else:
        spec = importlib.util.find_spec(name)  # its parents are there: nothing is imported to find it
        origins = [] if spec is None else [*(spec.submodule_search_locations or ())]
        origins += [spec.origin] if spec is not None and spec.has_location else []
    for origin in filter(None, origins):
        file = Path(origin).resolve()
        for folder in (file, *file.parents):
            if (run is not None and folder == run.resolve()) or _is_run(folder):
                raise ForgefieldError(
                    f"'{path}': {origin} lies in the run folder {folder}, and code in a run is never executed; move the "
                    "module to a folder of your own."
                )


def _is_run(folder: Path) -> bool:
    return (folder / "run.json").is_file() and (folder / "checkpoints").is_dir()


def user_module_folder(path: str) -> Path | None:
    """The folder to search for the module of an imported `path`; None if Python finds it without that."""
    file = getattr(sys.modules.get(str(path).split(".")[0]), "__file__", None)
    if file is None:
        return None
    folder = Path(file).absolute().parent
    folder = folder.parent if Path(file).stem == "__init__" else folder
    searched = {Path(entry or ".").absolute() for entry in sys.path}
    return None if folder in searched else folder


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
    prefix = f"{file}: " if file is not None else ""
    name = getattr(target, "__name__", str(target))
    for key in options:
        if key in supplied:
            raise ForgefieldError(f"{prefix}'{where}.{key}' is set by Forgefield itself; leave it out.")
        if not takes_any and key not in valid:
            allowed = [option for option in valid if option not in supplied]
            hint = did_you_mean(str(key), allowed) or f" It takes: {', '.join(allowed) or 'no options'}."
            raise ForgefieldError(f"{prefix}unknown key '{where}.{key}': {name} has no option '{key}'.{hint}")


def _keywords(target: Callable[..., Any]) -> tuple[list[str], bool]:
    """Names that can be passed by keyword, and whether any name is taken."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # some functions written in C have no signature; calling them checks the arguments
        return [], True
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [parameter.name for parameter in parameters if parameter.kind in named and parameter.name != "self"]
    return names, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _module(
    name: str, path: str, *, folders_to_search: Sequence[Path] = (), optional: bool = False
) -> ModuleType | None:
    """Import one module, also from these folders. optional: return None if there is none, because it may be an attribute."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing == name:
            if optional:
                return None
            raise ForgefieldError(
                f"'{path}': there is no module '{name}', neither installed nor in "
                f"{' or '.join(dict.fromkeys(map(str, folders_to_search)))}."
                + did_you_mean(name, _modules_in(folders_to_search))
            ) from error
        raise ForgefieldError(f"'{path}': importing {name} failed, it needs the missing module '{missing}'.") from error
    except Exception as error:
        raise ForgefieldError(f"'{path}': importing {name} failed: {type(error).__name__}: {error}") from error


def _modules_in(folders_to_search: Sequence[Path]) -> list[str]:
    return [file.stem for folder in folders_to_search for file in folder.glob("*.py")]


def _refuse_namesake(name: str, path: str) -> None:
    """Python keeps one module per name; refuse to take the one of another folder for the one that is meant here."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if loaded is None:
        return
    specs = (finder.find_spec(name, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    origin = next((spec.origin for spec in specs if spec is not None), None)
    if origin is not None and Path(origin).is_file() and Path(origin).resolve() != Path(loaded).resolve():
        raise ForgefieldError(
            f"'{path}': {origin} is meant, but this process has already imported another module '{name}' from {loaded}; "
            "rename one of the two, or use a process for each."
        )


@contextmanager
def _searching(folders: Sequence[Path]) -> Iterator[None]:
    """Inside, imports also search `folders`, after installed packages."""
    added = [str(folder) for folder in folders if str(folder) not in sys.path]
    sys.path.extend(added)
    # A file written a moment ago is otherwise invisible to the import system.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)
