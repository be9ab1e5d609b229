"""What all readers have in common: the source they read, their options, and the interface they implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from forgefield.data.frame import Frame, RawBlock, RawFrame
from forgefield.data.labels.fields import Fields
from forgefield.data.options import UnitOptions

TypeMap = tuple[str, ...] | tuple[tuple[str, str], ...]
"""Elements of the atom types of DeePMD systems: of types 0, 1, ..., or (name, element) of types that have names."""


@dataclass(frozen=True)
class SourceFile:
    path: Path
    """A file, or a folder that is a source."""
    weight: float = 1.0
    """Multiplies the weights of its frames."""
    share: float | None = None
    """Sampling share of all files that one entry of the setting names, together."""
    type_map: TypeMap | None = None
    """Elements of a DeePMD system's atom types, where the system does not name them itself."""
    group: str | None = None
    """Group within an HDF5 file; None: all of it."""
    branch: str | None = None
    """Which branch of the model learns from it, where the model has several."""
    settings: str = ""
    """Names of labels and units of its own, as text (`labels.source_settings`)."""
    entry: int = 0
    """Index of the entry of the setting that named it: a path, a glob or a {path: ...} is one entry."""

    @property
    def name(self) -> str:
        """How messages name this source."""
        return str(self.path) if self.group is None else f"{self.path}#{self.group}"

    def state(self) -> list[tuple[str, int, int]]:
        """Name, size and modification time of every file that belongs to it: differs once any of them has changed."""
        files = sorted(self.path.rglob("*")) if self.path.is_dir() else [self.path]
        stats = ((file, file.stat()) for file in files)
        return [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats]

    @property
    def identity(self) -> str:
        """Equal for two sources only if they are the same data."""
        return str(self.path.resolve()) + ("" if self.group is None else f"#{self.group}")


@dataclass(frozen=True)
class ReadOptions:
    """units: of the values in the file, for formats that may state their own. fields: those requested; None: all fields of
    a store. field_keys: the keys of requested fields in the file, whose values must not be converted."""

    units: UnitOptions = field(default_factory=UnitOptions)
    fields: Fields | None = None
    field_keys: frozenset[str] = frozenset()


class Reader(ABC):
    """A file format. To add one, implement this class in a module of this folder and add it to `registry.READERS`.

    Files are recognised by `suffixes`, folders by a file that they contain, `folder_marker`.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    folder_marker: ClassVar[str | None] = None
    has_groups: ClassVar[bool] = False
    """Whether `file#/group` may name a part of a file."""
    has_atom_types: ClassVar[bool] = False
    """Whether atoms have types, which a `type_map` maps to elements."""

    @abstractmethod
    def read(
        self, source: SourceFile, options: ReadOptions, start: int = 0, stop: int | None = None
    ) -> Iterator[RawFrame | RawBlock | Frame]:
        """Frames start to stop, in order: as they are in the file, one by one or in blocks, or (stores) as finished frames."""

    def names_types(self, source: SourceFile) -> bool:
        """Whether a source with atom types names them."""
        return True

    def count(self, source: SourceFile) -> int | None:
        """Number of frames if it can be determined quickly and any range of frames can be read; else None."""
        return None
