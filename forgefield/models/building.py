"""From resolved options to a model: the potential, or the predictor with its heads, around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from forgefield.config.trust import NO_CODE, Trust
from forgefield.errors import ForgefieldError
from forgefield.models.heads.options import head_options
from forgefield.models.interface import Section
from forgefield.models.potential import Potential
from forgefield.models.predictor import DirectOutputs, Predictor
from forgefield.models.registry import ARCHITECTURES, registered_class
from forgefield.models.resolved import DIRECT, HEADS, MODULE_FOLDER, PREDICTS, REFERENCES
from forgefield.models.resolving import FROM_DATA, Options, adapted_class, extra_outputs_of, model_class, networks_of

PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


def build_model(resolved: Section, *, precision: str, seed: int, trust: Trust = NO_CODE) -> Potential:
    """Potential from resolved options. Weights depend on `seed` alone; the global random state is left as it was.

    trust: whether `resolved` may name code that is not Forgefield's.
    """
    if precision not in PRECISIONS:
        raise ForgefieldError(f"training.precision is '{precision}'; choose one of {', '.join(PRECISIONS)}.")
    options, dtype, references = dict(resolved), PRECISIONS[precision], None
    name, folder = options.pop("name"), options.pop(MODULE_FOLDER, None)
    predicts, max_neighbours = options.pop(PREDICTS, None), options.get("max_neighbours")
    if name in ARCHITECTURES:
        model = _build_registered(name, options, folder, dtype, seed, trust)
    else:
        cls = model_class(name, folder, trust=trust)
        if REFERENCES not in inspect.signature(cls.__init__).parameters:
            references = options.pop(REFERENCES, None)
        model = _build_user_model(cls, options, dtype, seed)
    potential = _wrap(model, resolved, predicts, max_neighbours, dtype, seed)
    if references is not None:
        potential.add_reference_energies(references)
    return potential


def _wrap(
    model: nn.Module,
    resolved: Section,
    predicts: Mapping[str, Any] | None,
    max_neighbours: int | None,
    dtype: torch.dtype,
    seed: int,
) -> Potential:
    """The potential or predictor around a model. predicts: `PREDICTS` of the resolved options."""
    if predicts is None:
        return Potential(model, max_neighbours=max_neighbours)
    if predicts.get(DIRECT):
        return DirectOutputs(model, extra_outputs_of(resolved), max_neighbours=max_neighbours)
    heads = networks_of(predicts[HEADS])
    if not heads and predicts["energy"]:
        return Potential(model, max_neighbours=max_neighbours)
    return Predictor(
        model,
        head_options(heads),
        has_energy=predicts["energy"],
        max_neighbours=max_neighbours,
        dtype=dtype,
        seed=seed,
    )


def _build_registered(
    name: str, options: Options, folder: str | None, dtype: torch.dtype, seed: int, trust: Trust
) -> nn.Module:
    model = registered_class(name)
    options.pop("max_neighbours", None)
    from_data = {key: options.pop(key) for key in FROM_DATA if key in options}
    if model.adapts is not None:
        options[MODULE_FOLDER] = folder
    build: Callable[..., nn.Module] = model
    return build(
        model.Options(**options),
        **from_data,
        **adapted_class(model, options, trust=trust),
        dtype=dtype,
        generator=torch.Generator().manual_seed(seed),
    )


def _build_user_model(cls: Callable[..., nn.Module], options: Options, dtype: torch.dtype, seed: int) -> nn.Module:
    """An instance of a user-defined class, whose weights are drawn from a separate random state.

    `species` and `cutoff` are set where the class does not set them itself.
    """
    named = inspect.signature(cls.__init__).parameters
    unset: Options = {"adaptive_cutoff": None, "max_neighbours": None}
    options = unset | options
    arguments = {key: value for key, value in options.items() if key not in FROM_DATA or key in named}
    with seeded(seed, dtype):
        model = cls(**arguments)
    for name, value in (("species", tuple(options["species"])), ("cutoff", float(options["cutoff"]))):
        if not hasattr(model, name):
            setattr(model, name, value)
    return model


@contextmanager
def seeded(seed: int, dtype: torch.dtype) -> Iterator[None]:
    """Inside, modules are created in this precision, with weights drawn from a separate random state."""
    default = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(default)
