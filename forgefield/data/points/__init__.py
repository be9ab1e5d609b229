"""Points on a real-space grid: snapshots, scaling, splits, loaders."""

from forgefield.data.points.finding import find_snapshots
from forgefield.data.points.info import SnapshotInfo, read_info
from forgefield.data.points.loader import PointLoader
from forgefield.data.points.memory import load_points, place_for
from forgefield.data.points.moments import PointMoments, measure_points
from forgefield.data.points.scaling import Scaling
from forgefield.data.points.selection import EveryPoint, Selection, split_points
from forgefield.data.points.snapshot import Snapshot
from forgefield.data.points.staging import PointBlock
from forgefield.data.points.stream import StreamLoader
from forgefield.data.points.table import PointTable

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
    "find_snapshots",
    "load_points",
    "measure_points",
    "place_for",
    "read_info",
    "split_points",
]
