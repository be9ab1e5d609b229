"""Which weights are trained and how fast: frozen parts, learning rates by part, and low-rank changes of frozen matrices (LoRA).

Parts are named by patterns of parameter names as `state_dict` has them: `model.*` is the encoder, `heads.of_gap.*` a head. A
pattern without a star means the parameter of that name and all below it. One that matches nothing is refused.
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
    """Take the gradient from all parameters that match. Returns their names."""
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    frozen = [name for pattern in patterns for name in _matching(pattern, names, "training.freeze")]
    for name, parameter in module.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    return sorted(set(frozen))


def require_trained(module: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ForgefieldError(
            "training.freeze matches every parameter, so nothing would be trained; leave out what is to learn, such as heads.*."
        )


def choose_trained(
    module: nn.Module, training: TrainingOptions, notify: Callable[[str], None] = lambda text: None
) -> None:
    """Apply `training.freeze` and `training.lora` to a model, and say how much of it is trained. training: that section."""
    lora = training.lora
    frozen = freeze(module, training.freeze) if training.freeze else []
    if lora is not None:
        changed = add_low_rank(module, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
        notify(
            f"training.lora: changes of rank {lora.rank} of {len(changed)} matrices are trained, the matrices are not."
        )
    if training.freeze or lora is not None:
        require_trained(module)
        counts = [p.numel() for p in module.parameters() if p.requires_grad]
        notify(f"{sum(counts)} parameters are trained; frozen: {len(frozen)} tensors, named by training.freeze.")


def parameter_groups(module: nn.Module, factors: Mapping[str, float], lr: float) -> list[dict[str, Any]]:
    """Groups for an optimiser: trained parameters with `lr` times the factor of the first pattern that they match, and `factor`
    itself. Those that match none come first."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    plain = {name: plain_name(name) for name in trained}
    left, groups = list(trained), []
    for pattern, factor in factors.items():
        known = _matching(pattern, list(plain.values()), "training.lr_groups")
        chosen = [name for name in left if plain[name] in known]
        if not chosen:
            raise ForgefieldError(
                f"training.lr_groups.{pattern}: a pattern before it names all that it matches; put the narrower one first."
            )
        left = [name for name in left if name not in chosen]
        groups.append({"params": [trained[name] for name in chosen], "lr": lr * factor, "factor": float(factor)})
    rest = [{"params": [trained[name] for name in left], "lr": lr, "factor": 1.0}] if left else []
    return rest + groups


def plain_name(name: str) -> str:
    """Of a parameter, without what a low-rank change adds to it."""
    before, found, after = name.partition(_LOW_RANK)
    return f"{before}.{after.split('.')[0]}" if found else name


def _matching(pattern: str, names: Sequence[str], setting: str) -> list[str]:
    found = [name for name in names if fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")]
    if not found:
        parts = sorted({name.rsplit(".", depth)[0] for name in names for depth in range(name.count(".") + 1)})
        hint = did_you_mean(pattern, parts) or f" It has: {', '.join(_top(names))}."
        raise ForgefieldError(f"{setting}: no trained parameter of the model matches '{pattern}'.{hint}")
    return found


def _top(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(".".join(name.split(".")[:2]) for name in names))


class LowRank(nn.Module):
    """matrix + factor * down @ up, with `down` (n_in, rank) and `up` (rank, n_out); it starts as the matrix itself.

    Of a stack of matrices (..., n_in, n_out) each has a change of its own.
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
    """Freeze the matrices that match and train a change of that rank for each. Returns their names.

    alpha: the change is multiplied by alpha / rank; None: by one. targets: patterns; None: all matrices of the encoder.
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
    """Parameters that are matrices or stacks of them; biases of networks that stand side by side are neither."""
    for name, parameter in module.named_parameters():
        owner_name, _, attribute = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        stacks_vectors = isinstance(owner, StackedNetworks) and attribute not in owner.matrices
        if parameter.dim() >= 2 and not stacks_vectors:
            yield name, parameter


def _matrices(pattern: str, names: Sequence[str], rank: int) -> list[str]:
    found = [name for name in names if fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")]
    if not found:
        hint = did_you_mean(pattern, names) or f" There are: {', '.join(names[:12]) or 'none'}."
        raise ForgefieldError(
            f"training.lora.targets: no weight matrix of the model that is larger than rank {rank} matches '{pattern}'.{hint}"
        )
    return found


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """The state dict with low-rank changes added to their matrices: what the same module without them would have."""
    state = module.state_dict()
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        plain = plain_name(name)
        if plain == name:
            result[name] = tensor
        elif plain not in result:
            owner, _, attribute = plain.rpartition(".")
            result[plain] = getattr(module.get_submodule(owner), attribute).detach()
    return result
