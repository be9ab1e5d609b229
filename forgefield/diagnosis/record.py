"""Records of the diagnosis callbacks: one JSON file each, in the folder `diagnosis` of a run.

Whoever writes them says what was found in plain words, and adds the numbers of figures. They hold no clock, except those whose
subject is time or energy, so that a resumed run leaves the same files. Reading trusts nothing: a file may be cut off or
written by somebody else.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forgefield.files import write_atomically

FOLDER = "diagnosis"


@dataclass(frozen=True)
class Finding:
    """kind: short name, each is found once. step: of the optimiser. what: the observation. advice: what to do about it."""

    kind: str
    step: int
    what: str
    advice: str

    def sentence(self) -> str:
        return f"Step {self.step}: {self.what} {self.advice}".strip()


def write_record(folder: Path, name: str, record: dict[str, Any]) -> Path:
    """Write `NAME.json`, whole or not at all. Numbers that are not finite become null."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_atomically(folder / f"{name}.json", json.dumps(_finite(record), indent=1) + "\n")


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """All records of a run by name; what cannot be read is left out."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            found[path.stem] = record
    return found


def findings_of(record: dict[str, Any]) -> list[Finding]:
    """The findings of a record, as far as they are well formed."""
    rows = record.get("findings")
    return [
        Finding(str(row["kind"]), row["step"], str(row["what"]), str(row["advice"]))
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict) and {"kind", "step", "what", "advice"} <= row.keys() and isinstance(row["step"], int)
    ]


def as_rows(findings: list[Finding]) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in findings]


def numbers(record: Any, *keys: str) -> list[float]:
    """The list of numbers under nested keys; NaN where an entry is none; empty where there is no such list."""
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    if not isinstance(record, list):
        return []
    return [float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else math.nan for x in record]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
