"""JSON and YAML texts from strangers: nesting and aliases cannot exhaust the stack, the memory or the reader's patience."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import yaml

DEEPEST = 100
"""Levels of nesting in a YAML document."""
MOST_VALUES, LARGEST_SHARE = 10_000, 1
"""Values of a YAML document where every alias is replaced by what it stands for: this many, or this many for each character.
Without aliases there are never more values than characters."""


def load_json(text: str | bytes, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value in a JSON text; whatever is wrong with the text is a ValueError."""
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def compose_yaml_node(text: str, loader: object = yaml.SafeLoader) -> yaml.Node | None:
    """The tree of a YAML document, checked: whatever is wrong with the text is a yaml.YAMLError."""
    try:
        _has_aliases(text, loader)
        root = yaml.compose(text, Loader=loader)
        nodes: dict[int, tuple[int, int] | None] = {}
        count, _ = (0, 0) if root is None else _unfolded(root, nodes)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except ValueError as error:  # a character or an escape that does not exist
        raise yaml.YAMLError(str(error)) from None
    if count > MOST_VALUES and count > LARGEST_SHARE * len(text):
        raise yaml.YAMLError(f"its aliases unfold to {count} values, too many for a text of {len(text)} characters")
    return root


def load_yaml(text: str) -> Any:
    """The plain values of a YAML document, checked as above."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if _has_aliases(text, loader):
        compose_yaml_node(text, loader)
    try:
        return yaml.load(text, Loader=loader)
    except (ValueError, TypeError, RecursionError, AttributeError) as error:  # a value that is not what its tag says
        raise yaml.YAMLError(str(error)) from None


def _has_aliases(text: str, loader: object) -> bool:
    """Whether a document has aliases. Nesting is limited here, because the loader written in C overflows its stack."""
    depth, has_alias = 0, False
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        has_alias |= isinstance(event, yaml.AliasEvent)
        if depth > DEEPEST:
            raise yaml.YAMLError(f"it is nested more than {DEEPEST} levels deep")
    return has_alias


def _unfolded(node: yaml.Node, counted: dict[int, tuple[int, int] | None], depth: int = 1) -> tuple[int, int]:
    """Number of values in `node` with aliases unfolded, and levels of nesting.

    known: the same for nodes met before, by id; None for those that are being counted.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1, 1
    if id(node) not in counted:
        counted[id(node)] = None
        pairs = isinstance(node, yaml.MappingNode)
        parts = [part for pair in node.value for part in pair] if pairs else node.value
        counts = [_unfolded(part, counted, depth + 1) for part in parts]
        counted[id(node)] = 1 + sum(count for count, _ in counts), 1 + max((levels for _, levels in counts), default=0)
    total = counted[id(node)]
    if total is None:
        raise yaml.YAMLError(f"the alias in line {node.start_mark.line + 1} refers to itself")
    if depth + total[1] > DEEPEST:
        raise yaml.YAMLError(f"it is nested more than {DEEPEST} levels deep")
    return total
