"""Reads the toy model from a JSON file: {"species": [...], "cutoff": A, "weights": [[...], ...], "shifts": [...]}."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from forgefield.models import build_model, resolve_model
from forgefield.models.importing import ImportedModel, Importer, ImportRequest


class ToyImporter(Importer):
    def read(self, request: ImportRequest) -> ImportedModel:
        tree = json.loads(Path(request.source).read_text())
        shifts = dict(zip(tree["species"], tree["shifts"]))
        section = {"name": "gaussians", "width": len(tree["weights"][0]), "energy_shifts": shifts}
        resolved = resolve_model(section, species=tree["species"], cutoff=tree["cutoff"])
        state = build_model(resolved, precision="float64", seed=0).state_dict()
        state["model.weights"] = torch.tensor(tree["weights"], dtype=torch.float64)
        return ImportedModel(resolved, state, "float64", f"toy model {request.source}")


IMPORTER = ToyImporter()
