"""The data of `training`: systems, batch sizes and probabilities of systems become our `data` section."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from forgefield.config.deepmd.section import MISSING, Section, is_number
from forgefield.config.deepmd.types import with_names
from forgefield.errors import ForgefieldError

RULES = {"auto": "auto:N", "max": "max:N", "filter": "filter:N", "mixed": "mixed:N", "mix": "mix:N"}
ALIASES = {"auto_prob": ("auto_prob_style",), "sys_probs": ("sys_weights",), "numb_btch": ("numb_batch",)}


def translate_data(training: Section, species: list[str], type_names: dict[str, str] | None = None) -> dict[str, Any]:
    """`train`, `batch`, `sampling`, `val` and `eval_batch` of our `data` section.

    type_names: elements of types with other names.
    """
    names = type_names or {}
    section = training.below("training_data")
    if section is None:
        raise ForgefieldError(f"{training.file}: 'training.training_data' is missing; its key systems names the data.")
    data: dict[str, Any] = {"train": _sources(section, species, names), "batch": _batch(section)}
    sampling = _sampling(section)
    if sampling is not None:
        data["sampling"] = sampling
    section.only("min_pair_dist", 0.0, "frames with close atoms are not left out; take them out of the data")
    section.only("set_prefix", "set", "sets are the folders set.*")
    section.finish()
    validation = training.below("validation_data")
    data |= _validation(validation, species, names)
    shared = [name for name in _names(data["val"]) if name in _names(data["train"])]
    if shared and validation is not None:
        data["overlap"] = "allow"
        validation.notes[validation.path("systems")] = (
            f"{', '.join(shared[:3])}{' and others' if len(shared) > 3 else ''}: also in training_data, so validation errors "
            "are those of frames that the model knows."
        )
    return data


def _names(sources: Any) -> list[str]:
    """Paths of `data.train` or `data.val`."""
    entries = sources if isinstance(sources, list) else [] if sources is None else [sources]
    return [entry["path"] if isinstance(entry, dict) else entry for entry in entries]


def _validation(section: Section | None, species: list[str], type_names: dict[str, str]) -> dict[str, Any]:
    if section is None:
        return {"val": None}
    sources = _sources(section, species, type_names)
    data = {"val": [sources] if isinstance(sources, dict) else sources, "eval_batch": _evaluation_batch(section)}
    note = "every validation is over all of its frames, each once."
    for name in ("numb_btch", "sys_probs", "auto_prob"):
        value = section.take(name, also=ALIASES[name])
        if value is not None:
            section.notes[section.path(name)] = note
    section.only("set_prefix", "set", "sets are the folders set.*")
    section.finish()
    return data


# --- where frames are


def _sources(section: Section, species: list[str], type_names: dict[str, str]) -> Any:
    """What `data.train` or `data.val` is: a path, or a list of paths and of {path, type_map}."""
    systems = section.take("systems", MISSING)
    names = [systems] if isinstance(systems, str) else systems
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name.strip() for name in names):
        raise section.wrong("systems", systems, "a folder, or a list of folders")
    patterns = section.take("rglob_patterns")
    if patterns is not None and not (isinstance(patterns, list) and all(isinstance(p, str) for p in patterns)):
        raise section.wrong("rglob_patterns", patterns, "a list of patterns")
    sources = [entry for name in names for entry in _entries(name, patterns, section.file, species, type_names)]
    sources = [with_names(source, type_names) for source in sources]
    return sources[0] if len(sources) == 1 else sources


def _entries(
    name: str, patterns: list[str] | None, file: Path, species: list[str], type_names: dict[str, str]
) -> list[Any]:
    """One entry of `systems`: itself, or the systems below that folder as DeePMD-kit looks for them."""
    root = next((folder / name for folder in (Path.cwd(), file.absolute().parent) if (folder / name).exists()), None)
    if Path(name).suffix == ".lmdb" or (root is not None and (root / "data.mdb").is_file()):
        return [name if type_names else {"path": name, "type_map": species}]  # used if the file does not name its types
    if root is None or root.is_file():
        return [name]  # errors in it are reported by the reader
    looked = (
        root.rglob("type.raw")
        if patterns is None
        else (p / "type.raw" for pattern in patterns for p in root.rglob(pattern))
    )
    systems = sorted({path.parent for path in looked if path.is_file()})
    nameless = [system for system in systems if not (system / "type_map.raw").is_file()]
    if patterns is None and len(nameless) in (0, len(systems)) and _reads_as_systems(root, systems):
        return [{"path": name, "type_map": species} if nameless else name]
    paths = [f"{name.rstrip('/')}/{system.relative_to(root)}" for system in systems]
    return [
        {"path": path, "type_map": species} if system in nameless else path for path, system in zip(paths, systems)
    ] or [name]


def _reads_as_systems(root: Path, systems: list[Path]) -> bool:
    """Whether our reader finds these systems by the name of the folder alone: it takes structure files that lie in a folder
    for its content, and does not look for a system within a system."""
    if systems == [root]:
        return True
    nested = any(outer in inner.parents for outer, inner in pairwise(systems))
    return not nested and all(path.is_dir() for path in root.iterdir())


# --- how much makes a batch


def _batch(section: Section) -> dict[str, Any]:
    """The section `data.batch`: frames of one system, except for rules that mix systems."""
    rule, size = _batch_rule(section)
    if rule == "each":
        return {"by_source": size}
    if rule in ("frames", "mixed"):
        return {"frames": size, **({"by_source": True} if rule == "frames" and size > 1 else {})}
    if rule == "auto":
        return {"atoms": size, "bound": "lower", "by_source": True}
    oversized = "skip" if rule == "filter" else "alone"
    return {"atoms": size, "oversized": oversized, **({} if rule == "mix" else {"by_source": True})}


def _evaluation_batch(section: Section) -> dict[str, int]:
    """Our `data.eval_batch`: no number depends on it."""
    rule, size = _batch_rule(section)
    if rule == "each":
        return {"frames": min(size)}
    return {"frames" if rule in ("frames", "mixed") else "atoms": size}


def _batch_rule(section: Section) -> tuple[str, Any]:
    """(frames, n), (each, numbers of frames) or (rule, N)."""
    value = section.take("batch_size", "auto")
    if isinstance(value, list) and value and all(_is_size(item) for item in value):
        return ("each", value) if len(set(value)) > 1 else ("frames", value[0])
    if _is_size(value):
        return "frames", value
    if isinstance(value, str):
        rule, colon, number = value.partition(":")
        if value == "auto":
            return "auto", 32
        if rule in RULES and colon and number.strip().isdecimal() and int(number) > 0:
            return rule, int(number)
    raise section.wrong(
        "batch_size", value, f"a positive whole number, a list of them, auto, {', '.join(RULES.values())}"
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# --- how often systems are drawn


def _sampling(section: Section) -> Any:
    """The section `data.sampling`. By size means every frame as often as any other, which is the default."""
    style = section.text("auto_prob", "prob_sys_size", also=ALIASES["auto_prob"])
    chances = section.take("sys_probs", also=ALIASES["sys_probs"])
    if chances is not None:
        numbers = isinstance(chances, list) and all(is_number(chance) for chance in chances)
        if not numbers or not chances:
            raise section.wrong("sys_probs", chances, "a list of numbers, one for each system")
        total = sum(chance for chance in chances if chance >= 0)
        if total > 1 + 1e-8 or (total < 1 - 1e-8 and min(chances) >= 0):
            raise section.refused("sys_probs", f"add up to {total:g}, not to 1")
        return [float(chance) for chance in chances]
    if style == "prob_sys_size":
        return None
    if style == "prob_uniform":
        return "uniform"
    if style.startswith("prob_sys_size;"):
        return style
    raise section.wrong("auto_prob", style, "prob_uniform, prob_sys_size or 'prob_sys_size;start:stop:weight;...'")
