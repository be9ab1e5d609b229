"""Which frames are for training, validation and test: by share, count, file or index list, by seed, never overlapping.

Random splits keep every species in the training frames, because a model cannot be tested on elements that it has never seen;
a split is changed only where it would remove the last frames of a species. `representative_rows` selects a small set that
contains every species, every composition if there is room, and the full range of energies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ase.data import chemical_symbols

from forgefield.config.trust import NO_CODE, Trust
from forgefield.data.labels.fields import Fields
from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.neighbours.graph import GraphOptions
from forgefield.data.options import DataOptions
from forgefield.data.paths import is_named, test_sets, title, validation_sets
from forgefield.data.readers import source_files
from forgefield.data.readers.text import read_text, whole_number, whole_numbers
from forgefield.data.reading import label_settings, read_table, unit_settings
from forgefield.data.sampling.order import seeded_permutation
from forgefield.data.store.convert import Progress
from forgefield.data.store.table import FrameTable
from forgefield.data.transforms import FrameTransform, frame_transform
from forgefield.errors import ForgefieldError
from forgefield.untrusted.archives import map_npy

ON_DEVICE = "device"
"""As `data.neighbours`: neighbour lists are made where the model runs."""


_BOOTSTRAP = 17
"""Distinguishes the random numbers of a bootstrap from others with the same seed."""


@dataclass(frozen=True)
class Splits:
    train: FrameTable
    val: FrameTable
    tests: dict[str, FrameTable]
    """By the name of their results: `test`, or `test-NAME` for named sets."""
    description: str
    val_sets: dict[str, int] = field(default_factory=dict)
    """Numbers of frames of named validation sets, `val-NAME`, which are `val` one after the other."""
    label_hints: dict[str, str] = field(default_factory=dict)
    """For labels: a sentence on values of the training files that may be them under another name."""

    @property
    def test(self) -> FrameTable:
        """The test set that has no name."""
        return self.tests.get("test", FrameTable([]))


def split_frames(n: int, val: float | int, test: float | int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of n frames drawn for (train, val, test), each ascending; `val` and `test` are shares below 1 or counts.

    Validation is drawn first, so that asking for a test set later does not change it.
    """
    n_val, n_test = split_size(n, val, "val"), split_size(n, test, "test")
    if n_val + n_test >= n:
        raise ForgefieldError(
            f"data.val={val} and data.test={test} ask for {n_val} + {n_test} of {n} frames; none is left to train on"
        )
    order = seeded_permutation(n, seed)
    part = np.zeros(n, dtype=np.int8)
    part[order[:n_val]] = 1
    part[order[n_val : n_val + n_test]] = 2
    return np.flatnonzero(part == 0), np.flatnonzero(part == 1), np.flatnonzero(part == 2)


def split_size(n: int, requested: float | int, name: str) -> int:
    """Number of frames meant by a share (below 1; at least one frame) or a count."""
    if requested < 0 or (requested >= 1 and requested != int(requested)):
        raise ForgefieldError(f"data.{name}={requested} is neither a share below 1 nor a number of frames")
    if 0 < requested < 1:
        return max(1, round(requested * n))
    return int(requested)


def parse_indices(spec: object, n: int, setting: str) -> np.ndarray:
    """Rows of n frames from a list, a 'start:stop[:step]' range, or a file of integers. (k,) int64, no row twice."""
    if isinstance(spec, str):
        rows = np.arange(n)[_slice(spec, setting)] if ":" in spec else _index_file(spec, setting)
    elif isinstance(spec, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in spec):
        rows = np.array(spec, dtype=np.int64)
    else:
        raise ForgefieldError(
            f"{setting} must be a list of integers, a file of them, or 'start:stop', not {spec!r:.80}"
        )
    rows = rows.astype(np.int64)
    if rows.size == 0:
        raise ForgefieldError(f"{setting}={spec!r:.80} selects none of the {n} frames")
    outside = rows[(rows < -n) | (rows >= n)]
    if outside.size:
        raise ForgefieldError(f"{setting} names frame {outside[0]}, but there are {n} frames (0 to {n - 1})")
    rows = np.where(rows < 0, rows + n, rows)
    if len(np.unique(rows)) != len(rows):
        raise ForgefieldError(f"{setting} names a frame twice")
    return rows


def resolve_splits(
    options: DataOptions,
    seed: int,
    progress: Progress | None = None,
    *,
    keep_species: bool = True,
    trust: Trust = NO_CODE,
) -> Splits:
    """Read all sources of `options` and divide them.

    progress: called while frames are converted. keep_species: a random split leaves every species in training;
    False for runs that were started before it did. trust: whether the functions of `data.transforms` may be imported.
    """
    if options.train is None:
        raise ForgefieldError("data.train is not set; give a file, folder or glob of structures to train on")
    requested = {**validation_sets(options.val), **test_sets(options.test)}
    kinds = {name: _kind(value, name) for name, value in requested.items()}
    _refuse_shared_files(options, requested, kinds)
    reader = LabelReader(label_settings(options.labels), unit_settings(options.units))
    transform = frame_transform(options.transforms, trust)
    frames = _read(options.train, options, progress, reader=reader, transform=transform)
    pool = np.arange(len(frames))
    if options.indices is not None:
        pool = np.sort(parse_indices(options.indices, len(frames), "data.indices"))
    chosen = {
        name: parse_indices(requested[name]["indices"], len(frames), f"data.{name}.indices")
        for name, kind in kinds.items()
        if kind == "indices"
    }
    if len(chosen) == 2 and np.intersect1d(chosen["val"], chosen["test"]).size:
        raise ForgefieldError("data.val.indices and data.test.indices have frames in common")
    for rows in chosen.values():
        pool = _without(pool, rows, len(frames))
    split_seed = options.split_seed if options.split_seed is not None else seed
    pool, drawn, rare = _draw(frames, pool, requested, kinds, split_seed, keep_species=keep_species)
    chosen.update(drawn)
    parts = {name: frames.select(rows) for name, rows in chosen.items()}
    for name, kind in kinds.items():
        if kind == "files":
            parts[name] = _read(requested[name], options, progress, frames.fields, transform=transform)
            if len(parts[name]) == 0:
                raise ForgefieldError(f"{_setting(name)}={requested[name]!r:.80} holds no frame")
    if len(pool) == 0:
        raise ForgefieldError("no frame is left to train on: data.val and data.test take all of data.train")
    train, of = frames.select(pool), ""
    if options.devset is not None:
        train, of = train.select(representative_rows(train, options.devset)), f" of {len(train)} (data.devset)"
    if options.bootstrap:
        rows = bootstrap_rows(train, seed)
        train, of = train.select(rows), f"{of} ({len(np.unique(rows))} different, data.bootstrap)"
    description = ", ".join(
        [f"{len(train)}{of} to train", *(f"{len(parts[name])} to {title(name)} ({kinds[name]})" for name in parts)]
    )
    if rare:
        description += (
            f"; drawn so that {', '.join(rare)}, held by few frames, {'is' if len(rare) == 1 else 'are'} in training"
        )
    val = FrameTable([])
    val_sets: dict[str, int] = {}
    for name in validation_sets(options.val):
        if name in parts:
            part = parts.pop(name)
            val += part
            val_sets |= {name: len(part)} if is_named(options.val) else {}
    tests = {name: part for name, part in parts.items() if len(part)}
    return Splits(train, val, tests, description, val_sets, reader.hints())


def bootstrap_rows(table: FrameTable, seed: int) -> np.ndarray:
    """(n,) rows of a table of n frames, ascending, drawn with replacement.

    Frames with one atom, which are reference points, are there once. A species that no drawn frame has is added with one frame
    that has it, in place of one that was drawn twice.
    """
    random = np.random.default_rng([seed, _BOOTSTRAP])
    alone = table.n_atoms == 1
    structures = np.flatnonzero(~alone)
    rows = np.sort(random.choice(structures, len(structures))) if len(structures) else structures
    components = table.components
    for species in np.unique(components.number):
        holders = np.unique(components.frame[components.number == species])
        if alone[holders].any() or np.isin(holders, rows).any():
            continue
        repeated = np.flatnonzero(np.diff(rows, prepend=-1) == 0)
        rows = np.sort(np.append(np.delete(rows, random.choice(repeated)), random.choice(holders)))
    return np.sort(np.concatenate([rows, np.flatnonzero(alone)]))


def graph_options(options: DataOptions) -> GraphOptions:
    """What makes two atoms neighbours, from the settings."""
    if options.cutoff is None:
        raise ForgefieldError("data.cutoff is null: it comes with the model of a run (model.from), in a training alone")
    library = "auto" if options.neighbours == ON_DEVICE else options.neighbours
    return GraphOptions(float(options.cutoff), library, options.adaptive_cutoff, options.max_neighbours)


def is_lazy(options: DataOptions) -> bool | None:
    """Whether data stays on disk, from `data.lazy`; None: stores do, files do not."""
    if options.lazy in (True, False):
        return bool(options.lazy)
    if options.lazy in ("auto", None):
        return None
    raise ForgefieldError(f"data.lazy must be auto, true or false, not {options.lazy!r}")


def _read(
    spec: object,
    options: DataOptions,
    progress: Progress | None,
    fields: Fields | None = None,
    reader: LabelReader | None = None,
    transform: FrameTransform | None = None,
) -> FrameTable:
    """fields: those of the training data, which the others need as well. reader, transform: as `read_table` takes them."""
    return read_table(
        spec,
        label_settings(options.labels, fields),
        options.units,
        lazy=is_lazy(options),
        graph=graph_options(options),
        progress=progress,
        reader=reader,
        transform=transform,
    )


def _draw(
    frames: FrameTable,
    pool: np.ndarray,
    requested: dict[str, Any],
    kinds: dict[str, str],
    seed: int,
    *,
    keep_species: bool,
) -> tuple[np.ndarray, dict[str, np.ndarray], list[str]]:
    """Take random parts off the pool. Single atoms stay in training: they are reference points, not structures.

    keep_species: every species stays in training. Returns what is left, what was drawn, and the species for whose sake other
    frames were drawn.
    """
    sizes = {name: requested[name] for name, kind in kinds.items() if kind == "random"}
    if not sizes:
        return pool, {}, []
    structures = pool[frames.n_atoms[pool] > 1]
    candidates = structures if len(structures) else pool
    _, val, test = split_frames(len(candidates), sizes.get("val", 0), sizes.get("test", 0), seed)
    numbers = {1: "val", 2: "test"}
    part = np.full(len(frames), -1, dtype=np.int8)
    rare: list[str] = []
    part[pool], part[candidates[val]], part[candidates[test]] = TRAIN, 1, 2
    if keep_species:
        part, rare = keep_species_in_training(frames, part, candidates, seed)
        refuse_empty(part, {number: name for number, name in numbers.items() if name in sizes}, rare)
    drawn = {name: np.flatnonzero(part == number) for number, name in numbers.items() if name in sizes}
    return np.flatnonzero(part == TRAIN), drawn, rare


def _without(rows: np.ndarray, gone: np.ndarray, n: int) -> np.ndarray:
    """Those of `rows`, among n, that are not in `gone`, in their order."""
    keep = np.ones(n, dtype=bool)
    keep[gone] = False
    return rows[keep[rows]]


def _kind(value: object, name: str) -> str:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0):
        return "none"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "random"
    if isinstance(value, Mapping) and set(value) == {"indices"}:
        return "indices"
    if isinstance(value, list) and any(isinstance(item, (int, float)) for item in value):
        hint = f"data.{name.partition('-')[0]}: {{indices: ...}} selects frames of data.train"
        raise ForgefieldError(f"{_setting(name)}: {value!r:.60} does not name files of frames; {hint}.")
    if isinstance(value, (str, list, Path)) or (isinstance(value, Mapping) and "path" in value):
        return "files"
    raise ForgefieldError(
        f"{_setting(name)} must be a share below 1, a number of frames, a file (folder, glob, list) or {{indices: ...}}, not "
        f"{value!r:.80}"
    )


def _refuse_shared_files(options: DataOptions, requested: dict[str, Any], kinds: dict[str, str]) -> None:
    if options.overlap == "allow":
        return
    specs = {"train": options.train, **{name: requested[name] for name, kind in kinds.items() if kind == "files"}}
    owner: dict[str, str] = {}
    for name, spec in specs.items():
        for file in source_files(spec):
            other = owner.setdefault(file.identity, name)
            kinds_of_sets = {one.partition("-")[0] for one in (other, name)}
            if other != name and kinds_of_sets in ({"val"}, {"test"}):
                continue  # test sets may overlap, and so may validation sets
            if other != name:
                raise ForgefieldError(
                    f"{file.name} is in {_setting(other)} and in {_setting(name)}, so errors would be measured on known "
                    f"frames; use another file, data.{name.partition('-')[0]}=0.1 to split it, or data.overlap=allow"
                )


def _setting(split: str) -> str:
    """The setting of a split: `data.test.300K` of `test-300K`."""
    return f"data.{split.replace('-', '.', 1)}"


def _slice(text: str, setting: str) -> slice:
    try:
        numbers = [whole_number(part) if part.strip() else None for part in text.split(":")]
        if len(numbers) > 3:
            raise ValueError
        return slice(*numbers)
    except ValueError:
        raise ForgefieldError(f"{setting}={text!r} should read 'start:stop' or 'start:stop:step'") from None


def _index_file(text: str, setting: str) -> np.ndarray:
    path = Path(text).expanduser()
    try:
        if path.suffix == ".npy":
            rows = np.array(map_npy(path))
        else:
            rows = np.array(whole_numbers(read_text(path).replace(",", " ").split()), dtype=np.int64)
    except FileNotFoundError:
        raise ForgefieldError(f"{setting}: there is no file {path} (looked from {Path.cwd()})") from None
    except PermissionError:
        raise ForgefieldError(f"{setting}: no permission to read {path}") from None
    except OSError as error:
        raise ForgefieldError(f"{setting}: {path} could not be read ({error.strerror or error})") from error
    except ForgefieldError as error:
        raise ForgefieldError(f"{setting}: {error}") from error
    except (ValueError, OverflowError):
        raise ForgefieldError(f"{setting}: {path} should hold integers, separated by blanks, commas or lines") from None
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise ForgefieldError(f"{setting}: {path} should hold one row of integers, not {rows.dtype} {rows.shape}")
    return rows


def representative_rows(table: FrameTable, n: int) -> np.ndarray:
    """(n,) rows, ascending; the same data gives the same rows.

    Frames are assigned to compositions in proportion to their size, at least one each if n is large enough; else compositions
    with new species come first. Within a composition, frames are taken evenly over the range of energies per atom, or of
    forces if there are no energies.
    """
    if n < 1:
        raise ForgefieldError(f"at least 1 frame must be requested, not {n}")
    if n >= len(table):
        return np.arange(len(table))
    composition, species = _compositions(table)
    sizes = np.bincount(composition)
    places = _places(sizes, n) if n >= len(sizes) else _first_compositions(sizes, species, n)
    rank = np.lexsort((np.arange(len(table)), _range_value(table), composition))
    begins = np.cumsum(sizes) - sizes
    chosen = [
        rank[begin + ((np.arange(k) + 0.5) * size / k).astype(np.int64)]
        for begin, size, k in zip(begins, sizes, places)
        if k
    ]
    return np.sort(np.concatenate(chosen))


def _compositions(table: FrameTable) -> tuple[np.ndarray, list[set[int]]]:
    """(n_frames,) number of the composition of each frame, and the atomic numbers in each composition."""
    components = table.components
    # Two numbers that are the same for two frames only if all their (species, count) are; exact in integers modulo 2^64.
    entry = components.number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + components.count.astype(np.uint64)
    entry = (entry ^ (entry >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    starts = np.flatnonzero(np.diff(components.frame, prepend=-1))
    key = np.add.reduceat(entry ^ (entry >> np.uint64(32)), starts)
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    ends = np.append(starts, len(components.frame))
    return number, [set(components.number[ends[row] : ends[row + 1]].tolist()) for row in first]


def _range_value(table: FrameTable) -> np.ndarray:
    if table.carries("energy").any():
        return table.column("energy") / table.n_atoms
    return np.asarray(table.column("max_force"))


def _places(sizes: np.ndarray, n: int) -> np.ndarray:
    """Number of frames of each composition, n in all: at least one, at most all, else in proportion to its size."""
    places = np.maximum(np.floor(sizes * n / sizes.sum()), 1).astype(np.int64)
    while places.sum() != n:
        missing = sizes * n / sizes.sum() - places
        if places.sum() < n:
            places[np.where(places < sizes, missing, -np.inf).argmax()] += 1
        else:
            places[np.where(places > 1, missing, np.inf).argmin()] -= 1
    return places


def _first_compositions(sizes: np.ndarray, species: list[set[int]], n: int) -> np.ndarray:
    """One frame for n compositions: those with most new species first, then those with most frames."""
    places = np.zeros(len(sizes), dtype=np.int64)
    missing = set().union(*species)
    while missing and places.sum() < n:
        best = max(np.flatnonzero(places == 0), key=lambda i: (len(species[i] & missing), sizes[i]))
        missing -= species[best]
        places[best] = 1
    by_size = np.argsort(np.where(places > 0, -1, sizes), kind="stable")[::-1]
    places[by_size[: n - places.sum()]] = 1
    return places


TRAIN = 0
"""Number of the training part; the others are what was drawn."""


def keep_species_in_training(
    frames: FrameTable, part: np.ndarray, candidates: np.ndarray, seed: int
) -> tuple[np.ndarray, list[str]]:
    """Parts with every species in training, and the symbols of the species for which frames were exchanged.

    For each species that training lacks, a frame that holds it goes back to training, and a frame whose species are all held
    by others takes its place, so that sizes stay the same; where there is no such frame the part is smaller by one.

    frames: of which `part` is a division. part: (n_frames,) int, `TRAIN` or the number of a drawn part, -1 for frames that are
    not used. candidates: rows that may be drawn. seed: frames are looked through in the order that it fixes.
    """
    part, components = part.copy(), frames.components
    where = part[components.frame]
    missing = np.setdiff1d(components.number[where > TRAIN], components.number[where == TRAIN])
    if not len(missing):
        return part, []
    order = seeded_permutation(len(frames), seed)
    may_leave = np.zeros(len(frames), dtype=bool)
    may_leave[candidates] = True
    may_leave &= part == TRAIN
    left: list[int] = []
    for number in missing:
        holders = np.zeros(len(frames), dtype=bool)
        holders[components.frame[components.number == number]] = True
        if not (holders & (part == TRAIN)).any():
            row = _first(order, holders & (part > TRAIN))
            left.append(int(part[row]))
            part[row] = TRAIN
    for number_of_part in left:
        row = _first(order, may_leave & (part == TRAIN) & _dispensable(frames, part))
        if row is not None:
            part[row] = number_of_part
    return part, [chemical_symbols[number] for number in missing]


def refuse_empty(part: np.ndarray, names: dict[int, str], symbols: list[str]) -> None:
    """Refuse a split without frames. names: settings of the drawn parts by their number."""
    for number, name in names.items():
        if symbols and not (part == number).any():
            raise ForgefieldError(
                f"data.{name}: no frame can be set aside, because training needs the only frames with {', '.join(symbols)}; "
                f"give more data, name files for data.{name}, or set data.{name}=null"
            )


def _first(order: np.ndarray, chosen: np.ndarray) -> int | None:
    """The first of the chosen rows in this order; None where none is chosen."""
    places = np.flatnonzero(chosen[order])
    return int(order[places[0]]) if len(places) else None


def _dispensable(frames: FrameTable, part: np.ndarray) -> np.ndarray:
    """(n_frames,) whether each species of a frame is held by at least two frames of the training part."""
    components = frames.components
    holders = np.bincount(components.number[part[components.frame] == TRAIN], minlength=len(chemical_symbols))
    fewest = np.full(len(frames), np.iinfo(np.int64).max)
    np.minimum.at(fewest, components.frame, holders[components.number])
    return fewest >= 2
