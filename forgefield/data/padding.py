"""Blank frames, which pad a batch to a size without changing the results of the real frames.

A blank frame has atoms far from each other, no label and no weight. Its energy is computed and ignored; results of a frame do
not depend on the other frames of a batch. Its edges connect an atom with its own periodic image beyond the cutoff, in both
directions, so that every edge has its reverse and edges are sorted by destination.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from forgefield.data.batch import SHAPES, Batch, Shapes

EDGES_PER_ATOM = 64
"""Maximum number of edges of a blank atom; sums over edges take as long as the longest list of an atom."""


def sizes(batch: Batch) -> tuple[int, int, int]:
    """Frames, atoms and edges of a batch."""
    return batch["n_atoms"].shape[0], batch["positions"].shape[0], batch["edge_index"].shape[1]


def blank_frames(
    like: Batch,
    *,
    frames: int,
    atoms: int,
    edges: int,
    cutoff: float,
    shapes: Shapes = SHAPES,
    targets: Collection[str] = (),
) -> Batch:
    """A batch of blank frames only, with the keys and on the device of `like`.

    All atoms and edges belong to the last frame; the others are empty, with an `n_atoms` of one, by which energies are divided.
    edges: an even number.
    cutoff: of the model, A.
    targets: trained fields, which are missing as labels. All other inputs of a model are zero.
    """
    if edges % 2 or (edges and not atoms) or (atoms and not frames):
        raise ValueError(f"no blank frames with {frames} frames, {atoms} atoms, {edges} edges")
    device = like["positions"].device
    number = torch.arange(edges, device=device)
    # Counted from the end, so that the last rows of a longer padding are those of a shorter one.
    from_end = torch.div(edges - 1 - number, EDGES_PER_ATOM, rounding_mode="floor")
    owner = (atoms - 1 - from_end).clamp(min=0)
    shift = torch.zeros(edges, 3, dtype=like["edge_shift"].dtype, device=device)
    shift[:, 0] = 1 - 2 * (number % 2)
    blank = {
        "frame": torch.full((atoms,), frames - 1, device=device),
        "n_atoms": torch.ones(frames, dtype=torch.int64, device=device),
        "cell": (2 * cutoff * torch.eye(3, dtype=like["cell"].dtype, device=device)).expand(frames, 3, 3).contiguous(),
        "edge_index": torch.stack([owner, owner]),
        "edge_shift": shift,
        "edge_reverse": number ^ 1,
        "frame_id": torch.full((frames,), -1, device=device),
        "pbc": torch.ones(frames, 3, dtype=torch.bool, device=device),
    }
    rows = {"frames": frames, "atoms": atoms, "edges": edges}
    result = {}
    for key, tensor in like.items():
        if key in blank:
            result[key] = blank[key].to(tensor.dtype)
        else:
            fill = float("nan") if key in ("energy", "forces", "stress", *targets) else 0
            n_rows = rows[str(shapes[key][0])]
            result[key] = torch.full((n_rows, *tensor.shape[1:]), fill, dtype=tensor.dtype, device=device)
    return result


def join_batches(first: Batch, second: Batch) -> Batch:
    """The frames of both batches in one."""
    frames, atoms, edges = sizes(first)
    offsets = {"frame": frames, "edge_index": atoms, "edge_reverse": edges}
    return {
        key: torch.cat(
            [tensor, second[key] + offsets[key] if key in offsets else second[key]], dim=int(key == "edge_index")
        )
        for key, tensor in first.items()
    }


MIN_SIZES = {"frames": 2, "atoms": 64, "edges": 64}
"""Minimum sizes of batches for compiled code, which would treat sizes of zero and one as constants and some other small sizes
as special cases."""


def padded_to_minimum(batch: Batch, cutoff: float, shapes: Shapes = SHAPES, targets: Collection[str] = ()) -> Batch:
    """The batch, padded with a blank frame if it is smaller than `MIN_SIZES`."""
    frames, atoms, edges = sizes(batch)
    if frames >= MIN_SIZES["frames"] and atoms >= MIN_SIZES["atoms"] and edges >= MIN_SIZES["edges"]:
        return batch
    atoms, edges = max(MIN_SIZES["atoms"] - atoms, 1), max(MIN_SIZES["edges"] - edges, 0)
    blank = blank_frames(
        batch, frames=1, atoms=atoms, edges=edges + edges % 2, cutoff=cutoff, shapes=shapes, targets=targets
    )
    return join_batches(batch, blank)


GROWTH = 1.2
"""Ratio of neighbouring sizes beyond the plan."""


@dataclass(frozen=True, order=True)
class Size:
    """Sizes of a padded batch, at least one blank frame included."""

    edges: int
    atoms: int
    frames: int

    def holds(self, frames: int, atoms: int, edges: int) -> bool:
        """Whether a batch of these sizes fits, with enough blank atoms for the blank edges."""
        return frames < self.frames and edges <= self.edges and self.atoms - atoms >= _blank_atoms(self.edges - edges)


def _blank_atoms(blank_edges: int) -> int:
    return max(1, math.ceil(blank_edges / EDGES_PER_ATOM))


@dataclass(frozen=True)
class SizePlan:
    """Sizes to which batches are padded, in ascending order."""

    sizes: tuple[Size, ...]

    def fit(self, frames: int, atoms: int, edges: int) -> Size:
        """The smallest planned size into which such a batch fits, else one of a geometric series."""
        for size in self.sizes:
            if size.holds(frames, atoms, edges):
                return size
        edges = _rounded_up(edges, multiple=2)
        smallest = int(edges / GROWTH)
        return Size(
            edges, _rounded_up(atoms + _blank_atoms(edges - smallest), multiple=1), _rounded_up(frames + 1, multiple=1)
        )

    def describe(self) -> str:
        return ", ".join(f"{size.frames} frames / {size.atoms} atoms / {size.edges} edges" for size in self.sizes)


def _rounded_up(number: int, *, multiple: int) -> int:
    """The next of the series 16 * GROWTH^k that is at least as large."""
    power = math.ceil(math.log(max(number, 16) / 16) / math.log(GROWTH) - 1e-9)
    value = math.ceil(16 * GROWTH**power)
    return max(multiple * math.ceil(value / multiple), number)


def plan_sizes(batches: np.ndarray, *, at_most: int = 4, spare: float = 0.02) -> SizePlan:
    """A plan of at most `at_most` sizes with little padding.

    batches: (n, 3), numbers of frames, atoms and edges of the batches of an epoch.
    spare: fraction by which sizes are enlarged, because other epochs have other batches.
    """
    if len(batches) == 0:
        return SizePlan(())
    order = np.argsort(batches[:, 2], kind="stable")
    batches = batches[order]
    limits = _group_ends(batches[:, 2].astype(np.float64), at_most)
    sizes = []
    for start, stop in zip([0, *limits[:-1]], limits):
        group = batches[start:stop]
        edges = 2 * math.ceil(group[:, 2].max() * (1 + spare) / 2)
        # Larger batches of the group below may need this size.
        least = int(batches[max(start - 1, 0), 2])
        atoms = math.ceil(group[:, 1].max() * (1 + spare)) + _blank_atoms(edges - least)
        sizes.append(Size(edges, atoms, int(batches[:, 0].max()) + 1))
    return SizePlan(tuple(sorted(set(sizes))))


def _group_ends(costs: np.ndarray, at_most: int) -> list[int]:
    """Ends of at most `at_most` groups of the sorted costs that minimise the sum over all members of the maximum of their
    group.

    An additional group must save at least 2 % of the total, because it needs memory.
    """
    candidates = np.unique(np.linspace(0, len(costs), min(len(costs), 64) + 1).astype(int))[1:]
    table: list[dict[int, tuple[float, list[int]]]] = [{0: (0.0, [])}]
    for _ in range(at_most):
        row: dict[int, tuple[float, list[int]]] = {}
        for end in candidates:
            options = [
                (cost + (end - start) * costs[end - 1], [*ends, int(end)])
                for start, (cost, ends) in table[-1].items()
                if start < end
            ]
            if options:
                row[int(end)] = min(options)
        table.append(row)
    total = len(costs)
    cost, ends = table[1][total]
    for row in table[2:]:
        if total in row and row[total][0] < 0.98 * cost:
            cost, ends = row[total]
    return ends
