"""What predictions for new structures have to know of the calculations that training snapshots come from.

Voxel, cutoff of the density, electrons and pseudopotentials of the snapshots, as plain values that a run keeps. What snapshots
do not tell, or do not agree on, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forgefield.files import write_atomically
from forgefield.ldos.data.info import SnapshotInfo
from forgefield.ldos.data.snapshot import Snapshot

KEPT = "pseudopotentials"
"""Folder of a run that holds the pseudopotentials of its snapshots."""


def calculation_facts(infos: Iterable[SnapshotInfo]) -> dict[str, Any]:
    """JSON-able: `spacing` (3,) A, distance of grid points along each cell vector, the smallest of all snapshots; `ecutrho`,
    Ry; `electrons_per_atom`, where all snapshots agree; `pseudopotentials`, file names by element; `temperatures`, K."""
    known = list(infos)
    spacings = [np.linalg.norm(info.voxel, axis=1) for info in known if info.voxel is not None]
    cutoffs = {info.ecutrho for info in known}
    shares = [
        info.electrons / info.n_atoms if info.electrons is not None and info.n_atoms else float("nan") for info in known
    ]
    temperatures = sorted({float(info.temperature) for info in known if info.temperature is not None})
    found: dict[str, Any] = {
        "spacing": np.min(spacings, axis=0).tolist() if spacings else None,
        "ecutrho": cutoffs.pop() if len(cutoffs) == 1 else None,
        "electrons_per_atom": shares[0] if shares and np.ptp(shares) < 1e-6 else None,
        "pseudopotentials": {symbol: name for info in known for symbol, name in info.pseudopotentials.items()} or None,
        "temperatures": temperatures or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def keep_pseudopotentials(snapshots: Sequence[Snapshot], folder: str | None, run: Path) -> None:
    """Copy the pseudopotentials that snapshots name into the folder of a run, where they can be found: in `folder`, or beside
    the snapshots. So the run alone is enough for total energies."""
    for snapshot in snapshots:
        file = snapshot.inputs or snapshot.targets
        assert file is not None
        place = Path(folder) if folder is not None else file.path.parent
        for name in snapshot.info.pseudopotentials.values():
            source, kept = place / name, run / KEPT / name
            if source.is_file() and not kept.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(kept, source.read_bytes())
