"""Test folders mirror the packages; test files do not import one another: what several of them use is in `tests/support`.
The package stays typed: few annotations with `Any`, few ignored complaints of type checker and linter.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "forgefield"
OF_NO_PACKAGE = {"compatibility", "docs", "fuzz", "gpu"}
"""Folders of tests that concern several packages."""


def imported_modules(source: str) -> Iterator[str]:
    """Dotted names of all modules that `source` imports, and of the names it imports from them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_test_module(name: str) -> bool:
    first, *rest = name.split(".")
    return (first == "tests" or first == "") and any(part == "conftest" or part.startswith("test_") for part in rest)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from tests.training.test_resume import END", True),
        ("from tests.training import test_resume as resume", True),
        ("import tests.training.test_resume", True),
        ("def f():\n    from .test_resume import END", True),
        ("from tests.ldos.data.conftest import write_snapshot", True),
        ("from tests.support.resuming import END", False),
        ("from torch.testing import test_something", False),
    ],
)
def test_imports_of_test_files_are_recognised(source, expected):
    assert any(map(is_test_module, imported_modules(source))) is expected


def test_no_test_file_is_imported():
    offenders = {
        f"{path.relative_to(TESTS)}: {name}"
        for path in TESTS.rglob("*.py")
        for name in imported_modules(path.read_text())
        if is_test_module(name)
    }
    assert not offenders


def test_folders_are_those_of_the_packages():
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert not {str(folder) for folder in folders if folder.parts[:1] != () and not mirrors_a_package(folder)}


def mirrors_a_package(folder: Path) -> bool:
    return folder.parts[0] in OF_NO_PACKAGE or (PACKAGE / folder).is_dir()


# ---- types of the package

MOST_ANY = 150
MOST_IGNORED = 25


def sources() -> Iterator[tuple[Path, str]]:
    for path in PACKAGE.rglob("*.py"):
        yield path.relative_to(PACKAGE), path.read_text()


def plain_any(source: str) -> int:
    """Number of parameters and fields that are annotated as `Any` alone."""
    annotations = [
        node.annotation for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.arg, ast.AnnAssign))
    ]
    return sum(
        annotation is not None and ast.unparse(annotation) in ("Any", "typing.Any") for annotation in annotations
    )


def test_plain_any_is_counted():
    assert plain_any("def f(a: Any, *b: int) -> Any:\n    c: typing.Any = a\n    d: dict[str, Any] = {}") == 2


def test_few_parameters_and_fields_are_of_any_type():
    assert sum(plain_any(source) for _, source in sources()) <= MOST_ANY


def test_few_complaints_of_type_checker_and_linter_are_ignored():
    assert sum(len(re.findall(r"# (?:type: ignore|noqa)", source)) for _, source in sources()) < MOST_IGNORED


def test_settings_leave_the_config_package_as_dataclasses():
    assert not [path for path, source in sources() if path.parts[0] != "config" and "DictConfig" in source]
