"""Labels of blocks of frames: what `labels.LabelReader` does for one frame, done for all frames of a block at once.

Only what is usual and right takes this way: one candidate for each label, good shapes, finite numbers, cells far from
flat. Otherwise None is returned, and the label reader reads the frames one by one, which also reports errors.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from forgefield.data.frame import FLATTEST_CELL, REAL_KINDS, Frame, RawBlock
from forgefield.data.labels.fields import block_field
from forgefield.data.labels.label_reader import FALLBACK_NAMES, USUAL_NAMES, LabelReader, is_none


def block_frames(block: RawBlock, reader: LabelReader) -> list[Frame] | None:
    """The frames of `block` in eV and A, checked; None where the plain way must look at each."""
    if not _plain_structure(block):
        return None
    n_frames, n_atoms = block.positions.shape[:2]
    columns = _Columns(block, reader)
    cell = block.cell * reader.length
    volume = np.abs(np.linalg.det(cell))
    energy = columns.take("energy", (n_frames,), reader.energy * n_atoms if reader.energy_per_atom else reader.energy)
    forces = columns.take("forces", (n_frames, n_atoms, 3), reader.forces)
    weight = columns.take("weight", (n_frames,), 1.0)
    stress = columns.take("stress", (n_frames, 3, 3), reader.stress)
    virial = columns.take("virial", (n_frames, 3, 3), reader.energy)
    if columns.unusual or (stress is not None and virial is not None):
        return None
    if (stress is not None or virial is not None) and not (volume > 0).all():
        return None
    if virial is not None:
        stress = -virial / volume[:, None, None]
    positions = block.positions * np.float64(reader.length)
    numbers = np.asarray(block.numbers, dtype=np.int64)
    pbc = np.broadcast_to(block.pbc, (n_frames, 3)).astype(bool)
    labels = (energy, forces, stress, weight)
    if not (_are_elements(numbers, n_atoms) and _finite(positions, cell, *labels) and _roomy(cell, volume, pbc)):
        return None
    if weight is not None and (weight < 0).any():
        return None
    fields = _fields(block, reader)
    if fields is None:
        return None
    if not reader.seen:
        reader.seen.note(next(block.frames()))
    reader.note(f"{block.source}, frame {block.start}", [*block.info, *block.arrays], columns.energy, fields)
    per_atom = reader.per_atom(fields)
    return [
        Frame(
            positions[i],
            numbers if numbers.ndim == 1 else numbers[i],
            cell[i],
            pbc[i],
            None if energy is None else float(energy[i]),
            None if forces is None else forces[i],
            None if stress is None else stress[i],
            1.0 if weight is None else float(weight[i]),
            block.source,
            block.start + i,
            {name: values[i] for name, values in fields.items()},
            per_atom,
        )
        for i in range(n_frames)
    ]


def _fields(block: RawBlock, reader: LabelReader) -> dict[str, np.ndarray] | None:
    """Values of the fields of the block; None if frames have to be read one by one."""
    fields = {}
    for name, options in reader.fields.items():
        usual, values = block_field(block, options, options.key or name)
        if not usual:
            return None
        if values is not None:
            fields[name] = values
    return fields


class _Columns:
    """Looks labels up; becomes `unusual` as soon as there is anything to decide or to refuse."""

    def __init__(self, block: RawBlock, reader: LabelReader) -> None:
        self._block, self._names = block, reader.names
        self.unusual = any(self._names[label] is not None for label in ("stress", "virial"))
        self.energy: tuple[bool, str] | None = None
        """Whether the energy's fallback was taken, and under which name."""

    def take(self, label: str, shape: tuple[int, ...], factor: float) -> np.ndarray | None:
        """Values of `label` in `shape`, in eV and A; None where the block has none."""
        columns = self._block.arrays if label == "forces" else self._block.info
        names = self._candidates(label, columns)
        self.unusual |= len(names) > 1
        if not names or self.unusual:
            return None
        values = np.asarray(columns[names[0]])
        good = values.shape == shape if label == "forces" else values.shape[0] == shape[0] and values.ndim > 0
        if values.dtype.kind not in "fiu" or values.size != np.prod(shape) or not good:
            self.unusual = True
            return None
        return values.reshape(shape) * np.float64(factor)

    def _candidates(self, label: str, here: Mapping[str, np.ndarray]) -> list[str]:
        requested = self._names[label]
        if requested is not None:
            if not is_none(requested) and requested not in here:
                elsewhere = requested in self._block.info or requested in self._block.arrays
                self.unusual |= elsewhere
                return []
            return [] if is_none(requested) else [requested]
        names = [name for name in USUAL_NAMES[label] + self._block.extra_names.get(label, ()) if name in here]
        fallback = not names and label in FALLBACK_NAMES
        if fallback:
            names = [name for name in FALLBACK_NAMES[label] if name in here]
        if names and label in FALLBACK_NAMES:
            self.energy = fallback, names[0]
        return names


def _plain_structure(block: RawBlock) -> bool:
    """Whether positions and cells are real numbers, atomic numbers integers and pbc truth values."""
    kinds = [np.asarray(values).dtype.kind for values in (block.positions, block.cell)]
    integers = np.asarray(block.numbers).dtype.kind in "iu"
    return integers and np.asarray(block.pbc).dtype.kind == "b" and all(kind in REAL_KINDS for kind in kinds)


def _are_elements(numbers: np.ndarray, n_atoms: int) -> bool:
    return n_atoms > 0 and numbers.shape[-1] == n_atoms and bool(((numbers >= 1) & (numbers <= 118)).all())


def _finite(*columns: np.ndarray | None) -> bool:
    return all(bool(np.isfinite(column).all()) for column in columns if column is not None)


def _roomy(cell: np.ndarray, volume: np.ndarray, pbc: np.ndarray) -> bool:
    """Whether no cell needs a closer look: all axes are periodic and far from flat, or none is periodic."""
    if not pbc.any():
        return True
    lengths = np.linalg.norm(cell, axis=2)
    far = (volume > 2 * FLATTEST_CELL * lengths.prod(axis=1)).all() and (lengths > 2 * FLATTEST_CELL).all()
    return bool(pbc.all() and far)
