"""The comment line of an extended xyz frame: `key=value` pairs, read the way ASE reads them.

A line without any pair is prose and carries nothing: `energy -76.1 Ha` is not a label. A key that stands twice with
different values is an error, and so is a quote or bracket that is not closed.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from forgefield.data.readers.numerals import is_plain
from forgefield.errors import ForgefieldError

_ITEM = re.compile(
    r"""(?P<key>[^\s="']+)(?:\s*=\s*(?:
        "(?P<double>(?:\\.|[^"\\])*)" | '(?P<single>(?:\\.|[^'\\])*)' | \{(?P<braces>[^}]*)\}
        | (?P<list>\[(?:[^\[\]]|\[[^\]]*\])*\]) | (?P<open>["'{\[]) | (?P<bare>\S+) ))?""",
    re.VERBOSE,
)
_NEEDED = ("Properties", "Lattice", "pbc")
"""Keys that say how the frame is to be read: without a value they are a mistake, not prose."""
_TELLING = re.compile("|".join((*_NEEDED, "energ", "forc", "stress", "virial", "weight")), re.IGNORECASE)
"""Keys that are labels or say how the frame is to be read: a line that has one must be read right."""


def parse_header(header: str, where: str) -> dict[str, Any]:
    """Key-value pairs of a comment line; numbers become floats or arrays, a key alone becomes True.

    where: file, frame and line, for errors.
    """
    texts: dict[str, str | None] = {}
    if "=" not in header:
        return {}
    end, stray = 0, False
    for match in _ITEM.finditer(header):
        kind, key = match.lastgroup or "key", match["key"]
        glued = match.start() == end > 0 or header[end : match.start()].strip()
        stray = bool(stray or glued or "{" in key or "[" in key or (kind == "bare" and _is_stray(match[kind])))
        end = match.end()
        text = None if kind == "key" else match[kind]
        if text is None and key in _NEEDED:
            raise ForgefieldError(f"{where}: {key} has no value; write {key}=...")
        if kind == "open":
            raise ForgefieldError(f"{where}: the value of {key} begins with {text} which is never closed")
        if texts.setdefault(key, text) != text:
            raise ForgefieldError(
                f"{where}: {key} is given twice, as {texts[key]!r:.40} and as {text!r:.40}; keep one of them"
            )
    if stray or header[end:].strip():
        told = next((key for key in texts if _TELLING.search(key)), None)
        if told is not None:  # else it is prose, with an apostrophe perhaps
            raise ForgefieldError(
                f"{where}: a quote, bracket or = stands where none is expected, so that {told} cannot be read with certainty; "
                'write values with blanks as key="a b"'
            )
    return {key: True if text is None else _value(text) for key, text in texts.items()}


def _is_stray(word: str) -> bool:
    """Whether a value without quotes holds a quote, or a bracket that opens and does not close."""
    return '"' in word or "'" in word or any(word.count(a) != word.count(b) for a, b in ("[]", "{}"))


def _value(text: str) -> Any:
    if is_plain(text):
        try:
            return float(text)
        except ValueError:
            pass
    if text.startswith("_JSON "):
        text = text[6:]
    if text.startswith(("[", "{")):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    words = text.replace(",", " ").split()
    if len(words) > 1 and is_plain(text):
        try:
            return np.array([float(word) for word in words])
        except ValueError:
            pass
    return text
