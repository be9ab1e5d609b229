"""Imports models of MALA (1.1 to 1.4) from the archives that its `save_run` writes. Nothing in them is executed.

An archive holds weights, parameters, two scalers and, optionally, data of a calculation. The scalers become the scaling of the
network, number by number. Features without a counterpart in Forgefield are errors, never ignored.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from ase.data import chemical_symbols
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.ldos.data.info import parse_info
from forgefield.ldos.data.snapshot import calculation_facts
from forgefield.ldos.descriptors import DescriptorOptions
from forgefield.ldos.electronic.energy_grid import EnergyGrid
from forgefield.ldos.loss import UNITS
from forgefield.ldos.model import ACTIVATIONS, LinearScale, PointFacts, resolve
from forgefield.models.importing import ImportedModel, Importer, ImportRequest
from forgefield.untrusted.archives import check_expansion, open_archive

MEMBERS = ("params.json", "iscaler.json", "oscaler.json", "network.pth", "info.json")
"""Files of an archive that are read, after the name of the model."""
OLD_MEMBERS = ("iscaler.pkl", "oscaler.pkl", "params.pkl")
REMEDY = "load and save the model with MALA 1.4 once, which writes a plain archive"
NEGATIVE = {"zero_out_negative": "zero", "absolute_values": "absolute", None: "keep"}
"""Values of MALA's `restrict_targets`, and the names that Forgefield uses."""


@dataclass(frozen=True)
class ImportedNetwork:
    """resolved, state, precision: for `build_network` and `load_state_dict`. info: content of the archive's `.info.json`,
    where it has one. points: the section `data.points` for further training. species: in the order of LAMMPS, by name."""

    resolved: dict[str, Any]
    state: dict[str, Tensor]
    precision: str
    origin: str
    points: dict[str, Any]
    negative: str
    species: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)


def read_mala(path: str | os.PathLike[str]) -> ImportedNetwork:
    """The model in an archive `NAME.zip` of MALA."""
    path = Path(path)
    archive = _Archive.read(path)
    try:
        return _assemble(path, archive)
    except (KeyError, TypeError, IndexError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise ForgefieldError(f"{path} is not a model as MALA 1.4 writes them: {error!r}.") from error


@dataclass(frozen=True)
class _Archive:
    parameters: dict[str, Any]
    scalers: dict[str, dict[str, Any]]
    weights: dict[str, Tensor]
    info: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> _Archive:
        if not path.is_file():
            raise ForgefieldError(f"{path} does not exist.")
        with open_archive(path, str(path), "a zip archive as MALA's save_run writes it", REMEDY) as archive:
            files: dict[str, bytes] = {}
            for name in archive.namelist():
                member = _member_name(name)
                if member in files:
                    raise ForgefieldError(f"{path} contains two files NAME.{member}; use an archive of one model.")
                if member in MEMBERS:
                    files[member] = archive.read(name)
                elif member in OLD_MEMBERS:
                    files[member] = b""
        _refuse_pickles(path, files)
        for name in ("params.json", "iscaler.json", "oscaler.json", "network.pth"):
            if name not in files:
                raise ForgefieldError(f"{path} contains no NAME.{name}; is it an archive of MALA's save_run?")
        return cls(
            _json(path, files["params.json"]),
            {side: _json(path, files[f"{side[0]}scaler.json"]) for side in ("inputs", "outputs")},
            _weights(path, files["network.pth"]),
            _json(path, files["info.json"]) if "info.json" in files else {},
        )


def _member_name(name: str) -> str:
    """The last two components of a file name; names of runs may contain dots."""
    return ".".join(name.rpartition("/")[2].split(".")[-2:])


def _refuse_pickles(path: Path, files: Mapping[str, bytes]) -> None:
    for name in OLD_MEMBERS:
        if name in files and name.replace(".pkl", ".json") not in files:
            raise ForgefieldError(
                f"{path} contains NAME.{name}, a pickle of an old version, which could execute code when it is read; load and "
                "save the model with MALA 1.4 once, which writes JSON in its place."
            )


def _json(path: Path, content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ForgefieldError(f"{path}: a JSON file in it cannot be read ({error}).") from error
    if not isinstance(document, dict):
        raise ForgefieldError(f"{path}: a JSON file in it is not a mapping.")
    return document


def _weights(path: Path, content: bytes) -> dict[str, Tensor]:
    """Tensors by name. PyTorch's restricted reader supports the old format that MALA writes."""
    name = f"{path}: its network.pth"
    try:
        if content.startswith(b"PK"):
            with open_archive(content, name, "a file of weights", REMEDY):
                pass
        weights = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except ForgefieldError:
        raise
    except Exception as error:  # torch, pickle and struct each have their own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ForgefieldError(f"{name} is not a file of weights: {reason}") from error
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ForgefieldError(f"{path}: its network.pth contains something other than weights by name.")
    check_expansion(sum(value.numel() * value.element_size() for value in weights.values()), len(content), name, REMEDY)
    return dict(weights)


def _assemble(path: Path, archive: _Archive) -> ImportedNetwork:
    parameters = archive.parameters
    network, targets = parameters["network"], parameters["targets"]
    if network["nn_type"] != "feed-forward":
        raise ForgefieldError(
            f"{path} is a network of type {network['nn_type']}; feed-forward networks can be imported."
        )
    if targets["target_type"] != "LDOS":
        raise ForgefieldError(f"{path} predicts {targets['target_type']}; models of the LDOS can be imported.")
    layers, species = _layers(path, archive.weights), _species(archive.info)
    activation, output = _activations(path, network, layers)
    widths = [layers[0][1].shape[1], *(weight.shape[0] for _, weight, _ in layers)]
    if widths != list(network["layer_sizes"]):
        raise ForgefieldError(f"{path}: weights are those of layers {widths}, parameters say {network['layer_sizes']}.")
    facts = PointFacts(
        target="ldos",
        inputs=_scale(path, "iscaler", archive.scalers["inputs"], widths[0]),
        outputs=_scale(path, "oscaler", archive.scalers["outputs"], widths[-1]),
        energies=_energies(targets).to_dict(),
        descriptors=_descriptors(path, parameters["descriptors"], species),
    )
    options = {"hidden": widths[1:-1], "activation": activation, "output_activation": output}
    state = {f"weights.{n}": weight for n, (_, weight, _) in enumerate(layers)}
    state |= {f"biases.{n}": bias for n, (_, _, bias) in enumerate(layers)}
    for side, scale in (("input", facts.inputs), ("output", facts.outputs)):
        state[f"{side}_shift"] = torch.tensor(scale.shift, dtype=torch.float64)
        state[f"{side}_scale"] = torch.tensor(scale.scale, dtype=torch.float64)
    points = {
        "target": "ldos",
        "energies": _windows(targets),
        "scaling": {"inputs": facts.inputs.kind, "outputs": facts.outputs.kind},
        "descriptors": facts.descriptors,
    }
    precision = "float64" if layers[0][1].dtype == torch.float64 else "float32"
    return ImportedNetwork(
        resolve(options, facts),
        state,
        precision,
        f"{path.name}: a model of MALA",
        points,
        NEGATIVE[targets.get("restrict_targets", "zero_out_negative")],
        species,
        archive.info,
    )


def _species(info: Mapping[str, Any]) -> list[str]:
    """Chemical symbols, in the order in which LAMMPS was given them."""
    numbers = info.get("atoms", {}).get("numbers", [])
    numbers = numbers["array"] if isinstance(numbers, Mapping) else numbers
    return sorted({chemical_symbols[int(number)] for number in numbers})


def _layers(path: Path, weights: Mapping[str, Tensor]) -> list[tuple[int, Tensor, Tensor]]:
    """Index, weight (out, in) and bias of each linear layer, in order."""
    tensors: dict[int, dict[str, Tensor]] = {}
    for name, value in weights.items():
        match = re.fullmatch(r"(?:module\.)?layers\.(\d+)\.(weight|bias)", name)
        if match is None:
            raise ForgefieldError(f"{path}: {name} is not a weight of a feed-forward network.")
        tensors.setdefault(int(match[1]), {})[match[2]] = value
    if any("bias" not in layer or layer["weight"].ndim != 2 for layer in tensors.values()):
        raise ForgefieldError(f"{path}: an activation of this network has weights, which is not supported.")
    layers = [(index, layer["weight"], layer["bias"]) for index, layer in sorted(tensors.items())]
    if len(layers) < 2:
        raise ForgefieldError(f"{path} has no hidden layer; at least one is needed.")
    return layers


def _activations(
    path: Path, network: Mapping[str, Any], layers: list[tuple[int, Tensor, Tensor]]
) -> tuple[str | list[str], str | None]:
    """Activations of the hidden layers, one name if all are the same, and of the outputs. The indices of layers show which are
    followed by an activation."""
    stated, n = network["layer_activations"], len(layers)
    followed = [after - before == 2 for (before, _, _), (after, _, _) in pairwise(layers)]
    included = network.get("layer_activations_include_output_layer", True)
    if isinstance(stated, list):
        shared = len(stated) == 1 and n > 2 and all(followed)  # before 1.3.1 one entry was meant for all
        names = [*stated, *[None] * n][:n] if not shared else stated * n
    else:
        names = [stated] * n
    names = [*names[:-1], names[-1] if included else None]
    if None in names[:-1] or not all(followed):
        raise ForgefieldError(
            f"{path} has activations {stated}; only networks with an activation after every hidden layer are supported."
        )
    lowered = [None if name is None else str(name).lower() for name in names]
    for name, lowered_name in zip(names, lowered):
        if lowered_name is not None and lowered_name not in ACTIVATIONS:
            raise ForgefieldError(f"{path} has the activation {name}; supported are {', '.join(ACTIVATIONS)}.")
    hidden = [name for name in lowered[:-1] if name is not None]
    return hidden[0] if len(set(hidden)) == 1 else hidden, lowered[-1]


def _scale(path: Path, name: str, scaler: Mapping[str, Any], columns: int) -> LinearScale:
    """(x - shift) / scale of a scaler, in float64. Constant columns become 0, as in MALA."""
    standard = scaler["scale_standard"]
    kind = "standard" if standard else "minmax"
    if not standard and not scaler.get("scale_minmax", scaler.get("scale_normal")):
        return LinearScale("none", [0.0] * columns, [1.0] * columns)
    if not scaler["cantransform"]:
        raise ForgefieldError(
            f"{path}: {name}.json was saved before its numbers were known; save the model after training."
        )
    if scaler["feature_wise"]:
        kind = f"feature-wise-{kind}"
        first, second = (_row(scaler[key]) for key in (("means", "stds") if standard else ("mins", "maxs")))
    else:
        keys = ("total_mean", "total_std") if standard else ("total_min", "total_max")
        first, second = ([float(scaler[key])] * columns for key in keys)
    if len(first) != columns or len(second) != columns:
        raise ForgefieldError(f"{path}: {name}.json has {len(first)} columns, the network {columns}.")
    # Differences are taken in float32, in which MALA has these numbers: a maximum less a minimum is rounded there.
    scale = second if standard else (torch.tensor(second) - torch.tensor(first)).double().tolist()
    constant = [column for column, width in enumerate(scale) if not width > 0]
    return LinearScale(kind, first, [width if width > 0 else 1.0 for width in scale], constant)


def _row(values: object) -> list[float]:
    """(columns,) of what is saved as (columns,) or (1, columns)."""
    return torch.tensor(values, dtype=torch.float64).reshape(-1).tolist()


def _windows(targets: Mapping[str, Any]) -> dict[str, Any] | list[dict[str, Any]]:
    keys = {"first": "ldos_gridoffset_ev", "spacing": "ldos_gridspacing_ev", "levels": "ldos_gridsize"}
    values = {name: targets[key] for name, key in keys.items()}
    if not isinstance(values["levels"], list):
        return {"first": float(values["first"]), "spacing": float(values["spacing"]), "levels": int(values["levels"])}
    return [
        {"first": float(first), "spacing": float(spacing), "levels": int(levels)}
        for first, spacing, levels in zip(*values.values(), strict=True)
    ]


def _energies(targets: Mapping[str, Any]) -> EnergyGrid:
    windows = _windows(targets)
    return EnergyGrid.from_segments(windows if isinstance(windows, list) else [windows])


def _descriptors(path: Path, parameters: Mapping[str, Any], species: list[str]) -> dict[str, Any] | None:
    """Options of the descriptors; None if they are not supported: the model is then used with descriptor files."""
    if parameters.get("custom_lammps_compute_file"):
        return None
    kind = parameters.get("descriptor_type")
    if kind in ("Bispectrum", "SNAP"):
        options: dict[str, Any] = {
            "type": "bispectrum",
            "twojmax": int(parameters["bispectrum_twojmax"]),
            "cutoff": float(parameters["bispectrum_cutoff"]),
            "switch": bool(parameters.get("bispectrum_switchflag", 1)),
        }
        weights = parameters.get("bispectrum_element_weights")
        if weights is not None and any(weight != 1 for weight in weights):
            if len(weights) != len(species):
                return None  # their elements are not stated
            options["element_weights"] = {symbol: float(weight) for symbol, weight in zip(species, weights)}
    elif kind == "AtomicDensity":
        options = {"type": "gaussian", "cutoff": float(parameters["atomic_density_cutoff"])}
        if parameters.get("atomic_density_sigma") is not None:
            options["sigma"] = float(parameters["atomic_density_sigma"])
        if len(species) > 1:
            options["species"] = list(species)
    else:
        return None
    DescriptorOptions.from_mapping(options, f"{path}: descriptors")
    return options


SHAPES_ONLY = (
    "Checked: weights, layers and scalings have the shapes stated in the file, and all of them are used; the file "
    "contains no predictions to compare with."
)


class MalaImporter(Importer):
    """Reads archives of MALA's `save_run`."""

    def read(self, request: ImportRequest) -> ImportedModel:
        network = read_mala(request.source)
        info = parse_info(network.info, f"{request.source}: info.json")
        descriptors = network.points["descriptors"]
        without = "Its descriptors are not supported: it can be tested and trained with descriptor files only."
        species = " ".join(network.species) or "unknown: there is no info.json in the archive"
        return ImportedModel(
            resolved=network.resolved,
            state=network.state,
            precision=network.precision,
            origin=network.origin,
            checked="\n".join([SHAPES_ONLY, *([without] if descriptors is None else [])]),
            settings={"data": {"points": network.points}},
            facts={
                "samples": "points",
                "species": network.species,
                "cutoff": (descriptors or {}).get("cutoff"),
                "units": {"ldos": UNITS["ldos"]},
                "negative": network.negative,
                "calculation": calculation_facts([info]) if network.info else {},
            },
            summary=f"species {species}",
        )


IMPORTER = MalaImporter()
