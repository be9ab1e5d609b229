"""From the `model:` section of a config to resolved options: name, preset and options are checked, then made explicit.

`resolve_model` combines the options of the user with numbers from the data into one plain dict, from which `build_model` makes
the model; a run can therefore be rebuilt without its data. A user-defined model is named by its import path; it is imported
only if `trust`, the decision of the caller, allows it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor, nn

from forgefield.config.components import import_class, user_module_folder
from forgefield.config.nearest import did_you_mean
from forgefield.config.trust import NO_CODE, Trust, code_of_model
from forgefield.errors import ForgefieldError
from forgefield.kinds import FRAMES, POINTS, kind_of_model
from forgefield.models.edges import Batch
from forgefield.models.heads.options import check_heads, complete_heads, head_options
from forgefield.models.interface import DerivativeOutput, DirectOutput, ExtraOutput, RegisteredModel, Section
from forgefield.models.options import check_keys
from forgefield.models.registry import ARCHITECTURES, registered_class
from forgefield.models.resolved import DIRECT, HEADS, MODULE_FOLDER, PREDICTS, REFERENCES, VARIABLE

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = dict[str, Any]
"""Plain values by option, as in a config or in `run.json`."""
FROM_DATA = ("species", "cutoff", "adaptive_cutoff", "max_neighbours", "statistics")
"""Arguments of models that come from the data section."""


def model_class(name: str, folder: str | None = None, *, trust: Trust = NO_CODE) -> type[nn.Module]:
    """Class of a registered model, or of a user-defined one by import path. folder: where its module may be."""
    if name in POINTS.models:
        loaded: type[nn.Module] = POINTS.models[name].load()
        return loaded
    if name in ARCHITECTURES:
        return registered_class(name)
    if "." not in name:
        built_in = [*ARCHITECTURES, *POINTS.models]
        raise ForgefieldError(
            f"model.name is '{name}', which is neither a built-in model ({', '.join(built_in)}) "
            f"nor an import path like my_package.MyModel.{did_you_mean(name, built_in)}"
        )
    result: type[nn.Module] = import_class(
        name, nn.Module, where="model.name", trust=trust, folders=[] if folder is None else [folder]
    )
    return result


def adapted_class(
    model_class: type[RegisteredModel[Any]], options: Section, *, trust: Trust
) -> dict[Literal["make"], Callable[..., object]]:
    """For an adapter, {"make": what `model.module` names}, a class of the type that it adapts; empty for other models."""
    if model_class.adapts is None:
        return {}
    path, folder = options.get("module"), options.get(MODULE_FOLDER)
    if not path:
        raise ForgefieldError("model.module is missing: the import path of the model, such as my_package.MyModel.")
    folders = [] if folder is None else [folder]
    where = "model.module"
    return {
        "make": import_class(str(path), model_class.adapts, where=where, trust=trust, folders=folders, factories=True)
    }


def check_model(options: Mapping[str, Any], *, trust: Trust = NO_CODE) -> tuple[str, type[nn.Module], Options]:
    """Name, class and options of a model section; raises for everything that is wrong whatever the data."""
    section = plain_values(options)
    name = section.pop("name", None)
    if "from" in section and name is None:
        raise ForgefieldError(
            f"model.from is {section['from']}, which starts a training from that run; for anything else name the run itself."
        )
    if not isinstance(name, str):
        raise ForgefieldError(f"model.name is missing; built in: {', '.join(ARCHITECTURES)}.")
    cls = model_class(name, trust=trust)
    if kind_of_model(name) is not FRAMES:
        options_class: type[DataclassInstance] = cls.Options  # type: ignore[attr-defined]
        check_keys(options_class, section, where="model", what="this model")
        options_class(**section)
        return name, cls, section
    for key in FROM_DATA:
        if key in section:
            raise ForgefieldError(f"model.{key} cannot be set: it comes from the data section.")
    if MODULE_FOLDER in section:
        raise ForgefieldError(f"model.{MODULE_FOLDER} cannot be set: it is where the module of model.name was found.")
    if PREDICTS in section:
        raise ForgefieldError(f"model.{PREDICTS} cannot be set: it follows from the task section.")
    if _has_heads_section(name, cls):
        check_heads(section.pop(HEADS, None))
    if name in ARCHITECTURES:
        _check_registered(registered_class(name), section, trust)
    return name, cls, section


def _has_heads_section(name: str, cls: type[nn.Module]) -> bool:
    """Whether `model.heads` are Forgefield's heads; a user-defined class may have an argument of that name."""
    return name in ARCHITECTURES or HEADS not in inspect.signature(cls.__init__).parameters


def resolve_model(
    options: Mapping[str, Any],
    *,
    species: Sequence[str],
    cutoff: float,
    adaptive_cutoff: float | None = None,
    max_neighbours: int | None = None,
    statistics: object = None,
    heads: Mapping[str, Mapping[str, Any]] | None = None,
    has_energy: bool = True,
    units: Mapping[str, str] | None = None,
    trust: Trust = NO_CODE,
) -> Options:
    """The model section with everything explicit: checked options, presets and numbers from the data filled in.

    `cutoff`, `adaptive_cutoff` (A), `max_neighbours`: as in the data section. `statistics`: of the training data (an
    object or a dict), needed where options leave a number to it. `heads`: extra outputs by name, with the options that follow
    from task and data (`HeadOptions`). `has_energy`: whether energies, forces or stress are trained. `units`: of the outputs
    that are trained and that the model has itself (`direct_outputs`). `trust`: whether `options` may name code that is not
    Forgefield's. The result can be written as JSON.
    """
    name, cls, section = check_model(options, trust=trust)
    heads_section = plain_values(options).get(HEADS) if _has_heads_section(name, cls) else None
    completed = complete_heads(heads_section, heads or {})
    if is_dataclass(statistics) and not isinstance(statistics, type):
        statistics = asdict(statistics)
    facts: Options = plain_values(statistics or {})
    resolved: Options = {"name": name, "species": list(species), "cutoff": float(cutoff)}
    if adaptive_cutoff is not None:
        _check_adaptive(cls, name, float(cutoff), adaptive_cutoff)
        resolved["adaptive_cutoff"] = float(adaptive_cutoff)
    if max_neighbours is not None:
        resolved["max_neighbours"] = int(max_neighbours)
    if completed:
        resolved[PREDICTS] = {"energy": bool(has_energy), HEADS: plain_values(completed)}
    if name in ARCHITECTURES:
        registered = registered_class(name)
        full = resolved | _resolve_registered(registered, section, resolved, facts, trust)
        direct = registered.direct_outputs(full)
        if has_energy and (derived := registered.derivatives(full)):
            stored = full.get(PREDICTS, {}).get(HEADS, {}) | {name: asdict(output) for name, output in derived.items()}
            full = full | {PREDICTS: {"energy": True, HEADS: stored}}
        return full | ({PREDICTS: _describe(direct, units or {})} if direct else {})
    folder = user_module_folder(name)
    arguments = _resolve_user_model(cls, name, section, facts, has_energy)
    return resolved | arguments | ({} if folder is None else {MODULE_FOLDER: str(folder)})


def names_same_code(section: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Whether resolved options call the code that a config's `model` section names, with the arguments that it gives.

    Arguments that Forgefield adds (species, statistics, numbers of the data) are left out of the comparison.
    """
    section = plain_values(section)
    if section.get("name") != stored.get("name") or [*code_of_model(section)] != [*code_of_model(stored)]:
        return False
    if stored.get("name") in ARCHITECTURES:
        requested, stored_options = section.get("options") or {}, dict(stored.get("options") or {})
        added = [stored_options.pop(key) for key in list(stored_options) if key not in requested]
        return _equal(requested, stored_options) and all(_only_numbers(value) for value in added)
    added_by_forgefield = {*FROM_DATA, MODULE_FOLDER, PREDICTS}
    references = stored.get(REFERENCES)
    if REFERENCES not in section and isinstance(references, dict) and _only_numbers([*references.values()]):
        added_by_forgefield.add(REFERENCES)
    requested = {key: value for key, value in section.items() if key != HEADS or HEADS in stored}
    return _equal(requested, {key: value for key, value in stored.items() if key not in added_by_forgefield})


def with_current_folder(stored: Mapping[str, Any]) -> Options:
    """Resolved options with the folder of the module in this process instead of the stored one."""
    adapts = stored.get("name") in ARCHITECTURES
    folder = user_module_folder(str(stored["module"] if adapts else stored["name"]))
    module_folder = None if folder is None else str(folder)
    others = {key: value for key, value in stored.items() if key != MODULE_FOLDER}
    return others | ({MODULE_FOLDER: module_folder} if adapts or module_folder is not None else {})


def _equal(one: object, other: object) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _only_numbers(value: object) -> bool:
    return all(map(_only_numbers, value)) if isinstance(value, list) else isinstance(value, (int, float, type(None)))


def hooks_of(options: Section) -> type[RegisteredModel[Any]]:
    """The class whose hooks apply to a model: its own if it is registered, else the base class with the defaults."""
    name = options.get("name")
    return registered_class(name) if name in ARCHITECTURES else RegisteredModel


def branch_names(options: Section) -> list[str]:
    """Names of the branches of a model in the order of their numbers; empty for most models. options: resolved or not."""
    return hooks_of(options).branch_names(options)


def excluded_species(options: Section) -> tuple[int, ...]:
    """Indices of species whose atoms do not count in losses and errors; empty for most models. options: resolved or not."""
    return hooks_of(options).excluded_species(options)


def single_branch(
    resolved: Section, state: Mapping[str, Tensor] | None, name: str | None
) -> tuple[Options, dict[str, Tensor]]:
    """One branch as a model with one energy: its resolved options and its state (empty without `state`)."""
    return hooks_of(resolved).branch(resolved, state, name)


def direct_outputs(options: Mapping[str, Any], *, trust: Trust = NO_CODE) -> Mapping[str, DirectOutput]:
    """Outputs that the model of this section has instead of energies, by name; empty for most models."""
    name, _, section = check_model(options, trust=trust)
    return registered_class(name).direct_outputs(section) if name in ARCHITECTURES else {}


def networks_of(heads: Section) -> Options:
    """Those of `HEADS` that are networks, and not derivatives of the energy."""
    return {name: facts for name, facts in heads.items() if VARIABLE not in facts}


def derivative_outputs(options: Section) -> Mapping[str, DerivativeOutput]:
    """Outputs of a model that are derivatives of its energy in an input of atoms; empty for most models. options: resolved or
    not."""
    return hooks_of(options).derivatives(options)


def _describe(outputs: Mapping[str, DirectOutput], units: Mapping[str, str]) -> Options:
    """Those that are trained or always computed, for `PREDICTS`."""
    chosen = {name: facts for name, facts in sorted(outputs.items()) if facts.always or name in units}
    return {
        "energy": False,
        DIRECT: True,
        HEADS: {n: asdict(f) | {"unit": units.get(n, "")} for n, f in chosen.items()},
    }


def extra_outputs_of(resolved: Section) -> Mapping[str, ExtraOutput]:
    """Outputs of a model with these resolved options other than energy, forces and stress, by name."""
    predicts = resolved.get(PREDICTS, {})
    if not predicts.get(DIRECT):
        heads = predicts.get(HEADS, {})
        derived = {name: DerivativeOutput(**facts) for name, facts in heads.items() if VARIABLE in facts}
        return {**derived, **head_options(networks_of(heads))}
    return {name: DirectOutput(**facts) for name, facts in predicts[HEADS].items()}


def model_statistics(
    options: Mapping[str, Any],
    batches: Callable[[], Iterable[Batch]],
    *,
    species: Sequence[str],
    cutoff: float,
    trust: Trust = NO_CODE,
) -> dict[str, object]:
    """Statistics of the training data that a model needs in addition to `Statistics`, for `statistics` of `resolve_model`.
    Empty for most models.

    batches: training data with edges up to `cutoff`, A; called only by models that need it.
    """
    name, _, section = check_model(options, trust=trust)
    if name not in ARCHITECTURES:
        return {}
    return registered_class(name).measure(section, batches, species=tuple(species), cutoff=float(cutoff))


def _check_registered(model: type[RegisteredModel[Any]], section: Section, trust: Trust) -> None:
    preset = section.get("preset")
    if preset is not None and str(preset).upper() not in model.presets:
        choice = f"choose one of {', '.join(model.presets)}" if model.presets else "this model has none"
        raise ForgefieldError(f"model.preset is '{preset}'; {choice}.")
    options = {key: value for key, value in section.items() if key != "preset"}
    check_keys(model.Options, options, where="model", what="this model", also=("preset",))
    model.check_options(options, **adapted_class(model, options, trust=trust))


def _check_adaptive(cls: type[nn.Module], name: str, cutoff: float, adaptive_cutoff: float) -> None:
    parameters = inspect.signature(cls.__init__).parameters
    supported = "adaptive_cutoff" in parameters
    if issubclass(cls, RegisteredModel):
        supported = cls.supports_adaptive_cutoff
    if not supported:
        raise ForgefieldError(
            f"data.adaptive_cutoff is {adaptive_cutoff:g}, but the model {name} has no argument adaptive_cutoff: "
            "its interactions would end at the cutoff all the same; set data.adaptive_cutoff to null."
        )
    if not adaptive_cutoff > cutoff:
        raise ForgefieldError(f"data.adaptive_cutoff is {adaptive_cutoff}; it must be above data.cutoff={cutoff:g}.")


def _resolve_registered(
    model: type[RegisteredModel[Any]], section: Options, resolved: Section, facts: Options, trust: Trust
) -> Options:
    preset = section.pop("preset", None)
    defaults = model.preset_options(str(preset).upper(), section) if preset is not None else {}
    all_options = {**defaults, **section}
    completed = model.complete(
        model.Options(**all_options),
        species=tuple(resolved["species"]),
        cutoff=resolved["cutoff"],
        adaptive_cutoff=resolved.get("adaptive_cutoff"),
        statistics=facts,
        **adapted_class(model, all_options, trust=trust),
    )
    options: Options = plain_values(asdict(completed))
    return options


def _resolve_user_model(
    cls: type[nn.Module], name: str, arguments: Options, facts: Options, has_energy: bool
) -> Options:
    """Arguments of a user-defined class. Reference energies are added unless it has an argument for them or for statistics."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for key in arguments:
        if key not in named and not takes_any:
            raise ForgefieldError(f"model.{key} is not an argument of {name}.{did_you_mean(key, named)}")
    for key, parameter in named.items():
        if parameter.default is parameter.empty and key not in arguments and key not in (*FROM_DATA, REFERENCES):
            raise ForgefieldError(f"model.{key} is missing: {name} has no default for it.")
    if "statistics" in named:
        return arguments | {"statistics": facts}
    references = facts.get("reference_energies") or {}
    if REFERENCES in named:
        return ({REFERENCES: references} if references else {}) | arguments
    return arguments | ({REFERENCES: references} if has_energy and any(references.values()) else {})


def plain_values(value: Any) -> Any:
    """The same with dicts, lists and Python numbers only."""
    if isinstance(value, Mapping):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) or type(value).__name__ == "ListConfig":
        return [plain_values(item) for item in value]
    return value.item() if isinstance(value, (np.generic, np.ndarray)) else value
