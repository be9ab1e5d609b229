"""The exception whose message users read: a plain sentence that says what is wrong and what to do."""

from __future__ import annotations

import re


class ForgefieldError(Exception):
    """An error that the user can fix. The message says where it is (file, key, frame) and what would be right."""


class SourceUnreadable(ForgefieldError):
    """A source of data that could not be read, as opposed to one that holds something wrong: trying again may help."""


def missing_package(error: ImportError) -> str | None:
    """A sentence about the Python package that an import needed, with the command that installs it; None where no package of
    others is missing."""
    found = re.search(r"No module named '([\w.]+)'|import of ([\w.]+) halted|Requirement '([\w.-]+)", str(error))
    name = error.name or (next(filter(None, found.groups())) if found else None)
    package = (name or "").partition(".")[0]
    if package in ("", "forgefield"):
        return None
    return f"this needs the Python package {package}, which is not installed: pip install {_PIP.get(package, package)}"


_PIP = {"torch_geometric": "torch-geometric", "openpmd_api": "openpmd-api", "yaml": "pyyaml", "sklearn": "scikit-learn"}
"""Packages whose name in pip is another one."""
