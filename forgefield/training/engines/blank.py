"""Blank frames: what fills a batch up to a size, without any influence on what is computed of the real frames.

A blank frame has atoms far from each other, no label and no weight. Its energy is computed like any other and used by nobody;
that results do not depend on batch mates makes it inert. Its edges lead from an atom to its own periodic image beyond the
cutoff, there and back, so that every edge has its reverse and edges stay sorted by destination.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from forgefield.data.batch import SHAPES, Shapes

Batch = dict[str, Tensor]
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
