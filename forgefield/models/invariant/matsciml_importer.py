"""Reads SchNet models from checkpoints of Open MatSciML without executing anything in them.

Of the encoders of Open MatSciML, `SchNetWrap` has a counterpart with the same predictions: it is the SchNet of PyTorch
Geometric, which computes the energy itself. Other encoders end in heads of their own, and most ignore periodic images or the
invariance under rotations; they are refused by name. The energy of an isolated atom is that of the network, as a shift.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from ase.data import atomic_numbers
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.models.building import build_model
from forgefield.models.importing import ImportedModel, Importer, ImportRequest
from forgefield.models.module_records import class_name
from forgefield.models.resolving import resolve_model
from forgefield.ops.functions import shifted_softplus
from forgefield.untrusted.torch_files import Record, read_torch_records

OFFSETS = "distance_expansion.offset"
KNOWN = re.compile(
    r"embedding\.weight|distance_expansion\.offset|lin[12]\.(weight|bias)"
    r"|interactions\.\d+\.(mlp\.[02]\.(weight|bias)|conv\.nn\.[02]\.(weight|bias)|conv\.lin1\.weight"
    r"|conv\.lin2\.(weight|bias)|lin\.(weight|bias))"
)
"""Names of the tensors of the encoder."""
REASONS = {
    "EGNN": "it reads absolute coordinates, so its predictions depend on the orientation",
    "PLEGNNBackbone": "it ignores periodic images and has no cutoff",
    "SchNet": "its radial functions do not end at the cutoff",
    "MACEWrapper": "its energies come from a head of MatSciML instead of MACE's readouts",
    "MACE": "its energies come from a head of MatSciML instead of MACE's readouts",
    "TensorNet": "its energies come from a head of MatSciML on pooled features",
    "M3GNet": "its three-body terms are those of an early version of MatGL",
    "CGCNN": "it normalises over batches",
}
"""Why predictions of other encoders cannot be reproduced."""


class MatSciMLImporter(Importer):
    """Reads checkpoints of Open MatSciML with the encoder SchNetWrap, and state dicts of PyTorch Geometric's SchNet."""

    accepts = ("species",)

    def read(self, request: ImportRequest) -> ImportedModel:
        path = Path(request.source)
        content = read_torch_records(path)
        if not isinstance(content, Mapping):
            raise ForgefieldError(f"{path} is not a checkpoint of Open MatSciML, which is a mapping.")
        settings = content.get("hyper_parameters")
        state = content.get("state_dict", content)
        try:
            return _assemble(path, settings if isinstance(settings, Mapping) else {}, state, request.species)
        except (KeyError, TypeError, IndexError, AttributeError, RuntimeError, ValueError) as error:
            raise ForgefieldError(f"{path} is not a checkpoint with an encoder SchNetWrap: {error!r}.") from error


IMPORTER = MatSciMLImporter()


def _assemble(path: Path, settings: Mapping[str, Any], state: object, species: list[str] | None) -> ImportedModel:
    if not isinstance(state, Mapping):
        raise ForgefieldError(f"{path} has no state_dict.")
    tensors = {str(key): value for key, value in state.items() if isinstance(value, Tensor)}
    prefixes = [key.removesuffix(OFFSETS) for key in tensors if key.endswith(OFFSETS)]
    if len(prefixes) != 1 or f"{prefixes[0]}interactions.0.mlp.0.weight" not in tensors:
        name = class_name(settings.get("encoder_class")) or class_name(settings.get("encoder")) or "another encoder"
        reason = REASONS.get(name, "it has no counterpart with the same predictions")
        raise ForgefieldError(
            f"{path} is a checkpoint of {name}, which is not imported: {reason}. SchNetWrap is; train others here "
            "(`forgefield convert-config SCRIPT.py` translates the script)."
        )
    found = {key.removeprefix(prefixes[0]): value for key, value in tensors.items() if key.startswith(prefixes[0])}
    unknown = [key for key in found if not KNOWN.fullmatch(key)]
    if unknown:
        raise ForgefieldError(f"{path}: {prefixes[0]}{unknown[0]} has no counterpart in SchNet.")
    if species is None:
        raise ForgefieldError(
            f"{path}: name the elements of the model with --species; its table has a row for each of all."
        )
    options = settings.get("encoder_kwargs")
    if isinstance(options, Mapping) and options.get("readout", "add") not in ("add", "sum"):
        raise ForgefieldError(f"{path}: the energy is the {options['readout']} over atoms; imported models have sums.")
    normalisation = settings.get("normalize_kwargs")
    scale = 1.0
    checked = ""
    if isinstance(normalisation, Mapping) and not isinstance(normalisation, Record):
        scale = float(normalisation.get("energy_std", 1.0))
        mean = float(normalisation.get("energy_mean", 0.0))
        checked = f"Energies of frames lack the constant {mean:g} eV, which is not extensive." if mean else ""
    return _model(path, found, species, scale, checked)


def _model(path: Path, found: dict[str, Tensor], species: list[str], scale: float, checked: str) -> ImportedModel:
    offsets, embedding = found[OFFSETS].double(), found["embedding.weight"]
    expected = torch.linspace(0, float(offsets[-1]), len(offsets), dtype=torch.float64)
    if not torch.allclose(offsets, expected, rtol=0, atol=1e-5):
        raise ForgefieldError(f"{path}: the centres of the radial functions are not equally spaced from 0 on.")
    rows = [atomic_numbers.get(symbol, 0) for symbol in species]
    if not all(0 < row < len(embedding) for row in rows):
        raise ForgefieldError(f"{path}: --species must name elements up to number {len(embedding) - 1}.")
    count = sum(bool(re.fullmatch(r"interactions\.\d+\.lin\.weight", key)) for key in found)
    names = _names(count)
    state = {f"model.{ours}": _transposed(found[theirs]) for theirs, ours in names.items()}
    state["model.embedding"] = embedding[rows]
    resolved = resolve_model(
        {
            "name": "schnet",
            "num_layers": count,
            "num_features": embedding.shape[1],
            "num_filters": found["interactions.0.mlp.0.weight"].shape[0],
            "num_gaussians": len(offsets),
            "readout_mlp_width": found["lin1.weight"].shape[0],
            "envelope": "cosine",
            "avg_num_neighbours": 1.0,
            "energy_scales": scale,
            "energy_shifts": dict(zip(species, (scale * _alone(found, row, count) for row in rows))),
        },
        species=tuple(species),
        cutoff=float(offsets[-1]),
    )
    precision = "float64" if embedding.dtype == torch.float64 else "float32"
    complete = build_model(resolved, precision=precision, seed=0).state_dict() | state
    return ImportedModel(resolved, complete, precision, f"Open MatSciML, {path.name}", checked)


def _names(count: int) -> dict[str, str]:
    """The peer's name of each weight -> Forgefield's."""
    names = {}
    pairs = [("lin1", "readout", 0), ("lin2", "readout", 1)]
    for i in range(count):
        block = f"interactions.{i}"
        pairs += [(f"{block}.mlp.{2 * k}", f"layers.{i}.filter", k) for k in range(2)]
        pairs += [(f"{block}.conv.lin2", f"layers.{i}.leave", 0), (f"{block}.lin", f"layers.{i}.leave", 1)]
        names[f"{block}.conv.lin1.weight"] = f"layers.{i}.enter.weights.0"
    for theirs, ours, number in pairs:
        names |= {f"{theirs}.weight": f"{ours}.weights.{number}", f"{theirs}.bias": f"{ours}.biases.{number}"}
    return names


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.T.contiguous() if tensor.dim() == 2 else tensor


def _alone(found: Mapping[str, Tensor], row: int, count: int) -> float:
    """The network's energy of an isolated atom."""

    def linear(name: str, x: Tensor) -> Tensor:
        return found[f"{name}.weight"].double() @ x + found[f"{name}.bias"].double()

    x = found["embedding.weight"][row].double()
    for i in range(count):
        x = x + linear(f"interactions.{i}.lin", shifted_softplus(found[f"interactions.{i}.conv.lin2.bias"].double()))
    return float(linear("lin2", shifted_softplus(linear("lin1", x))))
