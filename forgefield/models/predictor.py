"""A model with further outputs: an encoder of atoms, heads that read its features, and an energy where it has one.

With an energy it is a `Potential` with heads beside it, all fed by one pass through the encoder; without, it gives what its
heads give and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from forgefield.errors import ForgefieldError
from forgefield.models.heads.equivariant import EdgeGeometry, EdgeHead, edge_geometry
from forgefield.models.heads.heads import Head, HeadOptions, build_head
from forgefield.models.potential import Batch, Potential, edge_vectors
from forgefield.ops.graph import edge_graph

FORCES = "forces"
"""A head of this name gives forces in place of the derivative of the energy."""
NOISE = "denoise"
"""A head of this name gives by how much atoms were moved, which is of use in training only."""


@runtime_checkable
class Encoder(Protocol):
    """What heads ask of a model, also of a user's own.

    `encode(batch, energies=...)` gets what `EnergyModel.forward` gets and returns features (n_atoms, feature_dim), invariant
    under rotations and aware of the atom's species, and atomic energies (n_atoms,), eV, or None where they are not asked for.
    `energy_parameters` are those that features do not depend on. A model that has `feature_dim` and no `encode` is an encoder
    alone: its `forward` gives the features.
    """

    feature_dim: int

    def encode(self, batch: dict[str, Any], *, energies: bool = True) -> tuple[Tensor, Tensor | None]: ...

    def energy_parameters(self) -> Iterable[nn.Parameter]: ...


class Predictor(Potential):
    """model: the encoder. heads: options of the further outputs. has_energy: whether energies, forces and stress are outputs.

    dtype, seed: of the heads' first weights.
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
        _require_encoder(model, has_energy)
        make: dict[str, Any] = {"n_features": int(model.feature_dim), "n_species": len(self.species)}  # type: ignore[arg-type]
        self.heads = nn.ModuleDict(
            {
                head_key(name): build_head(name, options, **make, dtype=dtype, seed=seed)
                for name, options in heads.items()
            }
        )
        self._names = tuple(heads)
        self.forces_are_direct = FORCES in heads
        if not has_energy and hasattr(model, "energy_parameters"):
            for parameter in model.energy_parameters():  # type: ignore[operator]
                parameter.requires_grad_(False)

    @property
    def extra_outputs(self) -> Mapping[str, HeadOptions]:
        return {name: self.head(name).options for name in self._names if name not in (FORCES, NOISE)}

    @property
    def needs_keys(self) -> bool:
        """Whether batches of a training have to carry `frame_key`."""
        return any(self.head(name).dropout > 0 for name in self._names)

    def head(self, name: str) -> Head | EdgeHead:
        return self.heads[head_key(name)]  # type: ignore[return-value]

    def forward(self, batch: Batch, *, forces: bool = True, stress: bool = False) -> dict[str, Tensor]:
        """As `Potential`, and every further output by its name: (n_frames, *shape) or (n_atoms, *shape), float64."""
        if self.has_energy:
            return super().forward(batch, forces=forces and not self.forces_are_direct, stress=stress)
        features, _ = self._features(batch | {"edge_vectors": edge_vectors(batch)}, energies=False)
        return self._extra_outputs(features, batch)

    def _encode(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        features, energies = self._features(batch, energies=True)
        assert energies is not None
        return self._referenced(energies, batch), features

    def _features(self, batch: dict[str, Any], *, energies: bool) -> tuple[Tensor, Tensor | None]:
        if hasattr(self.model, "encode"):
            return self.model.encode(batch, energies=energies)  # type: ignore[operator]
        return self.model(batch), None

    def _extra_outputs(self, features: Tensor | None, batch: Batch) -> dict[str, Tensor]:
        assert features is not None
        turning = any(isinstance(self.head(name), EdgeHead) for name in self._names)
        edges = self._edges(batch) if turning else None
        return {name: self.head(name)(features, batch, edges) for name in self._names}

    def _edges(self, batch: Batch) -> EdgeGeometry:
        return edge_geometry(edge_vectors(batch), edge_graph(batch), self.cutoff, self.adaptive_cutoff)


def head_key(name: str) -> str:
    """Of the module; an attribute of a module may be called like a field."""
    return f"of_{name}"


def _require_encoder(model: nn.Module, has_energy: bool) -> None:
    if not hasattr(model, "feature_dim"):
        raise ForgefieldError(
            f"{type(model).__name__} gives no features that further targets could be learnt from: it needs the attribute "
            "feature_dim and a method encode (or, without energies, a forward that gives (n_atoms, feature_dim))."
        )
    if has_energy and not hasattr(model, "encode"):
        raise ForgefieldError(
            f"{type(model).__name__} gives features and no energies (it has no method encode), so task cannot have energy, "
            "forces, stress or virial."
        )
