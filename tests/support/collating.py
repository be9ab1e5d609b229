"""The slow, obvious way to one batch from several: what assembling from columns is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forgefield.data.batch import Batch

_PER_ATOM = ("positions", "species", "forces")
_PER_FRAME = ("n_atoms", "cell", "pbc", "energy", "stress", "weight", "frame_id")


def collate(samples: Sequence[Batch]) -> Batch:
    """One batch from several; frames keep their order and their `frame_id`."""
    if len(samples) == 1:
        return dict(samples[0])
    batch = {key: torch.cat([sample[key] for sample in samples]) for key in (*_PER_ATOM, *_PER_FRAME, "edge_shift")}
    n_atoms = batch["n_atoms"]
    batch["frame"] = torch.repeat_interleave(n_atoms, output_size=len(batch["species"]))
    edges = [sample["edge_index"] for sample in samples]
    batch["edge_index"] = torch.cat(edges, dim=1)
    atoms_in = torch.tensor([len(sample["species"]) for sample in samples])
    edges_in = torch.tensor([edge.shape[1] for edge in edges])
    first_atom = atoms_in.cumsum(0) - atoms_in
    n_edges = batch["edge_index"].shape[1]
    batch["edge_index"] += torch.repeat_interleave(first_atom, edges_in, output_size=n_edges)
    first_edge = edges_in.cumsum(0) - edges_in
    if "edge_reverse" in samples[0]:
        batch["edge_reverse"] = torch.cat([sample["edge_reverse"] for sample in samples])
        batch["edge_reverse"] += torch.repeat_interleave(first_edge, edges_in, output_size=n_edges)
    return batch
