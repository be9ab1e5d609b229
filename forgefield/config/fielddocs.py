"""The docstrings under the fields of an options dataclass.

With them each setting is documented once, where it is defined.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Field name -> its docstring as one line; fields without one are left out."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    docs = {}
    for statement, following in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = _string(following)
            if text is not None:
                docs[statement.target.id] = " ".join(text.split())
    return docs


def class_doc(cls: type) -> str | None:
    """First docstring of the class as one line. (A dataclass without one gets its signature, which says nothing.)"""
    text = cls.__doc__
    return None if text is None or text.startswith(f"{cls.__name__}(") else " ".join(text.split())


def _string(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else None
    return None
