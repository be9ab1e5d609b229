"""The data of a run: read, divided, turned into graphs and measured once, then served in batches to Lightning."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import lightning

from forgefield.config.schema import DataOptions
from forgefield.config.starter import LARGE_FORCES
from forgefield.data.dataset import GraphDataset
from forgefield.data.inspection.suspicions import cutoff_doubts, label_doubts, lone_atoms
from forgefield.data.neighbours.edges import Progress
from forgefield.data.noise import Noise
from forgefield.data.reading import Progress as ConversionProgress
from forgefield.data.sampling.batching import Order, batch_threads, evaluation_budget, training_budget, training_order
from forgefield.data.sampling.by_source import SourceBatches
from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.sampling.order import WeightedDraws
from forgefield.data.sampling.plan import Budget
from forgefield.data.species import SpeciesTable
from forgefield.data.splits import ON_DEVICE, Splits, graph_options, resolve_splits
from forgefield.data.statistics import Statistics, compute_statistics
from forgefield.data.store.store import StoreColumns
from forgefield.errors import ForgefieldError

SHOWN = 6
"""How many sources a summary names."""


class DataModule(lightning.LightningDataModule):
    """`options` is the section `data` of a config; `seed` orders frames and draws splits.

    rank, world_size: whose share of the batches is served. species_of: the run whose model fixes `data.species`, for messages.
    keep_species: random splits leave every species in training; False for runs that were started before they did.
    """

    train: GraphDataset
    val: GraphDataset | None
    tests: dict[str, GraphDataset]
    """By the name of their results: `test`, or `test-NAME` for each named set of `data.test`."""
    species: SpeciesTable
    statistics: Statistics
    split_description: str
    label_hints: dict[str, str]
    """For labels: a sentence on values of the training files that may be them under another name."""
    warnings: list[str]
    """What is suspicious about the training data, each a sentence."""

    def __init__(
        self,
        options: DataOptions,
        seed: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        species_of: str | None = None,
        keep_species: bool = True,
    ) -> None:
        super().__init__()
        self.options = options
        self.seed = int(seed)
        self.rank, self.world_size = rank, world_size
        self.species_of = species_of
        self.keep_species = keep_species
        self._on_gpu = False
        self._ready = False
        self._keyed = False
        self._noise: Noise | None = None

    def prepare(self, progress: Progress | None = None, converting: ConversionProgress | None = None) -> None:
        """Do all the work, once. `progress(done, total)` counts neighbour lists over all frames, `converting` the frames that
        `data.lazy` converts."""
        if self._ready:
            return
        training_budget(self.options), evaluation_budget(self.options)  # refused before data is read
        splits = resolve_splits(self.options, self.seed, converting, keep_species=self.keep_species)
        self.split_description, self.label_hints = splits.description, splits.label_hints
        if len(splits.train) == 0:
            raise ForgefieldError("data.train holds no frame")
        names = self.options.species
        found = SpeciesTable(names, whose=self.species_of) if names is not None else None
        self.species = found if found is not None else SpeciesTable.from_frames(splits.train)
        self._build_graphs(splits, progress)
        others = [part for name, part in self.splits() if name != "train"]
        self.statistics = compute_statistics(self.train, self.options, others)
        self.warnings = self._look_for_faults()
        self._ready = True

    def _look_for_faults(self) -> list[str]:
        """What is suspicious about the training data. Refuses a cutoff within which there is nothing."""
        cutoff, share = self.train.graph.reach, self.statistics.lone_share
        if share == 1.0:
            raise ForgefieldError(
                f"data.cutoff={cutoff:g}: no atom has a neighbour within {cutoff:g} A, so there is nothing to learn from; "
                "give a longer cutoff (most models use 4 to 8 A), or the unit of lengths (data.units.length)"
            )
        return [*label_doubts(self.train.frames), *lone_atoms(share, cutoff), *cutoff_doubts(cutoff)]

    def _build_graphs(self, splits: Splits, progress: Progress | None) -> None:
        tables = {"train": splits.train, "val": splits.val, **splits.tests}
        total = sum(map(len, tables.values()))
        done = 0

        def count(within: int, _: int) -> None:
            if progress is not None:
                progress(done + within, total)

        graph, on_device = graph_options(self.options), self.options.neighbours == ON_DEVICE
        parts: dict[str, GraphDataset] = {}
        for name, frames in tables.items():
            if len(frames):
                parts[name] = GraphDataset(frames, self.species, graph, count, on_device=on_device)
            done += len(frames)
        self.train, self.val = parts.pop("train"), parts.pop("val", None)
        self.tests = parts

    @property
    def test(self) -> GraphDataset | None:
        """The test set that has no name."""
        return self.tests.get("test")

    def splits(self) -> Iterator[tuple[str, GraphDataset]]:
        """All data that there is: train, val and the test sets, by the names of their results."""
        yield "train", self.train
        if self.val is not None:
            yield "val", self.val
        yield from self.tests.items()

    def learn(self, targets: Collection[str]) -> None:
        """Which fields are learnt; the others are what the model is given. Called before loaders are asked for."""
        for _, part in self.splits():
            part.targets = frozenset(targets) & part.fields.keys()

    def set_branches(self, names: Sequence[str]) -> None:
        """Batches say which of these branches of the model a frame is for. Called before loaders are asked for."""
        missing = [name for name in names if name not in self.train.frames.branches]
        if missing:
            raise ForgefieldError(
                f"model.branches has {missing[0]}, and no source of data.train is for it; write {{path: ..., branch: "
                f"{missing[0]}}} there."
            )
        for _, part in self.splits():
            part.set_branches(names)

    def key_frames(self) -> None:
        """Batches of the training will carry `frame_key`. Called before loaders are asked for."""
        self._keyed = True

    def move_atoms(self, sigma: float, *, share: float, keep_labels: bool, alone: bool) -> None:
        """Frames will be moved at random, see `noise.Noise`. Called before loaders are asked for."""
        self._noise = Noise(sigma, self.seed, share=share, keep_labels=keep_labels, alone=alone)

    def train_on_gpu(self) -> None:
        """Batches will be copied to a GPU. Called before loaders are asked for."""
        self._on_gpu = True
        if self.options.neighbours == "auto":
            for _, part in self.splits():
                part.leave_edges_to_device()

    def setup(self, stage: str | None = None) -> None:
        self.prepare()

    def train_dataloader(self) -> FrameLoader:
        self.prepare()
        order = training_order(self.options, self.train.frames, self.seed)
        return self._loader(
            self.train,
            training_budget(self.options),
            order,
            keys=self.seed if self._keyed else None,
            noise=self._noise,
        )

    def val_dataloader(self) -> FrameLoader | list:
        return self._evaluation_loader("val", None if self._noise is None else replace(self._noise, fixed=True))

    def test_dataloader(self) -> FrameLoader | list:
        return self._evaluation_loader("test")

    def _evaluation_loader(self, name: str, noise: Noise | None = None) -> FrameLoader | list:
        self.prepare()
        dataset = getattr(self, name)
        return [] if dataset is None else self._loader(dataset, evaluation_budget(self.options), None, noise=noise)

    def _loader(
        self,
        dataset: GraphDataset,
        budget: Budget,
        order: Order | None,
        *,
        keys: int | None = None,
        noise: Noise | None = None,
    ) -> FrameLoader:
        return FrameLoader(
            dataset,
            budget,
            order=order,
            rank=self.rank,
            world_size=self.world_size,
            workers=batch_threads(self.options, self._on_gpu),
            prefetch=self.options.prefetch,
            pin=self._on_gpu,
            keys=keys,
            noise=noise,
        )

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
            ("cutoff", self._describe_graph()),
            *([("data", stored)] if (stored := self._describe_store()) else []),
            *self._describe_sampling(),
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
        return rows + [("warning", warning) for warning in self.warnings]

    def _describe_graph(self) -> str:
        graph, found = self.train.graph, self.statistics
        words = f"{graph.cutoff:g} A, {found.mean_neighbours:.1f} neighbours per atom"
        if found.neighbours_note:
            words += f" ({found.neighbours_note})"
        if graph.adaptive_cutoff is not None:
            words += f"; up to {graph.adaptive_cutoff:g} A where an atom would be isolated"
        if graph.max_neighbours is not None:
            words += (
                f"; at most {graph.max_neighbours} neighbours of an atom (data.max_neighbours): energies jump where "
                "neighbours change ranks, and molecular dynamics drifts"
            )
        return words

    def _describe_sampling(self) -> list[tuple[str, str]]:
        """What is drawn how often, what is left out, and who prepares batches, where that is not the plain way."""
        loader, rows = self.train_dataloader(), []
        if isinstance(loader.order, WeightedDraws | SourceBatches):
            systems, counts = self.train.frames.systems, loader.order.counts(0)
            shown = [f"{Path(name).name} {100 * n / counts.sum():.1f} %" for name, n in zip(systems.names, counts)]
            more = f", ... ({len(shown)} sources)" if len(shown) > SHOWN else ""
            what = "draws" if isinstance(loader.order, WeightedDraws) else "batches of one source each"
            rows.append(("sampling", f"{counts.sum()} {what} an epoch: {', '.join(shown[:SHOWN])}{more}"))
        if loader.skipped:
            rows.append(
                ("left out", f"{loader.skipped} of {len(self.train)} frames exceed data.batch (oversized: skip)")
            )
        if loader.alone:
            rows.append(("alone", f"{loader.alone} frames exceed data.batch and are batches of their own"))
        if loader.workers:
            threads = "a thread" if loader.workers == 1 else f"{loader.workers} threads"
            rows.append(("prepared ahead", f"by {threads}, up to {loader.prefetch} batches"))
        return rows

    def _describe_store(self) -> str:
        """Where data on disk is and how neighbour lists come about; empty for data in memory."""
        stored = sum(isinstance(part.columns, StoreColumns) for part in self.train.frames.parts)
        kind = self.train.edges.kind
        return (
            ""
            if not stored and self.options.neighbours != ON_DEVICE
            else (f"{'on disk' if stored else 'in memory'}, neighbour lists {kind}")
        )
