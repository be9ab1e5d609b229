"""Forgefield's kernels: generated Triton code, and the launchers that call it.

Importing this package registers the implementations that `forgefield.ops` uses in place of reference operations.
"""

from forgefield.kernels.edges.segments import pointers_where_used, row_sums_where_possible
from forgefield.ops.graph import register_segment_kernels

register_segment_kernels(pointers=pointers_where_used, sums=row_sums_where_possible)
