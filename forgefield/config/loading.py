"""From a YAML file (a DeePMD-kit input, a mapping) and overrides to one checked config.

Hydra composes: `key=value`, `+`, `++`, `~`, defaults lists and config groups in the file's folder mean what they mean
there. Declared defaults apply to everything else. Afterwards every key, type and value is checked, interpolations are
resolved and variables that the user defined are removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from forgefield.config.checking import (
    check_keys,
    check_values,
    declared_fields,
    refuse_lists,
    schema_keys,
    typed_config,
    unknown_key,
)
from forgefield.config.components import also_look_in
from forgefield.config.deepmd import is_deepmd_input, read_input, translate
from forgefield.config.hydra import DEFAULTS, ENTRY, RESOLVERS, USER, hydra_for, register_resolvers, store
from forgefield.config.matsciml import is_matsciml_script, matsciml_translation
from forgefield.config.nearest import did_you_mean
from forgefield.config.nequip import is_nequip_config, nequip_translation
from forgefield.config.sources import Sources, first_line, read_text, read_yaml
from forgefield.config.trust import Trust, named_code, refuse_interpolations
from forgefield.errors import ForgefieldError
from forgefield.settings import Config, as_dict, has_points
from forgefield.tasks.options import as_written

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override

COMPONENTS = ("model", "training.optimizer", "training.scheduler", "training.weighting", "trainer.*")
"""Settings that describe one object by its name and options: a mapping with a name replaces what is there."""
REPLACED_AS_A_WHOLE = (
    "task",
    "task.*.species_weights",
    "task.*.schedule",
    "task.*.normalise",
    "data.train",
    "data.val",
    "data.test",
    "data.batch",
    "data.eval_batch",
    "data.sampling",
    "data.reference_energies",
    "data.points.energies",
    "data.points.descriptors",
    "tune",
    "training.early_stopping",
    "training.lr_groups",
    "training.monitor_weights",
    "training.lora",
    "trainer.max_time",
    "model.*",
)
"""Settings whose mapping is one value: as an override it replaces the old value. Other mappings are merged."""
INITIAL_MODEL = {"which": "best", "shifts": "keep"}
"""Settings of `model.from`, a model that is taken from a run: its weights, and whether its energy shifts are fitted."""
Source = str | Path | Mapping[str, Any] | Config
"""What a config is read from: a file, plain values, or a loaded config."""
PRESETS = Path(__file__).parent / "presets"


def load_config(
    source: Source | None,
    overrides: Sequence[str] = (),
    *,
    trust_code: bool = False,
) -> Config:
    """The checked config of a file, a mapping, or (None) the defaults alone, with `overrides` as on the command line.

    All defaults are present, interpolations are resolved, files under `data` are absolute, and `name` is the stem
    of the file unless it is set. From then on, user modules are also searched next to the file.

    Nothing is imported here, but what a config names is imported when it is used. A file in a run folder is part of the run: it
    may name code only where `trust_code` allows it, and modules next to it are not imported.
    """
    register_resolvers()
    sources, content, folder = _read(source, overrides)
    composed = _compose(content, list(overrides), sources, folder)
    of_run = sources.main is not None and (folder / "run.json").exists()
    if of_run:
        refuse_interpolations([composed, sources.scalars], folder)
    variables = _variables(composed, [*_texts(composed), *_texts(content), *sources.scalars], sources)
    check_keys(composed, sources, variables=variables)
    values = _resolved(composed, sources)
    config = typed_config({key: value for key, value in values.items() if key not in variables}, sources)
    config.trainer = {} if config.trainer is None else config.trainer
    config.callbacks = [] if config.callbacks is None else config.callbacks
    if config.name is None and sources.main is not None:
        config.name = sources.main.stem
    if isinstance(config.model, Mapping) and "from" in config.model:
        config.model = {"from": config.model["from"], **INITIAL_MODEL, **config.model}
        if config.data.points is None and not (sources.explicit("data.cutoff") or _in(content, "data.cutoff")):
            config.data.cutoff = None
    check_values(config, sources)
    config.data.make_paths_absolute([Path.cwd(), folder])
    if of_run:
        trust = Trust(f"{sources.main}, the config of a run,", trust_code, never_from=folder)
        for where, path in named_code(asdict(config)):
            trust.require(path, where)
    elif sources.main is not None:
        also_look_in(folder)
    config.sources = sources
    return config


def override_config(config: Config, overrides: Sequence[str], *, allowed: Sequence[str], verb: str) -> Config:
    """A loaded config with overrides, of which only keys under `allowed` make sense for `verb`."""
    for text in overrides:
        key = _parse([text])[0].key_or_group
        if not any(key == name or key.startswith(f"{name}.") for name in allowed):
            hint = "" if unknown_key(key) is None else did_you_mean(key, allowed)
            raise ForgefieldError(
                f"command line ('{text}'): '{key}' does not apply to {verb}, which takes {', '.join(allowed)}.{hint}"
            )
    return load_config(config, overrides)


def override_keys(overrides: Sequence[str]) -> list[str]:
    """The dotted keys that overrides set."""
    return [item.key_or_group for item in _parse(overrides)]


def require_training_data(config: Config, file: str | Path | None = None) -> None:
    """Refuse a config that names no data to train on. (An imported model's config has none, and that is fine.)"""
    if config.data.train in (None, []):
        prefix = f"{file}: " if file is not None else ""
        raise ForgefieldError(f"{prefix}'data.train' is missing: name the file, folder or pattern to train on.")


def preset_path(name: str) -> Path:
    """The file of a config that comes with Forgefield."""
    path = PRESETS / f"{name}.yaml"
    if not path.exists():
        names = sorted(file.stem for file in PRESETS.glob("*.yaml"))
        raise ForgefieldError(f"there is no built-in config '{name}'.{did_you_mean(name, names)}")
    return path


# --- reading and composing


def _read(source: Source | None, overrides: Sequence[str]) -> tuple[Sources, dict[str, Any], Path]:
    """Locations of the keys, content and folder of a source."""
    if source is None:
        return Sources(), {}, Path.cwd()
    if isinstance(source, (str, Path)):
        path = Path(source).expanduser()
        if is_matsciml_script(path):
            return Sources(main=path, translated=True), matsciml_translation(path).config, path.absolute().parent
        content = read_input(path)
        if is_deepmd_input(content):
            return (
                Sources(main=path, translated=True),
                translate(content, path, given_species(overrides)),
                path.absolute().parent,
            )
        if is_nequip_config(content):
            config = nequip_translation(content, path).config
            return Sources(main=path, translated=True), config, path.absolute().parent
        if path.suffix == ".json":
            raise ForgefieldError(
                f"{path} is not an input of DeePMD-kit, which has the sections 'model' and 'training', and a config of "
                "Forgefield is YAML; `forgefield init DATA` writes one."
            )
        return Sources(main=path), content, path.absolute().parent
    if isinstance(source, Config):
        return Sources(), as_dict(source), Path.cwd()
    values = OmegaConf.to_container(source, resolve=False) if isinstance(source, DictConfig) else source
    if not isinstance(values, Mapping):
        raise ForgefieldError(f"a config must be a file, a mapping or a loaded config, not a {type(source).__name__}.")
    content = {str(key): as_written(value) if key == "task" else value for key, value in values.items()}
    return Sources(), content, Path.cwd()


def given_species(overrides: Sequence[str]) -> list[str] | None:
    """The value of the override `data.species`: elements of the atom types of an input of DeePMD-kit."""
    values = [item.value() for item in _parse(overrides) if item.key_or_group == "data.species"]
    return [str(symbol) for symbol in values[-1]] if values and isinstance(values[-1], list) else None


def _compose(content: dict[str, Any], overrides: list[str], sources: Sources, folder: Path) -> dict[str, Any]:
    """Let Hydra put defaults, files and overrides together. Interpolations stay unresolved."""
    from hydra import compose
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    parsed = _parse(overrides)
    with hydra_for(folder, content):
        loader = GlobalHydra.instance().config_loader()
        groups = [item for item in parsed if _is_group(loader, item)]
        try:
            if "defaults" in content or groups:
                _note_files(loader, [str(item.input_line) for item in groups], sources, folder)
            else:
                _note_main(sources)
            refuse_lists(content, sources)
            if sources.in_files("hydra"):
                raise ForgefieldError(
                    f"{sources.where('hydra')}: 'hydra' settings have no effect in Forgefield; leave them out."
                )
            for item in parsed:
                if item not in groups:
                    sources.add_override(item.key_or_group, item.value(), str(item.input_line))
            named = [name for item in parsed for name in _groups(loader, item)]
            lines = [
                line
                for item in parsed
                for line in ([str(item.input_line)] if item in groups else _lines(item, content, sources, named))
            ]
            store(DEFAULTS, _defaults(content, sources))
            composed = OmegaConf.to_container(compose(ENTRY, lines), resolve=False)
        except yaml.YAMLError as error:
            raise _yaml_error(error) from error
        except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:
            raise _composition_error(error, overrides, sources) from error
    replaced = [key for item in parsed for key in _replaced(item)]
    for key in sources.missing:
        overridden = any(name == key for name, _ in sources.overrides)
        if not overridden and not any(key.startswith(f"{name}.") for name in replaced):
            raise ForgefieldError(f"{sources.where(key)}: '{key}' is ???, a value that must be given.")
    assert isinstance(composed, dict)
    return {str(key): value for key, value in composed.items()}


def _parse(overrides: Sequence[str]) -> list[Override]:
    """Hydra's parsed overrides; refuses what cannot be read and lists of values to try."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, parsed = OverridesParser.create(), []
    for text in overrides:
        try:
            item = parser.parse_override(text)
        except HydraException as error:
            raise ForgefieldError(
                f"command line: '{text}' cannot be read as key=value; put values with special characters into "
                "quotes inside quotes, as in 'name=\"a, b\"'."
            ) from error
        if item.is_sweep_override():
            raise ForgefieldError(
                f"command line: '{text}' gives several values, and one run takes one; write [a,b] for a list, "
                "or quote a value that holds a comma."
            )
        parsed.append(item)
    return parsed


def _is_group(loader: ConfigLoader, item: Override) -> bool:
    """Whether the override picks a file of a config group (`model=big`), as Hydra decides it."""
    return item.key_or_group in _groups(loader, item) and not isinstance(item.value(), dict)


def _groups(loader: ConfigLoader, item: Override) -> list[str]:
    parent = item.key_or_group.rpartition("/")[0]
    prefix = f"{parent}/" if parent else ""
    return [prefix + name for name in loader.list_groups(parent)]


def _note_main(sources: Sources) -> None:
    """Record the keys of the file that the user named, unless it is an input of another program."""
    if sources.main is not None and not sources.translated:
        sources.add_text(read_text(sources.main), sources.main)


def _note_files(loader: ConfigLoader, groups: list[str], sources: Sources, folder: Path) -> None:
    """Record the keys of every file that the defaults lists bring in, in the order in which they count."""
    from hydra.types import RunMode

    for default in loader.compute_defaults_list(ENTRY, groups, RunMode.RUN).defaults:
        path = folder / f"{default.config_path}.yaml"
        if default.config_path == USER:
            _note_main(sources)
        internal = default.config_path in (ENTRY, DEFAULTS, USER) or str(default.config_path).startswith("hydra/")
        if not internal and path.is_file():
            package = default.package or ""
            sources.add_text(path.read_text(encoding="utf-8"), path, "" if package == "_global_" else package)


def _lines(item: Override, content: Mapping[str, Any], sources: Sources, groups: Sequence[str]) -> list[str]:
    """The overrides for Hydra that one override becomes. Hydra merges mappings; if the result would be an unintended mixture
    (the options of one scheduler with the name of another), the old value is removed first.
    """
    line, lines = _prefixed(item, content, sources), []
    for key in _replaced(item):
        if item.is_add() and (sources.in_files(key) or _in(content, key)):
            raise ForgefieldError(
                f"command line ('{item.input_line}'): the config gives '{key}' already; leave out the + to replace it."
            )
        lines += _emptying(key, content, sources) if key in groups else [f"++{key}=null"]
    return [*lines, line]


def _replaced(item: Override) -> list[str]:
    """Keys whose value an override replaces instead of merging."""

    def walk(key: str, value: object) -> Iterator[str]:
        if not isinstance(value, dict):
            return
        named = "name" in map(str, value) and any(fnmatchcase(key, pattern) for pattern in COMPONENTS)
        named = named or (key == "model" and "from" in map(str, value))
        if named or any(fnmatchcase(key, pattern) for pattern in REPLACED_AS_A_WHOLE):
            yield key
        else:
            for name, below in value.items():
                yield from walk(f"{key}.{name}", below)

    return [] if item.is_delete() else list(walk(item.key_or_group, item.value()))


def _emptying(section: str, content: Mapping[str, Any], sources: Sources) -> list[str]:
    """Overrides that leave nothing in a section that is a config group, too: those cannot be set to null in Hydra."""
    keys = [*sources.lines, *(name for name, _ in sources.overrides)]
    names = {name.split(".")[1] for name in keys if name.startswith(f"{section}.")}
    inside = content.get(section)
    names |= set(map(str, inside)) if isinstance(inside, Mapping) else set()
    # Set and then removed: what is not there, or is null, cannot be removed.
    return [line for name in sorted(names) for line in (f"++{section}.{name}=0", f"~{section}.{name}")]


def _prefixed(item: Override, content: Mapping[str, Any], sources: Sources) -> str:
    """An override as Hydra needs it: the schema's keys can be set whether the file mentions them or not."""
    key, text = str(item.key_or_group), str(item.input_line)
    is_variable = key.partition(".")[0] not in schema_keys() and sources.in_files(key)
    if not is_variable:
        fields = declared_fields(content)
        if fields is None and sources.in_files("data.labels.fields"):  # in another file; judged when all are together
            fields = key.split(".")[1:2]
        points = has_points(content) or sources.explicit("data.points")
        hint = unknown_key(key, fields, points=points)
        if hint is not None:
            if "." not in key:
                hint = did_you_mean(key, content) or hint
            raise ForgefieldError(f"command line ('{text}'): unknown key '{key}'.{hint}")
    if item.is_delete():
        if not sources.in_files(key) and not _in(content, key):
            raise ForgefieldError(
                f"command line ('{text}'): the config does not give '{key}', so there is nothing to remove; "
                f"'{key}=null' turns an optional setting off."
            )
        return text
    if key.startswith("task.") and not sources.in_files("task") and not isinstance(content.get("task"), Mapping):
        raise ForgefieldError(
            f"command line ('{text}'): the config has no 'task' section, so the data decides what is trained; "
            "to change that give all of it, as in 'task={energy: {weight: 1}, forces: {weight: 10}}'."
        )
    if item.is_add() and (sources.in_files(key) or _in(content, key)):
        return text
    return text if is_variable or item.is_force_add() else f"++{text.lstrip('+')}"


def _in(content: object, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(content, Mapping) or part not in content:
            return False
        content = content[part]
    return True


def _defaults(content: Mapping[str, Any], sources: Sources) -> dict[str, Any]:
    """The schema's defaults as plain values. A model that the user names replaces the default model and its options."""
    defaults = deepcopy(_schema_defaults())
    # Untyped, so that a misplaced list or mapping is reported by Forgefield's checks, not as a merge error of OmegaConf.
    defaults["trainer"] = defaults["callbacks"] = None
    named = sources.explicit("model.name") or sources.explicit("model.from")
    if content.get("model") is not None or sources.in_files("model") or named:
        defaults["model"] = None
    elif has_points(content) or sources.explicit("data.points"):
        defaults["model"] = {"name": "ldos"}
    return defaults


@cache
def _schema_defaults() -> dict[str, Any]:
    return asdict(Config())


def _composition_error(error: Exception, overrides: Sequence[str], sources: Sources) -> ForgefieldError:
    """Hydra's words as one sentence."""
    detail = " ".join(str(error).split())
    cause = error.__cause__
    if cause is not None and str(cause) and str(cause) not in detail:
        detail += f" ({first_line(cause)})"
    guilty = next((f"command line ('{text}')" for text in overrides if text in detail), None)
    where = guilty or (str(sources.main) if sources.main is not None else "config")
    return ForgefieldError(f"{where}: {detail.replace(USER, str(sources.main or 'config')).rstrip('.')}.")


def _yaml_error(error: yaml.YAMLError) -> ForgefieldError:
    """What is wrong with a file that Hydra could not read."""
    mark = getattr(error, "problem_mark", None)
    if mark is not None and Path(mark.name).is_file():
        try:
            read_yaml(Path(mark.name))
        except ForgefieldError as clear:
            return clear
    return ForgefieldError(f"config: this is not valid YAML: {first_line(error)}.")


# --- variables and interpolation


def _variables(composed: Mapping[str, Any], texts: Sequence[str], sources: Sources) -> list[str]:
    """Top-level keys that the user defined: plain values to which an interpolation in `texts` refers."""
    sections = {key for key in schema_keys() if "." not in key}
    variables = []
    for key, value in composed.items():
        if key in sections or isinstance(value, Mapping):
            continue
        reference = re.compile(
            r"\$\{\s*(oc\.(select|dict\.keys|dict\.values):\s*)?\.*" + re.escape(key) + r"\s*[.}\[,]"
        )
        if any(reference.search(text) for text in texts):
            variables.append(key)
        else:
            hint = unknown_key(key) or ""
            raise ForgefieldError(
                f"{sources.where(key)}: unknown key '{key}'.{hint} (A variable of your own must be used: ${{{key}}}.)"
            )
    return variables


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for below in value.values():
            yield from _texts(below)
    elif isinstance(value, (list, tuple)):
        for below in value:
            yield from _texts(below)


def _resolved(composed: Mapping[str, Any], sources: Sources) -> dict[str, Any]:
    """Plain values with every interpolation replaced by what it stands for."""
    config = OmegaConf.create(dict(composed))
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        raise ForgefieldError(f"{sources.where(key)}: '{key}' {_why(error, config)}.") from error
    for text in _texts(values):
        if "${" in text:
            raise ForgefieldError(f"{sources.where('')}: '{text}': a literal '${{' cannot be written in a config.")
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _why(error: OmegaConfBaseException, config: DictConfig) -> str:
    message = first_line(error)
    variable = re.search(r"Environment variable '(.*)' not found", message)
    if variable:
        return f"needs the environment variable '{variable[1]}', which is not set"
    if isinstance(error, InterpolationKeyError):
        missing = re.search(r"Interpolation key '(.*)' not found", message)
        name = missing[1] if missing else "?"
        keys = [str(key) for key in config] + schema_keys()
        return f"refers to '{name}', which the config does not have{_aside(name, keys)}"
    if isinstance(error, UnsupportedInterpolationType):
        name = message.rpartition(" ")[2]
        resolvers = [*RESOLVERS, "oc.env", "oc.select", "oc.decode", "oc.create", "oc.dict.keys", "oc.dict.values"]
        hint = _aside(name, resolvers) or f" (known: {', '.join(resolvers)})"
        return f"uses the unknown resolver '{name}'{hint}"
    return f"cannot be resolved: {message}"


def _aside(name: str, candidates: Sequence[str]) -> str:
    hint = did_you_mean(name, candidates).strip()
    return f" ({hint[0].lower()}{hint[1:]})" if hint else ""
