"""Load trained models, import those of other programs, and export to other programs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from forgefield.api.sources import RunSource
from forgefield.errors import ForgefieldError
from forgefield.ldos.model import LDOSNetwork
from forgefield.models.importing import ImportedModel, ImportRequest
from forgefield.models.potential import Potential
from forgefield.models.registry import exporter
from forgefield.runs import Run, create_run_from_import


def load(
    run: RunSource,
    *,
    which: str = "best",
    device: str = "cpu",
    head: str | None = None,
    trust_code: bool = False,
) -> Potential | LDOSNetwork:
    """The trained model of a run in evaluation mode: a potential, or a network for grid points.

    Parameters
    ----------
    run
        Name or path of a run.
    which
        `best` or `last` weights.
    device
        Where to put the model.
    head
        Branch of a model with several branches.
    trust_code
        Whether to import code to which the run refers, such as a user-defined model. Importing executes it.
    """
    run = Run.open(run, trust_code=trust_code)
    run.require_head(head)
    model = run.load_model(which, device, head=head)
    assert isinstance(model, (Potential, LDOSNetwork)), "there are models of these two kinds"
    return model


def load_run(name: str | os.PathLike[str], *, out: str | os.PathLike[str] = "runs", trust_code: bool = False) -> Run:
    """The run of that name or path: its config, metrics, statistics and model. trust_code: as in `load`."""
    return Run.open(name, out=out, trust_code=trust_code)


def import_model(
    program: str,
    request: ImportRequest | str | os.PathLike[str],
    *,
    name: str | None = None,
    out: str | os.PathLike[str] = "runs",
) -> tuple[Run, ImportedModel]:
    """Import a model of another program as a run; returns the run and a description of the model.

    Parameters
    ----------
    program
        One of `models.registry.import_formats`, such as `nequip`.
    request
        The file, or an `ImportRequest` with the file and how to read it.
    name
        Name of the run; default: that of the file.
    out
        Folder of the run.
    """
    request = request if isinstance(request, ImportRequest) else ImportRequest(os.fspath(request))
    return create_run_from_import(program, request, name=name, out=out)


def import_mala(file: str | os.PathLike[str], *, name: str | None = None, out: str | os.PathLike[str] = "runs") -> Run:
    """Import the model of an archive written by MALA's `save_run` as a run. name, out: as in `import_model`."""
    return import_model("mala", file, name=name, out=out)[0]


def export(
    run: RunSource,
    out: str | os.PathLike[str],
    *,
    to: str | None = None,
    which: str = "best",
    head: str | None = None,
    device: str = "cpu",
    licence: str | None = None,
    sel: Sequence[int] | None = None,
    overwrite: bool = False,
    trust_code: bool = False,
) -> Path:
    """Write the model of a run to a file and return its path.

    Parameters
    ----------
    run
        Name or path of a run.
    out
        File to write.
    to
        Program that will read it: one of `models.registry.export_formats`, `mliap` (LAMMPS) or `mala`; default: a package
        (.ff), which can be used in place of the run.
    which, head, trust_code
        As in `load`.
    device
        Device on which the exported model will run, for `aoti` and `torchscript`.
    licence
        Licence of the model, stored in the package.
    sel
        For `deepmd`: maximum number of neighbours of each species, if the model was trained without it.
    overwrite
        Replace the file `out` if it exists.
    """
    if Path(out).exists() and not overwrite:
        raise ForgefieldError(f"{out} exists already; --force overwrites it, -o FILE names another.")
    if to is not None and licence is not None:
        raise ForgefieldError(f"--licence is stored in packages only; files of {to} have no field for it.")
    if to in (None, "mliap", "mala") and sel is not None:
        raise ForgefieldError("--sel is an option of --to deepmd.")
    run = Run.open(run, trust_code=trust_code)
    run.require_head(head)
    if to is None:
        from forgefield.inference.packages import write_package

        return write_package(run, out, which=which, head=head, licence=licence)
    if to == "mliap":
        from forgefield.inference.lammps.mliap import write_mliap

        return write_mliap(run, out, which=which, head=head)
    run.require_single_model(f"exported to {to}")
    if to == "mala":
        from forgefield.ldos.exporter import write_mala

        return write_mala(run, out, which=which)
    return exporter(to)(run.load_potential(which, device, head=head), out, sel=sel)
