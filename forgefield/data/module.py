"""The data of a training in two steps: `read_data` reads and splits the frames and computes their statistics (`FrameData`);
`FrameData.serve` returns the batches that a `BatchSpec` describes (`DataModule`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import lightning
import torch

from forgefield.config.trust import NO_CODE, Trust
from forgefield.data.batch import BatchSpec, Noise
from forgefield.data.dataset import GraphDataset
from forgefield.data.inspection.suspicions import LARGE_FORCES, cutoff_warnings, isolated_atom_warnings, label_warnings
from forgefield.data.neighbours.edges import Progress
from forgefield.data.options import DataOptions
from forgefield.data.sampling.batching import (
    batch_threads,
    default_frames,
    evaluation_budget,
    sized,
    training_budget,
    training_order,
)
from forgefield.data.sampling.by_source import SourceBatches
from forgefield.data.sampling.loader import FrameLoader
from forgefield.data.sampling.order import WeightedDraws
from forgefield.data.sampling.resident import ResidentFrames, resident_frames
from forgefield.data.species import SpeciesTable
from forgefield.data.splits import ON_DEVICE, Splits, graph_options, resolve_splits
from forgefield.data.statistics import Statistics, compute_statistics
from forgefield.data.store.convert import Progress as ConversionProgress
from forgefield.data.store.store import StoreColumns
from forgefield.errors import ForgefieldError

SHOWN = 6
"""Number of sources that a summary lists."""


@dataclass(frozen=True, eq=False)
class FrameData:
    """Frames of a training with their neighbour lists and statistics, from `read_data`.

    options, seed: what the data was read with; `options.batch` has a size. rank, world_size: select the batches of this
    process.
    """

    options: DataOptions
    seed: int
    rank: int
    world_size: int
    keep_species: bool
    """Whether random splits keep every species in the training set."""
    frames_by_default: int
    """Number of frames of a batch for options without a size."""
    train: GraphDataset
    val: GraphDataset | None
    tests: dict[str, GraphDataset]
    """By the name of their results: `test`, or `test-NAME` for each named set of `data.test`."""
    species: SpeciesTable
    statistics: Statistics
    split_description: str
    val_sets: dict[str, int]
    """Numbers of frames of named validation sets, `val-NAME`, one after the other in `val`."""
    label_hints: dict[str, str]
    """By label: a hint at values of the training files that may be that label under another name."""
    warnings: list[str]
    """Suspicious properties of the training data, one sentence each."""

    @property
    def test(self) -> GraphDataset | None:
        """The unnamed test set."""
        return self.tests.get("test")

    def splits(self) -> Iterator[tuple[str, GraphDataset]]:
        """Training, validation and test sets, with the names of their results."""
        yield "train", self.train
        if self.val is not None:
            yield "val", self.val
        yield from self.tests.items()

    def serve(self, spec: BatchSpec) -> DataModule:
        """Batches as `spec` describes them."""
        return DataModule(self, spec)

    def describe(self) -> list[tuple[str, str]]:
        """Rows (label, value) of a summary table."""
        return self.serve(BatchSpec()).describe()


def read_data(
    options: DataOptions,
    seed: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    branches: Sequence[str] = (),
    species_of: str | None = None,
    keep_species: bool = True,
    frames_by_default: int | None = None,
    progress: Progress | None = None,
    converting: ConversionProgress | None = None,
    trust: Trust = NO_CODE,
) -> FrameData:
    """Read and split the frames that the data section names, build neighbour lists and compute statistics.

    options: the section `data` of a config. seed: of random splits and of the order of frames. rank, world_size: select the
    batches of this process. branches: names of the branches of the model, if it has several. species_of: the run whose model
    determines `data.species`, for messages. keep_species: random splits keep every species in the training set; False for runs
    of versions that did not. frames_by_default: frames of a batch if `data.batch` gives no size; default: from the data.
    progress(done, total): called while neighbour lists are built. converting: the same for frames that `data.lazy` converts.
    trust: whether the functions of `data.transforms` may be imported.
    """
    training_budget(options), evaluation_budget(options)  # invalid options are refused before data is read
    splits = resolve_splits(options, seed, converting, keep_species=keep_species, trust=trust)
    if len(splits.train) == 0:
        raise ForgefieldError("data.train contains no frames")
    _require_branches(splits, branches)
    symbols = options.species
    species = SpeciesTable.from_frames(splits.train) if symbols is None else SpeciesTable(symbols, whose=species_of)
    datasets = _build_graphs(options, splits, species, branches, progress)
    train = datasets["train"]
    if frames_by_default is None:
        frames_by_default = default_frames(float(splits.train.n_atoms.mean()), len(splits.train))
    options = sized(options, frames_by_default)
    statistics = compute_statistics(train, options, [part for name, part in datasets.items() if name != "train"])
    return FrameData(
        options=options,
        seed=int(seed),
        rank=rank,
        world_size=world_size,
        keep_species=keep_species,
        frames_by_default=frames_by_default,
        train=train,
        val=datasets.get("val"),
        tests={name: part for name, part in datasets.items() if name not in ("train", "val")},
        species=species,
        statistics=statistics,
        split_description=splits.description,
        val_sets=splits.val_sets,
        label_hints=splits.label_hints,
        warnings=_suspicions(train, statistics),
    )


def _require_branches(splits: Splits, branches: Sequence[str]) -> None:
    """Refuse branches without training data, and sources for branches that the model does not have."""
    named = splits.train.branches
    missing = [name for name in branches if name not in named]
    if missing:
        raise ForgefieldError(
            f"model.branches has {missing[0]}, but no source of data.train is for it; write {{path: ..., branch: "
            f"{missing[0]}}} there."
        )
    if not branches and named not in ([None], []):
        raise ForgefieldError(
            f"data.train has sources for the branch {named[-1]}, but the model has no branches; leave `branch` out, or list "
            "the branches in model.branches."
        )


def _build_graphs(
    options: DataOptions,
    splits: Splits,
    species: SpeciesTable,
    branches: Sequence[str],
    progress: Progress | None,
) -> dict[str, GraphDataset]:
    """The sets that have frames, by name, with neighbour lists."""
    tables = {"train": splits.train, "val": splits.val, **splits.tests}
    total = sum(map(len, tables.values()))
    done = 0

    def count(done_in_set: int, _: int) -> None:
        if progress is not None:
            progress(done + done_in_set, total)

    graph, on_device = graph_options(options), options.neighbours == ON_DEVICE
    datasets: dict[str, GraphDataset] = {}
    for name, frames in tables.items():
        if len(frames):
            datasets[name] = GraphDataset(frames, species, graph, count, on_device=on_device, branches=branches)
        done += len(frames)
    return datasets


def _suspicions(train: GraphDataset, statistics: Statistics) -> list[str]:
    """Suspicious properties of the training data. Refuses a cutoff within which no atom has a neighbour."""
    cutoff, share = train.graph.reach, statistics.lone_share
    if share == 1.0:
        raise ForgefieldError(
            f"data.cutoff={cutoff:g}: no atom has a neighbour within {cutoff:g} A, so there is nothing to learn from; "
            "use a longer cutoff (most models use 4 to 8 A), or set the unit of lengths (data.units.length)"
        )
    return [*label_warnings(train.frames), *isolated_atom_warnings(share, cutoff), *cutoff_warnings(cutoff)]


class DataModule(lightning.LightningDataModule):
    """Batches of `data` for training, validation and test, as `spec` describes them; a Lightning data module.

    The attribute `data` has the datasets that are served.
    """

    def __init__(self, data: FrameData, spec: BatchSpec) -> None:
        super().__init__()
        may_build = data.options.neighbours == "auto"
        served = {name: part.serve(spec, device_may_build_edges=may_build) for name, part in data.splits()}
        tests = {name: served[name] for name in data.tests}
        self.data = replace(data, train=served["train"], val=served.get("val"), tests=tests)
        self.spec = spec
        self._kept: dict[str, ResidentFrames | str] = {}

    def keep_on(self, device: torch.device) -> None:
        """Keep frames for training and validation on the device of the model, if `data.keep` and its memory allow it."""
        for name, dataset in (("train", self.data.train), ("val", self.data.val)):
            if dataset is not None:
                noisy = self.spec.noise is not None
                self._kept[name] = resident_frames(dataset, device, self.data.options.keep, noisy=noisy)

    def _resident(self, name: str) -> ResidentFrames | None:
        kept = self._kept.get(name)
        return kept if isinstance(kept, ResidentFrames) else None

    def train_dataloader(self) -> FrameLoader:
        options, train = self.data.options, self.data.train
        order = training_order(options, train.frames, self.data.seed, keep_order=self.spec.keep_order)
        loader = FrameLoader(
            train,
            training_budget(options),
            order=order,
            rank=self.data.rank,
            world_size=self.data.world_size,
            workers=batch_threads(options, self.spec.on_gpu),
            prefetch=options.prefetch,
            pin=self.spec.on_gpu,
            keys=self.data.seed if self.spec.frame_keys else None,
            noise=self.spec.noise,
        )
        loader.resident = self._resident("train")
        return loader

    def val_dataloader(self) -> FrameLoader | list[FrameLoader]:
        noise = self.spec.noise
        noise = None if noise is None else replace(noise, fixed=True)
        loader = self._evaluation_loader(self.data.val, noise, list(self.data.val_sets.values()))
        if isinstance(loader, FrameLoader):
            loader.resident = self._resident("val")
        return loader

    def test_dataloader(self) -> FrameLoader | list[FrameLoader]:
        return self._evaluation_loader(self.data.test)

    def _evaluation_loader(
        self, dataset: GraphDataset | None, noise: Noise | None = None, sets: Sequence[int] = ()
    ) -> FrameLoader | list[FrameLoader]:
        if dataset is None:
            return []
        options = self.data.options
        return FrameLoader(
            dataset,
            evaluation_budget(options),
            rank=self.data.rank,
            world_size=self.data.world_size,
            workers=batch_threads(options, self.spec.on_gpu),
            prefetch=options.prefetch,
            pin=self.spec.on_gpu,
            noise=noise,
            sets=sets,
        )

    def describe(self) -> list[tuple[str, str]]:
        """Rows (label, value) of a summary table."""
        data, statistics = self.data, self.data.statistics
        atoms = data.train.n_atoms
        labels = ", ".join(f"{name} {count}" for name, count in statistics.labels.items() if count) or "none"
        energies = ", ".join(f"{symbol} {energy:.4f}" for symbol, energy in statistics.reference_energies.items())
        rows = [
            ("frames", data.split_description),
            ("atoms per frame", f"{atoms.min()}" if atoms.min() == atoms.max() else f"{atoms.min()} to {atoms.max()}"),
            ("species", ", ".join(f"{symbol} {count}" for symbol, count in statistics.species_counts.items())),
            ("frames with labels", labels),
            ("cutoff", self._describe_graph()),
            *([("data", stored)] if (stored := self._describe_store()) else []),
            *self._describe_sampling(),
            ("reference energies", f"{statistics.reference_kind}: {energies} eV"),
        ]
        if statistics.reference_note:
            rows.append(("note", statistics.reference_note))
        if statistics.energy_residual_std is not None:
            rows.append(("energy spread", f"{1000 * statistics.energy_residual_std:.1f} meV/atom"))
        if statistics.forces_rms is not None:
            doubt = (
                "; that is unusually large: is the file in other units (data.units)?"
                if statistics.forces_rms > LARGE_FORCES
                else ""
            )
            rows.append(
                ("force rms", f"{statistics.forces_rms:.3f} eV/A, largest component {statistics.max_force:.2f}{doubt}")
            )
        if statistics.min_distance is not None:
            rows.append(("closest pair", f"{statistics.min_distance:.3f} A"))
        return rows + [("warning", warning) for warning in data.warnings]

    def _describe_graph(self) -> str:
        graph, statistics = self.data.train.graph, self.data.statistics
        text = f"{graph.cutoff:g} A, {statistics.mean_neighbours:.1f} neighbours per atom"
        if statistics.neighbours_note:
            text += f" ({statistics.neighbours_note})"
        if graph.adaptive_cutoff is not None:
            text += f"; up to {graph.adaptive_cutoff:g} A for atoms that would be isolated"
        if graph.max_neighbours is not None:
            text += (
                f"; at most {graph.max_neighbours} neighbours per atom (data.max_neighbours): energies are discontinuous when "
                "neighbours exchange ranks, and energies drift in molecular dynamics"
            )
        return text

    def _describe_sampling(self) -> list[tuple[str, str]]:
        """How often sources are sampled, which frames are left out, and threads that prepare batches, if not the default."""
        loader, rows = self.train_dataloader(), []
        if isinstance(loader.order, WeightedDraws | SourceBatches):
            systems, counts = self.data.train.frames.systems, loader.order.counts(0)
            shown = [f"{Path(name).name} {100 * n / counts.sum():.1f} %" for name, n in zip(systems.names, counts)]
            more = f", ... ({len(shown)} sources)" if len(shown) > SHOWN else ""
            what = "draws" if isinstance(loader.order, WeightedDraws) else "batches of one source each"
            rows.append(("sampling", f"{counts.sum()} {what} per epoch: {', '.join(shown[:SHOWN])}{more}"))
        if loader.skipped:
            rows.append(
                ("left out", f"{loader.skipped} of {len(self.data.train)} frames exceed data.batch (oversized: skip)")
            )
        if loader.alone:
            rows.append(("alone", f"{loader.alone} frames exceed data.batch and are batches of their own"))
        if (kept := self._describe_kept()) is not None:
            rows.append(("batches", kept))
        elif loader.workers:
            threads = "a thread" if loader.workers == 1 else f"{loader.workers} threads"
            rows.append(("prepared ahead", f"by {threads}, up to {loader.prefetch} batches"))
        return rows

    def _describe_kept(self) -> str | None:
        """Where batches are made; None for the usual way, by threads."""
        kept = self._kept.get("train")
        if isinstance(kept, ResidentFrames):
            size = kept.n_bytes + (0 if (val := self._resident("val")) is None else val.n_bytes)
            return f"made on the device, where all frames are kept ({size / 2**20:.3g} MB)"
        return kept if kept is not None and "because" in kept else None

    def _describe_store(self) -> str:
        """Whether data is on disk, and where neighbour lists come from; empty for the default, data in memory."""
        on_disk = any(isinstance(part.columns, StoreColumns) for part in self.data.train.frames.parts)
        if not on_disk and self.data.options.neighbours != ON_DEVICE:
            return ""
        return f"{'on disk' if on_disk else 'in memory'}, neighbour lists {self.data.train.edges.kind}"
