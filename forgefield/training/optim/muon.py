"""Muon (Jordan et al., 2024): the steps of weight matrices are orthogonalised; everything else is trained by AdamW.

The momentum of a matrix is replaced by the nearest matrix with equal singular values, approximately: by a few steps of a
polynomial iteration. As usual, matrices of hidden layers take these steps; embeddings, readouts, heads, biases and everything
that is not a matrix are left to AdamW. A parameter that holds several matrices (linear maps between irreps, stacks of networks)
takes a step for each of them.

The formulas are those of `torch.optim.Muon`, which accepts nothing but two-dimensional parameters and computes the iteration in
bfloat16. Here it has the precision of the weights: gradients of one and of several processes differ in the last digits, and
bfloat16 would turn that into different steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from forgefield.errors import ForgefieldError
from forgefield.models.interface import StackedNetworks
from forgefield.ops.linear import IrrepsLinear
from forgefield.training.optim.stepping import SteppingOptimiser

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the polynomial, whose slope at zero is as large as it can be."""
EPSILON = 1e-7
"""Least norm by which a matrix is divided."""
NOT_HIDDEN = ("*embed*", "*readout*", "heads.*")
"""Parameters that are trained by AdamW although they are matrices."""
VECTORS = ("b", "bias", "idt")
"""Last parts of the names of parameters that are never matrices."""
Matrices = list[tuple[int, int, float]]
"""Rows, columns and factor of the step of each matrix that a parameter holds, one after another."""


class Muon(SteppingOptimiser):
    """Muon for matrices and AdamW for the rest.

    params: parameters or groups; those with the key `matrices`, a list with one entry for each parameter, take Muon's steps,
    and other groups AdamW's. lr: of both. momentum, nesterov, weight_decay (decoupled), ns_steps: of Muon. adamw_betas,
    adamw_eps, adamw_weight_decay: of AdamW. `muon_groups` makes the groups of a model.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adamw_betas: Sequence[float] = (0.9, 0.95),
        adamw_eps: float = 1e-10,
        adamw_weight_decay: float = 0.0,
    ) -> None:
        if not (0 <= momentum < 1 and all(0 <= beta < 1 for beta in adamw_betas) and len(adamw_betas) == 2):
            raise ValueError("momentum and both adamw_betas must be at least 0 and below 1")
        if not 0 < ns_steps < 100:
            raise ValueError(f"ns_steps must be between 1 and 99, not {ns_steps}")
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps,
            "adamw_betas": tuple(adamw_betas), "adamw_eps": adamw_eps, "adamw_weight_decay": adamw_weight_decay,
            "matrices": None, "capturable": False,
        }  # fmt: skip
        super().__init__(params, defaults)

    def take_step(self) -> None:
        for group in self.param_groups:
            places = [number for number, parameter in enumerate(group["params"]) if parameter.grad is not None]
            if places and group["matrices"] is not None:
                self._orthogonal_steps(group, places)
            elif places:
                self._adamw_steps(group, [group["params"][number] for number in places])

    def _orthogonal_steps(self, group: dict[str, Any], places: Sequence[int]) -> None:
        """places: numbers of the parameters with a gradient."""
        parameters = [group["params"][number] for number in places]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters]
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        moments = torch._foreach_lerp(gradients, buffers, group["momentum"]) if group["nesterov"] else buffers
        steps = orthogonal_steps(moments, [group["matrices"][number] for number in places], group["ns_steps"])
        for parameter, step in zip(parameters, steps):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(step * group["lr"])

    def _adamw_steps(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                device = parameter.device if group["capturable"] else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        first, second = group["adamw_betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=True,
            capturable=group["capturable"],
            amsgrad=False,
            beta1=first,
            beta2=second,
            lr=group["lr"],
            weight_decay=group["adamw_weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )


def orthogonal_steps(moments: Sequence[Tensor], matrices: Sequence[Matrices], ns_steps: int) -> list[Tensor]:
    """Steps for a learning rate of 1, of the shapes of the moments. Matrices of one shape are computed together."""
    parts: dict[tuple[int, int], list[Tensor]] = {}
    places: list[list[tuple[tuple[int, int], int, bool, float]]] = []
    for moment, entries in zip(moments, matrices):
        of_moment = []
        pieces = moment.reshape(-1).split([rows * columns for rows, columns, _ in entries])
        for piece, (rows, columns, factor) in zip(pieces, entries):
            matrix, wide = piece.view(rows, columns), rows <= columns
            shape = (min(rows, columns), max(rows, columns))
            same = parts.setdefault(shape, [])
            of_moment.append((shape, len(same), wide, factor))
            same.append(matrix if wide else matrix.T)
        places.append(of_moment)
    results = {shape: orthogonalised(torch.stack(same), ns_steps) for shape, same in parts.items()}
    steps = []
    for moment, of_moment in zip(moments, places):
        found = [(results[shape][number], wide, factor) for shape, number, wide, factor in of_moment]
        flat = [factor * (matrix if wide else matrix.T).reshape(-1) for matrix, wide, factor in found]
        steps.append(torch.cat(flat).view(moment.shape))
    return steps


def orthogonalised(matrices: Tensor, steps: int) -> Tensor:
    """(n, rows, columns), rows <= columns -> matrices with the same singular vectors and singular values near one."""
    a, b, c = COEFFICIENTS
    x: Tensor = matrices / torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def muon_groups(
    module: nn.Module,
    parameters: Sequence[Any],
    *,
    lr: float,
    adamw: Sequence[str] | None = None,
    adamw_factor: float = 1.0,
    scale_by: str = "outputs",
) -> list[dict[str, Any]]:
    """Groups for `Muon`: each of the given ones, divided into matrices and others.

    parameters: parameters of the module, or groups of them with `lr` and `factor`.
    adamw: patterns of names of matrices that AdamW trains. Default: `NOT_HIDDEN`.
    adamw_factor: learning rate of AdamW, in units of Muon's.
    scale_by: steps are multiplied by sqrt(outputs / inputs) where that is above 1, or by sqrt(inputs / outputs) as in NequIP.
    """
    known = {id(parameter): found for parameter, found in _hidden_matrices(module, adamw, scale_by)}
    groups = [dict(item) for item in parameters if isinstance(item, dict)] or [{"params": list(parameters)}]
    result = []
    for group in groups:
        members, factor = list(group["params"]), group.get("factor", 1.0)
        hidden = [parameter for parameter in members if id(parameter) in known]
        others = [parameter for parameter in members if id(parameter) not in known]
        if hidden:
            result.append(group | {"params": hidden, "matrices": [known[id(parameter)] for parameter in hidden]})
        if others:
            rate, of_others = group.get("lr", lr) * adamw_factor, factor * adamw_factor
            decay = {"adamw_weight_decay": group["weight_decay"]} if "weight_decay" in group else {}
            result.append(group | decay | {"params": others, "lr": rate, "factor": of_others})
    return result


def _hidden_matrices(
    module: nn.Module, adamw: Sequence[str] | None, scale_by: str
) -> list[tuple[nn.Parameter, Matrices]]:
    """Parameters that hold matrices of hidden layers."""
    named = dict(module.named_parameters())
    for pattern in adamw or []:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ForgefieldError(f"training.optimizer.adamw: no parameter of the model matches '{pattern}'.")
    excluded = NOT_HIDDEN if adamw is None else adamw
    found = []
    for name, parameter in named.items():
        if any(fnmatchcase(name, pattern) for pattern in excluded):
            continue
        sizes = _matrices_of(module, name, parameter)
        if sizes:
            found.append((parameter, [_with_factor(*size, scale_by) for size in sizes]))
    return found


def _matrices_of(module: nn.Module, name: str, parameter: nn.Parameter) -> list[tuple[int, int, bool]]:
    """Rows and columns of each matrix that a parameter holds, and whether rows are inputs; empty if it holds none."""
    owner_name, _, attribute = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    if isinstance(owner, IrrepsLinear) and attribute == "weight":
        return [(n_in, n_out, True) for n_in, n_out in owner.channels]
    if isinstance(owner, StackedNetworks):
        is_stack = attribute in owner.matrices and parameter.dim() == 3
        count, rows, columns = parameter.shape if is_stack else (0, 0, 0)
        return [(rows, columns, True)] * count
    if parameter.dim() != 2 or min(parameter.shape) < 2 or attribute in VECTORS or isinstance(owner, nn.Embedding):
        return []
    if isinstance(owner, nn.ParameterList):
        owner = module.get_submodule(owner_name.rpartition(".")[0])
    # torch's layers store (out, in), Forgefield's (in, out) unless they say otherwise.
    ours = type(owner).__module__.startswith("forgefield.") and not getattr(owner, "weights_are_out_in", False)
    return [(parameter.shape[0], parameter.shape[1], ours)]


def _with_factor(rows: int, columns: int, rows_are_inputs: bool, scale_by: str) -> tuple[int, int, float]:
    ratio = columns / rows if rows_are_inputs == (scale_by == "outputs") else rows / columns
    return rows, columns, math.sqrt(max(1.0, ratio))
