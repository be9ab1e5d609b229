"""Readers of frames: extxyz, npz, DeePMD systems, LMDB, HDF5, ASE databases, stores, and every other format that ASE reads.

`registry.py` lists the formats; `base.py` has the interface that a new one implements.
"""

from forgefield.data.readers.base import SourceFile
from forgefield.data.readers.sources import (
    chunks,
    frame_count,
    frames_from_atoms,
    frames_of,
    frames_with_values,
    read_frames,
    source_files,
    with_type_map,
)

__all__ = [
    "SourceFile",
    "chunks",
    "frame_count",
    "frames_from_atoms",
    "frames_of",
    "frames_with_values",
    "read_frames",
    "source_files",
    "with_type_map",
]
