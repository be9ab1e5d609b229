"""Frames to batches: in memory, from a store, beside a plain numpy slice and DeePMD-kit's own loader."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data_measure import Settings, Table, aspirin, best_of, copper, rows_of_batches, timed, water

from forgefield.data.batch import to_device
from forgefield.data.dataset import GraphDataset
from forgefield.data.neighbours.graph import GraphOptions
from forgefield.data.reading import read_table
from forgefield.data.species import SpeciesTable
from forgefield.data.store.convert import store_frames
from forgefield.data.store.store import open_store
from forgefield.data.store.table import FrameTable

CASES: dict[str, tuple[Callable[[Settings], FrameTable | None], float]] = {
    "water": (water, 6.0),
    "Cu": (copper, 5.0),
    "aspirin": (aspirin, 5.0),
}
"""Frames and cutoff, A."""

Load = Callable[[list[np.ndarray]], object]
"""Makes batches of these rows, one after the other."""


# ---- loaders


def forgefield_loaders(table: FrameTable, cutoff: float, folder: Path, device: str) -> dict[str, Load]:
    """Batches from memory and from stores, by what becomes of neighbour lists."""
    species, graph = SpeciesTable.from_frames(table), GraphOptions(cutoff)
    for name, options in (("plain", None), ("lists", graph)):
        if not (folder / name).exists():
            store_frames(table, folder / name, options)
    plain, lists = (open_store(folder / name).table() for name in ("plain", "lists"))
    datasets = {
        "memory, no lists": GraphDataset(table, species, graph, on_device=True),
        "store, no lists": GraphDataset(plain, species, graph, on_device=True),
        "memory, lists kept": GraphDataset(table, species, graph),
        "store, lists stored": GraphDataset(lists, species, graph),
        "store, lists made": GraphDataset(plain, species, graph),
    }

    def load(dataset: GraphDataset) -> Load:
        def run(batches: list[np.ndarray]) -> None:
            for rows in batches:
                to_device(dataset.batch(rows), device)
            if device != "cpu":
                torch.cuda.synchronize()

        return run

    return {name: load(dataset) for name, dataset in datasets.items()}


def numpy_loader(arrays: dict[str, np.ndarray]) -> Load:
    """The same numbers as rows of plain arrays: (n_frames, ...) each."""

    def run(batches: list[np.ndarray]) -> None:
        for rows in batches:
            _ = {name: torch.from_numpy(array[rows]) for name, array in arrays.items()}

    return run


def plain_arrays(table: FrameTable) -> dict[str, np.ndarray]:
    """Frames of equal size as DeePMD-kit keeps them, one row a frame."""
    rows, n = np.arange(len(table)), int(table.n_atoms[0])
    return {
        "coord": table.atoms("positions", rows).reshape(-1, 3 * n),
        "force": table.atoms("forces", rows).reshape(-1, 3 * n),
        "box": table.column("cell", rows).reshape(-1, 9),
        "energy": table.column("energy", rows),
    }


def write_deepmd_system(table: FrameTable, folder: Path) -> None:
    """Frames of equal composition as a folder of DeePMD-kit's."""
    (folder / "set.000").mkdir(parents=True)
    for name, array in plain_arrays(table).items():
        np.save(folder / "set.000" / f"{name}.npy", array)
    species = SpeciesTable.from_frames(table)
    (folder / "type.raw").write_text("\n".join(map(str, species.index(table[0].numbers))))
    (folder / "type_map.raw").write_text("\n".join(species.symbols))


def deepmd_loaders(folder: Path, batch_size: int) -> dict[str, Load] | None:
    """Single frames, and whole batches of its loader, with the energy and the forces asked for; None if not installed."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            logging.disable(logging.WARNING)
            dataset = importlib.import_module("deepmd.pt.utils.dataset")
            loader = importlib.import_module("deepmd.pt.utils.dataloader")
            item = importlib.import_module("deepmd.utils.data").DataRequirementItem
    except (ImportError, RuntimeError, OSError):
        return None
    finally:
        logging.disable(logging.NOTSET)
    wanted = [
        item("energy", ndof=1, atomic=False, must=False, high_prec=True),
        item("force", ndof=3, atomic=True, must=False, high_prec=False),
    ]
    type_map = (folder / "type_map.raw").read_text().split()
    frames = dataset.DeepmdDataSetForLoader(str(folder), type_map)
    batches = loader.DpLoaderSet([str(folder)], batch_size, type_map)
    for each in (frames, batches):
        each.add_data_requirement(wanted)

    def one_by_one(rows: list[np.ndarray]) -> None:
        for row in np.concatenate(rows).tolist():
            _ = frames[row]

    def collated(rows: list[np.ndarray]) -> None:
        for _ in rows:
            _ = batches[0]

    return {"DeePMD-kit, frames": one_by_one, "DeePMD-kit, loader": collated}


# ---- measurements


def loading(settings: Settings) -> None:
    """Frames per second of everything that gives batches."""
    _reading(settings)
    for name in ("water", "Cu"):
        read, cutoff = CASES[name]
        table = read(settings)
        if table is None:
            continue
        system = settings.scratch / f"{name}-deepmd"
        write_deepmd_system(table, system)
        for size in (1, 8, 64):
            _loading_of(settings, name, table, cutoff, system, size)


def _reading(settings: Settings) -> None:
    out = Table("Files to frames in memory, once at the start of a run", source=22, frames=8, CPU_ms=9, frames_per_s=13)
    for name in ("water_dp", "mlearn", "rmd17/rmd17_aspirin_train_01.npz"):
        if not (settings.data / name).exists():
            print(f"left out: there is no {name} in the data folder")
            continue
        read_table(str(settings.data / name))
        table, timing = timed(lambda name=name: read_table(str(settings.data / name)))
        n = len(table)  # type: ignore[arg-type]
        out.row(name.split("/")[-1].removesuffix("_train_01.npz"), n, timing.cpu / n, 1e3 * n / timing.cpu)


def _loading_of(settings: Settings, name: str, table: FrameTable, cutoff: float, system: Path, size: int) -> None:
    batches = rows_of_batches(len(table), size, max(1, (64 if settings.quick else 192) // size))
    n = size * len(batches)
    peers = deepmd_loaders(system, size)
    loaders = {
        "numpy slice": numpy_loader(plain_arrays(table)),
        **(peers or {}),
        **forgefield_loaders(table, cutoff, settings.scratch / f"{name}-stores", settings.device),
    }
    times = best_of({key: _on(load, batches) for key, load in loaders.items()}, settings.repeats)
    title = f"Loading {name}, {table.n_atoms[0]} atoms, {cutoff:g} A, batches of {size}: per frame"
    if peers is None:
        print("left out: DeePMD-kit is not installed")
    elif settings.device != "cpu":
        title += f" (Forgefield's on {settings.device})"
    widths = {"CPU ms": 9, "wall ms": 9, "frames per s": 13, "it/numpy": 9}
    out = Table(title, what=22, **widths, **({"DeePMD/it, CPU": 15, "DeePMD/it, wall": 16} if peers else {}))
    for key in loaders:
        timing = times[key].over(n)
        ratios: list[Any] = [times[key].cpu / times["numpy slice"].cpu]
        if peers:
            theirs = times["DeePMD-kit, loader"]
            ratios += [theirs.cpu / times[key].cpu, theirs.wall / times[key].wall]
        out.row(key, timing.cpu, timing.wall, 1e3 / timing.cpu, *ratios)


def _on(load: Load, batches: list[np.ndarray]) -> Callable[[], object]:
    return lambda: load(batches)


def lists(settings: Settings) -> None:
    """Neighbour lists kept, stored and made anew."""
    out = Table(
        "Batches of 64 with neighbour lists: CPU ms per frame, and how much longer lists made anew take",
        system=10, cutoff=7, edges=8, memory=8, store=8, made=8, made_over_memory=17, made_over_store=16,
    )  # fmt: skip
    for name, (read, cutoff) in CASES.items():
        table = read(settings)
        if table is None:
            continue
        loaders = forgefield_loaders(table, cutoff, settings.scratch / f"{name}-stores", "cpu")
        chosen = {key: loaders[key] for key in ("memory, lists kept", "store, lists stored", "store, lists made")}
        batches = rows_of_batches(len(table), 64, 1)
        times = best_of({key: _on(load, batches) for key, load in chosen.items()}, settings.repeats)
        kept, stored, made = (times[key].over(64).cpu for key in chosen)
        edges = open_store(settings.scratch / f"{name}-stores" / "lists").manifest["n_edges"] / len(table)
        out.row(name, cutoff, edges, kept, stored, made, made / kept, made / stored)


def assembly(settings: Settings) -> None:
    """A batch of 64, beside a copy of the tensors it consists of: the least that making it can take."""
    out = Table(
        "A batch of 64 frames, CPU ms",
        system=10, edges=9, MB=7, copied=8, memory=8, store=8, memory_over_copy=17, store_over_copy=16,
    )  # fmt: skip
    for name, (read, cutoff) in CASES.items():
        table = read(settings)
        if table is None:
            continue
        folder = settings.scratch / f"{name}-stores"
        forgefield_loaders(table, cutoff, folder, "cpu")  # writes the stores
        species = SpeciesTable.from_frames(table)
        memory = GraphDataset(table, species, cutoff)
        store = GraphDataset(open_store(folder / "lists").table(), species, cutoff)
        rows = rows_of_batches(len(table), 64, 1)[0]
        batch = memory.batch(rows)
        same = store.batch(rows)
        assert all(torch.equal(same[key].nan_to_num(), value.nan_to_num()) for key, value in batch.items())
        works = {
            "copied": lambda batch=batch: [tensor.clone() for tensor in batch.values()],
            "memory": lambda memory=memory, rows=rows: memory.batch(rows),
            "store": lambda store=store, rows=rows: store.batch(rows),
        }
        copied, kept, stored = (timing.cpu for timing in best_of(works, 3 * settings.repeats).values())
        size = sum(tensor.nbytes for tensor in batch.values()) / 1e6
        out.row(name, batch["edge_index"].shape[1], size, copied, kept, stored, kept / copied, stored / copied)


PARTS = {"loading": loading, "lists": lists, "assembly": assembly}
