"""A picture of feature space: the pool, the training frames and the chosen frames, projected onto two axes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forgefield.report.canvas import COLOURS, house_style, new_figure

MOST_DRAWN = 20_000
"""Frames of each kind that are drawn at most, evenly spaced."""


def principal_axes(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mean (n_features,), the two directions (n_features, 2) in which points (n, n_features) vary most, and the shares (2,)
    of the variance along them. Directions point to where the largest deviation is positive."""
    mean = points.mean(0, dtype=np.float64)
    centred = points.astype(np.float64) - mean
    values, vectors = np.linalg.eigh(centred.T @ centred)
    if vectors.shape[1] == 1:
        values, vectors = np.array([0.0, *values]), np.array([[0.0, 1.0]])
    axes = vectors[:, :-3:-1]
    projected = centred @ axes
    extremes = projected[np.abs(projected).argmax(0), [0, 1]]
    axes = axes * np.where(extremes < 0, -1.0, 1.0)
    return mean, axes, np.maximum(values[:-3:-1], 0.0) / max(float(values.sum()), 1e-300)


def draw_selection(path: Path, pool: np.ndarray, trained: np.ndarray, chosen: list[int]) -> Path:
    """Write the figure to `path` (.png, .svg or .pdf) and return it. pool, trained: places in feature space, eV per atom."""
    mean, axes, shares = principal_axes(np.concatenate([pool, trained]))

    def project(points: np.ndarray) -> np.ndarray:
        return 1000 * (points.astype(np.float64) - mean) @ axes

    with house_style():
        figure = new_figure(5.0, 4.0)
        panel = figure.add_subplot()
        for points, colour, size, label in (
            (_thinned(pool), COLOURS["line"], 5, f"pool, {len(pool)} frames"),
            (_thinned(trained), COLOURS["blue"], 7, f"training set, {len(trained)} frames"),
            (pool[chosen], COLOURS["orange"], 16, f"chosen, {len(chosen)} frames"),
        ):
            x, y = project(points).T
            panel.scatter(x, y, s=size, c=colour, label=label, linewidths=0, rasterized=True)
        panel.set_xlabel(f"first principal axis, meV/atom ({100 * shares[0]:.0f} % of the variance)")
        panel.set_ylabel(f"second principal axis, meV/atom ({100 * shares[1]:.0f} %)")
        panel.grid(True)
        figure.legend(loc="outside upper center", ncols=3)
        figure.savefig(path, dpi=160, facecolor="white")
    return path


def _thinned(points: np.ndarray) -> np.ndarray:
    return points[np.linspace(0, len(points) - 1, min(len(points), MOST_DRAWN)).astype(int)]
