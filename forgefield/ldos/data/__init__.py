"""Points on a real-space grid: snapshots, scaling, splits, loaders."""

from forgefield.ldos.data.info import SnapshotInfo, read_info
from forgefield.ldos.data.loader import PointLoader
from forgefield.ldos.data.scaling import PointMoments, Scaling, measure_points
from forgefield.ldos.data.selection import EveryPoint, Selection, split_points
from forgefield.ldos.data.snapshot import Snapshot
from forgefield.ldos.data.snapshot_files import find_snapshots
from forgefield.ldos.data.staging import PointBlock, choose_location, load_points
from forgefield.ldos.data.stream import StreamLoader
from forgefield.ldos.data.table import PointTable

__all__ = [
    "EveryPoint",
    "PointBlock",
    "PointLoader",
    "PointMoments",
    "PointTable",
    "Scaling",
    "Selection",
    "Snapshot",
    "SnapshotInfo",
    "StreamLoader",
    "choose_location",
    "find_snapshots",
    "load_points",
    "measure_points",
    "read_info",
    "split_points",
]
