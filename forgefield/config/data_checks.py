"""The checks of the `data` section: sizes, places and rules that have the right type and no meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forgefield.config.fields import field_options
from forgefield.config.refusals import check_choice, wrong
from forgefield.config.schema import DataOptions
from forgefield.config.sources import Sources
from forgefield.config.test_sets import NAME, is_named
from forgefield.errors import ForgefieldError

_NOT_NAMES = ("index", "paths", "file", "files", "weight", "share", "branch", "type_map")
"""Names of test sets that are slips for other keys."""
REFERENCES = ("auto", "isolated", "fit", "none")


def check_data(data: DataOptions, sources: Sources) -> None:
    """Refuse data settings without a meaning."""
    reference = data.reference_energies
    if not isinstance(reference, Mapping):
        check_choice(reference, REFERENCES, "data.reference_energies", sources)
    else:
        for symbol, value in reference.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise wrong(sources, f"data.reference_energies.{symbol}", value, "an energy in eV")
    for key in ("train", "val", "test", "indices"):
        if getattr(data, key) == "":
            raise wrong(sources, f"data.{key}", "", "the name of a file, folder or pattern")
    for key in ("val", "test"):
        value = getattr(data, key)
        if isinstance(value, bool) or (isinstance(value, (int, float)) and value < 0):
            raise wrong(sources, f"data.{key}", value, "a share of train (0.1), a number of frames (50) or a file")
        if isinstance(value, float) and value >= 1 and not value.is_integer():
            raise wrong(sources, f"data.{key}", value, "a share below 1, or a whole number of frames")
        if key == "test" and is_named(value):
            _check_test_sets(value, data.points is not None, sources)
        elif data.points is None and isinstance(value, Mapping) and set(value) != {"indices"}:
            raise wrong(sources, f"data.{key}", dict(value), "a share, a number, a file, or {indices: file-or-list}")
    _check_batch(data, sources)
    field_options(data.labels.fields, lambda key: f"{sources.where(key)}: ")
    if data.prefetch is not None and data.workers == 0:
        raise ForgefieldError(
            f"{sources.where('data.prefetch')}: 'data.prefetch' needs a thread that prepares batches; data.workers is 0."
        )
    if data.cutoff is not None and data.adaptive_cutoff is not None and not data.adaptive_cutoff > data.cutoff:
        raise wrong(
            sources, "data.adaptive_cutoff", data.adaptive_cutoff, f"a radius above data.cutoff={data.cutoff:g}"
        )
    species = data.species
    if species is not None and (not species or len(set(species)) != len(species)):
        raise wrong(sources, "data.species", list(species), "a list of different chemical symbols")


def _check_test_sets(sets: Mapping[Any, Any], of_points: bool, sources: Sources) -> None:
    if of_points:
        raise ForgefieldError(
            f"{sources.where('data.test')}: named test sets are for frames; with data.points give one list of snapshots, and "
            "test others with `forgefield test RUN --data SNAPSHOTS`."
        )
    if not sets:
        raise wrong(sources, "data.test", {}, "a file, or files by name, as in {300K: a.xyz, 600K: b.xyz}")
    for name, files in sets.items():
        key = f"data.test.{name}"
        if name in _NOT_NAMES:
            raise wrong(sources, "data.test", dict(sets), "a share, a number, a file, or {indices: file-or-list}")
        if not NAME.fullmatch(str(name)):
            raise ForgefieldError(
                f"{sources.where(key)}: '{name}' cannot be the name of a test set; use letters, digits and . _ + -, beginning "
                "with a letter or digit."
            )
        is_source = isinstance(files, Mapping) and "path" in files
        if not (is_source or (isinstance(files, str) and files) or (isinstance(files, Sequence) and len(files) > 0)):
            raise wrong(sources, key, files, "a file, folder, pattern or list of them")


def _check_batch(data: DataOptions, sources: Sources) -> None:
    counted = [name for name in ("frames", "atoms", "edges") if getattr(data.batch, name) is not None]
    if len(counted) > 1:
        raise ForgefieldError(
            f"{sources.where(f'data.batch.{counted[-1]}')}: 'data.batch' gives {' and '.join(counted)}; a batch is counted "
            f"in one of them (data.batch.{counted[0]}=null takes one back)."
        )
    if data.batch.oversized != "error" and counted not in (["atoms"], ["edges"]):
        raise ForgefieldError(
            f"{sources.where('data.batch.oversized')}: 'data.batch.oversized' is for batches counted in atoms or edges; no "
            "frame is too large for a number of frames."
        )
    if data.batch.bound == "lower":
        if counted not in (["atoms"], ["edges"]):
            raise ForgefieldError(
                f"{sources.where('data.batch.bound')}: 'data.batch.bound' is for batches counted in atoms or edges."
            )
        if data.batch.oversized != "error":
            raise ForgefieldError(
                f"{sources.where('data.batch.oversized')}: 'data.batch.oversized' is for an upper bound; no frame is too "
                "large for a lower one."
            )
    _check_by_source(data.batch.by_source, counted, sources)
    value = data.eval_batch
    if isinstance(value, Mapping):
        sizes = list(value.values())
        kinds = ("frames", "atoms", "edges") if data.points is None else ("points",)
        if len(value) != 1 or next(iter(value)) not in kinds:
            expected = f"a number of {kinds[0]}, or {{{'|'.join(kinds)}: number}}"
            raise wrong(sources, "data.eval_batch", dict(value), expected)
    else:
        sizes = [] if value is None else [value]
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise wrong(sources, "data.eval_batch", size, "a positive whole number")


def _check_by_source(value: Any, counted: list[str], sources: Sources) -> None:
    key = "data.batch.by_source"
    if isinstance(value, bool):
        return
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise wrong(sources, key, value, "true, false, or a list of numbers of frames, one for each source")
    for number in value:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise wrong(sources, key, list(value), "a list of positive whole numbers, one for each source")
    if counted:
        raise ForgefieldError(
            f"{sources.where(key)}: 'data.batch.by_source' gives the frames of each source, and 'data.batch.{counted[0]}' "
            f"another size; keep one of them (data.batch.by_source=true goes with {counted[0]})."
        )
