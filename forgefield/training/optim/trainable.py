"""Which weights are trained and how fast: frozen parameters, learning rates of groups, and low-rank adaptation (LoRA).

Parameters are selected by patterns of their names in `state_dict`: `model.*` is the encoder, `heads.of_gap.*` a head. A pattern
without a star matches the parameter of that name, or all parameters of the module of that name. A pattern without any match is
an error.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from forgefield.config.nearest import did_you_mean
from forgefield.errors import ForgefieldError
from forgefield.models.interface import StackedNetworks
from forgefield.training.options import TrainingOptions

_LOW_RANK = ".parametrizations."


def freeze(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freeze all parameters that match a pattern, and return their names."""
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    frozen = [name for pattern in patterns for name in _matching(pattern, names, "training.freeze")]
    for name, parameter in module.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    return sorted(set(frozen))


def require_trained(module: nn.Module) -> None:
    """Raise ForgefieldError if no parameter is trained."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ForgefieldError(
            "training.freeze matches every parameter, so nothing would be trained; exclude some parameters, such as heads.*."
        )


def choose_trained(
    module: nn.Module, training: TrainingOptions, notify: Callable[[str], None] = lambda text: None
) -> None:
    """Apply `training.freeze` and `training.lora` to a model, and report the number of trained parameters."""
    lora = training.lora
    frozen = freeze(module, training.freeze) if training.freeze else []
    if lora is not None:
        changed = add_low_rank(module, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
        notify(
            f"training.lora: changes of rank {lora.rank} of {len(changed)} matrices are trained instead of the matrices."
        )
    if training.freeze or lora is not None:
        require_trained(module)
        counts = [p.numel() for p in module.parameters() if p.requires_grad]
        notify(f"{sum(counts)} parameters are trained; {len(frozen)} tensors are frozen by training.freeze.")


def parameter_groups(module: nn.Module, factors: Mapping[str, float], lr: float) -> list[dict[str, Any]]:
    """Groups of trained parameters for an optimiser, each with its rate `lr` and `factor`.

    factors: of the learning rate, by pattern; the first match counts. Parameters without a match are the first group.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    original = {name: original_name(name) for name in trained}
    remaining, groups = list(trained), []
    for pattern, factor in factors.items():
        matches = _matching(pattern, list(original.values()), "training.lr_groups")
        chosen = [name for name in remaining if original[name] in matches]
        if not chosen:
            raise ForgefieldError(
                f"training.lr_groups.{pattern}: everything that it matches is matched by an earlier pattern; put the more "
                "specific one first."
            )
        remaining = [name for name in remaining if name not in chosen]
        groups.append({"params": [trained[name] for name in chosen], "lr": lr * factor, "factor": float(factor)})
    others = [{"params": [trained[name] for name in remaining], "lr": lr, "factor": 1.0}] if remaining else []
    return others + groups


def original_name(name: str) -> str:
    """The name of a parameter without low-rank adaptation."""
    module, separator, parameter = name.partition(_LOW_RANK)
    return f"{module}.{parameter.split('.')[0]}" if separator else name


def _matching(pattern: str, names: Sequence[str], setting: str) -> list[str]:
    """Names that match. Raises ForgefieldError if there is none."""
    if not (matches := _select(pattern, names)):
        prefixes = sorted({name.rsplit(".", depth)[0] for name in names for depth in range(name.count(".") + 1)})
        modules = dict.fromkeys(".".join(name.split(".")[:2]) for name in names)
        hint = did_you_mean(pattern, prefixes) or f" It has: {', '.join(modules)}."
        raise ForgefieldError(f"{setting}: no trained parameter of the model matches '{pattern}'.{hint}")
    return matches


def _select(pattern: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")]


class LowRank(nn.Module):
    """matrix + factor * down @ up, with `down` (n_in, rank) and `up` (rank, n_out), which is initially zero.

    Every matrix of a stack (..., n_in, n_out) has its own change.
    """

    def __init__(self, name: str, matrix: Tensor, rank: int, factor: float) -> None:
        super().__init__()
        *stack, n_in, n_out = matrix.shape
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        first = torch.randn(*stack, n_in, rank, generator=generator, dtype=torch.float64) / math.sqrt(n_in)
        self.factor = factor
        self.down = nn.Parameter(first.to(matrix))
        self.up = nn.Parameter(torch.zeros(*stack, rank, n_out, dtype=matrix.dtype, device=matrix.device))

    def forward(self, matrix: Tensor) -> Tensor:
        return matrix + self.factor * (self.down @ self.up)


def add_low_rank(module: nn.Module, *, rank: int, alpha: float | None, targets: Sequence[str] | None) -> list[str]:
    """Freeze the matrices that match, train a low-rank change of each, and return their names.

    alpha: changes are multiplied by alpha / rank; None: by one.
    targets: patterns; None for all matrices of the encoder.
    """
    matrices = {name: p for name, p in _all_matrices(module) if min(p.shape[-2:]) > rank}
    chosen = list(dict.fromkeys(n for t in targets or ["model.*"] for n in _matrices(t, list(matrices), rank)))
    for name in chosen:
        owner_name, _, attribute = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        change = LowRank(name, matrices[name].detach(), rank, 1.0 if alpha is None else alpha / rank)
        matrices[name].requires_grad_(False)
        parametrize.register_parametrization(owner, attribute, change)
    return chosen


def _all_matrices(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that are matrices or stacks of matrices, without stacks of bias vectors."""
    for name, parameter in module.named_parameters():
        owner_name, _, attribute = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        stacks_vectors = isinstance(owner, StackedNetworks) and attribute not in owner.matrices
        if parameter.dim() >= 2 and not stacks_vectors:
            yield name, parameter


def _matrices(pattern: str, names: Sequence[str], rank: int) -> list[str]:
    if not (matches := _select(pattern, names)):
        hint = did_you_mean(pattern, names) or f" Available: {', '.join(names[:12]) or 'none'}."
        raise ForgefieldError(
            f"training.lora.targets: no weight matrix of the model that is larger than rank {rank} matches '{pattern}'.{hint}"
        )
    return matches


def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict with low-rank changes added to their matrices: that of the same module without them."""
    result: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        original = original_name(name)
        if original == name:
            result[name] = tensor
        elif original not in result:
            owner, _, attribute = original.rpartition(".")
            result[original] = getattr(module.get_submodule(owner), attribute).detach()
    return result
