"""Hydra set up for one composition. It has one state per process, which belongs to the caller and is restored. Also resolvers
for arithmetic in a config: `${int_div:${total},4}` and `${int_mul:${a},${b}}` take and return integers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

from omegaconf import OmegaConf

ENTRY, DEFAULTS, USER = "__forgefield_entry__", "__forgefield_defaults__", "__forgefield_user__"
"""Names under which Hydra finds what is composed: the user's content over defaults."""
_one_at_a_time = RLock()


@contextmanager
def hydra_for(folder: Path, content: dict[str, Any]) -> Iterator[None]:
    """Inside, `ENTRY` can be composed: content over what is stored as `DEFAULTS`, with files of the folder. One thread at a
    time.

    Settings of Hydra (loggers, launchers, help) are not read from its files: they have no effect here, and take longer
    than everything else.
    """
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    with _one_at_a_time:
        instance, repo = GlobalHydra.instance(), ConfigStore.instance().repo
        hydra, settings = instance.hydra, repo["hydra"]["config.yaml"]
        instance.clear()
        try:
            repo["hydra"]["config.yaml"] = _settings_without_files()
            store(ENTRY, {"defaults": [DEFAULTS, USER, "_self_"]})
            store(DEFAULTS, {})
            store(USER, content)
            with initialize_config_dir(str(folder), job_name="forgefield", version_base="1.3"):
                yield
        finally:
            GlobalHydra.instance().clear()
            GlobalHydra.instance().hydra = hydra
            repo["hydra"]["config.yaml"] = settings
            for name in (ENTRY, DEFAULTS, USER):
                repo.pop(f"{name}.yaml", None)


def store(name: str, node: dict[str, Any]) -> None:
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name=name, node=node, provider="forgefield")


@cache
def _settings_without_files() -> Any:
    """Hydra's settings as it keeps them; it copies them for every composition."""
    from hydra.conf import HydraConf
    from hydra.core.config_store import ConfigNode

    return ConfigNode("config.yaml", OmegaConf.structured(HydraConf(defaults=[])), "hydra", None, "hydra")


# ---- resolvers


def int_div(dividend: object, divisor: object) -> int:
    """Quotient of two whole numbers, rounded down: 32, 5 -> 6."""
    a, b = _integer("int_div", dividend), _integer("int_div", divisor)
    if b == 0:
        raise ValueError(f"int_div cannot divide {a} by zero")
    return a // b


def int_mul(a: object, b: object) -> int:
    """Product of two whole numbers."""
    return _integer("int_mul", a) * _integer("int_mul", b)


RESOLVERS = {"int_div": int_div, "int_mul": int_mul}


def register_resolvers() -> None:
    """Register the resolvers with OmegaConf, once."""
    for name, function in RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, function)


def _integer(resolver: str, value: object) -> int:
    """`value` as an int. Text such as "8" counts, because `oc.env` always returns text."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"{resolver} takes whole numbers, not {value!r}")
