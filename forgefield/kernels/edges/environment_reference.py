"""Reference implementation of the operators of `environment.py`: used where kernels cannot run, for derivatives beyond the
second, and in tests. Everything here can be differentiated any number of times.

Products of all components, (n_edges, components, channels), are stored; nothing here is fast.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ReferenceEdges:
    """Edges of atoms. destination: (n_edges,). shared: all degrees have one weight, (n_edges, channels); else weights are
    (n_edges, degrees x channels). The first harmonic is taken as one."""

    def __init__(self, destination: Tensor, n_atoms: int, n_harmonics: int, shared: bool) -> None:
        self.destination, self.n_atoms, self.shared = destination, n_atoms, shared
        self.sizes = [size for size in range(1, n_harmonics + 1, 2) if (size + 1) ** 2 <= 4 * n_harmonics]

    # ---- environments

    def environment(self, weights: Tensor, harmonics: Tensor) -> Tensor:
        return self._summed(self._y(harmonics) * self._w(weights))

    def environment_backward(self, grad: Tensor, weights: Tensor, harmonics: Tensor) -> tuple[Tensor, Tensor]:
        g = self._at_edges(grad)
        return self._of_weights(g * self._y(harmonics)), self._of_harmonics(g * self._w(weights))

    def environment_double_backward(
        self, along_w: Tensor, along_y: Tensor, grad: Tensor, weights: Tensor, harmonics: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        g, w, aw = self._at_edges(grad), self._w(weights), self._w(along_w)
        y, ay = self._y(harmonics), self._y(along_y, 0.0)
        return self._summed(aw * y + w * ay), self._of_weights(g * ay), self._of_harmonics(g * aw)

    # ---- projections

    def project(self, rows: Tensor, weights: Tensor, harmonics: Tensor) -> Tensor:
        return (self._at_edges(rows) * self._y(harmonics) * self._w(weights)).sum(1)

    def project_backward(
        self, grad: Tensor, rows: Tensor, weights: Tensor, harmonics: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, y, w, p = self._at_edges(rows), self._y(harmonics), self._w(weights), grad.unsqueeze(1)
        return self._summed(p * w * y), self._of_weights(p * q * y), self._of_harmonics(p * q * w)

    def project_double_backward(
        self,
        along_q: Tensor,
        along_w: Tensor,
        along_y: Tensor,
        grad: Tensor,
        rows: Tensor,
        weights: Tensor,
        harmonics: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, aq, w, aw = self._at_edges(rows), self._at_edges(along_q), self._w(weights), self._w(along_w)
        y, ay, p = self._y(harmonics), self._y(along_y, 0.0), grad.unsqueeze(1)
        moved = aq * y + q * ay
        of_harmonics = self._of_harmonics(p * (aq * w + q * aw))
        return (
            (moved * w + q * y * aw).sum(1),
            self._summed(p * (aw * y + w * ay)),
            self._of_weights(p * moved),
            of_harmonics,
        )

    # ---- parts

    def _y(self, harmonics: Tensor, first: float = 1.0) -> Tensor:
        """(n_edges, components, 1)."""
        return torch.cat([torch.full_like(harmonics[:, :1], first), harmonics[:, 1:]], 1).unsqueeze(2)

    def _w(self, weights: Tensor) -> Tensor:
        """(n_edges, components, channels): the weight of each component's degree; or (n_edges, 1, channels)."""
        if self.shared:
            return weights.unsqueeze(1)
        parts = weights.unflatten(1, (len(self.sizes), -1)).split(1, 1)
        return torch.cat([part.expand(-1, size, -1) for part, size in zip(parts, self.sizes)], 1)

    def _at_edges(self, rows: Tensor) -> Tensor:
        """(components, n_atoms, channels) -> (n_edges, components, channels), of each edge's centre."""
        return rows.index_select(1, self.destination).transpose(0, 1)

    def _summed(self, values: Tensor) -> Tensor:
        """The other way round: summed over the edges of each atom."""
        zeros = values.new_zeros(self.n_atoms, *values.shape[1:])
        return zeros.index_add(0, self.destination, values).transpose(0, 1).contiguous()

    def _of_weights(self, values: Tensor) -> Tensor:
        parts = [values] if self.shared else values.split(self.sizes, 1)
        return torch.cat([part.sum(1) for part in parts], 1)

    def _of_harmonics(self, values: Tensor) -> Tensor:
        summed = values.sum(2)
        return torch.cat([torch.zeros_like(summed[:, :1]), summed[:, 1:]], 1)
