"""Models that are called like MACE: a dict of tensors with edges and shifts, to a dict with `energy` or `node_energy`.

Keys: positions (n_atoms, 3), node_attrs (n_atoms, n_species) one-hot, edge_index (2, n_edges) sender and receiver, shifts
(n_edges, 3) A and unit_shifts (n_edges, 3) with vector = positions[receiver] - positions[sender] + shifts, cell
(3 n_frames, 3), batch (n_atoms,), ptr (n_frames + 1,), head (n_frames,).
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.adapters.foreign import Foreign
from forgefield.models.edges import Batch, EdgeContext, rows_times


class MaceLike(Foreign):
    """model.features: key of the output with features of atoms (`node_feats`), which have to be invariant."""

    of_frames = False

    def evaluate(self, batch: Batch, edges: EdgeContext) -> tuple[Tensor, Tensor | None]:
        accepted = inspect.signature(self.module.forward).parameters
        asked = {"training": self.training, "compute_force": False}
        found = self.module(self._data(batch), **{key: value for key, value in asked.items() if key in accepted})
        made = found.get("node_energy")
        if made is None:
            made = found.get("energy")
            if made is None:
                raise ForgefieldError(
                    f"{self.options.module} gave {', '.join(found)}; wanted is 'node_energy' (n_atoms,) or 'energy' "
                    "(n_frames,)."
                )
            share = made.reshape(-1) / batch["n_atoms"].to(made.dtype)
            made = share.index_select(0, batch["frame"])
        features = None if self.options.features is None else found.get(self.options.features)
        return made, features

    def _data(self, batch: Batch) -> dict[str, Tensor]:
        (source, destination), n_atoms = batch["edge_index"], batch["n_atoms"]
        cells = batch["cell"].index_select(0, batch["frame"].index_select(0, destination))
        # Our vector goes from the receiver to the sender: both change sign.
        shifts = -rows_times(batch["edge_shift"], cells)
        identity = torch.eye(len(self.species), dtype=self.dtype, device=source.device)
        return {
            "positions": batch["positions"].to(self.dtype),
            "node_attrs": identity.index_select(0, batch["species"]),
            "edge_index": batch["edge_index"],
            "shifts": shifts.to(self.dtype),
            "unit_shifts": (-batch["edge_shift"]).to(self.dtype),
            "cell": batch["cell"].flatten(0, 1).to(self.dtype),
            "batch": batch["frame"],
            "ptr": torch.nn.functional.pad(torch.cumsum(n_atoms, 0), (1, 0)),
            "head": torch.zeros_like(n_atoms),
        }
