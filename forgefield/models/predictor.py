"""Models with outputs other than energies: `Predictor` has heads that read the features of an encoder, `DirectOutputs` wraps a
model whose outputs are the labels themselves.

With an energy a predictor is a `Potential` with additional heads, all of which read the features of one pass through the
encoder; without an energy its outputs are those of its heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.edges import Batch, EdgeContext, StepMemory, edge_vectors
from forgefield.models.heads.heads import EdgeGeometry, EdgeHead, Head, build_head, edge_geometry
from forgefield.models.heads.options import HeadOptions
from forgefield.models.interface import ExtraOutput
from forgefield.models.potential import Potential
from forgefield.models.resolved import FORCES, NOISE


class Predictor(Potential):
    """model: the encoder. heads: options of the extra outputs. has_energy: whether energies, forces and stress are outputs.

    dtype, seed: of the heads' initial weights.
    """

    heads: nn.ModuleDict

    def __init__(
        self,
        model: nn.Module,
        heads: Mapping[str, HeadOptions],
        *,
        has_energy: bool,
        max_neighbours: int | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__(model, max_neighbours=max_neighbours)
        self.has_energy = has_energy
        n_features = self._require_features()
        self.heads = nn.ModuleDict(
            {
                head_key(name): build_head(
                    name, options, n_features=n_features, n_species=len(self.species), dtype=dtype, seed=seed
                )
                for name, options in heads.items()
            }
        )
        self._names = tuple(heads)
        self.forces_are_direct = FORCES in heads
        if not has_energy:
            for parameter in self.interface.energy_parameters():
                parameter.requires_grad_(False)

    @property
    def extra_outputs(self) -> Mapping[str, HeadOptions]:
        return {name: self.head(name).options for name in self._names if name not in (FORCES, NOISE)}

    @property
    def needs_keys(self) -> bool:
        """Whether batches of a training have to carry `frame_key`."""
        return any(self.head(name).dropout > 0 for name in self._names)

    def head(self, name: str) -> Head | EdgeHead:
        return cast(Head | EdgeHead, self.heads[head_key(name)])

    def forward(
        self, batch: Batch, *, forces: bool = True, stress: bool = False, memory: StepMemory | None = None
    ) -> dict[str, Tensor]:
        """As `Potential`, and every extra output by its name: (n_frames, *shape) or (n_atoms, *shape), float64."""
        if self.has_energy:
            forces = forces and not self.forces_are_direct
            return super().forward(batch, forces=forces, stress=stress, memory=memory)
        features, _ = self.interface.encode(batch, EdgeContext.of(batch), energies=False)
        return self._extra_outputs(features, batch)

    def _encode(self, batch: Batch, edges: EdgeContext) -> tuple[Tensor, Tensor | None]:
        features, energies = self.interface.encode(batch, edges, energies=True)
        assert energies is not None
        return self._referenced(energies, batch), features

    def _extra_outputs(self, features: Tensor | None, batch: Batch) -> dict[str, Tensor]:
        assert features is not None
        equivariant = any(isinstance(self.head(name), EdgeHead) for name in self._names)
        geometry = self._edge_geometry(batch) if equivariant else None
        return {name: self.head(name)(features, batch, geometry) for name in self._names}

    def _edge_geometry(self, batch: Batch) -> EdgeGeometry:
        edges = EdgeContext(edge_vectors(batch), batch)
        to_nearest = self.interface.grows_to_nearest
        return edge_geometry(edges.vectors, edges.graph, self.cutoff, self.adaptive_cutoff, to_nearest=to_nearest)

    def _require_features(self) -> int:
        """How many features the model has; raises where it cannot do what the task needs."""
        name = type(self.model).__name__
        if self.interface.feature_dim is None:
            raise ForgefieldError(
                f"{name} gives no features that extra targets could be learnt from: it needs the attribute feature_dim and a "
                "method encode (or, without energies, a forward that returns (n_atoms, feature_dim))."
            )
        if self.has_energy and not self.interface.has_energies:
            raise ForgefieldError(
                f"{name} gives features and no energies (it has no method encode), so the task cannot have energy, forces, "
                "stress or virial."
            )
        return self.interface.feature_dim


def head_key(name: str) -> str:
    """Name of the module of a head; fields may be called like attributes of a module."""
    return f"of_{name}"


class DirectOutputs(Potential):
    """model: has `values`. outputs: description of each requested output, by name."""

    has_energy = False

    def __init__(
        self, model: nn.Module, outputs: Mapping[str, ExtraOutput], *, max_neighbours: int | None = None
    ) -> None:
        super().__init__(model, max_neighbours=max_neighbours)
        self._outputs_of_model = dict(outputs)

    @property
    def extra_outputs(self) -> Mapping[str, ExtraOutput]:
        return self._outputs_of_model

    def forward(
        self, batch: Batch, *, forces: bool = True, stress: bool = False, memory: StepMemory | None = None
    ) -> dict[str, Tensor]:
        """Every output by its name: (n_frames, *shape) or (n_atoms, *shape), float64. There are no forces and no stress."""
        return self.interface.values(batch, EdgeContext.of(batch), tuple(self.extra_outputs))
