"""Blank frames: what fills a batch up to a size, without any influence on what is computed of the real frames.

A blank frame has atoms far from each other, no label and no weight. Its energy is computed like any other and used by nobody;
that results do not depend on batch mates makes it inert. Its edges lead from an atom to its own periodic image beyond the
cutoff, there and back, so that every edge has its reverse and edges stay sorted by destination.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from forgefield.data.batch import SHAPES, Batch, Shapes

EDGES_PER_ATOM = 64
"""Edges of one blank atom at most; sums over the edges of an atom take as long as its longest list."""


def sizes(batch: Batch) -> tuple[int, int, int]:
    """Frames, atoms and edges of a batch."""
    return batch["n_atoms"].shape[0], batch["positions"].shape[0], batch["edge_index"].shape[1]


def blank_frames(
    like: Batch,
    *,
    frames: int,
    atoms: int,
    edges: int,
    reach: float,
    shapes: Shapes = SHAPES,
    targets: Collection[str] = (),
) -> Batch:
    """A batch of nothing but blank frames, with the keys of `like`, on its device.

    All atoms and edges belong to the last frame; the others are empty, but say that they have one atom, since energies are
    divided by that number. reach: radius beyond which a model has no edges, A. edges: an even number. targets: fields that are
    learnt; as labels they are missing. All else that a model may read is zero.
    """
    if edges % 2 or (edges and not atoms) or (atoms and not frames):
        raise ValueError(f"no blank frames with {frames} frames, {atoms} atoms, {edges} edges")
    device = like["positions"].device
    number = torch.arange(edges, device=device)
    # Counted from the end, so that what a shorter tail holds is the end of what a longer one holds.
    from_end = torch.div(edges - 1 - number, EDGES_PER_ATOM, rounding_mode="floor")
    owner = (atoms - 1 - from_end).clamp(min=0)
    shift = torch.zeros(edges, 3, dtype=like["edge_shift"].dtype, device=device)
    shift[:, 0] = 1 - 2 * (number % 2)
    made = {
        "frame": torch.full((atoms,), frames - 1, device=device),
        "n_atoms": torch.ones(frames, dtype=torch.int64, device=device),
        "cell": (2 * reach * torch.eye(3, dtype=like["cell"].dtype, device=device)).expand(frames, 3, 3).contiguous(),
        "edge_index": torch.stack([owner, owner]),
        "edge_shift": shift,
        "edge_reverse": number ^ 1,
        "frame_id": torch.full((frames,), -1, device=device),
        "pbc": torch.ones(frames, 3, dtype=torch.bool, device=device),
    }
    rows = {"frames": frames, "atoms": atoms, "edges": edges}
    result = {}
    for key, tensor in like.items():
        if key in made:
            result[key] = made[key].to(tensor.dtype)
        else:
            fill = float("nan") if key in ("energy", "forces", "stress", *targets) else 0
            n_rows = rows[str(shapes[key][0])]
            result[key] = torch.full((n_rows, *tensor.shape[1:]), fill, dtype=tensor.dtype, device=device)
    return result


def join_batches(first: Batch, second: Batch) -> Batch:
    """The frames of both, numbered through."""
    frames, atoms, edges = sizes(first)
    offsets = {"frame": frames, "edge_index": atoms, "edge_reverse": edges}
    return {
        key: torch.cat(
            [tensor, second[key] + offsets[key] if key in offsets else second[key]], dim=int(key == "edge_index")
        )
        for key, tensor in first.items()
    }


LEAST = {"frames": 2, "atoms": 64, "edges": 64}
"""Compiled code is made for batches no smaller than this: it would know sizes of zero and one only as special cases, and some
small sizes as worth another kernel."""


def not_too_small(batch: Batch, reach: float, shapes: Shapes = SHAPES, targets: Collection[str] = ()) -> Batch:
    """The batch, filled up with a blank frame where it is smaller than `LEAST`."""
    frames, atoms, edges = sizes(batch)
    if frames >= LEAST["frames"] and atoms >= LEAST["atoms"] and edges >= LEAST["edges"]:
        return batch
    atoms, edges = max(LEAST["atoms"] - atoms, 1), max(LEAST["edges"] - edges, 0)
    blank = blank_frames(
        batch, frames=1, atoms=atoms, edges=edges + edges % 2, reach=reach, shapes=shapes, targets=targets
    )
    return join_batches(batch, blank)


GROWTH = 1.2
"""Ratio of neighbouring sizes beyond the plan."""


@dataclass(frozen=True, order=True)
class Size:
    """Sizes of a filled-up batch, at least one blank frame included."""

    edges: int
    atoms: int
    frames: int

    def holds(self, frames: int, atoms: int, edges: int) -> bool:
        """Whether a batch of these sizes fits, with enough blank atoms to carry the blank edges."""
        return frames < self.frames and edges <= self.edges and self.atoms - atoms >= _blank_atoms(self.edges - edges)


def _blank_atoms(blank_edges: int) -> int:
    return max(1, math.ceil(blank_edges / EDGES_PER_ATOM))


@dataclass(frozen=True)
class SizePlan:
    """sizes: ascending."""

    sizes: tuple[Size, ...]

    def fit(self, frames: int, atoms: int, edges: int) -> Size:
        """The smallest planned size that holds such a batch, or one of a geometric series beyond them."""
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
    """A plan of few sizes into which batches waste little. batches: (n, 3) frames, atoms and edges of batches to come.

    spare: by how much sizes are enlarged, since the batches of other epochs are put together differently.
    """
    if len(batches) == 0:
        return SizePlan(())
    order = np.argsort(batches[:, 2], kind="stable")
    batches = batches[order]
    limits = _cut(batches[:, 2].astype(np.float64), at_most)
    sizes = []
    for start, stop in zip([0, *limits[:-1]], limits):
        group = batches[start:stop]
        edges = 2 * math.ceil(group[:, 2].max() * (1 + spare) / 2)
        # Batches of the next smaller size may spill over into this one.
        least = int(batches[max(start - 1, 0), 2])
        atoms = math.ceil(group[:, 1].max() * (1 + spare)) + _blank_atoms(edges - least)
        sizes.append(Size(edges, atoms, int(batches[:, 0].max()) + 1))
    return SizePlan(tuple(sorted(set(sizes))))


def _cut(costs: np.ndarray, at_most: int) -> list[int]:
    """Where to cut the sorted costs into groups so that the sum of every member's group maximum is least.

    A further group must save at least 2 % of the whole to be worth its memory.
    """
    candidates = np.unique(np.linspace(0, len(costs), min(len(costs), 64) + 1).astype(int))[1:]
    table: list[dict[int, tuple[float, list[int]]]] = [{0: (0.0, [])}]
    for _ in range(at_most):
        row: dict[int, tuple[float, list[int]]] = {}
        for end in candidates:
            options = [
                (cost + (end - start) * costs[end - 1], [*cuts, int(end)])
                for start, (cost, cuts) in table[-1].items()
                if start < end
            ]
            if options:
                row[int(end)] = min(options)
        table.append(row)
    total = len(costs)
    chosen, least = table[1][total]
    for row in table[2:]:
        if total in row and row[total][0] < 0.98 * chosen:
            chosen, least = row[total]
    return least
