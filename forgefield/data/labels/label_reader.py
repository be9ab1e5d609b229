"""Selects the labels among the values of a source: by their usual names, or by the names in `data.labels`.

Two candidates that disagree are an error that shows both and names the setting that decides; so are energies in some frames
of a source and free energies in others. A label that is not there stays missing. A virial is converted to a stress
(virial = -V * stress), and units become eV and A, here and nowhere else. Fields (`data.labels.fields`) are read as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from forgefield.data.field_options import FIELDS, field_options
from forgefield.data.frame import Frame, RawFrame, atomic_numbers_of, check_frame, periodicity, real_numbers
from forgefield.data.labels.fields import Field, fields_from, frame_field
from forgefield.data.labels.source_settings import described, names_in, of_source
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.errors import ForgefieldError
from forgefield.physics import units as unit_table

SHOWN = 5
"""How many candidates are named."""
_SIZES = {"energy": (("frame", 1),), "forces": (("atom", 3),), "stress": (("frame", 6), ("frame", 9))}
"""Label -> what has how many numbers."""
_WORDS = {"energy": ("energ", "ener", "e_", "_e"), "forces": ("forc", "frc", "grad"), "stress": ("stress", "virial")}
"""Parts of names that make a value a likelier candidate."""


class LabelCandidates:
    """Remembers names of values that are numbers, with how many there are of each frame or atom."""

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[str, int]] = {}
        """Name -> frame or atom, and how many numbers each has."""

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def note(self, raw: RawFrame) -> None:
        """Remember the values of a frame whose names have not been seen before."""
        for per, values in (("atom", raw.arrays), ("frame", raw.info), ("frame", raw.results)):
            for name in values:
                if name not in self._sizes:
                    size = _count(values[name])
                    if per == "frame" and size == 3 * len(raw.numbers) and np.ndim(values[name]) == 2:
                        per, size = "atom", 3  # results of calculators are not divided into the two
                    elif per == "atom":
                        size //= max(len(raw.numbers), 1)
                    if size:
                        self._sizes[name] = (per, size)

    def sizes(self, recognised: Iterable[str]) -> dict[str, tuple[str, int]]:
        """For all values that are no labels: whether frames or atoms have them, and how many numbers each has."""
        recognised = set(recognised)
        return {name: size for name, size in self._sizes.items() if name not in recognised}

    def may_be_forces(self, recognised: Iterable[str]) -> bool:
        """Whether a value has the size of forces and a name that suggests them."""
        sizes = self.sizes(recognised).items()
        return any(
            size in _SIZES["forces"] and any(word in name.lower() for word in _WORDS["forces"]) for name, size in sizes
        )

    def hint(self, label: str, recognised: Iterable[str]) -> str:
        """Names of values that may be `label`, the likeliest first, and the setting for it; empty if there are none.

        recognised: names that are labels already.
        """
        fitting = [name for name, size in self.sizes(recognised).items() if size in _SIZES[label]]
        likely = [name for name in fitting if any(word in name.lower() for word in _WORDS[label])]
        names = [*likely, *(name for name in fitting if name not in likely)]
        if not names:
            return ""
        shown = ", ".join(f"{name} ({self._describe(name)})" for name in names[:SHOWN])
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        which = "it" if len(names) == 1 else "the first"
        return f"the data has {shown}{more}; to use {which} as the {label}, set data.labels.{label}={names[0]}"

    def _describe(self, name: str) -> str:
        per, size = self._sizes[name]
        return f"one number per {per}" if size == 1 else f"{size} numbers per {per}"


def _count(value: object) -> int:
    """Number of numbers in a value; 0 for anything else."""
    if isinstance(value, (bool, str, bytes, Mapping)) or value is None:
        return 0
    try:
        array = np.asarray(value)
    except ValueError:
        return 0
    return int(array.size) if array.dtype.kind in "fiu" else 0


USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "energy": ("energy", "REF_energy", "ref_energy", "dft_energy", "DFT_energy", "Energy", "total_energy"),
    "forces": ("forces", "force", "REF_forces", "REF_force", "ref_forces", "dft_forces", "dft_force", "DFT_forces"),
    "stress": ("stress", "REF_stress", "ref_stress", "dft_stress", "DFT_stress"),
    "virial": ("virial", "virials", "REF_virial", "REF_virials", "ref_virial", "dft_virial", "DFT_virial"),
    "weight": ("config_weight", "weight"),
}
FALLBACK_NAMES = {"energy": ("free_energy",)}
"""Another quantity that is often stored next to the energy: used only if no frame of the source has an energy."""
CALCULATOR = "calculator"
"""As a setting, this name means the result of the attached calculator."""
PREDICTED_BY = "predicted_by"
"""Entry of frames written by `forgefield predict`, "forgefield: NAMES" with the names of other outputs than energy, forces and
stress: the labels of such frames, in eV and A, are those whose names begin with `REF_`."""


class LabelReader:
    """Turns the raw frames of one source (all files that one setting names) into frames.

    Records the names in the source, so that `finish` can report missing ones, and that a label is one quantity.
    """

    def __init__(self, labels: LabelOptions, units: UnitOptions) -> None:
        self._settings = labels, units
        self._of_sources: dict[str, LabelReader] = {}
        """Readers of sources with names of labels or units of their own, by these settings."""
        self.names: dict[str, str | None] = {label: getattr(labels, label) for label in USUAL_NAMES}
        """The settings: label -> key."""
        self.fields = field_options(labels.fields)
        """What is to be taken along."""
        self.requested: dict[str, Field] | None = None if labels.fields is None else fields_from(self.fields)
        """The same as columns; None: what stores hold."""
        self._references: LabelReader | None = None
        """Reads frames that `forgefield predict` wrote."""
        self._present: set[str] = set()
        self._available: set[str] = set()
        self.seen = LabelCandidates()
        """Sizes of the values met, for hints on labels of other names."""
        self._quantity: dict[str, tuple[bool, str, str]] = {}
        """For labels with a fallback: whether it was taken, under which name, and in which frame first."""
        self.length = unit_table.length_factor(units.length)
        self.energy, self.energy_per_atom = unit_table.label_energy_factor(units.energy)
        self.forces = self.energy / self.length
        if units.forces is not None:
            self.forces = unit_table.force_factor(units.forces)
        self.stress = self.energy / self.length**3
        if units.stress is not None:
            self.stress = unit_table.stress_factor(units.stress)

    def of_source(self, settings: str) -> LabelReader:
        """The reader of a source with these names of labels and units (`source_settings`); this one if there are none."""
        if not settings:
            return self
        if settings not in self._of_sources:
            self._of_sources[settings] = LabelReader(*of_source(*self._settings, settings))
        return self._of_sources[settings]

    @property
    def units(self) -> UnitOptions:
        return self._settings[1]

    def frame(self, raw: RawFrame) -> Frame:
        """`raw` with its labels chosen, in eV and A, checked."""
        numbers = atomic_numbers_of(raw.numbers, raw.where)  # first: everything else counts atoms
        program, _, outputs = str(raw.info.get(PREDICTED_BY, "")).partition(":")
        if program == "forgefield":
            return self._predicted(raw, outputs.split())
        if not self._available.issuperset([*raw.info, *raw.arrays, *raw.results]):
            self.seen.note(raw)
            self._available.update(raw.info, raw.arrays, raw.results)
        cell = real_numbers(raw.cell, raw.where, "the cell") * self.length
        energy = self._find(raw, "energy")
        scale = self.energy * len(numbers) if self.energy_per_atom else self.energy
        forces = self._find(raw, "forces")
        weight = self._find(raw, "weight")
        fields = self._find_fields(raw) if self.fields else {}
        return check_frame(
            Frame(
                positions=real_numbers(raw.positions, raw.where, "positions") * self.length,
                numbers=numbers,
                cell=cell,
                pbc=periodicity(raw.pbc, raw.where),
                energy=None if energy is None else _scalar(raw, "energy", energy) * scale,
                forces=None if forces is None else forces * self.forces,
                stress=self._find_stress(raw, cell),
                weight=1.0 if weight is None else _scalar(raw, "weight", weight),
                source=raw.source,
                index=raw.index,
                fields=fields,
                per_atom=self.per_atom(fields),
            )
        )

    def _predicted(self, raw: RawFrame, outputs: list[str]) -> Frame:
        """A frame that `forgefield predict` wrote: predictions are not labels, even if the settings name them for other files.

        outputs: names of the fields that were predicted."""
        if self._references is None:
            labels = {
                name: key if is_none(key or "") or name == "weight" else "none" if name == "virial" else f"REF_{name}"
                for name, key in self.names.items()
            }
            fields = {
                name: asdict(options)
                | (
                    {"key": f"REF_{name}", "factor": 1.0, "cumulative": False, "values": None}
                    if name in outputs
                    else {}
                )
                for name, options in self.fields.items()
            }
            self._references = LabelReader(LabelOptions(**labels, fields=fields or None), UnitOptions())
        frame = self._references.frame(replace(raw, info={k: v for k, v in raw.info.items() if k != PREDICTED_BY}))
        self._present |= self._references._present
        self._available |= self._references._available
        return frame

    def per_atom(self, names: Iterable[str]) -> frozenset[str]:
        """Which of these fields are values of atoms."""
        return frozenset(name for name in names if self.fields[name].per == "atom")

    def stored(self, frame: Frame) -> Frame:
        """A frame of a store, whose labels were chosen when it was written: `none` in the settings leaves one out."""
        for label in USUAL_NAMES:
            if label == "weight" or getattr(frame, "stress" if label == "virial" else label) is not None:
                self._present.add(label)
        self._present.update(map(_of_field, frame.fields))
        if self.requested is not None and not self.requested.keys() >= frame.fields.keys():
            selected = {name: value for name, value in frame.fields.items() if name in self.requested}
            frame = replace(frame, fields=selected, per_atom=frame.per_atom & selected.keys())
        dropped = {label: None for label in ("energy", "forces", "stress") if is_none(self.names[label] or "")}
        if is_none(self.names["weight"] or ""):
            frame = replace(frame, weight=1.0)
        return replace(frame, **dropped) if dropped else frame  # type: ignore[arg-type]

    def other_names(self) -> list[str]:
        """Names of values in the source that are not labels, in alphabetical order."""
        names = [self, *self._of_sources.values()]
        return sorted(set().union(*(reader._available - reader._recognised_names() for reader in names)))

    def hints(self) -> dict[str, str]:
        """For labels of which nothing was met: a sentence on values that may be them, where there are any."""
        recognised = self._recognised_names()
        hints = {label: self.seen.hint(label, recognised) for label in ("energy", "forces", "stress")}
        return {label: text for label, text in hints.items() if text and not is_none(self.names[label] or "")}

    def properties(self) -> dict[str, tuple[str, int]]:
        """Values that may be properties to learn: whether frames or atoms have them, and how many numbers each has. Empty for
        data that look like energies and forces under unusual names."""
        recognised = self._recognised_names()
        return {} if self.seen.may_be_forces(recognised) else self.seen.sizes(recognised)

    def _recognised_names(self) -> set[str]:
        recognised = {name for names in (*USUAL_NAMES.values(), *FALLBACK_NAMES.values()) for name in names}
        recognised |= {options.key or name for name, options in self.fields.items()}
        return recognised | {name for name in self.names.values() if name}

    def notes(self) -> dict[str, Any]:
        """What was met so far, for `merge` in another process; plain containers only."""
        return {
            "found": sorted(self._present),
            "available": sorted(self._available),
            "quantity": {label: list(first) for label, first in self._quantity.items()},
            "of_sources": {settings: reader.notes() for settings, reader in self._of_sources.items()},
        }

    def note(
        self, where: str, keys: Iterable[str], energy: tuple[bool, str] | None, fields: Iterable[str] = ()
    ) -> None:
        """Remember the keys and fields met at `where`; `energy`: whether its fallback was taken, and under which name."""
        keys = set(keys)
        self._present.update(map(_of_field, fields))
        self._available |= keys
        self._present.update(label for label, name in self.names.items() if name in keys)
        if energy is not None:
            self._refuse_mixture(where, "energy", energy[1], energy[0])

    def merge(self, notes: dict[str, Any]) -> None:
        """Add the records of another reader of the same source, as if this one had read those frames too."""
        self._present.update(notes["found"])
        self._available.update(notes["available"])
        for label, (fallback, name, where) in notes["quantity"].items():
            self._refuse_mixture(where, label, name, fallback)
        for settings, of_source_notes in notes.get("of_sources", {}).items():
            self.of_source(settings).merge(of_source_notes)

    def finish(self, what: str) -> None:
        """Raise if a name in the settings was in none of the frames of `what`."""
        for settings, reader in self._of_sources.items():
            reader._require(f"{what} with {described(settings)}", names_in(settings))
            self._present |= reader._present
            self._available |= reader._available
        self._require(what, {*self.names, *map(_of_field, self.fields)})

    def _require(self, what: str, labels: Collection[str]) -> None:
        """Raise if a name of one of these labels was in none of the frames."""
        keys = ", ".join(sorted(self._available)) or "none at all"
        for label, name in self.names.items():
            if label in labels and name is not None and not is_none(name) and label not in self._present:
                raise ForgefieldError(
                    f"data.labels.{label}={name}: no frame of {what} has that key; keys found there: {keys}"
                )
        for name, options in self.fields.items():
            if _of_field(name) in labels and _of_field(name) not in self._present:
                raise ForgefieldError(
                    f"{FIELDS}.{name}: no frame of {what} has the key '{options.key or name}'; keys found there: {keys}"
                )

    def _find_fields(self, raw: RawFrame) -> dict[str, np.ndarray]:
        fields = {name: frame_field(raw, name, options) for name, options in self.fields.items()}
        values = {name: value for name, value in fields.items() if value is not None}
        self._present.update(map(_of_field, values))
        return values

    def _find_stress(self, raw: RawFrame, cell: np.ndarray) -> np.ndarray | None:
        # If the settings name one of the two, that one is used.
        named = {label: self.names[label] for label in ("stress", "virial") if self.names[label] is not None}
        chosen = [label for label, name in named.items() if not is_none(str(name))]
        stress = virial = None
        if not chosen or "stress" in chosen:
            stress = self._find(raw, "stress")
        if not chosen or "virial" in chosen:
            virial = self._find(raw, "virial")
        if stress is not None:
            stress = _matrix(raw, "stress", stress) * self.stress
        if virial is None:
            return stress
        volume = abs(np.linalg.det(cell))
        if not volume > 0:
            raise ForgefieldError(
                f"{raw.where}: it carries a virial but its cell has no volume, so there is no stress to learn; "
                "remove it, or set data.labels.virial=none"
            )
        from_virial = -_matrix(raw, "virial", virial) * self.energy / volume
        if stress is not None and not np.allclose(stress, from_virial, rtol=1e-4, atol=1e-6):
            raise ForgefieldError(
                f"{raw.where}: it carries a stress and a virial that disagree (virial should be -volume * stress); "
                "set data.labels.stress=none or data.labels.virial=none"
            )
        return from_virial if stress is None else stress

    def _find(self, raw: RawFrame, label: str) -> np.ndarray | None:
        name = self.names[label]
        if name is not None:
            value = None if is_none(name) else _named(raw, label, name)
            if value is None:
                return None
            self._present.add(label)
            return _numbers(raw, name, value)
        usual = USUAL_NAMES[label] + raw.extra_names.get(label, ())
        candidates, fallback = _candidates(raw, label, usual), False
        if not candidates and label in FALLBACK_NAMES:
            candidates, fallback = _candidates(raw, label, FALLBACK_NAMES[label]), True
        if not candidates:
            return None
        if label in FALLBACK_NAMES:
            self._refuse_mixture(raw.where, label, next(iter(candidates)), fallback)
        values = {key: _numbers(raw, key, value) for key, value in candidates.items()}
        if len(values) > 1:
            _refuse_ambiguity(raw, label, values)
        return next(iter(values.values()))

    def _refuse_mixture(self, location: str, label: str, name: str, fallback: bool) -> None:
        """The fallback is another quantity; all frames of a source must have the same."""
        first = self._quantity.setdefault(label, (fallback, name, location))
        if first[0] == fallback:
            return
        (_, usual, where), (_, _, where_other) = sorted([first, (fallback, name, location)])
        other = FALLBACK_NAMES[label][0]
        raise ForgefieldError(
            f"{where_other}: it has {other} but no {label}, while {where} has {label} ({usual}), and the two are not "
            f"the same; set data.labels.{label}={other} to learn {other}, or data.labels.{label}={usual} to leave "
            f"frames without it unlabelled"
        )


def _of_field(name: str) -> str:
    """Key of a field among those of labels."""
    return f"fields.{name}"


def is_none(name: str) -> bool:
    return name.strip().lower() == "none"


def _named(raw: RawFrame, label: str, name: str) -> Any:
    if name == CALCULATOR:
        return raw.results.get(label)
    containers = (raw.arrays, raw.info) if label == "forces" else (raw.info, raw.arrays)
    for values in (*containers, raw.results):
        if name in values:
            return values[name]
    return None


def _candidates(raw: RawFrame, label: str, names: tuple[str, ...]) -> dict[str, Any]:
    per_atom = label == "forces"
    values = raw.arrays if per_atom else raw.info
    # A key without a value reads as True, and is not a number.
    candidates = {
        name: values[name] for name in names if name in values and not isinstance(values[name], (bool, np.bool_))
    }
    for name in names:
        if name in raw.results:
            candidates[CALCULATOR] = raw.results[name]
            break
    return candidates


def _refuse_ambiguity(raw: RawFrame, label: str, values: dict[str, np.ndarray]) -> None:
    if label in ("stress", "virial"):
        comparable = [_matrix(raw, label, value).reshape(-1) for value in values.values()]
    else:
        comparable = [value.reshape(-1) for value in values.values()]
    first = comparable[0]
    if all(v.size == first.size and np.allclose(v, first, rtol=1e-9, atol=1e-6, equal_nan=True) for v in comparable):
        return
    shown = ", ".join(f"{key} ({_brief(value)})" for key, value in values.items())
    choices = " or ".join(f"data.labels.{label}={key}" for key in values)
    raise ForgefieldError(f"{raw.where}: several candidates for the {label} disagree: {shown}; set {choices}")


def _brief(value: np.ndarray) -> str:
    flat = value.reshape(-1)
    numbers = ", ".join(f"{x:.6g}" for x in flat[:3])
    return numbers if flat.size == 1 else f"[{numbers}, ...]"


def _numbers(raw: RawFrame, name: str, value: object) -> np.ndarray:
    """`value` as float64. Text, logical and complex values are not numbers, though NumPy would convert them."""
    try:
        array = np.asarray(value)
        if array.dtype.kind in "fiuO":
            return array.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ForgefieldError(f"{raw.where}: {name}={value!r:.60} is not a number or an array of numbers")


def _scalar(raw: RawFrame, label: str, value: np.ndarray) -> float:
    if value.size != 1:
        raise ForgefieldError(f"{raw.where}: the {label} has shape {value.shape}; it must be one number")
    return float(value.reshape(()))


def _matrix(raw: RawFrame, label: str, value: np.ndarray) -> np.ndarray:
    """(3, 3) from itself, from 9 numbers by rows, or from 6 in Voigt order xx, yy, zz, yz, xz, xy."""
    if value.shape == (6,):
        xx, yy, zz, yz, xz, xy = value
        return np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]])
    if value.shape in ((9,), (3, 3)):
        return value.reshape(3, 3)
    raise ForgefieldError(f"{raw.where}: the {label} has shape {value.shape}; it must be (6,), (9,) or (3, 3)")
