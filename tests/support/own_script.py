"""A Lightning script as a user might write it, with nothing of Forgefield but the strategy. Prints the final weights."""

from __future__ import annotations

import json
import os
import sys

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from forgefield.parallel.strategies import SimpleDDPStrategy, register_strategies


class Net(L.LightningModule):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch
        torch.manual_seed(
            int(os.environ.get("LOCAL_RANK", "0"))
        )  # ranks begin differently; rank 0's weights are to be taken
        self.first = torch.nn.Linear(3, 5, dtype=torch.float64)
        self.second = torch.nn.Linear(5, 1, dtype=torch.float64)
        self.unused = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

    def train_dataloader(self):
        """Every rank takes every n-th frame, in order: a step of all ranks is a step of one with the larger batch."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(24, 3, dtype=torch.float64, generator=generator)
        mine = x[self.trainer.global_rank :: self.trainer.world_size]
        return DataLoader(TensorDataset(mine, mine.sum(1, keepdim=True)), batch_size=self.batch)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.second(torch.tanh(self.first(x))) - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.1)

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            print("WEIGHTS", json.dumps([p.tolist() for p in self.parameters()]))


def main(n: int, strategy: str, accumulate: int) -> None:
    register_strategies()
    chosen = SimpleDDPStrategy(bucket_mb=1e-4) if strategy == "small buckets" else strategy
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(
        strategy=chosen,
        devices=n,
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        **quiet,
    )
    trainer.fit(Net(4 // n))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
