"""The weights of an ensemble: those of all members in one file, with names that begin with the number of the member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from forgefield.runs.record import MEMBERS

if TYPE_CHECKING:
    import torch


def joined_states(states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The weights of all members of an ensemble, as its files hold them."""
    return {
        f"{MEMBERS}.{number}.{name}": tensor for number, state in enumerate(states) for name, tensor in state.items()
    }


def member_state(state: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """The weights of one member of an ensemble."""
    prefix = f"{MEMBERS}.{number}."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
