"""Which of many points to choose: the most uncertain ones, or points that cover feature space.

Points are rows of an array (n, n_features); distances between them are Euclidean. All functions return indices of rows in the
order in which they are chosen, deterministically. None chooses two points closer to each other than `tolerance`, nor one closer
than that to a reference point (a training frame): such points are near-duplicates.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

BLOCK = 4096
"""Rows whose distances are computed together."""
KMEANS_PASSES = 30
"""Passes over the points at most."""


def squared_distances(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(n, m) float64, of points (n, n_features) from others (m, n_features)."""
    a, b = points.astype(np.float64), others.astype(np.float64)
    products = np.square(a).sum(1)[:, None] + np.square(b).sum(1)[None] - 2 * a @ b.T
    return np.maximum(products, 0.0)


def nearest_distances(points: np.ndarray, others: np.ndarray, *, skip_self: bool = False) -> np.ndarray:
    """(n,) distance of each point from the nearest of `others`, infinite where there are none.

    skip_self: `others` are the points themselves, and none is its own neighbour.
    """
    result = np.full(len(points), np.inf)
    for start in range(0, len(points), BLOCK):
        rows = slice(start, min(start + BLOCK, len(points)))
        for other in range(0, len(others), BLOCK):
            squares = squared_distances(points[rows], others[other : other + BLOCK])
            if skip_self and other == start:
                np.fill_diagonal(squares, np.inf)
            result[rows] = np.minimum(result[rows], np.sqrt(squares.min(1)))
    return result


def typical_distance(points: np.ndarray, most: int = 2000) -> float:
    """Median distance of a point from its nearest neighbour, from at most `most` evenly spaced points; 0 for one point."""
    sample = points[np.linspace(0, len(points) - 1, min(len(points), most)).astype(int)]
    return float(np.median(nearest_distances(sample, sample, skip_self=True))) if len(sample) > 1 else 0.0


class _New:
    """Tells whether a point is farther than `tolerance` from all reference points and from all points accepted before."""

    def __init__(self, points: np.ndarray, reference: np.ndarray, tolerance: float) -> None:
        self.points, self.reference, self.tolerance = points, reference, tolerance
        self.chosen: list[int] = []

    def accept(self, index: int) -> bool:
        point = self.points[index : index + 1]
        if self.tolerance > 0:
            for others in (self.reference, self.points[self.chosen]):
                if len(others) and nearest_distances(point, others)[0] < self.tolerance:
                    return False
        self.chosen.append(index)
        return True


def most_uncertain(
    points: np.ndarray, scores: np.ndarray, n: int, *, reference: np.ndarray, tolerance: float
) -> list[int]:
    """The points of the highest scores (n_points,)."""
    new = _New(points, reference, tolerance)
    for index in np.argsort(-scores, kind="stable"):
        if len(new.chosen) == n:
            break
        new.accept(int(index))
    return new.chosen


def farthest_points(
    points: np.ndarray, scores: np.ndarray, n: int, *, reference: np.ndarray, tolerance: float
) -> list[int]:
    """Each point is the one farthest from the reference points and from those chosen before; without a reference, the first
    one has the highest score."""
    new, distance = _New(points, reference, tolerance), nearest_distances(points, reference)
    while len(new.chosen) < n and (distance > 0).any():
        index = int(distance.argmax()) if np.isfinite(distance).all() else int(scores.argmax())
        if new.accept(index):
            distance = np.minimum(distance, nearest_distances(points, points[index : index + 1]))
        distance[index] = 0.0
    return new.chosen


def cluster_centres(
    points: np.ndarray, scores: np.ndarray, n: int, *, reference: np.ndarray, tolerance: float
) -> list[int]:
    """Of n clusters (k-means, started at farthest points) of the points that are not near-duplicates of the reference, the
    point nearest to each centre; larger clusters first."""
    fresh = np.flatnonzero(nearest_distances(points, reference) >= tolerance)
    if len(fresh) == 0:
        return []
    start = farthest_points(points[fresh], scores[fresh], n, reference=points[:0], tolerance=0.0)
    centres = points[fresh][start].astype(np.float64)
    labels = np.full(len(fresh), -1)
    for _ in range(KMEANS_PASSES):
        nearest = _labels(points[fresh], centres)
        if (nearest == labels).all():
            break
        labels = nearest
        for number in np.unique(labels):
            centres[number] = points[fresh[labels == number]].mean(0)
    new, sizes = _New(points, reference, tolerance), np.bincount(labels, minlength=len(centres))
    for number in np.argsort(-sizes, kind="stable"):
        inside = fresh[labels == number]
        if len(inside):
            new.accept(int(inside[squared_distances(points[inside], centres[number : number + 1]).argmin()]))
    return new.chosen


def _labels(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    parts = [
        squared_distances(points[start : start + BLOCK], centres).argmin(1) for start in range(0, len(points), BLOCK)
    ]
    return np.concatenate(parts)


def d_optimal(points: np.ndarray, scores: np.ndarray, n: int, *, reference: np.ndarray, tolerance: float) -> list[int]:
    """Each point is the one that increases the determinant of 1 + sum of x x^T over all chosen points x the most: the one
    about which a linear model, for which the reference points have a unit information matrix, knows the least."""
    new, covariance = _New(points, reference, tolerance), np.eye(points.shape[1])
    rows = points.astype(np.float64)
    leverage = np.square(rows).sum(1)
    allowed = np.ones(len(points), dtype=bool)
    while len(new.chosen) < n and allowed.any():
        index = int(np.where(allowed, leverage, -1.0).argmax())
        allowed[index] = False
        if new.accept(index):
            gain = covariance @ rows[index] / np.sqrt(1 + rows[index] @ covariance @ rows[index])
            covariance -= np.outer(gain, gain)
            leverage -= np.square(rows @ gain)
    return new.chosen


Method = Callable[..., list[int]]
METHODS: dict[str, Method] = {"farthest": farthest_points, "kmeans": cluster_centres, "d-optimal": d_optimal}
"""Ways to cover feature space, by name."""
