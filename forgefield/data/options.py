"""Options of the section `data` of a config, and their checks.

The docstring under each field is its documentation in the reference of options and in configs that `forgefield init` writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forgefield.config.option import option, seed_option
from forgefield.config.sources import Sources, wrong
from forgefield.data.field_options import FieldOptions, field_options
from forgefield.data.paths import NAME, absolute, is_named
from forgefield.errors import ForgefieldError
from forgefield.files import find_path
from forgefield.ldos.options import PointsOptions

_NOT_NAMES = ("index", "paths", "file", "files", "weight", "share", "branch", "type_map", "labels", "units")
"""Names of test sets that are slips for other keys."""
DEFAULT_POINTS = 1000
"""Grid points per batch if the config does not set a number."""


@dataclass
class BatchOptions:
    """Size of a batch on each process, counted in frames, atoms or edges. Default: a number of frames with about 128
    atoms, at most 32 frames and a quarter of the training frames."""

    frames: int | None = option(None, above=0)
    """Number of frames per batch."""
    atoms: int | None = option(None, above=0)
    """Maximum number of atoms per batch. Batches then cost about the same even if frames differ in size."""
    edges: int | None = option(None, above=0)
    """Maximum number of edges (pairs of neighbours) per batch, which determine time and memory most directly."""
    points: int | None = option(None, above=0)
    """Number of grid points per batch, for trainings on grid points (data.points). Default: 1000."""
    oversized: str = option("error", choices=("error", "alone", "skip"))
    """What to do with a frame that exceeds `atoms` or `edges`: stop with an error, use it as a batch alone, or skip it."""
    bound: str = option("upper", choices=("upper", "lower"))
    """Whether `atoms` or `edges` is an upper bound (as many frames as fit) or a lower bound (as few frames as reach it)."""
    by_source: bool | list[int] = False
    """true: each batch contains frames of one source only. A list gives the number of frames from each source and replaces
    `frames`."""


@dataclass
class LabelOptions:
    """Names of the labels in the source. By default, labels are recognised by their usual names; `none` ignores a label."""

    energy: str | None = None
    """Name of the energies."""
    forces: str | None = None
    """Name of the forces."""
    stress: str | None = None
    """Name of the stresses."""
    virial: str | None = None
    """Name of the virials."""
    weight: str | None = None
    """Name of the weights of frames in the loss; `config_weight` and `weight` are recognised."""
    fields: dict[str, Any] | None = option(None, details=FieldOptions)
    """Other values to read, by name: {band_gap: {key: gap}, fparam: {shape: [2]}, charge: atom}. Default: the fields of a
    store."""


@dataclass
class UnitOptions:
    """Units of labels and positions in the source. Forgefield uses eV and A."""

    energy: str = "eV"
    """Unit of the energies of frames, or of energies per atom: `eV/atom`, `kcal/mol/atom`."""
    length: str = "A"
    """Unit of positions and cells."""
    forces: str | None = None
    """Unit of the forces. Default: energy / length."""
    stress: str | None = None
    """Unit of the stress, often `GPa` or `kbar`. Default: energy / length^3. A minus sign, `-kbar`, is for stresses that are
    positive under compression, as those printed by VASP; ASE's are positive under tension. A number, `10 GPa`, is a factor."""


@dataclass
class DataOptions:
    train: str | list[Any] | dict[str, Any] | None = None
    """Training data: a file, folder, store or glob pattern, or a list of them. Entries can be mappings {path: ..., weight: ...,
    share: ..., branch: ..., labels: {...}, units: {...}} with a weight in the loss, a share of the samples drawn, a branch of
    the model, and labels and units that differ from `data.labels` and `data.units`."""
    val: float | str | list[Any] | dict[str, Any] | None = 0.1
    """Validation data: a fraction of train (0.1), a number of its frames (50), files, {indices: file-or-list}, or several sets
    by name, which also have metrics of their own: {bulk: a.xyz, surface: b.xyz}."""
    test: float | str | list[Any] | dict[str, Any] | None = None
    """Test data, as for `val`, or several sets by name: {300K: a.xyz, 600K: b.xyz}. Evaluated at the end of the training."""
    overlap: str = option("error", choices=("error", "allow"))
    """Whether files may be in two of train, val and test: an error, or allow. Errors are then measured on known frames."""
    indices: str | list[int] | None = None
    """Frames of `train` to use, selected before val and test are split off: a list, a file of integers, or 'start:stop'."""
    cutoff: float | None = option(5.0, above=0, unit="A")
    """Cutoff radius of the neighbour list. Leave it out with `model.from`: the cutoff of that model is used."""
    adaptive_cutoff: float | None = option(None, above=0, unit="A")
    """Largest cutoff radius of atoms without a neighbour within `cutoff`, reached smoothly. Default: no adaptation."""
    max_neighbours: int | None = option(None, above=0)
    """Keep only this number of nearest neighbours of each atom. This is faster, but makes the energy discontinuous."""
    batch: BatchOptions = field(default_factory=BatchOptions)
    """Batch size: {frames: 8}, {atoms: 4096} or {edges: 400000}."""
    eval_batch: int | dict[str, int] | None = None
    """Batch size of validation and test: a number of frames, or {atoms: ...}. Results do not depend on it, except that
    trainer.limit_val_batches counts batches. Default: twice the training batch, which needs about the same memory;
    the validation of a training on a GPU uses larger batches if memory allows."""
    sampling: str | list[float] | dict[str, Any] | None = None
    """How frames are drawn. Default: every frame once per epoch. Sources are drawn with equal probability (uniform), in
    proportion to their size (size), with a list of weights, or by DeePMD-kit's blocks ('prob_sys_size;0:2:0.5;2:5:0.5'). {rule:
    uniform, frames: 10000} sets the length of an epoch; {branches: {a: 0.7, b: 0.3}} the probabilities of branches of the model
    (auto: by their number of sources); {epochs: {a: 10, b: 20}} makes an epoch of ten times the data of a and twenty times that
    of b."""
    devset: int | None = option(None, above=0)
    """Train on this number of representative frames of `train` only, for quick experiments."""
    species: list[str] | None = None
    """Chemical species of the model, in order. Default: the species in the data, by atomic number."""
    labels: LabelOptions = field(default_factory=LabelOptions)
    """Names of the labels in the source."""
    units: UnitOptions = field(default_factory=UnitOptions)
    """Units of the source."""
    transforms: list[Any] | None = None
    """Functions of your own that change or leave out frames after reading: [my_file.my_function], or [{name:
    my_file.my_function, argument: value}]. Each takes `ase.Atoms` with the values of the file and returns it, or None."""
    split_seed: int | None = seed_option(None)
    """Seed of the random split. Default: `seed`."""
    bootstrap: bool = False
    """Train on as many frames as there are for training, drawn at random with `seed` and with replacement, as for a member of
    an ensemble. Frames with one atom are not drawn but kept, and every species stays in training."""
    shuffle: bool = True
    """Use a new random permutation of all training frames in every epoch."""
    neighbours: str = option("auto", choices=("auto", "vesin", "matscipy", "device"))
    """How neighbour lists are computed: with vesin or matscipy, or for each batch on the device of the model (device). auto
    uses the fastest."""
    lazy: bool | str | None = option("auto", choices=("auto", True, False))
    """Leave the data on disk: true (files are converted to a store in the cache once), false, or auto (stores only)."""
    keep: str = option("auto", choices=("auto", "device", "memory"))
    """Where frames are kept during a training: on the device of the model, where batches are then made
    without the host (device), or in memory or on disk, with batches assembled by threads (memory). auto: on a GPU if they need
    at most 1 GB and a quarter of its free memory."""
    workers: int | None = option(None, at_least=0, expected="zero or more")
    """Number of threads that prepare batches. Default: NUM_WORKERS if set, else 1 with a GPU and 0 without."""
    prefetch: int | None = option(None, at_least=1, expected="one or more (data.workers=0 prepares nothing ahead)")
    """Number of batches prepared ahead. Default: two per worker."""
    reference_energies: str | dict[str, float] = option(
        "auto", choices=("auto", "isolated", "fit", "mean", "none"), open_choices="{species: energy}"
    )
    """Energy of an isolated atom of each species, eV: {H: -13.6, ...}, isolated (from frames with one atom), fit (least
    squares), mean (the mean energy per atom, for every species) or none (zero). auto: isolated if every species
    has such a frame, else fit."""
    max_force: float = option(300.0, above=0, unit="eV/A")
    """A force component above this limit stops the run; it is usually a wrong unit or a parsing error."""
    max_energy_deviation: float = option(20.0, above=0, unit="eV/atom")
    """A frame whose energy deviates by more than this from the fit by composition stops the run."""
    cache: bool = True
    """Cache statistics of the data on disk, under a hash of everything they depend on."""
    points: PointsOptions | None = None
    """For trainings on grid points (LDOS, density) instead of frames; train, val and test are then snapshots."""
    fast: bool | None = None
    """Grid points only: take batches as slices of tensors (true, the default) or point by point, as from a PyTorch dataset."""

    def make_paths_absolute(self, folders: Sequence[Path]) -> None:
        """Replace relative paths, which are looked up in `folders` in this order, by absolute ones."""
        self.train, self.indices = absolute(self.train, folders), absolute(self.indices, folders)
        self.val, self.test = (
            {name: absolute(files, folders) for name, files in sets.items()}
            if is_named(sets)
            else absolute(sets, folders)
            for sets in (self.val, self.test)
        )
        if self.points is not None and self.points.pseudopotentials is not None:
            self.points.pseudopotentials = find_path(self.points.pseudopotentials, folders)


def check_data(data: DataOptions, sources: Sources) -> None:
    """Refuse data settings without a meaning."""
    reference = data.reference_energies
    for symbol, value in reference.items() if isinstance(reference, Mapping) else ():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong(sources, f"data.reference_energies.{symbol}", value, "an energy in eV")
    for key in ("train", "val", "test", "indices"):
        if getattr(data, key) == "":
            raise wrong(sources, f"data.{key}", "", "the name of a file, folder or pattern")
    for position, spec in enumerate(data.transforms or ()):
        if not (isinstance(spec, str) and spec) and not (
            isinstance(spec, Mapping) and isinstance(spec.get("name"), str)
        ):
            raise wrong(
                sources, f"data.transforms.{position}", spec, "an import path, or {name: import.path, argument: value}"
            )
    if data.transforms and (data.points is not None or data.lazy is True):
        raise ForgefieldError(
            f"{sources.where('data.transforms')}: data.transforms are for frames in memory, not for "
            f"{'grid points' if data.points is not None else 'data.lazy=true'}."
        )
    for key in ("val", "test"):
        value = getattr(data, key)
        if isinstance(value, bool) or (isinstance(value, (int, float)) and value < 0):
            raise wrong(sources, f"data.{key}", value, "a share of train (0.1), a number of frames (50) or a file")
        if isinstance(value, float) and value >= 1 and not value.is_integer():
            raise wrong(sources, f"data.{key}", value, "a share below 1, or a whole number of frames")
        if is_named(value):
            _check_named_sets(key, value, data.points is not None, sources)
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


def _check_named_sets(split: str, sets: Mapping[Any, Any], of_points: bool, sources: Sources) -> None:
    """split: `val` or `test`."""
    if of_points:
        test = ", and test others with `forgefield test RUN --data SNAPSHOTS`" if split == "test" else ""
        raise ForgefieldError(
            f"{sources.where(f'data.{split}')}: named sets are for frames; with data.points give one list of snapshots{test}."
        )
    if not sets:
        raise wrong(sources, f"data.{split}", {}, "a file, or files by name, as in {300K: a.xyz, 600K: b.xyz}")
    for name, files in sets.items():
        key = f"data.{split}.{name}"
        if name in _NOT_NAMES:
            raise wrong(sources, f"data.{split}", dict(sets), "a share, a number, a file, or {indices: file-or-list}")
        if not NAME.fullmatch(str(name)):
            raise ForgefieldError(
                f"{sources.where(key)}: '{name}' cannot be the name of a {'test' if split == 'test' else 'validation'} set; "
                "use letters, digits and . _ + -, beginning with a letter or digit."
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


def _check_by_source(value: object, counted: list[str], sources: Sources) -> None:
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
