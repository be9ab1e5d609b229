"""Files are written whole or not at all: under a temporary name beside the target, flushed to the disk, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forgefield.errors import ForgefieldError

PARTIAL = ".partial"
"""Part of every temporary name; such a file left behind by a crash can be deleted."""


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary name with the ending of `path`; it becomes `path` when the block succeeds and vanishes when not."""
    partial = path.with_name(f".{path.stem}{PARTIAL}-{os.getpid()}{path.suffix}")  # of our own: others may write it too
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


def write_whole(path: Path, content: bytes | str) -> Path:
    """Write `content` so that `path` holds either the old or the new, whatever happens in between."""
    with written_whole(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _flush(path: Path) -> None:
    """Have the disk keep a file, or the names in a folder, before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some network file systems cannot do it for folders; the rename itself was atomic
            raise
    finally:
        os.close(descriptor)
