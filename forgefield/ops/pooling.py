"""Pooling of rows of atoms to one row per frame: the maximum, or a mean with learnt weights (softmax).

Both are the same for any supercell of a crystal and independent of other frames of the batch. Frames without atoms get zeros.
Where several rows are the maximum, the gradient is divided among them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forgefield.ops.graph import Segments, gather, segment_sum


def segment_max(rows: Tensor, segments: Segments) -> Tensor:
    """(n_rows, width) -> (count, width): the largest of each column."""
    largest = _largest(rows, segments)
    is_largest = (rows == largest.index_select(0, segments.index)).to(rows.dtype).detach()
    shares = is_largest / segment_sum(is_largest, segments).index_select(0, segments.index)
    return segment_sum(rows * shares, segments)


def segment_softmax(scores: Tensor, segments: Segments) -> Tensor:
    """(n_rows,) -> (n_rows,): positive weights that add up to one in every segment."""
    column = scores.unsqueeze(1)
    above = torch.exp(column - _largest(column, segments).index_select(0, segments.index))
    return (above / gather(segment_sum(above, segments), segments)).squeeze(1)


def _largest(rows: Tensor, segments: Segments) -> Tensor:
    """Without a gradient; zero where there is no row. A maximum is the same in whatever order it is taken."""
    rows = rows.detach()
    places = segments.index.unsqueeze(1).expand_as(rows)
    start = rows.new_full((segments.count, rows.shape[1]), -torch.inf)
    found = torch.scatter_reduce(start, 0, places, rows, "amax")
    return torch.where(found == -torch.inf, torch.zeros_like(found), found)
