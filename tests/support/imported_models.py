"""Models that an importer has read."""

from __future__ import annotations

from torch import Tensor

from forgefield.models import build_model
from forgefield.models.importing import ImportedModel
from tests.support.structures import make_batch, make_frame


def outputs_of(imported: ImportedModel) -> dict[str, Tensor]:
    """Predictions of an imported model for one structure."""
    potential = build_model(imported.resolved, precision=imported.precision, seed=0)
    potential.load_state_dict(imported.state)
    return potential.eval()(make_batch(make_frame(6, seed=1)))
