"""Snapshots named in a config: by a file, a glob, a folder, a list of these, or a mapping that names each file.

The files of a snapshot belong together by name: Be_snapshot0.in.npy (descriptors), Be_snapshot0.out.npy (LDOS), and
Be_snapshot0.info.json, else the Quantum ESPRESSO output Be_snapshot0.out, or else an openPMD file among them. A snapshot that
is named by its .info.json, or that has no file of descriptors, gets computed ones.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.ldos.data.info import SnapshotInfo, read_info
from forgefield.ldos.data.rows import HDF5_SUFFIXES, require_file
from forgefield.ldos.data.snapshot import Snapshot
from forgefield.ldos.data.units import require_target

SUFFIXES = (".npy", ".h5", ".hdf5")
INPUT = ".in"
TARGETS = {"ldos": (".out", ".ldos"), "dos": (".dos", ".out"), "density": (".dens", ".density", ".out")}
"""Suffixes of the stems of target files, the most common one first."""
INFO_SUFFIX = ".info.json"
INFO = (INFO_SUFFIX, ".out")
KEYS = ("inputs", "targets", "info", "units", "coordinates")


def find_snapshots(
    spec: object,
    *,
    target: str = "ldos",
    units: str | None = None,
    coordinates: bool | None = None,
    need: Sequence[str] = ("inputs", "targets"),
    setting: str = "data.train",
    make_inputs: Callable[[SnapshotInfo], Path] | None = None,
) -> list[Snapshot]:
    """All snapshots that `spec` names; those of a folder or glob are sorted by name.

    units, coordinates: as for `Snapshot`, for snapshots that do not state them. need: which of inputs, targets and info
    each must have. setting: name of the option in messages. make_inputs: returns the file with the descriptors of a snapshot
    that has none; None: that is an error.
    """
    require_target(target)
    snapshots: list[Snapshot] = []
    for entry in _entries(spec, setting):
        options: dict[str, Any] = {"units": units, "coordinates": coordinates}
        if isinstance(entry, Mapping):
            files, overrides = _explicit_files(entry, setting, target)
            options |= overrides
        else:
            files = _related_files(Path(entry), target)
        snapshots.append(_open_snapshot(files, target, options, need, make_inputs))
    _refuse_duplicates(snapshots, setting)
    return snapshots


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
        names = names or sorted(inside for inside in path.iterdir() if inside.name.endswith(INFO_SUFFIX))
        if not names:
            raise ForgefieldError(f"{path}: this folder contains no snapshot (a file such as Be_snapshot0.in.npy)")
        return _one_file_per_snapshot(names)
    if glob.has_magic(text) and not path.exists():
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        inputs = [match for match in matches if _is_input(match)]
        inputs = inputs or [match for match in matches if match.name.endswith(INFO_SUFFIX)]
        chosen = inputs or [match for match in matches if match.suffix in SUFFIXES]
        if not chosen:
            raise ForgefieldError(
                f"{text}: no file of values on a grid matches this pattern (looked from {Path.cwd()})"
            )
        return _one_file_per_snapshot(chosen)
    require_file(path)
    return [path]


def _is_input(path: Path) -> bool:
    return path.suffix in SUFFIXES and path.stem.endswith(INPUT) and path.is_file()


def _one_file_per_snapshot(paths: list[Path]) -> list[Path]:
    """One file per snapshot: descriptors may be stored both as .npy and as .h5."""
    chosen: dict[Path, Path] = {}
    for path in sorted(paths, key=lambda path: (*SUFFIXES, ".json").index(path.suffix)):
        chosen.setdefault(path.with_name(base_name(path)), path)
    return sorted(chosen.values())


def base_name(path: Path) -> str:
    """`Be_snapshot0` for `Be_snapshot0.in.npy`; a stem without such a suffix is returned unchanged."""
    if path.name.endswith(INFO_SUFFIX):
        return path.name.removesuffix(INFO_SUFFIX)
    stem, suffixes = path.stem, {INPUT, *(suffix for endings in TARGETS.values() for suffix in endings)}
    return next((stem.removesuffix(suffix) for suffix in sorted(suffixes, key=len) if stem.endswith(suffix)), stem)


def _related_files(path: Path, target: str) -> dict[str, Path | None]:
    """The other files of the snapshot to which a file belongs."""
    if path.name.endswith(INFO_SUFFIX):
        base = path.with_name(base_name(path))
        stored = _first(base, [f"{middle}{suffix}" for middle in TARGETS[target] for suffix in SUFFIXES])
        return {"inputs": None, "targets": stored, "info": path, "base": base}
    if path.suffix not in SUFFIXES:
        raise ForgefieldError(
            f"{path}: a snapshot is named by its descriptors, a file such as {base_name(path)}.in.npy, or by its "
            f"{base_name(path)}{INFO_SUFFIX}"
        )
    base = path.with_name(base_name(path))
    is_input = path.stem.endswith(INPUT) or path.stem == base.name
    endings = (path.suffix, *(suffix for suffix in SUFFIXES if suffix != path.suffix))
    suffixes = TARGETS[target] if is_input else (INPUT,)
    other = _first(base, [f"{middle}{suffix}" for middle in suffixes for suffix in endings])
    info = _first(base, list(INFO))
    inputs, targets = (path, other) if is_input else (other, path)
    return {"inputs": inputs, "targets": targets, "info": info, "base": base}


def _first(base: Path, endings: list[str]) -> Path | None:
    candidates = (base.with_name(base.name + ending) for ending in endings)
    return next((path for path in candidates if path.is_file()), None)


def _explicit_files(
    entry: Mapping[str, Any], setting: str, target: str
) -> tuple[dict[str, Path | None], dict[str, Any]]:
    """Files and settings of a mapping {inputs, targets, info, units, coordinates}; missing files are searched for by name."""
    for key in entry:
        if key not in KEYS:
            raise ForgefieldError(
                f"{setting}: a snapshot is {{{', '.join(KEYS)}}}, not {{{key}: ...}}.{did_you_mean(str(key), KEYS)}"
            )
    named = {
        key: Path(str(entry[key])).expanduser() for key in ("inputs", "targets", "info") if entry.get(key) is not None
    }
    if "inputs" not in named and "targets" not in named:
        raise ForgefieldError(f"{setting}: {dict(entry)!r} does not name a file; a snapshot has inputs and targets")
    for path in named.values():
        require_file(path)
    files: dict[str, Path | None] = _related_files(named.get("inputs", named.get("targets", Path())), target)
    if "inputs" in named and named["inputs"].name.endswith(INFO_SUFFIX):  # as in MALA
        del named["inputs"]
    files.update(named)
    return files, {key: entry[key] for key in ("units", "coordinates") if entry.get(key) is not None}


def _open_snapshot(
    files: dict[str, Path | None],
    target: str,
    options: dict[str, Any],
    need: Sequence[str],
    make_inputs: Callable[[SnapshotInfo], Path] | None,
) -> Snapshot:
    base, info_file = files["base"], files["info"]
    assert base is not None
    if info_file is None:  # an openPMD file contains the calculation
        info_file = next((files[role] for role in ("targets", "inputs") if _is_openpmd(files[role])), None)
        files["info"] = info_file
    if files["inputs"] is None and "inputs" in need and info_file is not None and make_inputs is not None:
        files["inputs"], options["coordinates"] = make_inputs(read_info(info_file)), False
    for role in need:
        if files[role] is None:
            endings = {"inputs": f"{INPUT}.npy", "targets": f"{TARGETS[target][0]}.npy", "info": INFO[0]}
            require_file(base.with_name(base.name + endings[role]))
    return Snapshot(
        base.name, files["inputs"], files["targets"], files["info"], target=target, folder=base.parent, **options
    )


def _is_openpmd(path: Path | None) -> bool:
    return path is not None and path.suffix in HDF5_SUFFIXES


def _refuse_duplicates(snapshots: list[Snapshot], setting: str) -> None:
    seen: set[Path] = set()
    for snapshot in snapshots:
        file = snapshot.inputs or snapshot.targets
        assert file is not None
        path = file.path.resolve()
        if path in seen:
            raise ForgefieldError(f"{setting} names {file.path} twice; its points would count twice")
        seen.add(path)
