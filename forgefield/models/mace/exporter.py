"""Writes MACE models as files that mace-torch loads like its own (.model).

The file is a pickle that calls mace-torch's constructor with the options of the model and then loads the weights; mace-torch is
not needed to write it. Weights of independent polynomials become weights of the full basis, which every installation has.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ase.data import atomic_numbers
from torch import Tensor

from forgefield.errors import ForgefieldError
from forgefield.files import written_atomically
from forgefield.models.mace.basis import full_basis_map, full_tensor
from forgefield.models.mace.importer import INTERACTIONS, READOUTS
from forgefield.models.mace.model import MACE
from forgefield.models.mace.options import correlations
from forgefield.models.mace.weights import ContractionWeight, contraction_weights, weight_table
from forgefield.models.potential import Potential

SUFFIX = ".model"


def write_mace(potential: Potential, path: str | os.PathLike[str], *, sel: Sequence[int] | None = None) -> Path:
    """Write the model to `path`; returns it. sel: only for other programs."""
    path = Path(path)
    model = potential.model
    if sel is not None:
        raise ForgefieldError("--sel is an option of --to deepmd.")
    if path.suffix != SUFFIX:
        raise ForgefieldError(f"{path}: files that mace-torch reads end in {SUFFIX}.")
    if not isinstance(model, MACE):
        raise ForgefieldError(
            f"a {type(model).__name__} cannot be exported to mace-torch, only a model with model.name=mace."
        )
    if potential.extra_outputs or potential.forces_are_direct:
        names = ", ".join(potential.extra_outputs) or "forces that are not the derivative of its energy"
        raise ForgefieldError(f"this model also predicts {names}, which mace-torch does not support.")
    with written_atomically(path) as temporary:
        torch.save(_Module(constructor_arguments(model), mace_state(model), model.weight_dtype()), temporary)
    return path


def mace_state(model: MACE) -> dict[str, Tensor]:
    """Weights by the names that they have in mace-torch; tensors that follow from options are left out."""
    own = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    state = {weight.theirs: weight.write(own[weight.ours]).contiguous() for weight in weight_table(model)}
    state |= {entry.theirs: _in_full_basis(entry, own, model) for entry in contraction_weights(model)}
    name, dtype = "radial_embedding", model.weight_dtype()
    constants = model.radial.constants.cpu()
    if model.radial.kind == "bessel":
        state[f"{name}.bessel_fn.bessel_weights"] = (constants * (torch.pi / model.cutoff)).to(dtype)
    elif model.radial.kind == "gaussian":
        state[f"{name}.bessel_fn.gaussian_weights"] = constants.to(dtype)
    names = {"Agnesi": ("q", "p", "a"), "Soft": ("alpha",)}.get(model.radial.transformation or "", ())
    values = model.radial.transform.cpu().to(dtype)
    return state | {f"{name}.distance_transform.{key}": value.clone() for key, value in zip(names, values)}


def _in_full_basis(entry: ContractionWeight, own: dict[str, Tensor], model: MACE) -> Tensor:
    """Weights (n_species, n_full, channels), zero for polynomials that vanish."""
    product, irrep = entry.product, entry.product.outputs[entry.output]
    if entry.ours is None:
        n_full = full_tensor(product.inputs, irrep, entry.degree).shape[-1]
        rows, channels = product.weights[0].shape[0], product.weights[0].shape[2]
        return torch.zeros(rows, n_full, channels, dtype=model.weight_dtype())
    value = own[entry.ours]
    if entry.degree == 1 or not model.options.use_reduced_cg:
        return value
    matrix = full_basis_map(product.inputs, product.outputs, product.correlation, irrep, entry.degree)
    inverse = torch.linalg.pinv(matrix)
    if (matrix @ inverse - torch.eye(len(matrix), dtype=torch.float64)).abs().max() > 1e-9:
        raise ForgefieldError(
            f"the full basis of mace-torch does not contain all polynomials of degree {entry.degree} of this model "
            "(model.use_reduced_cg); it cannot be exported."
        )
    return torch.matmul(inverse, value.double()).to(value.dtype)


def constructor_arguments(model: MACE) -> dict[str, Any]:
    """Arguments of mace-torch's `ScaleShiftMACE`."""
    options, heads = model.options, list(model.branches) or ["Default"]
    classes = {ours: theirs for theirs, ours in INTERACTIONS.items()}
    readouts = {bias: name for name, bias in READOUTS.items()}
    shifts = model.energy_shifts.cpu().view(len(heads), -1).tolist()
    scales = model.energy_scales.cpu().tolist()
    one = len(heads) == 1
    return {
        "atomic_inter_scale": scales[0] if one else scales,
        "atomic_inter_shift": 0.0 if one else [0.0] * len(heads),
        "r_max": model.cutoff,
        "num_bessel": options.num_bessel,
        "num_polynomial_cutoff": options.num_polynomial_cutoff,
        "max_ell": options.max_ell,
        "interaction_cls": _attribute("mace.modules", classes[options.interaction]),
        "interaction_cls_first": _attribute("mace.modules", classes[options.interaction_first]),
        "num_interactions": options.num_interactions,
        "num_elements": len(model.species),
        "hidden_irreps": _irreps(options.hidden_irreps),
        "MLP_irreps": _irreps(options.mlp_irreps),
        "atomic_energies": shifts[0] if one else shifts,
        "avg_num_neighbors": float(options.avg_num_neighbours or 1.0),
        "atomic_numbers": [_number(symbol) for symbol in model.species],
        "correlation": correlations(options),
        "gate": _gate(options.gate),
        "pair_repulsion": options.pair_repulsion,
        "apply_cutoff": options.apply_cutoff,
        "use_reduced_cg": False,
        "use_agnostic_product": options.use_agnostic_product,
        "use_last_readout_only": options.use_last_readout_only,
        "distance_transform": options.distance_transform or "None",
        "edge_irreps": None if options.edge_irreps is None else _irreps(options.edge_irreps),
        "use_edge_irreps_first": options.use_edge_irreps_first,
        "radial_MLP": list(options.radial_mlp),
        "radial_type": options.radial_type,
        "heads": heads,
        "readout_cls": _attribute("mace.modules.blocks", readouts[options.readout_bias]),
        "keep_last_layer_irreps": options.keep_last_layer_irreps,
    }


def _number(symbol: str) -> int:
    number = atomic_numbers.get(symbol)
    if not number:
        raise ForgefieldError(f"mace-torch needs chemical elements; {symbol} is not one.")
    return number


class _Later:
    """In a pickle: what a function returns that is called when the file is loaded; it may itself be a function to call."""

    def __call__(self) -> None:
        raise TypeError("this is computed where the file is loaded")


class _Call(_Later):
    """The result of a function of these arguments."""

    def __init__(self, function: object, *args: object) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


class _Module(_Later):
    """mace-torch's module with these arguments and weights, made in the precision of the weights."""

    def __init__(self, arguments: dict[str, Any], state: dict[str, Tensor], dtype: torch.dtype) -> None:
        before = _Call(torch.get_default_dtype)
        self.steps = [
            before,
            _Call(torch.set_default_dtype, dtype),
            _Call(_Keywords(_attribute("mace.modules", "ScaleShiftMACE"), arguments)),
            _Call(torch.set_default_dtype, before),
            state,  # for readers that call nothing; the pickle contains it once
        ]
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:
        load = functools.partial(torch.nn.Module.load_state_dict, strict=False)
        return operator.getitem, (self.steps, 2), self.state, None, None, load


class _Keywords(_Later):
    """A `functools.partial` with keyword arguments."""

    def __init__(self, function: _Call, arguments: dict[str, Any]) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (self.function,), (self.function, (), self.arguments, None)


def _attribute(module: str, name: str) -> _Call:
    """A class or function of a program that need not be installed here."""
    return _Call(getattr, _Call(importlib.import_module, module), name)


def _irreps(text: str) -> _Call:
    return _Call(_attribute("e3nn.o3", "Irreps"), text.replace(" ", ""))


def _gate(name: str | None) -> _Call | None:
    if name is None:
        return None
    return _attribute("torch.nn.functional" if name == "silu" else "torch", name)
