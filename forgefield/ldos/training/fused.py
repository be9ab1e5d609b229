"""A training step of an LDOS network as few kernels: one for each layer and direction, and one of Adam for each layer.

`kernels/dense/perceptron.py` has the kernels; here are their buffers, tiles and order. The forward kernels gather points, add
biases, apply activations and end with the slope of the loss; a backward kernel makes both products of its layer; Adam runs
beside the next of them and leaves the weights as the kernels read them: padded, in bfloat16 where products are, and for tf32
also transposed. Factors are rounded where `Written`, the oracle, rounds them. Only tf32 and bf16-mixed are made so;
`why_not_fused` says what stands against it, and `GraphsEngine` then captures other steps.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forgefield.ldos.loss import PointLoss
from forgefield.ldos.model import LDOSNetwork
from forgefield.ldos.training.data import RowLayout
from forgefield.ops.products import count_lowered
from forgefield.training.optim.update import Update

PADDED = 128
"""Rows and columns of what kernels read are filled up with zeros to a multiple of it."""
KNOWN_BY_VALUE = ("relu", "leakyrelu")
"""Activations whose derivative is known from their value, rounded or not."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of tiles and how kernels are launched. points, columns: of a tile of a product, columns at most. depth: of a piece
    of its sum. least: tiles become narrower until there are so many. block: entries of a program of Adam."""

    points: int = 64
    columns: int = 128
    depth: int = 64
    warps: int = 4
    stages: int = 4
    least: int = 100
    block: int = 1024
    side: int = 32
    """Rows and columns of a program of Adam where weights are also stored transposed."""
    aside: bool = True
    """Adam runs beside the next backward kernel."""
    rounds: bool = True
    """Factors of tf32 are rounded to the nearest; else the device cuts them off."""

    def shared(self, dtype: torch.dtype) -> int:
        """Bytes of shared memory that a product takes."""
        return self.stages * (self.points + self.columns) * self.depth * dtype.itemsize

    def width(self, n: int, others: int) -> int:
        """Columns of a tile where n columns are to be covered `others` times."""
        width = self.columns
        while width > 32 and others * -(-n // width) < self.least:
            width //= 2
        return width


TILES = {
    torch.bfloat16: (Tiles(depth=128, stages=3), Tiles(columns=64, stages=3)),
    torch.float32: (Tiles(columns=64, stages=3), Tiles(columns=64, depth=32, stages=3)),
}
"""By the type of the factors: the fastest on an H200, and what fits into the shared memory of smaller GPUs."""


def tiles_for(dtype: torch.dtype, device: torch.device) -> Tiles:
    """The first of `TILES` that fits the device."""
    room = 0
    if device.type == "cuda":
        room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return next((tiles for tiles in TILES[dtype] if tiles.shared(dtype) < room), TILES[dtype][-1])


def factors_now() -> torch.dtype | None:
    """Type of the factors of products in the precision that is set now; None: not one that the kernels make."""
    lowered = count_lowered()
    if lowered is not None:
        return lowered if lowered == torch.bfloat16 else None
    return torch.float32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else None


def why_not_fused(model: LDOSNetwork, precision: str, points: int) -> str | None:
    """What stands against kernels of our own for batches of so many points."""
    device = model.weights[0].device
    if precision not in ("tf32", "bf16-mixed"):
        return f"{precision} is made by torch's products"
    if model.dtype != torch.float32:
        return "weights are not float32"
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:
        return "they need an NVIDIA GPU from Ampere on"
    if not _fits(model, points):
        return f"they count entries of a matrix in 32 bits, too few for batches of {points} points"
    return None if importlib.util.find_spec("triton") is not None else "Triton is not installed"


def _fits(model: LDOSNetwork, points: int) -> bool:
    """Whether places in every padded matrix are numbers of 32 bits."""
    widest = _padded(max(size for weight in model.weights for size in weight.shape))
    return max(_padded(points), widest) * widest < 2**31


def _padded(n: int) -> int:
    return -(-n // PADDED) * PADDED


class FusedStep:
    """Steps of up to `points` points. dtype: of factors, float32 (tf32) or bfloat16. update: what follows a gradient; Adam
    without clipping is made by our kernel, all else by `update` itself."""

    def __init__(
        self,
        model: LDOSNetwork,
        loss: PointLoss,
        layout: RowLayout,
        points: int,
        update: Update | None,
        dtype: torch.dtype,
        tiles: Tiles | None = None,
    ) -> None:
        self.model, self.loss, self.layout, self.points, self.dtype = model, loss, layout, points, dtype
        self.tiles = tiles or tiles_for(dtype, model.weights[0].device)
        self.update = update
        self._turns = dtype == torch.float32
        """Whether factors are also stored transposed."""
        self._how = {"TRANSPOSED": self._turns, "ROUNDS": self._turns and self.tiles.rounds}
        self.adam = None if update is None else adam_of(update)
        device = model.weights[0].device
        self.device, self._aside = device, torch.cuda.Stream() if device.type == "cuda" else None
        self.gradients = [torch.zeros_like(p) for p in model.parameters()]
        count, room = len(model.weights), _padded(points)
        self._of_weights, self._of_biases = self.gradients[:count], self.gradients[count:]
        self.widths = [model.weights[0].shape[1], *(bias.shape[0] for bias in model.biases)]
        self._values, self._values_t = self._room([(room, n) for n in self.widths[:-1]])
        self._slopes, self._slopes_t = self._room([(room, n) for n in self.widths[1:]])
        self._copies, self._copies_t = self._room([(weight.shape[0], weight.shape[1]) for weight in model.weights])
        name = model.options.activation
        self._keeps = name not in KNOWN_BY_VALUE
        self._kept = (
            [torch.zeros(v.shape, device=device) for v in self._values[1:]] if self._keeps else self._values[1:]
        )
        self._columns = [torch.zeros(room // self.tiles.points, s.shape[1], device=device) for s in self._slopes]
        """Sums of slopes over each tile of points, (tiles, outputs) of each layer: parts of the gradients of biases."""
        self.sums = torch.zeros(room // self.tiles.points, self.widths[-1], dtype=torch.float64, device=device)
        """Errors of the loss by level, added up for each tile of points until someone clears them."""
        self.refresh()

    def _room(self, shapes: list[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor]]:
        """Padded matrices of factors, and those for their transposes; the same where none are wanted."""
        made = [torch.zeros(_padded(n), _padded(k), dtype=self.dtype, device=self.device) for n, k in shapes]
        return made, [torch.zeros_like(matrix.t().contiguous()) for matrix in made] if self._turns else made

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the weights as they are now: after anything but these steps may have changed them."""
        for copy, turned, weight in zip(self._copies, self._copies_t, self.model.weights):
            factor = rounded_to_tf32(weight) if self._how["ROUNDS"] else weight
            copy[: weight.shape[0], : weight.shape[1]].copy_(factor)
            if self._turns:
                turned[: weight.shape[1], : weight.shape[0]].copy_(factor.t())

    def __call__(
        self, rows: Tensor, index: Tensor, factor: Tensor, weight: Tensor | None, numbers: Tensor | None
    ) -> None:
        """A whole step on rows[index]. factor, weight: as `Gradient` takes them. numbers: (groups, 4), see `Adam.numbers`;
        None: the update is left to the caller, who then calls `refresh`."""
        self._forwards(rows, index, factor, weight)
        for number in reversed(range(len(self._copies))):
            self._backwards(number)
            if numbers is not None:
                self._adapt(number, numbers)
        if numbers is None:
            self.add_up()
        elif self._aside is not None and self.tiles.aside:
            torch.cuda.current_stream().wait_stream(self._aside)

    def add_up(self) -> None:
        """Make `gradients` complete: of biases Adam needs no more than parts."""
        for columns, gradient in zip(self._columns, self._of_biases):
            torch.sum(columns[:, : len(gradient)], 0, out=gradient)

    def _forwards(self, rows: Tensor, index: Tensor, factor: Tensor, weight: Tensor | None) -> None:
        from forgefield.kernels.dense import perceptron as kernels

        tiles, widths, options, last = self.tiles, self.widths, self.model.options, len(self._copies) - 1
        launch = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        high = self._values[0].shape[0] // tiles.points
        launch |= {"BM": tiles.points, "BK": tiles.depth, **self._how}
        common = {"NAME": options.activation, "KEEPS": self._keeps, **launch}
        for number in range(last):
            x, y, w, n = self._values[number], self._values[number + 1], self._copies[number], widths[number + 1]
            x_t, y_t = self._values_t[number], self._values_t[number + 1]
            bias, kept, wide = self.model.biases[number], self._kept[number], tiles.width(n, high)
            grid = (high, -(-n // wide))
            if number:
                kernels.inner_layer[grid](
                    x, w, bias, y, y_t, kept, n, widths[number], x.stride(0), w.stride(0), y.stride(0), y_t.stride(0), BN=wide,
                    **common,
                )  # fmt: skip
            else:
                kernels.first_layer[grid](
                    rows, index, w, bias, x, x_t, y, y_t, kept, self.points, n, self.layout.targets_at, rows.stride(0),
                    w.stride(0), x.stride(0), y.stride(0), y_t.stride(0), BN=wide, **{**common, "BK": min(tiles.depth, 64)},
                )  # fmt: skip
        x, w, slope, n = self._values[last], self._copies[last], self._slopes[last], widths[-1]
        slope_t, wide = self._slopes_t[last], tiles.width(n, high)
        kernels.last_layer[(high, -(-n // wide))](
            x, w, self.model.biases[last], rows, index, factor if weight is None else weight, factor, slope, slope_t,
            self._columns[last], self.sums, self.points, n, widths[last], self.layout.targets_at, rows.stride(0), x.stride(0),
            w.stride(0), slope.stride(0), slope_t.stride(0), self.sums.stride(0), float(self.loss.delta),
            NAME=options.output_activation or "none", LOSS=self.loss.kind, WEIGHTED=weight is not None, BN=wide, **launch,
        )  # fmt: skip

    def _backwards(self, number: int) -> None:
        from forgefield.kernels.dense import perceptron as kernels

        tiles, n, k = self.tiles, self.widths[number + 1], self.widths[number]
        slope, slope_t = self._slopes[number], self._slopes_t[number]
        x, w = self._values_t[number], self._copies_t[number]
        kept, below, below_t, columns = x, x, x, x
        if number:
            kept, below, below_t = self._kept[number - 1], self._slopes[number - 1], self._slopes_t[number - 1]
            columns = self._columns[number - 1]
        high, tall = slope.shape[0] // tiles.points, -(-n // tiles.points)
        of_slopes = high * -(-k // tiles.columns) if number else 0
        wide = tiles.width(k, tall) if tall * -(-k // tiles.columns) + of_slopes < tiles.least else tiles.columns
        of_weights = tall * -(-k // wide)
        kernels.layer_backwards[(of_weights + of_slopes,)](
            slope, slope_t, w, x, kept, below, below_t, columns, self._of_weights[number], slope.shape[0], n, k,
            slope.stride(0), w.stride(0), x.stride(0), kept.stride(0), slope_t.stride(0), of_weights,
            NAME=self.model.options.activation, KEEPS=self._keeps, **self._how, BN=tiles.points, BK=wide, BP=tiles.depth,
            XM=tiles.points, XK=tiles.columns, XN=tiles.depth, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip

    def _adapt(self, number: int, numbers: Tensor) -> None:
        assert self.adam is not None
        if self._aside is None or not self.tiles.aside:
            self.adam(self, number, numbers)
            return
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            self.adam(self, number, numbers)


def rounded_to_tf32(values: Tensor) -> Tensor:
    """The nearest numbers of tf32, as float32; halves away from 0, NaN as it is."""
    bits = (values.view(torch.int32) + 0x1000) & -0x2000
    return torch.where(values == values, bits.view(torch.float32), values)


class FusedGradient:
    """The gradient of a `FusedStep` as a `Gradient`, for comparisons. Rows must be packed as its layout says."""

    def __init__(self, step: FusedStep) -> None:
        self.step, self.gradients = step, step.gradients

    def __call__(self, inputs: Tensor, targets: Tensor, factor: Tensor, weight: Tensor | None) -> Tensor:
        step = self.step
        rows = inputs.as_strided((len(inputs), step.layout.width), (inputs.stride(0), 1))
        step.sums.zero_()
        step(rows, torch.arange(len(inputs), device=inputs.device), factor, weight, None)
        return step.sums.sum(0)


class Adam:
    """The update of torch's Adam and AdamW on the state that the optimiser holds, and of the average of the weights.

    What depends on the number of a step is computed on the host and read from the device; the counts of the optimiser are moved
    on by `count` after so many steps.
    """

    def __init__(self, update: Update) -> None:
        self.update, self.optimiser = update, update.optimiser
        group = self.optimiser.param_groups[0]
        self.betas, self.eps, self.decay = group["betas"], group["eps"], group["weight_decay"]
        self.decoupled = isinstance(self.optimiser, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
        self._groups = {p: n for n, g in enumerate(self.optimiser.param_groups) for p in g["params"]}
        steps = {float(self.optimiser.state[p]["step"]) for p in self._groups}
        self._before = int(max(steps)) - update.calls
        """Steps of the optimiser before the first call of `update`."""

    def numbers(self, rates: Sequence[Sequence[float]], shares: Sequence[float]) -> Tensor:
        """(steps, groups, 4) float32, of the steps that follow: rate, rate over the correction of the first moment, one over
        the root of that of the second, share of the average."""
        beta1, beta2 = self.betas
        found = []
        for ahead, (of_groups, share) in enumerate(zip(rates, shares), 1):
            step = self._before + self.update.calls + ahead
            first, second = 1 - beta1**step, (1 - beta2**step) ** 0.5
            found.append([[rate, rate / first, 1 / second, share] for rate in of_groups])
        return torch.tensor(found, dtype=torch.float64).to(torch.float32)

    def count(self, steps: int) -> None:
        """So many steps were made."""
        self.update.calls += steps
        torch._foreach_add_([self.optimiser.state[p]["step"] for p in self._groups], float(steps))

    def __call__(self, step: FusedStep, number: int, numbers: Tensor) -> None:
        from forgefield.kernels.dense import perceptron as kernels

        model, average = step.model, self.update.average
        tensors: list[Any] = []
        for kind, parameter in (("weights", model.weights[number]), ("biases", model.biases[number])):
            state = self.optimiser.state[parameter]
            mean = parameter if average is None else average.average[f"{kind}.{number}"]
            tensors += [parameter, state["exp_avg"], state["exp_avg_sq"], mean]
        places = [numbers[self._groups[kept[number]]] for kept in (model.weights, model.biases)]
        (n, k), copy, copy_t = model.weights[number].shape, step._copies[number], step._copies_t[number]
        columns, block, side = step._columns[number], step.tiles.block, step.tiles.side
        of_weights = -(-n // side) * -(-k // side) if step._turns else -(-n * k // block)
        kernels.adam_on_layer[(of_weights + -(-n // block),)](
            *tensors, step._of_weights[number], columns, copy, copy_t, n, k, copy.stride(0), copy_t.stride(0),
            columns.stride(0), len(columns), *places, self.betas[0], 1 - self.betas[0], self.betas[1], 1 - self.betas[1],
            self.eps, self.decay, of_weights, DECOUPLED=self.decoupled, AVERAGED=average is not None, **step._how,
            SIDE=side, BLOCK=block, num_warps=4,
        )  # fmt: skip


def adam_of(update: Update) -> Adam | None:
    """Our kernel for what an update does, where it does nothing else."""
    optimiser, same = update.optimiser, ("betas", "eps", "weight_decay")
    groups = optimiser.param_groups
    plain = type(optimiser) in (torch.optim.Adam, torch.optim.AdamW) and not any(
        group["amsgrad"] or group["maximize"] or group["differentiable"] for group in groups
    )
    if not plain or update.clip[0] or update.reduce is not None or not update.has_states:
        return None
    if any(group[key] != groups[0][key] for group in groups for key in same):
        return None
    states = [optimiser.state[p] for group in groups for p in group["params"]]
    one_count = len({float(state["step"]) for state in states}) == 1
    return Adam(update) if one_count and all(p.is_contiguous() for p in update.average_and_weights()) else None
