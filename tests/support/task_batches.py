"""Random labels and predictions for the tests of losses and metrics."""

from __future__ import annotations

import torch

SPECIES = ("H", "O")
NAN = float("nan")


def random_batch(sizes: list[int], seed: int, missing: float = 0.3) -> tuple[dict, dict]:
    """Labels with gaps, and predictions that require gradients."""
    rng = torch.Generator().manual_seed(seed)
    n_atoms, n_frames = sum(sizes), len(sizes)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    frame = torch.repeat_interleave(torch.arange(n_frames), torch.tensor(sizes))
    drop = torch.rand(3, n_frames, generator=rng) < missing
    batch = {
        "n_atoms": torch.tensor(sizes),
        "frame": frame,
        "species": torch.randint(0, 2, (n_atoms,), generator=rng),
        "weight": torch.rand(n_frames, generator=rng, dtype=torch.float64) + 0.5,
        "energy": torch.where(drop[0], NAN, normal(n_frames)),
        "forces": torch.where(drop[1][frame][:, None], NAN, normal(n_atoms, 3)),
        "stress": torch.where(drop[2][:, None, None], NAN, normal(n_frames, 3, 3)),
    }
    outputs = {
        "energy": normal(n_frames).requires_grad_(),
        "forces": normal(n_atoms, 3).requires_grad_(),
        "stress": normal(n_frames, 3, 3).requires_grad_(),
    }
    return batch, outputs
