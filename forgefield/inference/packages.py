"""Packages: a trained model in one file, written by `forgefield export RUN -o model.ff` and read by `Run.open`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from forgefield.errors import ForgefieldError
from forgefield.formats import VERSION
from forgefield.models.resolving import single_branch
from forgefield.runs import PACKAGE, PACKAGE_KEY, PACKAGE_SUFFIX, UNCERTAINTY_TENSORS, PackagedRun, Run
from forgefield.untrusted.documents import load_json
from forgefield.weights import digest, write_weights

_LOCAL_INFO = ("measured", "hardware", "engine", "initial_model", "world_size")
"""Entries of `run.json` that describe the machine and the folder of the training, not the model."""
_LOCAL_DATA = ("train", "val", "test", "cache")
"""Entries of `data` in a config that name files."""


def write_package(
    run: Run,
    path: str | os.PathLike[str],
    *,
    which: str = "best",
    head: str | None = None,
    licence: str | None = None,
) -> Path:
    """Write the model of a run to one file and return its path.

    The file holds weights, resolved options, species, units, errors on test sets, the versions used in training and the
    uncertainties of these weights, if the run has any. It contains no code and no paths of the machine on which the model was
    trained.

    Parameters
    ----------
    path
        File to write, ending in `.ff`.
    which
        `best` or `last` weights.
    head
        Branch of a model with several branches: the package contains that branch only.
    licence
        Licence under which the model may be used, such as `CC-BY-4.0`.
    """
    path = Path(path)
    if path.suffix != PACKAGE_SUFFIX:
        raise ForgefieldError(f"{path}: the name of a packaged model ends in {PACKAGE_SUFFIX}.")
    weights = run.read_weights(which)
    info = {key: value for key, value in run.info.items() if key not in _LOCAL_INFO}
    state: Mapping[str, torch.Tensor] = weights.state
    if head is not None:
        info["model"], state = single_branch(info["model"], weights.state, head)
    data = run.settings.get("data") or {}
    settings = {
        "name": path.stem,
        "model": info["model"],
        "training": {"precision": info["precision"]},
        "data": {key: value for key, value in data.items() if key not in _LOCAL_DATA},
    }
    note = {
        VERSION: PACKAGE.version,
        "info": info,
        "settings": settings,
        "weights": which,
        "licence": licence or (run.note.get("licence") if isinstance(run, PackagedRun) else None),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "errors": _test_errors(run),
    }
    uncertainty = run.read_uncertainty(head)
    about = uncertainty.about.get("uncertainty") if uncertainty is not None else None
    if uncertainty is not None and isinstance(about, dict) and about.get("weights_sha256") == weights.sha256:
        note["uncertainty"] = about if head is None else {**about, "weights_sha256": digest(state)}
        carried = {name: tensor for name, tensor in uncertainty.state.items() if not name.startswith("curvature_")}
        state = {**state, **{UNCERTAINTY_TENSORS + name: tensor for name, tensor in carried.items()}}
    write_weights(path, state, {PACKAGE_KEY: note})
    return path


def _test_errors(run: Run) -> dict[str, Any]:
    """Errors on the test sets of a run, by the name of the set, as its `test*.json` files record them."""
    if isinstance(run, PackagedRun):
        return dict(run.note.get("errors") or {})
    errors = {}
    for file in sorted(run.path.glob("test*.json")):
        content = load_json(file.read_text())
        if isinstance(content, dict):
            errors[file.stem] = {key: value for key, value in content.items() if key != "source"}
    return errors
