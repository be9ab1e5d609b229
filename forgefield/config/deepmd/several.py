"""Inputs with several models at once (`model_dict`, `loss_dict`, `data_dict`): branches of one model with a common descriptor.

What several of them share is named in `shared_dict`. Each branch is translated like a separate input; then they are put
together, and what cannot be put together is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forgefield.config.deepmd.data import translate_data
from forgefield.config.deepmd.loss import translate_loss
from forgefield.config.deepmd.model import Model, translate_model
from forgefield.config.deepmd.section import Section, is_number
from forgefield.errors import ForgefieldError

SHARED = ("type_map", "descriptor", "fitting_net")


class Shared:
    """The content of `shared_dict`, and which branch uses what of it."""

    def __init__(self, section: Section | None, file: Path) -> None:
        self.file = file
        self.values = {} if section is None else {name: section.take(name) for name in section.names()}
        self.used: dict[str, dict[str, str]] = {}
        """Branch -> kind of part -> name of the shared one."""

    def expand(self, branch: str, model: object) -> dict[str, Any]:
        """The model of a branch with names replaced by what they stand for."""
        if not isinstance(model, Mapping):
            raise ForgefieldError(f"{self.file}: 'model.model_dict.{branch}' must be a section, not {model!r:.60}.")
        expanded = dict(model)
        for kind in SHARED:
            if isinstance(expanded.get(kind), str):
                expanded[kind] = self._look_up(branch, kind, expanded[kind])
        return expanded

    def _look_up(self, branch: str, kind: str, reference: str) -> Any:
        where = f"{self.file}: 'model.model_dict.{branch}.{kind}'"
        name, colon, level = reference.partition(":")
        if name not in self.values:
            raise ForgefieldError(
                f"{where} is '{reference}', and 'model.shared_dict' has {', '.join(self.values) or 'nothing'}."
            )
        if colon and level.strip() != "0":
            raise ForgefieldError(f"{where} shares '{name}' at level {level}; here parts are shared whole (level 0).")
        self.used.setdefault(branch, {})[kind] = name
        return self.values[name]

    def finish(self) -> None:
        used = {name for parts in self.used.values() for name in parts.values()}
        for name in self.values:
            if name not in used:
                raise ForgefieldError(f"{self.file}: 'model.shared_dict.{name}' is used by no branch; take it out.")


class Branches:
    """A multi-task input, branch by branch.

    model, training: sections of the input. root: the input. elements: of the atom types, where the user gave them.
    """

    def __init__(self, root: Section, model: Section, training: Section, elements: Sequence[str] | None) -> None:
        self.root, self.training, self.file = root, training, root.file
        shared = Shared(model.below("shared_dict"), self.file)
        branches = model.take("model_dict")
        if not isinstance(branches, Mapping) or len(branches) < 2:
            raise model.wrong("model_dict", branches, "a section with a model for each of several branches")
        names = [str(name) for name in branches if not str(name).startswith("_")]
        common = {name: model.take(name) for name in model.names()}
        self.models = {}
        for name in names:
            content = {**common, **shared.expand(name, branches[name])}
            self._note_aliases(name, content.pop("model_branch_alias", None))
            self.models[name] = translate_model(
                Section(content, self.file, f"model.model_dict.{name}", root.notes), elements
            )
        shared.finish()
        self.shared = shared
        self._require_common()

    @property
    def names(self) -> list[str]:
        return list(self.models)

    def _note_aliases(self, name: str, aliases: object) -> None:
        """Other names of a branch are for the command line of DeePMD-kit."""
        key = f"model.model_dict.{name}.model_branch_alias"
        if aliases is None:
            return
        if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
            raise ForgefieldError(f"{self.file}: '{key}' must be a list of names, not {aliases!r:.60}.")
        if aliases:
            self.root.notes[key] = f"select this branch by its name: --head {name}."

    def _require_common(self) -> None:
        """One descriptor and one type map for all; fitting networks differ, if at all, in their seeds."""
        first, model = next(iter(self.models.items()))
        for name, other in self.models.items():
            where = f"{self.file}: 'model.model_dict.{name}"
            names = [self.shared.used.get(branch, {}).get("descriptor") for branch in (first, name)]
            if names[0] is None or names[0] != names[1]:
                raise ForgefieldError(
                    f"{where}.descriptor' is not the one of {first}; branches share their descriptor here: name one of "
                    "'model.shared_dict' in all of them, or train them with inputs of their own."
                )
            if other.species != model.species:
                raise ForgefieldError(f"{where}.type_map' differs from that of {first}; branches have one type map.")
            if other.fitting["type"] != "ener":
                raise ForgefieldError(
                    f"{where}.fitting_net.type' is {other.fitting['type']}; branches are energies here. Train it with an "
                    "input of its own."
                )
            if other.spin:
                raise ForgefieldError(f"{where}.spin': branches have no spins here. Train it with an input of its own.")
            if other.precision != model.precision or _outside(other) != _outside(model):
                raise ForgefieldError(
                    f"{where}' differs from {first} in more than its fitting network, which branches cannot here."
                )

    def model(self) -> Model:
        """One model with a branch for each."""
        first = next(iter(self.models.values()))
        options = {key: value for key, value in first.options.items() if key not in ("fitting_net", "out_bias")}
        owners: dict[str, str] = {}
        branches: dict[str, Any] = {}
        for name, model in self.models.items():
            shared = self.shared.used.get(name, {}).get("fitting_net")
            section: dict[str, Any] = {"fitting_net": model.fitting}
            if shared in owners:
                section = {"share": owners[shared]}
            elif shared is not None:
                owners[shared] = name
            if "out_bias" in model.options:
                section["out_bias"] = model.options["out_bias"]
            branches[name] = section
        options["fitting_net"] = {"type": "ener"}
        fields = {key: value for model in self.models.values() for key, value in model.fields.items()}
        return Model(
            {**options, "branches": branches}, first.species, first.cutoff, first.precision, fields, first.type_names
        )

    def task(self) -> dict[str, Any]:
        """Our `task`: targets of each branch."""
        tasks = {}
        losses = _by_branch(self.root, "loss_dict", self.names, required=False)
        for name, model in self.models.items():
            section = Section(losses.get(name, {}), self.file, f"loss_dict.{name}", self.root.notes)
            tasks[name] = translate_loss(
                section, model.fitting, model.species, {}, model.options.get("atom_exclude_types", ())
            ).task
        return {"branches": tasks}

    def data(self) -> dict[str, Any]:
        """Our `data`: sources of all branches, and how often each is drawn."""
        first = next(iter(self.models.values()))
        parts = {}
        for name, content in _by_branch(self.training, "data_dict", self.names).items():
            section = Section(content, self.file, f"training.data_dict.{name}", self.root.notes)
            parts[name] = translate_data(section, first.species, first.type_names)
            section.note("stat_file", "statistics are kept by themselves, for any run with the same data.")
            section.finish()
        val = [entry for name, part in parts.items() for entry in _of_branch(part["val"], name)]
        data: dict[str, Any] = {"train": [e for name, part in parts.items() for e in _of_branch(part["train"], name)]}
        data |= {"batch": self._batch(parts), "sampling": self._sampling(parts), "val": val or None}
        if val:
            data["eval_batch"] = next(part["eval_batch"] for part in parts.values() if part["val"] is not None)
        if any("overlap" in part for part in parts.values()):
            data["overlap"] = "allow"
        return data

    def _batch(self, parts: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Batches hold frames of one system, as there."""
        rules: list[dict[str, Any]] = [part["batch"] for part in parts.values()]
        if any(rule.get("frames", 1) > 1 and not rule.get("by_source") for rule in rules):
            raise self.training.refused("data_dict", "has a batch_size 'mixed:N'; a batch is of one branch here")
        if all(rule == rules[0] for rule in rules) and not isinstance(rules[0].get("by_source"), list):
            return rules[0]
        sizes: list[int] = []
        for part in parts.values():
            entries = part["train"] if isinstance(part["train"], list) else [part["train"]]
            by_source = part["batch"].get("by_source")
            frames = by_source if isinstance(by_source, list) else [part["batch"].get("frames")] * len(entries)
            if None in frames or len(frames) != len(entries):
                raise self.training.refused("data_dict", "has different rules for batch_size; give numbers of frames")
            sizes += frames
        return {"by_source": sizes}

    def _epochs(self, epochs: object, probabilities: object) -> dict[str, float]:
        """How often the data of each branch is used in the whole training."""
        if probabilities:
            raise self.training.refused(
                "num_epoch_dict", "determines probabilities, and model_prob gives others; keep one"
            )
        numbers = _by_branch(Section({"num_epoch_dict": epochs}, self.file, "training"), "num_epoch_dict", self.names)
        for name, number in numbers.items():
            if not is_number(number) or number <= 0:
                raise self.training.refused(
                    "num_epoch_dict", f"has {number!r:.40} for {name}; it should be a number above 0"
                )
        return numbers

    def _sampling(self, parts: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        rules = {str(part.get("sampling")): part.get("sampling") for part in parts.values()}
        if len(rules) > 1 or next(iter(rules.values())) not in (None, "uniform"):
            raise self.training.refused(
                "data_dict", "gives probabilities of systems; within a branch systems are drawn by size or alike"
            )
        size = next(iter(rules.values())) or "size"
        epochs = self.training.take("num_epoch_dict")
        probabilities = self.training.take("model_prob")
        if epochs:
            return {"epochs": self._epochs(epochs, probabilities), "rule": size}
        if probabilities:
            probabilities = _by_branch(
                Section({"model_prob": probabilities}, self.file, "training"), "model_prob", self.names
            )
        return {"branches": probabilities or "auto", "rule": size}


def _outside(model: Model) -> dict[str, Any]:
    """What branches have in common: all but the fitting network and its bias."""
    common = {key: value for key, value in model.options.items() if key not in ("fitting_net", "out_bias")}
    return {**common, "cutoff": model.cutoff}


def _by_branch(section: Section, key: str, names: list[str], *, required: bool = True) -> dict[str, Any]:
    """A section that has an entry for each branch."""
    values = section.take(key, None if required else {})
    if not isinstance(values, Mapping):
        raise section.wrong(key, values, f"a section with an entry for each of {', '.join(names)}")
    sections = {str(name): value for name, value in values.items() if not str(name).startswith("_")}
    for name in sections:
        if name not in names:
            raise ForgefieldError(
                f"{section.file}: '{section.path(key)}.{name}' is for a branch that 'model.model_dict' does not have "
                f"({', '.join(names)})."
            )
    missing = [name for name in names if name not in sections]
    if missing and required:
        raise ForgefieldError(f"{section.file}: '{section.path(key)}.{missing[0]}' is missing.")
    return {name: sections[name] for name in names if name in sections}


def _of_branch(sources: object, branch: str) -> list[dict[str, Any]]:
    """Sources of `data.train` or `data.val`, each for this branch."""
    entries = [] if sources is None else sources if isinstance(sources, list) else [sources]
    return [{**(entry if isinstance(entry, dict) else {"path": entry}), "branch": branch} for entry in entries]
