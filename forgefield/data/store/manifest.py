"""`manifest.json` of a store: what it holds, its format version, and the migration of manifests of earlier versions.

A change of the format adds to `STORE` the function that turns a manifest of the previous version into one of the next. Columns
on disk are not rewritten.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

from forgefield.errors import ForgefieldError
from forgefield.formats import Format
from forgefield.untrusted.documents import load_json

MANIFEST = "manifest.json"
FORMAT = "forgefield-store"
STORE = Format("a store", migrations=(), key="version")
VERSION = STORE.version
"""The format version that is written."""


class ColumnEntry(TypedDict):
    bytes: int
    hash: str


class FieldEntry(TypedDict):
    per: str
    dtype: str
    shape: list[int]
    unit: str


class PartEntry(TypedDict):
    """One part of a store, a folder of column files."""

    name: str
    n_frames: int
    n_atoms: int
    n_edges: int | None
    sources: list[str]
    columns: dict[str, ColumnEntry]


class Manifest(TypedDict):
    """fields: columns by name. graph: options of the neighbour lists, None where it holds none. hash: of all other entries."""

    format: str
    version: int
    forgefield: str
    n_frames: int
    n_atoms: int
    n_edges: int | None
    fields: dict[str, FieldEntry]
    graph: dict[str, Any] | None
    statistics: dict[str, object]
    parts: list[PartEntry]
    hash: str


def is_store(path: Path) -> bool:
    """Whether this folder is a store."""
    return (path / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the store in `folder`, of the current version, its hash verified."""
    file = folder / MANIFEST
    try:
        content = load_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ForgefieldError(f"{folder}: not a store: {MANIFEST} could not be read ({error.strerror})") from None
    except ValueError:
        raise ForgefieldError(f"{file}: not valid JSON; the store is damaged, convert the data again") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ForgefieldError(f"{file}: not the manifest of a Forgefield store")
    upgraded = STORE.upgrade(content, file)
    if content.get("hash") != manifest_hash(content):
        raise ForgefieldError(f"{file}: the manifest does not match its own hash; it was edited or is damaged")
    return cast(Manifest, upgraded)


def manifest_hash(manifest: Mapping[str, object]) -> str:
    """Hash of all entries of a manifest, hashes of columns included: of the content of the whole store."""
    content = {key: value for key, value in manifest.items() if key != "hash"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
