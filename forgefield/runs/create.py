"""Runs of models that were trained by other programs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgefield.config.template import plain_yaml
from forgefield.errors import ForgefieldError
from forgefield.models.importing import ImportedModel, ImportRequest
from forgefield.models.registry import importer
from forgefield.runs.record import versions
from forgefield.runs.run import WEIGHTS, Run, build_from_options
from forgefield.weights import write_weights

if TYPE_CHECKING:
    from torch import nn


def create_run_from_model(
    *,
    name: str,
    out: str | os.PathLike[str],
    resolved: dict[str, Any],
    potential: nn.Module,
    origin: str,
    precision: str,
    settings: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
) -> Run:
    """Create a run folder for a model that was trained elsewhere, to test, use or train it further.

    Parameters
    ----------
    name, out
        The folder is `out/name`; it must not exist.
    resolved
        All options of the model.
    potential
        The model.
    origin
        Where it comes from, for `run.json` and `config.yaml`.
    precision
        Precision of the weights.
    settings
        Additional sections of the config.
    facts
        Additional values of `run.json`; for a model of grid points including species and cutoff.
    """
    path = Path(out) / name
    if path.exists():
        raise ForgefieldError(f"{path} exists already; choose another name.")
    run = Run(path)
    run.checkpoints.mkdir(parents=True)
    state = {key: tensor.detach().cpu().contiguous() for key, tensor in potential.state_dict().items()}
    for which in WEIGHTS:
        write_weights(run.weights_path(which), state, {"origin": origin})
    config = {"name": name, "model": resolved, "training": {"precision": precision}, **(settings or {})}
    (path / "config.yaml").write_text(f"# {origin}\n" + plain_yaml(config))
    run.write_info(
        name=name,
        status="imported",
        origin=origin,
        model=resolved,
        precision=precision,
        versions=versions(),
        **{key: resolved[key] for key in ("species", "cutoff") if key in resolved},
        **(facts or {}),
    )
    return run


def create_run_from_import(
    program: str, request: ImportRequest, *, name: str | None, out: str | os.PathLike[str]
) -> tuple[Run, ImportedModel]:
    """A run with a model of another program, and a description of that model. Parameters: as in `api.import_model`."""
    reader = importer(program)
    reader.check(request, program)
    imported = reader.read(request)
    model = build_from_options(imported.resolved, imported.precision, reader.trust)
    model.load_state_dict(imported.state)
    run = create_run_from_model(
        name=name or reader.run_name(request),
        out=out,
        resolved=imported.resolved,
        potential=model,
        origin=imported.origin,
        precision=imported.precision,
        settings=imported.settings,
        facts=imported.facts,
    )
    return run, imported
