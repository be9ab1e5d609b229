"""What a Python script constructs, read from its syntax tree: nothing in it is imported or executed.

Assignments of literals, of containers of them and of calls are followed in their order. What is neither is `Unknown`, which is
an error only where its value is needed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forgefield.config.sources import read_text
from forgefield.errors import ForgefieldError

LARGEST_SCRIPT = 1 << 20
"""Characters of a script."""


@dataclass(frozen=True)
class Unknown:
    """An expression that is not followed. text: the expression. line: where it is."""

    text: str
    line: int


@dataclass(frozen=True)
class Name:
    """A name that the script imports, such as that of a class. text: its last part."""

    text: str


@dataclass(frozen=True)
class Made:
    """A call of a class or function. name: its last part; of a class method, `Class.method`. line: where it is."""

    name: str
    line: int
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def bound(self, names: Sequence[str], file: Path) -> dict[str, Any]:
        """All arguments by name. names: of the positional ones."""
        if len(self.args) > len(names):
            raise ForgefieldError(f"{file}, line {self.line}: {self.name} has too many positional arguments.")
        return {**dict(zip(names, self.args)), **self.options}


def is_matsciml_script(path: Path) -> bool:
    """Whether this is a Python file that names the package."""
    return path.suffix == ".py" and "matsciml" in read_text(path)


def calls_of(path: Path) -> list[Made]:
    """The calls of a script in their order, those in arguments of others included."""
    text = read_text(path)
    if len(text) > LARGEST_SCRIPT:
        raise ForgefieldError(f"{path} is longer than a training script should be.")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise ForgefieldError(f"{path}{'' if line is None else f', line {line}'}: this is not valid Python.") from error
    reader = _Reader()
    try:
        reader.read(tree.body)
    except RecursionError as error:
        raise ForgefieldError(f"{path}: its expressions are nested too deeply.") from error
    return reader.calls


class _Reader:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.calls: list[Made] = []

    def read(self, body: Sequence[ast.stmt]) -> None:
        """Follow the statements; blocks and functions as if they were executed once, in their order."""
        for statement in body:
            if isinstance(statement, ast.Assign):
                value = self.value(statement.value)
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        self.values[target.id] = value
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
                self.values[statement.target.id] = self.value(statement.value)
            elif isinstance(statement, ast.Expr):
                self.value(statement.value)
            else:
                for block in _blocks(statement):
                    self.read(block)

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.values.get(node.id, Name(node.id))
        if isinstance(node, ast.Attribute):
            return Name(node.attr)
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Dict):
            pairs = [
                (None if key is None else self.value(key), self.value(item))
                for key, item in zip(node.keys, node.values)
            ]
            merged: dict[Any, Any] = {}
            for key, item in pairs:
                merged |= item if key is None and isinstance(item, dict) else {str(key): item}
            return merged
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            operand = self.value(node.operand)
            if isinstance(operand, (int, float)):
                return -operand
        if isinstance(node, ast.Call):
            return self._call(node)
        return Unknown(ast.unparse(node), node.lineno)

    def _call(self, node: ast.Call) -> Any:
        args = tuple(self.value(item) for item in node.args)
        options: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                options[keyword.arg] = value
            elif isinstance(value, dict):
                options |= value
            else:
                options["**"] = Unknown(ast.unparse(keyword.value), node.lineno)
        made = Made(_callee(node.func), node.lineno, args, options)
        self.calls.append(made)
        return made


def _callee(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if not isinstance(node, ast.Attribute):
        return ""
    owner = _callee(node.value)
    return f"{owner.rpartition('.')[2]}.{node.attr}" if owner[:1].isupper() else node.attr


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list) and not isinstance(statement, ast.ClassDef):
            yield block
