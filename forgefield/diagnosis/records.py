"""Records of the diagnosis callbacks: one JSON file each, in the folder `diagnosis` of a run.

A record holds findings as sentences and the numbers of its figure. It contains no times, except where time or energy is its
subject, so that a resumed run leaves the same files. Reading makes no assumptions: a file may be truncated or written by
another program.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forgefield.files import write_atomically

FOLDER = "diagnosis"
Record = dict[str, Any]
"""What a record file holds: JSON values by name."""


@dataclass(frozen=True)
class Finding:
    """kind: a short name, each is reported once. step: of the optimiser. what: the observation. advice: what to do about it."""

    kind: str
    step: int
    what: str
    advice: str

    def sentence(self) -> str:
        return f"Step {self.step}: {self.what} {self.advice}".strip()


def write_record(folder: Path, name: str, record: Record) -> Path:
    """Write `NAME.json` atomically and return its path. Numbers that are not finite become null."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_atomically(folder / f"{name}.json", json.dumps(_finite(record), indent=1) + "\n")


def read_records(folder: Path) -> dict[str, Record]:
    """All records of a run by name; files that cannot be read are skipped."""
    records: dict[str, Record] = {}
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records[path.stem] = record
    return records


def findings_of(record: Record) -> list[Finding]:
    """The well-formed findings of a record."""
    rows = record.get("findings")
    return [
        Finding(str(row["kind"]), row["step"], str(row["what"]), str(row["advice"]))
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict) and {"kind", "step", "what", "advice"} <= row.keys() and isinstance(row["step"], int)
    ]


def as_rows(findings: list[Finding]) -> list[dict[str, Any]]:
    """Findings as JSON values."""
    return [asdict(finding) for finding in findings]


def numbers(record: object, *keys: str) -> list[float]:
    """The list of numbers under nested keys, with NaN for entries that are not numbers; empty if there is no such list."""
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    if not isinstance(record, list):
        return []
    return [float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else math.nan for x in record]


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
