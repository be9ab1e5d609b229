"""A Lightning module as a user might write it, with defects on request, and what trains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


class Net(L.LightningModule):
    """defects: dead, exploding, unused, detached, root (the gradient of a root at zero), logarithm (NaN in a module)."""

    def __init__(self, *defects: str, optimiser: Any = torch.optim.Adam, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.defects, self.optimiser, self.options = defects, optimiser, {"lr": 0.01, **options}
        activation = nn.ReLU() if "dead" in defects else nn.Tanh()
        self.encoder = nn.Sequential(nn.Linear(3, 8), activation, nn.Linear(8, 8))
        self.bad = Logarithm() if "logarithm" in defects else nn.Identity()
        self.head = nn.Linear(8, 1)
        if "dead" in defects:
            self.encoder[0].bias.data -= 1e3
        if "exploding" in defects:
            self.encoder[2].weight.data *= 1e6
        if "unused" in defects:
            self.extra = nn.Linear(2, 2)
        self.double()

    def training_step(self, batch, batch_idx):
        x, y = batch
        features = self.bad(self.encoder(x))
        features = features.detach() if "detached" in self.defects else features
        error = self.head(features) - y
        loss = error.square().mean()
        if "root" in self.defects:  # zero, but its gradient is NaN where |y| is large
            marked = (y.abs() > 100).to(y.dtype)
            zero = (marked * (error - error.detach()).square() + 1 - marked).sqrt() - 1 + marked
            loss = ((1 - marked) * error.square() + zero).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return self.optimiser(self.parameters(), **self.options)


class Logarithm(nn.Module):
    """NaN for rows whose first feature is above 0.3."""

    def forward(self, x):
        return x + 0.0 * torch.log(0.3 - x[:, :1])


def samples(n: int = 96, **labels: float) -> DataLoader:
    """Batches of 8 in their order. labels: `at_13=1e4` sets the label of sample 13."""
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x.sum(1, keepdim=True)
    for place, value in labels.items():
        if place == "all":
            y[:] = value
        else:
            y[int(place.removeprefix("at_"))] = value
    return DataLoader(TensorDataset(x, y), batch_size=8)


def fit(
    module: L.LightningModule, *callbacks: L.Callback, folder: Path, data: DataLoader | None = None, **options: Any
):
    trainer = L.Trainer(
        **{**QUIET, "max_epochs": 3, "default_root_dir": str(folder), **options}, callbacks=list(callbacks)
    )
    trainer.fit(module, data if data is not None else samples())
    return trainer


def weights(module: L.LightningModule) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])
