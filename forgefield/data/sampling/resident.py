"""Frames that stay on the device of the model, from which batches are made without the host.

All columns are copied to the device once. The batches of an epoch are then arranged there in a few operations for many batches
at once (a window): frames in the order of the epoch, indices of atoms and edges as in the batch. A batch is a slice of the
window, so that nothing is assembled or copied for a step. Batches are bit for bit those that `GraphDataset.batch` assembles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from forgefield.data.batch import SHAPES, Batch, is_memory_error
from forgefield.data.dataset import GraphDataset
from forgefield.data.store.columns import offsets
from forgefield.errors import ForgefieldError

CHUNK = 256
"""Frames that are assembled and copied together."""
WINDOW_BYTES = 256 * 2**20
"""Approximate memory of the batches that are arranged together."""
_COMPACT = {"edge_index": torch.int32, "edge_shift": torch.int16, "edge_reverse": torch.int32}
"""Types in which columns of edges are kept; batches have other types."""


MOST_BYTES = 2**30
LARGEST_SHARE = 0.25
"""Memory of a GPU, and share of what is free, that frames may use unless the config requests that they stay there. Reading more
would delay the first step."""


def resident_frames(dataset: GraphDataset, device: torch.device, keep: str, *, noisy: bool) -> ResidentFrames | str:
    """The frames on the device, or why they are assembled on the host.

    keep: `data.keep`. noisy: whether atoms are displaced at random.
    """
    requested = keep == "device"
    if keep == "memory" or (device.type != "cuda" and not requested):
        return "assembled on the host"
    reason = "atoms are displaced at random" if noisy else None
    if dataset.n_edges is None:
        reason = "neighbour lists are built for each batch"
    if reason is None and not requested:
        needed, free = memory_bytes(dataset)[0], torch.cuda.mem_get_info(device)[0]
        if needed > MOST_BYTES or needed + WINDOW_BYTES > LARGEST_SHARE * free:
            reason = (
                f"all frames need {_gigabytes(needed)} of GPU memory, of which {_gigabytes(free)} is free (data.keep=device "
                "keeps them there)"
            )
    if reason is not None:
        if requested:
            raise ForgefieldError(
                f"data.keep=device: frames cannot stay on the device, because {reason}; leave it out."
            )
        return f"assembled on the host, because {reason}"
    try:
        return ResidentFrames(dataset, device)
    except Exception as error:
        if is_memory_error(error):
            raise ForgefieldError(
                f"data.keep=device: all frames need {_gigabytes(memory_bytes(dataset)[0])}, more memory than is free; leave it "
                "out."
            ) from error
        raise


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.3g} GB"


def memory_bytes(dataset: GraphDataset) -> tuple[int, int]:
    """Memory that the columns of a data set need on a device, and that of all its batches arranged."""
    assert dataset.n_edges is not None
    example = dataset[int(dataset.n_atoms.argmin())]
    counts = _counts(dataset)
    kept = arranged = 0
    for key, tensor in example.items():
        n_rows = int(counts[_rows_of(dataset, key)].sum())
        n_values = n_rows * int(np.prod(_shape_of_row(key, tensor)))
        kept += n_values * _COMPACT.get(key, tensor.dtype).itemsize
        arranged += n_values * tensor.dtype.itemsize
    return kept, arranged


def _counts(dataset: GraphDataset) -> dict[str, np.ndarray]:
    """Rows of each frame, by what they belong to."""
    assert dataset.n_edges is not None
    return {"frames": np.ones(len(dataset), dtype=np.int64), "atoms": dataset.n_atoms, "edges": dataset.n_edges}


def _rows_of(dataset: GraphDataset, key: str) -> str:
    """What a row of this tensor of a batch belongs to: `frames`, `atoms` or `edges`."""
    if key in SHAPES:
        return next(size for size in SHAPES[key] if isinstance(size, str))
    return "atoms" if dataset.fields[key].per == "atom" else "frames"


def _shape_of_row(key: str, tensor: Tensor) -> tuple[int, ...]:
    return (2,) if key == "edge_index" else tuple(tensor.shape[1:])


class ResidentFrames:
    """All frames of `dataset` on `device`."""

    def __init__(self, dataset: GraphDataset, device: torch.device, *, window_bytes: int = WINDOW_BYTES) -> None:
        assert dataset.n_edges is not None
        self.dataset, self.device = dataset, device
        self._counts = _counts(dataset)
        self._rows = {key: _rows_of(dataset, key) for key in dataset[0]}
        columns: dict[str, list[Tensor]] = {key: [] for key in self._rows}
        self._types: dict[str, torch.dtype] = {}
        for begin in range(0, len(dataset), CHUNK):
            rows = np.arange(begin, min(begin + CHUNK, len(dataset)))
            for key, tensor in self._within_frames(dataset.batch(rows)).items():
                columns[key].append(tensor.to(device))
        self._columns = {key: torch.cat(columns.pop(key)) for key in list(columns)}
        self._first = {name: torch.from_numpy(offsets(counts)[:-1]).to(device) for name, counts in self._counts.items()}
        kept, arranged = memory_bytes(dataset)
        self.n_bytes = kept
        self.window_frames = max(1, int(window_bytes * len(dataset) / max(arranged, 1)))
        """Frames whose batches are arranged together."""
        self._blank: Batch | None = None

    def _within_frames(self, batch: Batch) -> Batch:
        """A batch in which atoms and edges are numbered within their frames, in compact types; `edge_index` is (n_edges, 2)."""
        n_atoms = batch["n_atoms"]
        columns = dict(batch)
        first_atom = n_atoms.cumsum(0) - n_atoms
        frame_of_edge = batch["frame"][batch["edge_index"][1]]
        columns["edge_index"] = (batch["edge_index"] - first_atom[frame_of_edge]).t()
        if "edge_reverse" in batch:
            n_edges = torch.bincount(frame_of_edge, minlength=len(n_atoms))
            columns["edge_reverse"] = batch["edge_reverse"] - (n_edges.cumsum(0) - n_edges)[frame_of_edge]
        self._types = {key: tensor.dtype for key, tensor in batch.items()}
        for key, dtype in _COMPACT.items():
            if key in columns:
                columns[key] = columns[key].to(dtype)
        return columns

    def batches(
        self,
        rows: np.ndarray,
        sizes: Sequence[int],
        additional: Callable[[slice], dict[str, np.ndarray]] = lambda frames: {},
    ) -> Iterator[Batch]:
        """Batches of these rows of the data set, one after another.

        sizes: numbers of frames of the batches; 0 for a blank frame. additional(frames): more tensors with a row for each
        frame, for a slice of `rows`.
        """
        ends = np.cumsum(sizes, dtype=np.int64)
        first = 0
        while first < len(sizes):
            begin = int(ends[first]) - sizes[first]
            last = max(first + 1, int(np.searchsorted(ends, begin + self.window_frames, side="right")))
            frames = slice(begin, int(ends[last - 1]))
            window = self._window(rows[frames], np.asarray(sizes[first:last], dtype=np.int64), additional(frames))
            yield from window
            first = last

    @torch.no_grad()
    def _window(self, rows: np.ndarray, sizes: np.ndarray, additional: dict[str, np.ndarray]) -> Iterator[Batch]:
        """Batches of these rows, with `sizes` frames each."""
        counts = {name: of_frame[rows] for name, of_frame in self._counts.items()}
        begins = {name: offsets(of_frame) for name, of_frame in counts.items()}
        # The first row of each batch in the window, and of each frame in its batch.
        bounds = {name: begin[offsets(sizes)] for name, begin in begins.items()}
        of_batch = np.repeat(np.arange(len(sizes)), sizes)
        in_batch = {name: begin[:-1] - bounds[name][of_batch] for name, begin in begins.items()}
        numbers = self._on_device(rows, *counts.values(), *in_batch.values())
        indices, n_rows, starts = numbers[0], dict(zip(counts, numbers[1:4])), dict(zip(counts, numbers[4:]))
        frame_of, source = {}, {}
        for name, begin in begins.items():
            total = int(begin[-1])
            frame = torch.repeat_interleave(n_rows[name], output_size=total)
            shift = self._first[name][indices] - (n_rows[name].cumsum(0) - n_rows[name])
            frame_of[name], source[name] = frame, torch.arange(total, device=self.device) + shift[frame]
        parts: dict[str, Sequence[Tensor]] = {}
        lengths = {name: np.diff(bound).tolist() for name, bound in bounds.items()}
        for key, column in self._columns.items():
            name = self._rows[key]
            if key == "frame":
                values = starts["frames"][frame_of["atoms"]]
            else:
                values = column.index_select(0, source[name]).to(self._types[key])
            if key == "edge_index":
                parts[key] = self._edge_indices(values + starts["atoms"][frame_of[name]][:, None], lengths[name])
                continue
            if key == "edge_reverse":
                values = values + starts["edges"][frame_of[name]]
            parts[key] = values.split(lengths[name])
        for key, array in additional.items():
            parts[key] = self._on_device(array)[0].split(lengths["frames"])
        for number, size in enumerate(sizes.tolist()):
            yield {key: values[number] for key, values in parts.items()} if size else self._blank_batch()

    def _edge_indices(self, pairs: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """For each batch its sources and destinations as a contiguous tensor (2, n_edges).

        pairs: of the window, (n_edges, 2). lengths: numbers of edges of the batches.
        """
        counts = np.asarray(lengths, dtype=np.int64)
        first, n_edges = self._on_device(offsets(counts)[:-1], counts)
        batch = torch.repeat_interleave(n_edges, output_size=len(pairs))
        place = torch.arange(len(pairs), device=self.device) + first[batch]
        flat = torch.empty(2 * len(pairs), dtype=pairs.dtype, device=self.device)
        flat[place], flat[place + n_edges[batch]] = pairs[:, 0], pairs[:, 1]
        return [part.view(2, -1) for part in flat.split((2 * counts).tolist())]

    def _on_device(self, *arrays: np.ndarray) -> list[Tensor]:
        """Columns of whole numbers, copied in one piece."""
        joined = torch.from_numpy(np.concatenate([array.astype(np.int64, copy=False) for array in arrays]))
        if self.device.type == "cuda":
            joined = joined.pin_memory()
        return list(joined.to(self.device, non_blocking=True).split([len(array) for array in arrays]))

    def _blank_batch(self) -> Batch:
        if self._blank is None:
            self._blank = {key: tensor.to(self.device) for key, tensor in self.dataset.blank().items()}
        return self._blank
