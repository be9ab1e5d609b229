"""Versions of Forgefield's file formats, and how files of earlier versions are upgraded when they are read.

Every format counts its versions from 1. Files of Forgefield 0.1.0 do not state a version: they are of version 1. A file of a
newer version than this Forgefield knows is refused, because its content could be misread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forgefield._version import __version__
from forgefield.errors import ForgefieldError

VERSION = "format_version"
"""The key of the version in files that are mappings."""

Migration = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes the content of a file of one version and returns it as the next version has it."""


class NewerFormat(ForgefieldError):
    """A file was written by a newer version of Forgefield."""


@dataclass(frozen=True)
class Format:
    """One kind of file. name: with its article, for messages. migrations: the first upgrades version 1 to version 2, the next
    version 2 to version 3. key: of the version in the file."""

    name: str
    migrations: tuple[Migration, ...] = ()
    key: str = VERSION

    @property
    def version(self) -> int:
        """The version that is written now."""
        return 1 + len(self.migrations)

    def upgrade(self, content: dict[str, Any], file: object) -> dict[str, Any]:
        """`content` of a file in the current version, with that version stated. file: named in messages."""
        version = content.get(self.key, 1)
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ForgefieldError(f"{file} is damaged: '{self.key}' must be a positive integer, not {version!r:.60}.")
        if version > self.version:
            raise NewerFormat(
                f"{file} is {self.name} of format version {version}; Forgefield {__version__} reads versions up to "
                f"{self.version}. Install a newer version of Forgefield to use it."
            )
        for migrate in self.migrations[version - 1 :]:
            content = migrate(content)
        return {**content, self.key: self.version}
