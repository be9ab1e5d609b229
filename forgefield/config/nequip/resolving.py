"""Interpolations of a NequIP config: OmegaConf's own, and NequIP's resolvers that compute with plain values.

Statistics of the training data and Hydra's folder are not available here; placeholders are used instead. Resolvers that open
files of models or data are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forgefield.config.hydra import int_div, int_mul, register_resolvers
from forgefield.config.nequip.section import RUN_FOLDER, STATISTIC
from forgefield.config.sources import first_line
from forgefield.errors import ForgefieldError

_STATISTIC = re.compile(r"\$\{\s*training_data_stats\s*:\s*([^{}]*?)\s*\}")
_HYDRA = re.compile(r"\$\{\s*hydra\s*:[^{}]*\}")
_REFUSED = {
    "big_dataset_stats": "the statistics are part of NequIP; write the numbers",
    "type_names_from_package": "packages are not opened here; write the list of species",
    "cutoff_radius_from_package": "packages are not opened here; write the cutoff",
}


def resolved(content: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The config with every interpolation replaced by its value."""
    register_resolvers()
    for name, function in _RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, function)
    prepared = _prepared(content, "", file)
    try:
        values = OmegaConf.to_container(OmegaConf.create(prepared), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ForgefieldError(f"{file}: '{error.full_key or ''}' cannot be resolved: {first_line(error)}.") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _prepared(value: Any, key: str, file: Path) -> Any:
    """Plain values in which texts stand for what only a run knows."""
    if isinstance(value, Mapping):
        return {name: _prepared(item, f"{key}.{name}".strip("."), file) for name, item in value.items()}
    if isinstance(value, list):
        return [_prepared(item, f"{key}[{index}]", file) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    for name, reason in _REFUSED.items():
        if re.search(r"\$\{\s*" + name + r"\s*:", value):
            raise ForgefieldError(f"{file}: '{key}' uses the resolver {name}, which is not supported: {reason}.")
    value = re.sub(r"\$\{\s*int_div\s*:", "${exact_div:", value)
    return _HYDRA.sub(RUN_FOLDER, _STATISTIC.sub(lambda match: STATISTIC + match[1], value))


def exact_div(dividend: object, divisor: object) -> int:
    """NequIP's `int_div`, which refuses a remainder."""
    quotient = int_div(dividend, divisor)
    if int_mul(quotient, divisor) != int_mul(dividend, 1):
        raise ValueError(f"int_div refuses a remainder, and {dividend} is not divisible by {divisor}")
    return quotient


def concat_lists(first: list[Any] | ListConfig, second: list[Any] | ListConfig) -> list[Any]:
    """Both lists, one after the other."""
    return [*first, *second]


def list_to_identity_dict(names: list[Any] | ListConfig) -> dict[Any, Any]:
    """Every element as key and value."""
    return {name: name for name in names}


def list_to_constant_dict(names: list[Any] | ListConfig, value: Any) -> dict[Any, Any]:
    """Every element as a key of the same value."""
    return dict.fromkeys(names, value)


def float_to_str(number: float, form: str = ".1f") -> str:
    """A number as text."""
    return format(float(number), form)


_RESOLVERS: dict[str, Callable[..., Any]] = {
    "exact_div": exact_div,
    "concat_lists": concat_lists,
    "list_to_identity_dict": list_to_identity_dict,
    "list_to_constant_dict": list_to_constant_dict,
    "float_to_str": float_to_str,
}
