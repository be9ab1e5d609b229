"""Descriptors in DeePMD-kit's files: for each type how its tree is read and written, and how checkpoints become such a tree.

A tree holds settings and arrays, as `serialize()` of DeePMD-kit returns it; a checkpoint holds the settings of the input and
arrays by their names in DeePMD-kit's PyTorch modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from forgefield.errors import ForgefieldError
from forgefield.models.deeppot.deepmd_attention import attention_from_checkpoint, attention_from_tree, attention_tree
from forgefield.models.deeppot.deepmd_networks import Arrays, Tree
from forgefield.models.deeppot.deepmd_three_body import (
    three_body_from_checkpoint,
    three_body_from_tree,
    three_body_tree,
)
from forgefield.models.deeppot.deepmd_two_body import (
    FittingInputs,
    two_body_from_checkpoint,
    two_body_from_tree,
    two_body_tree,
)
from forgefield.models.deeppot.descriptor import Descriptor
from forgefield.models.deeppot.hybrid import Hybrid
from forgefield.models.deeppot.options import ALIASES, descriptor_part


@dataclass(frozen=True)
class DescriptorForm:
    """A type of descriptor in DeePMD-kit's files.

    read: tree and number of species -> options and state. from_checkpoint: settings with their defaults, arrays without the
    prefix `descriptor.`, number of species -> tree. write: descriptor, requested slots for neighbours and the fitting networks
    that read it -> tree.
    """

    read: Callable[[Tree, int], tuple[Tree, Arrays]]
    from_checkpoint: Callable[[Tree, Arrays, int], Tree]
    write: Callable[[Any, list[int] | None, FittingInputs], Tree]


def _write_attention(descriptor: Any, sel: list[int] | None, fitting: FittingInputs) -> Tree:
    if sel is not None:
        kind = descriptor.options.type
        raise ForgefieldError(f"a model with {kind} keeps the sel it was trained with; leave --sel out.")
    return attention_tree(descriptor)


def _read_hybrid(tree: Tree, n_species: int) -> tuple[Tree, Arrays]:
    sections, state = [], dict[str, np.ndarray]()
    outer = cutoff_of_tree(tree)
    for number, part in enumerate(tree["list"]):
        options, arrays = descriptor_from_tree(part, n_species)
        rcut = cutoff_of_tree(part)
        if rcut < outer:
            _refuse_far_slots(f"descriptor.list[{number}]", options)
        sections.append({**options, "rcut": rcut})
        state |= {f"parts.{number}.{name}": value for name, value in arrays.items()}
    return {"type": "hybrid", "list": sections}, state


def _refuse_far_slots(where: str, options: Tree) -> None:
    """Raise for a part of a hybrid in which neighbours beyond its cutoff, but within that of the hybrid, have an effect: in
    DeePMD-kit they take slots."""
    shifted = bool(np.any(np.asarray(options.get("davg", 0.0))))
    has_attention = options["type"].startswith("se_atten")
    excluded = shifted and bool(options.get("exclude_types"))
    rough = has_attention and options.get("attn_layer", 0) and not options.get("smooth_type_embedding", True)
    if excluded or (has_attention and shifted) or rough:
        problem = (
            "exclude_types"
            if excluded
            else "means (set_davg_zero: false)"
            if shifted
            else "an attention that is not smooth"
        )
        raise ForgefieldError(
            f"{where} is a {options['type']} with {problem} and a shorter cutoff than the hybrid: in DeePMD-kit the neighbours "
            "between the two cutoffs change its result, which is not supported."
        )


def _hybrid_from_checkpoint(section: Tree, arrays: Arrays, n_species: int) -> Tree:
    parts = []
    for number, part in enumerate(section["list"]):
        prefix = f"descrpt_list.{number}."
        inside = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
        parts.append(descriptor_from_checkpoint(part, inside, n_species))
    return {**section, "list": parts}


def _write_hybrid(descriptor: Hybrid, sel: list[int] | None, fitting: FittingInputs) -> Tree:
    if sel is not None:
        raise ForgefieldError(
            "the parts of a hybrid get slots for the neighbours of the training data, each within its cutoff; leave --sel out."
        )
    first, trees = fitting.first, []
    for part in descriptor.parts:
        trees.append(descriptor_tree(part, None, replace(fitting, first=first)))
        first += part.dim_out
    return {"@class": "Descriptor", "type": "hybrid", "@version": 1, "list": trees}


TWO_BODY = DescriptorForm(two_body_from_tree, two_body_from_checkpoint, two_body_tree)
ATTENTION = DescriptorForm(
    lambda tree, n_species: attention_from_tree(tree),
    lambda section, arrays, n_species: attention_from_checkpoint(section, arrays),
    _write_attention,
)
FORMS: dict[str, DescriptorForm] = {
    "se_e2_a": TWO_BODY,
    "se_e2_r": TWO_BODY,
    "se_e3": DescriptorForm(three_body_from_tree, three_body_from_checkpoint, three_body_tree),
    "se_atten": ATTENTION,
    "se_atten_v2": ATTENTION,
    "hybrid": DescriptorForm(_read_hybrid, _hybrid_from_checkpoint, _write_hybrid),
}
"""By Forgefield's names of descriptors; `options.ALIASES` has the other names of DeePMD-kit."""


def _form(kind: str) -> DescriptorForm:
    name = ALIASES.get(kind, kind)
    if name not in FORMS:
        raise ForgefieldError(f"the model has the descriptor {kind}; supported are {', '.join(FORMS)}.")
    return FORMS[name]


def descriptor_from_tree(tree: Tree, n_species: int) -> tuple[Tree, Arrays]:
    """Options of the section `model.descriptor` and state of the descriptor."""
    return _form(tree["type"]).read(tree, n_species)


def cutoff_of_tree(tree: Tree) -> float:
    """Cutoff, A, of a descriptor: of a hybrid the largest of its parts."""
    return max(map(cutoff_of_tree, tree["list"])) if tree["type"] == "hybrid" else float(tree["rcut"])


def descriptor_from_checkpoint(section: Mapping[str, Any], arrays: Arrays, n_species: int) -> Tree:
    """The tree of a descriptor from its section of an input and its arrays in a checkpoint."""
    kind = str(section.get("type", "se_e2_a"))
    form = _form(kind)
    if kind == "hybrid":
        return form.from_checkpoint(dict(section), arrays, n_species)
    defaults = asdict(descriptor_part({"type": kind})[1])
    if "smooth_type_embedding" in defaults:  # inputs have another default than the class that reads them
        defaults["smooth_type_embedding"] = True
    return form.from_checkpoint({**defaults, **section}, arrays, n_species)


def descriptor_tree(descriptor: Descriptor[Any], sel: list[int] | None, fitting: FittingInputs) -> Tree:
    """The descriptor as DeePMD-kit's class `Descriptor`. sel: see `DescriptorForm.write`."""
    return _form(descriptor.options.type).write(descriptor, sel, fitting)
