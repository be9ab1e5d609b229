"""From what a config says to snapshots: a file, a glob, a folder, a list of these, or a mapping that names each file.

The files of a snapshot are found by name: Be_snapshot0.in.npy (descriptors), Be_snapshot0.out.npy (LDOS), and
Be_snapshot0.info.json or, failing that, the Quantum ESPRESSO output Be_snapshot0.out.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.ldos.data.rows import require_file
from forgefield.ldos.data.snapshot import Snapshot
from forgefield.ldos.data.units import require_target

SUFFIXES = (".npy", ".h5", ".hdf5")
INPUT = ".in"
TARGETS = {"ldos": (".out", ".ldos"), "dos": (".dos", ".out"), "density": (".dens", ".density", ".out")}
"""Middle part of the names of target files, the usual one first."""
INFO = (".info.json", ".out")
KEYS = ("inputs", "targets", "info", "units", "coordinates")


def find_snapshots(
    spec: object,
    *,
    target: str = "ldos",
    units: str | None = None,
    coordinates: bool | None = None,
    need: Sequence[str] = ("inputs", "targets"),
    setting: str = "data.train",
) -> list[Snapshot]:
    """All snapshots that `spec` names, each of which exists; in a folder or of a glob in the order of their names.

    units, coordinates: as for `Snapshot`, for those that do not say so themselves. need: which of inputs, targets and info
    each must have. setting: name of the option in messages.
    """
    require_target(target)
    found: list[Snapshot] = []
    for entry in _entries(spec, setting):
        options: dict[str, Any] = {"units": units, "coordinates": coordinates}
        if isinstance(entry, Mapping):
            files, own = _named(entry, setting, target)
            options |= own
        else:
            files = _partners(Path(entry), target)
        found.append(_opened(files, target, options, need))
    _refuse_twice(found, setting)
    return found


def _entries(spec: object, setting: str) -> list[Any]:
    if isinstance(spec, (str, os.PathLike)):
        return list(_paths(os.fspath(spec)))
    if isinstance(spec, Mapping):
        return [spec]
    if isinstance(spec, Sequence) and spec:
        return [entry for item in spec for entry in _entries(item, setting)]
    raise ForgefieldError(
        f"{setting}={spec!r} does not name a snapshot; give a file (Be_snapshot0.in.npy), a folder, a glob, or a list of these "
        "or of {inputs, targets, info, units}"
    )


def _paths(text: str) -> list[Path]:
    path = Path(text).expanduser()
    if path.is_dir():
        names = sorted(inside for inside in path.iterdir() if _is_input(inside))
        if not names:
            raise ForgefieldError(f"{path}: this folder holds no snapshot, no file such as Be_snapshot0.in.npy")
        return _one_each(names)
    if glob.has_magic(text) and not path.exists():
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        inputs = [match for match in matches if _is_input(match)]
        chosen = inputs or [match for match in matches if match.suffix in SUFFIXES]
        if not chosen:
            raise ForgefieldError(
                f"{text}: no file of values on a grid matches this pattern (looked from {Path.cwd()})"
            )
        return _one_each(chosen)
    require_file(path)
    return [path]


def _is_input(path: Path) -> bool:
    return path.suffix in SUFFIXES and path.stem.endswith(INPUT) and path.is_file()


def _one_each(paths: list[Path]) -> list[Path]:
    """One file of each snapshot: descriptors may lie there as .npy and as .h5."""
    chosen: dict[Path, Path] = {}
    for path in sorted(paths, key=lambda path: SUFFIXES.index(path.suffix)):
        chosen.setdefault(path.with_name(base_name(path)), path)
    return sorted(chosen.values())


def base_name(path: Path) -> str:
    """Be_snapshot0 of Be_snapshot0.in.npy; a stem without such a middle part is the name itself."""
    stem, middle = path.stem, {INPUT, *(part for parts in TARGETS.values() for part in parts)}
    return next((stem.removesuffix(part) for part in sorted(middle, key=len) if stem.endswith(part)), stem)


def _partners(path: Path, target: str) -> dict[str, Path | None]:
    """The files that belong to a file by their names."""
    if path.suffix not in SUFFIXES:
        raise ForgefieldError(
            f"{path}: a snapshot is named by its descriptors, a file such as {base_name(path)}.in.npy"
        )
    base = path.with_name(base_name(path))
    is_input = path.stem.endswith(INPUT) or path.stem == base.name
    endings = (path.suffix, *(suffix for suffix in SUFFIXES if suffix != path.suffix))
    wanted = TARGETS[target] if is_input else (INPUT,)
    other = _first(base, [f"{part}{suffix}" for part in wanted for suffix in endings])
    info = _first(base, list(INFO))
    inputs, targets = (path, other) if is_input else (other, path)
    return {"inputs": inputs, "targets": targets, "info": info, "base": base}


def _first(base: Path, endings: list[str]) -> Path | None:
    candidates = (base.with_name(base.name + ending) for ending in endings)
    return next((path for path in candidates if path.is_file()), None)


def _named(entry: Mapping[str, Any], setting: str, target: str) -> tuple[dict[str, Path | None], dict[str, Any]]:
    """Files and settings of a {inputs, targets, info, units, coordinates}; what is not named is looked for."""
    for key in entry:
        if key not in KEYS:
            raise ForgefieldError(
                f"{setting}: a snapshot is {{{', '.join(KEYS)}}}, not {{{key}: ...}}.{did_you_mean(str(key), KEYS)}"
            )
    named = {
        key: Path(str(entry[key])).expanduser() for key in ("inputs", "targets", "info") if entry.get(key) is not None
    }
    if "inputs" not in named and "targets" not in named:
        raise ForgefieldError(f"{setting}: {dict(entry)!r} names no file; a snapshot has inputs and targets")
    for path in named.values():
        require_file(path)
    files = _partners(named.get("inputs", named.get("targets", Path())), target) | named
    return files, {key: entry[key] for key in ("units", "coordinates") if entry.get(key) is not None}


def _opened(files: dict[str, Path | None], target: str, options: dict[str, Any], need: Sequence[str]) -> Snapshot:
    base = files["base"]
    assert base is not None
    for part in need:
        if files[part] is None:
            endings = {"inputs": f"{INPUT}.npy", "targets": f"{TARGETS[target][0]}.npy", "info": INFO[0]}
            require_file(base.with_name(base.name + endings[part]))
    return Snapshot(base.name, files["inputs"], files["targets"], files["info"], target=target, **options)


def _refuse_twice(snapshots: list[Snapshot], setting: str) -> None:
    seen: set[Path] = set()
    for snapshot in snapshots:
        file = snapshot.inputs or snapshot.targets
        assert file is not None
        path = file.path.resolve()
        if path in seen:
            raise ForgefieldError(f"{setting} names {file.path} twice; its points would count twice")
        seen.add(path)
