"""The table of architectures: for each name of `model.name`, where its class, its importers and its exporters are.

A new architecture is a folder and one entry here (or, from another package, one call of `register`). Nothing is imported until
it is needed. A model of the user's own needs no entry: it is named by its import path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.kinds import ImportPath

if TYPE_CHECKING:
    from pathlib import Path

    from forgefield.models.importing import Importer
    from forgefield.models.interface import RegisteredModel

    Exporter = Callable[..., Path]
    """`(potential: Potential, path, *, sel) -> Path`: writes the model and returns the file. sel: see `export --sel`."""


@dataclass(frozen=True)
class FileFormat:
    """Models in files of another program. path: of the `Importer` or `Exporter`. help: which files, for the command line."""

    path: ImportPath
    help: str


@dataclass(frozen=True)
class Architecture:
    """model: import path of a subclass of `RegisteredModel`. importers, exporters: by the name of the other program."""

    model: ImportPath
    importers: Mapping[str, FileFormat] = field(default_factory=dict)
    exporters: Mapping[str, FileFormat] = field(default_factory=dict)


_FRAMEWORK_FILES = (
    "checkpoint (.ckpt), package (.nequip.zip), "
    "or state dict (.pt, .pth, .npz) with its options as JSON in the same folder"
)


def _at(path: str, **formats: Mapping[str, FileFormat]) -> Architecture:
    return Architecture(ImportPath(f"forgefield.models.{path}"), **formats)


def _format(program: str, path: str, help: str) -> dict[str, FileFormat]:
    return {program: FileFormat(ImportPath(f"forgefield.{path}"), help)}


ARCHITECTURES: dict[str, Architecture] = {
    "nequip": _at(
        "nequip.model.NequIP",
        importers=_format("nequip", "models.nequip.importer.IMPORTER", _FRAMEWORK_FILES),
        exporters=_format("nequip", "models.nequip.exporter.write_nequip", ".ckpt"),
    ),
    "allegro": _at(
        "allegro.model.Allegro",
        importers=_format("allegro", "models.allegro.importer.IMPORTER", _FRAMEWORK_FILES),
        exporters=_format("allegro", "models.allegro.exporter.write_allegro", ".ckpt"),
    ),
    "mace": _at(
        "mace.model.MACE",
        importers=_format(
            "mace", "models.mace.importer.IMPORTER", "module (.model), or checkpoint (.pt) with its options as JSON"
        ),
        exporters=_format("mace", "models.mace.exporter.write_mace", ".model"),
    ),
    "deeppot": _at(
        "deeppot.model.DeepPot",
        importers=_format(
            "deepmd",
            "models.deeppot.importer.IMPORTER",
            "backend-free model (.yaml, .dp), frozen model (.pth) or checkpoint (.pt)",
        ),
        exporters=_format("deepmd", "models.deeppot.exporter.write_deepmd", ".yaml or .dp"),
    ),
    "schnet": _at(
        "invariant.distance_networks.SchNet",
        importers=_format(
            "matsciml",
            "models.invariant.matsciml_importer.IMPORTER",
            "checkpoint (.ckpt) of a task with the encoder SchNetWrap",
        ),
    ),
    "painn": _at("invariant.vector_networks.PaiNN"),
    "egnn": _at("invariant.vector_networks.EGNN"),
    "cgcnn": _at("invariant.distance_networks.CGCNN"),
    "tensornet": _at("invariant.tensornet.TensorNet"),
    "m3gnet": _at("invariant.m3gnet.M3GNet"),
    "pyg": _at("adapters.pyg.PyG"),
    "mace_like": _at("adapters.adapter.MaceLike"),
    "ase_like": _at("adapters.adapter.AseLike"),
    "calculator": _at(
        "adapters.calculator.CalculatorModel",
        importers=_format(
            "ase", "models.adapters.calculator.IMPORTER", "import path of a calculator (ase.calculators.emt.EMT)"
        ),
    ),
}
"""Models of structures by `model.name`."""
OTHER_IMPORTERS = _format("mala", "ldos.importer.IMPORTER", "archive of save_run (.zip)")
"""Importers of models of other kinds of samples (`forgefield.kinds`)."""
OTHER_EXPORTERS = {
    **_format("aoti", "training.engines.programs.write_aoti", "AOTInductor package for C++ (.pt2)"),
    **_format("torchscript", "training.engines.programs.write_torchscript", "TorchScript for C++ (.pt)"),
}
"""Exporters of models of any architecture."""


def register(name: str, architecture: Architecture) -> None:
    """Add an architecture, which can then be used like a built-in one in this process."""
    if name in ARCHITECTURES or not name.isidentifier():
        reason = "is the name of a model already" if name in ARCHITECTURES else "is not an identifier"
        raise ForgefieldError(f"an architecture cannot be registered as '{name}', which {reason}.")
    ARCHITECTURES[name] = architecture


def registered_class(name: str) -> type[RegisteredModel[object]]:
    """The class of a registered model."""
    model_class: type[RegisteredModel[object]] = ARCHITECTURES[name].model.load()
    return model_class


def import_formats() -> dict[str, FileFormat]:
    """What `forgefield import` reads, by the name of the program that wrote it."""
    formats = [entry.importers for entry in ARCHITECTURES.values()]
    return {program: entry for group in [*formats, OTHER_IMPORTERS] for program, entry in group.items()}


def export_formats() -> dict[str, FileFormat]:
    """What `forgefield export` writes, by the name of the program that reads it."""
    formats = [entry.exporters for entry in ARCHITECTURES.values()]
    return {program: entry for group in [*formats, OTHER_EXPORTERS] for program, entry in group.items()}


def importer(program: str) -> Importer:
    """Reads models of this program."""
    loaded: Importer = _entry(program, import_formats()).path.load()
    return loaded


def exporter(program: str) -> Exporter:
    """Writes models for this program."""
    loaded: Exporter = _entry(program, export_formats()).path.load()
    return loaded


def _entry(program: str, formats: Mapping[str, FileFormat]) -> FileFormat:
    if program not in formats:
        names: Sequence[str] = list(formats)
        raise ForgefieldError(
            f"'{program}' is not a program whose files are known; choose one of {', '.join(names)}."
            f"{did_you_mean(program, names)}"
        )
    return formats[program]
