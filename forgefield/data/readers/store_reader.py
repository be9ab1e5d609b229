"""Reader of stores, for where frames are wanted one by one; a training opens a store as columns instead."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from forgefield.data.frame import Frame
from forgefield.data.labels.fields import chosen_fields
from forgefield.data.readers.base import Reader, ReadOptions, SourceFile
from forgefield.data.store.manifest import MANIFEST
from forgefield.data.store.store import Store, open_store


class StoreReader(Reader):
    name = "store"
    folder_marker = MANIFEST

    def read(
        self, source: SourceFile, options: ReadOptions, start: int = 0, stop: int | None = None
    ) -> Iterator[Frame]:
        store = _store(source.path)
        chosen_fields(source.path, store.fields, options.fields, required=False)  # a missing one is refused at the end
        yield from store.table()[start:stop]

    def count(self, source: SourceFile) -> int:
        return len(_store(source.path).table())


def _store(path: Path) -> Store:
    """The store in a folder, opened and verified once, and kept open while its manifest stays as it is."""
    status = os.stat(path / MANIFEST)
    return _opened(path, str(path.resolve()), status.st_mtime_ns, status.st_ino, status.st_size)


@lru_cache(maxsize=1)  # an open store has as many open files as columns
def _opened(path: Path, *_: str | int) -> Store:
    atexit.unregister(_opened.cache_clear)
    atexit.register(_opened.cache_clear)  # close its files before the interpreter shuts down
    return open_store(path)
