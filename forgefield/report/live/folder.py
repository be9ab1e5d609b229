"""The runs in a folder: searched for at each update, and read again only where they have changed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.report.live.record import LiveRun
from forgefield.runs import MEMBERS, PackagedRun, Run

DEPTH = 3
"""How deep runs are searched: those of a hyperparameter search are in `SEARCH/trials`."""
RECORD = "run.json"


class RunsFolder:
    """All runs in a folder, by their path in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runs: dict[str, LiveRun] = {}

    def update(self) -> dict[str, LiveRun]:
        """The runs that exist now, in their present state, in alphabetical order."""
        names = sorted(found(self.path))
        self._runs = {name: self._runs.get(name) or LiveRun(self.path / name, name) for name in names}
        for run in self._runs.values():
            run.update()
        return self._runs

    def run(self, name: str) -> LiveRun:
        """A run in the state of the last update."""
        if name not in self._runs:
            self.update()
        if name not in self._runs:
            hint = did_you_mean(name, list(self._runs))
            raise ForgefieldError(f"There is no run '{name}' in {self.path}.{hint}")
        return self._runs[name]


def found(folder: Path) -> list[str]:
    """Paths of all runs in a folder, relative to it. Of folders in a run, only the members of an ensemble are searched; hidden
    folders are not."""
    names: list[str] = []
    waiting = [("", 1)]
    while waiting:
        inside, depth = waiting.pop()
        try:
            entries = [entry for entry in os.scandir(folder / inside) if not entry.name.startswith(".")]
            folders = [entry for entry in entries if entry.is_dir()]
        except OSError:
            continue
        for entry in folders:
            name = f"{inside}/{entry.name}" if inside else entry.name
            if os.path.isfile(os.path.join(entry.path, RECORD)):
                names.append(name)
                if os.path.isdir(os.path.join(entry.path, MEMBERS)):
                    waiting.append((f"{name}/{MEMBERS}", DEPTH))
            elif depth < DEPTH:
                waiting.append((name, depth + 1))
    return names


def folder_of(path: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """The folder of runs that `path` names, and, where it is a run itself, or the name of one in `runs`, the name of that."""
    place = Path(path)
    if place.is_dir() and not (place / RECORD).is_file():
        return place, None
    if not place.exists() and place.name == str(place) and not (Path("runs") / place / RECORD).is_file():
        raise ForgefieldError(f"There is no folder {place}; runs are in the folder 'runs' unless a config sets 'out'.")
    run = Run.open(path).path
    return run.parent, run.name


def opened(runs: Sequence[str | os.PathLike[str] | Run], unpacked: Path) -> list[LiveRun]:
    """Runs by name or path, in their present state. Runs with the same name are shown with their paths. unpacked: an empty
    folder, for packaged models."""
    found = [Run.open(run) for run in runs]
    names = [run.path.resolve().name for run in found]
    unique = len(set(names)) == len(names)
    folders = [_folder_of(run, unpacked / str(number)) for number, run in enumerate(found)]
    live = [LiveRun(path, name if unique else str(run.path)) for path, name, run in zip(folders, names, found)]
    for run in live:
        run.update()
    return live


def _folder_of(run: Run, unpacked: Path) -> Path:
    """The folder of a run; a packaged model is unpacked, with the errors that it has been packaged with."""
    if not isinstance(run, PackagedRun):
        return run.path
    folder = run.writable(unpacked).path
    for test, errors in (run.note.get("errors") or {}).items():
        (folder / f"{Path(test).name}.json").write_text(json.dumps(errors))
    return folder
