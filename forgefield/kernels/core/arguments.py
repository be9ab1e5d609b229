"""Tables of kernel arguments, one for each family of generated kernels.

A table is the only list of its family's arguments: the code generator writes the signature from it, and the launcher passes
arguments by the same names. A name that is misspelt, missing or left over is an error that names it. Hand-written kernels need
no table: they are launched with keyword arguments, so that the signature of the function is the table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

LaunchArguments = dict[str, Any]
"""Tensors and numbers by the names that a kernel has for them."""


class ArgumentTable:
    """arguments: what each argument is, by name, in the order of the signature."""

    def __init__(self, **arguments: str) -> None:
        self.arguments = arguments

    def __iter__(self) -> Iterator[str]:
        return iter(self.arguments)

    @property
    def signature(self) -> str:
        """The names as they stand between the parentheses of a definition or of a call."""
        return ", ".join(self.arguments)

    def bind(
        self, kernel: str, given: Mapping[str, Any], *, unused: Any = None, used: Collection[str] | None = None
    ) -> LaunchArguments:
        """Keyword arguments of a launch, for every name of the table.

        kernel: for messages.
        given: values by name.
        unused: any tensor; arguments that the kernel does not use are launched with it.
        used: names that the kernel uses, all of which have to be given; None: every name of the table.
        """
        unknown = [name for name in given if name not in self.arguments]
        if unknown:
            raise TypeError(f"{kernel}() has no argument '{unknown[0]}'; its arguments are {self.signature}")
        missing = [name for name in (self.arguments if used is None else used) if name not in given]
        if missing:
            raise TypeError(f"{kernel}() needs the argument '{missing[0]}'")
        return {name: given.get(name, unused) for name in self.arguments}
