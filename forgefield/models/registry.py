"""From the `model:` section of a config to a potential: name, preset and options are checked, then made explicit.

`resolve_model` turns what the user wrote and what the data says into one plain dict with every number in it; from
that dict alone `build_model` makes the potential, so a run can be rebuilt without its data. A user's own model is named
by its import path; it is imported only where `trust`, the caller's decision, allows it.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from forgefield.config.components import builtin_class, import_class, user_module_folder
from forgefield.config.nearest import did_you_mean
from forgefield.config.peer_terms import KEYS
from forgefield.config.trust import NO_CODE, Trust, code_of_model
from forgefield.errors import ForgefieldError
from forgefield.kinds import FRAMES, POINTS, kind_of_model
from forgefield.models.heads.direct import DirectOutput, DirectOutputs
from forgefield.models.heads.heads import check_heads, complete_heads, head_options
from forgefield.models.interface import ExtraOutput, RegisteredModel
from forgefield.models.potential import Potential
from forgefield.models.predictor import Predictor

BUILT_IN = {
    "nequip": "forgefield.models.nequip.model.NequIP",
    "allegro": "forgefield.models.allegro.model.Allegro",
    "deeppot": "forgefield.models.deeppot.model.DeepPot",
    "schnet": "forgefield.models.invariant.schnet.SchNet",
    "painn": "forgefield.models.invariant.painn.PaiNN",
    "egnn": "forgefield.models.invariant.egnn.EGNN",
    "cgcnn": "forgefield.models.invariant.cgcnn.CGCNN",
    "pyg": "forgefield.models.adapters.pyg.PyG",
    "mace_like": "forgefield.models.adapters.mace_like.MaceLike",
    "ase_like": "forgefield.models.adapters.ase_like.AseLike",
    "calculator": "forgefield.models.adapters.calculator.CalculatorModel",
}
"""Models by name; each class has `Options`, `presets` and `complete`, and `check_options` where options have parts."""
PRECISIONS = {"float32": torch.float32, "float64": torch.float64}
MODULE_FOLDER = "module_folder"
"""Resolved options of a user's own model: where its module was found, if Python would not find it by itself."""
PREDICTS = "predicts"
"""Resolved options of a model with further outputs: `energy`, whether it has one, and `heads`, options of each in full; with
`own` these are what is said of outputs that the model gives by itself."""
REFERENCES = "reference_energies"
"""Resolved options of a user's own model that knows nothing of the data's energies: what is added for each species, eV."""
OWN = "own"
HEADS = "heads"
_GIVEN_BY_US = ("species", "cutoff", "adaptive_cutoff", "max_neighbours", "statistics")


def model_class(name: str, folder: str | None = None, *, trust: Trust = NO_CODE) -> Any:
    """Class of a built-in model, or of the user's own by import path; its module may lie in `folder`."""
    if name in POINTS.models:
        return POINTS.models[name].load()
    if name in BUILT_IN:
        return builtin_class(BUILT_IN[name])
    if "." not in name:
        raise ForgefieldError(
            f"model.name is '{name}', which is neither a built-in model ({', '.join([*BUILT_IN, *POINTS.models])}) "
            f"nor an import path like my_package.MyModel.{did_you_mean(name, [*BUILT_IN, *POINTS.models])}"
        )
    return import_class(name, nn.Module, where="model.name", trust=trust, folders=[] if folder is None else [folder])


def adapted_class(found: Any, options: Mapping[str, Any], *, trust: Trust) -> dict[str, Any]:
    """For an adapter, {"make": what `model.module` names}, a class of the kind that it adapts; nothing for other models."""
    kind = found.adapts if issubclass(found, RegisteredModel) else None
    if kind is None:
        return {}
    path, folder = options.get("module"), options.get(MODULE_FOLDER)
    if not path:
        raise ForgefieldError("model.module is missing: the import path of the model, such as my_package.MyModel.")
    folders = [] if folder is None else [folder]
    made = import_class(str(path), kind, where="model.module", trust=trust, folders=folders, factories=True)
    return {"make": made}


def check_model(options: Mapping[str, Any], *, trust: Trust = NO_CODE) -> tuple[str, Any, dict[str, Any]]:
    """Name, class and options of a model section; refuses all that can be seen to be wrong without the data."""
    given = _plain(options)
    name = given.pop("name", None)
    if "from" in given and name is None:
        raise ForgefieldError(
            f"model.from is {given['from']}, which starts a training from that run; for anything else name the run itself."
        )
    if not isinstance(name, str):
        raise ForgefieldError(f"model.name is missing; built in: {', '.join(BUILT_IN)}.")
    found = model_class(name, trust=trust)
    if kind_of_model(name) is not FRAMES:
        check_keys(found.Options, given, where="model", what="this model")
        found.Options(**given)
        return name, found, given
    for key in _GIVEN_BY_US:
        if key in given:
            raise ForgefieldError(f"model.{key} cannot be set: it comes from the data section.")
    if MODULE_FOLDER in given:
        raise ForgefieldError(f"model.{MODULE_FOLDER} cannot be set: it is where the module of model.name was found.")
    if PREDICTS in given:
        raise ForgefieldError(f"model.{PREDICTS} cannot be set: it follows from the task section.")
    if _has_our_heads(name, found):
        check_heads(given.pop(HEADS, None))
    if name in BUILT_IN:
        _check_built_in(found, given, trust)
    return name, found, given


def _has_our_heads(name: str, found: Any) -> bool:
    """Whether `model.heads` is ours; a user's own class may have an argument of that name."""
    return name in BUILT_IN or HEADS not in inspect.signature(found.__init__).parameters


def resolve_model(
    options: Mapping[str, Any],
    *,
    species: Sequence[str],
    cutoff: float,
    adaptive_cutoff: float | None = None,
    max_neighbours: int | None = None,
    statistics: Any = None,
    heads: Mapping[str, Mapping[str, Any]] | None = None,
    has_energy: bool = True,
    units: Mapping[str, str] | None = None,
    trust: Trust = NO_CODE,
) -> dict[str, Any]:
    """The model section with everything explicit: checked options, presets and numbers from the data filled in.

    `cutoff`, `adaptive_cutoff` (A), `max_neighbours`: as in the data section. `statistics`: of the training data (an
    object or a dict), needed where options leave a number to it. `heads`: further outputs, by name, with what task and data
    say of each (`HeadOptions`). `has_energy`: whether energies, forces or stress are wanted. `units`: of those outputs that are
    trained and that the model gives by itself (`direct_outputs`). `trust`: whether `options` may name code that is not
    Forgefield's. The result is JSON-able.
    """
    name, found, given = check_model(options, trust=trust)
    made = _plain(options).get(HEADS) if _has_our_heads(name, found) else None
    completed = complete_heads(made, heads or {})
    facts = _plain(
        asdict(statistics) if is_dataclass(statistics) and not isinstance(statistics, type) else statistics or {}
    )
    resolved: dict[str, Any] = {"name": name, "species": list(species), "cutoff": float(cutoff)}
    if adaptive_cutoff is not None:
        _check_adaptive(found, name, float(cutoff), adaptive_cutoff)
        resolved["adaptive_cutoff"] = float(adaptive_cutoff)
    if max_neighbours is not None:
        resolved["max_neighbours"] = int(max_neighbours)
    if completed:
        resolved[PREDICTS] = {"energy": bool(has_energy), HEADS: _plain(completed)}
    if name in BUILT_IN:
        full = resolved | _resolve_built_in(found, given, resolved, facts, trust)
        own = _direct_outputs(found, full)
        return full | ({PREDICTS: _described(own, units or {})} if own else {})
    folder = user_module_folder(name)
    own = _resolve_user_model(found, name, given, facts, has_energy)
    return resolved | own | ({} if folder is None else {MODULE_FOLDER: str(folder)})


def names_same_code(section: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Whether resolved options call the code that a config's `model` section names, with the arguments that it gives.

    Arguments that Forgefield adds (species, statistics, numbers of the data) are left out of the comparison.
    """
    section = _plain(section)
    if section.get("name") != stored.get("name") or [*code_of_model(section)] != [*code_of_model(stored)]:
        return False
    if stored.get("name") in BUILT_IN:
        given, kept = section.get("options") or {}, dict(stored.get("options") or {})
        added = [kept.pop(key) for key in list(kept) if key not in given]
        return _equal(given, kept) and all(_only_numbers(value) for value in added)
    added_by_us = {*_GIVEN_BY_US, MODULE_FOLDER, PREDICTS}
    references = stored.get(REFERENCES)
    if REFERENCES not in section and isinstance(references, dict) and _only_numbers([*references.values()]):
        added_by_us.add(REFERENCES)
    given = {key: value for key, value in section.items() if key != HEADS or HEADS in stored}
    return _equal(given, {key: value for key, value in stored.items() if key not in added_by_us})


def with_found_folder(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Resolved options with the folder where this process found the module of the config, in place of the stored one."""
    adapts = stored.get("name") in BUILT_IN
    folder = user_module_folder(str(stored["module"] if adapts else stored["name"]))
    found = None if folder is None else str(folder)
    kept = {key: value for key, value in stored.items() if key != MODULE_FOLDER}
    return kept | ({MODULE_FOLDER: found} if adapts or found is not None else {})


def _equal(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _only_numbers(value: Any) -> bool:
    return all(map(_only_numbers, value)) if isinstance(value, list) else isinstance(value, (int, float, type(None)))


def branch_names(options: Mapping[str, Any]) -> list[str]:
    """Names of the branches of a model, in the order of their numbers; none for most models. options: resolved or not."""
    return sorted(options.get("branches") or {}) if options.get("name") == "deeppot" else []


def direct_outputs(options: Mapping[str, Any], *, trust: Trust = NO_CODE) -> dict[str, Any]:
    """What the model of this section gives by itself in place of energies, by name; nothing for most models."""
    _, found, given = check_model(options, trust=trust)
    return _direct_outputs(found, given)


def _direct_outputs(found: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    return dict(found.direct_outputs(options)) if issubclass(found, RegisteredModel) else {}


def _described(outputs: Mapping[str, Any], units: Mapping[str, str]) -> dict[str, Any]:
    """Those that are trained or always given, for `PREDICTS`."""
    chosen = {name: facts for name, facts in sorted(outputs.items()) if facts.always or name in units}
    return {"energy": False, OWN: True, HEADS: {n: asdict(f) | {"unit": units.get(n, "")} for n, f in chosen.items()}}


def extra_outputs_of(resolved: Mapping[str, Any]) -> Mapping[str, ExtraOutput]:
    """What a model with these resolved options gives beside energy, forces and stress, by name."""
    predicts = resolved.get(PREDICTS, {})
    if not predicts.get(OWN):
        return head_options(predicts.get(HEADS, {}))
    return {name: DirectOutput(**facts) for name, facts in predicts[HEADS].items()}


def model_statistics(
    options: Mapping[str, Any],
    batches: Callable[[], Iterable[Mapping[str, torch.Tensor]]],
    *,
    species: Sequence[str],
    cutoff: float,
    trust: Trust = NO_CODE,
) -> dict[str, Any]:
    """What a model wants to know of the training data beyond its `Statistics`; to be added to the `statistics` of
    `resolve_model`. Empty for models that ask for nothing.

    batches: called where the model does ask: training data with edges made for `cutoff`, A.
    """
    _, found, given = check_model(options, trust=trust)
    if not issubclass(found, RegisteredModel):
        return {}
    return found.measure(given, batches, species=tuple(species), cutoff=float(cutoff))


def build_model(resolved: Mapping[str, Any], *, precision: str, seed: int, trust: Trust = NO_CODE) -> Potential:
    """Potential from resolved options. Weights depend on `seed` alone; the global random state is left as it was.

    trust: whether `resolved` may name code that is not Forgefield's.
    """
    if precision not in PRECISIONS:
        raise ForgefieldError(f"training.precision is '{precision}'; choose one of {', '.join(PRECISIONS)}.")
    options = dict(resolved)
    folder = options.pop(MODULE_FOLDER, None)
    found = model_class(options.pop("name"), folder, trust=trust)
    max_neighbours, predicts = options.get("max_neighbours"), options.pop(PREDICTS, None)
    references = None
    if resolved["name"] in BUILT_IN:
        options.pop("max_neighbours", None)
        told = {key: options.pop(key) for key in _GIVEN_BY_US if key in options}
        options |= {MODULE_FOLDER: folder} if MODULE_FOLDER in found.Options.__dataclass_fields__ else {}
        told |= adapted_class(found, options, trust=trust)
        model = found(
            found.Options(**options),
            **told,
            dtype=PRECISIONS[precision],
            generator=torch.Generator().manual_seed(seed),
        )
    else:
        if REFERENCES not in inspect.signature(found.__init__).parameters:
            references = options.pop(REFERENCES, None)
        model = _build_user_model(found, options, PRECISIONS[precision], seed)
    potential = _around(model, resolved, predicts, max_neighbours, PRECISIONS[precision], seed)
    if references is not None:
        potential.add_reference_energies(references)
    return potential


def _around(
    model: Any, resolved: Mapping[str, Any], predicts: Any, max_neighbours: int | None, dtype: torch.dtype, seed: int
) -> Potential:
    """The potential or predictor around a model. predicts: `PREDICTS` of the resolved options."""
    if predicts is None:
        return Potential(model, max_neighbours=max_neighbours)
    if predicts.get(OWN):
        return DirectOutputs(model, extra_outputs_of(resolved), max_neighbours=max_neighbours)
    return Predictor(
        model,
        head_options(predicts[HEADS]),
        has_energy=predicts["energy"],
        max_neighbours=max_neighbours,
        dtype=dtype,
        seed=seed,
    )


def _check_built_in(found: Any, given: Mapping[str, Any], trust: Trust) -> None:
    preset = given.get("preset")
    if preset is not None and str(preset).upper() not in found.presets:
        choice = f"choose one of {', '.join(found.presets)}" if found.presets else "this model has none"
        raise ForgefieldError(f"model.preset is '{preset}'; {choice}.")
    options = {key: value for key, value in given.items() if key != "preset"}
    check_keys(found.Options, options, where="model", what="this model", also=("preset",))
    found.check_options(options, **adapted_class(found, options, trust=trust))


def check_keys(options: type, given: Mapping[str, Any], *, where: str, what: str, also: Sequence[str] = ()) -> None:
    """Raise for a key that the dataclass `options` does not have, or a value that is not of its kind.

    where: section that holds the keys. what: who has these options, for the message. also: further valid keys, for the hint.
    """
    known = [field.name for field in fields(options)]
    hints = typing.get_type_hints(options)
    for key, value in given.items():
        if key not in known:
            hint = f" Did you mean '{KEYS[key]}'?" if key in KEYS else did_you_mean(key, [*known, *also])
            raise ForgefieldError(f"{where}.{key} is not an option of {what}.{hint}")
        if not _matches(value, hints[key]):
            raise ForgefieldError(f"{where}.{key} is {value!r}; it must be {_in_words(hints[key])}.")


def _check_adaptive(found: Any, name: str, cutoff: float, adaptive_cutoff: float) -> None:
    registered = issubclass(found, RegisteredModel)
    takes = found.supports_adaptive_cutoff if registered else "adaptive_cutoff" in _parameters(found)
    if not takes:
        raise ForgefieldError(
            f"data.adaptive_cutoff is {adaptive_cutoff:g}, but the model {name} has no argument adaptive_cutoff: "
            "its interactions would end at the cutoff all the same; set data.adaptive_cutoff to null."
        )
    if not adaptive_cutoff > cutoff:
        raise ForgefieldError(f"data.adaptive_cutoff is {adaptive_cutoff}; it must be above data.cutoff={cutoff:g}.")


def _parameters(found: Any) -> Mapping[str, inspect.Parameter]:
    """Arguments of a class."""
    return inspect.signature(found.__init__).parameters


def _resolve_built_in(
    found: Any, given: dict[str, Any], resolved: Mapping[str, Any], facts: dict[str, Any], trust: Trust
) -> dict[str, Any]:
    preset = given.pop("preset", None)
    defaults = found.preset_options(str(preset).upper(), given) if preset is not None else {}
    options = found.Options(**{**defaults, **given})
    told = {key: value for key, value in resolved.items() if key in ("cutoff", "adaptive_cutoff")}
    told |= adapted_class(found, {**defaults, **given}, trust=trust)
    species = tuple(resolved["species"])
    return _plain(asdict(found.complete(options, species=species, statistics=facts, **told)))


def _resolve_user_model(
    found: Any, name: str, given: dict[str, Any], facts: dict[str, Any], has_energy: bool
) -> dict[str, Any]:
    """Options of a user's own class. Reference energies are added for it unless it asks for them or for the statistics."""
    parameters = list(inspect.signature(found.__init__).parameters.values())[1:]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for key in given:
        if key not in named and not takes_any:
            raise ForgefieldError(f"model.{key} is not an argument of {name}.{did_you_mean(key, named)}")
    for key, parameter in named.items():
        if parameter.default is parameter.empty and key not in given and key not in (*_GIVEN_BY_US, REFERENCES):
            raise ForgefieldError(f"model.{key} is missing: {name} has no default for it.")
    if "statistics" in named:
        return given | {"statistics": facts}
    references = facts.get("reference_energies") or {}
    if REFERENCES in named:
        return ({REFERENCES: references} if references else {}) | given
    return given | ({REFERENCES: references} if has_energy and any(references.values()) else {})


def _build_user_model(found: Any, options: dict[str, Any], dtype: torch.dtype, seed: int) -> nn.Module:
    """An instance of the user's class, its weights drawn from a random state of its own."""
    named = inspect.signature(found.__init__).parameters
    options = {"adaptive_cutoff": None, "max_neighbours": None} | options
    given = {key: value for key, value in options.items() if key not in _GIVEN_BY_US or key in named}
    default = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            model = found(**given)
        finally:
            torch.set_default_dtype(default)
    if not hasattr(model, "species"):
        model.species = tuple(options["species"])
    if not hasattr(model, "cutoff"):
        model.cutoff = float(options["cutoff"])
    return model


def _plain(value: Any) -> Any:
    """The same with dicts, lists and Python numbers only."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) or type(value).__name__ == "ListConfig":
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") and not isinstance(value, torch.Tensor) else value


def _matches(value: Any, hint: Any) -> bool:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(_matches(value, part) for part in typing.get_args(hint))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is list:
        return isinstance(value, list) and all(_matches(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_matches(item, args[1]) for item in value.values())
    return isinstance(value, hint)


def _in_words(hint: Any) -> str:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(_in_words(part) for part in typing.get_args(hint))
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", type(None): "null"}
    names |= {list[int]: "a list of whole numbers", dict[str, float]: "a number for each name"}
    names |= {list[float]: "a list of numbers", list[bool]: "a list of true and false"}
    names |= {list[list[int]]: "a list of pairs of whole numbers"}
    others = {dict: "a mapping", list: "a list"}
    return names.get(hint) or others.get(typing.get_origin(hint)) or str(hint)  # type: ignore[arg-type]
