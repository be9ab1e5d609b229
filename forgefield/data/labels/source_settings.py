"""Names of labels and units of a single source: `{path: a.xyz, labels: {energy: E_total}, units: {energy: eV/atom}}`.

They take the place of the corresponding settings in `data.labels` and `data.units`. A source of frames carries them as text, so
that it can be compared, cached and sent to another process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from forgefield.config.nearest import did_you_mean
from forgefield.data.options import LabelOptions, UnitOptions
from forgefield.errors import ForgefieldError

_OF_FIELDS = ("key", "factor", "species", "values", "cumulative")
"""Settings of a field that may differ between sources. Its shape, and whether atoms have it, may not."""


def source_settings(spec: Mapping[str, Any]) -> str:
    """The settings in a source's `labels` and `units`, as text; empty if there are none."""
    settings = {}
    for section, options in (("labels", LabelOptions), ("units", UnitOptions)):
        values = spec.get(section)
        if values is None:
            continue
        known = [item.name for item in fields(options)]
        if not isinstance(values, Mapping) or not values:
            raise ForgefieldError(
                f"the {section} of {spec['path']} are {values!r}; they must be a mapping of {', '.join(known)}"
            )
        for name in values:
            if name not in known:
                hint = did_you_mean(str(name), known) or f" There are: {', '.join(known)}."
                raise ForgefieldError(f"the {section} of {spec['path']} have an unknown key '{name}'.{hint}")
        settings[section] = {name: _checked(value, name, section, spec["path"]) for name, value in values.items()}
    return json.dumps(settings, sort_keys=True) if settings else ""


def _checked(value: object, name: str, section: str, path: object) -> object:
    if section == "labels" and name == "fields":
        if not isinstance(value, Mapping) or not all(isinstance(item, Mapping) for item in value.values()):
            raise ForgefieldError(
                f"labels.fields of {path} is {value!r}; it must be a mapping such as {{gap: {{key: Eg}}}}"
            )
        for field, item in value.items():
            for key in item:
                if key not in _OF_FIELDS:
                    raise ForgefieldError(
                        f"labels.fields.{field}.{key} of {path}: only {', '.join(_OF_FIELDS)} may differ between sources; set "
                        f"data.labels.fields.{field}.{key}"
                    )
        return {field: dict(item) for field, item in value.items()}
    if not isinstance(value, str) or not value:
        raise ForgefieldError(f"{section}.{name} of {path} is {value!r}; it must be text")
    return value


def of_source(labels: LabelOptions, units: UnitOptions, settings: str) -> tuple[LabelOptions, UnitOptions]:
    """`data.labels` and `data.units` with the settings of a source."""
    given = json.loads(settings)
    names = dict(given.get("labels", {}))
    for field, values in names.pop("fields", {}).items():
        if labels.fields is None or field not in labels.fields:
            raise ForgefieldError(
                f"a source has labels.fields.{field}, but data.labels.fields has no '{field}'; add it there"
            )
        whole = labels.fields[field]
        whole = {"per": whole} if isinstance(whole, str) else dict(whole or {})
        labels = replace(labels, fields={**labels.fields, field: whole | values})
    return replace(labels, **names), replace(units, **given.get("units", {}))


def described(settings: str) -> str:
    """The settings of a source, for messages."""
    given = json.loads(settings)
    return ", ".join(f"{section}.{name}={value}" for section in given for name, value in given[section].items())


def names_in(settings: str) -> set[str]:
    """The labels that the settings of a source name; fields as `fields.NAME`."""
    labels = json.loads(settings).get("labels", {})
    return {*(labels.keys() - {"fields"}), *(f"fields.{name}" for name in labels.get("fields", {}))}
