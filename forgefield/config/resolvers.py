"""Arithmetic inside a config: `${int_div:${total},4}` and `${int_mul:${a},${b}}`.

Both take and give whole numbers only. A batch size of 2.5 frames is an error here, not a surprise later.
"""

from __future__ import annotations

from omegaconf import OmegaConf


def int_div(dividend: object, divisor: object) -> int:
    """Quotient of two whole numbers, rounded down: 32, 5 -> 6."""
    a, b = _whole("int_div", dividend), _whole("int_div", divisor)
    if b == 0:
        raise ValueError(f"int_div cannot divide {a} by zero")
    return a // b


def int_mul(a: object, b: object) -> int:
    """Product of two whole numbers."""
    return _whole("int_mul", a) * _whole("int_mul", b)


RESOLVERS = {"int_div": int_div, "int_mul": int_mul}


def register_resolvers() -> None:
    """Make the resolvers known to OmegaConf. Calling it again changes nothing."""
    for name, function in RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, function)


def _whole(resolver: str, value: object) -> int:
    """`value` as an int. Text such as "8" counts, because `oc.env` always gives text."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"{resolver} takes whole numbers, not {value!r}")
