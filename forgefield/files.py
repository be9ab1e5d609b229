"""Atomic writes: a file is written under a temporary name next to the target, flushed to the disk, and then renamed.

Temporary names carry host and process, so that leftovers of a crash can be distinguished from files that are being written.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from forgefield.errors import ForgefieldError

PARTIAL = ".partial"
"""Part of every temporary name; such a file left behind by a crash can be deleted."""
READ_ATTEMPTS = 3
"""How often a file is read before an error of the disk or network counts."""
_PAUSE_S = 0.2
_TEMPORARY = re.compile(rf"\..*{re.escape(PARTIAL)}-(?:(?P<host>[A-Za-z0-9_]+)-)?(?P<pid>\d+)(?:\.[^.]*)?")
_ABANDONED_S = 7 * 24 * 3600.0
"""A temporary file of another host that has not changed for this long belongs to no process."""


def temporary_name(path: Path) -> Path:
    """A hidden name next to `path`, with its ending, that no other process uses."""
    return path.with_name(f".{path.stem}{PARTIAL}-{_host()}-{os.getpid()}{path.suffix}")


def remove_leftovers(folder: Path, of: Path | None = None) -> list[Path]:
    """Delete temporary files and folders in `folder` whose processes are gone; returns them.

    Processes of other hosts cannot be checked: their files are deleted if they have not changed for a week.
    of: delete only those of this file, for a folder that holds files of others too.
    """
    removed = []
    try:
        names = [entry.name for entry in os.scandir(folder) if PARTIAL in entry.name]
        if of is not None:
            begin = f".{of.stem}{PARTIAL}-"
            names = [name for name in names if name.startswith(begin) and name.removeprefix(begin).endswith(of.suffix)]
            names = [name for name in names if "." not in name.removeprefix(begin).removesuffix(of.suffix)]
    except OSError:
        return []
    for name in names:
        match, path = _TEMPORARY.fullmatch(name), folder / name
        with suppress(OSError):
            if match is not None and not path.is_symlink() and _is_abandoned(match, path):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                removed.append(path)
    return removed


def _is_abandoned(match: re.Match[str], path: Path) -> bool:
    if match["host"] == _host():
        return not _process_is_alive(int(match["pid"]))
    return time.time() - path.stat().st_mtime > _ABANDONED_S


def _process_is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


@cache
def _host() -> str:
    """Where process numbers mean the same: the host and, in a container, its own numbering."""
    try:
        numbering = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbering = ""
    return re.sub(r"[^A-Za-z0-9_]", "_", socket.gethostname() + numbering.removeprefix("pid:"))


def read_bytes(path: Path) -> bytes:
    """The content of a file. Errors of the disk or network may pass: the file is read again before they count."""
    for attempt in range(READ_ATTEMPTS):
        try:
            return path.read_bytes()
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            raise ForgefieldError(f"{path} cannot be read: {error.strerror}.") from error
        except OSError as error:
            if attempt + 1 == READ_ATTEMPTS:
                raise ForgefieldError(
                    f"{path} cannot be read: {error.strerror or error} (tried {READ_ATTEMPTS} times). The file was not "
                    "changed. Check the disk or the network file system, then run the same command again."
                ) from error
            time.sleep(_PAUSE_S)
    raise AssertionError("unreachable")


@contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """A temporary name with the ending of `path`; it becomes `path` when the block succeeds and vanishes when not."""
    partial = temporary_name(path)
    remove_leftovers(path.parent, of=path)
    try:
        yield partial
        _flush(partial)
        os.replace(partial, path)
        _flush(path.parent)
    except OSError as error:
        reason = error.strerror or error
        if not path.parent.is_dir():
            raise ForgefieldError(f"Could not write {path}: the folder {path.parent} does not exist.") from error
        raise ForgefieldError(
            f"Could not write {path}: {reason}; what was there before is untouched. Make room or change permissions, then "
            "run the same command again."
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink()


def write_atomically(path: Path, content: bytes | str) -> Path:
    """Write `content` so that `path` holds either the old or the new, whatever happens in between."""
    with written_atomically(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some network file systems cannot do it for folders; the rename itself was atomic
            raise
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Folder of files that can be made again: FORGEFIELD_CACHE, or .cache/forgefield in the home folder."""
    return Path(os.environ.get("FORGEFIELD_CACHE") or "~/.cache/forgefield").expanduser()


def is_writable_folder(folder: Path) -> bool:
    """Whether files can be written to a folder, which is created if it does not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def find_path(path: str, folders: Sequence[Path]) -> str:
    """`path` in the first of `folders` where it (or, for a pattern, a match) exists; in the first one if nowhere."""
    text = str(Path(path).expanduser())
    candidates = [str((folder / text).absolute()) for folder in folders]
    for candidate in candidates:
        file = candidate.partition("#")[0]  # what follows is a group within the file
        if Path(candidate).exists() or Path(file).is_file() or glob.glob(candidate, recursive=True):
            return candidate
    return candidates[0]
