"""Which frames train, which validate, which test: by share, count, file or index list, by seed, never overlapping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forgefield.config.schema import DataOptions
from forgefield.config.test_sets import test_sets, title
from forgefield.data.labels.fields import Fields
from forgefield.data.labels.label_reader import LabelReader
from forgefield.data.neighbours.graph import GraphOptions
from forgefield.data.readers import source_files
from forgefield.data.readers.numerals import read_text, whole_number, whole_numbers
from forgefield.data.reading import Progress, label_settings, read_table, unit_settings
from forgefield.data.sampling.order import seeded_permutation
from forgefield.data.splits.rare_species import TRAIN, keep_species_in_training, refuse_empty
from forgefield.data.splits.representative import representative_rows
from forgefield.data.store.table import FrameTable
from forgefield.errors import ForgefieldError
from forgefield.untrusted.npy import map_npy

ON_DEVICE = "device"
"""As `data.neighbours`: neighbour lists are made where the model runs."""


@dataclass(frozen=True)
class Splits:
    train: FrameTable
    val: FrameTable
    tests: dict[str, FrameTable]
    """By the name of their results: `test`, or `test-NAME` where they have names."""
    description: str
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


def split_size(n: int, wanted: float | int, name: str) -> int:
    """Number of frames meant by a share (below 1; at least one frame) or a count."""
    if wanted < 0 or (wanted >= 1 and wanted != int(wanted)):
        raise ForgefieldError(f"data.{name}={wanted} is neither a share below 1 nor a number of frames")
    if 0 < wanted < 1:
        return max(1, round(wanted * n))
    return int(wanted)


def parse_indices(spec: object, n: int, setting: str) -> np.ndarray:
    """Rows of n frames from a list, a 'start:stop[:step]' range, or a file of integers. (k,) int64, no row twice."""
    if isinstance(spec, str):
        rows = np.arange(n)[_slice(spec, setting)] if ":" in spec else _index_file(spec, setting)
    elif isinstance(spec, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in spec):
        rows = np.array(spec, dtype=np.int64)
    else:
        raise ForgefieldError(f"{setting}={spec!r:.80} should be a list of integers, a file of them, or 'start:stop'")
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
    options: DataOptions, seed: int, progress: Progress | None = None, *, keep_species: bool = True
) -> Splits:
    """Read all sources of `options` and divide them.

    progress: told about frames that are converted on the way. keep_species: a random split leaves every species in training;
    False for runs that were started before it did.
    """
    if options.train is None:
        raise ForgefieldError("data.train is not set; give a file, folder or glob of structures to train on")
    wanted = {"val": options.val, **test_sets(options.test)}
    kinds = {name: _kind(value, name) for name, value in wanted.items()}
    _refuse_shared_files(options, wanted, kinds)
    reader = LabelReader(label_settings(options.labels), unit_settings(options.units))
    frames = _read(options.train, options, progress, reader=reader)
    pool = np.arange(len(frames))
    if options.indices is not None:
        pool = np.sort(parse_indices(options.indices, len(frames), "data.indices"))
    chosen = {
        name: parse_indices(wanted[name]["indices"], len(frames), f"data.{name}.indices")
        for name, kind in kinds.items()
        if kind == "indices"
    }
    if len(chosen) == 2 and np.intersect1d(chosen["val"], chosen["test"]).size:
        raise ForgefieldError("data.val.indices and data.test.indices have frames in common")
    for rows in chosen.values():
        pool = _without(pool, rows, len(frames))
    split_seed = options.split_seed if options.split_seed is not None else seed
    pool, drawn, rare = _draw(frames, pool, wanted, kinds, split_seed, keep_species=keep_species)
    chosen.update(drawn)
    parts = {name: frames.select(rows) for name, rows in chosen.items()}
    for name, kind in kinds.items():
        if kind == "files":
            parts[name] = _read(wanted[name], options, progress, frames.fields)
            if len(parts[name]) == 0:
                raise ForgefieldError(f"{_setting(name)}={wanted[name]!r:.80} holds no frame")
    if len(pool) == 0:
        raise ForgefieldError("no frame is left to train on: data.val and data.test take all of data.train")
    train, of = frames.select(pool), ""
    if options.devset is not None:
        train, of = train.select(representative_rows(train, options.devset)), f" of {len(train)} (data.devset)"
    description = ", ".join(
        [f"{len(train)}{of} to train", *(f"{len(parts[name])} to {title(name)} ({kinds[name]})" for name in parts)]
    )
    if rare:
        description += (
            f"; drawn so that {', '.join(rare)}, held by few frames, {'is' if len(rare) == 1 else 'are'} in training"
        )
    val = parts.pop("val", FrameTable([]))
    tests = {name: part for name, part in parts.items() if len(part)}
    return Splits(train, val, tests, description, reader.hints())


def graph_options(options: DataOptions) -> GraphOptions:
    """What makes two atoms neighbours, from the settings."""
    if options.cutoff is None:
        raise ForgefieldError("data.cutoff is null: it comes with the model of a run (model.from), in a training alone")
    library = "auto" if options.neighbours == ON_DEVICE else options.neighbours
    return GraphOptions(float(options.cutoff), library, options.adaptive_cutoff, options.max_neighbours)


def is_lazy(options: DataOptions) -> bool | None:
    """Whether data stays on disk, as `data.lazy` says; None: stores do, files do not."""
    if options.lazy in (True, False):
        return bool(options.lazy)
    if options.lazy in ("auto", None):
        return None
    raise ForgefieldError(f"data.lazy={options.lazy!r} should be auto, true or false")


def _read(
    spec: object,
    options: DataOptions,
    progress: Progress | None,
    fields: Fields | None = None,
    reader: LabelReader | None = None,
) -> FrameTable:
    """fields: those of the training data, which the others need as well. reader: as `read_table` takes it."""
    return read_table(
        spec,
        label_settings(options.labels, fields),
        options.units,
        lazy=is_lazy(options),
        graph=graph_options(options),
        progress=progress,
        reader=reader,
    )


def _draw(
    frames: FrameTable,
    pool: np.ndarray,
    wanted: dict[str, Any],
    kinds: dict[str, str],
    seed: int,
    *,
    keep_species: bool,
) -> tuple[np.ndarray, dict[str, np.ndarray], list[str]]:
    """Take random parts off the pool. Single atoms stay in training: they are reference points, not structures.

    keep_species: every species stays in training. Returns what is left, what was drawn, and the species for whose sake other
    frames were drawn.
    """
    sizes = {name: wanted[name] for name, kind in kinds.items() if kind == "random"}
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
    if isinstance(value, (str, list, Path)) or (isinstance(value, Mapping) and "path" in value):
        return "files"
    raise ForgefieldError(
        f"{_setting(name)}={value!r:.80} should be a share below 1, a number of frames, a file (folder, glob, list) "
        "or {indices: ...}"
    )


def _refuse_shared_files(options: DataOptions, wanted: dict[str, Any], kinds: dict[str, str]) -> None:
    specs = {"train": options.train, **{name: wanted[name] for name, kind in kinds.items() if kind == "files"}}
    owner: dict[str, str] = {}
    for name, spec in specs.items():
        for file in source_files(spec):
            other = owner.setdefault(file.identity, name)
            if other != name and "train" not in (other, name) and "val" not in (other, name):
                continue  # test sets may overlap
            if other != name:
                raise ForgefieldError(
                    f"{file.name} is in {_setting(other)} and in {_setting(name)}, so errors would be measured on known "
                    f"frames; use another file, or data.{name.partition('-')[0]}=0.1 to split it"
                )


def _setting(split: str) -> str:
    """The setting that gives a split: `data.test.300K` of `test-300K`."""
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
