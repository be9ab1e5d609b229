"""The data of a run: read, divided, turned into graphs and measured once, then served in batches to Lightning."""

from __future__ import annotations

import lightning

from forgefield.config.schema import DataOptions
from forgefield.config.starter import LARGE_FORCES
from forgefield.data.dataset import GraphDataset, Progress
from forgefield.data.readers import plain
from forgefield.data.sampling import FrameLoader
from forgefield.data.species import SpeciesTable
from forgefield.data.splits import Splits, resolve_splits
from forgefield.data.statistics import Statistics, compute_statistics
from forgefield.errors import ForgefieldError


class DataModule(lightning.LightningDataModule):
    """`options` is a `DataOptions` or an OmegaConf section of the same shape; `seed` orders frames and draws splits.

    rank, world_size: whose share of the batches is served.
    """

    train: GraphDataset
    val: GraphDataset | None
    test: GraphDataset | None
    species: SpeciesTable
    statistics: Statistics
    split_description: str

    def __init__(self, options: DataOptions, seed: int, *, rank: int = 0, world_size: int = 1) -> None:
        super().__init__()
        self.options = options
        self.seed = int(seed)
        self.rank, self.world_size = rank, world_size
        self._ready = False

    def prepare(self, progress: Progress | None = None) -> None:
        """Do all the work, once. `progress(done, total)` counts neighbour lists over all frames."""
        if self._ready:
            return
        splits = resolve_splits(self.options, self.seed)
        self.split_description = splits.description
        names = plain(self.options.species)
        self.species = SpeciesTable(names) if names is not None else SpeciesTable.from_frames(splits.train)
        self._build_graphs(splits, progress)
        others = [part for part in (self.val, self.test) if part is not None]
        self.statistics = compute_statistics(self.train, self.options, others)
        self._ready = True

    def _build_graphs(self, splits: Splits, progress: Progress | None) -> None:
        total = len(splits.train) + len(splits.val) + len(splits.test)
        done = 0

        def count(within: int, _: int) -> None:
            if progress is not None:
                progress(done + within, total)

        parts: list[GraphDataset | None] = []
        for frames in (splits.train, splits.val, splits.test):
            graphs = GraphDataset(frames, self.species, self.options.cutoff, self.options.neighbours, count)
            parts.append(graphs if frames else None)
            done += len(frames)
        train, self.val, self.test = parts
        if train is None:
            raise ForgefieldError("data.train holds no frame")
        self.train = train

    def setup(self, stage: str | None = None) -> None:
        self.prepare()

    def train_dataloader(self) -> FrameLoader:
        self.prepare()
        return self._loader(self.train, self.options.batch.frames, shuffle=self.options.shuffle)

    def val_dataloader(self) -> FrameLoader | list:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> FrameLoader | list:
        return self._evaluation_loader("test")

    def _evaluation_loader(self, name: str) -> FrameLoader | list:
        self.prepare()
        dataset = getattr(self, name)
        if dataset is None:
            return []
        frames = self.options.eval_batch if self.options.eval_batch is not None else self.options.batch.frames
        return self._loader(dataset, frames, shuffle=False)

    def _loader(self, dataset: GraphDataset, frames: int, *, shuffle: bool) -> FrameLoader:
        return FrameLoader(dataset, frames, shuffle=shuffle, seed=self.seed, rank=self.rank, world_size=self.world_size)

    def describe(self) -> list[tuple[str, str]]:
        """Rows (label, value) of a summary table."""
        self.prepare()
        found = self.statistics
        atoms = self.train.n_atoms
        labels = ", ".join(f"{name} {count}" for name, count in found.labels.items() if count) or "none"
        energies = ", ".join(f"{symbol} {energy:.4f}" for symbol, energy in found.reference_energies.items())
        rows = [
            ("frames", self.split_description),
            ("atoms per frame", f"{atoms.min()}" if atoms.min() == atoms.max() else f"{atoms.min()} to {atoms.max()}"),
            ("species", ", ".join(f"{symbol} {count}" for symbol, count in found.species_counts.items())),
            ("frames with labels", labels),
            ("cutoff", f"{self.options.cutoff:g} A, {found.mean_neighbours:.1f} neighbours per atom"),
            ("reference energies", f"{found.reference_kind}: {energies} eV"),
        ]
        if found.reference_note:
            rows.append(("note", found.reference_note))
        if found.energy_residual_std is not None:
            rows.append(("energy spread", f"{1000 * found.energy_residual_std:.1f} meV/atom"))
        if found.forces_rms is not None:
            doubt = (
                "; that is much: is the file in other units (data.units)?" if found.forces_rms > LARGE_FORCES else ""
            )
            rows.append(("force rms", f"{found.forces_rms:.3f} eV/A, largest component {found.max_force:.2f}{doubt}"))
        if found.min_distance is not None:
            rows.append(("closest pair", f"{found.min_distance:.3f} A"))
        return rows
